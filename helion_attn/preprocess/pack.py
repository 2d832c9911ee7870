"""The packed format, from what is known of K and V: `pack_kv`, `pack_q`, and `recentre` for what the sample missed."""

from __future__ import annotations

from helion_attn.kernels.lib.norm import Norms
from helion_attn.kernels.lib.rope import RopeTables
from helion_attn.kernels.lib.strided import StridedQKV
from helion_attn.numerics import RECENTRED_KEYS
from helion_attn.preprocess import pack_kv, pack_q, recentre
from helion_attn.preprocess.lib.pack_args import PackArgs
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
    stats: Sampled,
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
        norms: of rows of Q and K.
        rope: rotations by position.
        stats: the sample's: means, channel factors, V's largest.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
        recipe: how they become 8- or 16-bit numbers.
        shift_lse: whether somebody sees what smooth_k takes from the scores.
        packs_q: otherwise no block of Q is packed: attention quantises it.
        sequences: where those of a packed batch lie, or None. Then Q, K and V are [1, heads, tokens, head dim], and
            `stats` has every sequence's.
        all_keys: how many keys attention has of which these are a part, or None if they are all.

    Returns:
        What is shaped as in `QuantizedQKV`, or as in `PackedVarlen`; k_mean and lse_shift are None without smooth_k,
        lse_shift also without shift_lse, channel_factors without equalise.
    """
    B, H, H_kv = source.B, source.H, source.H_kv
    # Few keys lose less by their rounding than the sum of it costs.
    sum_lost = recentres(recipe, source.N if all_keys is None else all_keys)
    note_peak = recipe.pv_dtype.itemsize == 1 and not recipe.is_given
    shift_lse = shift_lse and recipe.smooth_k
    tiles = tiling(source, norms, rope, bm, bn, recipe, sum_lost)
    a = PackArgs(source, norms, rope, stats, bm, bn, recipe, tiles, sequences)
    kv = pack_kv.launch(a, sum_lost, note_peak)
    q = pack_q.launch(a, shift_lse, packs_q)
    v_mean = stats.v_mean
    if note_peak:
        v_mean = recentre.launch(source, kv.v_lost, kv.v_peak, kv.v8, kv.v_descale, v_mean, recipe, sum_lost, sequences)
    if sequences is None:
        m_blocks, n_blocks = -(-source.M // bm) if packs_q else 0, -(-source.N // bn)
    else:
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
        lse_shift=q.lse_shift.view(B, H, m_blocks, bm) if shift_lse else None,
    )
