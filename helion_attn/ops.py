"""The custom ops: schemas, fakes, and the way to the kernels, which are imported on the first call.

CUDA tensors run the compiled kernels and CPU tensors the same source in Helion's interpreter; the launchers choose. The
callers in `api` have validated every argument.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from helion_attn.configs import (
    Q_FIELDS,
    Packing,
    attention_tile_config,
    blocks_for,
    large_tile_config,
    row_width,
    scheduling,
    tile_config,
    uses_large_d,
)
from helion_attn.configs.scheduling import query_blocks_per_sm
from helion_attn.kernels.lib.arguments import Inputs, Numerics, Problem

DEVICES = ("CPU", "CUDA")

Implementation = TypeVar("Implementation", bound=Callable[..., Any])


def _on_its_device(function: Implementation) -> Implementation:
    """Kernels are launched on the current device, which must be that of the tensors; and without autocast.

    The kernels say what is cast; autocast would also cast the fp32 products of the interpreter.
    """

    @functools.wraps(function)
    def wrapped(x: torch.Tensor, *args: Any) -> Any:
        elsewhere = x.is_cuda and x.device.index != torch.cuda.current_device()
        autocast = torch.is_autocast_enabled(x.device.type)
        if not (elsewhere or autocast):
            return function(x, *args)
        with contextlib.ExitStack() as stack:
            if elsewhere:
                stack.enter_context(torch.cuda.device(x.device))
            if autocast:
                stack.enter_context(torch.autocast(x.device.type, enabled=False))
            return function(x, *args)

    return wrapped  # type: ignore[return-value]


torch.library.define(
    "helion_attn::quantize_qkv",
    "(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_positions, Tensor? k_positions, "
    "bool interleaved, int bm, int bn, int d_pad, int d_v_pad, ScalarType qk_dtype, ScalarType pv_dtype, str q_scales, "
    "str k_scales, str v_scales, int? hadamard_seed, bool reflect, bool smooth_k, bool center_v) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::pack_qkv",
    "(Tensor q, Tensor k, Tensor v, int bm, int bn, int d_pad, int d_v_pad) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::transform_rows",
    "(Tensor x, Tensor? cos, Tensor? sin, Tensor? positions, bool interleaved, int? hadamard_seed, bool reflect, "
    "bool bshd) -> Tensor",
)
torch.library.define(
    "helion_attn::fp8_attn_fwd",
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor v_mean, "
    "Tensor? lse_shift, Tensor? sinks, SymInt m_len, SymInt n_len, SymInt d, SymInt d_v, SymInt left, SymInt right, "
    "float sm_scale, float? softcap, bool bshd, ScalarType out_dtype, int p_offset_log2, int? promote_every, "
    "bool q_row_descales, bool k_block_descales, bool v_channel_descales) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::quantize_varlen",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int bm, int bn, int d_pad, int d_v_pad, "
    "ScalarType qk_dtype, ScalarType pv_dtype, str q_scales, str k_scales, str v_scales, int? hadamard_seed, "
    "bool reflect, bool smooth_k, bool center_v) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::fp8_attn_varlen",
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor v_mean, "
    "Tensor? lse_shift, Tensor? sinks, Tensor q_blocks, SymInt m_len, SymInt n_len, SymInt d_v, SymInt left, "
    "SymInt right, float sm_scale, float? softcap, ScalarType out_dtype, int p_offset_log2, int? promote_every, "
    "bool q_row_descales, bool k_block_descales, bool v_channel_descales) "
    "-> (Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::append_kv",
    "(Tensor k, Tensor v, Tensor(a!) k8, Tensor(b!) v8, Tensor(c!) k_descale, Tensor(d!) v_descale, "
    "Tensor block_table, Tensor cache_seqlens, Tensor? cos, Tensor? sin, bool interleaved) -> ()",
)
torch.library.define(
    "helion_attn::fp8_attn_decode",
    "(Tensor q, Tensor k8, Tensor v8, Tensor k_descale, Tensor v_descale, Tensor block_table, Tensor cache_seqlens, "
    "Tensor? sinks, int d_v, int? splits, SymInt left, SymInt right, float sm_scale, float? softcap, bool bshd, "
    "ScalarType out_dtype) -> (Tensor, Tensor)",
)


@torch.library.impl("helion_attn::quantize_qkv", DEVICES)
@_on_its_device
def _quantize_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    k_positions: torch.Tensor | None,
    interleaved: bool,
    bm: int,
    bn: int,
    d_pad: int,
    d_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    reflect: bool,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.lib.choices import Choices
    from helion_attn.preprocess.quantize import quantize_qkv

    rope = (cos, sin, q_positions, k_positions, interleaved)
    choices = Choices(qk_dtype, pv_dtype, q_scales, k_scales, v_scales, hadamard_seed, reflect, smooth_k, center_v)
    return quantize_qkv(q, k, v, *rope, Packing(bm, bn, d_pad, d_v_pad), choices)


def _empty_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    bm: int,
    bn: int,
    d_pad: int,
    d_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, H, M, _D), (H_kv, N) = q.shape, k.shape[1:3]
    m_blocks, n_blocks = (M + bm - 1) // bm, (N + bn - 1) // bn
    v_block = (d_v_pad, bn) if pv_dtype.itemsize == 1 else (bn, d_v_pad)
    return (
        q.new_empty((B * H, m_blocks, bm, d_pad), dtype=qk_dtype),
        q.new_empty((B * H_kv, n_blocks, bn, d_pad), dtype=qk_dtype),
        q.new_empty((B * H_kv, n_blocks, *v_block), dtype=pv_dtype),
    )


@torch.library.register_fake("helion_attn::quantize_qkv")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_positions: torch.Tensor | None,
    k_positions: torch.Tensor | None,
    interleaved: bool,
    bm: int,
    bn: int,
    d_pad: int,
    d_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    reflect: bool,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    (B, H), H_kv = q.shape[:2], k.shape[1]
    q8, k8, v8 = _empty_packed(q, k, bm, bn, d_pad, d_v_pad, qk_dtype, pv_dtype)
    rows, channels = (B, H, q8.size(1), bm), (B, H_kv, d_v_pad)
    shapes = (
        rows,
        (B, H_kv, k8.size(1) if k_scales == "block" else 1),
        channels,
        channels,
        (B, H_kv, row_width(d_pad, d_v_pad)) if smooth_k else (0,),
        rows if smooth_k else (0,),
    )
    return q8, k8, v8, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)


@torch.library.impl("helion_attn::pack_qkv", DEVICES)
@_on_its_device
def _pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, d_pad: int, d_v_pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from helion_attn.preprocess.quantize import pack_qkv

    return pack_qkv(q, k, v, Packing(bm, bn, d_pad, d_v_pad))


@torch.library.register_fake("helion_attn::pack_qkv")
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, d_pad: int, d_v_pad: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty_packed(q, k, bm, bn, d_pad, d_v_pad, q.dtype, v.dtype)


@torch.library.impl("helion_attn::transform_rows", DEVICES)
@_on_its_device
def _transform_rows(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    hadamard_seed: int | None,
    reflect: bool,
    bshd: bool,
) -> torch.Tensor:
    from helion_attn.preprocess.transform_rows import transform_rows

    return transform_rows(x, cos, sin, positions, interleaved, hadamard_seed, reflect, bshd)


@torch.library.register_fake("helion_attn::transform_rows")
def _(
    x: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    positions: torch.Tensor | None,
    interleaved: bool,
    hadamard_seed: int | None,
    reflect: bool,
    bshd: bool,
) -> torch.Tensor:
    B, H, S, D = x.shape
    return x.new_empty((B, S, H, D) if bshd else (B, H, S, D))


def _empty_outputs(
    q_descale: torch.Tensor, m_len: int, d_v: int, bshd: bool, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    B, H = q_descale.shape[:2]
    shape = (B, m_len, H, d_v) if bshd else (B, H, m_len, d_v)
    return q_descale.new_empty(shape, dtype=out_dtype), q_descale.new_empty((B, H, m_len))


@torch.library.impl("helion_attn::fp8_attn_fwd", DEVICES)
@_on_its_device
def _fp8_attn_fwd(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    sinks: torch.Tensor | None,
    m_len: int,
    n_len: int,
    d: int,
    d_v: int,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    bshd: bool,
    out_dtype: torch.dtype,
    p_offset_log2: int,
    promote_every: int | None,
    q_row_descales: bool,
    k_block_descales: bool,
    v_channel_descales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from helion_attn.compiler.helion_adapter import multiprocessors
    from helion_attn.kernels import attention, attention_large_d

    out, lse = _empty_outputs(q_descale, m_len, d_v, bshd, out_dtype)
    inputs = Inputs(q8, k8, v8, q_descale, k_descale, v_descale, v_mean, lse_shift, sinks)
    problem = Problem(m_len, n_len, left, right, sm_scale, softcap, bshd)
    numerics = Numerics(p_offset_log2, promote_every, q_row_descales, k_block_descales, v_channel_descales)
    args = (inputs, out, lse, problem, numerics)
    bits = (8 * q8.itemsize, 8 * v8.itemsize)
    sm_count = multiprocessors(q8.device)
    load = query_blocks_per_sm(q8.size(0), q8.size(1), sm_count)
    if uses_large_d(d, d_v, bits):
        attention_large_d.launch(large_tile_config(d, d_v, right >= 0, load), *args)
    else:
        tile = attention_tile_config(d, d_v, right >= 0, bits, load)
        heads, blocks = (q8.size(0), k8.size(0)), (q8.size(1), k8.size(1))
        pack_gqa, splits = scheduling.schedule(tile, heads, blocks, m_len, left, right, sm_count)
        attention.launch(tile, *args, splits=splits, pack_gqa=pack_gqa)
    return out, lse


@torch.library.register_fake("helion_attn::fp8_attn_fwd")
def _(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    sinks: torch.Tensor | None,
    m_len: int,
    n_len: int,
    d: int,
    d_v: int,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    bshd: bool,
    out_dtype: torch.dtype,
    p_offset_log2: int,
    promote_every: int | None,
    q_row_descales: bool,
    k_block_descales: bool,
    v_channel_descales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_outputs(q_descale, m_len, d_v, bshd, out_dtype)


@torch.library.impl("helion_attn::quantize_varlen", DEVICES)
@_on_its_device
def _quantize_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    bm: int,
    bn: int,
    d_pad: int,
    d_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    reflect: bool,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    from helion_attn.preprocess.lib.choices import Choices
    from helion_attn.preprocess.quantize import quantize_varlen

    choices = Choices(qk_dtype, pv_dtype, q_scales, k_scales, v_scales, hadamard_seed, reflect, smooth_k, center_v)
    return quantize_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, Packing(bm, bn, d_pad, d_v_pad), choices)


@torch.library.register_fake("helion_attn::quantize_varlen")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    bm: int,
    bn: int,
    d_pad: int,
    d_v_pad: int,
    qk_dtype: torch.dtype,
    pv_dtype: torch.dtype,
    q_scales: str,
    k_scales: str,
    v_scales: str,
    hadamard_seed: int | None,
    reflect: bool,
    smooth_k: bool,
    center_v: bool,
) -> tuple[torch.Tensor, ...]:
    (M, H, _D), (N, H_kv), B = q.shape, k.shape[:2], cu_seqlens_q.size(0) - 1
    m_blocks, n_blocks = blocks_for(M, bm, B), blocks_for(N, bn, B)
    v_block = (d_v_pad, bn) if pv_dtype.itemsize == 1 else (bn, d_v_pad)
    rows = (1, H, m_blocks, bm)
    shapes = (
        rows,
        (1, H_kv, n_blocks),
        (1, H_kv, n_blocks * d_v_pad),
        (B, H_kv, d_v_pad),
        (B, H_kv, row_width(d_pad, d_v_pad)) if smooth_k else (0,),
        rows if smooth_k else (0,),
    )
    return (
        q.new_empty((H, m_blocks, bm, d_pad), dtype=qk_dtype),
        q.new_empty((H_kv, n_blocks, bn, d_pad), dtype=qk_dtype),
        q.new_empty((H_kv, n_blocks, *v_block), dtype=pv_dtype),
        *(q.new_empty(shape, dtype=torch.float32) for shape in shapes),
        cu_seqlens_q.new_empty((m_blocks, Q_FIELDS)),
    )


def _empty_varlen(
    q_descale: torch.Tensor, m_len: int, d_v: int, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    H = q_descale.size(1)
    return q_descale.new_empty((m_len, H, d_v), dtype=out_dtype), q_descale.new_empty((H, m_len))


@torch.library.impl("helion_attn::fp8_attn_varlen", DEVICES)
@_on_its_device
def _fp8_attn_varlen(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    sinks: torch.Tensor | None,
    q_blocks: torch.Tensor,
    m_len: int,
    n_len: int,
    d_v: int,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    out_dtype: torch.dtype,
    p_offset_log2: int,
    promote_every: int | None,
    q_row_descales: bool,
    k_block_descales: bool,
    v_channel_descales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from helion_attn.compiler.helion_adapter import multiprocessors
    from helion_attn.kernels import attention

    out, lse = _empty_varlen(q_descale, m_len, d_v, out_dtype)
    if m_len:
        inputs = Inputs(q8, k8, v8, q_descale, k_descale, v_descale, v_mean, lse_shift, sinks)
        problem = Problem(m_len, n_len, left, right, sm_scale, softcap, bshd=True)
        numerics = Numerics(p_offset_log2, promote_every, q_row_descales, k_block_descales, v_channel_descales)
        bits = (8 * q8.itemsize, 8 * v8.itemsize)
        d_pad = max(q8.size(3), v8.size(2) if v8.itemsize == 1 else v8.size(3))
        load = query_blocks_per_sm(q8.size(0), q8.size(1), multiprocessors(q8.device))
        tile = tile_config(d_pad, right >= 0, bits, load)
        attention.launch(tile, inputs, out, lse, problem, numerics, q_blocks)
    return out, lse


@torch.library.register_fake("helion_attn::fp8_attn_varlen")
def _(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    lse_shift: torch.Tensor | None,
    sinks: torch.Tensor | None,
    q_blocks: torch.Tensor,
    m_len: int,
    n_len: int,
    d_v: int,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    out_dtype: torch.dtype,
    p_offset_log2: int,
    promote_every: int | None,
    q_row_descales: bool,
    k_block_descales: bool,
    v_channel_descales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_varlen(q_descale, m_len, d_v, out_dtype)


@torch.library.impl("helion_attn::append_kv", DEVICES)
@_on_its_device
def _append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    from helion_attn.preprocess import append
    from helion_attn.preprocess.lib.rope import rope_tables

    rope = rope_tables(cos, sin, None, None, interleaved, k8.size(3), k.new_empty(1, dtype=torch.float32))
    append.launch(k, v, k8, v8, k_descale, v_descale, block_table, cache_seqlens, rope)


@torch.library.register_fake("helion_attn::append_kv")
def _(
    k: torch.Tensor,
    v: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
) -> None:
    return None


def _empty_decoded(q: torch.Tensor, d_v: int, bshd: bool, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, M, _D = q.shape
    shape = (B, M, H, d_v) if bshd else (B, H, M, d_v)
    return q.new_empty(shape, dtype=out_dtype), q.new_empty((B, H, M), dtype=torch.float32)


@torch.library.impl("helion_attn::fp8_attn_decode", DEVICES)
@_on_its_device
def _fp8_attn_decode(
    q: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sinks: torch.Tensor | None,
    d_v: int,
    splits: int | None,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    bshd: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    from helion_attn.kernels import decode

    out, lse = _empty_decoded(q, d_v, bshd, out_dtype)
    cache = (k8, v8, k_descale, v_descale, block_table, cache_seqlens)
    decode.launch(q, *cache, sinks, out, lse, splits, left, right, sm_scale, softcap, bshd)
    return out, lse


@torch.library.register_fake("helion_attn::fp8_attn_decode")
def _(
    q: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sinks: torch.Tensor | None,
    d_v: int,
    splits: int | None,
    left: int,
    right: int,
    sm_scale: float,
    softcap: float | None,
    bshd: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_decoded(q, d_v, bshd, out_dtype)
