"""flash-attn's function under its own name and arguments, so that replacing the import replaces the attention."""

from __future__ import annotations

from typing import Any

import torch

from helion_attn.api import attention, attention_quantized, pack_unread
from helion_attn.support import Rule, check_supported, is_none
from helion_attn.types import BALANCED, Recipe
from helion_attn.validate import check_descale_form, check_qkv, check_sm_scale, check_softcap, check_window

#: Arguments of flash-attn 3 that change the result, or promise something, and that are not supported.
RULES = (
    Rule("qv", is_none, "None", torch.zeros(1)),
    Rule("attention_chunk", lambda chunk: chunk == 0, "0", 128),
    # A bool passes for an int, and is what `pack_gqa` or `deterministic` takes: arguments that slipped by one place.
    Rule("num_splits", lambda splits: type(splits) is int and splits in (0, 1), "0 or 1: the keys are never split", 2),
    Rule("sm_margin", lambda margin: margin == 0, "0: the kernels take every SM", 8),
)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    recipe: Recipe = BALANCED,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FP8 attention with the names, the order and the meaning of flash-attn 3's arguments.

    bf16, fp16 and fp32 tensors are quantised by `recipe`, as in `helion_attn.attention`. e4m3 tensors are taken as
    they are, with descales; `recipe` does not matter to them. Nothing is cast under `torch.autocast`, as in flash-attn.

    Args:
        q: [B, M, H, D]; bf16, fp16, fp32 or float8_e4m3fn; D in 16..1024.
        k: [B, N, H_kv, D], of q's dtype; H is a multiple of H_kv.
        v: [B, N, H_kv, D_v], of q's dtype; D_v in 16..1024.
        softmax_scale: multiplies q k^T; 1 / sqrt(D) by default; not negative.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        qv: not supported.
        q_descale: fp32 [B, H_kv], multiplies e4m3 q; 1 by default. Its values are not read on the host: one that is
            not finite and positive makes NaN of its heads. Likewise k's and v's.
        k_descale: fp32 [B, H_kv].
        v_descale: fp32 [B, H_kv].
        window_size: (left, right), row i sees keys i + N - M - left .. i + N - M + right; -1 is unlimited. With
            `causal`, right is 0 whatever it says.
        attention_chunk: 0.
        softcap: scaled scores s become `softcap * tanh(s / softcap)`; 0 for no cap.
        num_splits: 0 or 1.
        pack_gqa: for flash-attn's scheduling; it changes no result and is not looked at.
        deterministic: not looked at; the forward pass always is.
        sm_margin: 0.
        return_attn_probs: also return lse, as flash-attn 3 does.
        recipe: how bf16, fp16 and fp32 tensors become 8-bit numbers; flash-attn has no such argument.

    Returns:
        out [B, M, H, D_v], of q's dtype, or bf16 for e4m3 tensors; and fp32 lse [B, H, M], natural log, if asked for.

    Raises:
        NotImplementedError: an argument that is not supported, see docs/integrations.md; an unsupported device.
        TypeError, ValueError: naming the argument, its value and what is accepted.
        RuntimeError: an input requires grad, in grad mode.
    """
    values = {"qv": qv, "attention_chunk": attention_chunk, "num_splits": num_splits, "sm_margin": sm_margin}
    check_supported("flash_attn_func", RULES, values)
    if softmax_scale is not None:
        check_sm_scale(softmax_scale, "softmax_scale")
    check_window(window_size, "window_size")
    check_softcap(softcap, no_cap=0.0)
    options: dict[str, Any] = {
        "causal": causal,
        "sm_scale": softmax_scale,
        "window": None if window_size is None or tuple(window_size) == (-1, -1) else window_size,
        "softcap": None if softcap == 0.0 else softcap,
        "return_lse": return_attn_probs,
    }
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if not isinstance(q, torch.Tensor) or q.dtype != torch.float8_e4m3fn:
        for name, descale in descales.items():
            if descale is not None:
                raise ValueError(
                    f"{name} is given and q is not float8_e4m3fn; only tensors of that dtype have descales"
                )
        return attention(q, k, v, layout="bshd", recipe=recipe, **options)

    check_qkv(q, k, v, "bshd", dtypes=(torch.float8_e4m3fn,))
    shape = (q.size(0), k.size(2))
    q_scale, k_scale, v_scale = (_descale(name, descale, shape, q.device) for name, descale in descales.items())
    qkv = pack_unread(q, k, v, q_scale, k_scale, v_scale, "bshd", torch.bfloat16)
    return attention_quantized(qkv, **options)


def _descale(name: str, descale: torch.Tensor | None, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    if descale is None:
        return torch.ones(shape, device=device)
    check_descale_form(name, descale, (shape,), device)
    # Reading the values, as `pack` does, would stall the stream, and fail in CUDA graphs and torch.compile. The kernel
    # relies on positive ones: the others must not give an answer.
    return torch.where(descale.isfinite() & (descale > 0), descale, float("nan"))
