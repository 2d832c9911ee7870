"""`fp8_attn_dense`: attention from unquantised tensors to the output, and where Q is quantised."""

from __future__ import annotations

import torch

from helion_attn import calls
from helion_attn.compiler.buffers import note, sm_count
from helion_attn.configs import LargeTileConfig
from helion_attn.kernels.lib.strided import WIDEST_LOAD
from helion_attn.ops import flops
from helion_attn.ops.attention import Choice, Outputs, Shape, choose, empty_out_and_lse, empty_outputs, launch_choice
from helion_attn.ops.declare import Operation
from helion_attn.problem import DenseArgs, RopeArgs
from helion_attn.types import Recipe


def shape_of_dense(a: DenseArgs) -> Shape:
    """Return the shape of tensors that are not packed yet."""
    (B, H, M, D), (H_kv, N) = a.q.shape, a.k.shape[1:3]
    return Shape(
        heads=(B * H, B * H_kv),
        blocks=(-(-M // a.packing.bm), -(-N // a.packing.bn)),
        m_len=M,
        d=D,
        d_v=a.v.size(3),
        softmax=a.softmax,
        recipe=a.recipe,
        num_splits=a.num_splits,
        block_sparse=a.block_mask.block_sparse,
    )


#: The largest padded head dim whose attention kernel quantises Q. Its instructions come on top of those that bind the
#: kernel: at 64 that takes less than packing Q, at 128 the same or 2% of a call more, at 256 up to 3%.
MAX_QUANTISED_D = 64


def quantises_q(q: torch.Tensor, rope: RopeArgs, recipe: Recipe, choice: Choice) -> bool:
    """Whether the attention kernel quantises Q, a tile in each program, so that Q is read once and never written.

    Not where several programs share a tile (splits of the keys, or V in pieces: `fp8_attn_fwd_large_d`), or a tile has
    rows of several heads; nor a rotation, whose matrix takes 32 KB of shared memory; nor descales of more than a row.
    A 16-bit P is scaled in a layout of its own, to which every key block would convert the descales. Loads must be 16
    bytes wide, and addresses fit 32 bits: the kernel has no registers to spare.
    """
    tile = choice.tile
    if isinstance(tile, LargeTileConfig) or tile.D_pad > MAX_QUANTISED_D or choice.splits > 1 or choice.pack_gqa:
        return False
    if recipe.q_scales != "token" or recipe.hadamard or recipe.pv_dtype.itemsize != 1:
        return False
    # fp32 rows, and angles beside channels that are not rotated, would spill. Triton keeps shorter rotated rows in
    # registers, and loads them in every key block.
    if q.itemsize != 2 or (rope.cos is not None and not 2 * rope.cos.size(1) == tile.D_pad == MAX_QUANTISED_D):
        return False
    aligned = q.data_ptr() % WIDEST_LOAD == 0
    wide = aligned and q.stride(3) == 1 and not any(stride * q.itemsize % WIDEST_LOAD for stride in q.stride()[:3])
    last = sum((size - 1) * stride for size, stride in zip(q.shape, q.stride(), strict=True))
    return wide and last < 2**31


def _launch(a: DenseArgs) -> Outputs:
    from helion_attn.kernels import attention
    from helion_attn.kernels.lib.query import Query
    from helion_attn.preprocess.quantize import quantize_qkv

    choice = choose(shape_of_dense(a), sm_count(a.q))
    # A norm in the attention kernel would come on top of what it has no registers for.
    in_kernel = a.norm.q_weight is None and quantises_q(a.q, a.rope, a.recipe, choice)
    note(a.q, "choice", choice)
    note(a.q, "quantises_q", in_kernel)
    packed = a.attending(quantize_qkv(a.quantizing(packs_q=not in_kernel)))
    if not in_kernel or isinstance(choice.tile, LargeTileConfig):
        return launch_choice(packed, choice)
    out, lse = empty_outputs(packed)
    attention.launch(choice.tile, packed, out, lse, query=Query(a.q, a.rope))
    return out, lse


def _fake(a: DenseArgs) -> Outputs:
    B, H, M, _D = a.q.shape
    return empty_out_and_lse(a.q, (B, H, M), a.v.size(3), a.bshd, a.out_dtype)


attention_dense = Operation(
    "fp8_attn_dense",
    DenseArgs,
    2,
    _launch,
    _fake,
    flops=lambda a: flops.of_tensors(a.q, a.k, a.v),
    call=calls.of_dense,
)
