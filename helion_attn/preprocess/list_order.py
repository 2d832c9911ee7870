"""The order in which programs take row blocks: the one with the most key blocks first, then as they lie."""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.compiler.helion_adapter import Config, hl
from helion_attn.compiler.runners import by_device

#: Row blocks of a program, and as many that they are compared with at once: 8 pairs a thread.
ROWS, COMPARED = 8, 128


class ListOrderSpec(NamedTuple):
    """Constants that the kernel is compiled for."""

    n: int  # row blocks of a program
    step: int  # row blocks that they are compared with at once


def list_order(
    counts: torch.Tensor,  # [heads * m_blocks]
    lists: torch.Tensor,  # [heads * m_blocks, 2], written
    heads: int,
    m_blocks: int,
    spec: hl.constexpr,  # ListOrderSpec
) -> None:
    """Write row blocks in their order: a row block's place is how many go before it."""
    hl.specialize((counts.stride(0), lists.stride(0), lists.stride(1)))
    for head, part in hl.grid([heads, (m_blocks + spec.n - 1) // spec.n]):
        # [n]
        row = part * spec.n + hl.arange(spec.n)
        count = hl.load(counts, [head * m_blocks + row], extra_mask=row < m_blocks)
        # [n, step]
        ahead = hl.zeros([spec.n, spec.step], dtype=torch.int32)
        for compared in hl.grid((m_blocks + spec.step - 1) // spec.step):
            other = compared * spec.step + hl.arange(spec.step)
            inside = other < m_blocks
            others = hl.load(counts, [head * m_blocks + other], extra_mask=inside)
            more = others.unsqueeze(0) > count.unsqueeze(1)
            same = (others.unsqueeze(0) == count.unsqueeze(1)) & (other.unsqueeze(0) < row.unsqueeze(1))
            ahead = ahead + ((more | same) & inside.unsqueeze(0)).to(torch.int32)
        place = head * m_blocks + ahead.sum(1)
        hl.store(lists, [place, 0], row.to(torch.int32), extra_mask=row < m_blocks)
        hl.store(lists, [place, 1], count, extra_mask=row < m_blocks)


kernel = by_device(list_order, Config(num_warps=4, indexing="pointer"))


def launch(counts: torch.Tensor, lists: torch.Tensor) -> None:
    """Write `lists`, [.., m_blocks, 2], of `counts`, [.., m_blocks]: row blocks in their order, and their counts."""
    m_blocks = counts.size(2)
    kernel(counts.is_cuda).run(
        {
            "counts": counts.view(-1),
            "lists": lists.view(-1, 2),
            "heads": counts.numel() // m_blocks,
            "m_blocks": m_blocks,
            "spec": ListOrderSpec(n=ROWS, step=COMPARED),
        }
    )
