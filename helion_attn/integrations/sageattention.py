"""SageAttention 2.2's functions under their own names and arguments, and for `import sageattention`.

Tools that cannot be edited import SageAttention by its name. `install` lets that name lead here, and
`python -m helion_attn sageattention -- main.py` runs a script under it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from helion_attn.api import attention
from helion_attn.integrations.mask_tensors import ACCEPTED, attend_to_visible, check_visible, read_mask
from helion_attn.integrations.rules import NO_DROPOUT, Rule, check_supported, is_none_or_tensor
from helion_attn.names import reject_unknown_kwargs
from helion_attn.types import BALANCED, HYBRID, Auto, Recipe, RecipeName, as_choice, preset_of
from helion_attn.validate.dense import check_flag, check_qkv, check_recipe, check_sm_scale, shown
from helion_attn.varlen import attention_varlen

#: SageAttention's names of layouts.
LAYOUTS = {"HND": "bhsd", "NHD": "bshd"}

#: What is accepted of arguments of `sageattn`; the values of a mask are looked at later.
RULES = (Rule("attn_mask", is_none_or_tensor, f"None, or a tensor: {ACCEPTED}"), NO_DROPOUT)

#: The folder whose `sageattention` is these functions.
FOLDER = Path(__file__).with_name("as_sageattention")


@reject_unknown_kwargs
def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    attn_mask: torch.Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    smooth_k: bool = True,
    recipe: Recipe | RecipeName | Auto = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """8-bit attention with SageAttention's names, order and defaults.

    SageAttention ignores keywords that it does not know. Here `attn_mask` and `scale`, which it ignores too, count, and
    others raise: `torch.nn.functional.scaled_dot_product_attention = sageattn` keeps its meaning.

    Args:
        q: [B, H, M, D] with tensor_layout="HND", [B, M, H, D] with "NHD"; bf16, fp16 or fp32; D in 16..1024.
        k: [B, H_kv, N, D] or [B, N, H_kv, D], of q's dtype; H is a multiple of H_kv.
        v: [B, H_kv, N, D_v] or [B, N, H_kv, D_v], of q's dtype; D_v in 16..1024.
        tensor_layout: "HND" or "NHD".
        is_causal: row i sees keys up to i; only with M = N, and without a mask.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        return_lse: also return lse.
        attn_mask: None, or a tensor that broadcasts to [B, H, M, N], as `helion_attn.sdpa` takes it.
        dropout_p: 0.
        scale: what `scaled_dot_product_attention` calls `sm_scale`.
        enable_gqa: not looked at: H_kv may be less than H.
        smooth_k: not looked at: presets with 8-bit K always smooth it, which changes no score.
        recipe: how the tensors become 8-bit numbers, a preset's name, or "auto", which leaves to PyTorch's attention
            what that is faster at, as `helion_attn.attention` says.

    Returns:
        out, of q's shape but for D_v and of its dtype; and fp32 lse [B, H, M], natural log, if asked for.

    Raises:
        NotImplementedError: a mask of biases, a dropout, a causal mask of other lengths; an unsupported device.
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: as `helion_attn.attention`.

    Example:
        from helion_attn.integrations.sageattention import sageattn

        q, k, v = torch.randn(3, 1, 100, 2, 64, dtype=torch.bfloat16)
        out = sageattn(q, k, v, tensor_layout="NHD", is_causal=True)
    """
    if not isinstance(tensor_layout, str):
        raise TypeError(
            f"tensor_layout is {shown(tensor_layout)}; it must be 'HND' or 'NHD': pass a mask by name, attn_mask="
        )
    if tensor_layout not in LAYOUTS:
        raise ValueError(f"tensor_layout is {tensor_layout!r}; it must be 'HND' or 'NHD'")
    check_supported("sageattn", RULES, {"attn_mask": attn_mask, "dropout_p": dropout_p})
    check_flag(is_causal, "is_causal")
    check_flag(return_lse, "return_lse")
    if scale is not None and sm_scale is not None:
        raise ValueError(f"scale is {scale} and sm_scale {sm_scale}, which are the same; it must be one of them")
    if scale is not None:
        check_sm_scale(scale, "scale")
        sm_scale = scale
    layout: Any = LAYOUTS[tensor_layout]
    check_qkv(q, k, v, layout, differentiable=True)
    choice = as_choice(recipe)
    if layout == "bshd":
        (B, M, H, D), N = q.shape, k.size(1)
    else:
        (B, H, M, D), N = q.shape, k.size(2)
    if is_causal and (attn_mask is not None or M != N):
        raise NotImplementedError(
            f"sageattn: is_causal is True with M = {M}, N = {N} and attn_mask "
            f"{'None' if attn_mask is None else 'given'}; it must be without a mask, on as many queries as keys"
        )
    visible = None if attn_mask is None else read_mask(attn_mask, B, H, M, N)
    if visible is None or visible.whole:
        causal = is_causal if visible is None else visible.causal
        return attention(
            q, k, v, causal=causal, sm_scale=sm_scale, layout=layout, recipe=choice, return_lse=return_lse
        )  # fmt: skip
    check_recipe(preset_of(choice), D, v.size(3))
    check_visible("sageattn", visible, q, v, choice)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = attend_to_visible(q, k, v, visible, choice, sm_scale=sm_scale)
    out = out.transpose(1, 2) if layout == "bhsd" else out
    return (out, lse) if return_lse else out


@reject_unknown_kwargs
def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    *,
    recipe: Recipe | RecipeName = BALANCED,
) -> torch.Tensor:
    """8-bit attention of packed sequences, with SageAttention's names, order and defaults.

    Args:
        q: [tokens, H, D], bf16, fp16 or fp32; D in 16..256.
        k: [tokens, H_kv, D], of q's dtype; H is a multiple of H_kv.
        v: [tokens, H_kv, D_v], of q's dtype; D_v in 16..256.
        cu_seqlens_q: int32 or int64 [B + 1]: sequence b has tokens `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]`. Not
            read on the host.
        cu_seqlens_k: likewise, of K and V.
        max_seqlen_q: not looked at, and neither is max_seqlen_k: nothing depends on it here.
        max_seqlen_k: the longest sequence of K and V.
        is_causal: the last query of a sequence sees all of its keys, and each before it one key less. SageAttention
            aligns the first query with the first key, which is another mask where a sequence has more keys than
            queries. With other numbers of tokens in all it raises.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        smooth_k: not looked at, as in `sageattn`.
        recipe: how the tensors become 8-bit numbers.

    Returns:
        out [tokens, H, D_v], of q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `helion_attn.attention_varlen`.

    Example:
        from helion_attn.integrations.sageattention import sageattn_varlen

        q, k, v = torch.randn(3, 50, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 30, 50], dtype=torch.int32)  # 30 tokens and 20
        out = sageattn_varlen(q, k, v, cu_seqlens, cu_seqlens, 30, 30, is_causal=True)
    """
    check_flag(is_causal, "is_causal")
    tensors = isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor)
    if is_causal and tensors and q.dim() == k.dim() == 3 and q.size(0) != k.size(0):
        raise NotImplementedError(
            f"sageattn_varlen: is_causal is True with {q.size(0)} tokens of q and {k.size(0)} of k; it must be with as "
            f"many: SageAttention aligns the first query with the first key, helion_attn.attention_varlen the last ones"
        )
    of_q, of_k = (_as_int32(x) for x in (cu_seqlens_q, cu_seqlens_k))
    return attention_varlen(q, k, v, of_q, of_k, causal=is_causal, sm_scale=sm_scale, recipe=recipe)


def _as_int32(offsets: torch.Tensor) -> torch.Tensor:
    """Return int64 offsets as int32, and all else as it is."""
    is_wide = isinstance(offsets, torch.Tensor) and offsets.dtype == torch.int64
    return offsets.to(torch.int32) if is_wide else offsets


@reject_unknown_kwargs
def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sageattn` by `BALANCED`, whatever its kernel's own arguments say."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, recipe=BALANCED)


@reject_unknown_kwargs
def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sageattn` by `BALANCED`, whatever its kernel's own arguments say."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, recipe=BALANCED)


@reject_unknown_kwargs
def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sageattn` by `HYBRID`, which has P and V in 16 bits too, whatever its kernel's own arguments say."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, recipe=HYBRID)


@reject_unknown_kwargs
def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`sageattn` by `HYBRID`, which has P and V in 16 bits too, whatever its kernel's own arguments say."""
    return sageattn(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, attn_mask, recipe=HYBRID)


def install() -> None:
    """Let `import sageattention` give these functions, in this process and in those that multiprocessing starts.

    Call it before whatever imports SageAttention. An installed SageAttention is then not found.

    Raises:
        RuntimeError: SageAttention itself is imported already, and others may have its functions.

    Example:
        from helion_attn.integrations.sageattention import install

        install()
        from sageattention import sageattn
    """
    loaded = sys.modules.get("sageattention")
    origin = getattr(loaded, "__file__", None)
    if loaded is not None and (origin is None or FOLDER not in Path(origin).parents):
        raise RuntimeError(
            f"sageattention is imported already, from {origin}; call helion_attn.integrations.sageattention.install "
            f"before anything imports it"
        )
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
        importlib.invalidate_caches()
    importlib.import_module("sageattention")


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by Python with these arguments, for which `sageattention` is these functions.

    So it is for every Python that it starts: they inherit PYTHONPATH.
    """
    sys.stdout.flush()
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path})
