"""The attention implementations that the benchmarks compare.

Each is a function `(q, k, v, causal, sm_scale) -> Prepared` from bf16 BHSD tensors. Everything that a user would
do once (quantise, lay out, build a graph) happens there, so that `Prepared.run` is the attention kernel and
nothing else.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import helion_attn as ha
from helion_attn.numerics import DESCALE_MIN, E4M3_MAX, FORMAT_MAX
from helion_attn.options import ScoreOptions
from helion_attn.reference import rounding_model

E4M3 = torch.float8_e4m3fn

#: The peers store P times this, so that e4m3 covers 2**-17..1, as this package does.
P_SCALE = 2.0**8


@dataclass(frozen=True)
class Prepared:
    """One implementation, ready to run on one set of inputs."""

    run: Callable[[], Tensor]  # launches the kernel; returns what it writes, in its own layout and dtype
    output: Callable[[Tensor], Tensor]  # views what `run` returned as [B, H, M, D], dequantised if it is FP8
    # The fp32 q [B, H, M, D], k and v [B, H_kv, N, D] that the kernel was really given; None if these are the inputs
    # themselves.
    dequantized: Callable[[], tuple[Tensor, Tensor, Tensor]] | None


Prepare = Callable[[Tensor, Tensor, Tensor, bool, float], Prepared]


def _identity(out: Tensor) -> Tensor:
    return out


def _without_lse(function: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> Callable[[], Tensor]:
    """`function`, which was not asked for the log-sum-exp, typed as returning the output alone."""
    return cast(Callable[[], Tensor], function)


def _swap_heads(x: Tensor) -> Tensor:
    """BHSD seen as BSHD, or the other way round."""
    return x.transpose(1, 2)


def _descale(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The fp32 multiplier that maps e4m3's range to that of x, reduced over `dims` (kept)."""
    return (x.abs().amax(dims, keepdim=True).float() / E4M3_MAX).clamp_min(DESCALE_MIN)


def _require_square(causal: bool, M: int, N: int, name: str) -> None:
    if causal and M != N:
        raise ValueError(f"{name} aligns its causal mask top-left, the others bottom-right: M ({M}) must equal N ({N})")


# --- ours -----------------------------------------------------------------------------------------


def helion_attn_with(recipe: ha.Recipe, block_mask: ha.BlockMask | None = None) -> Prepare:
    """This package's kernel on FP8 packed by `recipe`."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        qkv = ha.quantize(q, k, v, recipe=recipe)
        options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "block_mask": block_mask}
        run = functools.partial(ha.attention_quantized, qkv, **options)
        return Prepared(_without_lse(run), _identity, lambda: ha.dequantize(qkv))

    return prepare


def helion_attn_e2e(recipe: ha.Recipe, block_mask: ha.BlockMask | None = None) -> Prepare:
    """This package from bf16 to bf16: preprocessing and kernel."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "recipe": recipe, "block_mask": block_mask}
        run = functools.partial(ha.attention, q, k, v, **options)
        return Prepared(_without_lse(run), _identity, lambda: ha.dequantize(ha.quantize(q, k, v, recipe=recipe)))

    return prepare


def values_of(r: rounding_model.RoundedQKV) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V as the rounding model's attention is given them, fp32."""
    v32 = r.v8 * r.v_descale.unsqueeze(2) + r.v_mean.unsqueeze(2)
    return r.q8 * r.q_descale.unsqueeze(3), r.k8 * r.k_descale.unsqueeze(3), v32


def modelled(recipe: ha.Recipe, shared: dict[str, tuple[int, ...]]) -> Prepare:
    """The rounding model of a recipe, but for descales that dimensions of [B, H, S, D] share, of "q", "k" or "v"."""

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        t = rounding_model.transform(q, k, v, recipe, None)
        own = rounding_model.quantize(q, k, v, recipe)
        qk_largest = recipe.qk_largest(q.size(3), v.size(3))

        def descale(name: str, found: Tensor, largest: float) -> Tensor:
            if name not in shared:
                return found
            x = getattr(t, name)
            amax = x.abs().amax(shared[name], keepdim=True).expand_as(x)
            return rounding_model.to_descale(amax[:, :, 0] if name == "v" else amax[..., 0], largest)

        r = rounding_model.cast(
            t,
            descale("q", own.q_descale, qk_largest),
            descale("k", own.k_descale, qk_largest),
            descale("v", own.v_descale, FORMAT_MAX[recipe.pv_dtype]),
            recipe,
        )

        def run() -> Tensor:
            return rounding_model.attend(r, recipe, ScoreOptions(causal=causal, sm_scale=sm_scale))[0].to(q.dtype)

        return Prepared(run, _identity, functools.partial(values_of, r))

    return prepare


# --- FlashAttention-3 -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fa3Operands:
    """What FlashAttention-3 takes in FP8."""

    quantised: tuple[Tensor, Tensor, Tensor]  # e4m3 q, k and v, [B, S, heads, D]
    descales: tuple[Tensor, Tensor, Tensor]  # of q, k and v, [B, H_kv]; its API has no finer one
    dequantized: Callable[[], tuple[Tensor, Tensor, Tensor]]  # fp32 q, k and v, BHSD


def fa3_operands(q: Tensor, k: Tensor, v: Tensor) -> Fa3Operands:
    """Quantised from BHSD, one descale per (batch, KV head) for each of Q, K and V."""
    G = q.shape[1] // k.shape[1]
    q, k, v = (_swap_heads(x).contiguous() for x in (q, k, v))  # [B, S, heads, D]
    # [B, 1, H_kv, 1], and of every head of Q [B, 1, H, 1]
    q_descale = _descale(q.unflatten(2, (-1, G)), (1, 3, 4)).squeeze(4)
    k_descale, v_descale = _descale(k, (1, 3)), _descale(v, (1, 3))
    q_descale_per_head = q_descale.repeat_interleave(G, dim=2)
    q8, k8, v8 = (
        (x.float() / descale).to(E4M3) for x, descale in ((q, q_descale_per_head), (k, k_descale), (v, v_descale))
    )

    def dequantized() -> tuple[Tensor, Tensor, Tensor]:
        return (
            _swap_heads(q8.float() * q_descale_per_head),
            _swap_heads(k8.float() * k_descale),
            _swap_heads(v8.float() * v_descale),
        )

    descales = q_descale[:, 0, :, 0], k_descale[:, 0, :, 0], v_descale[:, 0, :, 0]
    return Fa3Operands((q8, k8, v8), descales, dequantized)


def fa3_fp8_with(window: tuple[int, int] = (-1, -1), softcap: float = 0.0, num_splits: int = 1) -> Prepare:
    """FlashAttention-3, e4m3 in and bf16 out, one descale per (batch, KV head) for each of Q, K and V.

    With 0 splits it chooses their number.
    """

    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
        fa3 = importlib.import_module("fa3_fwd_interface")
        given = fa3_operands(q, k, v)
        q_descale, k_descale, v_descale = given.descales
        run = functools.partial(
            fa3.flash_attn_func,
            *given.quantised,
            softmax_scale=sm_scale,
            causal=causal,
            window_size=window,
            softcap=softcap,
            num_splits=num_splits,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
        )
        return Prepared(run, _swap_heads, given.dequantized)

    return prepare


fa3_fp8 = fa3_fp8_with()


def fa3_on_fp8(
    q8: Tensor, k8: Tensor, v8: Tensor, q_descale: Tensor, k_descale: Tensor, v_descale: Tensor, causal: bool
) -> Tensor:
    """FlashAttention-3 on e4m3 BHSD tensors that were quantised elsewhere; descales [B, H_kv]; bf16 BHSD out."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    bshd = [_swap_heads(x).contiguous() for x in (q8, k8, v8)]
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return _swap_heads(fa3.flash_attn_func(*bshd, causal=causal, **descales))


def fa3_16bit(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """FlashAttention-3 in the inputs' own 16-bit dtype."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    bshd = [_swap_heads(x).contiguous() for x in (q, k, v)]
    run = functools.partial(fa3.flash_attn_func, *bshd, softmax_scale=sm_scale, causal=causal)
    return Prepared(run, _swap_heads, None)


def fa3_kvcache_16bit(q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3's decoding, BSHD, in the inputs' own 16-bit dtype, on a contiguous cache."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    return functools.partial(fa3.flash_attn_with_kvcache, q, k, v, cache_seqlens=seqlens, causal=True)


def fa3_kvcache_fp8(q: Tensor, k: Tensor, v: Tensor, seqlens: Tensor) -> Callable[[], Tensor]:
    """FlashAttention-3's decoding, BSHD, of e4m3 with one descale per (batch, KV head), on a contiguous cache."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    H_kv = k.shape[2]
    descales = [_descale(x, (1, 3)) for x in (q.unflatten(2, (H_kv, -1)).flatten(3), k, v)]  # [B, 1, H_kv, 1]
    q_descale_per_head = descales[0].repeat_interleave(q.shape[2] // H_kv, 2)
    # A sequence at a time: in fp32 a whole long cache would take twice the memory of both.
    k8, v8 = (
        torch.cat([(x[b : b + 1].float() / descale[b : b + 1]).to(E4M3) for b in range(x.shape[0])])
        for x, descale in ((k, descales[1]), (v, descales[2]))
    )
    q_descale, k_descale, v_descale = (x[:, 0, :, 0] for x in descales)
    return functools.partial(
        fa3.flash_attn_with_kvcache,
        (q.float() / q_descale_per_head).to(E4M3),
        k8,
        v8,
        cache_seqlens=seqlens,
        causal=True,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def fa3_varlen_16bit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    lengths: list[int],
    causal: bool,
    sm_scale: float | None = None,
) -> Callable[[], Tensor]:
    """FlashAttention-3 on packed sequences [tokens, heads, D], in the inputs' own 16-bit dtype."""
    fa3 = importlib.import_module("fa3_fwd_interface")
    tables = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    longest = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return functools.partial(
        fa3.flash_attn_varlen_func, q, k, v, **tables, **longest, softmax_scale=sm_scale, causal=causal
    )


def fa3_varlen_fp8(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, lengths: list[int], causal: bool
) -> Callable[[], Tensor]:
    """`fa3_varlen_16bit` on e4m3, with one descale per (sequence, head); as many KV heads as heads."""
    quantised, descales = [], {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        # [B, heads]
        descale = torch.stack([_descale(part, (0, 2))[0, :, 0] for part in x.split(lengths)])
        per_token = descale.repeat_interleave(cu_seqlens.diff(), 0)
        quantised.append((x.float() / per_token.unsqueeze(2)).to(E4M3))
        descales[f"{name}_descale"] = descale
    q8, k8, v8 = quantised
    return functools.partial(fa3_varlen_16bit(q8, k8, v8, cu_seqlens, lengths, causal), **descales)


# --- the peers that sum P V in two levels ---------------------------------------------------------


def sage2(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """SageAttention 2's kernel for sm_90, as its own function calls it: INT8 scores, K smoothed, e4m3 P and V.

    Its errors are all total ones: what it made of Q, K and V lies in its own order.
    """
    core = importlib.import_module("sageattention.core")
    (M, D), N = q.shape[2:], k.shape[2]
    _require_square(causal, M, N, "sage2")
    if D not in (64, 128):
        raise ValueError(f"sage2 has head dims 64 and 128; D is {D}")
    padded = torch.nn.functional.pad(v, (0, 0, 0, -N % 128))
    q8, q_scale, k8, k_scale = core.per_thread_int8_triton(
        q.contiguous(), k.contiguous(), k.mean(2, keepdim=True), tensor_layout="HND", BLKQ=64, WARPQ=16, BLKK=128,
        WARPK=128,
    )  # fmt: skip
    v8, v_scale, _mean = core.per_channel_fp8(padded.contiguous(), tensor_layout="HND", smooth_v=False)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    layout, by_thread, without_lse = 1, 3, 0  # [B, H, S, D]; descales of Q and K by thread
    kernel = core.sm90_compile.qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf

    def run() -> Tensor:
        kernel(
            q8, k8, v8, out, q_scale, k_scale, v_scale, layout, int(causal), by_thread, sm_scale, without_lse
        )  # fmt: skip
        return out

    return Prepared(run, _identity, None)


def sage2_e2e(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """SageAttention 2 from bf16 to bf16."""
    function = importlib.import_module("sageattention").sageattn_qk_int8_pv_fp8_cuda_sm90
    _require_square(causal, q.shape[2], k.shape[2], "sage2")
    q, k, v = (x.contiguous() for x in (q, k, v))
    return Prepared(functools.partial(function, q, k, v, is_causal=causal, sm_scale=sm_scale), _identity, None)


@functools.cache
def _vllm_fa3() -> torch._ops.OpOverload[..., Any]:
    """The op of the extension in vLLM's wheel, without importing vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (library,) = Path(spec.submodule_search_locations[0]).glob("vllm_flash_attn/_vllm_fa3_C*.so")
    torch.ops.load_library(str(library))
    return cast(Any, torch.ops._vllm_fa3_C.fwd.default)


def vllm_fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """vLLM's FlashAttention-3 in FP8, which sums P V in two levels: e4m3 in, bf16 out, descales as `fa3_fp8`."""
    (B, _, M, _), N = q.shape, k.shape[2]
    packed = fa3_operands(q, k, v)
    # It takes packed sequences only: [tokens, heads, D].
    q8, k8, v8 = (x.flatten(0, 1) for x in packed.quantised)
    ends_q, ends_k = (torch.arange(B + 1, dtype=torch.int32, device=q.device) * S for S in (M, N))
    given: dict[str, Any] = {
        "cu_seqlens_q": ends_q,
        "cu_seqlens_k": ends_k,
        "max_seqlen_q": M,
        "max_seqlen_k": N,
        "q_descale": packed.descales[0],
        "k_descale": packed.descales[1],
        "v_descale": packed.descales[2],
        "softmax_scale": sm_scale,
        "is_causal": causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    op = _vllm_fa3()
    # No argument has a default there.
    options = {argument.name: given.get(argument.name) for argument in op._schema.arguments[3:]}

    def run() -> Tensor:
        out: Tensor = op(q8, k8, v8, **options)[0]
        return out

    return Prepared(run, lambda out: _swap_heads(out.unflatten(0, (B, M))), packed.dequantized)


# --- cuDNN ----------------------------------------------------------------------------------------


@functools.cache
def _cudnn_handle() -> Any:
    return importlib.import_module("cudnn").create_handle()


@functools.lru_cache(maxsize=32)
def _cudnn_fp8_graph(
    B: int, H: int, H_kv: int, M: int, N: int, D: int, causal: bool, sm_scale: float
) -> tuple[Any, dict[str, Any]]:
    """The compiled graph and its tensors by name. It takes about a second, so one graph serves all inputs."""
    cudnn = importlib.import_module("cudnn")
    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=_cudnn_handle()
    )

    def operand(name: str, heads: int, S: int) -> Any:
        # Dims are always (B, H, S, D); the strides say that memory holds [B, S, H, D].
        stride = (S * heads * D, D, heads * D, 1)
        return graph.tensor(dim=(B, heads, S, D), stride=stride, data_type=e4m3, name=name)

    def scalar(name: str) -> Any:
        return graph.tensor(dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=fp32, name=name)

    tensors = {"q": operand("q", H, M), "k": operand("k", H_kv, N), "v": operand("v", H_kv, N)}
    for name in ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o"):
        tensors[name] = scalar(name)
    mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0} if causal else {}
    # The amax outputs, which training wants, stay virtual: the generated kernel then does not compute them.
    out, _, _, _ = graph.sdpa_fp8(**tensors, attn_scale=sm_scale, generate_stats=False, **mask)
    # On Hopper the output can only be FP8.
    out.set_output(True).set_dim((B, H, M, D)).set_stride((M * H * D, D, H * D, 1)).set_data_type(e4m3)
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return graph, {**tensors, "out": out}


def cudnn_fp8(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """cuDNN's graph `sdpa_fp8`: e4m3 in and out, one descale per tensor."""
    cudnn = importlib.import_module("cudnn")
    (B, H, M, D), (_, H_kv, N, _) = q.shape, k.shape
    _require_square(causal, M, N, "cudnn_fp8")
    graph, tensors = _cudnn_fp8_graph(B, H, H_kv, M, N, D, causal, sm_scale)

    bshd = {name: _swap_heads(x).contiguous() for name, x in (("q", q), ("k", k), ("v", v))}
    descale = {name: _descale(x, (0, 1, 2, 3)) for name, x in bshd.items()}  # [1, 1, 1, 1] each
    fp8 = {name: (x.float() / descale[name]).to(E4M3) for name, x in bshd.items()}
    out = torch.empty(B, M, H, D, dtype=E4M3, device=q.device)
    # A row of P sums to 1 up to its rounding to e4m3 (at most 1/16), so |out| stays below 17/16 max|v|: this scale
    # cannot saturate, and outputs 1/7000 of max|v| are still normal numbers.
    descale_o = descale["v"] * (17 / 16)
    scale_s = torch.full_like(descale_o, P_SCALE)
    values = {
        # The graph knows the dtype: bytes spare it a question that DLPack could not always answer for FP8.
        **{name: x.view(torch.uint8) for name, x in (*fp8.items(), ("out", out))},
        **{f"descale_{name}": x for name, x in descale.items()},
        "scale_s": scale_s,
        "descale_s": 1 / scale_s,
        "scale_o": 1 / descale_o,
    }
    pack = {tensors[name]: value for name, value in values.items()}
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    handle = _cudnn_handle()

    def run() -> Tensor:
        cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
        graph.execute(pack, workspace, handle=handle)
        return out

    def dequantized() -> tuple[Tensor, Tensor, Tensor]:
        q32, k32, v32 = (_swap_heads(x.float() * descale[name]) for name, x in fp8.items())
        return q32, k32, v32

    return Prepared(run, lambda out8: _swap_heads(out8.float() * descale_o), dequantized)


# --- SDPA -----------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend, name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """One backend of PyTorch's SDPA, in the inputs' own dtype."""
    _require_square(causal, q.shape[2], k.shape[2], name)
    q, k, v = (x.contiguous() for x in (q, k, v))
    enable_gqa = q.shape[1] != k.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=enable_gqa)

    return Prepared(run, _identity, None)


def cudnn_bf16(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """PyTorch SDPA's cuDNN backend in bf16."""
    return sdpa(SDPBackend.CUDNN_ATTENTION, "cudnn_bf16", q, k, v, causal, sm_scale)


def flash_16bit(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """PyTorch SDPA's FlashAttention-2 backend in the inputs' own 16-bit dtype."""
    return sdpa(SDPBackend.FLASH_ATTENTION, "flash_16bit", q, k, v, causal, sm_scale)


def in_fp16(prepare: Prepare) -> Prepare:
    """`prepare` on the same values in fp16 (the accuracy inputs, bf16 below 65504, fit)."""
    return lambda q, k, v, causal, sm_scale: prepare(q.half(), k.half(), v.half(), causal, sm_scale)


#: How the optional peers are installed. PyPI has SageAttention 1 only; of vLLM nothing but the extension is loaded.
SAGE2 = "sageattention 2.2 (pip install --no-build-isolation git+https://github.com/thu-ml/SageAttention)"
VLLM = "vllm (pip install --no-deps, of the release for this torch)"
SPARGE = "SpargeAttn (pip install --no-build-isolation git+https://github.com/thu-ml/SpargeAttn)"
CUDNN_SPARSE = "nvidia-cutlass-dsl, which nvidia-cudnn-frontend 1.32 or newer brings,"

# --- the table ------------------------------------------------------------------------------------

IMPLS: dict[str, Prepare] = {
    "helion_attn": helion_attn_with(ha.BALANCED),
    "fa3_fp8": fa3_fp8,
    "cudnn_fp8": cudnn_fp8,
    "fa3_bf16": fa3_16bit,
    "cudnn_bf16": cudnn_bf16,
    "flash_bf16": flash_16bit,
    "sage2": sage2,
    "vllm_fa3": vllm_fa3,
}

#: From bf16 to bf16, where a peer quantises itself. A bf16 kernel is its own end to end.
E2E_IMPLS: dict[str, Prepare] = {"sage2": sage2_e2e}

#: The 16-bit baselines of FlashAttention-3's accuracy table: key -> (the impl that must be there, what runs).
FP16_IMPLS: dict[str, tuple[str, Prepare]] = {
    "flash_fp16": ("flash_bf16", in_fp16(flash_16bit)),
    "fa3_fp16": ("fa3_bf16", in_fp16(fa3_16bit)),
}

#: impl -> (module that it imports, what brings it).
PACKAGES = {
    "fa3_fp8": ("fa3_fwd_interface", "fa3-fwd"),
    "fa3_bf16": ("fa3_fwd_interface", "fa3-fwd"),
    "fa3_documents": ("fa3_fwd_interface", "fa3-fwd"),
    "cudnn_fp8": ("cudnn", "nvidia-cudnn-frontend"),
    "sage2": ("sageattention", SAGE2),
    "vllm_fa3": ("vllm", VLLM),
    "sparge": ("spas_sage_attn", SPARGE),
    "cudnn_sparse_fp8": ("cutlass", CUDNN_SPARSE),
    "cudnn_sparse_bf16": ("cutlass", CUDNN_SPARSE),
    "sta": ("fastvideo_kernel", "fastvideo-kernel"),
}


def available(device: torch.device, impls: Iterable[str] = IMPLS) -> tuple[list[str], dict[str, str]]:
    """Those of `impls` that can run on `device`, and for each of the others why it cannot."""
    names: list[str] = []
    skipped: dict[str, str] = {}
    for name in impls:
        module, package = PACKAGES.get(name, (None, None))
        if name != "helion_attn" and device.type != "cuda":
            skipped[name] = f"it has no {device.type} implementation"
        elif module is not None and importlib.util.find_spec(module) is None:
            skipped[name] = f"{package} is not installed"
        else:
            names.append(name)
    return names, skipped
