"""The packed format, from what is known of K and V: `pack_kv`, `pack_q`, and `recentre` for what the sample missed."""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.kernels.lib.norm import Norms
from helion_attn.kernels.lib.reflect import reflected_channels
from helion_attn.kernels.lib.rope import RopeTables
from helion_attn.kernels.lib.specs import RowSpec
from helion_attn.kernels.lib.strided import StridedQKV
from helion_attn.numerics import FORMAT_MAX, RECENTRED_KEYS
from helion_attn.preprocess import pack_kv, pack_q, recentre
from helion_attn.preprocess.lib.hadamard import rotation
from helion_attn.preprocess.lib.tiling import tiling
from helion_attn.preprocess.sample import Sampled
from helion_attn.preprocess.sequences import Sequences
from helion_attn.types import PackedTensors, Recipe


def recentres(recipe: Recipe, keys: int) -> bool:
    """Whether the mean that is added to V of so many keys is corrected for its rounding."""
    return recipe.center_v and recipe.pv_dtype.itemsize == 1 and keys >= RECENTRED_KEYS


def launch(
    source: StridedQKV,
    norms: Norms,
    rope: RopeTables,
    known: Sampled,
    bm: int,
    bn: int,
    recipe: Recipe,
    shift_lse: bool,
    packs_q: bool = True,
    sequences: Sequences | None = None,
    all_keys: int | None = None,
) -> PackedTensors:
    """Run the kernels.

    Args:
        source: Q, K and V.
        norms: and `rope`, `known`: what is done to them, and what is known of K and V.
        rope: as above.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        recipe: how they become 8- or 16-bit numbers.
        shift_lse: whether somebody sees what smooth_k takes from the scores.
        packs_q: otherwise no block of Q is packed: attention quantises it.
        sequences: where those of a packed batch lie, or None. Then Q, K and V are [1, heads, tokens, head dim], and
            `known` has every sequence's.
        all_keys: how many keys attention has of which these are a part, or None if they are all.

    Returns:
        What is shaped as in `QuantizedQKV`, or as in `PackedVarlen`; k_mean and lse_shift are None without smooth_k,
        lse_shift also without shift_lse, channel_factors without equalise.
    """
    B, H, H_kv, D = source.B, source.H, source.H_kv, source.D
    D_pad, D_v_pad, D_row = source.D_pad, source.D_v_pad, source.D_row
    like, smooth_k = known.v_mean, recipe.smooth_k

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    # Few keys lose less by their rounding than the sum of it costs.
    sum_lost = recentres(recipe, source.N if all_keys is None else all_keys)
    t = tiling(source, norms, rope, bm, bn, recipe, sum_lost)
    m_blocks, n_blocks = -(-source.M // bm), -(-source.N // bn)
    heads, kv_heads, M, N = B * H, B * H_kv, source.M, source.N
    unused = like.new_empty((1, 1), dtype=torch.int32)
    q_blocks, k_blocks = unused, unused
    if sequences is not None:
        q_blocks, k_blocks = sequences.q_blocks, sequences.k_blocks
        heads, kv_heads = H * q_blocks.size(0), H_kv * k_blocks.size(0)
        m_blocks, n_blocks, M, N = 1, 1, bm, bn
    if not packs_q:
        m_blocks = 0
    m_tiles, n_tiles = m_blocks * bm // t.q_tile, n_blocks * bn // t.k_tile
    q8 = empty(heads * m_tiles, t.q_tile, D_pad, dtype=recipe.qk_dtype)
    k8 = empty(kv_heads * n_tiles, t.k_tile, D_pad, dtype=recipe.qk_dtype)
    transposed = recipe.pv_dtype.itemsize == 1
    v_blocks = (n_blocks * (D_v_pad // t.d_tile), t.d_tile, bn) if transposed else (n_blocks, bn, D_v_pad)
    v8 = empty(kv_heads * v_blocks[0], *v_blocks[1:], dtype=recipe.pv_dtype)
    q_descale, v_descale = empty(heads, m_blocks * bm), empty(kv_heads, D_v_pad)
    k_descale = empty(kv_heads, n_blocks if recipe.k_scales == "block" else 1)
    note_peak = transposed and not recipe.is_given
    v_lost = empty(kv_heads * n_blocks if sum_lost else 1, D_v_pad)
    v_peak = empty(kv_heads * n_blocks if note_peak else 1, D_v_pad // t.d_tile)
    shift_lse = shift_lse and smooth_k
    lse_shift = empty(heads, m_blocks * bm) if shift_lse else empty(1, 1)
    signs, matrix, norm = empty(1), empty(1, 1), 1.0
    if recipe.hadamard:
        signs, matrix, norm = rotation(D, D_row, recipe.hadamard_seed, like.device)
    shared = {
        "cos": rope.cos,
        "sin": rope.sin,
        "table_rows": rope.table_rows,
        "k_mean": known.k_mean.view(-1),
        "channel_factors": known.channel_factors.view(-1),
        "signs": signs,
        "rotation_matrix": matrix,
        "H_kv": H_kv,
        "N": N,
        "d_at_run_time": D,
        "norm": norm,
    }
    of_both: dict[str, Any] = {
        "unit": source.unit,
        "d": D,
        "qk_largest": recipe.qk_largest(D, source.D_v),
        "varlen": sequences is not None,
        "wide": sequences is not None and source.wide,
    }
    rows_of_k = RowSpec(
        d_row=D_row,
        d_step=source.d_steps[1],
        rotary=rope.rotary,
        pairing=rope.pairing,
        explicit_positions=rope.explicit[1],
        normed=norms.k.normed,
        eps=norms.k.eps,
        dot_mean=False,
        subtract_mean=smooth_k,
        equalise=recipe.equalise,
        divide=True,
        vectors_first=t.k_vectors_first,
        hadamard=recipe.hadamard,
        rotate_first=t.rotate_first,
        two_terms=t.two_terms,
        reflected=reflected_channels(D) if recipe.reflect else 0,
        is_cuda=like.is_cuda,
    )
    pack_kv.kernel(like.is_cuda, t.kv_warps, t.kv_registers, t.k_in_flight, t.k_per_block).run(
        {
            **shared,
            **source.arguments("kv"),
            "v_amax": known.v_amax,
            "v_mean": known.v_mean,
            "k_positions": rope.k_positions,
            "weight": norms.k.weight,
            "factors": norms.k.factors,
            "k_blocks": k_blocks,
            "k8": k8,
            "v8": v8,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "v_lost": v_lost,
            "v_peak": v_peak,
            "n_tiles": n_tiles,
            "d_v_at_run_time": source.D_v,
            "spec": pack_kv.PackKVSpec(
                **of_both,
                v_d_step=source.d_steps[2],
                d_v=source.D_v,
                d_tile=t.d_tile,
                bn=bn,
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
                rows=rows_of_k,
            ),
        }
    )
    if packs_q:
        pack_q.kernel(like.is_cuda, t.q_warps, t.q_registers, t.q_in_flight, t.q_per_block).run(
            {
                **shared,
                **source.arguments("q"),
                "q_positions": rope.q_positions,
                "weight": norms.q.weight,
                "factors": norms.q.factors,
                "q_blocks": q_blocks,
                "q8": q8,
                "q_descale": q_descale,
                "lse_shift": lse_shift,
                "m_tiles": m_tiles,
                "H": H,
                "M": M,
                "spec": pack_q.PackQSpec(
                    **of_both,
                    q_run=t.q_run,
                    q_unscaled=recipe.q_scales == "none" or recipe.is_given,
                    q_per_row=recipe.q_scales == "token",
                    q_per_tile=recipe.q_scales == "block" and not t.q_per_block,
                    q_per_block=t.q_per_block,
                    cap_registers=t.q_registers is not None,
                    rows=rows_of_k._replace(
                        d_step=source.d_steps[0],
                        explicit_positions=rope.explicit[0],
                        normed=norms.q.normed,
                        eps=norms.q.eps,
                        dot_mean=shift_lse,
                        subtract_mean=False,
                        divide=False,
                        vectors_first=t.q_vectors_first,
                        rotate_first=False,
                    ),
                ),
            }
        )
    v_mean = known.v_mean
    if note_peak:
        v_mean = recentre.launch(source, v_lost, v_peak, v8, v_descale, known.v_mean, recipe, sum_lost, sequences)
    if sequences is not None:
        m_blocks, n_blocks = q_blocks.size(0), k_blocks.size(0)
    return PackedTensors(
        q8=q8.view(B * H, m_blocks, bm, D_pad),
        k8=k8.view(B * H_kv, n_blocks, bn, D_pad),
        v8=v8.view(B * H_kv, n_blocks, *((D_v_pad, bn) if transposed else (bn, D_v_pad))),
        q_descale=q_descale.view(B, H, m_blocks, bm),
        k_descale=k_descale.view(B, H_kv, -1),
        v_descale=v_descale.view(B, H_kv, -1),
        v_mean=v_mean.view(-1, H_kv, D_v_pad),
        k_mean=known.k_mean.view(-1, H_kv, D_row) if smooth_k else None,
        channel_factors=known.channel_factors.view(-1, H_kv, D_row) if recipe.equalise else None,
        lse_shift=lse_shift.view(B, H, m_blocks, bm) if shift_lse else None,
    )
