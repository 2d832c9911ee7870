"""Norms of Q and K and RoPE that a model has before attention, as this package fuses them into quantising."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook

from helion_attn import auto
from helion_attn.api import dense_problem
from helion_attn.backward.prologue import rotated
from helion_attn.integrations.graphs import is_captured
from helion_attn.integrations.tensor_memo import TensorMemo
from helion_attn.problem import rope_arguments
from helion_attn.transforms import apply_rope
from helion_attn.types import BALANCED, RMSNorm, Rope, unchecked_rope
from helion_attn.validate.derivatives import needs_gradient

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

#: Orders of tokens for which `RopeCache` keeps a table at a time.
MAX_ORDERS = 16


class RopeCache:
    """Tables of RoPE of a model, for all tokens and for some of them.

    Attributes:
        full: the tables of all tokens, in their order.
    """

    def __init__(self, full: Rope) -> None:
        self.full = full
        #: By the identity of an order, which is kept with it, and the number of keys.
        self._subsets: dict[tuple[int, int], tuple[torch.Tensor | None, Rope]] = {}

    def rope(self, num_keys: int, order: torch.Tensor | None = None) -> Rope:
        """Return the tables of all queries and of the first keys.

        Args:
            num_keys: how many keys.
            order: int64 [tokens], the token at each place; None where they are in their own order.
        """
        if order is None and num_keys == self.full.cos.size(0):
            return self.full
        found = self._subsets.get((id(order), num_keys))
        if found is None or found[0] is not order:
            cos = self.full.cos
            if order is None:
                q_positions, k_positions = torch.arange(cos.size(0), device=cos.device), None
            else:
                q_positions, k_positions = order, order[:num_keys]
            rope = unchecked_rope(cos, self.full.sin, self.full.interleaved, q_positions, k_positions)
            if len(self._subsets) >= MAX_ORDERS:
                self._subsets.clear()
            self._subsets[id(order), num_keys] = found = order, rope
        return found[1]


def _make_rope_cache(
    tables: tuple[torch.Tensor, ...], make: Callable[..., Rope | None], *sizes: int
) -> RopeCache | None:
    rope = make(*tables, *sizes)
    return None if rope is None else RopeCache(rope)


_KEPT = TensorMemo(_make_rope_cache)


def get_rope_cache(
    make: Callable[..., Rope | None], tables: tuple[torch.Tensor, ...] | None, *sizes: int
) -> RopeCache | None:
    """Return the RoPE that `make` makes of tables and sizes, kept until a table is gone or written to.

    Layers of a forward pass are given the same tensors, so that one of them converts the tables. In a graph each layer
    does, and so it does with tensors that do not count their changes.

    Args:
        make: returns a `Rope` of copies, or None where the tables are not for fusing.
        tables: of the model; None of a model without RoPE.
        sizes: further arguments of `make`.
    """
    if tables is None:
        return None
    return _make_rope_cache(tables, make, *sizes) if is_captured(tables[0]) else _KEPT.get(tables, make, *sizes)


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """Return a module's own parameter, or the tensor that a replica has in its place; None if it has none."""
    found = module._parameters.get(name)
    return module.__dict__.get(name) if found is None else found


def must_be_called(module: Any, x: torch.Tensor, layout: NormLayout) -> bool:
    """Return whether a norm of x [B, S, heads, D] may do something else than its class does with its weight.

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


def apply_norm(module: Any, x: torch.Tensor, layout: NormLayout) -> torch.Tensor:
    """Return the norm of x [B, S, heads, D], called with the shape that the model hands it."""
    if layout == "bsc":
        return module(x.flatten(2)).unflatten(2, x.shape[2:])
    return module(x.transpose(1, 2)).transpose(1, 2) if layout == "bhsd" else module(x)


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotate x [B, S, heads, D], row i by position i; by PyTorch where its gradient is needed."""
    if not needs_gradient(x):
        return apply_rope(x, rope, layout="bshd")
    return rotated(x.transpose(1, 2).float(), rope_arguments(rope), None, 0).transpose(1, 2).to(x.dtype)


def fusable_norm(module: Any, x: torch.Tensor, layout: NormLayout) -> tuple[torch.Tensor, Any]:
    """Call a norm on x [B, S, heads, D] if it must be called.

    Returns:
        x without its norm, and the module; or x with its norm, or of a model without one, and None.
    """
    if module is None or not must_be_called(module, x, layout):
        return x, module
    return apply_norm(module, x, layout), None


class QKPrologue(NamedTuple):
    """Norms of Q and K, and then RoPE, that attention's inputs are still without. None of what there is none."""

    q_norm: torch.nn.Module | None = None  # the model's module, which need not be called
    k_norm: torch.nn.Module | None = None  # the model's module, which need not be called
    layout: NormLayout = "bshd"  # what the norms are handed
    rope_cache: RopeCache | None = None  # the model's RoPE

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing left to do."""
        return self.q_norm is None and self.k_norm is None and self.rope_cache is None

    def options(self, q: torch.Tensor, k: torch.Tensor, order: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the options of `attention` that fuse it.

        Args:
            q: [B, S, H, D].
            k: [B, N, H_kv, D], the first keys.
            order: as `RopeCache.rope` has it.
        """
        norms = {"q_norm": (self.q_norm, q), "k_norm": (self.k_norm, k)}
        options: dict[str, Any] = {
            name: rms_norm_of(module, x) for name, (module, x) in norms.items() if module is not None
        }
        return options if self.rope_cache is None else options | {"rope": self.rope_cache.rope(k.size(1), order)}

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k [B, S, heads, D], normalised and rotated, in their dtype."""
        q, k = (
            x if norm is None else apply_norm(norm, x, self.layout).to(x.dtype)
            for x, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        if self.rope_cache is None:
            return q, k
        rope = self.rope_cache.full
        return rotate(q, rope), rotate(k, rope)


def split_prologue(
    q: torch.Tensor, k: torch.Tensor, q_norm: Any, k_norm: Any, layout: NormLayout, rope_cache: RopeCache | None
) -> tuple[torch.Tensor, torch.Tensor, QKPrologue]:
    """Call the norms of q and k [B, S, heads, D] that must be called; return q, k, and what is left to fuse."""
    q, q_norm = fusable_norm(q_norm, q, layout)
    k, k_norm = fusable_norm(k_norm, k, layout)
    return q, k, QKPrologue(q_norm, k_norm, layout, rope_cache)


def rms_norm_of(module: Any, x: torch.Tensor) -> RMSNorm:
    """Return the norm of x that a module computes which need not be called."""
    eps_name, added = NORMS[type(module).__module__, type(module).__name__]
    weight, eps = parameter_of(module, "weight"), getattr(module, eps_name)
    return RMSNorm(added + weight.float() if added else weight, torch.finfo(x.dtype).eps if eps is None else eps)


def prefers_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, sm_scale: float | None) -> bool:
    """Return whether "auto" leaves to PyTorch's attention a call on normalised and rotated tensors [B, S, heads, D].

    Args:
        q: of the call's shape, dtype and device.
        k: the keys.
        v: the values.
        causal: as `attention` has it.
        sm_scale: as `attention` has it.
    """
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "layout": "bshd", "recipe": BALANCED}
    return auto.takes_pytorch(q, k, v, options, lambda: dense_problem(q, k, v, **options))
