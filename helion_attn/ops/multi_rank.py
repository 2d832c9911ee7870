"""The ops of a sequence that several ranks hold: what each tells, packs and attends to."""

from __future__ import annotations

import torch

from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import varlen_packing
from helion_attn.ops import flops
from helion_attn.ops.choose import choose, shape_of
from helion_attn.ops.declare import Operation
from helion_attn.ops.quantize import all_tensors, empty_quantized
from helion_attn.problem import (
    AttentionArgs,
    DescribeRankArgs,
    MergeArgs,
    MultiRankArgs,
    QuantizeRankArgs,
)
from helion_attn.types import PackedTensors


def _launch_describe(a: DescribeRankArgs) -> torch.Tensor:
    from helion_attn.preprocess import rank_samples

    return rank_samples.describe(a)


def _fake_describe(a: DescribeRankArgs) -> torch.Tensor:
    from helion_attn.preprocess import rank_samples

    return a.q.new_empty(rank_samples.kv_sample_shape(a))


def _launch_quantize(a: QuantizeRankArgs) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess import rank_samples

    return all_tensors(rank_samples.quantize(a))


def blocks_of(gathered: torch.Tensor, offset: int, dtype: torch.dtype, block: tuple[int, int]) -> torch.Tensor:
    """The blocks of all ranks from `offset` bytes of the first rank's row on, [1, blocks, *block]; a view."""
    size = block[0] * block[1] * dtype.itemsize
    flat = gathered.view(-1)[offset:]
    return flat[: flat.numel() // size * size].view(dtype).view(1, -1, *block)


def _launch_gathered(a: MultiRankArgs) -> None:
    from helion_attn.kernels import attention
    from helion_attn.kernels.lib.masks import Bounds

    p = varlen_packing(a.d, a.d_v, a.recipe.bits)
    v_block = (p.D_v_pad, p.bn) if a.recipe.pv_dtype.itemsize == 1 else (p.bn, p.D_v_pad)
    packed = PackedTensors(
        q8=a.q8,
        k8=blocks_of(a.gathered, 0, a.recipe.qk_dtype, (p.bn, p.D_pad)),
        v8=blocks_of(a.gathered, a.v_offset, a.recipe.pv_dtype, v_block),
        q_descale=a.q_descale,
        k_descale=a.k_descale,
        v_descale=a.v_descale,
        v_mean=a.v_mean,
        k_mean=None,
        channel_factors=None,
        lse_shift=a.lse_shift,
    )
    arguments = AttentionArgs(
        packed=packed,
        m_len=a.out.size(1 if a.bshd else 2),
        n_len=a.n_len,
        d=a.d,
        d_v=a.d_v,
        scores=a.scores,
        bshd=a.bshd,
        out_dtype=a.out.dtype,
        recipe=a.recipe,
        num_splits=1,
    )
    bounds = None
    if a.row_bounds is not None and a.block_bounds is not None:
        bounds = Bounds(a.row_bounds, a.block_bounds)
    choice = choose(shape_of(arguments, "ranks"), sm_count(a.q8))
    attention.launch(choice, arguments, a.out, a.lse, rank_chunks=a.chunks, bounds=bounds)


def _launch_merge(a: MergeArgs) -> None:
    from helion_attn.kernels.merge_splits import merge_splits

    merge_splits(a.results.view(-1, a.results.size(-1)), a.results_lse.view(2, -1), a.out, a.lse, a.bshd, a.sinks)


describe_rank = Operation("describe_rank", DescribeRankArgs, 1, _launch_describe, _fake_describe, planned=False)
quantize_rank = Operation("quantize_rank", QuantizeRankArgs, 10, _launch_quantize, empty_quantized, planned=False)
attention_multi_rank = Operation(
    "attention_multi_rank",
    MultiRankArgs,
    0,
    _launch_gathered,
    lambda a: None,
    mutates=("out", "lse"),
    flops=flops.of_attention_multi_rank,
)
merge_results = Operation("merge_results", MergeArgs, 0, _launch_merge, lambda a: None, mutates=("out", "lse"))
