"""Norms and RoPE of a model that is fused, as this package takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from helion_attn import auto
from helion_attn.api import dense_problem
from helion_attn.integrations.kept import Kept
from helion_attn.transforms import apply_rope
from helion_attn.types import BALANCED, RMSNorm, Rope, unchecked_rope

#: What a model hands its norm of x [B, S, heads, D]: x, x with S and heads swapped, or x with the heads joined.
NormLayout = Literal["bshd", "bhsd", "bsc"]

#: Classes of norms whose weight can be read, by module and name: the attribute that is their eps, and what is added to
#: the weight.
NORMS = {
    ("torch.nn.modules.normalization", "RMSNorm"): ("eps", 0.0),
    ("diffusers.models.normalization", "RMSNorm"): ("eps", 0.0),
    ("transformers.models.qwen3.modeling_qwen3", "Qwen3RMSNorm"): ("variance_epsilon", 0.0),
    ("transformers.models.gemma3.modeling_gemma3", "Gemma3RMSNorm"): ("eps", 1.0),
}

#: Orders of tokens for which `Ropes` keeps a table at a time.
MOST_ORDERS = 16


class Ropes:
    """A table, for all tokens and for some of them.

    Attributes:
        whole: token i is at i.
    """

    def __init__(self, whole: Rope) -> None:
        self.whole = whole
        #: By the identity of an order, which is kept with it, and the number of keys.
        self._some: dict[tuple[int, int], tuple[torch.Tensor | None, Rope]] = {}

    def of(self, keys: int, order: torch.Tensor | None = None) -> Rope:
        """For all queries and the first keys.

        Args:
            keys: how many.
            order: int64 [tokens], the token at each place; None where they are in their own order.
        """
        if order is None and keys == self.whole.cos.size(0):
            return self.whole
        found = self._some.get((id(order), keys))
        if found is None or found[0] is not order:
            cos = self.whole.cos
            if order is None:
                q_at, k_at = torch.arange(cos.size(0), device=cos.device), None
            else:
                q_at, k_at = order, order[:keys]
            made = unchecked_rope(cos, self.whole.sin, self.whole.interleaved, q_at, k_at)
            if len(self._some) >= MOST_ORDERS:
                self._some.clear()
            self._some[id(order), keys] = found = order, made
        return found[1]


def is_captured(x: torch.Tensor) -> bool:
    """Whether what is done with x becomes a part of a graph, which is run again on other values."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _ropes(tables: tuple[torch.Tensor, ...], make: Callable[..., Rope | None], *sizes: int) -> Ropes | None:
    rope = make(*tables, *sizes)
    return None if rope is None else Ropes(rope)


_KEPT = Kept(_ropes)


def ropes_of(make: Callable[..., Rope | None], tables: tuple[torch.Tensor, ...] | None, *sizes: int) -> Ropes | None:
    """Return what `make` makes of tables and sizes, kept until a table is gone or written to.

    Layers of a forward pass are given the same tensors, so that one of them converts the tables. In a graph each layer
    does, and so it does with tensors that do not count their changes.

    Args:
        make: returns a `Rope` of copies, or None where the tables are not for fusing.
        tables: of the model; None of a model without RoPE.
        sizes: further arguments of `make`.
    """
    if tables is None:
        return None
    return _ropes(tables, make, *sizes) if is_captured(tables[0]) else _KEPT.of(tables, make, *sizes)


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """A module's own parameter, or the tensor that a replica has in its place; None if it has none."""
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def must_be_called(module: Any, x: torch.Tensor, layout: NormLayout) -> bool:
    """Whether a norm of x [B, S, heads, D] may do something else than its class does with its weight, where x is.

    So it is with hooks, parametrizations and other classes, with a forward of its own, by which accelerate and
    diffusers offload and cast weights, and with a weight that is elsewhere.
    """
    cls = type(module)
    if (cls.__module__, cls.__name__) not in NORMS or "forward" in module.__dict__:
        return True
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    if hooks or _has_any_global_hook():
        return True
    weight = parameter_of(module, "weight")
    if type(weight) not in (torch.nn.Parameter, torch.Tensor) or parameter_of(module, "bias") is not None:
        return True
    channels = x.size(2) * x.size(3) if layout == "bsc" else x.size(3)
    is_of_channels = weight.dim() == 1 and weight.size(0) == channels
    return not (is_of_channels and weight.device == x.device and weight.is_contiguous())


def normalised(module: Any, x: torch.Tensor, layout: NormLayout) -> torch.Tensor:
    """Call a model's norm on x [B, S, heads, D], of which it gets what the model hands it."""
    if layout == "bsc":
        return module(x.flatten(2)).unflatten(2, x.shape[2:])
    return module(x.transpose(1, 2)).transpose(1, 2) if layout == "bhsd" else module(x)


def left_to_fuse(module: Any, x: torch.Tensor, layout: NormLayout) -> tuple[torch.Tensor, Any]:
    """Call a norm on x [B, S, heads, D] if it must be called.

    Returns:
        x without its norm, and the module; or x with its norm, or of a model without one, and None.
    """
    if module is None or not must_be_called(module, x, layout):
        return x, module
    return normalised(module, x, layout), None


class Before(NamedTuple):
    """Norms of Q and K, and then RoPE, that attention's inputs are still without. None of what there is none.

    Attributes:
        q_norm: the model's module, which need not be called.
        k_norm: the model's module, which need not be called.
        layout: what the norms are handed.
        ropes: of the model.
    """

    q_norm: torch.nn.Module | None = None
    k_norm: torch.nn.Module | None = None
    layout: NormLayout = "bshd"
    ropes: Ropes | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return self.q_norm is None and self.k_norm is None and self.ropes is None

    def options(self, q: torch.Tensor, k: torch.Tensor, order: torch.Tensor | None = None) -> dict[str, Any]:
        """Options of `attention` that do it, for q [B, S, H, D] and the first keys k; `order` is as `Ropes` has it."""
        norms = {"q_norm": (self.q_norm, q), "k_norm": (self.k_norm, k)}
        found: dict[str, Any] = {name: norm_of(module, x) for name, (module, x) in norms.items() if module is not None}
        return found if self.ropes is None else found | {"rope": self.ropes.of(k.size(1), order)}

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [B, S, heads, D], normalised and rotated, in their dtype."""
        q, k = (
            x if norm is None else normalised(norm, x, self.layout).to(x.dtype)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        if self.ropes is None:
            return q, k
        return apply_rope(q, self.ropes.whole, layout="bshd"), apply_rope(k, self.ropes.whole, layout="bshd")


def norm_of(module: Any, x: torch.Tensor) -> RMSNorm:
    """The norm of x that a module computes which need not be called."""
    eps_name, added = NORMS[type(module).__module__, type(module).__name__]
    weight, eps = parameter_of(module, "weight"), getattr(module, eps_name)
    return RMSNorm(added + weight.float() if added else weight, torch.finfo(x.dtype).eps if eps is None else eps)


def prefers_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sm_scale: float | None) -> bool:
    """Whether "auto" leaves to PyTorch's attention a call on tensors [B, S, heads, D] that are normalised and rotated.

    Args:
        q: of the call's shape, dtype and device.
        k: the keys.
        v: the values.
        causal: as `attention` has it.
        sm_scale: as `attention` has it.
    """
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "layout": "bshd", "recipe": BALANCED}
    return auto.takes_pytorch(q, k, v, options, lambda: dense_problem(q, k, v, **options))
