"""compare-video: a tiny random pipeline of diffusers, saved and rendered by each preset; metrics of known clips."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helion_attn.__main__ import main
from helion_attn.integrations import compare_video

np = pytest.importorskip("numpy")
needs_metrics = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, compare_video.NEEDED)), reason="the extra video is not installed"
)


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

    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

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


def test_presets_are_checked_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare-video", "--model", "nowhere", "--prompt", "a fox", "--preset", "balanced,best"])
    assert "recipe is 'best'" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(compare_video.NEEDED, "no_such_module", "no-such-package")
    with pytest.raises(SystemExit):
        main(["compare-video", "--model", "nowhere", "--prompt", "a fox"])
    assert "no-such-package not found; pip install 'helion_attn[video]'" in capsys.readouterr().err
