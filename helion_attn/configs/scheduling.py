"""How large a launch is, in which order its programs come, and how many splits their key blocks have."""

from __future__ import annotations

import functools
from typing import NamedTuple

from helion_attn.configs import TileConfig


def query_blocks_per_sm(heads: int, query_blocks: int, multiprocessors: int) -> float:
    """How large a launch is: the query blocks of all B * H heads, over what runs them."""
    return heads * query_blocks / multiprocessors


def group_programs(multiprocessors: int, ctas_per_sm: int) -> int:
    """Programs of the heads that come at once where rows differ in the number of their keys, as causal ones do.

    Programs begin in the order of the grid, and those of a head share its K and V in L2. One head after the other, the
    last one's longest rows begin when the GPU runs dry: up to 11% of the time of 16384 tokens. With the longest rows of
    all heads first, L2 does not hold their K and V. So some heads come at once, the longest rows of all of them first,
    as in FlashAttention-3, which takes as many as L2 holds. With one program an SM the best groups fill the GPU once or
    twice, with three or four 2 to 8 times: docs/notes/kernels.md.
    """
    return multiprocessors * ctas_per_sm**2


@functools.lru_cache(4096)
def head_group(heads: int, programs: int, multiprocessors: int, ctas_per_sm: int) -> int:
    """How many of `heads`, each with as many `programs`, come at once: a divisor, with up to `group_programs`.

    A number of heads that is prime gives 1 or all.
    """
    most = group_programs(multiprocessors, ctas_per_sm) // programs
    return max((n for n in range(1, min(most, heads) + 1) if heads % n == 0), default=1)


def gqa_query_blocks(queries: int, group: int, bm: int) -> int:
    """Query blocks of a KV head whose `group` query heads share them: with few queries, fewer than each has alone.

    A query has a power of two rows in them, one for each head, and what is left over.
    """
    rows = queries << (group - 1).bit_length()
    return -(-rows // bm)


#: The fewest key blocks of a split, and the fewest such splits of a program that is worth it.
MIN_SPLIT_BLOCKS, MIN_SPLITS = 8, 4

#: What a launch of several splits costs, fitted to 64 launches on an H100 (docs/notes/paged_cache.md). A key block
#: takes `FIRST_PROGRAM` + n where n programs share an SM. In blocks: what a program takes to begin and end, what a
#: split takes besides to write its result and to have it merged, and the merge's launch.
FIRST_PROGRAM = 1.44
PROGRAM_BLOCKS, PARTIAL_BLOCKS, MERGE_BLOCKS = 5, 6, 6

#: Splits fill the GPU so many times at most, and must be so many times faster to be worth their results.
SPLIT_ROUNDS, SPLIT_GAIN = 4, 1.04


def visible_key_blocks(key_blocks: int, left: int, right: int, bm: int, bn: int) -> int:
    """How many of `key_blocks` a block of `bm` query rows sees at most: a window's, or all."""
    if left < 0 or right < 0:
        return key_blocks
    return min(key_blocks, (left + right + bm - 2) // bn + 2)


def mean_key_blocks(key_blocks: int, queries: int, right: int, bn: int) -> int:
    """How many of `key_blocks` a row sees on average, if it sees no keys beyond `right` after its own."""
    if right < 0:
        return key_blocks
    return max(1, min(key_blocks, key_blocks - (queries // 2 - right) // bn))


def split_time(splits: int, programs: int, key_blocks: int, multiprocessors: int, ctas_per_sm: int) -> float:
    """The time of `programs` whose `key_blocks` each are split, in key blocks of an SM that is full."""
    rounds, left_over = divmod(programs * splits, multiprocessors * ctas_per_sm)
    blocks = -(-key_blocks // splits) + PROGRAM_BLOCKS + (PARTIAL_BLOCKS if splits > 1 else 0)
    # Programs of a last round that is not full share an SM with fewer, and are faster.
    last = (FIRST_PROGRAM + -(-left_over // multiprocessors)) / (FIRST_PROGRAM + ctas_per_sm) if left_over else 0.0
    return blocks * (rounds + last) + (MERGE_BLOCKS if splits > 1 else 0)


def key_splits(
    programs: int, key_blocks: int, multiprocessors: int, ctas_per_sm: int, min_blocks: int = MIN_SPLIT_BLOCKS
) -> int:
    """How many splits to make of the key blocks of each of `programs`, which see `key_blocks`.

    The fastest by `split_time` of those that fill the GPU once, twice and so on (the idea of `num_splits_heuristic` in
    flash-attention). But no splits of fewer than `min_blocks` blocks, no programs with fewer than `MIN_SPLITS` of
    these, and no more splits than fill the GPU `SPLIT_ROUNDS` times, so that their results are at most as many rows.
    """
    if key_blocks < MIN_SPLITS * min_blocks:
        return 1
    resident, most = multiprocessors * ctas_per_sm, key_blocks // min_blocks
    filling = {max(1, min(rounds * resident // programs, most)) for rounds in range(1, SPLIT_ROUNDS + 1)}
    time = {splits: split_time(splits, programs, key_blocks, multiprocessors, ctas_per_sm) for splits in filling | {1}}
    fastest = min(time, key=lambda splits: (time[splits], splits))
    return fastest if time[fastest] * SPLIT_GAIN < time[1] else 1


def schedule(
    tile: TileConfig,
    heads: tuple[int, int],
    blocks: tuple[int, int],
    queries: int,
    left: int,
    right: int,
    multiprocessors: int,
) -> tuple[bool, int]:
    """`(pack_gqa, splits)`: whether a group's heads share tiles, and how many splits key blocks have.

    Args:
        tile: the launch's config.
        heads: B * H and B * H_kv.
        blocks: of a head's queries, and of its keys.
        queries: M.
        left: of `AttentionArgs`, and so right.
        right: likewise.
        multiprocessors: of the GPU.
    """
    (q_heads, kv_heads), (query_blocks, key_blocks) = heads, blocks
    apart = q_heads * query_blocks
    together = kv_heads * gqa_query_blocks(queries, q_heads // kv_heads, tile.bm)
    # An eighth fewer tiles gained 10%. Rows of a shared tile, here as wide as any, are addressed with 32 bits.
    pack_gqa = 8 * together <= 7 * apart and apart * tile.bm * tile.D_pad < 2**31
    seen = visible_key_blocks(key_blocks, left, right, tile.bm, tile.bn)
    seen = min(seen, mean_key_blocks(key_blocks, queries, right, tile.bn))
    return pack_gqa, key_splits(together if pack_gqa else apart, seen, multiprocessors, tile.ctas_per_sm)


#: Query rows of a program that decodes, at most. They are the N of its products, of which the least is 16.
MAX_ROWS, MIN_ROWS = 32, 16

#: From so many query rows of a KV head on, they are the M of products (`kernels.prefill`).
MIN_PREFILL_ROWS = 64

#: Splits of a batch that decodes fill the GPU so many times at most, so that a round that is not full costs little.
BATCH_ROUNDS = 3

#: The fewest pages of a split: writing and merging its partial result costs about as much as a quarter of a page.
MIN_PAGES = 4


def decode_rows(queries: int) -> int:
    """Query rows of a program, if so many share a KV head."""
    return min(MAX_ROWS, max(MIN_ROWS, 1 << (queries - 1).bit_length()))


def decode_queries(group: int, drafts: int) -> int:
    """Queries of a sequence of a packed batch that `fp8_attn_decode` takes: as many as fill the tiles of a new token's.

    That is with its drafts, and with the `group` of heads that share a KV head; none where these are a prompt's rows.
    """
    rows = group * (1 + drafts)
    if rows >= MIN_PREFILL_ROWS:
        return 0
    return -(-rows // decode_rows(rows)) * decode_rows(rows) // group


class SplitLimits(NamedTuple):
    """The numbers of splits that `kernels.dynamic_splits` may choose."""

    most_splits: int  # of a sequence
    all_splits: int  # of all sequences, at most
    most_rounds: int  # their programs fill the GPU so many times at most, but for one split of each sequence
    multiprocessors: int  # of the GPU
    ctas_per_sm: int  # programs that an SM holds
    is_fixed: bool  # each sequence has `most_splits`


def split_limits(
    sequences: int, programs: int, max_pages: int, splits: int | None, multiprocessors: int, ctas_per_sm: int
) -> SplitLimits:
    """The limits of sequences of up to `max_pages` pages, each of which `programs` would read whole.

    One sequence is split into as many as the GPU holds at once, which end together. No split has fewer than `MIN_PAGES`
    of the longest possible sequence.
    """
    if splits is not None:
        return SplitLimits(splits, sequences * splits, 1, multiprocessors, ctas_per_sm, is_fixed=True)
    rounds = 1 if sequences == 1 else BATCH_ROUNDS
    resident = multiprocessors * ctas_per_sm
    filling = rounds * resident // programs
    most = max(1, min(filling, max_pages // MIN_PAGES))
    # Room for those of one round beside a split of each sequence, and for those of all rounds.
    in_all = min(sequences * most, max(sequences + resident // programs, filling))
    return SplitLimits(most, in_all, rounds, multiprocessors, ctas_per_sm, is_fixed=False)
