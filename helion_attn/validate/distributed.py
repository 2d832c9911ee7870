"""Checks of the arguments of `distributed`, each rank's own; what ranks must agree on is in `distributed.header`."""

from __future__ import annotations

from typing import get_args

import torch

from helion_attn.debug_state import debugging
from helion_attn.problem import magic_finds_chunks
from helion_attn.types import Recipe, Rope, Strategy, as_recipe
from helion_attn.validate.dense import (
    MIN_D,
    check_positions,
    check_qkv,
    check_recipe,
    check_rope_tables,
    check_rotatable,
)
from helion_attn.validate.values import check_rope_positions
from helion_attn.validate.varlen import MAX_VARLEN_D

STRATEGIES = get_args(Strategy)
BALANCES = (None, "zigzag")


def check_strategy(strategy: str) -> None:
    """Accept those that there are."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}; it must be one of {STRATEGIES}")


def check_balance(balance: str | None) -> None:
    """Accept None and "zigzag"."""
    if balance not in BALANCES:
        raise ValueError(f"balance is {balance!r}; it must be one of {BALANCES}")


def check_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe | str, layout: str, rope: Rope | None
) -> None:
    """A rank's tensors, as `quantize` has them; head dims as packed sequences have them."""
    check_qkv(q, k, v, layout)
    for name, x in (("q", q), ("v", v)):
        if x.size(3) > MAX_VARLEN_D:
            raise NotImplementedError(
                f"{name} has head dim {x.size(3)}; over several ranks it must lie in {MIN_D}..{MAX_VARLEN_D}"
            )
    check_recipe(as_recipe(recipe), q.size(3), v.size(3))
    if rope is None:
        return
    check_rope_tables(rope, q.size(3), q.device)
    length = 2 if layout == "bhsd" else 1
    for name, x, at in (("q", q, rope.q_positions), ("k", k, rope.k_positions)):
        check_rotatable(name, x)
        if at is not None:
            check_positions(f"rope.{name}_positions", at, x.size(length), q.device)
    if debugging():
        check_rope_positions(rope)


def rope_text(rope: Rope | None) -> str | None:
    """Describe the parts of a rope that ranks must share: sizes of its tables, pairing, which positions are given."""
    if rope is None:
        return None
    given = [name for name in ("q_positions", "k_positions") if getattr(rope, name) is not None]
    tables = " x ".join(map(str, rope.cos.shape))
    return f"{tables}, {'interleaved' if rope.interleaved else 'halves'}, with {' and '.join(given) or 'no positions'}"


def check_places(key_chunks: int, blocks: int, lengths: tuple[int, ...]) -> None:
    """Blocks of `key_chunks` chunks of so many, which the kernel finds by arithmetic in 32 bits."""
    if not magic_finds_chunks(key_chunks, blocks):
        raise ValueError(
            f"the ranks' N are {[*lengths]}, {blocks} key blocks in each of {key_chunks} parts; (parts - 1) * "
            f"blocks ** 2 + blocks must be at most 2 ** 32: take more ranks"
        )


def check_rope_lengths(rope: Rope | None, M: int, N: int) -> None:
    """Positions that a rope does not give are those of the whole sequence, of M queries and N keys."""
    if rope is None:
        return
    if rope.k_positions is None and rope.cos.size(0) < N:
        raise ValueError(
            f"rope.cos has {rope.cos.size(0)} positions; without rope.k_positions it must have at least N = {N}"
        )
    if rope.q_positions is None and (M > N or rope.cos.size(0) < N):
        raise ValueError(
            f"M is {M}, N is {N} and rope.cos has {rope.cos.size(0)} positions; without rope.q_positions M must be at "
            f"most N, and N at most the number of positions"
        )
