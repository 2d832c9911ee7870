"""The arguments of the operations: a NamedTuple each, of tensors, or of the buffers of a plan.

The fields are the arguments of the operation's schema (`ops.declare`), and with layouts in place of tensors the key of
its plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from helion_attn import configs
from helion_attn.configs import LargeTileConfig, Packing, TileConfig
from helion_attn.options import ScoreOptions
from helion_attn.types import BlockMask, PackedTensors, PagedKVCache, Recipe, RMSNorm, Rope


@functools.lru_cache(1024)
def _kept(find: Callable[..., Packing], D: int, D_v: int, bits: tuple[int, int]) -> Packing:
    return find(D, D_v, bits)


def _found(find: Callable[..., Packing], D: int, D_v: int, bits: tuple[int, int]) -> Packing:
    """Block sizes and padding for head dims; symbolic ones have no hash."""
    return _kept(find, D, D_v, bits) if type(D) is type(D_v) is int else find(D, D_v, bits)


class RopeArgs(NamedTuple):
    """The fields of a `Rope`, or its absence, as operations take it."""

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    q_positions: torch.Tensor | None
    k_positions: torch.Tensor | None
    interleaved: bool


NO_ROPE_ARGUMENTS = RopeArgs(cos=None, sin=None, q_positions=None, k_positions=None, interleaved=False)


def rope_arguments(rope: Rope | None) -> RopeArgs:
    """`rope` as operations take it."""
    if rope is None:
        return NO_ROPE_ARGUMENTS
    return RopeArgs(
        cos=rope.cos,
        sin=rope.sin,
        q_positions=rope.q_positions,
        k_positions=rope.k_positions,
        interleaved=rope.interleaved,
    )


class NormArgs(NamedTuple):
    """The fields of the `RMSNorm` of Q and of K, or its absence, as operations take them."""

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    q_eps: float
    k_eps: float


def norm_arguments(q_norm: RMSNorm | None, k_norm: RMSNorm | None) -> NormArgs:
    """The norms as operations take them."""
    # Made here: torch.compile with dynamic=True makes inputs of a global's floats, and then traces twice.
    norms = NormArgs(q_weight=None, k_weight=None, q_eps=1.0, k_eps=1.0)
    if q_norm is not None:
        norms = norms._replace(q_weight=q_norm.weight, q_eps=float(q_norm.eps))
    if k_norm is not None:
        norms = norms._replace(k_weight=k_norm.weight, k_eps=float(k_norm.eps))
    return norms


class ListSteps(NamedTuple):
    """How the lists of a `BlockMask` lie."""

    shared: int  # query heads in a row that have the same lists
    heads: int  # of lists, after which they begin anew
    row_blocks: int  # lists of a head
    key_blocks: int  # room of a list


#: Of a launch that has no lists.
NO_LISTS = ListSteps(1, 1, 1, 1)


class MaskArgs(NamedTuple):
    """The tensors of a `BlockMask`, or its absence, as operations take it."""

    lists: torch.Tensor | None
    entries: torch.Tensor | None
    tile_of: torch.Tensor | None
    tiles: torch.Tensor | None
    tail: torch.Tensor | None

    @property
    def block_sparse(self) -> bool:
        """Whether there is a mask."""
        return self.lists is not None

    def arguments(self, heads: int, unused: torch.Tensor) -> dict[str, Any]:
        """Return a kernel's arguments for it and so many query heads, by name; without a mask, `unused` for tensors."""
        if self.lists is None or self.entries is None or self.tile_of is None or self.tiles is None:
            return {**dict.fromkeys(("lists", "entries", "tile_of", "tiles", "tail"), unused), "list_steps": NO_LISTS}
        B, H, row_blocks, key_blocks = self.entries.shape
        shared = heads if H == 1 and B > 1 else 1
        return {
            "lists": self.lists.view(-1),
            "entries": self.entries.view(-1),
            "tile_of": self.tile_of.view(-1),
            "tiles": self.tiles.view(-1),
            "tail": unused if self.tail is None else self.tail.view(-1),
            "list_steps": ListSteps(shared=shared, heads=B * H, row_blocks=row_blocks, key_blocks=key_blocks),
        }


NO_MASK_ARGUMENTS = MaskArgs(lists=None, entries=None, tile_of=None, tiles=None, tail=None)


def mask_arguments(mask: BlockMask | None) -> MaskArgs:
    """`mask` as operations take it."""
    if mask is None:
        return NO_MASK_ARGUMENTS
    return MaskArgs(mask.lists, mask.entries, mask.tile_of, mask.tiles, mask.tail)


class DenseArgs(NamedTuple):
    """Attention from unquantised tensors."""

    q: torch.Tensor  # [B, H, M, D], bf16, fp16 or fp32, any strides
    k: torch.Tensor  # [B, H_kv, N, D], same dtype
    v: torch.Tensor  # [B, H_kv, N, D_v], same dtype
    rope: RopeArgs  # rotates Q and K first
    norm: NormArgs  # is applied to Q and K before that
    scores: ScoreOptions  # and the rest, as in `AttentionArgs`
    bshd: bool
    out_dtype: torch.dtype
    recipe: Recipe
    num_splits: int | None
    # Whether the lse, a sink or a softcap needs `lse_shift`, which smooth_k takes from the scores.
    needs_lse_shift: bool
    block_mask: MaskArgs = NO_MASK_ARGUMENTS

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return _found(configs.packing, self.q.size(3), self.v.size(3), self.recipe.bits)


class VarlenArgs(NamedTuple):
    """Attention over packed sequences of different lengths; the output is [tokens, H, D_v]."""

    q: torch.Tensor  # [M, H, D], bf16, fp16 or fp32, any strides; M tokens of all sequences
    k: torch.Tensor  # [N, H_kv, D], same dtype
    v: torch.Tensor  # [N, H_kv, D_v], same dtype
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    cu_seqlens_k: torch.Tensor  # int32 [B + 1]
    scores: ScoreOptions  # and the rest, as in `AttentionArgs`
    out_dtype: torch.dtype
    recipe: Recipe
    # Whether the lse, a sink or a softcap needs `lse_shift`, which smooth_k takes from the scores.
    needs_lse_shift: bool

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return _found(configs.varlen_packing, self.q.size(-1), self.v.size(-1), self.recipe.bits)


class AttentionArgs(NamedTuple):
    """Attention over packed tensors: which scores there are, how they are scaled, and where their output goes."""

    packed: PackedTensors  # Q, K and V
    m_len: int  # M, the true query length; of packed sequences, of all
    n_len: int  # N, the true key length; of packed sequences, of all
    d: int  # head dim of the unpadded Q and K
    d_v: int  # head dim of the unpadded V, and of the output
    scores: ScoreOptions  # which there are, and what is done to them
    bshd: bool  # the layout of the output
    out_dtype: torch.dtype  # of the output
    recipe: Recipe  # how the tensors were quantised, and P is
    num_splits: int | None  # splits of the keys, a program each, whose results are merged; None to choose
    block_mask: MaskArgs = NO_MASK_ARGUMENTS  # which scores there are besides

    def sizes(self) -> dict[str, int]:
        """Lengths, heads, and how the rows of the output lie, as the kernels take them."""
        H, H_kv = self.packed.q_descale.size(1), self.packed.v_mean.size(1)
        return {
            "m_len": self.m_len,
            "n_len": self.n_len,
            "heads": H,
            "group": H // H_kv,
            "out_head_step": 1 if self.bshd else self.m_len,
            "out_row_step": H if self.bshd else 1,
            # An edge further away hides nothing, and might not fit 32 bits.
            "left": min(self.scores.left, self.n_len),
            "right": min(self.scores.right, self.m_len),
        }

    def spec_fields(self) -> dict[str, bool]:
        """Return fields of the kernels' specs by name: those of descales."""
        return {
            "q_row_descales": self.recipe.q_scales == "token",
            "k_block_descales": self.recipe.k_scales == "block",
            "v_channel_descales": self.recipe.v_scales == "channel",
        }


class Choice(NamedTuple):
    """Which kernel a call takes, and how its work is cut: `ops.choose` says."""

    tile: TileConfig | LargeTileConfig  # a `LargeTileConfig` runs `fp8_attn_fwd_large_d`, another `fp8_attn_fwd`
    splits: int = 1  # splits of a program's key blocks, whose results are merged if there are several
    pack_gqa: bool = False  # the heads of a group share tiles
    head_group: int = 1  # heads that come at once, or of packed sequences the programs of those
    quantises_q: bool = False  # the attention kernel quantises Q

    @property
    def kernel(self) -> str:
        """Its name."""
        return "fp8_attn_fwd_large_d" if isinstance(self.tile, LargeTileConfig) else "fp8_attn_fwd"


class RankChunks(NamedTuple):
    """Where keys and rows lie whose chunks come from several ranks, as `kernels.lib.rank_chunks` has it."""

    row_chunk_blocks: int  # query blocks of a chunk of rows
    row_chunk_len: int  # its rows
    row_first: int  # the first row's position
    row_step: int  # from the first row of a chunk to that of the next, in positions
    key_chunks: int  # chunks of the keys
    key_chunk_blocks: int  # key blocks of a chunk
    key_chunk_len: int  # its keys
    key_step: int  # from the first key of a chunk to that of the next, in positions
    ranks: int  # whose keys there are
    head_blocks: int  # blocks of a head on a rank
    k_rank_step: int  # from a rank's blocks of K to those of the next, in blocks; and so `v_rank_step`
    v_rank_step: int  # the same for V
    # A rank has chunk r and chunk `2 * ranks - 1 - r`, in place of chunk r alone; kernels have it in their spec.
    zigzag: bool


#: Of a launch that has no chunks.
NO_CHUNKS = RankChunks(1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 0, False)


@functools.cache
def magic(divisor: int) -> int:
    """The int32 that `chunk_of_block` multiplies by, in place of a division (Robison, ARITH 2005).

    The quotient is right up to where `magic_finds_chunks` says.
    """
    factor = (2**32 - 1) // divisor
    return factor - 2**32 if factor >= 2**31 else factor


def magic_finds_chunks(chunks: int, blocks: int) -> bool:
    """Whether every block of `chunks` chunks of `blocks` blocks is found in its own chunk, by `magic`.

    Least where it is tightest, at the first block of a chunk q: (q n + 1) ((2**32 - 1) // n) >= 2**32 q, for n blocks.
    """
    return (chunks - 1) * blocks**2 + blocks <= 2**32


class MultiRankArgs(NamedTuple):
    """Attention over keys of several ranks, into tensors that are there."""

    q8: torch.Tensor  # [B * H, M_blocks, bm, D_pad], and so q_descale and lse_shift, of `QuantizedQKV`
    q_descale: torch.Tensor  # [B, H, M_blocks, bm]
    lse_shift: torch.Tensor | None  # [B, H, M_blocks, bm], or None
    gathered: torch.Tensor  # uint8 [ranks, bytes], a rank's packed K and V each, as `distributed.buffer` lays them
    k_descale: torch.Tensor  # fp32 [B * H_kv * key blocks] in the order of the chunks, or [B * H_kv], of all ranks
    v_descale: torch.Tensor  # [B, H_kv, D_v_pad], of all ranks
    v_mean: torch.Tensor  # [B, H_kv, D_v_pad], of all ranks
    out: torch.Tensor  # contiguous [B, H, M, D_v], or [B, M, H, D_v] if `bshd`, written; M the rows of all chunks
    lse: torch.Tensor  # fp32 [B, H, M], written
    # int32 [2, M_blocks * bm], from and up to which position each row sees keys, or None.
    row_bounds: torch.Tensor | None
    # int32 [M_blocks, 4], with `row_bounds`: of each query block, from which key block on any row sees a key, from
    # which on and up to which all rows see all keys, and up to which any row sees one.
    block_bounds: torch.Tensor | None
    chunks: RankChunks  # where keys and rows lie
    v_offset: int  # bytes of a rank's row before V
    n_len: int  # the position where keys end
    d: int  # and the rest, as in `AttentionArgs`
    d_v: int
    scores: ScoreOptions
    bshd: bool
    recipe: Recipe


class MergeArgs(NamedTuple):
    """Two results over different keys, into one."""

    results: torch.Tensor  # fp32 [2, B, H, M, D_v]
    results_lse: torch.Tensor  # fp32 [2, B, H, M]
    sinks: torch.Tensor | None  # fp32 [H], or None
    out: torch.Tensor  # contiguous [B, H, M, D_v], or [B, M, H, D_v] if `bshd`, written
    lse: torch.Tensor  # fp32 [B, H, M], written
    bshd: bool  # the layout of `out`


class OpenPagesArgs(NamedTuple):
    """The open pages that an append returned: the fields of `OpenPages`."""

    k8: torch.Tensor | None  # and the other tensors, pages as those of the cache, or None
    v8: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    keys: int  # how many were appended to each sequence; 0 without the tensors
    drafts: int  # how many of them may still be rejected


class DecodeArgs(NamedTuple):
    """Attention over a paged cache."""

    q: torch.Tensor  # [B, H, M, D], bf16, fp16 or fp32, any strides
    cache: PagedKVCache  # keys and values
    open_pages: OpenPagesArgs  # of the append before, whose queries these are
    block_table: torch.Tensor  # int32 [B, max_pages]
    cache_seqlens: torch.Tensor  # int32 [B]
    splits: int | None  # of a sequence's pages; None for a choice
    scores: ScoreOptions  # and the rest, as in `AttentionArgs`
    needs_lse_shift: bool  # whether the lse, a sink or a softcap needs what K's mean takes from the scores
    bshd: bool
    out_dtype: torch.dtype


def pages_apart(drafts: int) -> int:
    """Return the open pages a sequence of a packed batch has beside those that its tokens fill.

    Sequence b has its first open page at cu_seqlens[b] // page_size + b times this. That is room for all pages that its
    new keys fill, and with drafts for one that follows.
    """
    return 1 + (drafts > 0)


def open_page_count(tokens: int, sequences: int, page_size: int, drafts: int) -> int:
    """How many open pages a packed batch has at most."""
    return tokens // page_size + sequences * pages_apart(drafts)


def power_that_holds(sequences: int) -> int:
    """A power of two that holds so many sequences: 64, 512, 4096, .... Kernels are compiled anew for each."""
    holds = 64
    while holds < sequences:
        holds *= 8
    return holds


class PackedBatch(NamedTuple):
    """Queries of sequences that follow each other, [1, heads, tokens, D], and not as many of each."""

    cu_seqlens: torch.Tensor  # int32 [B + 1], where they begin
    longest: int  # the most tokens of a sequence, at least
    most_queries: int  # of a sequence for `fp8_attn_decode`; those with more are for `fp8_attn_prefill`
    few: bool  # which of the two kernels a launch is of

    @property
    def size(self) -> int:
        """A power of two that holds the sequences."""
        return power_that_holds(self.cu_seqlens.size(0) - 1)


class QuantizeArgs(NamedTuple):
    """Q, K and V to the packed format."""

    q: torch.Tensor  # [B, H, M, D], bf16, fp16 or fp32, any strides
    k: torch.Tensor  # [B, H_kv, N, D], same dtype
    v: torch.Tensor  # [B, H_kv, N, D_v], same dtype
    rope: RopeArgs  # rotates Q and K first
    norm: NormArgs  # is applied to Q and K before that
    recipe: Recipe  # how they become 8- or 16-bit numbers
    # Whether the lse, a sink or a softcap needs `lse_shift`, which smooth_k takes from the scores.
    needs_lse_shift: bool

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return _found(configs.packing, self.q.size(3), self.v.size(3), self.recipe.bits)


class SampledTokens(NamedTuple):
    """Which of a rank's tokens are of an evenly spaced sample of the whole sequence: every `every`th of two runs."""

    every: int  # the step
    first: int  # the first of the rank's first run, counted from the rank's first token
    first_count: int  # how many of that run
    second: int  # the first of its second run, likewise
    second_count: int  # how many

    @property
    def size(self) -> int:
        """How many of both."""
        return self.first_count + self.second_count


class DescribeRankArgs(NamedTuple):
    """A rank's part of a sequence, to what it tells the others of it."""

    q: torch.Tensor  # [B, H, M, D], bf16, fp16 or fp32, any strides
    k: torch.Tensor  # [B, H_kv, N, D], same dtype
    v: torch.Tensor  # [B, H_kv, N, D_v], same dtype
    rope: RopeArgs  # rotates Q and K first; with positions
    recipe: Recipe  # how they become 8- or 16-bit numbers
    k_rows: int  # sampled keys for which every rank has room
    q_rows: int  # sampled queries, likewise; read with `recipe.equalise`
    k_sample: SampledTokens  # this rank's sampled keys
    q_sample: SampledTokens  # its sampled queries

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return _found(configs.varlen_packing, self.q.size(-1), self.v.size(-1), self.recipe.bits)


class QuantizeRankArgs(NamedTuple):
    """A rank's part of a sequence to the packed format."""

    q: torch.Tensor  # and the rest, as in `QuantizeArgs`
    k: torch.Tensor
    v: torch.Tensor
    # Sampled keys of all ranks, [rows, B, H_kv, columns], as `preprocess.rank_samples` lays them.
    kv_sample: torch.Tensor
    q_sample: torch.Tensor | None  # sampled rows of Q, likewise, with `recipe.equalise`; otherwise None
    v_largest: torch.Tensor  # [B, H_kv, D_v], the largest magnitudes of V of all ranks
    rope: RopeArgs
    recipe: Recipe
    needs_lse_shift: bool
    all_keys: int  # of all ranks

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return _found(configs.varlen_packing, self.q.size(-1), self.v.size(-1), self.recipe.bits)


class PackArgs(NamedTuple):
    """Tensors that are e4m3 already to the packed format."""

    q: torch.Tensor  # [B, H, M, D], float8_e4m3fn, any strides
    k: torch.Tensor  # [B, H_kv, N, D], float8_e4m3fn, any strides
    v: torch.Tensor  # [B, H_kv, N, D_v], float8_e4m3fn, any strides

    @property
    def packing(self) -> Packing:
        """Block sizes and padding."""
        return configs.packing(self.q.size(3), self.v.size(3))


class TransformRowsArgs(NamedTuple):
    """Rows, rotated by position or by a Hadamard matrix, or reflected."""

    x: torch.Tensor  # [B, H, S, D], bf16, fp16 or fp32, any strides
    rope: RopeArgs  # rotates by position; the positions of x are its `q_positions`
    hadamard_seed: int | None  # of the rotation's signs, or None for no rotation
    reflect: bool  # whether channels are reflected
    bshd: bool  # layout of the result


class MaskBitsArgs(NamedTuple):
    """A mask by scores, to bits and kinds of blocks."""

    mask: torch.Tensor  # bool [B, H, M, at least N], any strides
    N: int  # keys


class MaskListsArgs(NamedTuple):
    """Kinds of blocks, of which the lists of a `BlockMask` are made."""

    # Contiguous [B, H, M_blocks, N_blocks]: int32, the number of a block's tile, `WHOLE` or `UNSEEN`; or bool, whether
    # it is seen whole.
    kinds: torch.Tensor


class BlockMeansArgs(NamedTuple):
    """Rows, to means of blocks of them."""

    x: torch.Tensor  # [B, H, S, D], of any floating-point dtype, any strides


class TopBlocksArgs(NamedTuple):
    """Queries and keys, to the key blocks that hold most of the probability, as `masks.top_blocks` has it."""

    q: torch.Tensor  # [B, H, M, D], of any floating-point dtype, any strides
    k: torch.Tensor  # [B, H_kv, N, D]
    keep: float | None  # the share of the blocks that is kept
    mass: float | None  # or of the probability
    sink_blocks: int
    local_blocks: int
    causal: bool
    scale: float


class TopPagesArgs(NamedTuple):
    """Queries and the mean keys of a cache's pages, to the pages that they like best, as `pages.top` has it."""

    q: torch.Tensor  # [B, H, M, D], of any floating-point dtype, contiguous
    means: torch.Tensor  # [num_pages + 1, H_kv, D]
    block_table: torch.Tensor  # int32 [B, width]
    cache_seqlens: torch.Tensor  # int32 [B]
    page_size: int
    pages: int  # that are kept of each sequence and KV head
    sink_pages: int
    local_pages: int
    scale: float


class AppendArgs(NamedTuple):
    """New keys and values into a paged cache, at positions `cache_seqlens[b]` and up."""

    k: torch.Tensor  # [B, H_kv, L, D], bf16, fp16 or fp32, any strides
    v: torch.Tensor  # [B, H_kv, L, D_v], same dtype, any strides
    cache: PagedKVCache  # written
    block_table: torch.Tensor  # int32 [B, max_pages]
    cache_seqlens: torch.Tensor  # int32 [B]
    drafts: int  # how many of them, the last ones, may still be rejected
    rope: RopeArgs  # rotates K


class StepArgs(NamedTuple):
    """Append and attend on packed tokens."""

    q: torch.Tensor  # [tokens, H, D], bf16, fp16 or fp32, any strides
    k: torch.Tensor | None  # [tokens, H_kv, D], same dtype, any strides, or None
    v: torch.Tensor | None  # [tokens, H_kv, D_v], or None
    cache: PagedKVCache  # written if there is k
    open_pages: OpenPagesArgs  # written if there is k, otherwise read; None for those of the call's own, or none
    cu_seqlens: torch.Tensor  # int32 [B + 1]
    block_table: torch.Tensor  # int32 [B, max_pages]
    seqlens: torch.Tensor  # int32 [B], with the new keys
    out: torch.Tensor  # contiguous [tokens, H, D_v], written
    max_seqlen_q: int | None  # the most tokens of a sequence, or None; a guess, like the next
    max_seqlen_k: int | None  # the most keys
    splits: int | None  # and the rest, as in `DecodeArgs`
    rope: RopeArgs  # rotates K. Before `scores`: `api.split_tensors` has its tensors before sinks.
    scores: ScoreOptions
    needs_lse_shift: bool
