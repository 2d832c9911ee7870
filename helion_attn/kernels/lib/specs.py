"""Specialisations of attention kernels: a NamedTuple a kernel, which their helpers take whole.

A kernel has its spec as an argument, `spec: hl.constexpr`. All fields are known when it is compiled.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from helion_attn.options import ScoreSpec


class RowSpec(NamedTuple):
    """Constants of `lib.row_layout.row_tile`, which prepares rows of Q or K before they are scaled."""

    d_row: int  # the power of two that holds a row
    d_step: int  # from a channel to the next in memory
    rotary: int  # channels that RoPE rotates
    pairing: int  # how, as `lib.rope` has it
    explicit_positions: bool  # rows have positions of their own
    normed: int  # which channels share a mean of squares, as `lib.norm` has it
    eps: float  # what is added to that
    has_lse_shift: bool  # `lse_shift` is asked for, rows' products with K's mean
    subtract_mean: bool  # K's mean is subtracted
    equalise: bool  # channels are multiplied by their factors
    divide: bool  # they are divided by these instead: rows of K
    vectors_first: bool  # mean and factors are loaded before rows, once for all tiles
    hadamard: bool  # rows are rotated by a Hadamard matrix
    rotate_first: bool  # before the mean is subtracted
    two_terms: bool  # rows are two terms of bf16 in that rotation
    reflected: int  # channels that are reflected, or 0
    is_cuda: bool  # the kernel is compiled; otherwise interpreted


class QuerySpec(NamedTuple):
    """How the attention kernel quantises Q."""

    d: int  # head dim of Q
    vector_row: int  # width of the rows of `k_mean` and `channel_factors`
    unit: int  # what steps but those of channels are multiples of
    largest: float  # the largest magnitude of a quantised row
    rows: RowSpec  # what is done to rows first


class AttentionSpec(NamedTuple):
    """What `fp8_attn_fwd` is compiled for, and `fp8_attn_fwd_large_d`."""

    s_bias: float  # how much too large scores are as the tensor core gives them
    max_fused_scale: float  # the largest scale of scores that one FMA takes
    p_offset_log2: float  # the largest P is 2 to it
    q_row_descales: bool  # Q has a descale a row; otherwise a block
    k_block_descales: bool  # K has a descale a block; otherwise a head
    v_channel_descales: bool  # V has a descale a channel; otherwise a head
    scores: ScoreSpec  # which there are, and what is done to them
    two_level: bool  # P V is summed in fp32, a product a block
    block_max: bool  # P is relative to its block's own maximum
    is_cuda: bool  # the kernel is compiled; otherwise interpreted
    first_block_max: bool = False  # P's reference is that of the first block that a row sees
    schraudolph_exp2: bool = False  # P's bits are linear in the score (Schraudolph), without an exponential
    half_scores: bool = False  # scores are fp16
    split_v: bool = False  # P V is two products, of half of V's channels each
    varlen: bool = False  # the sequences of a batch follow each other
    is_split_kv: bool = False  # split-KV: a program has a split of its key blocks
    pack_gqa: bool = False  # the heads of a group share tiles
    group_log2: int = 0  # two to it are the rows of a query, with `pack_gqa`
    bn_log2: int = 0  # two to it are the keys of a block
    multi_rank: bool = False  # keys and rows are in chunks, of several ranks
    zigzag: bool = False  # a rank has two chunks, as `RankChunks` says
    same_kv_layout: bool = False  # V's blocks of a rank lie as K's do
    row_ranges: bool = False  # a row sees the keys from one position up to another
    block_sparse: bool = False  # a program has the key blocks of its KV list
    has_tail: bool = False  # key blocks that are not listed count by their means, in blocks behind those of keys
    query: QuerySpec | None = None  # how Q is quantised; None if it is packed

    @property
    def softmax_bias(self) -> float:
        """How much too large the softmax's input is: tanh leaves no bias."""
        return self.s_bias if self.scores.is_linear else 0.0

    @property
    def softmax_row_descales(self) -> bool:
        """Whether the softmax's input has a scale a row: tanh leaves none."""
        return self.q_row_descales and self.scores.is_linear

    @property
    def of_scaled_scores(self) -> AttentionSpec:
        """The spec for scores that are scaled already, against the running maximum."""
        return self._replace(s_bias=0.0, q_row_descales=False, first_block_max=False)

    @property
    def marks_p(self) -> bool:
        """Whether a pass has to see that P, of 16 bits, is computed once."""
        return self.first_block_max or (self.block_sparse and not self.block_max)

    @property
    def rows_may_be_empty(self) -> bool:
        """Whether a block of keys may hold none that a row has seen."""
        ends = self.scores.has_left or self.scores.has_right
        return ends or self.first_block_max or self.row_ranges or self.block_sparse

    @property
    def out_may_be_empty(self) -> bool:
        """Whether a row may have seen no key at all. Without a mask every row sees all keys."""
        ends = self.scores.has_right or (self.multi_rank and self.scores.has_left)
        return ends or self.varlen or self.is_split_kv or self.row_ranges or self.block_sparse

    @property
    def totals_may_be_nan(self) -> bool:
        """Whether such a row's sum may be NaN: a sink that is NaN stays one."""
        return self.scores.has_sinks or self.varlen

    @property
    def all_fused(self) -> bool:
        """Whether no score is scaled before the maximum is subtracted."""
        return self.max_fused_scale == math.inf


class LargeSpec(NamedTuple):
    """What `fp8_attn_fwd_large_d` is compiled for besides an `AttentionSpec`."""

    v_slices: int  # slices of V's channels, a program each
    v_count: int  # wide pieces of a slice
    has_narrow_d: bool  # Q and K have a piece that is not wide
    has_narrow_v: bool  # V's slices do


class PagedSpec(NamedTuple):
    """What `fp8_attn_decode` and `fp8_attn_prefill` are compiled for."""

    rows: int  # query rows of a tile
    bn_log2: int  # two to it are the keys of a page
    split_v: bool  # P V is two products, of half of a program's channels each
    d_in_halves: bool  # Q and K have two pieces, of half of their channels each
    v_parts: int  # parts of V's channels, a program each; 1 in `fp8_attn_decode`
    is_split_kv: bool  # the pages of a query are split over programs
    has_open_pages: bool  # some pages come from `OpenPages`
    # A power of two that holds the sequences of a packed batch, which have different numbers of queries; or 0.
    batch: int
    d: int  # head dim of Q
    d_step: int  # from a channel of Q to the next
    unit: int  # what Q's other steps are multiples of
    equalise: bool  # Q's channels are multiplied by the cache's factors
    q_largest: float  # the largest magnitude of a quantised row
    s_bias: float  # how much too large scores are as the tensor core gives them
    max_fused_scale: float  # the largest scale of a row's scores up to which one FMA takes them to P
    may_be_wide: bool  # no softcap keeps scores within `MAX_PAGE_SCORE_LOG2`
    schraudolph_exp2: bool  # P's bits come from scores, and row sums are of the rounded P
    p_steps: float  # an octave of P on the line that a score is taken to: `E4M3_STEPS` with `schraudolph_exp2`, or 1
    p_one: float  # and where P is 1 on it
    p_offset_log2: float  # and the rest, as in `AttentionSpec`
    scores: ScoreSpec
    is_cuda: bool

    @property
    def line_bias(self) -> float:
        """How much too large scores are that the line to P takes: a tanh takes them without."""
        return 0.0 if self.scores.has_softcap else self.s_bias

    @property
    def sum_rows(self) -> int:
        """Rows of a product that adds up P in `fp8_attn_decode`: the least that a WGMMA has."""
        return 64

    @property
    def two_level(self) -> bool:
        """Whether P V is summed in fp32, a product a page."""
        return True

    @property
    def first_block_max(self) -> bool:
        """Whether P's reference is that of the first page that a row sees."""
        return False
