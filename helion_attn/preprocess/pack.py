"""The packed format, from what a sample says of K and V: `pack_kv`, `pack_q`, and `recentre` for what it missed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.kernels.lib.norm import Norms
from helion_attn.kernels.lib.rope import RopeTables
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import StridedQKV
from helion_attn.numerics import FORMAT_MAX, RECENTRED_KEYS, reflected_channels
from helion_attn.preprocess import pack_kv, pack_q, recentre
from helion_attn.preprocess.lib.hadamard import rotation
from helion_attn.preprocess.lib.tiling import Tiling, tiling
from helion_attn.preprocess.sample import Sampled
from helion_attn.preprocess.sequences import Sequences
from helion_attn.types import PackedTensors, Recipe


class PackKernelInputs(NamedTuple):
    """The inputs of both kernels."""

    source: StridedQKV  # Q, K and V
    norms: Norms  # and the rest, as `launch` has it
    rope: RopeTables
    stats: Sampled
    bm: int
    bn: int
    recipe: Recipe
    sequences: Sequences | None
    tiling: Tiling  # how the kernels cut their work
    arguments: dict[str, Any]  # of both kernels, by name
    spec: dict[str, Any]  # fields of both kernels' specs, by name
    rows_of_k: RowSpec  # what is done to rows of K


class PackedKV(NamedTuple):
    """Blocks of K and V."""

    k8: torch.Tensor  # [kv_heads * tiles, k_tile, D_pad]
    # 8 bits [kv_heads * blocks * d_tiles, d_tile, bn], transposed, or 16 bits [kv_heads * blocks, bn, D_v_pad].
    v8: torch.Tensor
    k_descale: torch.Tensor  # fp32 [kv_heads, blocks], or [kv_heads, 1] where K has none a block
    v_descale: torch.Tensor  # fp32 [kv_heads, D_v_pad]
    v_lost: torch.Tensor  # fp32 [kv_heads * blocks, D_v_pad] with `sum_lost`: what rounding took from each block's sum
    v_peak: torch.Tensor  # fp32 [kv_heads * blocks, d_tiles] with `note_peak`: the largest of each block


class PackedQ(NamedTuple):
    """Blocks of Q."""

    q8: torch.Tensor  # [heads * tiles, q_tile, D_pad]
    q_descale: torch.Tensor  # fp32 [heads, blocks * bm]
    lse_shift: torch.Tensor  # fp32 [heads, blocks * bm] with `needs_lse_shift`, otherwise of one element


def recentres(recipe: Recipe, keys: int) -> bool:
    """Whether the mean that is added to V of so many keys is corrected for its rounding."""
    return recipe.center_v and recipe.pv_dtype.itemsize == 1 and keys >= RECENTRED_KEYS


def launch(
    source: StridedQKV,
    norms: Norms,
    rope: RopeTables,
    stats: Sampled,
    bm: int,
    bn: int,
    recipe: Recipe,
    needs_lse_shift: bool,
    packs_q: bool = True,
    sequences: Sequences | None = None,
    all_keys: int | None = None,
) -> PackedTensors:
    """Return Q, K and V in the packed format.

    Args:
        source: Q, K and V.
        norms: of rows of Q and K.
        rope: rotations by position.
        stats: the sample's: means, channel factors, V's largest.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        recipe: how they become 8- or 16-bit numbers.
        needs_lse_shift: whether the lse, a sink or a softcap needs `lse_shift`, which smooth_k takes from the scores.
        packs_q: otherwise no block of Q is packed: attention quantises it.
        sequences: where those of a packed batch lie, or None. Then Q, K and V are [1, heads, tokens, head dim], and
            `stats` has every sequence's.
        all_keys: how many keys attention has of which these are a part, or None if they are all.

    Returns:
        What is shaped as in `QuantizedQKV`, or as in `PackedVarlen`; k_mean and lse_shift are None without smooth_k,
        lse_shift also without needs_lse_shift, channel_factors without equalise.
    """
    B, H, H_kv, D = source.B, source.H, source.H_kv, source.D
    like, needs_lse_shift = stats.v_mean, needs_lse_shift and recipe.smooth_k
    # Few keys lose less by their rounding than the sum of it costs.
    sum_lost = recentres(recipe, source.N if all_keys is None else all_keys)
    note_peak = recipe.pv_dtype.itemsize == 1 and not recipe.is_given
    t = tiling(source, norms, rope, bm, bn, recipe, sum_lost)
    signs, matrix, norm = like.new_empty(1), like.new_empty((1, 1)), 1.0
    if recipe.hadamard:
        signs, matrix, norm = rotation(D, source.D_row, recipe.hadamard_seed, like.device)
    inputs = PackKernelInputs(
        source=source,
        norms=norms,
        rope=rope,
        stats=stats,
        bm=bm,
        bn=bn,
        recipe=recipe,
        sequences=sequences,
        tiling=t,
        arguments={
            "cos": rope.cos,
            "sin": rope.sin,
            "table_rows": rope.table_rows,
            "k_mean": stats.k_mean.view(-1),
            "channel_factors": stats.channel_factors.view(-1),
            "signs": signs,
            "rotation_matrix": matrix,
            "H_kv": H_kv,
            "N": source.N if sequences is None else bn,
            "d_at_run_time": D,
            "norm": norm,
        },
        spec={
            "unit": source.unit,
            "d": D,
            "qk_largest": recipe.qk_largest(D, source.D_v),
            "varlen": sequences is not None,
            "wide": sequences is not None and source.wide,
        },
        rows_of_k=RowSpec(
            d_row=source.D_row,
            d_step=source.d_steps[1],
            rotary=rope.rotary,
            pairing=rope.pairing,
            explicit_positions=rope.explicit[1],
            normed=norms.k.normed,
            eps=norms.k.eps,
            has_lse_shift=False,
            subtract_mean=recipe.smooth_k,
            equalise=recipe.equalise,
            divide=True,
            vectors_first=t.k_vectors_first,
            hadamard=recipe.hadamard,
            rotate_first=t.rotate_first,
            two_terms=t.two_terms,
            reflected=reflected_channels(D) if recipe.reflect else 0,
            is_cuda=like.is_cuda,
        ),
    )
    kv = _pack_kv(inputs, sum_lost, note_peak)
    q = _pack_q(inputs, needs_lse_shift, packs_q)
    v_mean = stats.v_mean
    if note_peak:
        v_mean = recentre.launch(source, kv.v_lost, kv.v_peak, kv.v8, kv.v_descale, v_mean, recipe, sum_lost, sequences)
    m_blocks, n_blocks = -(-source.M // bm) if packs_q else 0, -(-source.N // bn)
    if sequences is not None:
        m_blocks, n_blocks = sequences.q_blocks.size(0), sequences.k_blocks.size(0)
    v_block = (source.D_v_pad, bn) if recipe.pv_dtype.itemsize == 1 else (bn, source.D_v_pad)
    return PackedTensors(
        q8=q.q8.view(B * H, m_blocks, bm, source.D_pad),
        k8=kv.k8.view(B * H_kv, n_blocks, bn, source.D_pad),
        v8=kv.v8.view(B * H_kv, n_blocks, *v_block),
        q_descale=q.q_descale.view(B, H, m_blocks, bm),
        k_descale=kv.k_descale.view(B, H_kv, -1),
        v_descale=kv.v_descale.view(B, H_kv, -1),
        v_mean=v_mean.view(-1, H_kv, source.D_v_pad),
        k_mean=stats.k_mean.view(-1, H_kv, source.D_row) if recipe.smooth_k else None,
        channel_factors=stats.channel_factors.view(-1, H_kv, source.D_row) if recipe.equalise else None,
        lse_shift=q.lse_shift.view(B, H, m_blocks, bm) if needs_lse_shift else None,
    )


def _pack_kv(x: PackKernelInputs, sum_lost: bool, note_peak: bool) -> PackedKV:
    """Pack K and V. Of packed sequences, each block is a head of its own."""
    source, t, recipe, like = x.source, x.tiling, x.recipe, x.stats.v_mean
    if x.sequences is None:
        k_blocks, heads, blocks = (
            like.new_empty((1, 1), dtype=torch.int32),
            source.B * source.H_kv,
            -(-source.N // x.bn),
        )
    else:
        k_blocks, heads, blocks = x.sequences.k_blocks, source.H_kv * x.sequences.k_blocks.size(0), 1
    tiles, d_tiles = blocks * x.bn // t.k_tile, source.D_v_pad // t.d_tile
    if recipe.pv_dtype.itemsize == 1:
        v_shape = heads * blocks * d_tiles, t.d_tile, x.bn
    else:
        v_shape = heads * blocks, x.bn, source.D_v_pad
    packed = PackedKV(
        k8=like.new_empty((heads * tiles, t.k_tile, source.D_pad), dtype=recipe.qk_dtype),
        v8=like.new_empty(v_shape, dtype=recipe.pv_dtype),
        k_descale=like.new_empty((heads, blocks if recipe.k_scales == "block" else 1)),
        v_descale=like.new_empty((heads, source.D_v_pad)),
        v_lost=like.new_empty((heads * blocks if sum_lost else 1, source.D_v_pad)),
        v_peak=like.new_empty((heads * blocks if note_peak else 1, d_tiles)),
    )
    pack_kv.kernel(like.is_cuda, t.kv_warps, t.kv_registers, t.k_in_flight, t.k_per_block).run(
        {
            **x.arguments,
            **source.arguments("kv"),
            **packed._asdict(),
            "v_amax": x.stats.v_amax,
            "v_mean": x.stats.v_mean,
            "k_positions": x.rope.k_positions,
            "weight": x.norms.k.weight,
            "factors": x.norms.k.factors,
            "k_blocks": k_blocks,
            "n_tiles": tiles,
            "d_v_at_run_time": source.D_v,
            "spec": pack_kv.PackKVSpec(
                **x.spec,
                v_d_step=source.d_steps[2],
                d_v=source.D_v,
                d_tile=t.d_tile,
                bn=x.bn,
                k_run=t.k_run,
                k_unscaled=recipe.k_scales != "block",
                k_per_tile=recipe.k_scales == "block" and not t.k_per_block,
                k_per_block=t.k_per_block,
                v_unscaled=recipe.v_scales == "none" or recipe.is_given,
                v_per_channel=recipe.v_scales == "channel",
                sum_lost=sum_lost,
                note_peak=note_peak,
                v_largest=FORMAT_MAX.get(recipe.pv_dtype, 1.0),
                cap_registers=t.kv_registers is not None,
                rows=x.rows_of_k,
            ),
        }
    )
    return packed


def _pack_q(x: PackKernelInputs, needs_lse_shift: bool, packs: bool) -> PackedQ:
    """Pack Q, with each row's product with K's mean if `needs_lse_shift`; without `packs` no row of it."""
    source, t, recipe, like = x.source, x.tiling, x.recipe, x.stats.v_mean
    if x.sequences is None:
        q_blocks, heads, blocks = like.new_empty((1, 1), dtype=torch.int32), source.B * source.H, -(-source.M // x.bm)
    else:
        q_blocks, heads, blocks = x.sequences.q_blocks, source.H * x.sequences.q_blocks.size(0), 1
    rows = blocks * x.bm if packs else 0
    tiles = rows // t.q_tile
    packed = PackedQ(
        q8=like.new_empty((heads * tiles, t.q_tile, source.D_pad), dtype=recipe.qk_dtype),
        q_descale=like.new_empty((heads, rows)),
        lse_shift=like.new_empty((heads, rows) if needs_lse_shift else (1, 1)),
    )
    if not packs:
        return packed
    pack_q.kernel(like.is_cuda, t.q_warps, t.q_registers, t.q_in_flight, t.q_per_block).run(
        {
            **x.arguments,
            **source.arguments("q"),
            **packed._asdict(),
            "q_positions": x.rope.q_positions,
            "weight": x.norms.q.weight,
            "factors": x.norms.q.factors,
            "q_blocks": q_blocks,
            "m_tiles": tiles,
            "H": source.H,
            "M": source.M if x.sequences is None else x.bm,
            "spec": pack_q.PackQSpec(
                **x.spec,
                q_run=t.q_run,
                q_unscaled=recipe.q_scales == "none" or recipe.is_given,
                q_per_row=recipe.q_scales == "token",
                q_per_tile=recipe.q_scales == "block" and not t.q_per_block,
                q_per_block=t.q_per_block,
                cap_registers=t.q_registers is not None,
                rows=x.rows_of_k._replace(
                    d_step=source.d_steps[0],
                    explicit_positions=x.rope.explicit[0],
                    normed=x.norms.q.normed,
                    eps=x.norms.q.eps,
                    has_lse_shift=needs_lse_shift,
                    subtract_mean=False,
                    divide=False,
                    vectors_first=t.q_vectors_first,
                    rotate_first=False,
                ),
            ),
        }
    )
    return packed
