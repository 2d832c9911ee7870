"""Checks that `debugging.debug` asks for: of values on the device, and of calls against the ones before them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from helion_attn.debug_state import Append, seen_so_far
from helion_attn.types import PagedKVCache, Rope


def _read(x: torch.Tensor) -> list[int] | None:
    """The values of a tensor of one dimension; None of a fake one."""
    if isinstance(x, FakeTensor) or x.device.type == "meta":
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("helion_attn.debug() reads values, which cannot be while a CUDA graph is captured: leave it")
    return x.tolist()


def check_cu_seqlens(name: str, cu_seqlens: torch.Tensor, tokens: int) -> None:
    """Where sequences of `tokens` tokens begin and end."""
    values = _read(cu_seqlens)
    if values is None:
        return
    if values[0] != 0 and sum(values) == tokens:
        raise ValueError(
            f"{name} is {values}, which add up to the {tokens} tokens: lengths; it must be where each sequence begins, "
            f"and the end: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)"
        )
    for b, (start, stop) in enumerate(itertools.pairwise(values)):
        if not 0 <= start <= stop <= tokens:
            raise ValueError(
                f"{name} has {start} and {stop} at {b} and {b + 1}; it must ascend in 0..{tokens}, the number of tokens"
            )


def check_cache_values(
    cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, table_name: str, new_keys: int = 0
) -> None:
    """Lengths that the block table holds, and pages that the pool has; `new_keys` are appended to each sequence."""
    lengths = _read(cache_seqlens)
    if lengths is not None:
        _check_pages(cache, block_table, lengths, [new_keys] * len(lengths), table_name)


def check_step_values(
    cache: PagedKVCache,
    cu_seqlens: torch.Tensor,
    block_table: torch.Tensor,
    seqlens: torch.Tensor,
    tokens: int,
    max_seqlen_q: int | None,
    appends: bool,
) -> None:
    """Tokens of sequences that there are, lengths that count them, and pages that the pool has."""
    check_cu_seqlens("cu_seqlens", cu_seqlens, tokens)
    begins, lengths = _read(cu_seqlens), _read(seqlens)
    if begins is None or lengths is None:
        return
    new = [end - begin for begin, end in itertools.pairwise(begins)]
    room = block_table.size(1) * cache.page_size
    for b, (length, count) in enumerate(zip(lengths, new, strict=True)):
        if max_seqlen_q is not None and count > max_seqlen_q:
            raise ValueError(
                f"max_seqlen_q is {max_seqlen_q}, and cu_seqlens gives sequence {b} {count} tokens; it must be the most"
            )
        if 0 < length < count:
            raise ValueError(
                f"seqlens[{b}] is {length}, and cu_seqlens gives the sequence {count} tokens, which it must count; 0 "
                f"is padding"
            )
        if length > room:
            raise ValueError(
                f"seqlens[{b}] is {length}; it must be at most {room}: block_table has {block_table.size(1)} pages of "
                f"{cache.page_size} keys a sequence"
            )
    # Padding has no pages.
    appended = [count if appends and length > 0 else 0 for length, count in zip(lengths, new, strict=True)]
    before = [max(length, 0) - count for length, count in zip(lengths, appended, strict=True)]
    _check_pages(cache, block_table, before, appended, "block_table")


def _check_pages(
    cache: PagedKVCache, block_table: torch.Tensor, lengths: list[int], new: list[int], table_name: str
) -> None:
    """Pages of the pool for all keys of each sequence, and pages of their own for new ones."""
    room = block_table.size(1) * cache.page_size
    pages, page_size, written = cache.k8.size(0), cache.page_size, dict[int, int]()
    for b, (length, new_keys) in enumerate(zip(lengths, new, strict=True)):
        if not 0 <= length <= room - new_keys:
            beside = f" beside the {new_keys} new ones" if new_keys else ""
            raise ValueError(
                f"cache_seqlens[{b}] is {length}; it must lie in 0..{room - new_keys}: {table_name} has "
                f"{block_table.size(1)} pages of {page_size} keys a sequence{beside}"
            )
        for i, page in enumerate(_read(block_table[b, : -(-(length + new_keys) // page_size)]) or ()):
            if not 0 <= page < pages:
                raise ValueError(f"{table_name}[{b}, {i}] is {page}; it must lie in 0..{pages - 1}, pages of the cache")
            if new_keys and i >= length // page_size:
                if page in written:
                    raise ValueError(
                        f"{table_name} has page {page} for sequences {written[page]} and {b}; a page that is appended "
                        f"to must be of one sequence"
                    )
                written[page] = b


def note_append(cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, new_keys: int) -> None:
    """Remember where `new_keys` of each sequence go, for `check_appended`, inside `debug`."""
    seen, lengths = seen_so_far(), _read(cache_seqlens)
    if seen is None or lengths is None:
        return
    # Of earlier ones keys may have been forgotten, and pages given to other sequences.
    seen.appends[cache.k8] = {
        page: Append(length, new_keys)
        for length, pages in zip(lengths, block_table.tolist(), strict=True)
        for page in pages[length // cache.page_size : (length + new_keys - 1) // cache.page_size + 1]
    }


def check_appended(
    q: torch.Tensor, cache: PagedKVCache, block_table: torch.Tensor, cache_seqlens: torch.Tensor, layout: str
) -> None:
    """Lengths that count the keys which were appended last, and a q in its layout.

    As far as can be told it is in the other one where its heads, not its tokens, are as many as those keys.
    """
    seen, lengths = seen_so_far(), _read(cache_seqlens)
    if seen is None or lengths is None:
        return
    appends, page_size = seen.appends.get(cache.k8, {}), cache.page_size
    H, M = (q.size(1), q.size(2)) if layout == "bhsd" else (q.size(2), q.size(1))
    tables = block_table.tolist()
    read = [{*pages[: -(-length // page_size)]} for length, pages in zip(lengths, tables, strict=True)]
    for b, (length, pages) in enumerate(zip(lengths, tables, strict=True)):
        following = pages[length // page_size] if length < len(pages) * page_size else None
        of_next = appends.get(following)
        # Past its end a table may have pages of other sequences.
        is_of_another = any(following in others for i, others in enumerate(read) if i != b)
        if of_next is not None and of_next.first == length and not is_of_another:
            raise ValueError(
                f"cache_seqlens[{b}] is {length}, and {of_next.keys} keys were appended behind those, which it must "
                f"count: add {of_next.keys} to it once they are appended"
            )
        last = appends.get(pages[(length - 1) // page_size]) if length else None
        if last is not None and sum(last) == length and last.keys == H != M > 1 and M % cache.k8.size(1) == 0:
            raise ValueError(
                f"q has shape {tuple(q.shape)}, {H} heads and {M} tokens with layout={layout!r}, and {last.keys} keys "
                f"of each sequence were appended last; if these are as many as q's tokens, pass q.transpose(1, 2)"
            )


def note_balance(group: str, tokens: int, balance: str | None) -> None:
    """Remember how a rank's share of so many tokens was cut, for `check_balance_of_ranks`, inside `debug`."""
    if (seen := seen_so_far()) is not None:
        seen.balances.setdefault((group, tokens), set()).add(balance)


def check_balance_of_ranks(group: str, lengths: Iterable[int], balance: str | None) -> None:
    """Raise ValueError if a share of one of these lengths was cut inside `debug` for another balance."""
    seen = seen_so_far()
    for length in lengths:
        cut = seen.balances.get((group, length)) if seen is not None else None
        if cut and balance not in cut:
            (other,) = cut
            raise ValueError(
                f"balance is {balance!r}, and this rank's part of {length} tokens was cut with balance={other!r}; they "
                f"must be the same: helion_attn.distributed.sharding(group, balance={other!r}) says it once"
            )


def check_rope_positions(rope: Rope) -> None:
    """Positions that the tables of a `Rope` have."""
    for name in ("q_positions", "k_positions"):
        positions = getattr(rope, name)
        check_position_values(f"rope.{name}", positions, rope.cos.size(0))


def check_position_values(name: str, positions: torch.Tensor | None, size: int) -> None:
    """Positions in a table of so many."""
    for i, position in enumerate(_read(positions) or () if positions is not None else ()):
        if not 0 <= position < size:
            raise ValueError(f"{name}[{i}] is {position}; it must lie in 0..{size - 1}: rope.cos has {size} positions")
