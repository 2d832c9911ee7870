"""Every check of the public functions' arguments: each raises before any launch and says what is accepted."""

from __future__ import annotations

import math

import torch

from helion_attn.types import QuantizedQKV, Recipe

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (*IN_DTYPES, torch.float8_e4m3fn)
LAYOUTS = ("bhsd", "bshd")
MIN_D, MAX_D = 16, 256


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_device(name: str, x: torch.Tensor) -> None:
    """CUDA of compute capability 9.0, or CPU."""
    if x.device.type == "cpu":
        return
    if x.device.type != "cuda":
        raise NotImplementedError(
            f"{name} is on {x.device}; helion_attn runs on CUDA devices of compute capability 9.0 (H100, H200) and, in "
            f"Helion's interpreter, on the CPU"
        )
    capability = torch.cuda.get_device_capability(x.device)
    if capability != (9, 0):
        raise NotImplementedError(
            f"{name} is on {x.device}, of compute capability {capability[0]}.{capability[1]}; helion_attn's kernels "
            f"are compiled for 9.0 (H100, H200)"
        )


def check_layout(layout: str) -> None:
    """Accept "bhsd" and "bshd"."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; it must be one of {LAYOUTS}")


def check_recipe(recipe: Recipe) -> None:
    """Accept a `Recipe`."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {recipe!r}; it must be a helion_attn.Recipe, such as helion_attn.BALANCED")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> None:
    """Types, ranks, dtypes, devices and sizes of unquantised Q, K, V in `layout`."""
    check_layout(layout)
    axes = "[B, H, S, D]" if layout == "bhsd" else "[B, S, H, D]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions, {axes}")
        if x.dtype not in IN_DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {_names(IN_DTYPES)}")
        if x.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; every dimension must be at least 1")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and q has {q.dtype}; they must be the same")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}; they must be on the same device")
        if x.dtype == torch.float32 and x.stride(3) != 1:
            # Triton 3.6 wrote wrong values into the padding of these tensors' packed copies.
            raise ValueError(
                f"{name} is float32 with a last-dimension stride of {x.stride(3)}; it must be 1 (bfloat16 and float16 "
                f"tensors may have any)"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires grad; helion_attn has no backward pass: call it in torch.no_grad() or detach {name}"
            )
    check_device("q", q)
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    D, H, H_kv = q.size(3), q.size(heads), k.size(heads)
    check_head_dim("q has head dim", D)
    for name, x in (("k", k), ("v", v)):
        if x.size(3) != D:
            raise ValueError(f"{name} has head dim {x.size(3)} and q has {D}; they must be equal")
        if x.size(0) != q.size(0):
            raise ValueError(f"{name} has batch size {x.size(0)} and q has {q.size(0)}; they must be equal")
    if v.size(heads) != H_kv:
        raise ValueError(f"v has {v.size(heads)} heads and k has {H_kv}; they must be equal")
    if v.size(length) != k.size(length):
        raise ValueError(f"v has length {v.size(length)} and k has {k.size(length)}; they must be equal")
    if H % H_kv:
        raise ValueError(f"q has {H} heads and k has {H_kv}; q's must be a multiple of k's")


def check_sm_scale(sm_scale: float) -> None:
    """A finite number, not negative: the online softmax takes the maximum before it scales."""
    if not isinstance(sm_scale, (int, float)):
        raise TypeError(f"sm_scale is a {type(sm_scale).__name__}; it must be a float")
    if not math.isfinite(sm_scale) or sm_scale < 0:
        raise ValueError(f"sm_scale is {sm_scale}; it must be finite and not negative")


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """A dtype that the kernel stores."""
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {_names(OUT_DTYPES)}")


def check_quantized(qkv: QuantizedQKV, bm: int, bn: int, D_pad: int) -> None:
    """The fields of a `QuantizedQKV`, against the block sizes and padding of its head dim."""
    check_layout(qkv.layout)
    for name, size in (("M", qkv.M), ("N", qkv.N)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if qkv.dtype not in IN_DTYPES:
        raise TypeError(f"dtype is {qkv.dtype}; it must be one of {_names(IN_DTYPES)}")
    for name, ndim in (
        ("q8", 4),
        ("k8", 4),
        ("v8", 4),
        ("q_descale", 2),
        ("k_descale", 2),
        ("v_descale", 2),
        ("v_mean", 3),
    ):
        x = getattr(qkv, name)
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{name} is a {type(x).__name__}; it must be a torch.Tensor, as helion_attn.quantize makes it"
            )
        if x.dim() != ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {ndim} dimensions")
    check_device("q8", qkv.q8)
    (B, H), H_kv = qkv.q_descale.shape, qkv.k_descale.size(1)
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q_descale has {H} heads and k_descale {H_kv}; q's must be a multiple of k's")
    expected = {
        "q8": ((B * H, -(-qkv.M // bm), bm, D_pad), torch.float8_e4m3fn),
        "k8": ((B * H_kv, -(-qkv.N // bn), bn, D_pad), torch.float8_e4m3fn),
        "v8": ((B * H_kv, -(-qkv.N // bn), D_pad, bn), torch.float8_e4m3fn),
        "q_descale": ((B, H), torch.float32),
        "k_descale": ((B, H_kv), torch.float32),
        "v_descale": ((B, H_kv), torch.float32),
        "v_mean": ((B, H_kv, D_pad), torch.float32),
    }
    for name, (shape, dtype) in expected.items():
        x = getattr(qkv, name)
        if tuple(x.shape) != shape or x.dtype != dtype or not x.is_contiguous() or x.device != qkv.q8.device:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; for M={qkv.M}, N={qkv.N}, D={qkv.D} it must be "
                f"contiguous {dtype} {shape} on {qkv.q8.device}, as helion_attn.quantize makes it"
            )


def check_head_dim(name: str, D: int) -> None:
    """16..256."""
    if not MIN_D <= D <= MAX_D:
        raise ValueError(f"{name} {D}; it must lie in {MIN_D}..{MAX_D}")
