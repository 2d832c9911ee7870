"""The custom ops: schemas, fakes, and the way to the kernels, which are imported on the first call.

CUDA tensors run the compiled kernels and CPU tensors the same source in Helion's interpreter; the launchers choose. The
callers in `api` have validated every argument.
"""

from __future__ import annotations

import torch

DEVICES = ("CPU", "CUDA")

torch.library.define(
    "helion_attn::quantize_qkv",
    "(Tensor q, Tensor k, Tensor v, int bm, int bn, int d_pad, bool center_v) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "helion_attn::fp8_attn_fwd",
    "(Tensor q8, Tensor k8, Tensor v8, Tensor q_descale, Tensor k_descale, Tensor v_descale, Tensor v_mean, "
    "SymInt m_len, SymInt n_len, SymInt d, bool causal, float sm_scale, bool bshd, ScalarType out_dtype) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("helion_attn::quantize_qkv", DEVICES)
def quantize_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, d_pad: int, center_v: bool
) -> tuple[torch.Tensor, ...]:
    """See `preprocess.quantize.quantize_qkv`."""
    from helion_attn.preprocess.quantize import quantize_qkv

    return quantize_qkv(q, k, v, bm, bn, d_pad, center_v)


@torch.library.register_fake("helion_attn::quantize_qkv")
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bm: int, bn: int, d_pad: int, center_v: bool
) -> tuple[torch.Tensor, ...]:
    (B, H, M, _D), (H_kv, N) = q.shape, k.shape[1:3]
    m_blocks, n_blocks = (M + bm - 1) // bm, (N + bn - 1) // bn
    packed = [(B * H, m_blocks, bm, d_pad), (B * H_kv, n_blocks, bn, d_pad), (B * H_kv, n_blocks, d_pad, bn)]
    scales = [(B, H), (B, H_kv), (B, H_kv), (B, H_kv, d_pad)]
    return (
        *(q.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in packed),
        *(q.new_empty(shape, dtype=torch.float32) for shape in scales),
    )


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
