"""The custom ops: schemas, fakes, and the way to the kernels, which are imported on the first call.

CUDA tensors run the compiled kernels and CPU tensors the same source in Helion's interpreter; the launchers choose. The
callers in `api` have validated every argument.
"""

from __future__ import annotations

import torch

DEVICES = ("CPU", "CUDA")

torch.library.define("helion_attn::quantize_rows", "(Tensor x, int block, int d_pad) -> (Tensor, Tensor)")
torch.library.define(
    "helion_attn::quantize_v", "(Tensor v, int bn, int d_pad, bool center) -> (Tensor, Tensor, Tensor)"
)
torch.library.define(
    "helion_attn::fp8_attn_fwd",
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor v_mean, "
    "SymInt m_len, SymInt n_len, SymInt d, bool causal, float sm_scale, bool bshd, ScalarType out_dtype) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("helion_attn::quantize_rows", DEVICES)
def quantize_rows(x: torch.Tensor, block: int, d_pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `preprocess.quantize.quantize_rows`."""
    from helion_attn.preprocess.quantize import quantize_rows

    return quantize_rows(x, block, d_pad)


@torch.library.register_fake("helion_attn::quantize_rows")
def _(x: torch.Tensor, block: int, d_pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    B, H, S, _D = x.shape
    x8 = x.new_empty((B * H, (S + block - 1) // block, block, d_pad), dtype=torch.float8_e4m3fn)
    return x8, x.new_empty((B, H), dtype=torch.float32)


@torch.library.impl("helion_attn::quantize_v", DEVICES)
def quantize_v(v: torch.Tensor, bn: int, d_pad: int, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `preprocess.v_layout.quantize_v`."""
    from helion_attn.preprocess.v_layout import quantize_v

    return quantize_v(v, bn, d_pad, center)


@torch.library.register_fake("helion_attn::quantize_v")
def _(v: torch.Tensor, bn: int, d_pad: int, center: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    B, H_kv, N, _D = v.shape
    v8 = v.new_empty((B * H_kv, (N + bn - 1) // bn, d_pad, bn), dtype=torch.float8_e4m3fn)
    descale = v.new_empty((B, H_kv), dtype=torch.float32)
    return v8, descale, v.new_empty((B, H_kv, d_pad), dtype=torch.float32)


def _empty_outputs(
    q_descale: torch.Tensor, m_len: int, d: int, bshd: bool, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    B, H = q_descale.shape
    shape = (B, m_len, H, d) if bshd else (B, H, m_len, d)
    return q_descale.new_empty(shape, dtype=out_dtype), q_descale.new_empty((B, H, m_len))


@torch.library.impl("helion_attn::fp8_attn_fwd", DEVICES)
def fp8_attn_fwd(
    q8: torch.Tensor,
    k8: torch.Tensor,
    v8: torch.Tensor,
    q_descale: torch.Tensor,
    k_descale: torch.Tensor,
    v_descale: torch.Tensor,
    v_mean: torch.Tensor,
    m_len: int,
    n_len: int,
    d: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on packed tensors into a new `out` ([B, M, H, d] when `bshd`) and lse [B, H, M]."""
    from helion_attn.kernels.fp8_attn_fwd import launch

    out, lse = _empty_outputs(q_descale, m_len, d, bshd, out_dtype)
    packed = (q8, k8, v8, q_descale, k_descale, v_descale, v_mean)
    launch(*packed, out, lse, m_len, n_len, causal, sm_scale, bshd)
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
    m_len: int,
    n_len: int,
    d: int,
    causal: bool,
    sm_scale: float,
    bshd: bool,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_outputs(q_descale, m_len, d, bshd, out_dtype)
