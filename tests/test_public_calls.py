"""What is logged of a call at level DEBUG makes the call again, and is logged once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import plans, public_calls
from helion_attn.testing import relative_error


def ints(*numbers: int, device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def tables(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(60.0, device=device), torch.arange(1, 17, device=device) / 16)
    return angles.cos(), angles.sin()


def with_everything(device: str) -> object:
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 4, 2, 50, 60, 32, device=device, D_v=64))
    norm = ha.RMSNorm(torch.ones(32, dtype=torch.bfloat16, device=device), eps=1e-5)
    rope = ha.Rope(*tables(device), True, k_positions=torch.arange(60, device=device))
    return ha.attention(
        q, k, v, layout="bshd", causal=True, window=(20, 3), sm_scale=0.5, softcap=30.0, rope=rope, q_norm=norm,
        k_norm=norm, sinks=torch.zeros(4, device=device), num_splits=1, out_dtype=torch.float32,
        recipe=ha.Recipe(v_scales="channel"),
    )  # fmt: skip


def masked(device: str) -> object:
    mask = ha.BlockMask.from_dense(torch.rand(2, 50, 60, device=device) < 0.5)
    return ha.attention(*make_qkv("randn", 1, 2, 2, 50, 60, 32, device=device), block_mask=mask, return_lse=True)


def expanded(device: str) -> object:
    q, k, v = make_qkv("randn", 1, 4, 1, 50, 60, 32, device=device)
    return ha.attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1), window=(-1, 0))


def packed_sequences(device: str) -> object:
    q, k, v = torch.randn(50, 3, 2, 32, device=device).half().unbind(1)
    starts = ints(0, 20, 50, device=device)
    return ha.attention_varlen(q, k, v, starts, starts, causal=True, recipe="hybrid")


def quantized(device: str) -> object:
    q, k, v = (x.transpose(1, 2).contiguous() for x in make_qkv("randn", 1, 4, 2, 50, 60, 32, device=device))
    qkv = ha.quantize(q, k, v, layout="bshd", recipe="accurate")
    return ha.attention_quantized(qkv, causal=True, softcap=20.0, out_dtype=torch.float8_e4m3fn)


def given_in_8_bits(device: str) -> object:
    q, k, v = (x.to(torch.float8_e4m3fn) for x in make_qkv("randn", 1, 4, 2, 50, 60, 32, device=device))
    descale = torch.ones(1, 2, 32, device=device)
    return ha.attention_quantized(ha.pack(q, k, v, q_descale=1.0, k_descale=1.0, v_descale=descale))


def cached(device: str) -> object:
    cache = ha.paged_kv_cache(3, 2, 32, device=device, recipe="fast", k_mean=torch.ones(2, 32))
    table, lengths = ints(0, 1, device=device).view(2, 1), ints(0, 0, device=device)
    q, k, v = make_qkv("randn", 2, 2, 2, 5, 5, 32, device=device)
    ha.append_kvcache(cache, k, v, table, lengths, rope=ha.Rope(*tables(device)))
    return ha.attention_kvcache(q, cache, table, lengths + 5, causal=False, num_splits=1)


def by_auto(device: str) -> object:
    return ha.attention(*make_qkv("randn", 1, 2, 2, 50, 50, 32, device=device), recipe="auto")


#: A call, and what its last line has besides tensors.
CALLS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "with_everything": (
        with_everything,
        (
            "layout='bshd', causal=True, sm_scale=0.5, window=(20, -1), softcap=30.0, sinks=torch.randn(4, ",
            "recipe=ha.Recipe(v_scales='channel'), rope=ha.Rope(",
            "interleaved=True, k_positions=torch.arange(60, dtype=torch.int64",
            "eps=1e-05), num_splits=1, out_dtype=torch.float32)",
        ),
    ),
    "masked": (masked, ("recipe='balanced', block_mask=ha.BlockMask(torch.ones(1, 2, 1, 1, ", "return_lse=True)")),
    "expanded": (expanded, ("as_strided((1, 4, 60, 32), (1920, 0, 32, 1))", "(q, k, v, causal=True, recipe=")),
    "packed_sequences": (
        packed_sequences,
        ("torch.float16", ".as_strided((50, 2, 32), (192, 32, 1))", "torch.linspace(0, 50, 3", "'hybrid')  # "),
    ),
    "quantized": (quantized, ("ha.quantize(torch.randn(1, 50, 4, 32, ", "causal=True, softcap=20.0, out_dtype=")),
    "given_in_8_bits": (given_in_8_bits, ("ha.pack(torch.randn(1, 4, 50, 32", "v_descale=torch.ones(1, 2, 32")),
    "cached": (cached, ("ha.paged_kv_cache(3, 2, 32, D_v=32", "recipe='fast', k_mean=", "causal=False, num_splits=1)")),
    "by_auto": (by_auto, ("recipe='auto')  # PyTorch's scaled_dot_product_attention",)),
}


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """Lines so far, of calls alone."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " = torch." in record.getMessage() or " = ha." in record.getMessage():
                lines.append(record.getMessage())

    handler, logger = Lines(), logging.getLogger("helion_attn")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture
def not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are made, and give zeros."""

    def zeros(plan: plans.Plan, tensors: Any) -> list[torch.Tensor]:
        return [torch.zeros(x.shape, dtype=x.dtype, device=tensors[0].device) for x in plan.outputs]

    monkeypatch.setattr(plans.Plan, "run", zeros)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.usefixtures("not_run")
def test_lines_make_the_calls_again(what: str, device: str, logged: list[str]) -> None:
    """A line that is executed is logged again, letter by letter, so it has the layouts and the options."""
    call, texts = CALLS[what]
    call(device)
    first = logged.copy()
    assert first, "nothing is logged"
    assert [text for text in texts if text not in first[-1]] == []
    for line in first:
        plans.forget()
        logged.clear()
        exec(line, {"torch": torch, "ha": ha})
        assert line in logged


def test_a_line_gives_a_finite_output(device: str, logged: list[str]) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 2, 2, 20, 20, 32, device=device))
    ha.attention(q, k, v, causal=True, layout="bshd")
    (line,) = logged
    names: dict[str, Any] = {"torch": torch, "ha": ha}
    exec(line.replace("ha.attention(", "out = ha.attention("), names)
    assert names["q"].stride() == q.stride()
    exact = ha.reference.attention(names["q"], names["k"], names["v"], causal=True, layout="bshd")
    assert relative_error(names["out"], exact) < 0.06


@pytest.mark.usefixtures("not_run")
def test_a_call_is_logged_once(device: str, logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also through the dispatcher, in `debug` and in compiled code; another layout is another call."""
    # Tests on a GPU forget plans after each call.
    monkeypatch.setattr(plans, "forget", lambda: None)
    torch._dynamo.reset()
    q, k, v = make_qkv("randn", 1, 2, 2, 20, 20, 32, device=device)
    compiled = torch.compile(ha.attention, fullgraph=True, backend="eager")
    for _ in range(2):
        ha.attention(q, k, v)
        with ha.debug():
            ha.attention(q, k, v)
        compiled(q, k, v)
    assert len(logged) == 1
    compiled(q, k, v, causal=True)
    assert "causal=True" in logged[-1]
    ha.attention(q, k[:, :, :19], v[:, :, :19])
    assert len(logged) == 3


def test_a_device_is_named() -> None:
    q = torch.empty(1, 2, 20, 32, dtype=torch.float16, device="meta")
    line = public_calls.line(public_calls.PublicCall("attention", {"q": q}, {}), "none")
    assert line == 'q = torch.randn(1, 2, 20, 32, dtype=torch.float16, device="meta"); ha.attention(q)  # none'


def test_calls_of_ranks(device: str, logged: list[str], tmp_path: Path) -> None:
    """In a group of one, a line makes the call again."""
    q, k, v = make_qkv("randn", 1, 2, 2, 130, 130, 32, device=device)
    starts = ints(0, 60, 130, device=device)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        ha.distributed.attention(q, k, v, causal=True, strategy="ring")
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        ha.distributed.attention_varlen(q, k, v, starts, starts)
        first = [line for line in logged if "ha.distributed." in line]
        assert len(first) == 2
        assert "(q, k, v, strategy='ring', layout='bhsd', causal=True, recipe='balanced')  # rank 0 of 1" in first[0]
        plans.forget()
        logged.clear()
        for line in first:
            exec(line, {"torch": torch, "ha": ha})
        assert [line for line in logged if "ha.distributed." in line] == first
    finally:
        dist.destroy_process_group()
