"""The whole pipeline on tensors without storage: launchers run, and Triton compiles for sm_90 what they launch."""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import helion_attn as ha
from devtools import sm90
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from devtools.tune import candidates, trial
from helion_attn import plans
from helion_attn.compiler import runners, versions
from helion_attn.configs import LargeTileConfig, TileConfig
from helion_attn.numerics import first_block_max
from helion_attn.ops import varlen
from helion_attn.preprocess import pack_kv, pack_q, recentre, sample
from helion_attn.preprocess.lib import hadamard
from helion_attn.types import Layout
from helion_attn.varlen import varlen_problem

Varlen = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


#: The modules of preprocessing.
PACKING = (sample, pack_kv, pack_q, recentre)


class CudaKernels:
    """In place of `torch.ops.helion_attn`: the ops' CUDA implementations, where fake tensors would get their fakes."""

    def __init__(self) -> None:
        self.ops = torch.ops.helion_attn

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self.ops, name).default
        return lambda *args: op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args)


def forget() -> None:
    """Clear what was cached about a device that is not the one of now: bound kernels, and what Helion can use on it.

    Caches of others that these modules import stay: Triton's of its own hash takes half a second to fill.
    """
    plans.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("helion_attn.") or name == "helion._compat":
            for value in list(vars(module).values()):
                # A module may be a stand-in, which imports what it is asked for.
                if isinstance(value, ModuleType) or getattr(value, "__module__", None) != name:
                    continue
                if callable(clear := getattr(value, "cache_clear", None)):
                    clear()


def fake_rotation(D: int, D_pad: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]:
    """In place of `hadamard.rotation`, which copies its tensors to a device that is not there."""
    signs, blocks, norm = hadamard.rotation(D, D_pad, seed, torch.device("cpu"))
    return fake_cuda(*signs.shape), fake_cuda(*blocks.shape, dtype=blocks.dtype), norm


@contextlib.contextmanager
def launching() -> Iterator[None]:
    """Inside, the public functions run their launchers also on fake tensors. Kernels are bound anew."""
    from helion_attn.preprocess import pack, transform_rows

    forget()
    try:
        with (
            mock.patch.object(torch.ops, "helion_attn", CudaKernels()),
            mock.patch.object(pack, "rotation", fake_rotation),
            mock.patch.object(transform_rows, "rotation", fake_rotation),
        ):
            yield
    finally:
        forget()


@contextlib.contextmanager
def without(*modules: ModuleType) -> Iterator[None]:
    """Inside, the kernels of these modules are neither compiled nor launched."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "kernel", return_value=mock.Mock()))
        yield


@dataclass
class Compilations:
    """What was asked of the two compilers."""

    traced: list[str]  # names of the kernel functions that Helion traced
    compiled: list[Any]  # Triton's kernels in launch order; what it had compiled already comes as the same object

    def by_kernel(self) -> dict[str, int]:
        """How often Triton compiled each kernel."""
        return dict(Counter({id(kernel): kernel.metadata.name for kernel in self.compiled}.values()))


@contextlib.contextmanager
def compilations() -> Iterator[Compilations]:
    """`launching`, and a record of what is compiled."""
    from helion_attn.compiler.helion_adapter import helion_kernel

    bound_kernel = helion_kernel.BoundKernel
    init = bound_kernel.__init__

    def recording(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        seen.traced.append(kernel.fn.__name__)
        init(self, kernel, *args, **kwargs)

    with sm90._offline_hopper() as compiled, launching(), mock.patch.object(bound_kernel, "__init__", recording):
        seen = Compilations([], compiled)
        yield seen


def fake_qkv(
    B: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "bhsd",
    D_v: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Q, K and V on cuda:0, contiguous in `layout`."""
    with FakeTensorMode():
        return tuple(
            torch.empty((B, S, heads, d) if layout == "bshd" else (B, heads, S, d), dtype=dtype, device="cuda:0")
            for heads, S, d in ((H, M, D), (H_kv, N, D), (H_kv, N, D_v or D))
        )


def fake_block_mask(B: int, H: int, M: int, N: int, tail: bool = False) -> ha.BlockMask:
    """A mask on cuda:0 that has blocks seen in part, or a tail."""
    rows, keys = -(-M // 128), -(-N // 128)
    shapes = [(B, H, rows, 2), (B, H, rows, keys), (B, H, rows, keys), (50, 128, 4)]
    if tail:
        of_means = -(-keys // 128)
        shapes = [(B, H, rows, 2), (B, H, rows, keys + of_means), (1, 1, 1, 1), (1, 128, 4), (B, H, rows, 4 * of_means)]
    return ha.BlockMask._of_lists(M, N, *(fake_cuda(*shape, dtype=torch.int32) for shape in shapes))


def compile_quantize(
    make_qkv: Callable[[], tuple[torch.Tensor, ...]],
    *,
    layout: Layout = "bhsd",
    recipe: ha.Recipe = ha.BALANCED,
    make_rope: Callable[[], ha.Rope] | None = None,
    norm_channels: tuple[int, int] | None = None,
) -> list[Sm90Kernel]:
    """Every kernel of `quantize`. `norm_channels`: of the norms' bf16 weights, of Q and of K."""

    def launch() -> None:
        names = zip(("q_norm", "k_norm"), norm_channels or (), strict=False)
        norms: Any = {name: ha.RMSNorm(fake_cuda(n, dtype=torch.bfloat16)) for name, n in names}
        with launching():
            ha.quantize(
                *make_qkv(),
                layout=layout,
                recipe=recipe,
                rope=make_rope() if make_rope else None,
                **norms,
            )

    return compile_for_sm90(launch)


#: Of `compile_attention`. With that batch it takes the config for launches of any size, and no tensor of the largest
#: head dim has 2**31 elements, where Helion's index type is another.
BATCH, HEADS, QUERIES = 256, 4, 1000


def batch_for(tile: TileConfig | LargeTileConfig) -> int:
    """The B for which `compile_attention` takes `tile`."""
    if tile.max_query_blocks_per_sm == math.inf:
        return BATCH
    programs = tile.max_query_blocks_per_sm * sm90._H200.multi_processor_count
    return int(programs / (HEADS * math.ceil(QUERIES / tile.bm)))


def row_reduction_shuffles(tile: TileConfig | LargeTileConfig, recipe: ha.Recipe = ha.FAST) -> int:
    """SHFL of two row reductions (maximum in the loop, sum at the end) over 4 lanes, and of the row scales.

    With a kept reference there are two loops, and whether the second is needed is another reduction.
    """
    rows_per_thread = 2 * tile.bm // (16 * tile.num_warps)
    steps = 2
    of_rows = int(math.log2(tile.bm))
    largest_scale = of_rows if recipe.resolved.q_scales == "token" else 0
    once = 2 * rows_per_thread * steps
    if first_block_max(recipe.qk_dtype, recipe.pv_dtype, tile.D_pad):
        return 2 * once + largest_scale + of_rows
    return once + largest_scale


def products_in_flight(kernel: Sm90Kernel) -> bool:
    """Whether WGMMAs of a product run one behind the other.

    Otherwise (its message C7515) ptxas found something between them, and waits for each, so all have a `gsb0`.
    """
    products = re.findall(r"[QIH]GMMA[^;]*", kernel.sass)
    return not all("gsb0" in product for product in products)


def _first_loop(kernel: Sm90Kernel) -> tuple[list[str], list[tuple[int, int]]]:
    """Opcodes of the first loop that holds a product, with their modifiers, and what its branches forward may skip."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    forward: list[tuple[int, str]] = []
    for line in kernel.sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_.]*)(.*)", line):
            code.append(found[1])
            to = re.search(r"\.L_x_\d+", found[2]) if opcode(found[1]) == "BRA" else None
            if to and to[0] in labels:
                loops.append((labels[to[0]], len(code)))
            elif to:
                forward.append((len(code), to[0]))
    begin, end = next((a, b) for a, b in loops if {"QGMMA", "HGMMA"} & {opcode(x) for x in code[a:b]})
    skipped = [(at - begin, labels[to] - begin) for at, to in forward if begin < at <= labels[to] <= end]
    return code[begin:end], skipped


def instructions_of_loop(kernel: Sm90Kernel) -> list[str]:
    """Opcodes of the first loop that holds a product, with their modifiers."""
    return _first_loop(kernel)[0]


def instructions_of_whole_block(kernel: Sm90Kernel) -> list[str]:
    """Those of `instructions_of_loop` that a block takes all of whose scores are seen: without what branches skip."""
    loop, skipped = _first_loop(kernel)
    return [x for i, x in enumerate(loop) if not any(begin <= i < end for begin, end in skipped)]


def loop_of(kernel: Sm90Kernel) -> list[str]:
    """Opcodes of the first loop that holds a product."""
    return [opcode(instruction) for instruction in instructions_of_loop(kernel)]


def opcode(instruction: str) -> str:
    """An opcode without its modifiers."""
    return instruction.split(".")[0]


def undefined_pairs(sass: str) -> list[str]:
    """Instructions that add a pair of 8-bit floats to a register which does not hold the word's other pair.

    ptxas 12.8 makes such code of pairs that it knows to be equal, and what was in the register comes out as numbers.
    Read from top to bottom, whatever branches there are.
    """
    first_pairs: set[str] = set()
    undefined = []
    for line in sass.splitlines():
        instruction = re.search(r"([A-Z][A-Z0-9_.]+) (R\d+), (.*) ;", line.replace(".reuse", ""))
        if instruction is None:
            continue
        opcode, target, operands = instruction.groups()
        merged = operands.split(", ")[-1]
        packs = opcode.endswith("PACK_AB_MERGE_C")
        if packs and merged != "RZ":
            if merged not in first_pairs:
                undefined.append(instruction.group())
            first_pairs.discard(merged)
        width = next((n for part, n in ((".128", 4), (".64", 2), (".WIDE", 2)) if part in opcode), 1)
        first_pairs.difference_update(f"R{int(target[1:]) + i}" for i in range(width))
        if packs and merged == "RZ":
            first_pairs.add(target)
    return undefined


def negated_maxima(ptx: str) -> list[str]:
    """Maxima of a maximum, and minima of a minimum, that have a negated argument: ptxas 12.8 loses its sign."""
    made: dict[str, tuple[str, list[str]]] = {}
    for instruction, target, arguments in re.findall(r"^\s*(neg|max|min)\.s32\s+(%r\d+), (.*);", ptx, re.M):
        made[target] = instruction, arguments.split(", ")

    def is_made_by(register: str, instruction: str) -> bool:
        return made.get(register, ("",))[0] == instruction

    return [
        f"{instruction} {target}"
        for target, (instruction, arguments) in made.items()
        if instruction != "neg"
        for inner in arguments
        if is_made_by(inner, instruction) and any(is_made_by(x, "neg") for x in (*made[inner][1], *arguments))
    ]


def widths(kernel: Sm90Kernel, opcode: str) -> set[int]:
    """Bytes that a thread's `opcode`s, a pattern, load or store at once."""
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
    found = re.findall(rf"\b(?:{opcode})((?:\.[A-Z0-9]+)+)", kernel.sass)
    return {next((sizes[part] for part in modifiers.split(".") if part in sizes), 4) for modifiers in found}


#: Instructions for spilled registers that a kernel may have, by its name, with a Triton that configs were not tuned
#: with, or another PyTorch: 4 CTAs an SM leave D 64 128 registers, two sums D 256 none, and HYBRID's second loop is
#: rarely run (docs/trust.md, Other Tritons).
SPILLED = {
    "_helion_fp8_attn_decode": 28,
    "_helion_fp8_attn_fwd": 120,
    "_helion_fp8_attn_fwd_large_d": 24,
    "_helion_fp8_attn_prefill": 240,
    "_helion_pack_kv": 26,
    "_helion_pack_q": 26,
}

#: Likewise in the loop over key blocks, whose length is some 700 at D 64 and 1000 at D 256; and how much longer one
#: loop may be than another that does as much.
SPILLED_IN_LOOP, LONGER_LOOP = 24, 1.03

#: The PyTorch that bounds and hashes of machine code are of. Kernels inline its floor division of integers, which takes
#: more registers in 2.11.
TORCH = "2.13"

MEASURED = versions.series() == versions.MEASURED_SERIES and torch.__version__.startswith(f"{TORCH}.")


def assert_sound(kernel: Sm90Kernel, spilled: int = 0) -> None:
    """What every kernel must be. `spilled`: instructions for spilled registers with the measured Triton."""
    most = spilled if MEASURED else max(spilled, SPILLED.get(kernel.name, 0))
    assert kernel.opcodes["LDL"] + kernel.opcodes["STL"] <= most, f"{kernel.name} spills"
    assert not undefined_pairs(kernel.sass), f"{kernel.name} packs what nobody wrote"
    assert not negated_maxima(kernel.ptx), f"{kernel.name} may be masked where it should not be"


def compile_attention(
    D: int,
    causal: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "bhsd",
    recipe: ha.Recipe = ha.FAST,
    D_v: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    B: int = BATCH,
    listed: bool = False,
) -> Sm90Kernel:
    """The attention kernel alone: what `quantize` would give it comes from the ops' fakes."""
    options: Any = {"layout": layout, "recipe": recipe, "D_v": D_v, "window": window, "softcap": softcap}
    options["listed"] = listed
    (kernel,) = compile_shape(B, QUERIES, 3000, D, causal, out_dtype, sinks=sinks, **options)
    return kernel


def compile_shape(
    B: int,
    M: int,
    N: int,
    D: int,
    causal: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: Layout = "bhsd",
    recipe: ha.Recipe = ha.FAST,
    D_v: int | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    listed: bool = False,
) -> list[Sm90Kernel]:
    """The attention kernel and, where keys are split, what merges them; if `listed` with a block mask."""

    def launch() -> None:
        qkv = fake_qkv(B, HEADS, 2, M, N, D, layout=layout, D_v=D_v)
        given = recipe.is_given
        packed = ha.quantize(*qkv, layout=layout, recipe=replace(recipe, k_scales="block") if given else recipe)
        if given:
            packed = replace(packed, recipe=recipe, k_descale=fake_cuda(B, 2, 1))
        with launching():
            ha.attention_quantized(
                packed,
                causal=causal,
                window=window,
                softcap=softcap,
                sinks=fake_cuda(4) if sinks else None,
                block_mask=fake_block_mask(B, HEADS, M, N) if listed else None,
                out_dtype=out_dtype,
            )

    return compile_for_sm90(launch)


def compile_listed(D: int, causal: bool, recipe: ha.Recipe, tail: bool) -> list[Sm90Kernel]:
    """What `attention` launches for a mask, but for packing; the attention kernel comes last."""

    def launch() -> None:
        with launching(), without(*PACKING):
            mask = fake_block_mask(4, 4, 4096, 4096, tail)
            ha.attention(*fake_qkv(4, 4, 4, 4096, 4096, D), causal=causal, recipe=recipe, block_mask=mask)

    return compile_for_sm90(launch)


def fake_varlen(
    D: int, D_v: int, B: int = 7, dtype: torch.dtype = torch.bfloat16, tokens: int = 10000, heads: int = 4
) -> Varlen:
    """Q, K and V, twice as many keys as queries and half as many heads, and both `cu_seqlens`, on cuda:0."""
    with FakeTensorMode():
        kv = (2 * tokens, heads // 2)
        q, k, v = (torch.empty(S, dtype=dtype, device="cuda:0") for S in ((tokens, heads, D), (*kv, D), (*kv, D_v)))
        cu_q, cu_k = (torch.empty(B + 1, dtype=torch.int32, device="cuda:0") for _ in range(2))
    return q, k, v, cu_q, cu_k


def compile_tile(tile: TileConfig | LargeTileConfig) -> Sm90Kernel:
    """The attention kernel with a config that need not be shipped, as the tuner launches it."""
    w = candidates.workloads(tile)[-1]

    def launch() -> None:
        with launching():
            trial._launch(tile, w, [fake_cuda(*shape, dtype=dtype) for shape, dtype in trial._packed(tile, w)])

    (kernel,) = compile_for_sm90(launch)
    return kernel


def compile_varlen(
    D: int,
    causal: bool,
    recipe: ha.Recipe = ha.BALANCED,
    D_v: int | None = None,
    sinks: bool = False,
    tokens: int = 10000,
    heads: int = 4,
    **options: Any,
) -> Sm90Kernel:
    """The attention kernel of `attention_varlen` alone."""

    def launch() -> None:
        tensors = fake_varlen(D, D_v or D, tokens=tokens, heads=heads)
        logits = fake_cuda(heads) if sinks else None
        problem = varlen_problem(*tensors, recipe=recipe, causal=causal, sinks=logits, **options)
        with launching():
            with mock.patch.object(runners.Runner, "run"):
                packed = varlen.quantize(problem)
            varlen.attend(problem, packed)

    (kernel,) = compile_for_sm90(launch)
    return kernel


def compile_quantize_varlen(D: int, recipe: ha.Recipe, dtype: torch.dtype = torch.bfloat16) -> list[Sm90Kernel]:
    """The kernels before it."""

    def launch() -> None:
        with launching():
            varlen.quantize(varlen_problem(*fake_varlen(D, D, dtype=dtype), recipe=recipe, return_lse=True))

    return compile_for_sm90(launch)


def fake_cache(
    num_pages: int, H_kv: int, D: int, D_v: int, recipe: ha.Recipe, k_mean: bool = False, channel_factors: bool = False
) -> ha.PagedKVCache:
    """A cache on cuda:0, with these constants."""
    with FakeTensorMode():
        cache = ha.paged_kv_cache(num_pages, H_kv, D, D_v=D_v, device="cuda:0", recipe=recipe)
    given = [name for name, has in (("k_mean", k_mean), ("channel_factors", channel_factors)) if has]
    constants: dict[str, Any] = {name: fake_cuda(H_kv, cache.k8.size(3)) for name in given}
    return replace(cache, **constants)


def compile_decode(
    D: int,
    D_v: int,
    H: int,
    M: int,
    num_splits: int,
    num_pages: int = 2048,
    masked: bool = False,
    recipe: ha.Recipe = ha.FAST,
    return_lse: bool = False,
    causal: bool = True,
    k_mean: bool = False,
    channel_factors: bool = False,
    open_pages: bool = False,
) -> list[Sm90Kernel]:
    """The kernel of `attention_kvcache`, and the one that merges splits if there are any; 8 KV heads.

    `masked`: with a window, a softcap and sinks. `open_pages`: of an append of as many keys.
    """

    def launch() -> None:
        table, seqlens = fake_cuda(64, 32, dtype=torch.int32), fake_cuda(64, dtype=torch.int32)
        q = fake_cuda(64, H, M, D, dtype=torch.bfloat16)
        with launching():
            masks: dict[str, Any] = {"window": (1000, 0), "softcap": 30.0, "sinks": fake_cuda(H)} if masked else {}
            cache = fake_cache(num_pages, 8, D, D_v, recipe, k_mean, channel_factors)
            options: dict[str, Any] = {"num_splits": num_splits, "return_lse": return_lse, "causal": causal} | masks
            if open_pages:
                pages = fake_cache(64 * -(-(M + cache.page_size - 1) // cache.page_size), 8, D, D_v, recipe)
                options["open_pages"] = ha.OpenPages(
                    pages.k8, pages.v8, pages.k_descale, pages.v_descale, keys=M, drafts=0
                )
            ha.attention_kvcache(q, cache, table, seqlens, **options)

    return compile_for_sm90(launch)


def every_third(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A view whose last dimension has a stride of 3."""
    return fake_cuda(*shape, 3, dtype=dtype).unbind(-1)[0]


def compile_step(
    D: int,
    H: int,
    tokens: int,
    sequences: int,
    num_splits: int | None,
    recipe: ha.Recipe = ha.BALANCED,
    drafts: int = 0,
    num_pages: int = 2048,
) -> list[Sm90Kernel]:
    """The kernels of `kv_cache.step` on 8 KV heads, in their order."""

    def launch() -> None:
        q = fake_cuda(tokens, H, D, dtype=torch.bfloat16)
        k, v = (fake_cuda(tokens, 8, D, dtype=torch.bfloat16) for _ in range(2))
        table, seqlens = fake_cuda(sequences, 32, dtype=torch.int32), fake_cuda(sequences, dtype=torch.int32)
        cu_seqlens = fake_cuda(sequences + 1, dtype=torch.int32)
        with launching():
            cache = fake_cache(num_pages, 8, D, D, recipe)
            ha.kv_cache.step(q, k, v, cache, cu_seqlens, table, seqlens, num_splits=num_splits, drafts=drafts)

    return compile_for_sm90(launch)


def compile_append(
    D: int,
    dtype: torch.dtype,
    interleaved: bool | None = None,
    L: int = 1,
    recipe: ha.Recipe = ha.FAST,
    strided: bool = False,
    k_mean: bool = False,
    channel_factors: bool = False,
    num_pages: int = 2048,
) -> list[Sm90Kernel]:
    """The two kernels of `append_kvcache` for `L` new keys a sequence; with RoPE if `interleaved` is not None.

    `strided`: neighbouring channels of K and V are not neighbours in memory.
    """

    def launch() -> None:
        table, seqlens = fake_cuda(64, 32, dtype=torch.int32), fake_cuda(64, dtype=torch.int32)
        new = every_third if strided else fake_cuda
        k, v = (new(64, 8, L, D, dtype=dtype) for _ in range(2))
        rope = None if interleaved is None else ha.Rope(fake_cuda(4096, D // 2), fake_cuda(4096, D // 2), interleaved)
        with launching():
            cache = fake_cache(num_pages, 8, D, D, recipe, k_mean, channel_factors)
            ha.append_kvcache(cache, k, v, table, seqlens, rope=rope)

    return compile_for_sm90(launch)
