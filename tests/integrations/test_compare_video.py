"""compare-video: a tiny random pipeline of diffusers, saved and rendered by each preset; metrics of known clips.

Without the extra `video`, stand-ins for its packages show what the command asks of each, and what it makes of that.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from helion_attn.__main__ import main
from helion_attn.integrations import compare_video
from helion_attn.support import Support

np = pytest.importorskip("numpy")
needs_metrics = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, compare_video.NEEDED)), reason="the extra video is not installed"
)


class Attention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class Pipeline:
    """A pipeline whose frames are the attention of noise, by a model that it has under some name.

    Attributes:
        loaded: what it was asked for by, and how.
        placed: where it was moved to.
        calls: what each call was given besides its generator, with the seed of that.
    """

    def __init__(self, model: str = "transformer", gives: str = "frames") -> None:
        self.loaded: list[tuple[str, dict[str, Any]]] = []
        self.placed: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self._model, self._gives = Attention(), gives
        setattr(self, model, self._model)

    def from_pretrained(self, name: str, **options: Any) -> Pipeline:
        self.loaded.append((name, options))
        return self

    def to(self, device: str) -> None:
        self.placed.append(device)

    def enable_model_cpu_offload(self) -> None:
        self.placed.append("offloaded")

    def __call__(self, *, generator: torch.Generator, **given: Any) -> SimpleNamespace:
        self.calls.append({"seed": generator.initial_seed(), **given})
        frames, height, width = (given.get(name, size) for name, size in SIZES.items())
        noise = torch.randn(1, 2, frames * height * width * 3 // 64, 32, generator=generator)
        seen = self._model(noise.bfloat16().to(DEVICE)).float().cpu()
        clip = torch.sigmoid(4 * seen).numpy().reshape(frames, height, width, 3)
        return SimpleNamespace(**{self._gives: clip[None] if self._gives == "frames" else clip})


#: Of a clip that is asked for without sizes.
SIZES = {"num_frames": 2, "height": 8, "width": 8}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Writer:
    """imageio's: the options and the frames of a clip."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.frames: list[Any] = []
        self.closed = False

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def append_data(self, frame: Any) -> None:
        self.frames.append(frame)


def squared_error(a: Any, b: Any) -> Any:
    return ((a - b) ** 2).mean()


def similarity(a: Any, b: Any, *, channel_axis: int, data_range: float) -> Any:
    """SSIM of a window that is the frame."""
    assert a.shape[channel_axis] == 3
    axes = tuple(i for i in range(a.ndim) if i != channel_axis)
    small, smaller = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    mean_a, mean_b = a.mean(axes), b.mean(axes)
    together = ((a - mean_a) * (b - mean_b)).mean(axes)
    means = (2 * mean_a * mean_b + small) / (mean_a**2 + mean_b**2 + small)
    return (means * (2 * together + smaller) / (a.var(axes) + b.var(axes) + smaller)).mean()


def module(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    """Let a module of this name be found and imported."""
    made: Any = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(contents)
    monkeypatch.setitem(sys.modules, name, made)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Writer]:
    """Clips by path. What else measures and writes them is a stand-in, and lpips is not installed."""
    pytest.importorskip("matplotlib")
    clips: dict[Path, Writer] = {}
    metrics = SimpleNamespace(mean_squared_error=squared_error, structural_similarity=similarity)
    module(monkeypatch, "skimage", metrics=metrics)
    module(monkeypatch, "skimage.metrics", **vars(metrics))
    module(monkeypatch, "imageio", get_writer=lambda path, **options: clips.setdefault(path, Writer(options)))
    monkeypatch.setitem(sys.modules, "lpips", None)
    monkeypatch.setattr(compare_video, "NEEDED", {})
    return clips


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: dict[Path, Writer]
) -> Callable[..., list[dict[str, str]]]:
    """Run `compare-video` with a pipeline, in an empty folder; return the lines of its table."""

    def run(pipeline: Pipeline, *arguments: str, out: str = "compare_video") -> list[dict[str, str]]:
        monkeypatch.chdir(tmp_path)
        module(monkeypatch, "diffusers", DiffusionPipeline=pipeline)
        assert main(["compare-video", "--model", "some/model", "--prompt", "a fox", *arguments]) == 0
        with (tmp_path / out / "metrics.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wan, of two layers with random weights, as `DiffusionPipeline.from_pretrained` finds it."""
    diffusers = pytest.importorskip("diffusers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    words = {"<pad>": 0, "<unk>": 1, "</s>": 2, "a": 3, "fox": 4}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokens = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")
    pipeline = diffusers.WanPipeline(
        tokenizer=tokens,
        text_encoder=UMT5EncoderModel(
            UMT5Config(vocab_size=8, d_model=24, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, in_channels=16, out_channels=16, text_dim=24, freq_dim=16,
            ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        ),
        scheduler=diffusers.UniPCMultistepScheduler(),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("pipeline")
    pipeline.save_pretrained(path)
    return path


@pytest.mark.thorough
@needs_metrics
def test_a_tiny_pipeline(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--steps", "1", "--frames", "5", "--height", "32", "--width", "48"]
    out = tmp_path / "out"
    command = ["compare-video", "--model", str(folder), "--prompt", "a fox", "--preset", "balanced,auto"]
    assert main([*command, *sizes, "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"bf16_balanced_auto.mp4", "metrics.csv", "metrics.png"}
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["preset"], int(row["frame"])) for row in rows] == [
        (x, i) for x in ("balanced", "auto") for i in range(5)
    ]
    # The weights are random, so a clip is noise that every rounding moves.
    balanced = [float(row["SSIM"]) for row in rows if row["preset"] == "balanced"]
    assert all(0.3 < ssim < 1 for ssim in balanced), balanced
    # Calls as short as these are PyTorch's, so that "auto" is the reference.
    assert [(row["SSIM"], row["PSNR"]) for row in rows[5:]] == [("1.0", "inf")] * 5
    printed = capsys.readouterr().out
    assert "auto is bf16's clip, bit for bit" in printed
    assert "balanced is" not in printed
    heads = next(line for line in printed.splitlines() if line.split()[:1] == ["frame"])
    assert heads.split()[:5] == ["frame", "balanced", "SSIM", "balanced", "PSNR"]

    import imageio

    shapes = {frame.shape for frame in imageio.get_reader(out / "bf16_balanced_auto.mp4")}
    assert shapes == {(32, 3 * 48, 3)}


@needs_metrics
def test_metrics_of_known_clips() -> None:
    generator = np.random.default_rng(0)
    clip = generator.random((3, 16, 16, 3)).astype(np.float32)
    other = clip.copy()
    other[1] = np.clip(other[1] + 0.1, 0, None)
    other[2] = generator.random((16, 16, 3))
    found = compare_video.metrics_of(clip, other)
    assert found["SSIM"][0] == 1
    assert found["SSIM"][1] > 0.9 > 0.2 > found["SSIM"][2]
    assert found["PSNR"][0] == math.inf
    assert found["PSNR"][1] == pytest.approx(20, abs=1e-3)  # 10 log10(1 / 0.1 ** 2)
    assert found["PSNR"][2] < 10
    lines = compare_video.table_of({"fast": found}).splitlines()
    assert lines[-1].split()[:3] == ["worst", f"{found['SSIM'][2]:.4f}", f"{found['PSNR'][2]:.4f}"]
    assert len(lines) == 1 + 3 + 2


def test_attention_is_that_of_the_models_alone() -> None:
    """And they are as before, also after an error and where an instance had a forward of its own."""

    plain, offloaded, other = Attention(), Attention(), Attention()
    own: Callable[..., Any] = lambda x: Attention.forward(offloaded, x)  # noqa: E731
    offloaded.forward = own  # type: ignore[method-assign]
    x = torch.randn(1, 2, 40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = other(x)
    with contextlib.suppress(KeyError), compare_video.attention_by("balanced", [plain, offloaded]):
        outs = [attend(x) for attend in (plain, offloaded, other)]
        raise KeyError
    assert [torch.equal(out, exact) for out in outs] == [False, False, True]
    assert torch.equal(plain(x), exact)
    assert "forward" not in vars(plain)
    assert offloaded.forward is own


def test_what_is_asked_for_is_rendered_and_written(
    command: Callable[..., Any], written: dict[Path, Writer], capsys: pytest.CaptureFixture[str]
) -> None:
    """One seed, in bf16 and by each preset; clips side by side in that order, and metrics of each against the first."""
    pipeline = Pipeline()
    sizes = ["--steps", "3", "--frames", "4", "--height", "8", "--width", "16"]
    rows = command(
        pipeline, *sizes, "--preset", "balanced,auto", "--seed", "5", "--fps", "7", "--out", "a/b", out="a/b"
    )
    assert pipeline.loaded == [("some/model", {"dtype": torch.bfloat16})]
    asked = {"num_inference_steps": 3, "num_frames": 4, "height": 8, "width": 16}
    assert pipeline.calls == [{"seed": 5, "prompt": "a fox", "output_type": "np", **asked}] * 3

    ((path, video),) = written.items()
    assert path == Path("a/b/bf16_balanced_auto.mp4")
    assert video.options["fps"] == 7
    assert video.closed
    frames = np.stack(video.frames)
    assert (frames.shape, frames.dtype) == ((4, 8, 3 * 16, 3), np.uint8)
    clips = dict(zip(("bf16", "balanced", "auto"), np.split(frames, 3, axis=2), strict=True))
    again = pipeline(generator=torch.Generator().manual_seed(5), **asked).frames[0]
    assert (clips["bf16"] == (again * 255).round()).all()
    # Calls as short as these are PyTorch's by "auto".
    assert (clips["auto"] == clips["bf16"]).all()
    assert (clips["balanced"] != clips["bf16"]).any()

    assert [(row["preset"], row["frame"]) for row in rows] == [
        (x, str(i)) for x in ("balanced", "auto") for i in range(4)
    ]
    assert [*rows[0]] == ["preset", "frame", "SSIM", "PSNR"]
    for i, row in enumerate(rows[:4]):
        # Of frames that were rounded to bytes.
        error = squared_error(clips["bf16"][i] / 255, clips["balanced"][i] / 255)
        assert float(row["PSNR"]) == pytest.approx(-10 * math.log10(error), abs=1.5)
        assert 0.9 < float(row["SSIM"]) < 1
    assert [(float(row["SSIM"]), float(row["PSNR"])) for row in rows[4:]] == [(pytest.approx(1), math.inf)] * 4
    assert Path("a/b/metrics.png").read_bytes()[:4] == b"\x89PNG"

    *table, same, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["frame", "0", "1", "2", "3", "mean", "worst"]
    assert table[0].split()[1:] == ["balanced", "SSIM", "balanced", "PSNR", "auto", "SSIM", "auto", "PSNR"]
    assert table[1].split()[2] == f"{float(rows[0]['PSNR']):.4f}"
    assert same == "auto is bf16's clip, bit for bit: none of the model's attention ran in 8 bits"
    assert last == f"written to {Path('a/b')}"


def test_what_is_not_asked_for_is_the_pipelines_own(
    command: Callable[..., Any], written: dict[Path, Writer], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes and steps; the presets, the seed, the rate and the folder are the command's."""
    pipeline = Pipeline()
    rows = command(pipeline)
    assert pipeline.calls == [{"seed": 0, "prompt": "a fox", "output_type": "np"}] * 3
    assert {row["preset"] for row in rows} == {"balanced", "fast"}
    assert {path: video.options["fps"] for path, video in written.items()} == {
        Path("compare_video/bf16_balanced_fast.mp4"): 16
    }
    assert "bit for bit" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["compare-video", "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for said in ("with commas; by default balanced,fast", "a folder, by default compare_video"):
        assert said in text


@pytest.mark.parametrize(("options", "placed"), [((), DEVICE), (("--offload",), "offloaded")], ids=["whole", "offload"])
def test_a_pipeline_is_moved_or_offloaded_once(
    options: tuple[str, ...], placed: str, command: Callable[..., Any]
) -> None:
    pipeline = Pipeline()
    command(pipeline, "--preset", "fast", *options)
    assert pipeline.placed == [placed]


@pytest.mark.parametrize("name", [*compare_video.MODELS, "text_encoder"])
def test_models_that_denoise_run_by_the_preset(
    name: str, command: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """And no others, which is said of a clip that has no 8 bits."""
    rows = command(Pipeline(name), "--preset", "balanced")
    same = {math.isinf(float(row["PSNR"])) for row in rows}
    assert same == {name == "text_encoder"}
    assert ("balanced is bf16's clip, bit for bit" in capsys.readouterr().out) == (name == "text_encoder")


def test_an_image_is_a_clip_of_a_frame(command: Callable[..., Any], written: dict[Path, Writer]) -> None:
    """The first of those that a pipeline gives."""
    rows = command(Pipeline("unet", gives="images"), "--preset", "fast")
    assert [row["frame"] for row in rows] == ["0"]
    (video,) = written.values()
    assert [frame.shape for frame in video.frames] == [(8, 2 * 8, 3)]


def test_nothing_is_written_of_a_rendering_that_fails(
    command: Callable[..., Any], written: dict[Path, Writer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And the model is as it was."""
    pipeline = Pipeline()
    attend, ran = Attention.forward, []

    def forward(self: Attention, x: torch.Tensor) -> torch.Tensor:
        ran.append(x.shape)
        if len(ran) == 2:
            raise RuntimeError("out of memory")
        return attend(self, x)

    monkeypatch.setattr(Attention, "forward", forward)
    with pytest.raises(RuntimeError, match="out of memory"):
        command(pipeline, "--preset", "fast,balanced")
    assert len(pipeline.calls) == 2
    assert "forward" not in vars(pipeline._model)
    assert not written
    assert list(tmp_path.iterdir()) == []


def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In place of LPIPS: of images [1, 3, height, width], -1 to 1."""
    assert a.shape == (1, 3, 4, 6)
    assert a.min() == -1
    assert not torch.is_grad_enabled()
    return (a - b).abs().mean()


@pytest.mark.usefixtures("written")
def test_lpips_is_measured_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = np.zeros((2, 4, 6, 3), np.float32)
    other = clip + np.float32(0.25) * np.arange(2, dtype=np.float32)[:, None, None, None]
    assert [*compare_video.metrics_of(clip, other)] == ["SSIM", "PSNR"]
    nets: list[dict[str, Any]] = []
    module(monkeypatch, "lpips", LPIPS=lambda **options: nets.append(options) or distance)  # type: ignore[func-returns-value]
    found = compare_video.metrics_of(clip, other)
    assert found["LPIPS"] == [0, 0.5]
    assert found["PSNR"] == [math.inf, pytest.approx(-10 * math.log10(0.25**2))]
    assert [options["net"] for options in nets] == ["alex"]


#: Of three frames; the second is the worst by each, and without a difference PSNR has no number.
MEASURED = {
    "fast": {"SSIM": [1.0, 0.25, 0.5], "PSNR": [math.inf, 5.0, 30.0], "LPIPS": [0.0, 0.75, 0.125]},
    "accurate": {"SSIM": [0.75, 0.5, 1.0], "PSNR": [20.0, 10.0, 60.0], "LPIPS": [0.25, 0.5, 0.0]},
}


def test_tables_have_means_and_worst_frames() -> None:
    """The worst is the least SSIM and PSNR, and the most LPIPS. Columns end below each other."""
    lines = compare_video.table_of(MEASURED).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "1.0000", "inf", "0.0000", "0.7500", "20.0000", "0.2500"],
        ["1", "0.2500", "5.0000", "0.7500", "0.5000", "10.0000", "0.5000"],
        ["2", "0.5000", "30.0000", "0.1250", "1.0000", "60.0000", "0.0000"],
        ["mean", "0.5833", "inf", "0.2917", "0.7500", "30.0000", "0.2500"],
        ["worst", "0.2500", "5.0000", "0.7500", "0.5000", "10.0000", "0.5000"],
    ]
    for name in ("fast SSIM", "fast PSNR", "fast LPIPS", "accurate SSIM", "accurate PSNR"):
        end = lines[0].index(name) + len(name)
        assert {line[end : end + 1] for line in lines} == {" "}, name
        assert " " not in {line[end - 1] for line in lines}, name
    assert len({*map(len, lines)}) == 1


def test_tables_are_read_back_as_they_were(tmp_path: Path) -> None:
    compare_video.write_table(tmp_path / "metrics.csv", MEASURED)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["preset", "frame", "SSIM", "PSNR", "LPIPS"]
    assert [(preset, int(frame), *map(float, values)) for preset, frame, *values in rows] == [
        (preset, i, *frame) for preset, by in MEASURED.items() for i, frame in enumerate(zip(*by.values(), strict=True))
    ]


def test_plots_have_a_line_a_preset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Below each other for each metric; a frame without a difference is a gap."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    saved: list[Any] = []
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, path: saved.append(self) or save(self, path))  # type: ignore[func-returns-value]
    compare_video.write_plot(tmp_path / "metrics.png", MEASURED)
    assert (tmp_path / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    axes = saved[0].axes
    assert [axis.get_ylabel() for axis in axes] == ["SSIM", "PSNR", "LPIPS"]
    for axis in axes:
        drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
        assert drawn == {preset: by[axis.get_ylabel()] for preset, by in MEASURED.items()}
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["fast", "accurate"]
    assert axes[-1].get_xlabel() == "frame"


def test_clips_are_bytes_side_by_side(written: dict[Path, Writer]) -> None:
    """From the left as they are given, 0 to 255 and rounded."""
    shades = (0.0, 0.5, 1.0)
    clips = [np.full((2, 4, 6, 3), shade, np.float32) for shade in shades]
    clips[2][1] = 0.999
    compare_video.write_clips(Path("clip.mp4"), clips, fps=24)
    video = written[Path("clip.mp4")]
    assert video.options["fps"] == 24
    assert video.closed
    first, second = video.frames
    assert first.shape == second.shape == (4, 18, 3)
    assert first.dtype == np.uint8
    assert [{*np.unique(part)} for part in np.split(first, 3, axis=1)] == [{0}, {128}, {255}]
    assert (first == second).all()


def test_presets_are_read_in_any_case() -> None:
    assert compare_video.presets_of(" Fast,BALANCED , auto") == ["fast", "balanced", "auto"]


@pytest.mark.parametrize(
    ("given", "message"), [("balanced,best", "recipe is 'best'"), ("fast,bf16", "bf16 is what presets")]
)
def test_presets_are_checked_first(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["compare-video", "--model", "nowhere", "--prompt", "a fox", "--preset", given])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("written")
def test_a_device_without_the_kernels_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a pipeline is loaded."""
    pipeline = Pipeline()
    module(monkeypatch, "diffusers", DiffusionPipeline=pipeline)
    monkeypatch.setattr(compare_video, "is_supported", lambda: Support(False, "compute capability 7.0"))
    with pytest.raises(SystemExit) as left:
        main(["compare-video", "--model", "nowhere", "--prompt", "a fox"])
    assert left.value.code == 2
    assert "compare-video: error: compute capability 7.0" in capsys.readouterr().err
    assert not pipeline.loaded


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(compare_video.NEEDED, "no_such_module", "no-such-package")
    with pytest.raises(SystemExit) as left:
        main(["compare-video", "--model", "nowhere", "--prompt", "a fox"])
    assert left.value.code == 2
    assert "no-such-package not found; pip install 'helion_attn[video]'" in capsys.readouterr().err
