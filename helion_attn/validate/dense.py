"""Checks of the public functions' arguments: each raises before any launch and says what is accepted.

Those of packed sequences, the cache and quantised tensors alone are in files of their own.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch

from helion_attn.caller import outermost
from helion_attn.configs import (
    ALL_8_BIT,
    SUPPORTED_D,
    packing,
    uses_large_d,
)
from helion_attn.debug_state import debugging
from helion_attn.names import OTHER_LAYOUTS
from helion_attn.numerics import MAX_SEED
from helion_attn.options import ScoreOptions
from helion_attn.types import Layout, Recipe, RMSNorm, Rope, as_recipe, check_quantises
from helion_attn.validate.derivatives import has_tangent, is_forward_mode, is_inside_functorch, requires_grad
from helion_attn.validate.values import check_position_values, check_rope_positions

IN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OUT_DTYPES = (*IN_DTYPES, torch.float8_e4m3fn)
LAYOUTS = get_args(Layout)
MIN_D, MAX_D = 16, 1024

#: Most pages, heads and splits: their products have room in 32 bits.
MAX_COUNT = 2**24

#: Largest edge of a window that an op takes.
MAX_EDGE = 2**63 - 1

#: Range of a softcap: 1 / softcap times any reasonable scale stays finite in fp32, and scores keep their fractions.
MIN_SOFTCAP, MAX_SOFTCAP = 2.0**-40, 2.0**23

#: Range of a norm's eps: rows of zeros stay zeros.
MIN_EPS, MAX_EPS = 1e-12, 1.0

#: Largest sm_scale that stays finite in fp32, also over a softcap and times log2(e).
MAX_SM_SCALE = 2.0**64


def described(value: object) -> str:
    """Describe an argument for an error: a tensor by dtype and shape, other values by their type."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def shown(value: object) -> str:
    """Describe an argument for an error: a tensor by dtype and shape, other values by their `repr`."""
    return described(value) if isinstance(value, torch.Tensor) else repr(value)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


#: CUDA devices that were found to be of compute capability 9.0.
_CAPABLE: set[torch.device] = set()


def check_device(name: str, x: torch.Tensor) -> None:
    """CUDA of compute capability 9.0, or CPU."""
    if x.device.type == "cpu":
        return
    if x.device.type != "cuda":
        raise NotImplementedError(
            f"{name} is on {x.device}; helion_attn runs on CUDA devices of compute capability 9.0 (H100, H200) and, in "
            f"Helion's interpreter, on the CPU"
        )
    # To ask takes the host 5 us.
    eager = not torch.compiler.is_compiling()
    if eager and x.device in _CAPABLE:
        return
    capability = torch.cuda.get_device_capability(x.device)
    if capability != (9, 0):
        raise NotImplementedError(
            f"{name} is on {x.device}, of compute capability {capability[0]}.{capability[1]}; helion_attn's kernels "
            f"are compiled for 9.0 (H100, H200)"
        )
    if eager:
        _CAPABLE.add(x.device)


def check_layout(layout: str) -> None:
    """Accept "bhsd" and "bshd"."""
    if layout in LAYOUTS:
        return
    same = OTHER_LAYOUTS.get(layout.upper()) if isinstance(layout, str) else None
    here = f": {same!r} is what others call {layout!r}" if same else ""
    raise ValueError(f"layout is {layout!r}; it must be one of {LAYOUTS}{here}")


def check_recipe(recipe: Recipe, D: int, D_v: int) -> None:
    """Accept a `Recipe` by which heads of sizes D and D_v can be quantised."""
    recipe = as_recipe(recipe)
    check_recipe_dims(recipe, D, D_v)
    if recipe.is_given:
        check_quantises(recipe)


def check_recipe_dims(recipe: Recipe, D: int, D_v: int) -> None:
    """Accept a `Recipe` that heads of sizes D and D_v can have."""
    recipe = as_recipe(recipe)
    if recipe.bits != ALL_8_BIT and max(D, D_v) > SUPPORTED_D[-1]:
        raise ValueError(
            f"recipe has {recipe.pv_dtype} P and V and the head dim is {max(D, D_v)}; above {SUPPORTED_D[-1]} it must "
            f"have 8-bit dtypes"
        )
    if recipe.hadamard:
        check_even("recipe has hadamard=True and the head dim is", D)


def check_even(what: str, D: int) -> None:
    """A head dim whose channels a Hadamard matrix can mix; `what` has it."""
    if D < 1 or D % 2:
        raise ValueError(f"{what} {D}; it must be even: of an odd one a Hadamard rotation mixes no channels")


def check_rope_tables(rope: Rope, D: int, device: torch.device) -> None:
    """The tables of a `Rope`, for head dim D."""
    if not isinstance(rope, Rope):
        raise TypeError(f"rope is a {type(rope).__name__}; it must be a helion_attn.Rope")
    for name in ("cos", "sin"):
        x = getattr(rope, name)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"rope.{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 2 or not 1 <= x.size(1) <= D // 2 or x.size(0) < 1:
            raise ValueError(f"rope.{name} has shape {tuple(x.shape)}; it must be [positions, R / 2] with R <= {D}")
        if x.dtype not in IN_DTYPES or x.dtype != rope.cos.dtype:
            raise TypeError(f"rope.{name} has dtype {x.dtype}; both must have the same of {_names(IN_DTYPES)}")
        if x.shape != rope.cos.shape:
            raise ValueError(
                f"rope.sin has shape {tuple(x.shape)} and rope.cos {tuple(rope.cos.shape)}; they must be equal"
            )
        if not x.is_contiguous() or x.device != device:
            raise ValueError(f"rope.{name} has strides {x.stride()} on {x.device}; it must be contiguous, on {device}")
        check_no_grad(f"rope.{name}", x)


def check_rotatable(name: str, x: torch.Tensor, option: str = "rope") -> None:
    """What Triton 3.6 can rotate, or normalise."""
    if x.stride(3) != 1:
        # As with float32, Triton 3.6 wrote wrong values into the padding of these tensors' packed copies.
        raise ValueError(f"{name} has a last-dimension stride of {x.stride(3)}; with {option} it must be 1")


def check_is_norm(name: str, norm: RMSNorm | None) -> None:
    """None, or an `RMSNorm`, and no module of PyTorch's or of a model."""
    if isinstance(norm, torch.nn.Module):
        raise TypeError(
            f"{name} is a module, {norm}; it must be None or a helion_attn.RMSNorm: pass "
            f"helion_attn.RMSNorm(module.weight, eps) with what it adds to the mean as eps"
        )
    if norm is not None and not isinstance(norm, RMSNorm):
        raise TypeError(f"{name} is {described(norm)}; it must be None or a helion_attn.RMSNorm")


def check_norm(name: str, norm: RMSNorm | None, of: str, x: torch.Tensor, differentiable: bool = False) -> None:
    """None, or an `RMSNorm` for x [B, heads, S, D], called `of`; `differentiable`: it may require grad."""
    check_is_norm(name, norm)
    if norm is None:
        return
    weight, eps, heads, D = norm.weight, norm.eps, x.size(1), x.size(3)
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{name}.weight is a {type(weight).__name__}; it must be a torch.Tensor")
    if weight.dtype not in IN_DTYPES:
        raise TypeError(f"{name}.weight has dtype {weight.dtype}; it must be one of {_names(IN_DTYPES)}")
    if tuple(weight.shape) not in ((D,), (heads * D,)):
        raise ValueError(
            f"{name}.weight has shape {tuple(weight.shape)}; it must be ({D},), for every head of {of}, or "
            f"({heads * D},), for its {heads} heads together"
        )
    if not weight.is_contiguous() or weight.device != x.device:
        raise ValueError(
            f"{name}.weight has strides {weight.stride()} on {weight.device}; it must be contiguous, on {x.device}"
        )
    check_derivatives(f"{name}.weight", weight, differentiable)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        raise TypeError(f"{name}.eps is a {type(eps).__name__}; it must be a float")
    if not MIN_EPS <= eps <= MAX_EPS:
        raise ValueError(f"{name}.eps is {eps}; it must lie in {MIN_EPS:g}..{MAX_EPS:g}")
    check_rotatable(of, x, name)


def check_positions(name: str, at: torch.Tensor, size: int, device: torch.device) -> None:
    """A position for each row."""
    if not isinstance(at, torch.Tensor) or at.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {described(at)}; it must be an int32 or int64 tensor")
    if tuple(at.shape) != (size,) or at.device != device:
        raise ValueError(f"{name} has shape {tuple(at.shape)} on {at.device}; it must be ({size},) on {device}")
    if not at.is_contiguous():
        raise ValueError(f"{name} has strides {at.stride()}; it must be contiguous: pass {name}.contiguous()")


def check_rope(rope: Rope, q: torch.Tensor, k: torch.Tensor) -> None:
    """The fields of a `Rope`, for q [B, H, M, D] and k [B, H_kv, N, D]."""
    check_rope_tables(rope, q.size(3), q.device)
    check_rotatable("q", q)
    check_rotatable("k", k)
    M, N, rows = q.size(2), k.size(2), rope.cos.size(0)
    for name, at, size in (("q_positions", rope.q_positions, M), ("k_positions", rope.k_positions, N)):
        if at is not None:
            check_positions(f"rope.{name}", at, size, q.device)
        elif rows < N:
            raise ValueError(f"rope.cos has {rows} positions; without rope.{name} it must have at least N = {N}")
    if debugging():
        check_rope_positions(rope)
    if rope.q_positions is None and M > N:
        raise ValueError(
            f"rope.q_positions is None with {M} queries and {N} keys; more queries than keys need positions"
        )


def check_rope_of(x: torch.Tensor, rope: Rope, positions: torch.Tensor | None) -> None:
    """The tables of a `Rope`, and positions, for one tensor x [B, H, S, D]."""
    check_rope_tables(rope, x.size(3), x.device)
    check_rotatable("x", x)
    S, rows = x.size(2), rope.cos.size(0)
    for name in ("q_positions", "k_positions"):
        if getattr(rope, name) is not None:
            raise ValueError(f"rope.{name} is a tensor; it must be None: the positions of x are an argument")
    if positions is not None:
        check_positions("positions", positions, S, x.device)
        if debugging():
            check_position_values("positions", positions, rows)
    elif rows < S:
        raise ValueError(f"rope.cos has {rows} positions; without positions it must have at least S = {S}")


def check_seed(seed: int) -> None:
    """Check the seed of a rotation's signs."""
    if type(seed) is not int or not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed!r}; it must be an int in 0..2**63 - 1")


def check_descale_form(
    name: str, descale: torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> None:
    """All of a descale but its values."""
    if not isinstance(descale, torch.Tensor):
        raise TypeError(f"{name} is a {type(descale).__name__}; it must be a float32 tensor")
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} has dtype {descale.dtype}; it must be float32")
    if descale.device != device:
        raise ValueError(f"{name} is on {descale.device}; it must be on {device}")
    if tuple(descale.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(descale.shape)}; it must be one of {shapes}")
    check_no_grad(name, descale)


def check_descale(
    name: str, descale: float | torch.Tensor, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> torch.Tensor:
    """A descale as an fp32 tensor of one of the shapes: finite and positive, which is read from the device."""
    if isinstance(descale, (int, float)):
        descale = torch.tensor(float(descale), dtype=torch.float32, device=device)
    elif not isinstance(descale, torch.Tensor):
        raise TypeError(f"{name} is a {type(descale).__name__}; it must be a number or a float32 tensor")
    check_descale_form(name, descale, shapes, device)
    bad = descale[~(descale.isfinite() & (descale > 0))]
    if bad.numel():
        raise ValueError(f"{name} holds {bad[0].item()}; every value must be finite and positive")
    return descale


def check_dtype(dtype: torch.dtype) -> None:
    """The dtype that unquantised tensors have, or would have."""
    if dtype not in IN_DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be one of {_names(IN_DTYPES)}")


def check_is_tensor(name: str, x: object) -> None:
    """No list, array or None."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")


def check_derivatives(name: str, x: torch.Tensor, differentiable: bool) -> None:
    """Nobody waits for a derivative of it but, if `differentiable`, for a gradient of torch.autograd."""
    if torch.is_grad_enabled() and requires_grad(x):
        if not differentiable:
            raise RuntimeError(
                f"{name} requires grad; helion_attn has no backward pass of this, but of attention and "
                f"attention_varlen: call it in torch.no_grad() or detach {name}"
            )
        if is_inside_functorch():
            raise RuntimeError(
                f"{name} requires grad inside of torch.func.grad or torch.vmap, of which helion_attn has no backward "
                f"pass: use torch.autograd, or detach {name}"
            )
    if is_forward_mode() and has_tangent(x):
        raise RuntimeError(
            f"{name} has a tangent, of torch.func.jvp, torch.func.jacfwd or torch.autograd.forward_ad; helion_attn has "
            f"no derivative: detach {name}"
        )


def check_no_grad(name: str, x: torch.Tensor) -> None:
    """Nobody waits for a derivative of it, in reverse or forward mode."""
    check_derivatives(name, x, differentiable=False)


def check_no_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]) -> None:
    """None of `attention`'s arguments requires grad: what takes them computes no gradient."""
    norms = {f"{name}.weight": getattr(options.get(name), "weight", None) for name in ("q_norm", "k_norm")}
    for name, x in {"q": q, "k": k, "v": v, "sinks": options.get("sinks"), **norms}.items():
        if isinstance(x, torch.Tensor):
            check_no_grad(name, x)


def check_tensors(
    tensors: dict[str, torch.Tensor],
    axes: str,
    dtypes: tuple[torch.dtype, ...] = IN_DTYPES,
    may_be_empty: bool = False,
    differentiable: bool = False,
) -> None:
    """Types, ranks, dtypes, devices and strides, by argument; dtype and device are those of the first.

    Args:
        tensors: by name.
        axes: "[...]", their names.
        dtypes: accepted.
        may_be_empty: the first dimension may be 0.
        differentiable: they may require grad.
    """
    ndim = axes.count(",") + 1
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            check_is_tensor(name, x)
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; it must be a dense one: helion_attn.attention_varlen takes sequences of "
                f"different lengths, as {name}.values() [tokens, heads, head dim] and {name}.offsets() in int32"
            )
        if x.dim() != ndim:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {ndim} dimensions, {axes}")
        if x.dtype not in dtypes:
            packed = x.dtype == torch.float8_e4m3fn and dtypes == IN_DTYPES
            remedy = " (what is quantised already goes through helion_attn.pack)" if packed else ""
            raise TypeError(f"{name} has dtype {x.dtype}; it must be one of {_names(dtypes)}{remedy}")
        if x.numel() == 0 and not may_be_empty:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; every dimension must be at least 1")
        if may_be_empty and 0 in x.shape[1:]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; every dimension but the first must be at least 1")
        if x.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {x.dtype} and {first_name} has {first.dtype}; they must be the same")
        if x.device != first.device:
            raise ValueError(
                f"{name} is on {x.device} and {first_name} on {first.device}; they must be on the same device"
            )
        if x.stride(-1) == 0 and x.size(-1) > 1:
            # Triton 3.6 wrote wrong values into the padding of such a tensor's packed copy.
            raise ValueError(f"{name} has strides {x.stride()}; the last dimension must not be an expanded one")
        if x.dtype == torch.float32 and (x.stride(-1) != 1 or any(stride % 4 for stride in x.stride()[:-1])):
            # Triton 3.6 wrote wrong values into the padding of these tensors' packed copies.
            raise ValueError(
                f"{name} is float32 with strides {x.stride()}; the last must be 1 and the others multiples of 4 "
                f"(bfloat16 and float16 tensors may have any)"
            )
        check_derivatives(name, x, differentiable)
    check_device(first_name, first)


def check_inputs(
    tensors: dict[str, torch.Tensor],
    layout: str,
    dtypes: tuple[torch.dtype, ...] = IN_DTYPES,
    differentiable: bool = False,
) -> None:
    """`check_tensors` of [B, H, S, D] or [B, S, H, D]."""
    if layout not in LAYOUTS:
        check_layout(layout)
    axes = "[B, H, S, D]" if layout == "bhsd" else "[B, S, H, D]"
    check_tensors(tensors, axes, dtypes, differentiable=differentiable)


def check_x(x: torch.Tensor, layout: str) -> None:
    """One tensor in `layout`, as `check_qkv` has it of three."""
    check_inputs({"x": x}, layout)
    check_head_dim("x has head dim", x.size(3))


def check_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: str,
    dtypes: tuple[torch.dtype, ...] = IN_DTYPES,
    names: tuple[str, str, str] = ("q", "k", "v"),
    differentiable: bool = False,
) -> None:
    """Types, ranks, dtypes, devices and sizes of Q, K, V in `layout`; `names` are what the caller calls them."""
    q_name, k_name, v_name = names
    check_inputs({q_name: q, k_name: k, v_name: v}, layout, dtypes, differentiable)
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    B, D, H, H_kv = q.size(0), q.size(3), q.size(heads), k.size(heads)
    check_head_dim(f"{q_name} has head dim", D)
    check_head_dim(f"{v_name} has head dim", v.size(3))
    if k.size(3) != D:
        raise ValueError(
            f"{k_name} has head dim {k.size(3)} and {q_name} has {D}; they must be equal ({v_name}'s may differ)"
        )
    for name, x in ((k_name, k), (v_name, v)):
        if x.size(0) != B:
            one = next((few for few, size in ((name, x.size(0)), (q_name, B)) if size == 1), None)
            remedy = f": pass {one}.expand({max(B, x.size(0))}, -1, -1, -1)" if one else ""
            raise ValueError(f"{name} has batch size {x.size(0)} and {q_name} has {B}; they must be equal{remedy}")
    if v.size(heads) != H_kv:
        raise ValueError(f"{v_name} has {v.size(heads)} heads and {k_name} has {H_kv}; they must be equal")
    if v.size(length) != k.size(length):
        raise ValueError(f"{v_name} has length {v.size(length)} and {k_name} has {k.size(length)}; they must be equal")
    if H % H_kv:
        raise ValueError(f"{q_name} has {H} heads and {k_name} has {H_kv}; {q_name}'s must be a multiple of {k_name}'s")
    # Comparisons of sizes would be guards of a compiled graph.
    if not torch.compiler.is_compiling() and looks_swapped(q.size(length), H_kv, k.size(length)):
        warn_of_swapped_layout(q, k, layout)


class SwappedLayoutWarning(UserWarning):
    """Warning that tensors look as if they had the other `layout`: more heads than models have, and few tokens.

    A process says it once.

    Example:
        import warnings

        warnings.simplefilter("ignore", ha.SwappedLayoutWarning)  # where a model has so many heads
    """


#: Said already.
_SAID: set[type[Warning]] = set()

#: The most heads that models have. More, of few tokens, are tokens of few heads: shorter prompts are not told apart.
MOST_HEADS = 128


def looks_swapped(M: int, H_kv: int, N: int) -> bool:
    """Whether heads and lengths look exchanged: lengths could be the query heads and KV heads of a model, H_kv not."""
    return H_kv > MOST_HEADS >= M and M % N == 0


def warn_of_swapped_layout(q: torch.Tensor, k: torch.Tensor, layout: str) -> None:
    """Say, once a process, that heads and lengths look exchanged, to who called a function that takes a layout."""
    code, level = outermost()
    called = getattr(importlib.import_module("helion_attn"), code.co_name, None)
    if SwappedLayoutWarning in _SAID or called is None or "layout" not in inspect.signature(called).parameters:
        return
    _SAID.add(SwappedLayoutWarning)
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    warnings.warn(
        f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}; with layout={layout!r} k has {k.size(heads)} heads of "
        f"{k.size(length)} tokens: if these are {k.size(heads)} tokens of {k.size(length)} heads, pass "
        f"layout={other!r} to {code.co_name}",
        SwappedLayoutWarning,
        stacklevel=level,
    )


def check_quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: Recipe,
    layout: str,
    rope: Rope | None,
    q_norm: RMSNorm | None,
    k_norm: RMSNorm | None,
    differentiable: bool = False,
) -> None:
    """The arguments of `quantize`, or with gradients, if `differentiable`, those of `attention` that it has too."""
    check_qkv(q, k, v, layout, differentiable=differentiable)
    check_recipe(recipe, q.size(3), v.size(3))
    if layout == "bshd":
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if q_norm is not None:
        check_norm("q_norm", q_norm, "q", q, differentiable)
    if k_norm is not None:
        check_norm("k_norm", k_norm, "k", k, differentiable)
    if rope is not None:
        check_rope(rope, q, k)


def check_table(name: str, x: torch.Tensor, device: torch.device) -> None:
    """The form of int32 numbers that are not read on the host, but for their shape."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; it must be an int32 tensor")
    if x.dtype != torch.int32:
        remedy = f": pass {name}.to(torch.int32)" if x.dtype == torch.int64 else ""
        raise TypeError(f"{name} has dtype {x.dtype}; it must be int32{remedy}")
    if not x.is_contiguous() or x.device != device:
        raise ValueError(f"{name} has strides {x.stride()} on {x.device}; it must be contiguous, on {device}")


def check_sm_scale(sm_scale: float, name: str = "sm_scale") -> None:
    """Not negative: the online softmax takes the maximum before it scales."""
    if not isinstance(sm_scale, (int, float)) or isinstance(sm_scale, bool):
        raise TypeError(f"{name} is a {type(sm_scale).__name__}; it must be a float")
    if not 0 <= sm_scale <= MAX_SM_SCALE:  # which torch.compile can trace of a scale made from a size
        raise ValueError(f"{name} is {sm_scale}; it must lie in 0..2**64")


def check_flag(flag: bool, name: str) -> None:
    """A bool, 0 or 1: the string "no" is true."""
    if not isinstance(flag, bool) and not (type(flag) is int and flag in (0, 1)):
        raise TypeError(f"{name} is {shown(flag)}; it must be a bool")


def check_window(window: tuple[int, int] | None, name: str = "window") -> None:
    """None, or two ints, each -1 or more."""
    if window is None:
        return
    if not isinstance(window, (tuple, list)) or len(window) != 2 or any(type(edge) is bool for edge in window):
        raise TypeError(f"{name} is {shown(window)}; it must be None or (left, right), two ints")
    for edge in window:
        if not isinstance(edge, (int, torch.SymInt)):
            raise TypeError(f"{name} is {shown(window)}; it must be None or (left, right), two ints")
        if not -1 <= edge <= MAX_EDGE:
            raise ValueError(f"{name} is {window!r}; left and right must be -1, for unlimited, or in 0..2**63 - 1")


def check_softcap(softcap: float | None, no_cap: float | None = None) -> None:
    """`no_cap`, or a positive number that fp32 can divide by."""
    if softcap is None and no_cap is None:
        return
    if not isinstance(softcap, (int, float)) or isinstance(softcap, bool):
        accepted = "None or a float" if no_cap is None else "a float"
        raise TypeError(f"softcap is a {type(softcap).__name__}; it must be {accepted}")
    if softcap != no_cap and not MIN_SOFTCAP <= softcap <= MAX_SOFTCAP:
        raise ValueError(f"softcap is {softcap}; it must be {no_cap}, for no cap, or lie in 2**-40..2**23")


def check_sinks(
    sinks: torch.Tensor | None,
    H: int,
    device: torch.device,
    name: str = "sinks",
    differentiable: bool = False,
) -> None:
    """None, or one logit a query head; with a gradient if `differentiable`."""
    if sinks is None:
        return
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"{name} is a {type(sinks).__name__}; it must be None or a torch.Tensor")
    if sinks.dtype not in IN_DTYPES:
        raise TypeError(f"{name} has dtype {sinks.dtype}; it must be one of {_names(IN_DTYPES)}")
    if tuple(sinks.shape) != (H,):
        raise ValueError(f"{name} has shape {tuple(sinks.shape)}; it must be ({H},), one logit a query head")
    if sinks.device != device:
        raise ValueError(f"{name} is on {sinks.device} and q on {device}; they must be on the same device")
    check_derivatives(name, sinks, differentiable)


#: Checks of options of scores that are given.
SCORE_CHECKS: dict[str, Callable[[Any], None]] = {
    "sm_scale": check_sm_scale,
    "window": check_window,
    "softcap": check_softcap,
}


def check_options(
    scores: ScoreOptions,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    H: int,
    device: torch.device,
    out_dtypes: tuple[torch.dtype, ...] = OUT_DTYPES,
    differentiable: bool = False,
) -> None:
    """Check the options that every attention has, for tensors with H query heads on `device`."""
    check_flag(scores.causal, "causal")
    check_flag(return_lse, "return_lse")
    for name, check in SCORE_CHECKS.items():
        if (value := getattr(scores, name)) is not None:
            check(value)
    if scores.sinks is not None:
        check_sinks(scores.sinks, H, device, differentiable=differentiable)
    if out_dtype is not None and out_dtype not in out_dtypes:
        raise TypeError(f"out_dtype is {out_dtype}; it must be one of {_names(out_dtypes)}")


def check_splits(num_splits: int | None, N: int, D: int, D_v: int, recipe: Recipe) -> None:
    """None, or an int in 1..blocks of N keys; 1 where the kernel does not split them."""
    if num_splits is None:
        return
    if uses_large_d(D, D_v, recipe.bits):
        check_count("num_splits", num_splits)
        if num_splits > 1:
            raise ValueError(f"num_splits is {num_splits}; with D {D} and D_v {D_v} it must be 1 or None")
    else:
        check_count("num_splits", num_splits, -(-N // packing(D, D_v, recipe.bits).bn))


def check_count(name: str, count: int, largest: int = MAX_COUNT) -> None:
    """An int in 1..largest."""
    if type(count) is not int:
        raise TypeError(f"{name} is a {type(count).__name__}; it must be an int")
    if not 1 <= count <= largest:
        raise ValueError(f"{name} is {count}; it must lie in 1..{largest}")


def check_head_dim(what: str, D: int) -> None:
    """16..1024; `what` has one, as in "q has head dim"."""
    if not MIN_D <= D <= MAX_D:
        raise ValueError(f"{what} {D}; it must lie in {MIN_D}..{MAX_D}")
