"""`recipe="auto"`: which attention runs on both sides of a crossover, everywhere it is accepted, and what it gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import auto, plans
from helion_attn.api import dense_problem
from helion_attn.auto import FALLBACK_GPU, Crossover
from helion_attn.integrations import diffusers, transformers
from helion_attn.integrations.fused.qk_prologue import prefers_pytorch
from helion_attn.testing import relative_error
from helion_attn.validate.distributed import check_part

#: From which length on the default preset is taken here, of this many heads.
FROM, HEADS = 64, 2

#: The same where inputs require grad.
BOTH_FROM = 96

#: 16-bit attention rounds P and the output to bf16 or fp16, each by at most half of a bf16's last place.
ROUNDED_TWICE = 2 * 2.0**-9


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Crossovers at lengths that the interpreter can run."""
    for name, groups, length in (("CROSSOVERS", (1, 4), FROM), ("TRAINING_CROSSOVERS", (1,), BOTH_FROM)):
        gpus = sorted({row.gpu for row in getattr(auto, name)})
        kinds = itertools.product(gpus, (64, 128, 256), (False, True), groups)
        rows = tuple(Crossover(gpu, D, causal, group, HEADS, length) for gpu, D, causal, group in kinds)
        monkeypatch.setattr(auto, name, rows)
    auto._GPUS.clear()
    plans.forget()
    yield
    auto._GPUS.clear()
    plans.forget()


def of_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_both_sides_of_a_crossover(dtype: torch.dtype, layout: Any, causal: bool, device: str) -> None:
    for M, N, pytorchs in ((FROM - 1, FROM - 1, True), (FROM, FROM, False)):
        q, k, v = make_qkv("randn", 2, 4, 2, M, N, 64, dtype, device)
        given = (x.transpose(1, 2).contiguous() if layout == "bshd" else x for x in (q, k, v))
        q2, k2, v2 = given
        options: dict[str, Any] = {"causal": causal, "sm_scale": 0.2, "layout": layout}
        out = ha.attention(q2, k2, v2, recipe="auto", **options)
        assert out.is_contiguous()
        assert out.dtype == dtype
        balanced = ha.attention(q2, k2, v2, **options)
        bhsd = out.transpose(1, 2) if layout == "bshd" else out
        exact = ha.reference.attention(q, k, v, causal=causal, sm_scale=0.2)
        if pytorchs:
            assert torch.equal(bhsd, of_pytorch(q, k, v, is_causal=causal, scale=0.2))
            assert relative_error(bhsd, exact) < ROUNDED_TWICE < relative_error(balanced, out)
        else:
            assert torch.equal(out, balanced)
            assert ROUNDED_TWICE < relative_error(bhsd, exact) < 0.06
        assert (ha.explain(q2, k2, v2, recipe="auto", **options).launches == ()) == pytorchs


def test_causal_masks_of_other_lengths_are_bottom_right(device: str) -> None:
    """PyTorch's are top-left, but of a single query, which is the last one, nothing is hidden."""
    for M, N, pytorchs in ((20, 40, False), (40, 20, False), (1, 40, True), (1, 400, True)):
        q, k, v = make_qkv("randn", 1, 2, 2, M, N, 64, device=device)
        out = ha.attention(q, k, v, causal=True, recipe="auto")
        exact = ha.reference.attention(q, k, v, causal=True)
        assert relative_error(out, exact) < (ROUNDED_TWICE if pytorchs else 0.06)
        assert (
            torch.equal(out, of_pytorch(q, k, v)) if pytorchs else torch.equal(out, ha.attention(q, k, v, causal=True))
        )
        found = ha.explain(q, k, v, causal=True, recipe="auto")
        assert (found.tile is None) == pytorchs
        if not pytorchs:
            assert "not considered where the mask is causal and M is not N" in found.reasons[0]


def empty_qkv(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Of B, H, H_kv, M, N, D, and no memory: nothing is read."""
    B, H, H_kv, M, N, D = shape
    sizes = ((H, M), (H_kv, N), (H_kv, N))
    return [torch.empty(D, dtype=dtype).expand(B, heads, S, D) for heads, S in sizes]


def takes_pytorch(*shape: int, **options: Any) -> bool:
    return ha.explain(*empty_qkv(*shape), recipe="auto", **options).tile is None


def test_the_row_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Crossover(FALLBACK_GPU, D, causal, group, heads, length)
        for D, causal, group, heads, length in (
            *((64, False, 1, 8, 1000), (128, False, 1, 8, 2000), (256, False, 1, 8, None)),
            *((128, False, 1, 32, 500), (128, False, 4, 8, 300), (128, True, 1, 8, 4000)),
        )
    ]
    monkeypatch.setattr(auto, "CROSSOVERS", tuple(rows))
    for shape, length in (
        ((1, 8, 8, 64), 1000),
        ((1, 8, 8, 32), 1000),
        ((1, 8, 8, 72), 2000),
        ((1, 31, 31, 128), 2000),
        ((4, 8, 8, 128), 500),
        ((1, 8, 2, 128), 300),
        ((1, 8, 1, 128), 300),
        ((1, 9, 3, 128), 2000),
        # Half of the heads need twice the length.
        ((1, 4, 4, 128), 4000),
        ((1, 2, 2, 64), 4000),
    ):
        B, H, H_kv, D = shape
        assert takes_pytorch(B, H, H_kv, length - 1, 9999, D), shape
        assert takes_pytorch(B, H, H_kv, 9999, length - 1, D), shape
        assert not takes_pytorch(B, H, H_kv, length, length, D), shape
    assert takes_pytorch(1, 8, 8, 100_000, 100_000, 256)
    assert takes_pytorch(1, 8, 8, 3999, 3999, 128, causal=True)
    assert not takes_pytorch(1, 8, 8, 4000, 4000, 128, causal=True)


SHORT = (1, 2, 2, FROM // 2, FROM // 2, 64)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"return_lse": True}, "return_lse is given"),
        ({"window": (5, 5)}, "window is given"),
        ({"softcap": 20.0}, "softcap is given"),
        ({"sinks": torch.zeros(2)}, "sinks is given"),
        ({"num_splits": 1}, "num_splits is given"),
        ({"sm_scale": 0.0}, "sm_scale is 0"),
        ({"out_dtype": torch.float32}, "out_dtype is given"),
        ({"rope": ha.Rope(torch.randn(100, 32), torch.randn(100, 32))}, "rope is given"),
        ({"block_mask": ha.BlockMask.from_dense(torch.ones(32, 32, dtype=torch.bool))}, "block_mask is given"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_options_that_pytorch_does_not_have(options: dict[str, Any], why: str) -> None:
    q, k, v = make_qkv("randn", *SHORT)
    found = ha.explain(q, k, v, recipe="auto", **options)
    assert found.tile is not None
    assert found.reasons[0] == f"auto takes BALANCED: PyTorch's attention is not considered where {why}"
    assert found.reasons[1:] == ha.explain(q, k, v, **options).reasons


def test_tensors_that_pytorch_does_not_have() -> None:
    q, k, v = make_qkv("randn", *SHORT)
    strided = torch.cat([q, q], 3)[..., ::2]
    for given, why in (
        ((*empty_qkv(*SHORT, dtype=torch.float32),), "neither bf16 nor fp16"),
        ((q, k, v[..., :32]), "V's head dim is not Q's"),
        ((*empty_qkv(1, 2, 2, 20, 20, 320),), "the head dim is not a multiple of 8 up to 256"),
        ((*empty_qkv(1, 2, 2, 20, 20, 36),), "the head dim is not a multiple of 8 up to 256"),
        ((strided, k, v), "another stride than 1"),
    ):
        found = ha.explain(*given, recipe="auto")
        assert found.tile is not None
        assert why in found.reasons[0]


def test_explained() -> None:
    q, k, v = empty_qkv(1, 4, 2, 40, 50, 128)
    found = ha.explain(q, k, v, recipe="auto")
    assert (found.kernel, found.launches, found.device) == ("scaled_dot_product_attention", (), "the CPU")
    assert str(found) == (
        "scaled_dot_product_attention of PyTorch on the CPU\n"
        "  why: auto takes PyTorch's attention: with 4 heads the least of M and N is 40; BALANCED was faster from "
        f"length 64 on (D up to 128, full, 2 heads, 1 of a KV head, on {FALLBACK_GPU}); not measured on the CPU"
    )
    found = ha.explain(*empty_qkv(1, 1, 1, 128, 128, 64), recipe="auto", causal=True)
    assert "auto takes BALANCED: with 1 heads" in str(found)
    assert "and 1 heads need 2 times as much (D up to 64, causal" in str(found)


@pytest.mark.parametrize("group", [1, 2])
def test_gradients_have_a_table_of_their_own(group: int, device: str) -> None:
    """What is taken has its gradients, and without grad mode it goes by the other table."""
    for S, pytorchs in ((BOTH_FROM - 1, True), (BOTH_FROM, False)):
        qkv = [x.requires_grad_() for x in make_qkv("randn", 1, 2, 2 // group, S, S, 64, device=device)]
        balanced = ha.attention(*qkv, causal=True)
        expected = of_pytorch(*qkv, is_causal=True) if pytorchs else balanced
        out = ha.attention(*qkv, causal=True, recipe="auto")
        assert torch.equal(out, expected)
        found, of_expected = (torch.autograd.grad(x.float().square().sum(), qkv) for x in (out, expected))
        assert all(map(torch.equal, found, of_expected))
        reason = ha.explain(*qkv, causal=True, recipe="auto").reasons[0]
        assert f"BALANCED was faster from length {BOTH_FROM} on (both passes, D up to 64, causal, 2 heads" in reason
        with torch.no_grad():
            assert torch.equal(ha.attention(*qkv, causal=True, recipe="auto"), balanced)
        q, k, v = (x.detach() for x in qkv)
        assert torch.equal(ha.attention(q, k, v, causal=True, recipe="auto"), balanced)


def test_a_card_without_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("NVIDIA Unknown", FALLBACK_GPU, "NVIDIA H200") * 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: next(names))
    found = [auto.gpu_of_table(torch.device("cuda", i)) for i in (0, 1, 2, 0)]
    assert found == [FALLBACK_GPU, FALLBACK_GPU, "NVIDIA H200", FALLBACK_GPU]
    assert auto.gpu_of_table(torch.device("cpu")) == FALLBACK_GPU
    # The table of both passes may lack the card that others go by.
    rows = tuple(Crossover("NVIDIA H200", D, False, 1, HEADS, FROM) for D in (64, 128, 256))
    monkeypatch.setattr(auto, "TRAINING_CROSSOVERS", rows)
    assert {auto.gpu_of_table(torch.device("cuda", i), True) for i in (0, 1, 2)} == {"NVIDIA H200"}
    assert auto.gpu_of_table(torch.device("cpu"), True) == "NVIDIA H200"
    problem = dense_problem(*empty_qkv(1, 2, 2, 20, 20, 64))
    assert auto.reason(problem, {}, "NVIDIA Unknown").endswith(f"on {FALLBACK_GPU}); not measured on NVIDIA Unknown")
    assert auto.reason(problem, {}, FALLBACK_GPU).endswith(f"on {FALLBACK_GPU})")


# --- where it is accepted -------------------------------------------------------------------------


def by_transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, _ = transformers.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=True, recipe="auto")
    return out.transpose(1, 2)


def by_diffusers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = diffusers.Backend("auto")(q, k, v, is_causal=True)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def by_flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ha.flash_attn_func(q, k, v, causal=True, recipe="auto").transpose(1, 2)


def by_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = ha.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2).permute(0, 3, 2, 1, 4), causal=True, recipe="auto")
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)


def in_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Also inside of another, which does not take what the inner one leaves to PyTorch."""
    with ha.sdpa(recipe=ha.FAST), ha.sdpa(recipe="AUTO"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return ha.scaled_dot_product_attention(q, k, v, is_causal=True, recipe="auto")


@pytest.mark.parametrize(
    "attend",
    [by_transformers, by_diffusers, by_flash_attn, by_packed, in_context, by_function],
    ids=lambda f: f.__name__,
)
def test_integrations(attend: Callable[..., torch.Tensor], device: str) -> None:
    for S in (FROM - 1, FROM):
        q, k, v = make_qkv("randn", 1, 2, 2, S, S, 64, device=device)
        expected = ha.attention(q, k, v, causal=True) if S == FROM else of_pytorch(q, k, v, is_causal=True)
        assert torch.equal(attend(q, k, v), expected)


def test_elsewhere_it_raises() -> None:
    q, k, v = make_qkv("randn", *SHORT)
    ends = torch.tensor([0, FROM // 2], dtype=torch.int32)
    q3, k3, v3 = (x[0].transpose(0, 1) for x in (q, k, v))
    calls: tuple[Callable[[Any], Any], ...] = (
        lambda recipe: ha.quantize(q, k, v, recipe=recipe),
        lambda recipe: ha.attention_varlen(q3, k3, v3, ends, ends, recipe=recipe),
        lambda recipe: ha.flash_attn_varlen_func(q3, k3, v3, ends, ends, FROM, FROM, recipe=recipe),
        lambda recipe: check_part(q, k, v, recipe, "bhsd", None),
        lambda recipe: ha.check(q, k, v, recipe=recipe),
        lambda recipe: ha.plan(q, k, v, recipe=recipe),
        lambda recipe: ha.register_flash_attention(recipe=recipe),
        lambda recipe: ha.reference.fp8_attention(q, k, v, recipe=recipe),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"recipe is 'auto'; it must be one of 'fast', .* 'auto' is for attention"):
            call("auto")
        with pytest.raises(ValueError, match=r"recipe is 'autos'; .*'fast', .*Recipe, or 'auto' for dense attention$"):
            call("autos")


# --- what else a call is --------------------------------------------------------------------------


def test_errors_do_not_depend_on_the_length(device: str) -> None:
    for S in (FROM - 1, FROM):
        q, k, v = make_qkv("randn", 1, 2, 2, S, S, 64, device=device)
        for _ in range(2):
            assert ha.attention(q, k, v, recipe="auto").isfinite().all()  # kept now
        learned = q.clone().requires_grad_()
        ha.attention(learned, k, v, recipe="auto").sum().backward()
        assert learned.grad is not None
        assert learned.grad.isfinite().all()
        with torch.no_grad():
            assert ha.attention(q.clone().requires_grad_(), k, v, recipe="auto").isfinite().all()
        with pytest.raises(RuntimeError, match="q has a tangent"):
            torch.func.jvp(lambda x, k=k, v=v: ha.attention(x, k, v, recipe="auto"), (q,), (q,))
        with pytest.raises(ValueError, match="k has head dim 32 and q has 64"):
            ha.attention(q, k[..., :32], v, recipe="auto")
        with pytest.raises(TypeError, match="sm_scale is a list"):
            ha.attention(q, k, v, sm_scale=[1], recipe="auto")  # type: ignore[call-overload]


def test_an_option_without_a_hash_is_refused_in_words(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 20, 20, 64, device=device)
    refused: Any = [1.0]
    for call in (
        lambda: ha.attention(q, k, v, sm_scale=refused, recipe="auto"),
        lambda: prefers_pytorch(*(x.transpose(1, 2) for x in (q, k, v)), causal=False, sm_scale=refused),
    ):
        with pytest.raises(TypeError, match="sm_scale is a list"):
            call()


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic: bool, device: str) -> None:
    """The choice is a guard: a length on the other side compiles once more."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ha.attention(q, k, v, causal=True, recipe="auto")

    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    for S in (FROM - 24, FROM - 8, FROM, FROM + 30):
        q, k, v = make_qkv("randn", 1, 2, 2, S, S, 64, device=device)
        assert torch.equal(compiled(q, k, v), attend(q, k, v))
    if dynamic:
        assert counter.frame_count == 2


def test_torch_compile_with_gradients(device: str) -> None:
    """So it is by both passes' table, and whether a gradient is needed is a guard too."""
    torch._dynamo.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ha.attention(q, k, v, causal=True, recipe="auto")

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    for S in (BOTH_FROM - 8, BOTH_FROM):
        qkv = [x.requires_grad_() for x in make_qkv("randn", 1, 2, 2, S, S, 64, device=device)]
        found, expected = (torch.autograd.grad(f(*qkv).float().square().sum(), qkv) for f in (compiled, attend))
        assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            assert torch.equal(compiled(*qkv), ha.attention(*qkv, causal=True))


@pytest.mark.gpu
def test_cuda_graphs() -> None:
    for S in (FROM - 1, FROM):
        q, k, v = make_qkv("randn", 1, 2, 2, S, S, 64, device="cuda")
        expected = ha.attention(q, k, v, recipe="auto")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ha.attention(q, k, v, recipe="auto")
        graph.replay()
        assert torch.equal(out, expected)
