"""What the launchers of `fp8_attn_fwd` and `fp8_attn_fwd_large_d` take, and what they make of it for their kernels.

`fp8_attn_decode`, whose tensors are others, takes `score_scales` alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from helion_attn.numerics import LOG2E


class Inputs(NamedTuple):
    """The fields of `QuantizedQKV`, or of `PackedVarlen`; and fp32 [H], or None."""

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor
    lse_shift: torch.Tensor | None
    sinks: torch.Tensor | None


class Numerics(NamedTuple):
    """`Recipe.kernel_options`.

    Attributes:
        p_offset_log2: P is stored times two to this.
        promote_every: 1, 0, or None for the config's choice.
        q_row_descales: rows of a block have descales of their own.
        k_block_descales: `k_descale` has one for each key block.
        v_channel_descales: `v_descale` differs between the channels of a head.
    """

    p_offset_log2: int
    promote_every: int | None
    q_row_descales: bool
    k_block_descales: bool
    v_channel_descales: bool

    def is_two_level(self, by_config: bool) -> bool:
        """Whether P V is summed in two levels, where the config has `by_config`."""
        return by_config if self.promote_every is None else self.promote_every == 1


class Problem(NamedTuple):
    """Which scores there are, how they are scaled, and where their output goes.

    Attributes:
        m_len: M, the true query length; of packed sequences, of all.
        n_len: N, the true key length; likewise.
        left: row i sees keys j >= i + N - M - left; all of them if it is negative.
        right: row i sees keys j <= i + N - M + right; likewise. Causal: 0.
        sm_scale: multiplies q k^T; not negative.
        softcap: scores become `softcap * tanh(score / softcap)`, unless it is None.
        bshd: the layout of the output.
    """

    m_len: int
    n_len: int
    left: int
    right: int
    sm_scale: float
    softcap: float | None
    bshd: bool

    def sizes(self, H: int, H_kv: int) -> tuple[int, ...]:
        """`m_len, n_len, heads, group, out_head_step, out_row_step, left, right`."""
        steps = (1, H) if self.bshd else (self.m_len, 1)
        # An edge further away hides nothing, and might not fit 32 bits.
        edges = (min(self.left, self.n_len), min(self.right, self.m_len))
        return self.m_len, self.n_len, H, H // H_kv, *steps, *edges

    @property
    def rows_differ(self) -> bool:
        """Whether the mask leaves some rows many more keys than others, as that of causal attention does.

        A window to the left is taken to leave most rows as many.
        """
        return self.right >= 0 and self.left < 0

    @property
    def masks(self) -> tuple[bool, bool, bool]:
        """`has_left, has_right, has_softcap`."""
        return self.left >= 0, self.right >= 0, self.softcap is not None

    @property
    def scales(self) -> tuple[float, float]:
        """`qk_scale, softcap_log2`."""
        return score_scales(self.sm_scale, self.softcap)


def score_scales(sm_scale: float, softcap: float | None) -> tuple[float, float]:
    """`qk_scale, softcap_log2`: dequantised scores times the one are in base 2; or tanh of them, times the other."""
    if softcap is None:
        return sm_scale * LOG2E, 1.0
    return sm_scale / softcap, softcap * LOG2E
