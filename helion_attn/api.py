"""The public functions: validate, choose block sizes, call the ops."""

from __future__ import annotations

from typing import Literal, overload

import torch

from helion_attn import ops  # noqa: F401 - registers them
from helion_attn.configs import padded_head_dim, tile_config
from helion_attn.types import BALANCED, QuantizedQKV, Recipe
from helion_attn.validate import (
    check_head_dim,
    check_out_dtype,
    check_qkv,
    check_quantized,
    check_recipe,
    check_sm_scale,
)


def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: Recipe = BALANCED,
    layout: str = "bhsd",
) -> QuantizedQKV:
    """Quantise Q, K and V to e4m3, one descale per (batch, head), and pack them for `attention_quantized`.

    Reads the tensors as they are, whatever their strides (a transposed view, a slice of a packed BS3HD tensor): twice,
    and writes the packed copies once. Only fp32 tensors must have a last-dimension stride of 1.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; D in 16..256; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D]; H is a multiple of H_kv.
        v: [B, H_kv, N, D].
        recipe: what is done besides; `BALANCED` also centres V.
        layout: "bhsd" or "bshd".

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode.
    """
    check_qkv(q, k, v, layout)
    check_recipe(recipe)
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    D = q.size(3)
    tile = tile_config(padded_head_dim(D), causal=False)
    q8, k8, v8, q_descale, k_descale, v_descale, v_mean = torch.ops.helion_attn.quantize_qkv(
        q, k, v, tile.bm, tile.bn, tile.D_pad, recipe.center_v
    )
    M, N = q.size(2), k.size(2)
    return QuantizedQKV(q8, k8, v8, q_descale, k_descale, v_descale, v_mean, M, N, D, q.dtype, layout)


@overload
def attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v on quantised tensors: both products in FP8, accumulated in two levels.

    Args:
        qkv: from `quantize`.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; not negative.
        return_lse: also return the log-sum-exp of the scaled scores.
        out_dtype: bf16, fp16, fp32 or float8_e4m3fn (cast without a scale); by default that of the unquantised tensors.

    Returns:
        out in the layout of the unquantised tensors, and fp32 lse [B, H, M], natural log, if asked for. A NaN or
        infinity in a head of q, k or v makes every output that depends on that head NaN.

    Raises:
        TypeError, ValueError, NotImplementedError: as `quantize`.
    """
    if not isinstance(qkv, QuantizedQKV):
        raise TypeError(f"qkv is a {type(qkv).__name__}; it must be a helion_attn.QuantizedQKV")
    check_head_dim("D is", qkv.D)
    tile = tile_config(padded_head_dim(qkv.D), causal)
    check_quantized(qkv, tile.bm, tile.bn, tile.D_pad)
    scale = qkv.D**-0.5 if sm_scale is None else sm_scale
    check_sm_scale(scale)
    dtype = qkv.dtype if out_dtype is None else out_dtype
    check_out_dtype(dtype)
    packed = (qkv.q8, qkv.k8, qkv.v8, qkv.q_descale, qkv.k_descale, qkv.v_descale, qkv.v_mean)
    out, lse = torch.ops.helion_attn.fp8_attn_fwd(
        *packed, qkv.M, qkv.N, qkv.D, causal, float(scale), qkv.layout == "bshd", dtype
    )
    return (out, lse) if return_lse else out


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "bhsd",
    recipe: Recipe = BALANCED,
    return_lse: Literal[False] = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "bhsd",
    recipe: Recipe = BALANCED,
    return_lse: Literal[True],
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "bhsd",
    recipe: Recipe = BALANCED,
    return_lse: bool,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: str = "bhsd",
    recipe: Recipe = BALANCED,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v in FP8, from unquantised tensors: `quantize`, then `attention_quantized`.

    On CUDA tensors (compute capability 9.0) it runs compiled kernels; on CPU tensors the same kernels in Helion's
    interpreter, slowly.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; D in 16..256; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D]; H is a multiple of H_kv.
        v: [B, H_kv, N, D].
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; not negative.
        layout: "bhsd" or "bshd", of the inputs and the output.
        recipe: how the tensors become FP8.
        return_lse: also return the log-sum-exp of the scaled scores, fp32 [B, H, M], natural log.
        out_dtype: bf16, fp16, fp32 or float8_e4m3fn; q's by default.

    Returns:
        out, shaped as q, and lse if asked for.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode.
    """
    if sm_scale is not None:
        check_sm_scale(sm_scale)
    if out_dtype is not None:
        check_out_dtype(out_dtype)
    qkv = quantize(q, k, v, recipe=recipe, layout=layout)
    return attention_quantized(qkv, causal=causal, sm_scale=sm_scale, return_lse=return_lse, out_dtype=out_dtype)
