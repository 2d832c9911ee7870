"""Suite `diffusion`: transformers of diffusion pipelines, one layer of each at its real shapes, by attention backend.

    python benchmarks/attention.py --suite diffusion

diffusers' own modules with random weights in bf16, batch 1: Flux.1 at 1024 x 1024, Qwen-Image at 1328 x 1328, Wan 2.1
14B at 832 x 480 and 81 frames, HunyuanVideo at 960 x 544 and 129 frames with a padding mask over its text. A layer is a
double and a single stream block where there are both. A time is that of the module's forward, so of norms, projections
and MLPs as well, and what an attention backend can gain is what attention takes of it. An error is that of the output
beside the native backend's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import helion_attn as ha
from benchmarks.lib.harness import Loaded, Results, Row, time_interleaved
from benchmarks.lib.suite import Block, Options, Suite, console, progress
from benchmarks.lib.tables import Table, error_text, number, ratio, rows_of
from helion_attn.testing import relative_error

NATIVE, OURS = "native", "helion_fp8"

#: diffusers' names; those whose packages are not installed are skipped.
BACKENDS = (NATIVE, "_native_cudnn", "_flash_3", "sage", OURS)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a pipeline asks of its transformer.

    Attributes:
        model: what it is called.
        image: tokens of the image or the frames, as the module's input has them: (tokens,) or (frames, height, width)
            of latents.
        text: tokens of the text.
        heads: of attention.
        D: head dim.
    """

    model: str
    image: tuple[int, ...]
    text: int
    heads: int
    D: int = 128


FLUX = Shape("Flux.1, 1024 x 1024", (64, 64), 512, 24)
QWEN = Shape("Qwen-Image, 1328 x 1328", (83, 83), 512, 24)
WAN = Shape("Wan 2.1 14B, 832 x 480, 81 frames", (21, 60, 104), 512, 40)
HUNYUAN = Shape("HunyuanVideo, 960 x 544, 129 frames", (33, 68, 120), 256, 24)


def smaller(shape: Shape) -> Shape:
    """One that the interpreter ends in seconds."""
    return dataclasses.replace(shape, image=(2, 4, 4)[-len(shape.image) :], text=4, heads=1)


def flux(s: Shape) -> tuple[Any, dict[str, Any]]:
    """The module and its inputs."""
    import diffusers

    module = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, guidance_embeds=True, num_attention_heads=s.heads
    )
    rows, columns = s.image
    ids = torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns)))
    return module, {
        "hidden_states": torch.randn(1, rows * columns, 64),
        "encoder_hidden_states": torch.randn(1, s.text, 4096),
        "pooled_projections": torch.randn(1, 768),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(s.text, 3),
    }


def qwen(s: Shape) -> tuple[Any, dict[str, Any]]:
    """The module and its inputs."""
    import diffusers

    module = diffusers.QwenImageTransformer2DModel(num_layers=1, num_attention_heads=s.heads)
    rows, columns = s.image
    return module, {
        "hidden_states": torch.randn(1, rows * columns, 64),
        "encoder_hidden_states": torch.randn(1, s.text, 3584),
        "encoder_hidden_states_mask": torch.ones(1, s.text, dtype=torch.long),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, rows, columns)]],
    }


def wan(s: Shape) -> tuple[Any, dict[str, Any]]:
    """The module and its inputs."""
    import diffusers

    module = diffusers.WanTransformer3DModel(num_layers=1, num_attention_heads=s.heads)
    return module, {
        "hidden_states": torch.randn(1, 16, *s.image),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, s.text, 4096),
    }


def hunyuan(s: Shape) -> tuple[Any, dict[str, Any]]:
    """The module and its inputs."""
    import diffusers

    module = diffusers.HunyuanVideoTransformer3DModel(
        num_layers=1, num_single_layers=1, num_refiner_layers=1, num_attention_heads=s.heads
    )
    return module, {
        "hidden_states": torch.randn(1, 16, *s.image),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, s.text, 4096),
        "encoder_attention_mask": (torch.arange(s.text) < s.text // 2).long()[None],
        "pooled_projections": torch.randn(1, 768),
        "guidance": torch.tensor([6000.0]),
    }


MODELS: tuple[tuple[Shape, Callable[[Shape], tuple[Any, dict[str, Any]]]], ...] = (
    (FLUX, flux),
    (QWEN, qwen),
    (WAN, wan),
    (HUNYUAN, hunyuan),
)


def tokens(s: Shape) -> int:
    """That attention sees: of latents, 2 x 2 are one."""
    *frames, rows, columns = s.image
    return frames[0] * rows * columns // 4 if frames else rows * columns + s.text


def measure_model(
    s: Shape, build: Callable[[Shape], tuple[Any, dict[str, Any]]], device: torch.device, repeats: int
) -> list[Row]:
    """A row for each backend."""
    torch.manual_seed(0)
    with device:
        module, inputs = build(s)
    module = module.eval().bfloat16()

    def moved(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, torch.bfloat16 if x.is_floating_point() else x.dtype)

    inputs = {name: moved(x) for name, x in inputs.items()}

    @torch.no_grad()
    def forward(backend: str) -> torch.Tensor:
        module.set_attention_backend(backend)
        out: torch.Tensor = module(**inputs, return_dict=False)[0]
        return out

    rows: list[Row] = []
    runs: dict[str, Callable[[], object]] = {}
    base = forward(NATIVE)
    for backend in BACKENDS:
        try:
            out = forward(backend)
        except (ImportError, RuntimeError, ValueError) as refusal:
            console.print(f"[yellow]skipped {backend}, {s.model}: {str(refusal).splitlines()[0][:120]}")
            continue
        runs[backend] = partial(forward, backend)
        recipe = "balanced" if backend == OURS else None
        row: Row = {"impl": backend, "recipe": recipe, "stage": "e2e", "model": s.model, "N": tokens(s)}
        row |= {"H": s.heads, "D": s.D, "error_total": relative_error(out, base.double())}
        rows.append(row)
    times = time_interleaved(runs, device, repeats)
    return [row | {"ms": times[row["impl"]]} for row in rows]


def run(options: Options, results: Results) -> None:
    """The suite; nothing where diffusers is not installed."""
    try:
        ha.register_diffusers()
    except ImportError as missing:
        console.print(f"[yellow]skipped diffusion: {missing}")
        return
    on_cpu = options.device.type == "cpu"
    for shape, build in progress(MODELS, "diffusion"):
        given = smaller(shape) if on_cpu else shape
        results.add(*measure_model(given, build, options.device, options.repeats))
        if not on_cpu:
            torch.cuda.empty_cache()


def tables(loaded: Loaded) -> list[Table]:
    """Times by model and backend."""
    rows = rows_of(loaded, "diffusion")
    body = []
    for row in rows:
        native = next((r["ms"] for r in rows if (r["model"], r["impl"]) == (row["model"], NATIVE)), None)
        body.append(
            [
                row["model"],
                f"{row['N']} x {row['H']}",
                row["impl"],
                number(row["ms"], ".2f"),
                number(ratio(native, row["ms"]), ".2f"),
                "-" if row["impl"] == NATIVE else error_text(row["error_total"]),
            ]
        )
    headers = ["one layer of", "tokens x heads", "backend", "ms", "speed / native's", "output beside native's"]
    return [Table("diffusers, bf16, random weights", headers, body)] if body else []


SUITE = Suite("diffusion", run, {"diffusion": Block("diffusion", tables)})
