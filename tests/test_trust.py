"""What programs do around a call: threads, streams, graphs, a full memory, tensors beyond 2**31 elements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import fake_cuda
from helion_attn.kernels.lib.strided import common_unit
from helion_attn.preprocess import pack_kv, recentre, sample
from helpers.cases import PRESETS, Tensors, make_case
from helpers.offline import compilations, without

Pair = tuple[torch.Tensor, torch.Tensor]

#: Calls that share a device: other kernels, and the same kernel on other data.
Calls = list[Callable[[], Pair]]


def calls(device: str, length: int) -> Calls:
    def attend(seed: int, causal: bool, recipe: ha.Recipe, D: int) -> Callable[[], Pair]:
        qkv = make_qkv("biased_v", 2, 4, 2, length, length + 30, D, device=device, seed=seed)
        return lambda: ha.attention(*qkv, causal=causal, recipe=recipe, return_lse=True)

    return [attend(0, True, ha.BALANCED, 56), attend(1, True, ha.BALANCED, 56), attend(2, False, ha.ACCURATE, 40)]


def assert_equal(actual: Pair, expected: Pair) -> None:
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


def test_two_threads(device: str) -> None:
    """From the first call on, so that threads also compile at once."""
    several = calls(device, 100)
    start = threading.Barrier(len(several))

    def repeat(call: Callable[[], Pair]) -> list[Pair]:
        start.wait()
        results = [call() for _ in range(5)]
        if device == "cuda":
            torch.cuda.synchronize()
        return results

    with ThreadPoolExecutor(len(several)) as pool:
        all_results = list(pool.map(repeat, several))
    for call, results in zip(several, all_results, strict=True):
        expected = call()
        for result in results:
            assert_equal(result, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current() -> None:
    """As layers of a model that is spread over GPUs have it."""
    qkv = make_qkv("biased_v", 2, 4, 2, 200, 230, 64, device="cuda:1")
    on_0 = tuple(x.to("cuda:0") for x in qkv)
    assert torch.cuda.current_device() == 0
    for recipe in PRESETS.values():
        out, expected = (ha.attention(*given, recipe=recipe, causal=True) for given in (qkv, on_0))
        assert out.device == qkv[0].device
        assert torch.equal(out.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_two_streams() -> None:
    """Calls that overlap on the device, each on a stream of its own."""
    several = calls("cuda", 2000)
    expected = [call() for call in several]
    streams = [torch.cuda.Stream() for _ in several]
    torch.cuda.synchronize()
    results: list[list[Pair]] = [[] for _ in several]
    for _ in range(20):
        for call, stream, to in zip(several, streams, results, strict=True):
            with torch.cuda.stream(stream):
                to.append(call())
    torch.cuda.synchronize()
    for of_call, answer in zip(results, expected, strict=True):
        for result in of_call:
            assert_equal(result, answer)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_graph_is_replayed_on_new_data(recipe: ha.Recipe) -> None:
    """With everything that has an argument of its own; `test_ops.py` has the plain case."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> Pair:
        options = {"window": (50, 3), "softcap": 9.0, "recipe": recipe, "layout": "bshd"}
        return ha.attention(q, k, v, sinks=sinks, return_lse=True, **options)  # type: ignore[call-overload]

    def inputs(seed: int) -> list[torch.Tensor]:
        qkv = make_qkv("outlier", 1, 4, 2, 90, 90, 64, device="cuda", seed=seed)
        return [*(x.transpose(1, 2) for x in qkv), torch.arange(4, device="cuda") - float(seed)]

    static = inputs(0)
    attend(*static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*static)
    for seed in (1, 2, 3):
        for x, new in zip(static, inputs(seed), strict=True):
            x.copy_(new)
        graph.replay()
        assert_equal(captured, attend(*inputs(seed)))


@pytest.fixture
def full_memory() -> Iterator[Callable[[], list[torch.Tensor]]]:
    """Call it to take what is left to this process; a limit of its own leaves the rest to others on the device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 2**30
    blocker: list[torch.Tensor] = []

    def fill() -> list[torch.Tensor]:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit / total)
        size = 2**28
        while size >= 512:
            try:
                blocker.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                size //= 2
        return blocker

    try:
        yield fill
    finally:
        blocker.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True], ids=["first_call", "later_call"])
@pytest.mark.parametrize("step", ["quantize", "attention_quantized"])
def test_out_of_memory_leaves_nothing_broken(
    step: str, warm: bool, full_memory: Callable[[], list[torch.Tensor]]
) -> None:
    # A head dim of its own for each, so that the first call is one.
    D = 16 + 8 * ["quantize", "attention_quantized"].index(step) + 4 * warm
    qkv = make_qkv("randn", 1, 8, 8, 4000, 4000, D, device="cuda")
    # The first call of this step, not of the one before it.
    packed = ha.quantize(*qkv) if warm or step == "attention_quantized" else None

    def call() -> torch.Tensor:
        if step == "quantize":
            return ha.quantize(*qkv).q8
        assert packed is not None
        return ha.attention_quantized(packed)

    if warm:
        call()
    blocker = full_memory()
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            call()
    blocker.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    call()
    case = make_case((qkv[0][:, :, -64:], *qkv[1:]))
    case.assert_within_budget(ha.attention(*qkv)[:, :, -64:])


#: More elements than 32 bits count.
MANY = 2**31 + 2**20


def bf16_randn(*shape: int, seed: int) -> torch.Tensor:
    """Made in pieces: N(0, 1) of `MANY` elements in fp32 would take another 8 GB."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for piece in x.view(-1).split(2**28):
        piece.copy_(torch.randn(piece.numel(), device="cuda", generator=generator))
    return x


def assert_heads_right(qkv: Tensors, recipe: ha.Recipe, heads: list[tuple[int, int]], rows: slice) -> None:
    """`attention` on everything, compared on rows of (batch, head) pairs; H = H_kv, and no descale spans heads."""
    q, k, v = qkv
    out, lse = ha.attention(q, k, v, recipe=recipe, return_lse=True)
    for b, h in heads:
        at = (slice(b, b + 1), slice(h, h + 1))
        case = make_case((q[at][:, :, rows], k[at], v[at]), recipe=recipe)
        case.assert_within_budget(out[at][:, :, rows])
        case.assert_lse_within_budget(lse[at][:, :, rows])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("D", [64, 256])
def test_many_queries(D: int, recipe: ha.Recipe) -> None:
    """Q, its packed copy and the output are beyond 2**31 elements."""
    H = 4
    M = -(-MANY // (H * D))
    q = bf16_randn(1, H, M, D, seed=0)
    k, v = (bf16_randn(1, H, 300, D, seed=seed) for seed in (1, 2))
    assert_heads_right((q, k, v), recipe, [(0, 0), (0, H - 1)], slice(M - 200, M))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_many_keys(recipe: ha.Recipe) -> None:
    """K, V and their packed copies are."""
    H, D = 64, 128
    N = -(-MANY // (H * D))
    q = bf16_randn(1, H, 70, D, seed=0)
    k, v = (bf16_randn(1, H, N, D, seed=seed) for seed in (1, 2))
    assert_heads_right((q, k, v), recipe, [(0, 0), (0, H - 1)], slice(0, 70))


def far_apart(far: int, dim: int, seed: int) -> torch.Tensor:
    """[2, 2, 100, 64] of which the second half along `dim`, 0 or 1, starts `far` elements after the first."""
    strides = [2 * 100 * 64, 100 * 64, 64, 1]
    strides[dim] = far
    extent = 1 + sum((n - 1) * stride for n, stride in zip((2, 2, 100, 64), strides, strict=True))
    view = torch.empty(extent, dtype=torch.bfloat16, device="cuda").as_strided((2, 2, 100, 64), strides)
    return view.copy_(bf16_randn(2, 2, 100, 64, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize("far", [2**30, 2**31 - 8, 2**31, 2**31 + 1, 2**32 + 64], ids=hex)
@pytest.mark.parametrize("dim", [0, 1], ids=["batches", "heads"])
def test_strides_beyond_32_bits(dim: int, far: int) -> None:
    q, k, v = (far_apart(far, dim, seed) for seed in range(3))
    assert_heads_right((q, k, v), ha.BALANCED, [(0, 0), (0, 1), (1, 0), (1, 1)], slice(0, 100))


@pytest.mark.parametrize(("far", "unit"), [(2**31 - 8, 8), (2**31, 1), (2**32, 1)], ids=["fits", "2**31", "2**32"])
def test_strides_are_not_multiplied_in_32_bits(far: int, unit: int) -> None:
    """What the test above needs, seen without a GPU: a stride that needs 64 bits reaches the kernel as it is."""

    def view(stride: int) -> torch.Tensor:
        return fake_cuda(1 + stride + 100 * 64, dtype=torch.bfloat16).as_strided((1, 2, 100, 64), (8, stride, 64, 1))

    assert common_unit(view(far), view(64), view(64)) == unit
    assert common_unit(view(far).narrow(1, 0, 1), view(64), view(64)) == 8
    with compilations() as seen, without(sample, pack_kv, recentre):
        ha.quantize(view(far), view(6400), view(6400))
    (kernel,) = {id(kernel): kernel for kernel in seen.compiled}.values()
    assert kernel.metadata.name == "_helion_pack_q"
    assert ("%q_h_step: i64" in kernel.asm["ttir"]) == (far >= 2**31)
