"""Benchmarks what each step of the attention kernel is worth: FAST as shipped, and with one step undone.

    python benchmarks/attention.py --suite ablation

Kernel only, S 4096, full attention. The shipped kernel has no switches: a variant is its source with another function
in the place of one of its steps, another config, or another recipe, compiled by itself. What the compiler says of each
stands beside its time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

import helion_attn as ha
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.peers import Prepared
from benchmarks.lib.problem import CHECKED_ROWS, Contender, grid_workload, make_problem, measure, workload
from benchmarks.lib.suite import Block, Options, Suite, console, progress
from benchmarks.lib.tables import Table, error_text, number, rows_of
from devtools.sm90 import Sm90Kernel, compile_for_sm90, fake_cuda
from devtools.workloads import Workload
from helion_attn.compiler import triton_hook
from helion_attn.compiler.helion_adapter import Config, helion_config
from helion_attn.compiler.runners import Compiled
from helion_attn.configs import TileConfig, tile_config
from helion_attn.kernels import attention
from helion_attn.kernels.lib import schraudolph, steps
from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.numerics import takes_bits
from helion_attn.options import ScoreOptions
from helion_attn.preprocess.lib.v_layout import key_stored_at
from helion_attn.problem import AttentionArgs, Choice
from helion_attn.types import PackedTensors

# --- variants -------------------------------------------------------------------------------------


def keys_in_order(p8: Tensor, bm: int, bn: int) -> Tensor:
    """In place of `interleave_keys`: P's columns as they are, for a V whose keys are in order."""
    return p8


def fours_in_order(x: Tensor, bm: int, bn: int) -> Tensor:
    """In place of `by_fours`: the same for P whose bits come from scores."""
    return x.reshape(bm, bn // 16, 4, 2, 2)


def by_exponentials(pv_dtype: torch.dtype, d: int) -> bool:
    """In place of `takes_bits`: P is 2 to a score, and cast."""
    return False


def row_sums_every_block(
    s: Tensor,
    bias: Tensor | float,
    qk_scale_log2: Tensor,
    m_run: Tensor,
    m_i: Tensor,
    l_i: Tensor,  # [bm, l_lanes]; all lanes are the same
    bm: int,
    bn: int,
    l_lanes: int,
    pv_dtype: torch.dtype,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In place of `online_softmax_step`: a block's row sums are reduced across lanes at once."""
    p8, alpha, m_run, m_new, block = steps.online_softmax_step(
        s, bias, qk_scale_log2, m_run, m_i, torch.zeros_like(l_i), bm, bn, l_lanes, pv_dtype, spec
    )
    # The kernel adds the lanes up at its end.
    return p8, alpha, m_run, m_new, l_i * alpha + (block.sum(1) * (1.0 / l_lanes)).unsqueeze(1)


class InStep(triton_hook.WithPasses):
    """A kernel whose warpgroups do not ping-pong."""

    pingpong = False


@functools.cache
def in_step(kernel: JITFunction[Any], expected: tuple[str, ...]) -> JITFunction[Any]:
    """In place of `triton_hook.with_passes`: no ping-pong."""
    return InStep.of(kernel)


IN_STEP = (triton_hook, "with_passes", in_step)


def without_passes(kernel: JITFunction[Any], expected: tuple[str, ...]) -> JITFunction[Any]:
    """In place of `triton_hook.with_passes`: the kernel as Helion has it."""
    return kernel


def heads_fastest(tile: TileConfig) -> Config:
    """In place of `helion_config`: programs of one query block side by side, not of one head."""
    return helion_config(tile) | {"loop_orders": [[0, 1]]}


@dataclass(frozen=True)
class Variant:
    """What differs from the shipped kernel."""

    tile: dict[str, Any] = field(default_factory=dict)  # fields of its config
    recipe: dict[str, Any] = field(default_factory=dict)  # fields of FAST
    # A function of the kernel: the module that calls it, its name there, and what stands in for it.
    step: tuple[types.ModuleType, str, Callable[..., Any]] | None = None
    interleaved: bool = True  # V's keys are stored in the order of P's registers


#: Other tiles, by head dim: near those of `devtools.tune.candidates`.
TILES: dict[int, dict[str, dict[str, Any]]] = {
    64: {
        "2 stages": {"num_stages": 2},
        "3 programs an SM": {"max_registers": 168},
        "128 rows on 8 warps": {"bm": 128, "num_warps": 8},
    },
    128: {
        "3 stages": {"num_stages": 3},
        "2 programs an SM": {"max_registers": 255},
        "128 rows on 8 warps": {"bm": 128, "num_warps": 8, "max_registers": 255},
    },
    256: {
        "2 stages": {"num_stages": 2},
        "64 keys": {"bn": 64},
        "64x64 on 4 warps": {"bm": 64, "bn": 64, "num_warps": 4},
    },
}


def shipped_tile(D: int) -> TileConfig:
    """The tuned config for full attention."""
    return tile_config(D, has_right=False)


def variants(D: int) -> dict[str, Variant]:
    """The shipped kernel, then each with one thing changed."""
    two_level = shipped_tile(D).two_level
    of_p = {
        "V's keys in order": Variant(step=(steps, "interleave_keys", keys_in_order), interleaved=False),
        "row sums across lanes in every block": Variant(step=(attention, "online_softmax_step", row_sums_every_block)),
    }
    if takes_bits(ha.FAST.pv_dtype, D):
        of_p = {
            "V's keys in order": Variant(step=(schraudolph, "by_fours", fours_in_order), interleaved=False),
            "P by exponentials": Variant(step=(attention, "takes_bits", by_exponentials)),
            "scores in fp32": Variant(recipe={"half_scores": False}),
        }
    return {
        "shipped": Variant(),
        **of_p,
        "one-level P V" if two_level else "two-level P V": Variant(recipe={"promote_every": int(not two_level)}),
        "P not scaled": Variant(recipe={"p_offset_log2": 0}),
        "loads where Triton has them": Variant(step=(triton_hook, "with_passes", without_passes)),
        **(
            {"warpgroups in step": Variant(step=(triton_hook, "with_passes", in_step))}
            if shipped_tile(D).num_warps == 8
            else {}
        ),
        "heads fastest": Variant(step=(attention, "helion_config", heads_fastest)),
        **{name: Variant(tile=tile) for name, tile in TILES[D].items()},
    }


@contextlib.contextmanager
def in_place(variant: Variant, kernels: Callable[..., Compiled]) -> Iterator[None]:
    """Inside, `attention.launch` runs `variant`'s steps, on kernels of its own."""
    with contextlib.ExitStack() as stack:
        if variant.step is not None:
            stack.enter_context(mock.patch.object(*variant.step))
        stack.enter_context(mock.patch.object(attention, "compiled_kernel", kernels))
        yield


def own_kernels() -> Callable[..., Compiled]:
    """`attention.compiled_kernel` with an empty cache."""
    return functools.cache(attention.compiled_kernel.__wrapped__)


# --- a launch -------------------------------------------------------------------------------------


def repacked(qkv: ha.QuantizedQKV, tile: TileConfig, interleaved: bool) -> PackedTensors:
    """What `ha.quantize` packed, of as many KV heads as heads and of whole blocks, in the blocks of `tile`."""
    heads, _, D, bn = qkv.v8.shape
    v8 = qkv.v8.view(torch.uint8)
    if not interleaved:
        v8 = v8[..., key_stored_at(torch.arange(bn, device=v8.device)).argsort()]
    keys = v8.transpose(2, 3).reshape(heads, -1, tile.bn, D)
    return PackedTensors(
        q8=qkv.q8.view(heads, -1, tile.bm, D),
        k8=qkv.k8.view(heads, -1, tile.bn, D),
        v8=keys.transpose(2, 3).contiguous().view(qkv.v8.dtype),
        q_descale=qkv.q_descale.view(*qkv.q_descale.shape[:2], -1, tile.bm),
        k_descale=qkv.k_descale,
        v_descale=qkv.v_descale,
        v_mean=qkv.v_mean,
        k_mean=None,
        channel_factors=None,
        lse_shift=None,
    )


def launch(
    tile: TileConfig,
    packed: PackedTensors,
    out: Tensor,
    lse: Tensor,
    sm_scale: float,
    recipe: ha.Recipe,
    causal: bool = False,
) -> None:
    """The kernel on [B, H, M, D], as many keys as queries."""
    M, D = out.shape[2:]
    arguments = AttentionArgs(
        packed=packed,
        m_len=M,
        n_len=M,
        d=D,
        d_v=D,
        scores=ScoreOptions(causal=causal, sm_scale=sm_scale).resolved(D),
        bshd=False,
        out_dtype=out.dtype,
        recipe=recipe.resolved,
        num_splits=None,
    )
    attention.launch(Choice(tile), arguments, out, lse)


def prepare(variant: Variant, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Prepared:
    """`variant`'s kernel on what FAST makes of the inputs."""
    assert not causal
    tile = dataclasses.replace(shipped_tile(q.size(3)), **variant.tile)
    recipe = dataclasses.replace(ha.FAST, **variant.recipe)
    kernels = own_kernels()
    with torch.inference_mode():  # as inside an op: Helion does not take a tensor together with a view of it
        qkv = ha.quantize(q, k, v, recipe=ha.FAST)
        packed = repacked(qkv, tile, variant.interleaved)

    @torch.inference_mode()
    def run() -> Tensor:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        with in_place(variant, kernels):
            launch(tile, packed, out, lse, sm_scale, recipe)
        return out

    return Prepared(run, lambda out: out, lambda: ha.dequantize(qkv))


# --- the compiler ---------------------------------------------------------------------------------


def workload_of(D: int) -> Workload:
    """The cell of the grid in which variants run."""
    return grid_workload(4096, D)


def compile_variant(D: int, name: str) -> Sm90Kernel:
    """A variant, compiled into Triton's disk cache without touching a GPU."""
    variant, w = variants(D)[name], workload_of(D)
    tile = dataclasses.replace(shipped_tile(D), **variant.tile)
    recipe = dataclasses.replace(ha.FAST, **variant.recipe)

    def run() -> None:
        heads, e4m3 = w.B * w.H, torch.float8_e4m3fn
        packed = PackedTensors(
            q8=fake_cuda(heads, w.M // tile.bm, tile.bm, D, dtype=e4m3),
            k8=fake_cuda(heads, w.N // tile.bn, tile.bn, D, dtype=e4m3),
            v8=fake_cuda(heads, w.N // tile.bn, D, tile.bn, dtype=e4m3),
            q_descale=fake_cuda(w.B, w.H, w.M // tile.bm, tile.bm),
            k_descale=fake_cuda(w.B, w.H, 1),
            v_descale=fake_cuda(w.B, w.H, D),
            v_mean=fake_cuda(w.B, w.H, D),
            k_mean=None,
            channel_factors=None,
            lse_shift=None,
        )
        out = fake_cuda(w.B, w.H, w.M, D, dtype=torch.bfloat16)
        with in_place(variant, own_kernels()):
            launch(tile, packed, out, fake_cuda(w.B, w.H, w.M), D**-0.5, recipe)

    (kernel,) = compile_for_sm90(run)
    return kernel


def figures(D: int, name: str) -> Row:
    """What the compiler says of a variant."""
    kernel = compile_variant(D, name)
    return {
        "registers": kernel.registers,
        "spills": kernel.opcodes["LDL"] + kernel.opcodes["STL"],
        "shuffles": kernel.opcodes["SHFL"],
        "ctas_per_sm": kernel.ctas_per_sm,
    }


# --- the suite ------------------------------------------------------------------------------------


def run(options: Options, results: Results) -> None:
    """Every variant at every head dim, the compiler's figures first."""
    dims = [D for D in options.dims if D in TILES]
    compiled: dict[tuple[int, str], Row] = {}
    if options.workers:
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            jobs = {(D, name): pool.submit(figures, D, name) for D in dims for name in variants(D)}
            for (D, name), job in progress(jobs.items(), "compiling"):
                if (error := job.exception()) is None:
                    compiled[D, name] = job.result()
                else:  # it comes again below, as a row
                    console.print(f"[red]D {D}, {name}: {error!r}")
    for D in progress(dims, "ablation"):
        w = workload(1, 2, 256, 256, D) if options.device.type == "cpu" else workload_of(D)
        problem = make_problem(w, "randn", options, CHECKED_ROWS)
        contenders = [
            Contender(
                "helion_attn",
                functools.partial(prepare, variant),
                "fast",
                model=dataclasses.replace(ha.FAST, **variant.recipe),
            )
            for variant in variants(D).values()
        ]
        rows = measure(problem, contenders, options)
        for name, row in zip(variants(D), rows, strict=True):
            row |= {"variant": name} | compiled.get((D, name), {})
        results.add(*rows)


def tables(loaded: Loaded) -> list[Table]:
    """TFLOP/s of the kernel with one step undone, and what the compiler says of it."""
    rows = rows_of(loaded, "ablation")
    shipped = {row["D"]: row["ms"] for row in rows if row["variant"] == "shipped"}
    body = []
    for row in rows:
        base = shipped.get(row["D"])
        body.append(
            [
                str(row["D"]),
                row["variant"],
                number(row["tflops"], ".0f"),
                number(base / row["ms"] if base and row["ms"] else None, ".2f"),
                error_text(row["error_kernel"]),
                *(number(row.get(name), "d") for name in ("registers", "spills", "shuffles", "ctas_per_sm")),
            ]
        )
    headers = ["D", "kernel", "TFLOP/s", "/ shipped", "kernel error", "registers", "spills", "shuffles"]
    headers.append("programs an SM")
    return [Table("FAST with one thing changed, kernel, full attention", headers, body)] if body else []


SUITE = Suite("ablation", run, {"ablation": Block("ablation", tables)})
