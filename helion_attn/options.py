"""The options of scores that every attention has, from the public functions to the kernels' arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import torch

from helion_attn.numerics import LOG2E
from helion_attn.types import Auto, BlockMask, Layout, OpenPages, Recipe, RecipeName, RMSNorm, Rope

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


class ScoreScales(NamedTuple):
    """Factors that kernels multiply scores by."""

    qk_scale: float  # dequantised scores times it are in base 2; with a softcap they are what tanh is taken of
    tanh_scale: float  # with a softcap, tanh times it is in base 2


class ScoreSpec(NamedTuple):
    """Constants of the scores that kernels are compiled for: the part of each spec that `ScoreOptions` decides."""

    has_left: bool  # a window ends to the left
    has_right: bool  # a window or causality ends to the right
    has_softcap: bool  # scores have a softcap
    has_sinks: bool  # a head has one more logit
    has_lse_shift: bool  # smooth-K took `lse_shift` from a row's scores, and the lse, a sink or a softcap needs it

    @property
    def is_linear(self) -> bool:
        """Whether the softmax's input is a multiple of q k^T."""
        return not self.has_softcap

    @property
    def lse_shift_in_scores(self) -> bool:
        """Whether `lse_shift` is added to scores: a softmax can do without, tanh cannot."""
        return self.has_lse_shift and not self.is_linear

    @property
    def lse_shift_in_lse(self) -> bool:
        """Whether `lse_shift` is added to the lse: with a softcap scores have it already."""
        return self.has_lse_shift and self.is_linear


@dataclass(frozen=True, eq=False)  # of tensors: == of their fields would be ambiguous
class ScoreOptions:
    """Which scores there are, and what is done to them before and in the softmax.

    `helion_attn.attention` says what its options mean. Operations take them `resolved`.
    """

    causal: bool = False  # row i sees keys j <= i + N - M
    sm_scale: float | None = None  # multiplies q k^T; None for 1 / sqrt(D)
    # (left, right): row i sees keys i + N - M - left .. i + N - M + right; -1 and None are unlimited.
    window: tuple[int, int] | None = None
    softcap: float | None = None  # scores become `softcap * tanh(score / softcap)`, unless it is None
    sinks: torch.Tensor | None = None  # [H], one more logit of each head, or None

    def kwargs(self) -> dict[str, Any]:
        """Return them by name, as every attention takes them."""
        # torch.compile need not trace `vars`.
        return {
            "causal": self.causal, "sm_scale": self.sm_scale, "window": self.window, "softcap": self.softcap,
            "sinks": self.sinks,
        }  # fmt: skip

    def resolved(self, D: int) -> ScoreOptions:
        """Return checked options as operations take them, for head dim D: with a scale, and sinks in fp32."""
        return ScoreOptions(
            causal=bool(self.causal),
            sm_scale=float(D**-0.5 if self.sm_scale is None else self.sm_scale),
            window=self.window,
            softcap=None if self.softcap is None else float(self.softcap),
            sinks=None if self.sinks is None else self.sinks.float().contiguous(),
        )

    @property
    def left(self) -> int:
        """Row i sees keys j >= i + N - M - left; all of them if it is negative."""
        return -1 if self.window is None else self.window[0]

    @property
    def right(self) -> int:
        """Row i sees keys j <= i + N - M + right; all of them if it is negative. Causal: 0."""
        if self.causal:
            return 0
        return -1 if self.window is None else self.window[1]

    @property
    def rows_differ(self) -> bool:
        """Whether the mask leaves some rows many more keys than others, as that of causal attention does.

        A window to the left is taken to leave most rows as many.
        """
        return self.right >= 0 and self.left < 0

    @property
    def is_linear(self) -> bool:
        """Whether the softmax's input is linear in q k^T: without a softcap."""
        return self.softcap is None

    def needs_lse_shift(self, return_lse: bool) -> bool:
        """Whether the lse, a sink or a softcap needs `lse_shift`, which K's mean takes from all scores of a row."""
        return return_lse or self.softcap is not None or self.sinks is not None

    @property
    def scale(self) -> float:
        """`sm_scale` of resolved options."""
        assert self.sm_scale is not None
        return self.sm_scale

    def scales(self) -> ScoreScales:
        """Return what kernels multiply scores by; of resolved options."""
        assert self.sm_scale is not None
        if self.softcap is None:
            return ScoreScales(qk_scale=self.sm_scale * LOG2E, tanh_scale=1.0)
        return ScoreScales(qk_scale=self.sm_scale / self.softcap, tanh_scale=self.softcap * LOG2E)

    def capped(self, s: torch.Tensor) -> torch.Tensor:
        """Return scaled scores as the softcap leaves them."""
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def spec(self, has_lse_shift: bool) -> ScoreSpec:
        """Return what kernels are compiled for, whose rows have an `lse_shift` or not."""
        return ScoreSpec(
            has_left=self.left >= 0,
            has_right=self.right >= 0,
            has_softcap=self.softcap is not None,
            has_sinks=self.sinks is not None,
            has_lse_shift=has_lse_shift,
        )


class ScoreKwargs(TypedDict, total=False):
    """`ScoreOptions` by name, for overloads; and below, what each function has besides."""

    causal: bool
    sm_scale: float | None
    window: tuple[int, int] | None
    softcap: float | None
    sinks: torch.Tensor | None


class MaskOptions(TypedDict, total=False):
    """Keyword arguments of masks by blocks, which attention to a whole sequence takes."""

    block_mask: BlockMask | FlexMask | None


class OracleOptions(ScoreKwargs, MaskOptions, total=False):
    """Keyword arguments of `reference.attention`."""

    layout: Layout


class AttentionOptions(ScoreKwargs, total=False):
    """Keyword arguments of functions that have an output dtype."""

    out_dtype: torch.dtype | None


class SplitOptions(TypedDict, total=False):
    """Keyword arguments of attention whose keys may be split among programs."""

    num_splits: int | None


class QuantizedOptions(AttentionOptions, SplitOptions, MaskOptions, total=False):
    """Keyword arguments of `helion_attn.attention_quantized`."""


class TensorOptions(AttentionOptions, total=False):
    """Keyword arguments that say how dense tensors lie and what is done to them first."""

    layout: Layout
    rope: Rope | None


class NormOptions(TypedDict, total=False):
    """Keyword arguments of attention that normalises Q and K."""

    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


class DenseOptions(TensorOptions, total=False):
    """Keyword arguments of attention on one GPU and on several."""

    recipe: Recipe | RecipeName


class MaskedOptions(DenseOptions, NormOptions, MaskOptions, total=False):
    """Keyword arguments of `helion_attn.check`."""


class CallOptions(TensorOptions, NormOptions, MaskOptions, SplitOptions, total=False):
    """Keyword arguments of `helion_attn.attention`."""

    recipe: Recipe | RecipeName | Auto


class ModelOptions(MaskedOptions, total=False):
    """Keyword arguments of `reference.fp8_attention`."""

    block_n: int | None


class VarlenOptions(AttentionOptions, total=False):
    """Keyword arguments of `helion_attn.attention_varlen`."""

    recipe: Recipe | RecipeName


class CacheOptions(AttentionOptions, SplitOptions, total=False):
    """Keyword arguments of `helion_attn.attention_kvcache`."""

    layout: Layout
    open_pages: OpenPages | None


class StepOptions(ScoreKwargs, SplitOptions, total=False):
    """Keyword arguments of `helion_attn.kv_cache.step`."""

    drafts: int
    open_pages: OpenPages | None
    out: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    rope: Rope | None
