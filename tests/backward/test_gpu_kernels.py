"""Backward kernels of others on a GPU, with the output and lse of the 8-bit forward pass."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.api import dense_problem
from helion_attn.backward import dense, flash_attn_4, kernels
from helion_attn.compiler.slower import SlowerWarning, warn_slower
from helpers.gradients import Tensors, errors, exact_gradients, inputs

pytestmark = pytest.mark.gpu

#: Kernel, kind of inputs, (H, H_kv, M, N, D), sequences, options.
CASES: list[tuple[str, str, tuple[int, int, int, int, int], int, dict[str, Any]]] = [
    *(
        ("cudnn", kind, (4, H_kv, 1024, 1024, D), B, {"causal": causal})
        for kind, H_kv in (("randn", 4), ("biased_k", 2))
        for D in (64, 128)
        for B in (1, 2)
        for causal in (False, True)
    ),
    ("cudnn", "randn", (4, 2, 1024, 777, 64), 1, {}),
    ("cudnn", "outlier", (2, 2, 1024, 1024, 128), 1, {"causal": True}),
    ("cudnn", "wide", (2, 2, 1024, 1024, 64), 1, {}),
    ("cudnn", "biased_k", (4, 2, 1000, 1000, 64), 2, {"causal": True, "sinks": torch.tensor([-1.0, 0.5, 3.0, 6.0])}),
    ("flash", "randn", (4, 2, 777, 1024, 128), 1, {"causal": True}),
    ("flash", "biased_k", (4, 2, 1024, 777, 64), 2, {"causal": True}),
    ("flash", "biased_k", (2, 1, 1000, 1000, 64), 2, {"causal": True, "window": (200, 0)}),
    ("flash", "randn", (2, 2, 1000, 1200, 128), 1, {"window": (200, 30)}),
    ("cudnn", "randn", (2, 1, 1000, 1000, 256), 1, {"causal": True}),
    ("cudnn", "biased_k", (4, 4, 1024, 1024, 256), 2, {}),
    ("flash", "randn", (2, 1, 1000, 1000, 256), 1, {"causal": True, "window": (300, 0)}),
    ("flash", "biased_k", (4, 4, 1, 1000, 64), 2, {}),
    ("flash", "randn", (2, 1, 1000, 300, 64), 1, {"window": (200, 299)}),
]

#: Windows of which PyTorch's flash attention has another right edge than was asked for.
WITHOUT_FLASH: list[dict[str, Any]] = [{"window": (200, -1)}, {"window": (200, 400)}, {"window": (-1, 400)}]


@pytest.fixture(autouse=True)
def without_flash_attn_4(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed or not; tests with its name have it, and are skipped where it is not."""
    if "flash_attn_4" not in request.node.name:
        monkeypatch.setattr(flash_attn_4, "is_here", lambda: False)
    elif not flash_attn_4.is_here():
        pytest.skip(f"needs flash-attn-4=={flash_attn_4.VERSION}")
    else:
        monkeypatch.setattr(kernels, "_flash", None)
        monkeypatch.setattr(kernels, "cudnn", None)


def gradients(qkvd: Tensors, layout: Any = "bhsd", **options: Any) -> list[torch.Tensor]:
    """dQ, dK and dV of `attention`, BHSD, and dsinks if there are any."""
    *qkv, d_out = (x.cuda().transpose(1, 2) if layout == "bshd" else x.cuda() for x in qkvd)
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    given = [q, k, v]
    if "sinks" in options:
        options["sinks"] = options["sinks"].cuda().requires_grad_()
        given.append(options["sinks"])
    out = ha.attention(q, k, v, layout=layout, **options)
    found = torch.autograd.grad(out, given, d_out)
    return [x.transpose(1, 2) if layout == "bshd" and x.dim() == 4 else x for x in found]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_errors(number: int, layout: Any) -> None:
    kernel, kind, sizes, B, options = CASES[number]
    qkvd = inputs(kind, *sizes, B=B)
    if "sinks" in options:  # whose gradient is a sum over rows: of one sign, it is no rest of rounding
        qkvd = (*qkvd[:2], qkvd[2] + 1, qkvd[3] + 1)
    assert dense.backward_kernel(dense_problem(*qkvd[:3], **options)).name == kernel
    d_q, d_k, d_v, *d_sinks = errors(gradients(qkvd, layout, **options), exact_gradients(*qkvd, **options))
    of_scores, of_values = (0.033, 0.013) if kind in ("randn", "biased_k") else (0.065, 0.065)
    # One query is no mean of errors.
    assert max(d_q, d_k) < of_scores * (1.5 if sizes[2] == 1 else 1)
    assert d_v < of_values * (1.5 if sizes[2] == 1 else 1)
    assert all(error < 0.02 for error in d_sinks)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("number", [i for i, case in enumerate(CASES) if case[0] == "flash"])
def test_flash_attn_4(number: int, layout: Any) -> None:
    """In the place of PyTorch's flash attention."""
    _, kind, sizes, B, options = CASES[number]
    qkvd = inputs(kind, *sizes, B=B)
    assert dense.backward_kernel(dense_problem(*qkvd[:3], **options)).name == "flash_attn_4"
    d_q, d_k, d_v = errors(gradients(qkvd, layout, **options), exact_gradients(*qkvd, **options))
    # One query is no mean of errors.
    assert max(d_q, d_k) < 0.033 * (1.5 if sizes[2] == 1 else 1)
    assert d_v < 0.013 * (1.5 if sizes[2] == 1 else 1)


def check_windows_without_flash(kernel: str) -> None:
    for options in WITHOUT_FLASH:
        qkvd = inputs("randn", 2, 1, 1000, 300, 64)
        assert dense.backward_kernel(dense_problem(*qkvd[:3], **options)).name == kernel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowerWarning)
            d_q, d_k, d_v = errors(gradients(qkvd, **options), exact_gradients(*qkvd, **options))
        assert max(d_q, d_k) < 0.033
        assert d_v < 0.013


def test_windows_that_pytorch_s_flash_attention_gets_wrong() -> None:
    check_windows_without_flash("chunked")


def test_flash_attn_4_takes_these_windows() -> None:
    check_windows_without_flash("flash_attn_4")


def test_packed_sequences_without_keys() -> None:
    for M, N in ((40, 0), (0, 40)):
        q, k, v = (torch.randn(size, 2, 64, dtype=torch.bfloat16, device="cuda").requires_grad_() for size in (M, N, N))
        cu_q, cu_k = (torch.tensor([0, size], dtype=torch.int32, device="cuda") for size in (M, N))
        found = torch.autograd.grad(ha.attention_varlen(q, k, v, cu_q, cu_k).sum(), (q, k, v))
        assert all(torch.equal(x, torch.zeros_like(x)) for x in found)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (100, 0)}])
def test_flash_attn_4_takes_a_gradient_of_lse(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = (x.cuda() for x in inputs("biased_k", 4, 2, 500, 500, 64, B=2))

    def of_both() -> list[torch.Tensor]:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = ha.attention(*given, return_lse=True, **options)
        return list(torch.autograd.grad([out, lse], given, [d_out, torch.cos(lse.detach())]))

    found = of_both()
    monkeypatch.setattr("helion_attn.backward.kernels.why_chunked", lambda case: "the test asks for it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerWarning)
        expected = of_both()
    assert max(errors(found, [x.double() for x in expected])) < 0.008


def test_flash_attn_4_takes_packed_sequences() -> None:
    test_packed_sequences()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 0)}])
def test_kernels_agree_with_the_products_in_pytorch(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    qkvd = inputs("biased_k", 4, 2, 500, 500, 64)
    found = gradients(qkvd, **options)
    monkeypatch.setattr("helion_attn.backward.kernels.why_chunked", lambda case: "the test asks for it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowerWarning)
        expected = gradients(qkvd, **options)
    assert max(errors(found, [x.double() for x in expected])) < 0.008


def test_a_gradient_of_another_layout_than_before() -> None:
    """PyTorch keeps graphs of cuDNN by how Q, K and V lie, and not by how dO does."""
    qkvd = inputs("randn", 2, 2, 512, 512, 64, B=2)
    expected = gradients(qkvd)
    strided = qkvd[3].transpose(1, 2).contiguous().transpose(1, 2)
    # cuDNN's sums have no order.
    assert max(errors(gradients((*qkvd[:3], strided)), [x.double() for x in expected])) < 0.003


def test_packed_sequences() -> None:
    q, k, v, d_out = (x[0].transpose(0, 1).contiguous().cuda() for x in inputs("biased_k", 4, 2, 1500, 1500, 64))
    ends = [0, 700, 700, 1200, 1490]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cuda")
    cases: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "window": (100, 0)}]
    for options in cases:
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = ha.attention_varlen(given[0], given[1], given[2], cu_seqlens, cu_seqlens, **options)
        found = torch.autograd.grad(out, given, d_out)
        for begin, end in itertools.pairwise(ends):
            if begin == end:
                continue
            alone = [x[begin:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v, d_out)]
            of_q, of_k, of_v = errors(
                [x[begin:end].transpose(0, 1).unsqueeze(0) for x in found], exact_gradients(*alone, **options)
            )
            assert max(of_q, of_k) < 0.034
            assert of_v < 0.0135
        assert all(x[ends[-1] :].abs().max() == 0 for x in found)


def test_deterministic_algorithms() -> None:
    qkvd = inputs("randn", 4, 2, 2048, 2048, 64)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        first, second = gradients(qkvd, causal=True), gradients(qkvd, causal=True)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(map(torch.equal, first, second))


def test_slow_passes_warn_once() -> None:
    warn_slower.cache_clear()
    qkvd = inputs("randn", 2, 2, 100, 100, 64)
    with pytest.warns(
        SlowerWarning, match="backward pass .* fp32 products in PyTorch.*: no kernel that is called has a softcap"
    ):
        gradients(qkvd, softcap=30.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(qkvd, softcap=30.0)


@pytest.mark.parametrize(("H_kv", "share"), [(8, 0.65), (1, 0.75)])
def test_memory_that_is_held(H_kv: int, share: float) -> None:
    """Between the passes, over that of bf16: Q, K, V and the output."""
    q, k, v, _ = (x.cuda().requires_grad_() for x in inputs("randn", 8, H_kv, 4096, 4096, 128))
    ha.attention(q, k, v)
    before = torch.cuda.memory_allocated()
    out = ha.attention(q, k, v)
    held = torch.cuda.memory_allocated() - before
    assert held < share * (q.nbytes + k.nbytes + v.nbytes + out.nbytes)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    qkvd = [x.cuda() for x in inputs("randn", 4, 2, 512, 512, 128)]
    given = [x.requires_grad_() for x in qkvd[:3]]

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ha.attention(2 * q, k, v, causal=True) * 3

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        found = torch.autograd.grad(compiled(*given), given, qkvd[3])
    expected = torch.autograd.grad(step(*given), given, qkvd[3])
    assert max(errors(found, [x.double() for x in expected])) < 0.005
