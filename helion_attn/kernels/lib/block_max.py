"""The maxima that P is relative to: inlined into the attention kernels.

Sums in two levels rescale the accumulator in every block. So P need not be relative to the running maximum: against the
block's own, every block uses all of P's range, its largest P is exact, and what lies behind a key that holds most of
the probability keeps its bits (arXiv:2606.06521 measures what it loses otherwise). The rescale, 2 to the old reference
less the new one, may then exceed 1.
"""

from __future__ import annotations

import torch

from helion_attn.compiler.helion_adapter import hl
from helion_attn.kernels.lib.inline_asm import maximum
from helion_attn.numerics import REFERENCE_REACH_LOG2


def update_block_max(
    top: torch.Tensor,  # [bm]
    m_run: torch.Tensor,  # [bm]
    is_cuda: hl.constexpr,
    reach_log2: float = REFERENCE_REACH_LOG2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(m_run, m_i)`: the running maximum, which begins at `NO_KEY`, and the block's reference.

    The reference is the block's maximum `top`, but no more than `reach_log2` below the running one.
    """
    m_run = maximum(m_run, top, is_cuda)
    return m_run, maximum(m_run - reach_log2, top, is_cuda)


def finite(m_i: torch.Tensor, empty_rows: hl.constexpr) -> torch.Tensor:
    """`m_i`, [bm], or 0 for -inf: a row that has seen no key has P = 0, not 2**(-inf + inf)."""
    if empty_rows:
        return torch.where(m_i == float("-inf"), 0.0, m_i)
    return m_i
