"""Where the sequences of a batch lie in the packed format, and in which order programs take them.

Tokens lie one after the other, [tokens, heads, head dim]; sequence b owns those from `cu_seqlens[b]` up to
`cu_seqlens[b + 1]`. In the packed format every sequence begins with a block of its own. Blocks of K and V are in the
order of the batch. Those of Q are in the order in which the attention kernel's programs take them, the sequences with
the most keys first: what runs last is then short, and leaves no SM idle for long (Graham, 1969).

The host reads nothing. It knows how many blocks suffice, `blocks_for`; the blocks that remain are of no sequence. Nor
are tokens before `cu_seqlens[0]` and from `cu_seqlens[B]` on, whose results become NaN. If a table descends, or leaves
the range of tokens, no token is of any sequence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device
from helion_attn.configs import Q_FIELDS, blocks_for

#: Fields of a block of K and V: the sequence; the block's first token; how many follow in the sequence. The fourth,
#: which nothing writes or reads, makes a row 16 bytes.
K_FIELDS = 4

#: Fields of a sequence: its first packed block of K and V; how many keys it has; its first token of Q, and how many.
SEQUENCE_FIELDS = 4

#: Sequences that a program reads at once, and blocks that it describes.
CHUNK = 128


def interval(
    cu_seqlens: torch.Tensor,  # [B + 1]
    s: torch.Tensor,  # [n]
    B: int,
    tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """First token and size, [n] each, of interval s: sequence s - 1; for 0 and B + 1 what lies before and after all."""
    begin = hl.load(cu_seqlens, [s - 1], extra_mask=(s >= 1) & (s <= B + 1))
    end = hl.load(cu_seqlens, [s], extra_mask=s <= B)
    end = torch.where(s == B + 1, tokens, end)
    return begin, end - begin


def keys_of(n: torch.Tensor, s: torch.Tensor, B: int) -> torch.Tensor:
    """Keys that interval s has, given the size of K's: -1 for the tokens of no sequence, which run last; then none."""
    return torch.where((s >= 1) & (s <= B), n, torch.where(s <= B + 1, -1, -2))


def store_fields(
    table: torch.Tensor,  # [rows, fields]
    rows: torch.Tensor,  # [n]
    fields: list[torch.Tensor],  # [1] each
    mask: torch.Tensor,  # [n]
) -> None:
    """Store the same fields in several rows of a table."""
    for i, field in enumerate(fields):
        hl.store(table, [rows, i], (field + rows * 0).to(torch.int32), extra_mask=mask)


class DescribeSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    bm: int  # rows of a block of Q
    bn: int  # keys of a block of K and V
    chunk: int  # sequences that a program reads at once, and blocks that it describes


def describe(
    cu_q: torch.Tensor,  # [B + 1]
    cu_k: torch.Tensor,  # [B + 1]
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS], written
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS], written
    sequences: torch.Tensor,  # [B, SEQUENCE_FIELDS], written
    m_blocks: int,
    n_blocks: int,
    m_tokens: int,
    n_tokens: int,
    chunks: int,
    spec: hl.constexpr,  # DescribeSpec
) -> None:
    """Write where blocks of Q, K and V lie. A program for each interval, and one for the blocks that remain."""
    hl.specialize((cu_q.stride(0), cu_k.stride(0)))
    B = cu_q.size(0) - 1
    for program in hl.grid(B + 3):
        # [1]
        s = program + hl.arange(1)
        q_begin, m = interval(cu_q, s, B, m_tokens)
        k_begin, n = interval(cu_k, s, B, n_tokens)
        n = keys_of(n, s, B)
        # [chunk]
        q_before = hl.zeros([spec.chunk], dtype=torch.int32)
        k_before = hl.zeros([spec.chunk], dtype=torch.int32)
        smallest = hl.zeros([spec.chunk], dtype=torch.int32)
        for c in hl.grid(chunks):
            t = c * spec.chunk + hl.arange(spec.chunk)
            q_begin_t, m_t = interval(cu_q, t, B, m_tokens)
            k_begin_t, n_t = interval(cu_k, t, B, n_tokens)
            # Begins, since differences of 32 bits may wrap around.
            begin_t = torch.minimum(q_begin_t, k_begin_t)
            smallest = torch.minimum(smallest, torch.minimum(begin_t, torch.minimum(m_t, n_t)).to(torch.int32))
            n_t = keys_of(n_t, t, B)
            earlier = (n_t > n) | ((n_t == n) & (t < s))
            q_before = q_before + torch.where(earlier, (m_t + spec.bm - 1) // spec.bm, 0).to(torch.int32)
            k_before = k_before + torch.where(t < s, (n_t + spec.bn - 1) // spec.bn, 0).to(torch.int32)
        valid = torch.amin(smallest, 0) == 0
        # [1]. If the tables are not valid, interval B + 1 has all tokens.
        remaining = s == B + 2
        m = torch.where(valid, m, torch.where(s == B + 1, m_tokens, 0))
        q_begin = torch.where(valid, q_begin, 0)
        n = torch.where(valid, n, torch.clamp_max(n, 0))
        q_first = torch.where(valid, q_before.sum(0), torch.where(remaining, (m_tokens + spec.bm - 1) // spec.bm, 0))
        k_first = torch.where(valid, k_before.sum(0), 0) + 0 * s
        q_count = torch.where(remaining, m_blocks - q_first, (m + spec.bm - 1) // spec.bm)
        k_count = torch.where(remaining, n_blocks - k_first, (n + spec.bn - 1) // spec.bn)
        for q_chunk in hl.grid((torch.amax(q_count, 0) + spec.chunk - 1) // spec.chunk):
            i = q_chunk * spec.chunk + hl.arange(spec.chunk)
            sequence = torch.where((s >= 1) & (s <= B), s - 1, 0)
            fields = [sequence, q_begin, m, k_first, n, q_first, q_count]
            store_fields(q_blocks, q_first + i, fields, i < q_count)
        for k_chunk in hl.grid((torch.amax(k_count, 0) + spec.chunk - 1) // spec.chunk):
            j = k_chunk * spec.chunk + hl.arange(spec.chunk)
            at = j * spec.bn
            owner = torch.where((s >= 1) & (s <= B), s - 1, 0)
            token = torch.where(remaining, 0, k_begin + at)
            left = torch.where(remaining, 0, n - at)
            store_fields(k_blocks, k_first + j, [owner, token, left], j < k_count)
        is_sequence = (s >= 1) & (s <= B)
        store_fields(sequences, s - 1, [k_first, n, q_begin, m], is_sequence)


def fields_of(table: torch.Tensor, row: int, fields: tuple[int, ...], is_cuda: hl.constexpr) -> list[Any]:
    """Fields of a row: int32 scalars, or the interpreter's ints."""
    loaded = [hl.load(table, [row, field]) for field in fields]
    return loaded if is_cuda else [int(x) for x in loaded]


def offset_of(
    token: Any,
    head: int,
    h_step: int,
    s_step: int,
    unit: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> Any:
    """Where a token of a head lies in memory; in 64 bits if `wide`. In 32, addresses take half as many instructions."""
    if not is_cuda:
        return (token * s_step + head * h_step) * unit
    dtype = torch.int64 if wide else torch.int32
    steps, of_head = hl.full([], s_step, dtype=dtype), hl.full([], head * h_step, dtype=dtype)
    return (token.to(dtype) * steps + of_head) * unit


def key_source(
    k_blocks: torch.Tensor,  # [N_blocks, K_FIELDS] if varlen
    head: int,
    heads: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    unit: hl.constexpr,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[Any, Any, Any]:
    """The row of head `head` of K or V in what is sampled, its keys, and where they begin in memory.

    With `varlen` it is a block of a head, and so are its keys. Inlined into kernels.
    """
    if not varlen:
        return head, size, ((head // heads) * b_step + (head % heads) * h_step) * unit
    block = head % k_blocks.size(0)
    own_head = head // k_blocks.size(0)
    sequence, token, left = fields_of(k_blocks, block, (0, 1, 2), is_cuda)
    return sequence * heads + own_head, left, offset_of(token, own_head, h_step, s_step, unit, wide, is_cuda)


def query_source(
    q_blocks: torch.Tensor,  # [M_blocks, Q_FIELDS] if varlen
    head: int,
    heads: int,
    group: int,
    size: int,
    b_step: int,
    h_step: int,
    s_step: int,
    unit: hl.constexpr,
    bm: int,
    varlen: hl.constexpr,
    wide: hl.constexpr,
    is_cuda: hl.constexpr,
) -> tuple[Any, Any, Any]:
    """As `key_source`, of Q: what is sampled is that of its KV head. Inlined into kernels."""
    if not varlen:
        return head // group, size, ((head // heads) * b_step + (head % heads) * h_step) * unit
    block = head % q_blocks.size(0)
    own_head = head // q_blocks.size(0)
    sequence, token, rows, first_block = fields_of(q_blocks, block, (0, 1, 2, 5), is_cuda)
    begin = (block - first_block) * bm
    offset = offset_of(token + begin, own_head, h_step, s_step, unit, wide, is_cuda)
    return sequence * (heads // group) + own_head // group, rows - begin, offset


kernel = by_device(describe, Config(num_warps=4, indexing="pointer"))


class Sequences(NamedTuple):
    """Where sequences lie."""

    q_blocks: torch.Tensor  # int32 [M_blocks, Q_FIELDS]
    k_blocks: torch.Tensor  # int32 [N_blocks, K_FIELDS]
    sequences: torch.Tensor  # int32 [B, SEQUENCE_FIELDS]


def launch(cu_q: torch.Tensor, cu_k: torch.Tensor, m_tokens: int, n_tokens: int, bm: int, bn: int) -> Sequences:
    """Return where the sequences of a batch lie.

    Args:
        cu_q: int32 [B + 1], contiguous: `cu_seqlens` of Q.
        cu_k: int32 [B + 1], of K and V.
        m_tokens: of Q.
        n_tokens: of K and V.
        bm: rows of a block of Q.
        bn: keys of a block of K and V.
    """
    B = cu_q.size(0) - 1
    m_blocks, n_blocks = blocks_for(m_tokens, bm, B), blocks_for(n_tokens, bn, B)
    tables = Sequences(
        cu_q.new_empty(m_blocks, Q_FIELDS), cu_q.new_empty(n_blocks, K_FIELDS), cu_q.new_empty(B, SEQUENCE_FIELDS)
    )
    kernel(cu_q.is_cuda).run(
        {
            "cu_q": cu_q,
            "cu_k": cu_k,
            "q_blocks": tables.q_blocks,
            "k_blocks": tables.k_blocks,
            "sequences": tables.sequences,
            "m_blocks": m_blocks,
            "n_blocks": n_blocks,
            "m_tokens": m_tokens,
            "n_tokens": n_tokens,
            "chunks": -(-(B + 2) // CHUNK),
            "spec": DescribeSpec(bm=bm, bn=bn, chunk=CHUNK),
        }
    )
    return tables
