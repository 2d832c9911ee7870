"""`ha.debug(save=...)` writes the first bad call, and `python -m helion_attn replay` makes it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import __main__ as command
from helion_attn import plans, report
from helion_attn.api import dense_problem

pytestmark = pytest.mark.once


def dense(device: str) -> object:
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 4, 2, 50, 60, 32, device=device))
    angles = torch.outer(torch.arange(60.0, device=device), torch.arange(1, 17, device=device) / 16)
    norm = ha.RMSNorm(torch.rand(4 * 32, device=device) + 1)
    return ha.attention(
        q, k, v, layout="bshd", causal=True, rope=ha.Rope(angles.cos(), angles.sin()), q_norm=norm,
        sinks=torch.ones(4, device=device), return_lse=True,
    )  # fmt: skip


def masked(device: str) -> object:
    q, k, v = make_qkv("randn", 1, 4, 1, 50, 160, 32, device=device)
    mask = ha.BlockMask.from_dense(torch.rand(50, 160, device=device) < 0.5)
    k, v = (x.expand(-1, 4, -1, -1) for x in (k, v))
    return ha.attention(q, k, v, block_mask=mask, window=(100, 5), softcap=20.0, recipe=ha.Recipe(v_scales="channel"))


def packed_sequences(device: str) -> object:
    """With tokens of no sequence at both ends, and a sequence without keys."""
    q, k, v = torch.randn(60, 3, 2, 32, device=device).half().unbind(1)
    of_q, of_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 20, 30, 50], [0, 30, 30, 60]))
    return ha.attention_varlen(q, k, v, of_q, of_k, causal=True)


def quantized(device: str) -> object:
    q, k, v = make_qkv("biased_v", 1, 4, 2, 50, 60, 32, device=device)
    return ha.attention_quantized(ha.quantize(q, k, v, recipe="accurate"), window=(20, 3))


def cached(device: str) -> object:
    """Of a pool of 8 pages, sequences of 7 and 2, of 4, and of none."""
    cache = ha.paged_kv_cache(8, 2, 32, D_v=64, device=device, k_mean=torch.ones(2, 32))
    table = torch.tensor([[7, 2], [4, 6]], dtype=torch.int32, device=device)
    k, v = torch.randn(2, 2, 140, 32, device=device), torch.randn(2, 2, 140, 64, device=device)
    ha.append_kvcache(cache, k + 1, v, table, torch.zeros(2, dtype=torch.int32, device=device))
    table = torch.tensor([[7, 2], [4, -1], [5, 5]], dtype=torch.int32, device=device)
    lengths = torch.tensor([140, 100, 0], dtype=torch.int32, device=device)
    return ha.attention_kvcache(torch.randn(3, 4, 2, 32, device=device), cache, table, lengths, window=(90, 0))


CALLS: dict[str, Callable[[str], object]] = {
    "attention": dense,
    "attention_masked": masked,
    "attention_varlen": packed_sequences,
    "attention_quantized": quantized,
    "attention_kvcache": cached,
}


class Broken:
    """Plans whose outputs of attention are changed, from where it is switched on."""

    def __init__(self) -> None:
        self.change: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.run = plans.Plan.run

    def __call__(self, plan: plans.Plan, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        returned = self.run(plan, tensors)
        if self.change is not None and "fp8_attn" in plan.kernels:
            returned[0] = self.change(returned[0])
        return returned


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Broken:
    made = Broken()
    monkeypatch.setattr(plans.Plan, "run", lambda plan, tensors: made(plan, tensors))
    return made


def saved(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def table(printed: str) -> dict[str, list[float]]:
    """Numbers by label."""
    lines = printed.partition("not finite\n")[2].splitlines()
    return {
        line[:20].strip(): [float(x) for x in line[20:].split()] for line in lines if line[20:30].strip()[:1].isdigit()
    }


@pytest.mark.parametrize("what", CALLS)
def test_bad_calls_are_saved_and_replayed(
    what: str, device: str, tmp_path: Path, broken: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good call writes nothing. One whose output is half as large again does, and is good when it is made again."""
    torch.manual_seed(0)
    with ha.debug(save=tmp_path):
        CALLS[what](device)
        assert saved(tmp_path) == []
        broken.change = lambda out: out * 1.5
        CALLS[what](device)
        CALLS[what](device)
    broken.change = None
    (file,) = saved(tmp_path)
    assert command.main(["replay", str(file)]) == 0
    printed = capsys.readouterr().out
    errors = table(printed)
    total, worst_row, bad = errors["recorded"]
    assert 0.4 < total < 0.6
    assert bad == 0
    total, worst_row, bad = errors["again"]
    assert 0.001 < total < 0.1
    assert total <= worst_row < 0.3
    assert errors["16 bits"][0] < 0.01
    found = torch.load(file)
    if what in ("attention_quantized", "attention_kvcache"):
        assert "rounding model" not in errors
        assert "hard for the recipe" in found["fault"]
    else:
        assert errors["rounding model"][0] == pytest.approx(total, rel=0.05)
        assert "the kernel is at fault" in found["fault"]
    assert found["line"] in printed
    assert printed.endswith("it is as it should be here\n")


#: Options of calls whose rounding is not a row's own business, and the inputs.
ROUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "rows_share_a_descale": ("outlier_channel", {"recipe": ha.Recipe(q_scales="block"), "causal": True}),
    "split_keys": ("wide", {"recipe": "hybrid", "num_splits": 2}),
    "fast": ("k_channels", {"recipe": "fast", "window": (60, 20)}),
    "large_head_dim": ("randn", {"out_dtype": torch.float8_e4m3fn}),
}


@pytest.mark.parametrize("what", ROUNDED)
def test_a_kernel_has_the_error_of_its_model(what: str, device: str) -> None:
    """On the same rows: the budget is then 1.5 times its own error, and more on a GPU."""
    kind, options = ROUNDED[what]
    q, k, v = make_qkv(kind, 1, 2, 1, 150, 300, 160 if what == "large_head_dim" else 64, device=device)
    found = report.measure(dense_problem(q, k, v, **options), ha.attention(q, k, v, **options))
    assert found.model is not None
    assert found.budget is not None
    assert found.out.total == pytest.approx(found.model.total, rel=0.05)
    assert found.out.worst_row == pytest.approx(found.model.worst_row, rel=0.2)
    assert 1.5 * found.model.total < found.budget.total < 1.5 * found.model.total + 0.2
    assert found.fault is None


def test_outputs_that_are_not_finite(
    device: str, tmp_path: Path, broken: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose fault it is depends on the inputs; an infinity in K shows again."""
    q, k, v = make_qkv("randn", 1, 2, 2, 20, 20, 32, device=device)
    broken.change = lambda out: out * float("nan")
    with ha.debug(save=tmp_path):
        ha.attention(q, k, v)
    broken.change = None
    (file,) = saved(tmp_path)
    assert torch.load(file)["fault"].endswith("not finite, and the inputs are finite")
    file.unlink()
    k[0, 1, 3, 5] = float("inf")
    with ha.debug(save=tmp_path):
        ha.attention(q, k, v)
    (file,) = saved(tmp_path)
    assert torch.load(file)["fault"].endswith("not finite, and so has k")
    assert command.main(["replay", str(file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("again: the output has ")


def test_files_are_plain(device: str, tmp_path: Path, broken: Broken) -> None:
    """They load without classes of this package, and have the strides and the values of the call."""
    broken.change = torch.zeros_like
    q, k, v = torch.randn(1, 60, 3, 2, 32, device=device).bfloat16().unbind(2)
    k = k[:, :, :1].expand(-1, -1, 2, -1)
    with ha.debug(save=tmp_path):
        ha.attention(q, k, v, layout="bshd", sm_scale=0.25, recipe="hybrid")
    (file,) = saved(tmp_path)
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        found = torch.load(file, weights_only=True)
    finally:
        torch.serialization.add_safe_globals(known)
    arguments = found["arguments"]
    for name, x in (("q", q), ("k", k), ("v", v)):
        assert torch.equal(arguments[name], x.cpu())
        assert arguments[name].stride() == x.stride()
    assert ha.Recipe(**arguments["recipe"]) == ha.HYBRID
    assert (arguments["layout"], arguments["sm_scale"]) == ("bshd", 0.25)
    assert {"device", "helion_attn", "torch", "Triton", "Python"} == set(found["made on"])
    assert found["made on"]["torch"] == torch.__version__


def test_compiled_calls_are_examined(device: str, tmp_path: Path, broken: Broken) -> None:
    torch._dynamo.reset()
    broken.change = torch.zeros_like
    compiled = torch.compile(ha.attention, fullgraph=True, backend="eager")
    qkv = make_qkv("randn", 1, 2, 2, 20, 20, 32, device=device)
    with ha.debug(save=str(tmp_path)):
        compiled(*qkv)
    assert len(saved(tmp_path)) == 1


def test_files_of_a_second_have_names_of_their_own(
    device: str, tmp_path: Path, broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20260101-120000")
    broken.change = torch.zeros_like
    for _ in range(3):
        with ha.debug(save=tmp_path):
            ha.attention(*make_qkv("randn", 1, 2, 2, 20, 20, 32, device=device))
    assert len(saved(tmp_path)) == 3


def test_a_report_of_a_gpu_runs_in_the_interpreter(
    tmp_path: Path, broken: Broken, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    broken.change = torch.zeros_like
    with ha.debug(save=tmp_path):
        ha.attention(*make_qkv("randn", 1, 2, 2, 20, 20, 32))
    broken.change = None
    (file,) = saved(tmp_path)
    found = torch.load(file)
    found["made on"]["device"] = "NVIDIA H100 80GB HBM3"
    torch.save(found, file)
    assert command.main(["replay", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "made on  device NVIDIA H100 80GB HBM3, helion_attn " in printed
    assert "here     the CPU, in Helion's interpreter" in printed


@pytest.mark.parametrize(("save", "error", "message"), [
    (3, TypeError, "save is 3; it must be the path of a folder"),
    ("no/such/folder", ValueError, "save is 'no/such/folder', which is no folder; make it first"),
    (__file__, ValueError, "which is no folder"),
])  # fmt: skip
def test_bad_folders(save: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), ha.debug(save=save):
        pass


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other, older = tmp_path / "a.txt", tmp_path / "b.pt", tmp_path / "c.pt"
    text.write_text("no report")
    torch.save({"q": torch.zeros(3)}, other)
    torch.save({"format": report.FORMAT + "0"}, older)
    for file, message in (
        (tmp_path / "none", "none cannot be read: No such file or directory"),
        (text, "a.txt is no report of helion_attn.debug(save=...)"),
        (other, "is no report of helion_attn.debug(save=...)"),
        (older, "is no report of helion_attn.debug(save=...), or one of another helion_attn"),
    ):
        with pytest.raises(SystemExit) as stopped:
            command.main(["replay", str(file)])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
