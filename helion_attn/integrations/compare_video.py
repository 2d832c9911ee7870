"""`python -m helion_attn compare-video`: one seed in bf16 and by each preset, as clips, metrics by frame, and a plot.

It takes the extra `video`: diffusers renders, scikit-image measures, imageio and matplotlib write.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from helion_attn.integrations.sdpa import sdpa
from helion_attn.support import is_supported
from helion_attn.types import as_choice

if TYPE_CHECKING:
    import numpy as np

    #: [frames, height, width, 3], 0 to 1.
    Clip: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
    #: By metric, of each frame.
    Metrics: TypeAlias = Mapping[str, list[float]]

#: What `compare-video --help` prints.
DESCRIPTION = (
    "Render one seed with a pipeline of diffusers, in bf16 and with its attention by each preset. Write the clips side "
    "by side, a table of SSIM, PSNR and, where lpips is installed, LPIPS of each frame against bf16's, and a plot. It "
    "needs pip install 'helion_attn[video]'."
)

#: Names that pipelines have for models that denoise.
MODELS = ("transformer", "transformer_2", "unet")

#: Packages that it imports, by the name that pip has.
NEEDED = {
    "diffusers": "diffusers",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "skimage": "scikit-image",
    "matplotlib": "matplotlib",
    "imageio_ffmpeg": "imageio[ffmpeg]",
}


def presets_of(text: str) -> list[str]:
    """Return the names of presets in a list with commas, checked, each once."""
    names = [name for name in dict.fromkeys(name.strip().lower() for name in text.split(",")) if name]
    for name in names:
        if name == "bf16":
            raise argparse.ArgumentTypeError("bf16 is what presets are compared with: leave it out")
        try:
            as_choice(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `compare-video`."""
    command.add_argument("--model", required=True, help="a pipeline of diffusers: a name on the Hub, or a folder")
    command.add_argument("--prompt", required=True, help="what it shows")
    command.add_argument(
        "--preset",
        type=presets_of,
        default="balanced,fast",
        metavar="NAMES",
        help="with commas; by default %(default)s",
    )
    command.add_argument("--seed", type=int, default=0, help="of the noise")
    for name in ("steps", "frames", "height", "width"):
        command.add_argument(f"--{name}", type=int, help="the pipeline's own by default")
    command.add_argument("--fps", type=int, default=16, help="of the clips")
    command.add_argument("--offload", action="store_true", help="keep models that do not run in the host's memory")
    command.add_argument("--out", type=Path, default=Path("compare_video"), help="a folder, by default %(default)s")


def compare(command: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Render, measure and write what the arguments of `add_arguments` say; return 0."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        command.error(f"{', '.join(missing)} not found; pip install 'helion_attn[video]'")
    supported = is_supported()
    if not supported:
        command.error(supported.reason)
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(given.model, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.offload:
        pipeline.enable_model_cpu_offload()
    else:
        pipeline.to(device)
    sizes = {
        "num_inference_steps": given.steps, "num_frames": given.frames, "height": given.height, "width": given.width
    }  # fmt: skip
    options = {name: size for name, size in sizes.items() if size is not None}

    def rendered() -> Clip:
        generator = torch.Generator().manual_seed(given.seed)
        return clip_of(pipeline(prompt=given.prompt, generator=generator, output_type="np", **options))

    clips = {"bf16": rendered()}
    for preset in given.preset:
        with attention_by(preset, [x for name in MODELS if (x := getattr(pipeline, name, None)) is not None]):
            clips[preset] = rendered()
    measured = {preset: metrics_of(clips["bf16"], clips[preset]) for preset in given.preset}
    given.out.mkdir(parents=True, exist_ok=True)
    write_clips(given.out / f"{'_'.join(clips)}.mp4", list(clips.values()), given.fps)
    write_table(given.out / "metrics.csv", measured)
    write_plot(given.out / "metrics.png", measured)
    print(table_of(measured))
    for preset in given.preset:
        if (clips[preset] == clips["bf16"]).all():
            print(f"{preset} is bf16's clip, bit for bit: none of the model's attention ran in 8 bits")
    print(f"written to {given.out}")
    return 0


@contextmanager
def attention_by(preset: Any, models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let the attention of models run by a preset, and leave text encoders and autoencoders alone.

    What cannot run so is PyTorch's, with a warning.
    """
    own = [vars(model).get("forward") for model in models]
    for model in models:
        model.forward = sdpa(recipe=preset, fallback="warn")(model.forward)
    try:
        yield
    finally:
        for model, forward in zip(models, own, strict=True):
            del model.forward
            if forward is not None:  # of a model that is offloaded
                model.forward = forward


def clip_of(result: Any) -> Clip:
    """Return what a pipeline gave; an image is a clip of one frame."""
    clip: Clip = result.frames[0] if hasattr(result, "frames") else result.images[:1]
    return clip


def metrics_of(reference: Clip, clip: Clip) -> dict[str, list[float]]:
    """Return the metrics of a clip's frames against another's."""
    from skimage.metrics import mean_squared_error, structural_similarity

    pairs = list(zip(reference, clip, strict=True))
    errors = [torch.tensor(float(mean_squared_error(a, b)), dtype=torch.float64) for a, b in pairs]
    found = {
        "SSIM": [float(structural_similarity(a, b, channel_axis=2, data_range=1.0)) for a, b in pairs],
        "PSNR": [float(-10 * error.log10()) for error in errors],  # inf of equal frames
    }
    if importlib.util.find_spec("lpips") is not None:
        import lpips

        distance = lpips.LPIPS(net="alex", verbose=False)
        with torch.no_grad():
            found["LPIPS"] = [
                float(distance(*(torch.tensor(x).permute(2, 0, 1)[None] * 2 - 1 for x in pair))) for pair in pairs
            ]
    return found


#: Which frame is the worst by a metric.
WORST: dict[str, Callable[[list[float]], float]] = {"SSIM": min, "PSNR": min, "LPIPS": max}


def table_of(measured: Mapping[str, Metrics]) -> str:
    """Return a table with a line a frame, then means and worst frames, and a column a preset and metric."""
    columns = {
        f"{preset} {metric}": (metric, values) for preset, by in measured.items() for metric, values in by.items()
    }
    count = len(next(iter(columns.values()))[1])
    rows = [["frame", *columns]]
    rows += [[str(i), *(f"{values[i]:.4f}" for _, values in columns.values())] for i in range(count)]
    rows.append(["mean", *(f"{statistics.fmean(values):.4f}" for _, values in columns.values())])
    rows.append(["worst", *(f"{WORST[metric](values):.4f}" for metric, values in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def write_table(path: Path, measured: Mapping[str, Metrics]) -> None:
    """Write a line for each preset and frame."""
    metrics = list(next(iter(measured.values())))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["preset", "frame", *metrics])
        for preset, by in measured.items():
            writer.writerows([preset, i, *values] for i, values in enumerate(zip(*by.values(), strict=True)))


def write_plot(path: Path, measured: Mapping[str, Metrics]) -> None:
    """Draw each metric over the frames, a line a preset."""
    from matplotlib.figure import Figure

    metrics = list(next(iter(measured.values())))
    figure = Figure(figsize=(8, 2.4 * len(metrics)), layout="constrained")
    axes = figure.subplots(len(metrics), sharex=True, squeeze=False)[:, 0]
    for axis, metric in zip(axes, metrics, strict=True):
        for preset, by in measured.items():
            axis.plot(by[metric], label=preset)
        axis.set_ylabel(metric)
    axes[0].legend()
    axes[-1].set_xlabel("frame")
    figure.savefig(path)


def write_clips(path: Path, clips: Sequence[Clip], fps: int) -> None:
    """Write clips side by side."""
    import imageio
    import numpy as np

    frames = (np.concatenate(clips, axis=2) * 255).round().astype(np.uint8)
    with imageio.get_writer(path, fps=fps, quality=9, macro_block_size=2) as writer:
        for frame in frames:
            writer.append_data(frame)
