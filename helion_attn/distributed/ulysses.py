"""Ulysses: heads for tokens (DeepSpeed-Ulysses, arXiv:2309.14509), so that a rank has all tokens of some heads.

Packed Q, K and V go all to all in one collective, in 8 bits, and the output comes back by a second, in its dtype. K and
V are attended to where they arrive; Q's blocks, which a launch reads once a row, are copied into the order of tokens.

H must be a multiple of the number of ranks. H_kv must be one, too, or divide it: then each KV head goes to as many
ranks as share it, and K and V take that many times the bytes.
"""

from __future__ import annotations

import torch

from helion_attn.distributed import collectives
from helion_attn.distributed.buffer import Buffer, aligned, as_bytes, buffer_for, mean_of_all, section
from helion_attn.distributed.call import Call, RankKV, attend, empty_outputs
from helion_attn.distributed.cut import Cut
from helion_attn.problem import RankChunks
from helion_attn.types import PackedTensors


def check_heads(H: int, H_kv: int, ranks: int) -> None:
    """Raise ValueError unless heads can be shared out."""
    if H % ranks:
        raise ValueError(f"q has {H} heads; with strategy='ulysses' they must be a multiple of the {ranks} ranks")
    if H_kv % ranks and ranks % H_kv:
        raise ValueError(
            f"k has {H_kv} heads; with strategy='ulysses' they must be a multiple of the {ranks} ranks, or divide "
            f"their number, and each then goes to several: strategy='allgather' takes any"
        )


def for_ranks(x: torch.Tensor, B: int, ranks: int) -> torch.Tensor:
    """[B * heads, n, ...] as [ranks, B, heads of a rank, n, bytes]: for each rank its own, as bytes."""
    heads_first = as_bytes(x.unflatten(0, (B, -1)).flatten(3))
    if heads_first.size(1) % ranks:
        # A KV head for several ranks.
        heads_first = heads_first.repeat_interleave(ranks // heads_first.size(1), 1)
    return heads_first.unflatten(1, (ranks, -1)).movedim(1, 0)


def in_order(x: torch.Tensor, zigzag: bool) -> torch.Tensor:
    """Blocks [ranks, B, heads, blocks, bytes] from the ranks in the order of tokens: [B, heads, all blocks, bytes]."""
    if zigzag:
        first, second = x.chunk(2, 3)
        x = torch.cat([first, second.flip(0)])
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


class Sections:
    """Where Q and its numbers lie in what travels from one rank to another, behind the keys."""

    def __init__(self, call: Call, has_lse_shift: bool) -> None:
        p, ranks = call.packing, call.group.size()
        self.heads = call.H // ranks
        self.blocks = -(-call.q_cut.room // p.bm)
        self.kv_heads = max(1, call.H_kv // ranks)
        number = (call.B, self.heads, self.blocks, 4 * p.bm)
        #: Shapes, by field of `PackedTensors`.
        self.shapes = {"q8": (*number[:3], p.bm * p.D_pad * call.recipe.qk_dtype.itemsize), "q_descale": number}
        if has_lse_shift:
            self.shapes["lse_shift"] = number
        #: Bytes before each, from the first.
        self.offsets: dict[str, int] = {}
        end = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = end
            end = aligned(end + torch.Size(shape).numel())
        self.buffer: Buffer = buffer_for(call.B * self.kv_heads, call.blocks, call.all_keys, p, call.recipe, rest=end)

    def of(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        """A field's part of uint8 [ranks, size]."""
        return section(rows, self.buffer.rest_offset + self.offsets[name], *self.shapes[name])


def write(call: Call, packed: PackedTensors, s: Sections) -> torch.Tensor:
    """Pack the bytes that this rank sends to each rank, uint8 [ranks, size]."""
    B, ranks, b = call.B, call.group.size(), s.buffer
    rows = packed.k8.new_empty((ranks, b.size), dtype=torch.uint8)

    for offset, block, x in ((0, b.k_block, packed.k8), (b.v_offset, b.v_block, packed.v8)):
        section(rows, offset, B, s.kv_heads, b.blocks, block)[:, :, :, : x.size(1)] = for_ranks(x, B, ranks)
    descales = packed.k_descale.view(B * call.H_kv, -1, 1)
    to = section(rows, b.descale_offset, B, s.kv_heads, b.descales, 4)
    to[:, :, :, : descales.size(1)] = for_ranks(descales, B, ranks)
    if b.mean_channels:
        mean = packed.v_mean.reshape(B * call.H_kv, -1, 1)
        section(rows, b.mean_offset, B, s.kv_heads, b.mean_channels, 4)[:] = for_ranks(mean, B, ranks)
    for name in s.shapes:
        x = getattr(packed, name).view(B * call.H, packed.q8.size(1), -1)
        s.of(rows, name)[:, :, :, : x.size(1)] = for_ranks(x, B, ranks)
    return rows


def own_heads(x: torch.Tensor, call: Call, kv_heads: int) -> torch.Tensor:
    """The KV heads of x [B, H_kv, ...] that this rank attends to."""
    first = call.rank * call.H_kv // call.group.size()
    return x[:, first : first + kv_heads].contiguous()


def received(call: Call, s: Sections, rows: torch.Tensor, packed: PackedTensors) -> PackedTensors:
    """Assemble the tensors that this rank attends with: all queries of its heads."""
    zigzag, p = call.q_cut.zigzag, call.packing

    def numbers(name: str) -> torch.Tensor | None:
        if name not in s.shapes:
            return None
        return in_order(s.of(rows, name), zigzag).contiguous().view(torch.float32)

    q8 = in_order(s.of(rows, "q8"), zigzag).contiguous().view(call.recipe.qk_dtype)
    q_descale = numbers("q_descale")
    assert q_descale is not None
    return PackedTensors(
        q8=q8.view(call.B * s.heads, -1, p.bm, p.D_pad),
        k8=packed.k8,
        v8=packed.v8,
        q_descale=q_descale,
        k_descale=packed.k_descale,
        v_descale=own_heads(packed.v_descale, call, s.kv_heads),
        v_mean=own_heads(packed.v_mean, call, s.kv_heads),
        k_mean=None,
        channel_factors=None,
        lse_shift=numbers("lse_shift"),
    )


def rows_back(x: torch.Tensor, cut: Cut, call: Call) -> torch.Tensor:
    """All rows of this rank's heads for this rank's rows of all heads.

    Args:
        x: [B, rows of all, heads of a rank, n], contiguous.
        cut: of the rows.
        call: whose group.

    Returns:
        [ranks, B, rows of this rank, heads of a rank, n].
    """
    B, _, heads, n = x.shape
    size = B * heads * n * x.element_size()
    flat = as_bytes(x)
    if not cut.zigzag and B == 1:
        sent = flat.view(-1)
    else:
        chunks = [
            [flat[:, chunk.begin : chunk.begin + chunk.size] for chunk in cut.chunks(rank)] for rank in range(cut.ranks)
        ]
        sent = torch.cat([torch.cat(of_rank, 1).reshape(-1) for of_rank in chunks])
    rows = cut.lengths[call.rank]
    found = collectives.exchange(sent, [length * size for length in cut.lengths], [rows * size] * cut.ranks, call.group)
    return found.view(x.dtype).view(cut.ranks, B, rows, heads, n)


def run(call: Call, packed: PackedTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of this rank's queries; `lse` of these only if it is asked for."""
    ranks, cut = call.group.size(), call.q_cut
    s = Sections(call, packed.lse_shift is not None)
    b = s.buffer
    rows = write(call, packed, s).view(-1)
    rows = collectives.exchange(rows, [b.size] * ranks, [b.size] * ranks, call.group).view(ranks, b.size)
    mine = received(call, s, rows, packed)
    n = cut.chunk_size
    chunks = RankChunks(
        row_chunk_blocks=-(-n // call.packing.bm),
        row_chunk_len=n,
        row_first=call.more_keys,
        row_step=n,
        **call.keys_of_all(b),  # type: ignore[arg-type]
    )
    rank_kv = RankKV(rows, b, chunks, call.k_cut.total, mean_of_all(rows, b, call.k_cut, mine.v_mean))
    sinks = None
    if call.scores.sinks is not None:
        sinks = call.scores.sinks[call.rank * s.heads : (call.rank + 1) * s.heads].contiguous()
    out, lse = empty_outputs(call, mine.q_descale, s.heads, cut.total, bshd=True)
    attend(call, mine, rank_kv, out, lse, True, sinks)
    # [ranks, B, M, heads, D_v]
    back = rows_back(out, cut, call)
    order = (1, 2, 0, 3, 4) if call.bshd else (1, 0, 3, 2, 4)
    shape = (call.B, call.M, call.H, call.D_v) if call.bshd else (call.B, call.H, call.M, call.D_v)
    own = back.permute(order).reshape(shape)
    if not call.return_lse:
        return own, lse
    lse_back = rows_back(lse.transpose(1, 2).contiguous().unsqueeze(3), cut, call)
    return own, lse_back.permute(1, 0, 3, 2, 4).reshape(call.B, call.H, call.M)
