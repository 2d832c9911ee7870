"""What `torch.utils.flop_counter` counts of attention: both products, in head dims that are not padded.

Scores that a mask hides count, as in PyTorch's own attention. Packed sequences and a cache count by each sequence's
length, which is read on the host. Fake tensors have no lengths: all that they could hold counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.problem import AttentionArgs, DecodeArgs, MultiRankArgs

if TYPE_CHECKING:
    from helion_attn.problem import DenseArgs, VarlenArgs


def _products(scores: int, D: int, D_v: int) -> int:
    return 2 * scores * (D + D_v)


def _has_values(x: torch.Tensor) -> bool:
    return not isinstance(x, FakeTensor) and x.device.type != "meta"


def of_attention_quantized(a: AttentionArgs) -> int:
    """Count FLOPs of attention on packed tensors."""
    B, H = a.packed.q_descale.shape[:2]
    return _products(B * H * a.m_len * a.n_len, a.d, a.d_v)


def of_backward(a: AttentionArgs) -> int:
    """Count FLOPs of the backward pass: three products of head dim D, and two of D_v."""
    B, H = a.packed.q_descale.shape[:2]
    return 2 * B * H * a.m_len * a.n_len * (3 * a.d + 2 * a.d_v)


def of_attention(a: DenseArgs) -> int:
    """Count FLOPs of attention on unquantised tensors, BHSD."""
    B, H, M, D = a.q.shape
    return _products(B * H * M * a.k.size(2), D, a.v.size(3))


def of_attention_varlen(a: VarlenArgs) -> int:
    """Count FLOPs of attention on packed sequences."""
    (M, H, D), N = a.q.shape, a.k.size(0)
    pairs = M * N
    if _has_values(a.cu_seqlens_q):
        queries, keys = (x.long().diff().clamp_min(0) for x in (a.cu_seqlens_q, a.cu_seqlens_k))
        pairs = int((queries * keys).sum())
    return _products(H * pairs, D, a.v.size(2))


def of_attention_multi_rank(a: MultiRankArgs) -> int:
    """Count FLOPs of a rank's queries on the keys that a launch has."""
    B, H, M = a.lse.shape
    return _products(B * H * M * min(a.n_len, a.chunks.key_chunks * a.chunks.key_chunk_len), a.d, a.d_v)


def of_decode(a: DecodeArgs) -> int:
    """Count FLOPs of the queries of every sequence on its keys in the cache."""
    B, H, M, D = a.q.shape
    keys = B * a.block_table.size(1) * a.cache.page_size
    if _has_values(a.cache_seqlens):
        keys = int(a.cache_seqlens.sum())
    return _products(H * M * keys, D, a.cache.D_v)
