"""One candidate: what the compiler says of it, and how long it takes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from devtools.sm90 import compile_for_sm90, fake_cuda
from devtools.tune.candidates import Tile, recipe_of, workloads
from devtools.workloads import Workload
from helion_attn.configs import LargeTileConfig, TileConfig
from helion_attn.options import ScoreOptions
from helion_attn.types import PackedTensors

#: Standard deviation of 8-bit Q and K. Real ones have about that: their largest magnitude is the format's.
SPREAD = 32.0

#: Instructions for spilled registers that a candidate may have. So few stand beside the loop, or cost it less than the
#: tiles without them.
MAX_SPILLS = 16


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a candidate; `error` if it does not compile."""

    registers: int = 0
    spills: int = 0
    ctas_per_sm: int = 0
    passes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def usable(self) -> bool:
        """Whether it is worth timing."""
        return self.error is None and self.spills <= MAX_SPILLS and self.ctas_per_sm > 0


def launch_parameters(tile: Tile) -> dict[str, Any]:
    """`tile` as a row of the table has it: without what comes from beside its config."""
    beside = ("max_query_blocks_per_sm", "measured_on", "passes")
    return {name: x for name, x in asdict(tile).items() if name not in beside}


def _packed(tile: Tile, w: Workload) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of q8, k8, v8; q_descale, k_descale, v_descale, v_mean; out and lse."""
    assert w.D_v is not None
    recipe, fp32 = recipe_of(tile), torch.float32
    v_tile = tile.v_tile if isinstance(tile, LargeTileConfig) else tile.D_pad
    d_v_pad = -(-w.D_v // v_tile) * v_tile
    m_blocks, n_blocks = -(-w.M // tile.bm), -(-w.N // tile.bn)
    v_block = (d_v_pad, tile.bn) if recipe.pv_dtype.itemsize == 1 else (tile.bn, d_v_pad)
    return [
        ((w.B * w.H, m_blocks, tile.bm, tile.D_pad), recipe.qk_dtype),
        ((w.B * w.H_kv, n_blocks, tile.bn, tile.D_pad), recipe.qk_dtype),
        ((w.B * w.H_kv, n_blocks, *v_block), recipe.pv_dtype),
        ((w.B, w.H, m_blocks, tile.bm), fp32),
        ((w.B, w.H_kv, n_blocks if recipe.k_scales == "block" else 1), fp32),
        ((w.B, w.H_kv, d_v_pad), fp32),
        ((w.B, w.H_kv, d_v_pad), fp32),
        ((w.B, w.H, w.M, w.D_v), torch.bfloat16),
        ((w.B, w.H, w.M), fp32),
    ]


def _launch(tile: Tile, w: Workload, tensors: list[torch.Tensor]) -> None:
    """The kernel alone."""
    from helion_attn.compiler.buffers import sm_count
    from helion_attn.kernels import attention, attention_large_d
    from helion_attn.ops.choose import head_group, shape_of
    from helion_attn.problem import AttentionArgs, Choice

    recipe = recipe_of(tile)
    # Scores of standard deviation about 1, as with N(0, 1) inputs. The spread belongs to the numbers, not to the
    # scale, also of e4m3: above `numerics.MAX_FUSED_SCALE_LOG2` the kernel takes a slower path, and e4m3 numbers of
    # standard deviation 1, which no quantiser makes, would put it there.
    spread = SPREAD if recipe.qk_dtype.itemsize == 1 else 1.0
    sm_scale = tile.D_pad**-0.5 / spread**2
    q8, k8, v8, q_descale, k_descale, v_descale, v_mean, out, lse = tensors
    arguments = AttentionArgs(
        packed=PackedTensors(q8, k8, v8, q_descale, k_descale, v_descale, v_mean, None, None, None),
        m_len=w.M,
        n_len=w.N,
        d=w.D,
        d_v=w.D_v or w.D,
        scores=ScoreOptions(causal=w.causal, sm_scale=sm_scale).resolved(w.D),
        bshd=False,
        out_dtype=out.dtype,
        recipe=recipe,
        num_splits=None,
    )
    choice = Choice(tile, head_group=head_group(shape_of(arguments), Choice(tile), sm_count(q8)))
    if isinstance(tile, TileConfig):
        attention.launch(choice, arguments, out, lse)
    else:
        attention_large_d.launch(tile, arguments, out, lse, choice.head_group)


def precompile(tile: Tile) -> Compiled:
    """Compile into Triton's disk cache, without touching a GPU."""
    from helion_attn.kernels import attention, attention_large_d

    w = workloads(tile)[-1]
    for module in (attention, attention_large_d):
        module.compiled_kernel.cache_clear()
    try:
        (kernel,) = compile_for_sm90(
            lambda: _launch(tile, w, [fake_cuda(*shape, dtype=dtype) for shape, dtype in _packed(tile, w)])
        )
    except Exception as error:
        return Compiled(error=f"{type(error).__name__}: {error}"[:200])
    spills = kernel.opcodes["LDL"] + kernel.opcodes["STL"]
    passes = tuple(x.name for x in kernel.passes if x.applied)
    return Compiled(kernel.registers, spills, kernel.ctas_per_sm, passes)


@torch.inference_mode()  # as inside an op: Helion does not take a tensor together with the view of it
def measure(tile: Tile, w: Workload) -> float:
    """Median milliseconds on random packed tensors."""
    from triton.testing import do_bench

    torch.manual_seed(0)
    tensors = []
    for i, (shape, dtype) in enumerate(_packed(tile, w)):
        # Q, K and V; descales of 1, a mean of 0.
        x = torch.randn(shape, device="cuda") if i < 3 else torch.full(shape, float(i < 6), device="cuda")
        tensors.append((x * SPREAD if i < 2 and dtype.itemsize == 1 else x).to(dtype))
    return float(do_bench(lambda: _launch(tile, w, tensors), warmup=50, rep=300, return_mode="median"))


def tflops(w: Workload, ms: float) -> float:
    """Speed of a launch that took `ms`."""
    assert w.D_v is not None
    return 2 * w.M * w.N * (w.D + w.D_v) * w.H * w.B / (2 if w.causal else 1) / ms / 1e9


def as_compiled(tile: Tile, compiled: Compiled) -> Tile:
    """`tile`, with how many of its programs fit an SM, and its passes."""
    return replace(tile, ctas_per_sm=compiled.ctas_per_sm, passes=compiled.passes)
