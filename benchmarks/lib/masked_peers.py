"""Attention of others that takes a mask by blocks, each as a function of `Prepared` for one mask."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import flex_attention

import helion_attn as ha
from benchmarks.lib.peers import Prepare, Prepared, fa3_varlen_16bit
from helion_attn.configs import MASK_BLOCK
from helion_attn.preprocess.mask_bits import WHOLE

#: FlexAttention's `mask_mod`: whether a query of a sequence and head sees a key.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: Shapes and rules that FlexAttention is compiled for in one process, at most. PyTorch's limit is 8.
MOST_COMPILED = 64

#: Queries of a block in SpargeAttn's kernel for sm_90, which its README has the other way round. Of keys it has 128.
SPARGE_ROWS = 64

#: The head dims that SpargeAttn has.
SPARGE_DIMS = (64, 128)

#: FlashAttention-3 on packed sequences, where a mask is of documents.
FA3_DOCUMENTS = "fa3_documents"

#: cuDNN's kernels for lists of blocks, written in CuTe DSL: whole blocks, as many in every row block, head dim 128.
CUDNN_SPARSE_FP8, CUDNN_SPARSE_BF16 = "cudnn_sparse_fp8", "cudnn_sparse_bf16"

#: The peers of this file.
MASKED = ("flex", "sparge", "sta", CUDNN_SPARSE_FP8, CUDNN_SPARSE_BF16, FA3_DOCUMENTS)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of bool [B, H, M_blocks, N_blocks] each row block has, and which: these first, ascending."""
    counts = blocks.sum(3, dtype=torch.int32)
    return counts, blocks.int().argsort(dim=3, descending=True, stable=True).int()


def flex_mask(mask: ha.BlockMask, rule: MaskMod | None) -> FlexMask:
    """The same mask as FlexAttention takes it; it evaluates `rule` in the blocks that are seen in part alone."""
    kinds = mask._kinds()
    return FlexMask.from_kv_blocks(
        *_listed(kinds >= 0),
        *_listed(kinds == WHOLE),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=rule,
        seq_lengths=(mask.M, mask.N),
    )


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = MOST_COMPILED
    return torch.compile(flex_attention, dynamic=False)


def flex(mask: ha.BlockMask, rule: MaskMod | None) -> Prepare:
    """PyTorch's FlexAttention, compiled, with the block sizes that it chooses."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        run = functools.partial(_compiled_flex(), q, k, v, block_mask=flex_mask(mask, rule), scale=sm_scale)
        return Prepared(run, lambda out: out, None)

    return prepare


def fa3_documents(lengths: list[int]) -> Prepare:
    """FlashAttention-3 in bf16 on documents as packed sequences, one batch of them."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        starts = torch.tensor([0, *lengths]).cumsum(0).to(q.device, torch.int32)
        qt, kt, vt = (x.squeeze(0).transpose(0, 1).contiguous() for x in (q, k, v))  # [tokens, heads, D]
        run = fa3_varlen_16bit(qt, kt, vt, starts, lengths, True, sm_scale)
        return Prepared(run, lambda out: out.transpose(0, 1).unsqueeze(0), None)

    return prepare


def sparge(mask: ha.BlockMask) -> Prepare:
    """SpargeAttn from bf16 to bf16 with whole blocks of any choice: INT8 scores, K smoothed, e4m3 P and V."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        function = importlib.import_module("spas_sage_attn").block_sparse_sage2_attn_cuda
        (B, H, M, D) = q.shape
        if D not in SPARGE_DIMS:
            raise ValueError(f"SpargeAttn has head dims {SPARGE_DIMS}; D is {D}")
        # [B, H, M / 64, N / 128]
        blocks = mask.blocks.repeat_interleave(MASK_BLOCK // SPARGE_ROWS, 2)[:, :, : -(-M // SPARGE_ROWS)]
        blocks = blocks.expand(B, H, -1, -1).contiguous()
        return Prepared(functools.partial(function, q, k, v, mask_id=blocks, scale=sm_scale), lambda out: out, None)

    return prepare


def cudnn_sparse(mask: ha.BlockMask, fp8: bool) -> Prepare:
    """cuDNN's block-sparse attention from bf16 to bf16, in FP8 with its own quantisation, or in bf16."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        module = importlib.import_module("cudnn.block_sparse_attention")
        counts, blocks = _listed(mask.blocks.expand(q.size(0), q.size(1), -1, -1))
        count = int(counts.max())
        if int(counts.min()) != count:
            raise ValueError(f"row blocks have {int(counts.min())} to {count} blocks; cuDNN takes as many of each")
        function = module.block_sparse_attention_fp8_forward if fp8 else module.block_sparse_attention_forward
        given = q, k, v, blocks[..., :count].contiguous(), count
        run = functools.partial(function, *given, softmax_scale=sm_scale, sparse_block_size=MASK_BLOCK)
        return Prepared(lambda: run()["o_tensor"], lambda out: out, None)

    return prepare


def sta(grid: Sequence[int], window: Sequence[int], text: int) -> Prepare:
    """FastVideo's Sliding Tile Attention in bf16, on tokens that lie tile by tile, in tiles of 6 x 8 x 8."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        function = importlib.import_module("fastvideo_kernel").sliding_tile_attention
        shape = "x".join(map(str, grid))
        run = functools.partial(function, q, k, v, [tuple(window)] * q.size(1), text, text > 0, shape)
        return Prepared(run, lambda out: out, None)

    return prepare
