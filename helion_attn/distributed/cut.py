"""How a sequence is cut into the ranks' chunks: one of contiguous tokens each, or for zigzag two."""

from __future__ import annotations

from typing import NamedTuple

from helion_attn.problem import SampledTokens

#: Tokens of which a chunk has a multiple, where there are enough: every key block and query block divides it.
UNIT = 128

#: Tokens, at most: sums of two positions fit 32 bits.
MAX_TOKENS = 2**28


class Chunk(NamedTuple):
    """Tokens `begin` up to `begin + size` of the whole sequence."""

    begin: int
    size: int


class Cut(NamedTuple):
    """Which tokens each rank holds."""

    lengths: tuple[int, ...]  # tokens of each rank
    # Rank r has chunk r of `2 * ranks`, and behind it chunk `2 * ranks - 1 - r`; otherwise ranks follow one another.
    # Chunks are equal, as kernels find a block's by one multiplication; the sequence ends in a rank's second chunk, and
    # later ones are empty.
    zigzag: bool

    @property
    def total(self) -> int:
        """Tokens of all ranks."""
        return sum(self.lengths)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.lengths)

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk; the sequence's last may have fewer."""
        return _zigzag_chunk(self.total, self.ranks) if self.zigzag else self.lengths[0]

    @property
    def room(self) -> int:
        """Tokens for which every rank has room: of two chunks, or of the longest rank."""
        return 2 * self.chunk_size if self.zigzag else max(self.lengths)

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Return a rank's chunks, in its order; none is empty, but for a rank that is."""
        if not self.zigzag:
            return (Chunk(sum(self.lengths[:rank]), self.lengths[rank]),)
        n = self.chunk_size
        first, second = Chunk(rank * n, n), Chunk((2 * self.ranks - 1 - rank) * n, self.lengths[rank] - n)
        return (first, second) if second.size else (first,)

    def sample(self, rank: int, most: int) -> SampledTokens:
        """Return which tokens of a rank are in the sample i * (total // n), for i < n and n = min(total, most)."""
        n = min(self.total, most)
        every = self.total // n
        found, offset = [], 0
        for begin, size in self.chunks(rank):
            i, end = -(-begin // every), min(n, -(-(begin + size) // every))
            found += [offset + i * every - begin, max(0, end - i)]
            offset += size
        return SampledTokens(every, *found, *([0, 0] if len(found) == 2 else []))

    def check(self, name: str, equal: bool) -> None:
        """Raise ValueError unless it is one of those that `shard` makes, or with `equal` False of any lengths.

        Args:
            name: of the length, "M" or "N".
            equal: the ranks' keys are found by arithmetic.
        """
        n, all_lengths = self.lengths[0], f"the ranks' {name} are {[*self.lengths]}"
        if self.total > MAX_TOKENS:
            raise ValueError(f"{all_lengths}; together they must be at most {MAX_TOKENS}")
        if self.zigzag:
            if self.total < self.ranks * UNIT:
                raise ValueError(
                    f"{all_lengths}; with balance='zigzag' together they must be at least {self.ranks * UNIT}, "
                    f"{UNIT} a rank"
                )
            lengths = _zigzag_lengths(self.total, self.ranks)
            if self.lengths != lengths:
                raise ValueError(
                    f"{all_lengths}; with balance='zigzag' they must be {[*lengths]}, as helion_attn.distributed.shard "
                    f"cuts {self.total} tokens"
                )
        elif equal and not (all(length == n for length in self.lengths[:-1]) and self.lengths[-1] <= n):
            # Packed sequences have one strategy.
            remedy = "" if name == "tokens" else "; strategy='ring' takes any"
            raise ValueError(
                f"{all_lengths}; with this strategy all must be equal, but for the last, which may be shorter: as "
                f"helion_attn.distributed.shard cuts{remedy}"
            )


def _zigzag_chunk(total: int, ranks: int) -> int:
    """Tokens of a chunk of zigzag: the least multiple of `UNIT` of which `2 * ranks` chunks hold all."""
    return -(-total // (2 * ranks * UNIT)) * UNIT


def _zigzag_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """Tokens of each rank for zigzag: its first chunk, and what the sequence has of its second."""
    n = _zigzag_chunk(total, ranks)
    return tuple(n + min(n, max(0, total - (2 * ranks - 1 - rank) * n)) for rank in range(ranks))


def cut_of(total: int, ranks: int, zigzag: bool) -> Cut:
    """How `shard` cuts `total` tokens: chunks of one multiple of `UNIT`, if that leaves every rank some."""
    if zigzag:
        # Then the ranks' first chunks are whole.
        if total < ranks * UNIT:
            raise ValueError(
                f"the length is {total}; with balance='zigzag' it must be at least {ranks * UNIT}, {UNIT} for each of "
                f"{ranks} ranks"
            )
        return Cut(_zigzag_lengths(total, ranks), zigzag)
    n = -(-total // ranks)
    units = -(-n // UNIT) * UNIT
    if (ranks - 1) * units < total:
        n = units
    last = total - (ranks - 1) * n
    if last <= 0:
        raise ValueError(f"the length is {total}; {ranks} ranks need {ranks} parts, none of them empty")
    return Cut((n,) * (ranks - 1) + (last,), zigzag)
