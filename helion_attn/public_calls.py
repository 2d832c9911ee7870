"""A call of a public function as a value, made of what its operation is asked; and as a line of Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from helion_attn.configs import MASK_BLOCK
from helion_attn.numerics import FORMAT_MAX
from helion_attn.types import PACKED_FIELDS, Recipe, Rope, preset_name

if TYPE_CHECKING:
    from helion_attn.options import ScoreOptions
    from helion_attn.problem import (
        AppendArgs,
        AttentionArgs,
        DecodeArgs,
        DenseArgs,
        NormArgs,
        PackArgs,
        QuantizeArgs,
        RopeArgs,
        StepArgs,
        VarlenArgs,
    )


class PublicCall(NamedTuple):
    """A call of `helion_attn.FUNCTION`. What holds several tensors, such as a `Rope`, is the dict of its fields.

    Attributes:
        function: its name.
        tensors: its positional arguments by name, in their order.
        options: all other arguments that are not at their default.
    """

    function: str
    tensors: dict[str, Any]
    options: dict[str, Any]


def of_attention(a: DenseArgs) -> PublicCall:
    """Return the call of `attention`."""
    mask = {"M": a.q.size(2), "N": a.k.size(2), **a.block_mask._asdict()} if a.block_mask.block_sparse else None
    options = {
        **_layout(a.bshd),
        **_score_options(a.scores, a.q.size(3)),
        "recipe": a.recipe,
        **_rope_and_norms(a.rope, a.norm),
        "block_mask": mask,
        "num_splits": a.num_splits,
        **_outputs(a.scores, a.needs_lse_shift, a.out_dtype, a.q.dtype),
    }
    return PublicCall("attention", _tensors(a.bshd, q=a.q, k=a.k, v=a.v), _given(options))


def of_attention_varlen(a: VarlenArgs) -> PublicCall:
    """Return the call of `attention_varlen`."""
    options = {
        **_score_options(a.scores, a.q.size(2)),
        "recipe": a.recipe,
        **_outputs(a.scores, a.needs_lse_shift, a.out_dtype, a.q.dtype),
    }
    tensors = {"q": a.q, "k": a.k, "v": a.v, "cu_seqlens_q": a.cu_seqlens_q, "cu_seqlens_k": a.cu_seqlens_k}
    return PublicCall("attention_varlen", tensors, _given(options))


def of_attention_quantized(a: AttentionArgs) -> PublicCall:
    """Return the call of `attention_quantized`, as if the output had the unquantised tensors' dtype."""
    dtype = torch.bfloat16 if a.out_dtype in FORMAT_MAX else a.out_dtype
    qkv = {
        **dict(zip(PACKED_FIELDS, a.packed.tensors(), strict=True)),
        "M": a.m_len,
        "N": a.n_len,
        "D": a.d,
        "D_v": a.d_v,
        "dtype": dtype,
        "layout": "bshd" if a.bshd else "bhsd",
        "recipe": a.recipe,
    }
    options = {
        **_score_options(a.scores, a.d),
        "block_mask": {"M": a.m_len, "N": a.n_len, **a.block_mask._asdict()} if a.block_mask.block_sparse else None,
        "num_splits": a.num_splits,
        "out_dtype": None if a.out_dtype == dtype else a.out_dtype,
    }
    return PublicCall("attention_quantized", {"qkv": qkv}, _given(options))


def of_quantize(a: QuantizeArgs) -> PublicCall:
    """Return the call of `quantize`."""
    options = {"recipe": a.recipe, **_rope_and_norms(a.rope, a.norm)}
    return PublicCall("quantize", {"q": a.q, "k": a.k, "v": a.v}, _given(options))


def of_pack(a: PackArgs) -> PublicCall:
    """Return the call of `pack`, with descales of 1, which the operation does not see."""
    return PublicCall("pack", {"q": a.q, "k": a.k, "v": a.v}, {"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0})


def of_decode(a: DecodeArgs) -> PublicCall:
    """Return the call of `attention_kvcache`."""
    options = {
        **_layout(a.bshd),
        **_score_options(a.scores, a.cache.D),
        "num_splits": a.splits,
        **_outputs(a.scores, a.needs_lse_shift, a.out_dtype, a.q.dtype),
    }
    q = _tensors(a.bshd, q=a.q)
    tensors = {**q, "cache": dict(vars(a.cache)), "block_table": a.block_table, "cache_seqlens": a.cache_seqlens}
    # Its default is True.
    return PublicCall("attention_kvcache", tensors, {"causal": a.scores.right == 0, **_given(options)})


def of_append(a: AppendArgs) -> PublicCall:
    """Return the call of `append_kvcache`."""
    tensors = {
        "cache": dict(vars(a.cache)),
        "k": a.k,
        "v": a.v,
        "block_table": a.block_table,
        "cache_seqlens": a.cache_seqlens,
    }
    return PublicCall("append_kvcache", tensors, _given({"drafts": a.drafts or None, "rope": _rope(a.rope)}))


def of_step(a: StepArgs) -> PublicCall:
    """Return the call of `kv_cache.step`, without memory that it is given."""
    options = {
        "drafts": a.open_pages.drafts or None,
        "max_seqlen_q": a.max_seqlen_q,
        "max_seqlen_k": a.max_seqlen_k,
        **_score_options(a.scores, a.cache.D),
        "num_splits": a.splits,
        "return_lse": a.needs_lse_shift and not a.scores.needs_lse_shift(return_lse=False),
        "rope": _rope(a.rope),
    }
    tensors = {
        "q": a.q,
        "k": a.k,
        "v": a.v,
        "cache": dict(vars(a.cache)),
        "cu_seqlens": a.cu_seqlens,
        "block_table": a.block_table,
        "seqlens": a.seqlens,
    }
    # Its default is True.
    return PublicCall("kv_cache.step", tensors, {"causal": a.scores.right == 0, **_given(options)})


def of_ranks(function: str, tensors: dict[str, Any], options: dict[str, Any], rope: Rope | None) -> PublicCall:
    """Return the call of a function of `distributed`, on the default group."""
    fields = {"rope": None if rope is None else dict(vars(rope))}
    return PublicCall(f"distributed.{function}", tensors, _given({**options, **fields}))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that are not None or False, which are defaults."""
    return {name: x for name, x in options.items() if x is not None and x is not False}


def _tensors(bshd: bool, **tensors: torch.Tensor) -> dict[str, Any]:
    """Tensors [B, heads, S, D] in the layout of the call."""
    return {name: x.transpose(1, 2) if bshd else x for name, x in tensors.items()}


def _layout(bshd: bool) -> dict[str, Any]:
    return {"layout": "bshd"} if bshd else {}


def _score_options(scores: ScoreOptions, D: int) -> dict[str, Any]:
    causal = scores.right == 0
    right = -1 if causal else scores.right
    return {
        **scores.kwargs(),
        "causal": causal,
        "sm_scale": None if scores.sm_scale == float(D**-0.5) else scores.sm_scale,
        "window": None if scores.left < 0 and right < 0 else (scores.left, right),
    }


def _outputs(scores: ScoreOptions, needs_lse_shift: bool, out_dtype: torch.dtype, dtype: torch.dtype) -> dict[str, Any]:
    """Where K's mean must be corrected anyway, the operation does not tell whether lse was asked for."""
    return {
        "return_lse": needs_lse_shift and not scores.needs_lse_shift(return_lse=False),
        "out_dtype": None if out_dtype == dtype else out_dtype,
    }


def _rope(a: RopeArgs) -> dict[str, Any] | None:
    return None if a.cos is None else a._asdict()


def _rope_and_norms(rope: RopeArgs, norm: NormArgs) -> dict[str, Any]:
    return {
        "rope": _rope(rope),
        "q_norm": None if norm.q_weight is None else {"weight": norm.q_weight, "eps": norm.q_eps},
        "k_norm": None if norm.k_weight is None else {"weight": norm.k_weight, "eps": norm.k_eps},
    }


def line(call: PublicCall, comment: str) -> str:
    """Return a line that makes the call on other values, after `import torch, helion_attn as ha`.

    Its tensors have the shapes, strides, dtypes and device of the call's. Their values are not read: those of the line
    are random; sequences are as long as each other; a block mask shows all scores, a block table has the pages in their
    order, and the pages of a cache are not filled.
    """
    made = [f"{name} = {_text(name, x, call)}; " for name, x in call.tensors.items()]
    options = [f"{name}={_text(name, x, call)}" for name, x in call.options.items()]
    return f"{''.join(made)}ha.{call.function}({', '.join([*call.tensors, *options])})  # {comment}"


def _text(name: str, x: Any, call: PublicCall) -> str:
    """An argument as an expression."""
    match name:
        case "rope":
            return _text_of_rope(x)
        case "q_norm" | "k_norm":
            return f"ha.RMSNorm({_random(x['weight'])}, eps={x['eps']})"
        case "block_mask":
            sizes = ", ".join(map(str, (*x["entries"].shape[:3], -(-x["N"] // MASK_BLOCK))))
            blocks = f"torch.ones({sizes}, dtype=torch.bool{_on(x['entries'])})"
            return f"ha.BlockMask({blocks}, {x['M']}, {x['N']}{'' if x['tail'] is None else ', tail=True'})"
        case "qkv":
            return _text_of_qkv(x)
        case "cache":
            return _text_of_cache(x)
        case "cu_seqlens" | "cu_seqlens_q" | "cu_seqlens_k":
            tokens = call.tensors["k" if name == "cu_seqlens_k" else "q"].size(0)
            return f"torch.linspace(0, {tokens}, {x.size(0)}{_on(x)}).int()"
        case "block_table":
            pages = call.tensors["cache"]["k8"].size(0)
            return f"(torch.arange({x.numel()}{_like(x)}) % {pages}).view({x.size(0)}, {x.size(1)})"
        case "cache_seqlens" | "seqlens":
            whole = call.tensors["block_table"].size(1) * call.tensors["cache"]["k8"].size(2)
            keys = 0 if call.function == "append_kvcache" else whole
            return f"torch.full(({x.size(0)},), {keys}{_like(x)})"
    if isinstance(x, torch.Tensor):
        return _random(x)
    if isinstance(x, Recipe):
        return _text_of_recipe(x)
    return repr(x)


def _on(x: torch.Tensor) -> str:
    return "" if x.device.type == "cpu" else f', device="{x.device}"'


def _like(x: torch.Tensor) -> str:
    return f", dtype={x.dtype}{_on(x)}"


def _random(x: torch.Tensor) -> str:
    return _random_of(tuple(x.shape), x.dtype, _on(x), None if x.is_contiguous() else x.stride())


def _random_of(shape: tuple[int, ...], dtype: torch.dtype, on: str, strides: tuple[int, ...] | None = None) -> str:
    """A tensor of random numbers; contiguous without strides."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides or (), strict=strides is not None))
    sizes = ", ".join(map(str, shape if strides is None else (last + 1,)))
    if dtype.itemsize == 1:
        made = f"torch.randn({sizes}{on}).to({dtype})"
    else:
        made = f"torch.randn({sizes}, dtype={dtype}{on})"
    return made if strides is None else f"{made}.as_strided({shape}, {strides})"


def _text_of_recipe(recipe: Recipe) -> str:
    name = preset_name(recipe)
    return f"ha.{recipe!r}" if name is None else repr(name.lower())


def _text_of_rope(rope: dict[str, Any]) -> str:
    positions = [
        f", {name}=torch.arange({x.numel()}{_like(x)}) % {rope['cos'].size(0)}"
        for name in ("q_positions", "k_positions")
        if (x := rope[name]) is not None
    ]
    paired = ", interleaved=True" if rope["interleaved"] else ""
    return f"ha.Rope({_random(rope['cos'])}, {_random(rope['sin'])}{paired}{''.join(positions)})"


def _text_of_qkv(qkv: dict[str, Any]) -> str:
    """As `quantize` or `pack` makes it, of contiguous tensors."""
    (B, H), H_kv, recipe = qkv["q_descale"].shape[:2], qkv["v_mean"].size(1), qkv["recipe"]
    on, dtype = _on(qkv["q8"]), recipe.qk_dtype if recipe.is_given else qkv["dtype"]
    shapes = [(B, H, qkv["M"], qkv["D"]), (B, H_kv, qkv["N"], qkv["D"]), (B, H_kv, qkv["N"], qkv["D_v"])]
    if qkv["layout"] == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    tensors = ", ".join(_random_of(shape, dtype, on) for shape in shapes)
    layout = f"layout={qkv['layout']!r}"
    if not recipe.is_given:
        return f"ha.quantize({tensors}, recipe={_text_of_recipe(recipe)}, {layout})"
    of_v = f"torch.ones({B}, {H_kv}, {qkv['D_v']}{on})" if recipe.v_scales == "channel" else "1.0"
    descales = f"q_descale=1.0, k_descale=1.0, v_descale={of_v}"
    return f"ha.pack({tensors}, {descales}, {layout}, dtype={qkv['dtype']})"


def _text_of_cache(cache: dict[str, Any]) -> str:
    k8, D, D_v = cache["k8"], cache["D"], cache["D_v"]
    recipe = "balanced" if k8.dtype == torch.int8 else "fast"
    mean = "" if cache["k_mean"] is None else f", k_mean=torch.randn({k8.size(1)}, {D})"
    factors = "" if cache["channel_factors"] is None else f", channel_factors=torch.ones({k8.size(1)}, {D})"
    return f"ha.paged_kv_cache({k8.size(0)}, {k8.size(1)}, {D}, D_v={D_v}{_on(k8)}, recipe={recipe!r}{mean}{factors})"
