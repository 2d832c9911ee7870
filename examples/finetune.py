"""LoRA with attention in 8 bits: SmolLM2-135M learns a passage by heart, beside bf16 attention.

The model and the text are those of `language_model.py`; `make language-model` installs the weights. Where they are not
installed, a tiny Llama with random weights, SmolLM2's architecture, reads the text's bytes: this shows the steps, and
nothing about a trained model. Adapters of the library peft are on the projections of attention. All begin with the same
adapters, and read the passage in the same order.

What makes the attention of a transformers model one of 8 bits, also where it is trained, is

    ha.register_transformers()
    model.set_attn_implementation("helion_fp8")

Fails if a preset does not learn, or ends further from bf16's loss than a tenth of what that fell by. Without a GPU the
kernels run in Helion's interpreter, on a short passage and BALANCED alone, in about a minute.

    python examples/finetune.py [--device cuda] [--parts 8] [--context 2048] [--steps 64] [--tiny]
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

import torch
from language_model import attend_with, load, stock
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import helion_attn as ha
from helion_attn.types import RecipeName

#: The passage's parts, the tokens of each, and steps of one part each, on a GPU and on a CPU.
SIZES = {"cuda": (8, 2048, 64), "cpu": (1, 128, 5)}

PRESETS: dict[str, tuple[RecipeName, ...]] = {"cuda": ("balanced", "fast"), "cpu": ("balanced",)}

#: How far a preset's last loss may be from bf16's, over what that fell by.
MOST_APART = 0.1

LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
RATE = 2e-3

#: SmolLM2's architecture, of a few numbers; tokens are bytes.
TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=32,
    tie_word_embeddings=True,
    initializer_range=0.1,
)


def load_tiny(device: str) -> tuple[Any, torch.Tensor]:
    """A model with random weights, and the text's bytes."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    return LlamaForCausalLM(TINY).to(device, dtype), torch.tensor(list(text), device=device)


@dataclass(frozen=True)
class Run:
    """Losses of the passage, nats a token, before and after; and the seconds that steps took."""

    before: float
    after: float
    seconds: float


def loss_of(model: Any, parts: torch.Tensor) -> float:
    """Of all parts, the mean."""
    with torch.no_grad():
        return torch.stack([model(part[None], labels=part[None]).loss for part in parts]).mean().item()


def finetune(base: Any, parts: torch.Tensor, steps: int) -> Run:
    """Train adapters on the passage [parts, tokens] with the attention that the model has, and take them off again."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it gave up
        model: Any = get_peft_model(base, LORA)
    learned = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(learned, RATE)
    before, started = loss_of(model, parts), time.perf_counter()
    for step in range(steps):
        part = parts[step % len(parts)][None]
        model(part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run = Run(before, loss_of(model, parts), time.perf_counter() - started)
    model.unload()
    return run


def main(argv: list[str] | None = None) -> int:
    """Train with every attention and print the losses; return 1 if a preset's are not bf16's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if ha.is_supported("cuda") else "cpu")
    parser.add_argument("--parts", type=int, help="of the passage; by default 8, on the CPU 1")
    parser.add_argument("--context", type=int, help="tokens of each part; by default 2048, on the CPU 128")
    parser.add_argument("--steps", type=int, help="of one part each; by default 64, on the CPU 5")
    parser.add_argument("--tiny", action="store_true", help="take the tiny model, also where weights are installed")
    args = parser.parse_args(argv)
    device = torch.device(args.device).type
    count, context, steps = (
        given or default for given, default in zip((args.parts, args.context, args.steps), SIZES[device], strict=True)
    )
    console = Console(width=160, highlight=False)
    try:
        base, tokens = load_tiny(args.device) if args.tiny else load(args.device)
        name = "a tiny Llama with random weights" if args.tiny else "SmolLM2-135M"
    except ModuleNotFoundError as error:
        console.print(f"{error}; a tiny Llama with random weights instead")
        (base, tokens), name = load_tiny(args.device), "a tiny Llama with random weights"
    parts = tokens[: count * context].view(count, context)
    console.print(f"LoRA of {name} on {count} x {context} tokens, {steps} steps, on {args.device}")

    attend_with(base, stock)
    bf16 = finetune(base, parts, steps)
    console.print(f"{'bf16':10} loss {bf16.before:.4f} -> {bf16.after:.4f}; {bf16.seconds:.1f} s")
    ok = True
    for recipe in PRESETS[device]:
        ha.register_transformers(recipe=recipe)
        base.set_attn_implementation("helion_fp8")
        run = finetune(base, parts, steps)
        fine = run.after < run.before and abs(run.after - bf16.after) <= MOST_APART * abs(bf16.before - bf16.after)
        ok &= fine
        verdict = "[green]ok[/]" if fine else "[red]FAILED[/]"
        console.print(
            f"{recipe.upper():10} loss {run.before:.4f} -> {run.after:.4f}; {run.seconds:.1f} s; from bf16's by "
            f"{run.after - bf16.after:+.4f}, at most {MOST_APART * abs(bf16.before - bf16.after):.4f}  {verdict}"
        )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
