"""Norms and RoPE of a model that is fused, as this package takes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from helion_attn import auto
from helion_attn.api import dense_problem
from helion_attn.transforms import apply_rope
from helion_attn.types import BALANCED, RMSNorm, Rope


class Ropes:
    """A table, for all tokens and for some of them. To make a `Rope` reads its last row on the host.

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
            made = Rope(cos, self.whole.sin, self.whole.interleaved, q_at, k_at)
            self._some[id(order), keys] = found = order, made
        return found[1]


class Tables:
    """A model's tables of RoPE as `Ropes`. Layers of a forward pass are given the same tensors."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[tuple[weakref.ref[torch.Tensor], ...], Ropes | None]] = {}

    def ropes(
        self, make: Callable[..., Rope | None], tables: tuple[torch.Tensor, ...] | None, *sizes: int
    ) -> Ropes | None:
        """What `make` makes of some tables and sizes, which must not be views of them; kept as long as they live."""
        if tables is None:
            return None
        if torch.compiler.is_compiling():
            made = make(*tables, *sizes)
            return None if made is None else Ropes(made)
        key = (*map(id, tables), *sizes)
        known = self._kept.get(key)
        if known is None or any(of() is not table for of, table in zip(known[0], tables, strict=True)):
            self._kept = {x: y for x, y in self._kept.items() if all(of() is not None for of in y[0])}
            made = make(*tables, *sizes)
            known = tuple(map(weakref.ref, tables)), None if made is None else Ropes(made)
            self._kept[key] = known
        return known[1]


class Before(NamedTuple):
    """Norms of Q and K, and then RoPE, that attention's inputs are still without. None of what there is none.

    Attributes:
        q_norm: the model's module.
        k_norm: the model's module.
        over_heads: whether the norms are over all heads.
        ropes: of the model.
    """

    q_norm: torch.nn.Module | None = None
    k_norm: torch.nn.Module | None = None
    over_heads: bool = False
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
        done = []
        for x, norm in ((q, self.q_norm), (k, self.k_norm)):
            if norm is not None:
                x = norm(x.flatten(2)).unflatten(2, x.shape[2:]) if self.over_heads else norm(x)
            done.append(x if self.ropes is None else apply_rope(x, self.ropes.whole, layout="bshd"))
        return done[0], done[1]


def norm_of(module: Any, x: torch.Tensor) -> RMSNorm:
    """The norm of x that a module of PyTorch, or of diffusers, computes."""
    return RMSNorm(module.weight, torch.finfo(x.dtype).eps if module.eps is None else module.eps)


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
