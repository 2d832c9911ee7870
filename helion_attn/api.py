"""The public functions: check a call, make a record of it, run its plan (`plans.run`) or its operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from typing_extensions import Unpack

from helion_attn import auto, backward, ops, plans
from helion_attn.configs import packing
from helion_attn.masks.blocks import as_block_mask
from helion_attn.names import reject_unknown_kwargs
from helion_attn.options import CallOptions, QuantizedOptions, ScoreKwargs, ScoreOptions
from helion_attn.problem import (
    NO_MASK_ARGUMENTS,
    NO_ROPE_ARGUMENTS,
    AttentionArgs,
    DenseArgs,
    PackArgs,
    QuantizeArgs,
    mask_arguments,
    norm_arguments,
    rope_arguments,
)
from helion_attn.types import (
    BALANCED,
    Auto,
    BlockMask,
    Layout,
    QuantizedQKV,
    Recipe,
    RecipeName,
    RMSNorm,
    Rope,
    as_recipe,
    is_auto,
    packed_fields,
)
from helion_attn.validate.block_mask import check_block_mask, check_no_tail
from helion_attn.validate.dense import (
    check_descale,
    check_dtype,
    check_head_dim,
    check_options,
    check_qkv,
    check_quantize,
    check_recipe_dims,
    check_splits,
)
from helion_attn.validate.derivatives import needs_gradient
from helion_attn.validate.quantized import check_quantized

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask


@reject_unknown_kwargs
def quantize(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    recipe: Recipe | RecipeName = BALANCED,
    layout: Layout = "bhsd",
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
) -> QuantizedQKV:
    """Quantise Q, K and V to 8 bits, or cast them to 16, and pack them for `attention_quantized`.

    Reads the tensors as they are, whatever their strides (a transposed view, a slice of a packed BS3HD tensor), and
    writes the packed copies once. Every tensor is read once for that, and of K and V a sample of 256 keys before; what
    has a norm over all heads is read twice. What is normalised or rotated, and fp32 tensors, must have a last-dimension
    stride of 1, and fp32 tensors other strides that are multiples of 4.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; D in 16..1024; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D]; H is a multiple of H_kv.
        v: [B, H_kv, N, D_v]; D_v in 16..1024.
        recipe: how the tensors become 8- or 16-bit numbers; or a preset's name, such as "balanced".
        layout: "bhsd" or "bshd".
        rope: rotate Q and K by position first.
        q_norm: normalise Q before that, by head or over all heads.
        k_norm: likewise K.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode, or has a tangent.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        qkv = ha.quantize(q, k, v, recipe="accurate")
        out = ha.attention_quantized(qkv, causal=True)
    """

    chosen = as_recipe(recipe)

    def problem() -> tuple[Any, QuantizeArgs]:
        check_quantize(q, k, v, chosen, layout, rope, q_norm, k_norm)
        qkv_bhsd = heads_first(q, k, v, layout)
        return ops.quantize, QuantizeArgs(
            *qkv_bhsd,
            rope=NO_ROPE_ARGUMENTS if rope is None else rope_arguments(rope),
            norm=norm_arguments(q_norm, k_norm),
            recipe=chosen,
            needs_lse_shift=True,
        )

    more, rest = (*rope_tensors(rope), *norm_tensors(q_norm, k_norm)), (interleaved(rope), *norm_eps(q_norm, k_norm))
    tensors = plans.run("quantize", (q, k, v, *more), (chosen, layout, *rest), problem)
    length = 2 if layout == "bhsd" else 1
    return QuantizedQKV(
        **packed_fields(tensors, chosen, needs_lse_shift=True),
        M=q.size(length),
        N=k.size(length),
        D=q.size(3),
        D_v=v.size(3),
        dtype=q.dtype,
        layout=layout,
        recipe=chosen,
    )


def heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as [B, heads, length, head dim]."""
    return (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)) if layout == "bshd" else (q, k, v)


def rope_tensors(rope: Rope | None) -> tuple[Any, ...]:
    """The tensors of `rope`; what is no `Rope` is checked later."""
    return (rope.cos, rope.sin, rope.q_positions, rope.k_positions) if isinstance(rope, Rope) else (rope,)


def interleaved(rope: Rope | None) -> bool | None:
    """What `rope` has besides tensors."""
    return rope.interleaved if isinstance(rope, Rope) else None


def norm_tensors(*norms: RMSNorm | None) -> tuple[Any, ...]:
    """The tensors of norms; what is no `RMSNorm` is checked later."""
    return tuple(norm.weight if isinstance(norm, RMSNorm) else norm for norm in norms)


def norm_eps(*norms: RMSNorm | None) -> tuple[float | None, ...]:
    """The eps of each norm, None where there is no norm."""
    return tuple(norm.eps if isinstance(norm, RMSNorm) else None for norm in norms)


@reject_unknown_kwargs
def pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_descale: float | torch.Tensor,
    k_descale: float | torch.Tensor,
    v_descale: float | torch.Tensor,
    layout: Layout = "bhsd",
    dtype: torch.dtype = torch.bfloat16,
) -> QuantizedQKV:
    """Pack tensors that were quantised elsewhere, for `attention_quantized`: nothing is scaled or rounded.

    Args:
        q: [B, H, M, D], float8_e4m3fn; with layout="bshd", H and M swapped; k and v likewise; any strides.
        k: [B, H_kv, N, D].
        v: [B, H_kv, N, D_v]; D_v in 16..1024.
        q_descale: multiplies q: a number, or fp32 [] , [B, H], [B, H_kv] (as flash-attn has it) or [B, H, M].
        k_descale: multiplies k: a number, or fp32 [] or [B, H_kv].
        v_descale: multiplies v: a number, or fp32 [], [B, H_kv] or [B, H_kv, D_v].
        layout: "bhsd" or "bshd".
        dtype: the default output dtype.

    Raises:
        TypeError, ValueError, NotImplementedError: as `quantize`; a descale that is not finite and positive, too.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64).to(torch.float8_e4m3fn)
        qkv = ha.pack(q, k, v, q_descale=1.0, k_descale=0.5, v_descale=torch.ones(1, 2))
        out = ha.attention_quantized(qkv)
    """
    check_qkv(q, k, v, layout, dtypes=(torch.float8_e4m3fn,))
    check_dtype(dtype)
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    B, H, M, H_kv = q.size(0), q.size(heads), q.size(length), k.size(heads)
    q_scale = check_descale("q_descale", q_descale, ((), (B, H), (B, H_kv), (B, H, M)), q.device)
    k_scale = check_descale("k_descale", k_descale, ((), (B, H_kv)), q.device)
    v_scale = check_descale("v_descale", v_descale, ((), (B, H_kv), (B, H_kv, v.size(3))), q.device)
    return pack_unread(q, k, v, q_scale, k_scale, v_scale, layout, dtype)


def pack_unread(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    layout: Layout,
    dtype: torch.dtype,
) -> QuantizedQKV:
    """`pack` of checked arguments; reads nothing on the host."""
    q, k, v = heads_first(q, k, v, layout)
    (B, H, M, D), (H_kv, N), D_v = q.shape, k.shape[1:3], v.size(3)
    tile = packing(D, D_v)
    q8, k8, v8 = ops.pack(PackArgs(q=q, k=k, v=v))

    rows = q_scale.new_ones(B, H, q8.size(1) * tile.bm)
    if q_scale.dim() == 2 and q_scale.size(1) != H:
        q_scale = q_scale.repeat_interleave(H // H_kv, 1)
    rows[:, :, :M] = q_scale.unsqueeze(2) if q_scale.dim() == 2 else q_scale
    channels = v_scale.new_ones(B, H_kv, tile.D_v_pad)
    channels[:, :, :D_v] = v_scale.unsqueeze(2) if v_scale.dim() == 2 else v_scale
    heads = k_scale.expand(B, H_kv).unsqueeze(2).contiguous()
    return QuantizedQKV(
        q8=q8,
        k8=k8,
        v8=v8,
        q_descale=rows.view(B, H, -1, tile.bm),
        k_descale=heads,
        v_descale=channels,
        v_mean=torch.zeros_like(channels),
        k_mean=None,
        channel_factors=None,
        lse_shift=None,
        M=M,
        N=N,
        D=D,
        D_v=D_v,
        dtype=dtype,
        layout=layout,
        recipe=Recipe(
            qk_dtype=torch.float8_e4m3fn,
            k_scales="head",
            v_scales="channel" if v_scale.dim() == 3 else "head",
            equalise=False,
            reflect=False,
            smooth_k=False,
            center_v=False,
        ),
    )


def split_tensors(
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: BlockMask | FlexMask | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Options that are tensors or hold some, as `plans.run` takes them: these tensors, and what they have besides."""
    if rope is None and q_norm is None and k_norm is None and sinks is None and block_mask is None:
        return _NO_TENSORS, ()
    mask = as_block_mask(block_mask)
    dtype = None
    if isinstance(sinks, torch.Tensor):
        dtype, sinks = sinks.dtype, sinks.float().contiguous()
    tensors = *rope_tensors(rope), *norm_tensors(q_norm, k_norm), sinks, *mask_arguments(mask)
    lengths = () if mask is None else (mask.M, mask.N)
    return tensors, (interleaved(rope), norm_eps(q_norm, k_norm), dtype, lengths)


_NO_TENSORS = *rope_tensors(None), *norm_tensors(None, None), None, *NO_MASK_ARGUMENTS


def quantized_problem(
    qkv: QuantizedQKV,
    *,
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    **score_kwargs: Unpack[ScoreKwargs],
) -> AttentionArgs:
    """The arguments of `attention_quantized`, checked, as its operation takes them."""
    check_head_dim("D is", qkv.D)
    check_head_dim("D_v is", qkv.D_v)
    check_recipe_dims(qkv.recipe, qkv.D, qkv.D_v)
    check_quantized(qkv, packing(qkv.D, qkv.D_v, qkv.recipe.bits))
    given = ScoreOptions(**score_kwargs)
    check_options(given, return_lse, out_dtype, qkv.q_descale.size(1), qkv.q8.device)
    check_splits(num_splits, qkv.N, qkv.D, qkv.D_v, qkv.recipe)
    mask = None if block_mask is None else as_block_mask(block_mask)
    if mask is not None:
        B, H = qkv.q_descale.shape[:2]
        check_block_mask(mask, B, H, qkv.M, qkv.N, qkv.D, qkv.D_v, qkv.recipe, qkv.q8.device)
        check_no_tail(mask.tail, "of attention_quantized, whose packed tensors have no means of blocks")
    return AttentionArgs(
        packed=qkv,
        m_len=qkv.M,
        n_len=qkv.N,
        d=qkv.D,
        d_v=qkv.D_v,
        scores=given.resolved(qkv.D),
        bshd=qkv.layout == "bshd",
        out_dtype=qkv.dtype if out_dtype is None else out_dtype,
        recipe=qkv.recipe,
        num_splits=num_splits,
        block_mask=NO_MASK_ARGUMENTS if mask is None else mask_arguments(mask),
    )


@overload
def attention_quantized(
    qkv: QuantizedQKV, *, return_lse: Literal[False] = False, **options: Unpack[QuantizedOptions]
) -> torch.Tensor: ...
@overload
def attention_quantized(
    qkv: QuantizedQKV, *, return_lse: Literal[True], **options: Unpack[QuantizedOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention_quantized(
    qkv: QuantizedQKV, *, return_lse: bool, **options: Unpack[QuantizedOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@reject_unknown_kwargs
def attention_quantized(
    qkv: QuantizedQKV,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v on quantised tensors: both products on operands of the recipe's dtypes.

    Args:
        qkv: from `quantize`.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; in 0..2**64.
        window: as `attention` has it.
        softcap: as `attention` has it.
        sinks: as `attention` has it.
        block_mask: as `attention` has it.
        return_lse: also return the log-sum-exp of the scores as the softmax sees them, sinks included.
        out_dtype: bf16, fp16, fp32 or float8_e4m3fn (cast without a scale); by default that of the unquantised tensors.
        num_splits: as `attention` has it.

    Returns:
        out, D_v wide, in the layout of the unquantised tensors, and fp32 lse [B, H, M], natural log, if asked for. A
        NaN or infinity makes everything that shares its descale NaN (a row of q, a head or block of k, a head of v),
        and every output that depends on that.

    Raises:
        TypeError, ValueError, NotImplementedError: as `quantize`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        qkv = ha.quantize(q, k, v)
        out = ha.attention_quantized(qkv, causal=True)
        near = ha.attention_quantized(qkv, causal=True, window=(16, 0))
    """
    if not isinstance(qkv, QuantizedQKV):
        raise TypeError(f"qkv is a {type(qkv).__name__}; it must be a helion_attn.QuantizedQKV")

    options: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap, "return_lse": return_lse,
        "out_dtype": out_dtype, "num_splits": num_splits,
    }  # fmt: skip

    def problem() -> tuple[Any, AttentionArgs]:
        return ops.attention_quantized, quantized_problem(qkv, sinks=sinks, block_mask=block_mask, **options)

    more, rest = split_tensors(sinks=sinks, block_mask=block_mask)
    sizes = qkv.M, qkv.N, qkv.D, qkv.D_v, qkv.dtype, qkv.layout, qkv.recipe
    out, lse = plans.run("attention_quantized", (*qkv.tensors(), *more), (*sizes, *options.values(), *rest), problem)
    return (out, lse) if return_lse else out


def dense_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: Layout = "bhsd",
    recipe: Recipe | RecipeName | Auto = BALANCED,
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
    **score_kwargs: Unpack[ScoreKwargs],
) -> DenseArgs:
    """The arguments of `attention`, checked, as its operation takes them."""
    recipe = as_recipe(recipe)
    check_quantize(q, k, v, recipe, layout, rope, q_norm, k_norm, differentiable=True)
    H = q.size(1 if layout == "bhsd" else 2)
    given = ScoreOptions(**score_kwargs)
    check_options(given, return_lse, out_dtype, H, q.device, differentiable=True)
    if num_splits is not None:
        check_splits(num_splits, k.size(2 if layout == "bhsd" else 1), q.size(3), v.size(3), recipe)
    scores = given.resolved(q.size(3))
    qkv_bhsd = heads_first(q, k, v, layout)
    mask = None if block_mask is None else as_block_mask(block_mask)
    if mask is not None:
        (B, H, M, D), N = qkv_bhsd[0].shape, qkv_bhsd[1].size(2)
        check_block_mask(mask, B, H, M, N, D, v.size(3), recipe, q.device)
    return DenseArgs(
        *qkv_bhsd,
        rope=NO_ROPE_ARGUMENTS if rope is None else rope_arguments(rope),
        norm=norm_arguments(q_norm, k_norm),
        scores=scores,
        bshd=layout == "bshd",
        out_dtype=q.dtype if out_dtype is None else out_dtype,
        recipe=recipe,
        num_splits=num_splits,
        needs_lse_shift=scores.needs_lse_shift(return_lse),
        block_mask=NO_MASK_ARGUMENTS if mask is None else mask_arguments(mask),
    )


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: Unpack[CallOptions]
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: Unpack[CallOptions]
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@reject_unknown_kwargs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    layout: Layout = "bhsd",
    recipe: Recipe | RecipeName | Auto = BALANCED,
    rope: Rope | None = None,
    q_norm: RMSNorm | None = None,
    k_norm: RMSNorm | None = None,
    block_mask: BlockMask | FlexMask | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    num_splits: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * sm_scale) v in FP8, from unquantised tensors, as one operation.

    It has the error of `quantize` and `attention_quantized`, which are for tensors that are attended to again. Up to
    head dim 64 the attention kernel quantises Q itself (`ops.choose.quantises_q`).

    On CUDA tensors (compute capability 9.0) it runs compiled kernels; on CPU tensors the same kernels in Helion's
    interpreter, slowly. A first call compiles: once that has taken 2 s, `logging.getLogger("helion_attn")` says so at
    level INFO, or a terminal shows it. `torch.utils.flop_counter` counts both products, as of PyTorch's attention.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32; D in 16..1024; with layout="bshd", H and M swapped; k and v likewise.
        k: [B, H_kv, N, D]; H is a multiple of H_kv.
        v: [B, H_kv, N, D_v]; D_v in 16..1024.
        causal: row i sees keys j <= i + N - M (bottom-right aligned). A row that sees none gives 0, and lse -inf.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default; in 0..2**64.
        layout: "bhsd" or "bshd", of the inputs and the output.
        recipe: how the tensors become 8- or 16-bit numbers; or a preset's name, such as "balanced". With "auto",
            BALANCED or PyTorch's attention in 16 bits, by a table of which was the faster:
            `ha.attention(q, k, v, causal=True, recipe="auto")`. PyTorch's is taken below the table's length of the head
            dim, mask, heads and card, where it has all that is asked for: bf16 or fp16, D_v = D, a multiple of 8 up to
            256, no other option than `causal`, which takes M = N or M = 1, `sm_scale` and `layout`. Where an input
            requires grad, another table says which was the faster in both passes together. A card that is in no table,
            and the CPU, have that of an H100, or of an H200 for both passes. `helion_attn.explain` says which and why.
        rope: rotate Q and K by position first.
        q_norm: normalise Q before that, by head or over all heads (`helion_attn.RMSNorm`).
        k_norm: likewise K.
        window: (left, right), as in flash-attn: row i sees keys i + N - M - left .. i + N - M + right, and -1 is
            unlimited (Longformer, arXiv:2004.05150; Mistral 7B, arXiv:2310.06825). With `causal`, right is 0 whatever
            it says. Keys outside cost nothing: their blocks are not read.
        softcap: scaled scores s become `softcap * tanh(s / softcap)`, before the mask (Gemma 2, arXiv:2408.00118); in
            2**-40..2**23; None for no cap. On the GPU its relative error is up to 2**-11.
        sinks: [H], bf16, fp16 or fp32: one more logit for each query head, of the softmax alone; it takes probability
            and gives no value (gpt-oss; StreamingLLM, arXiv:2309.17453). Neither `sm_scale` nor `softcap` applies to
            it. -inf is no sink. A row that sees no key gives 0 still, and its lse is the sink. Its magnitude is at most
            2**127: the kernel multiplies it by log2(e) in fp32, and one that overflows may make NaN of its head, a
            negative one counts as -inf. Anything but fp32 is cast on every call.
        block_mask: which scores there are, besides what `causal` and `window` say: a `helion_attn.BlockMask`, or that
            of torch.nn.attention.flex_attention, which is converted once, when it is first seen. Key blocks that a
            block of queries does not see cost nothing. A row that sees no key gives 0, and lse -inf. Where the kernel's
            key blocks are not of 128 keys (8-bit head dims beyond 256, D in 129..192 with D_v up to 128, 16-bit ones
            beyond 128) it raises.
        return_lse: also return the log-sum-exp of the scores as the softmax sees them, sinks included, fp32 [B, H, M],
            natural log.
        out_dtype: bf16, fp16, fp32 or float8_e4m3fn; q's by default.
        num_splits: splits of a program's keys, a program each, whose fp32 results are merged
            (FlashDecoding). By default chosen from the shapes and the GPU, so that few queries on many keys fill it;
            the batch size then decides on the last bits of an output. With a number they are those that the sequence
            has alone. At most one split a block of keys; 1 with head dims that `fp8_attn_fwd_large_d` takes.

    Returns:
        out, shaped as q with D_v for D, and lse if asked for. Both have gradients of q, k, v, sinks and norms' weights,
        where these require grad: Q, K and V are then kept in 8 bits, norms and RoPE are PyTorch's, and the backward
        pass is a 16-bit kernel's on the dequantised tensors (docs/training.md). `helion_attn.explain` names it.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted.
        NotImplementedError: neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input has a tangent, requires grad inside of `torch.func` or `torch.vmap`, or is a table or a
            mask that requires grad; a gradient is differentiated.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)  # [B, H, S, D]
        out, lse = ha.attention(q, k, v, causal=True, return_lse=True)
    """

    options: dict[str, Any] = {
        "causal": causal, "sm_scale": sm_scale, "window": window, "softcap": softcap, "layout": layout,
        "recipe": recipe, "return_lse": return_lse, "out_dtype": out_dtype, "num_splits": num_splits,
    }  # fmt: skip
    of_tensors: dict[str, Any] = {
        "rope": rope, "q_norm": q_norm, "k_norm": k_norm, "sinks": sinks, "block_mask": block_mask
    }  # fmt: skip

    def problem() -> tuple[Any, DenseArgs]:
        chooses = is_auto(recipe)
        asked = dense_problem(q, k, v, **(options | {"recipe": BALANCED} if chooses else options), **of_tensors)
        if chooses and (pytorch := auto.pytorch_call(asked, options | of_tensors)) is not None:
            return pytorch, asked
        learned = needs_gradient(q, k, v, asked.scores.sinks, asked.norm.q_weight, asked.norm.k_weight)
        return backward.attention_with_gradients if learned else ops.attention, asked

    more, rest = split_tensors(**of_tensors)
    out, lse = plans.run("attention", (q, k, v, *more), (*options.values(), *rest), problem)
    return (out, lse) if return_lse else out
