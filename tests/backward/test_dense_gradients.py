"""Gradients of `attention` against those of fp64 on the unquantised tensors."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.api import dense_problem
from helion_attn.backward import chunked, dense, flash_attn_4, kernels
from helion_attn.backward.dense import attention_backward, attention_training
from helion_attn.options import ScoreOptions
from helion_attn.testing import relative_error
from helpers.gradients import Tensors, errors, exact, exact_gradients, inputs
from helpers.memory import nan_filled_memory

#: The most that dQ and dK, and dV, may be off, by the kind of inputs.
BOUNDS = {
    "randn": (0.033, 0.013),
    "biased_k": (0.033, 0.013),
    "outlier": (0.065, 0.065),
    "wide": (0.065, 0.065),
    "wider": (0.25, 0.065),
    "large_channels": (0.065, 0.065),
}


@pytest.fixture(autouse=True)
def without_flash_attn_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed or not; tests that are about it have it."""
    monkeypatch.setattr(flash_attn_4, "is_here", lambda: False)


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, **options: Any) -> Tensors:
    """dQ, dK and dV of `attention`, and dsinks if there are any."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach().requires_grad_()
    with nan_filled_memory():
        out = ha.attention(*given, **options)
        return torch.autograd.grad(out, [*given, *([options["sinks"]] if "sinks" in options else [])], d_out)


CASES: dict[str, tuple[str, tuple[int, int, int, int, int], dict[str, Any]]] = {
    "randn": ("randn", (4, 2, 130, 130, 64), {}),
    "randn_causal": ("randn", (4, 2, 130, 130, 64), {"causal": True}),
    "biased_k": ("biased_k", (2, 2, 150, 150, 64), {}),
    "biased_k_128": ("biased_k", (2, 1, 130, 130, 128), {"causal": True}),
    "randn_256": ("randn", (1, 1, 100, 130, 256), {}),
    "outlier": ("outlier", (2, 2, 150, 150, 64), {"causal": True}),
    "outlier_128": ("outlier", (2, 2, 130, 130, 128), {}),
    "wide": ("wide", (2, 2, 150, 150, 64), {"causal": True}),
    "wide_128": ("wide", (2, 2, 130, 130, 128), {}),
    "large_channels": ("large_channels", (2, 2, 150, 150, 64), {}),
    "odd_head_dim": ("biased_k", (2, 1, 70, 90, 50), {}),
    "one_key": ("randn", (2, 2, 1, 30, 64), {"causal": True}),
    "more_keys": ("biased_k", (2, 2, 70, 200, 64), {"causal": True}),
    "fewer_keys": ("biased_k", (2, 1, 200, 70, 64), {"causal": True}),
    "window": ("biased_k", (2, 1, 200, 200, 64), {"causal": True, "window": (40, 0)}),
    "window_of_both_sides": ("randn", (2, 2, 100, 200, 64), {"window": (30, 20)}),
    "window_without_keys": ("randn", (2, 2, 200, 50, 64), {"window": (9, 0)}),
    "softcap": ("wide", (2, 2, 130, 130, 64), {"softcap": 5.0}),
    "softcap_of_biased_k": ("biased_k", (2, 2, 130, 130, 64), {"softcap": 50.0, "causal": True}),
    "accurate": ("outlier", (2, 2, 130, 130, 64), {"recipe": "accurate"}),
}


IN_BSHD = ("randn", "window", "fewer_keys")


@pytest.mark.parametrize(("name", "layout"), [*((name, "bhsd") for name in CASES), *((x, "bshd") for x in IN_BSHD)])
def test_errors(name: str, layout: Any) -> None:
    kind, (H, H_kv, M, N, D), options = CASES[name]
    qkvd = inputs(kind, H, H_kv, M, N, D)
    expected = exact_gradients(*qkvd, **{key: x for key, x in options.items() if key != "recipe"})
    if layout == "bshd":
        qkvd = tuple(x.transpose(1, 2) for x in qkvd)
        found = [x.transpose(1, 2) for x in gradients(*qkvd, layout=layout, **options)]
    else:
        found = [*gradients(*qkvd, **options)]
    of_scores, of_values = BOUNDS[kind]
    for error, bound in zip(errors(found, expected), (of_scores, of_scores, of_values), strict=True):
        # Few rows or keys are no mean of errors.
        assert error < bound * (1.5 if min(M, N) < 100 or "softcap" in options or D == 50 else 1), errors(
            found, expected
        )
    if options.get("causal") and M > N:
        assert found[0][:, :, : M - N].abs().max() == 0


@pytest.mark.parametrize("kind", ["randn", "biased_k"])
def test_fast_and_16_bits(kind: str) -> None:
    """FAST within what was measured of it, 16 bits far below."""
    qkvd = inputs(kind, 2, 1, 130, 130, 64)
    expected = exact_gradients(*qkvd)
    assert max(errors(gradients(*qkvd, recipe="fast"), expected)) < 0.06
    assert max(errors(gradients(*qkvd, recipe="bf16"), expected)) < 0.01


@pytest.mark.parametrize("kind", ["randn", "biased_k"])
def test_sinks(kind: str) -> None:
    """K's mean counts in dQ, since sums of dS over keys are not 0."""
    q, k, v, d_out = inputs(kind, 4, 2, 256, 256, 64)
    # So that the gradient of a sink, a sum over rows, is of one sign, and no rest of rounding.
    qkvd = q, k, v + 1, d_out + 1
    sinks = torch.tensor([-1.0, 0.5, 3.0, 6.0])
    expected = exact_gradients(*qkvd, sinks=sinks, causal=True)
    found = gradients(*qkvd, sinks=sinks, causal=True)
    d_q, d_k, d_v, d_sinks = errors(found, expected)
    assert max(d_q, d_k) < 0.033
    assert d_v < 0.013
    assert d_sinks < 0.02
    (of_bf16,) = errors([gradients(*qkvd, sinks=sinks.bfloat16(), causal=True)[3]], [expected[3]])
    assert abs(of_bf16 - d_sinks) < 0.01


@pytest.mark.parametrize("block_mask", [False, True])
def test_a_row_without_keys_has_no_gradient_of_lse(block_mask: bool) -> None:
    """Its lse is -inf, whatever the gradient of that is: K's mean must not come into dQ."""
    q, k, v, d_out = inputs("biased_k", 2, 2, 140, 140 if block_mask else 40, 64)
    options: dict[str, Any] = {"causal": True}
    if block_mask:
        visible = torch.ones(140, 140, dtype=torch.bool).tril()
        visible[:100] = False
        options = {"block_mask": ha.BlockMask.from_dense(visible)}
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = ha.attention(*given, return_lse=True, **options)
    empty = lse.isneginf()
    assert torch.equal(empty, (torch.arange(140) < 100).expand_as(empty))
    found = torch.autograd.grad((out, lse), given, (d_out, torch.ones_like(lse).masked_fill(empty, math.nan)))
    assert torch.all(found[0][:, :, :100] == 0)
    assert all(x.isfinite().all() for x in found)
    alone = torch.autograd.grad(ha.attention(*given, return_lse=True, **options), given, (d_out, (~empty).float()))
    assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True))


def test_gradient_of_lse() -> None:
    """Alone, and with that of the output; dV of lse is 0."""
    q, k, v, d_out = inputs("biased_k", 2, 1, 130, 130, 64)
    d_lse = torch.randn(1, 2, 130, generator=torch.Generator().manual_seed(1))
    for sinks in (None, torch.tensor([0.5, 2.0])):
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        exact_given = [x.detach().double().requires_grad_() for x in (q, k, v)]
        out, lse = ha.attention(*given, causal=True, sinks=sinks, return_lse=True)
        out2, lse2 = exact(*exact_given, causal=True, sinks=None if sinks is None else sinks.double())
        found = torch.autograd.grad((out, lse), given, (d_out, d_lse), retain_graph=True)
        expected = torch.autograd.grad((out2, lse2), exact_given, (d_out.double(), d_lse.double()), retain_graph=True)
        assert max(errors(found, expected)) < 0.033
        d_q, d_k, d_v = torch.autograd.grad(lse, given, d_lse)
        expected = torch.autograd.grad(lse2, exact_given[:2], d_lse.double())
        assert max(errors([d_q, d_k], expected)) < 0.033
        assert d_v.abs().max() == 0


def test_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs of rows: of a long sequence no mask of all scores is made."""
    monkeypatch.setattr(chunked, "SCORES_AT_ONCE", 2 * 260 * 50)
    monkeypatch.setattr(ha.BlockMask, "to_dense", None)
    q, k, v, d_out = inputs("biased_k", 2, 1, 200, 260, 64)
    visible = torch.rand(1, 2, 200, 260, generator=torch.Generator().manual_seed(2)) < 0.4
    visible[:, :, 17] = False
    found = gradients(q, k, v, d_out, block_mask=ha.BlockMask.from_dense(visible))
    expected = exact_gradients(q, k, v, d_out, visible=visible)
    d_q, d_k, d_v = errors(found, expected)
    assert max(d_q, d_k) < 0.033
    assert d_v < 0.013
    assert found[0][:, :, 17].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dtypes_of_inputs_are_those_of_gradients(dtype: torch.dtype) -> None:
    q, k, v, d_out = (x.to(dtype) for x in inputs("randn", 2, 2, 130, 130, 64))
    found = gradients(q, k, v, d_out)
    assert {x.dtype for x in found} == {dtype}
    d_q, d_k, d_v = errors(found, exact_gradients(q, k, v, d_out))
    assert max(d_q, d_k) < 0.033
    assert d_v < 0.013


def test_output_of_another_dtype() -> None:
    q, k, v, d_out = inputs("randn", 2, 2, 130, 130, 64)
    found = gradients(q, k, v, d_out.float(), out_dtype=torch.float32)
    assert {x.dtype for x in found} == {torch.bfloat16}
    assert max(errors(found, exact_gradients(q, k, v, d_out))) < 0.033


def test_prologue() -> None:
    """Norms and RoPE, run by autograd: gradients of what they are given and of their weights."""
    q, k, v, d_out = inputs("randn", 2, 1, 130, 130, 64)
    angles = torch.outer(torch.arange(200.0), 100 ** (-torch.arange(24) / 24))
    for interleaved, over_heads, positions in ((False, False, None), (True, True, torch.arange(130) + 50)):
        weights = [0.5 + torch.rand(heads * 64 if over_heads else 64) for heads in (2, 1)]
        rope = ha.Rope(angles.cos(), angles.sin(), interleaved, positions, positions)

        def prologue(x: torch.Tensor, weight: torch.Tensor, rope: ha.Rope = rope) -> torch.Tensor:
            x, weight = x.double(), weight.double()
            all_heads = weight.numel() > 64
            x = x * torch.rsqrt(x.square().mean((1, 3) if all_heads else 3, keepdim=True) + 1e-6)
            x = x * (weight.view(-1, 1, 64) if all_heads else weight)
            at = torch.arange(130) if rope.q_positions is None else rope.q_positions
            c, s = rope.cos.double()[at], rope.sin.double()[at]
            a, b = (x[..., :48:2], x[..., 1:48:2]) if rope.interleaved else (x[..., :24], x[..., 24:48])
            turned = torch.stack([a * c - b * s, b * c + a * s], 4 if rope.interleaved else 3)
            return torch.cat([turned.flatten(3), x[..., 48:]], 3)

        given = [x.detach().requires_grad_() for x in (q, k, v, *weights)]
        norms = [ha.RMSNorm(weight) for weight in given[3:]]
        out = ha.attention(*given[:3], causal=True, rope=rope, q_norm=norms[0], k_norm=norms[1])
        found = torch.autograd.grad(out, given, d_out)
        q64, k64, v64, *weights64 = exact_given = [x.detach().double().requires_grad_() for x in given]
        expected_out, _ = exact(prologue(q64, weights64[0]), prologue(k64, weights64[1]), v64, causal=True)
        expected = torch.autograd.grad(expected_out, exact_given, d_out.double())
        d_q, d_k, d_v, *of_weights = errors(found, expected)
        assert max(d_q, d_k) < 0.04
        assert d_v < 0.015
        assert max(of_weights) < 0.06
        with torch.no_grad():
            assert (
                relative_error(out, ha.attention(*given[:3], causal=True, rope=rope, q_norm=norms[0], k_norm=norms[1]))
                < 0.03
            )


def test_large_head_dim() -> None:
    qkvd = inputs("randn", 1, 1, 70, 100, 320)
    assert max(errors(gradients(*qkvd, causal=True), exact_gradients(*qkvd, causal=True))) < 0.045


@pytest.mark.parametrize("kind", ["biased_k", "wider"])
def test_unquantised_tensors_would_not_do(kind: str) -> None:
    """With the lse of the 8-bit forward pass they break where K is biased or scores are wide: never offer them."""
    q, k, v, d_out = inputs(kind, 2, 2, 200, 200, 64)
    expected = exact_gradients(q, k, v, d_out)
    out, lse = ha.attention(q, k, v, return_lse=True)
    p = torch.exp((q.float() @ k.float().mT) / 8 - lse.unsqueeze(3))
    delta = (d_out.float() * out.float()).sum(3, keepdim=True)
    d_s = p * (d_out.float() @ v.float().mT - delta)
    of_originals = errors([d_s @ k.float() / 8, d_s.mT @ q.float() / 8], expected[:2])
    found = errors(gradients(q, k, v, d_out)[:2], expected[:2])
    if kind == "biased_k":
        assert max(of_originals) > 3 * max(found)
    else:  # a row's probabilities are far from 1
        assert p.sum(3).max() > 2
        assert max(of_originals) > 1.5 * max(found)
    assert max(found) < BOUNDS[kind][0]


def test_probabilities_are_those_of_the_forward_pass() -> None:
    """Where scores have a deviation of 30 a row of them sums to 1 but for P's rounding."""
    q, k, v = inputs("wider", 1, 1, 200, 200, 64)[:3]
    a = dense_problem(q, k, v)
    asked = dense._kept(a, attention_training(a))
    q2, k2, _ = dense.dequantised(asked.forward, torch.float32)
    p = torch.exp(q2 @ k2.mT / 8 - asked.lse.unsqueeze(3))
    assert (p.sum(3) - 1).abs().max() < 0.07


def test_nan_reaches_what_depends_on_it() -> None:
    q, k, v, d_out = inputs("randn", 2, 1, 40, 40, 64)
    q[0, 0, 5, 3] = math.nan
    d_q, d_k, d_v = gradients(q, k, v, d_out)
    assert d_q[0, 0, 5].isnan().all()
    assert d_k.isnan().all()
    assert d_v.isnan().all()
    assert d_q[0, 1].isfinite().all()


def test_what_is_kept() -> None:
    """8 bits of Q, K and V, descales, out and lse: nothing of 16 bits but the output."""
    kept: list[torch.Tensor] = []
    q, k, v, _ = inputs("randn", 2, 2, 256, 256, 128)

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ha.attention(q.requires_grad_(), k, v)
    assert [x.shape for x in kept if x.dtype == torch.bfloat16] == [out.shape]
    bf16 = q.nbytes + k.nbytes + v.nbytes + out.nbytes
    assert sum(x.nbytes for x in kept) < 0.65 * bf16


def test_prologue_of_inference_tensors() -> None:
    """Autograd keeps none: copies take their places."""
    q, k, v, d_out = inputs("randn", 2, 1, 40, 40, 64)
    angles, weight, at = torch.outer(torch.arange(50.0), torch.rand(24)), torch.rand(64), torch.arange(40)
    rope, norm = ha.Rope(angles.cos(), angles.sin(), False, at, at), ha.RMSNorm(weight)
    expected = gradients(q, k, v, d_out, rope=rope, q_norm=norm, k_norm=norm)
    with torch.inference_mode():
        rope = ha.Rope(rope.cos.clone(), rope.sin.clone(), False, at.clone(), at.clone())
        norm = ha.RMSNorm(weight.clone())
    found = gradients(q, k, v, d_out, rope=rope, q_norm=norm, k_norm=norm)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("of", ["rope", "norms", "both"])
def test_what_is_kept_with_a_prologue(of: str) -> None:
    """Norms keep Q and K as they are given, RoPE nothing; tables and weights are the caller's."""
    q, k, v, _ = (x.requires_grad_() for x in inputs("randn", 2, 2, 256, 256, 128))
    angles = torch.outer(torch.arange(256.0), 100 ** (-torch.arange(64) / 64))
    options: dict[str, Any] = {}
    rope = ha.Rope(angles.cos(), angles.sin(), False, None, None)
    if of != "norms":
        options["rope"] = rope
    if of != "rope":
        options |= {name: ha.RMSNorm(torch.ones(128).requires_grad_()) for name in ("q_norm", "k_norm")}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ha.attention(q, k, v, **options)
    for table in (rope.cos, rope.sin):
        kept.pop(table.untyped_storage().data_ptr(), None)
    bf16 = q.nbytes + k.nbytes + v.nbytes + out.nbytes
    assert sum(kept.values()) < (0.65 if of == "rope" else 1.15) * bf16


def test_inputs_without_gradients_get_none() -> None:
    q, k, v, d_out = inputs("randn", 2, 1, 40, 40, 64)
    q.requires_grad_()
    out, lse = ha.attention(q, k, v, return_lse=True)
    assert lse.requires_grad
    out.backward(d_out)
    assert (k.grad, v.grad) == (None, None)
    all_three = gradients(q, k, v, d_out)
    assert q.grad is not None
    assert relative_error(q.grad, all_three[0]) < 0.002


def test_opcheck() -> None:
    q, k, v, _ = (x.requires_grad_() for x in inputs("randn", 4, 2, 40, 50, 64))
    sinks = torch.zeros(4).requires_grad_()
    for recipe in ("balanced", "bf16"):
        a = dense_problem(q, k, v, causal=True, sinks=sinks, return_lse=True, recipe=recipe)
        # The other check sums outputs, which e4m3 has not.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        values = attention_training.values(a)
        torch.library.opcheck(torch.ops.helion_attn.attention_training, values, test_utils=checks)
    # Of 16 bits, since the checks multiply inputs.
    asked = dense._kept(a, attention_training(a))
    detached = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in attention_backward.values(asked))
    torch.library.opcheck(torch.ops.helion_attn.attention_backward, detached)


CHOICES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("cudnn", {}, {}),
    ("cudnn", {"causal": True}, {}),
    ("flash", {"causal": True}, {"N": 5000}),
    ("flash", {"window": (100, 0)}, {}),
    ("flash", {"causal": True, "window": (100, 0)}, {}),
    ("flash", {}, {"M": 1}),
    ("flash", {"window": (-1, 30)}, {"N": 40}),
    ("flash", {"window": (-1, 60)}, {"N": 40, "M": 61}),
    ("chunked", {"window": (-1, 60)}, {"N": 40}),
    ("chunked", {"window": (9, -1)}, {"N": 40, "M": 61}),
    ("chunked", {"window": (9, 60)}, {"N": 40, "M": 61}),
    ("flash", {"window": (9, 39)}, {"N": 40, "M": 61}),
    ("flash", {"window": (9, -1)}, {"N": 40, "M": 41}),
    ("flash", {}, {"packed_sequences": True}),
    ("chunked", {"softcap": 30.0}, {}),
    ("chunked", {}, {"D_v": 64}),
    ("chunked", {}, {"D": 320, "D_v": 320}),
    ("chunked", {}, {"D": 50, "D_v": 50}),
    ("chunked", {}, {"block_sparse": True}),
    ("chunked", {}, {"has_lse_gradient": True}),
    ("chunked", {}, {"is_cuda": False}),
]


def chosen(options: dict[str, Any], changed: dict[str, Any]) -> kernels.BackwardKernel:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    case = kernels.Case(
        is_cuda=True, M=4096, N=4096, D=128, D_v=128, scores=dense_problem(q, q, q, **options).scores,
        block_sparse=False, has_lse_gradient=False, packed_sequences=False,
    )  # fmt: skip
    return kernels.choose(case._replace(**changed))


@pytest.mark.parametrize(("name", "options", "changed"), CHOICES)
def test_which_kernel(name: str, options: dict[str, Any], changed: dict[str, Any]) -> None:
    found = chosen(options, changed)
    assert found.name == name
    assert found.is_slow == (name == "chunked" and "is_cuda" not in changed)


@pytest.mark.parametrize(("name", "options", "changed"), CHOICES)
def test_which_kernel_beside_flash_attn_4(
    name: str, options: dict[str, Any], changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what PyTorch's flash attention does, and a gradient of lse; cuDNN keeps its own."""
    monkeypatch.setattr(flash_attn_4, "is_here", lambda: True)
    taken = name == "flash" or "window" in options or "has_lse_gradient" in changed
    assert chosen(options, changed).name == ("flash_attn_4" if taken else name)


@pytest.mark.parametrize("D", [8, 40, 72, 80, 104, 264])
def test_head_dims_that_flash_attn_4_gets_wrong(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn_4, "is_here", lambda: True)
    name = "flash" if D <= kernels.FLASH_D else "chunked"
    assert chosen({"window": (100, 0)}, {"D": D, "D_v": D}).name == name
    assert chosen({}, {"D": D, "D_v": D, "has_lse_gradient": True}).name == "chunked"


def seen(left: int, right: int, M: int, N: int) -> torch.Tensor:
    """Which of N keys each of M queries sees within edges of which -1 is none."""
    from_diagonal = torch.arange(N) - (torch.arange(M).unsqueeze(1) + N - M)
    last, first = right if right >= 0 else math.inf, -left if left >= 0 else -math.inf
    return (first <= from_diagonal) & (from_diagonal <= last)


@pytest.mark.parametrize("packed_sequences", [False, True])
def test_windows_of_pytorch_s_flash_attention(packed_sequences: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its kernel masks by is the mask that is asked for: of all tokens, or of any sequence among packed ones."""
    masked_by: list[tuple[int, int]] = []

    def as_mha_bwd(*args: Any, scale: float, window_size_left: int | None, window_size_right: int | None) -> Any:
        q, k, v, max_k, is_causal = (args[i] for i in (1, 2, 3, 9, 11))
        left, right = (-1 if edge is None else edge for edge in (window_size_left, window_size_right))
        right = 0 if is_causal else right
        left, right = (-1 if edge >= max_k else edge for edge in (left, right))
        left = max_k if left < 0 and right >= 0 else left
        right = max_k if left >= 0 and right < 0 else right
        masked_by.append((left, right))
        return q, k, v

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", as_mha_bwd)
    taken = 0
    most = 6 if packed_sequences else 8
    for M, N, left, right in itertools.product(*[range(1, most + 1)] * 2, *[range(-1, most + 2)] * 2):
        scores = ScoreOptions(window=(left, right), sm_scale=1.0)
        kernel = kernels.choose(kernels.Case(True, M, N, 8, 8, scores, False, False, packed_sequences))
        if kernel.name != "flash":
            continue
        taken += 1
        q, k, lse = torch.zeros(M, 1, 8), torch.zeros(N, 1, 8), torch.zeros(1, M)
        if packed_sequences:
            ends = torch.zeros(2, dtype=torch.int32)
            kernels.run_varlen(kernel, q, q, k, k, q, lse, scores, None, ends, ends)
        else:
            q, k, lse = q[None].transpose(1, 2), k[None].transpose(1, 2), lse[None]
            kernels.run(kernel, q, q, k, k, q, lse, scores, None)
        for m, n in itertools.product(range(1, M + 1), range(1, N + 1)) if packed_sequences else [(M, N)]:
            assert torch.equal(seen(*masked_by[-1], m, n), seen(left, right, m, n)), (M, N, left, right, m, n)
    assert len(masked_by) == taken
    assert taken > 1000


@pytest.mark.parametrize(
    ("impl", "D", "options", "name"),
    [
        ("FA4", 72, {"causal": True, "window": (100, 0)}, "chunked"),
        ("FA4", 72, {}, "cudnn"),
        ("FA4", 96, {"causal": True, "window": (100, 0)}, "flash"),
        ("FA3", 72, {"causal": True, "window": (100, 0)}, "flash"),
        (None, 72, {"causal": True, "window": (100, 0)}, "flash"),
    ],
)
def test_head_dims_where_pytorch_s_flash_attention_is_another_s(
    impl: str | None, D: int, options: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: impl, raising=False)
    found = chosen(options, {"D": D, "D_v": D})
    assert found.name == name
    assert ("is FA4, which is called with head dims of 32s alone" in found.reason) == (name == "chunked")


def test_a_pytorch_without_others_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl", raising=False)
    assert chosen({"causal": True, "window": (100, 0)}, {"D": 72, "D_v": 72}).name == "flash"


@pytest.mark.parametrize(("version", "name"), [(None, "flash"), (90900, "flash"), (91000, "cudnn")])
def test_which_cudnn_has_head_dim_256(version: int | None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    q = torch.zeros(1, 1, 64, 256, dtype=torch.bfloat16)
    assert dense.backward_kernel(dense_problem(q, q, q)).name == name


def test_deterministic_algorithms_are_kept() -> None:
    q = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert dense.backward_kernel(dense_problem(q, q, q)).name == "flash"
    finally:
        torch.use_deterministic_algorithms(before)
    assert dense.backward_kernel(dense_problem(q, q, q)).name == "cudnn"


def test_explain_names_the_backward_pass() -> None:
    q = torch.zeros(1, 2, 40, 64, dtype=torch.bfloat16)
    assert ha.explain(q, q, q).backward is None
    learned = q.clone().requires_grad_()
    found = ha.explain(learned, q, q, causal=True)
    assert found.backward == "cuDNN's 16-bit kernel, through PyTorch: the fastest that takes the mask"
    assert f"  backward: {found.backward}" in str(found)
    assert "pack_q" in found.launches
    assert not found.quantises_q
    assert "no kernel that is called has a softcap" in str(ha.explain(learned, q, q, softcap=5.0))
