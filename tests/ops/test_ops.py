"""The custom ops as PyTorch sees them: schemas, fakes, torch.compile, CUDA graphs, and a light import."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn import ops
from helion_attn.backward.dense import DequantizeRowsArgs, dequantize_rows
from helion_attn.compiler import runners
from helion_attn.configs import scheduling
from helion_attn.preprocess import close_pages
from helion_attn.problem import MergeArgs
from helion_attn.types import Layout
from helpers.cases import LADDER, RECIPES
from helpers.recorder import Recorder

CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def qkv_on(device: str, length: int = 70) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_qkv("randn", 1, 4, 2, length, 2 * length, 48, device=device)


def rope_on(device: str, positions: int = 140, dtype: torch.dtype = torch.bfloat16) -> ha.Rope:
    angles = torch.arange(positions, device=device).unsqueeze(1) * 100.0 ** -torch.linspace(0, 1, 16, device=device)
    return ha.Rope(angles.cos().to(dtype), angles.sin().to(dtype))


def e4m3_on(device: str) -> dict[str, Any]:
    """Arguments of `pack`."""
    qkv: dict[str, Any] = {name: x.to(torch.float8_e4m3fn) for name, x in zip("qkv", qkv_on(device), strict=True)}
    return qkv | {f"{name}_descale": torch.tensor(0.5, device=device) for name in "qkv"}


def kv_on(device: str) -> tuple[torch.Tensor, ...]:
    """Queries, new keys and values, a block table, and the keys that an empty cache has."""
    q, k, v = make_qkv("randn", 2, 4, 2, 3, 30, 48, device=device)
    return q, k, v, torch.tensor([[1], [0]], dtype=torch.int32, device=device), torch.zeros_like(q[:, 0, 0, 0]).int()


def varlen_on(device: str) -> tuple[torch.Tensor, ...]:
    """Q, K and V of one packed sequence, and `cu_seqlens`."""
    q, k, v = (x[0].transpose(0, 1) for x in qkv_on(device))
    return q, k, v, *(torch.tensor([0, len(x)], dtype=torch.int32, device=device) for x in (q, k))


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache, filled and attended to."""
    cache = ha.paged_kv_cache(2, k.size(1), k.size(3), device=q.device, k_mean=k.float().mean((0, 2)))
    ha.append_kvcache(cache, k, v, table, seqlens)
    return ha.attention_kvcache(q, cache, table, seqlens + k.size(2), num_splits=2, return_lse=True)


def top_pages(q: torch.Tensor, k: torch.Tensor, table: torch.Tensor, seqlens: torch.Tensor) -> None:
    """Pages of an empty cache."""
    cache = ha.paged_kv_cache(2, k.size(1), k.size(3), device=q.device)
    ha.pages.top(q, ha.pages.empty_means(cache), cache, table, seqlens + 30, pages=3)


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, seqlens: torch.Tensor) -> torch.Tensor:
    """A cache, filled by two sequences of a packed batch, whose last 3 tokens have queries of their own."""
    cache = ha.paged_kv_cache(2, k.size(1), k.size(3), device=q.device)
    for x in (cache.k8, cache.v8):
        x.view(torch.uint8).zero_()
    for x in (cache.k_descale, cache.v_descale):
        x.fill_(1.0)
    q, k, v = (x[:, :, -3:].transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    ends = torch.tensor([0, 3, 6], dtype=torch.int32, device=q.device)
    return ha.kv_cache.step(q, k, v, cache, ends, table, seqlens + 3)


def over_ranks(device: str, recipe: ha.Recipe = ha.BALANCED) -> None:
    """Over a group of one rank, and what merges the results of two."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        rope = rope_on(device)
        ha.distributed.attention(*qkv_on(device), causal=True, recipe=recipe, rope=rope, return_lse=True)
    finally:
        dist.destroy_process_group()
    results, lse = torch.randn(2, 1, 4, 9, 48, device=device), torch.randn(2, 1, 4, 9, device=device)
    out, merged = torch.empty_like(results[0]), torch.empty_like(lse[0])
    ops.merge_results(MergeArgs(results, lse, torch.zeros(4, device=device), out, merged, bshd=False))


def fields(packed: ha.QuantizedQKV) -> list[torch.Tensor]:
    """The tensors of a `QuantizedQKV`."""
    return [value for value in vars(packed).values() if isinstance(value, torch.Tensor)]


def test_every_op_is_recorded(device: str) -> None:
    with Recorder() as recorder:
        ha.attention(*qkv_on(device))
        ha.attention_quantized(ha.quantize(*qkv_on(device)))
        ha.pack(**e4m3_on(device))
        ha.hadamard(qkv_on(device)[0])
        ha.BlockMask.from_dense(torch.ones(4, 4, dtype=torch.bool, device=device))
        ha.masks.top_blocks(*qkv_on(device)[:2], keep=0.5)
        decode(*kv_on(device))
        step(*kv_on(device))
        q, k, _v, *tables = kv_on(device)
        top_pages(q, k, *tables)
        ha.attention_varlen(*varlen_on(device))
        over_ranks(device)
        q, k, v = (x.requires_grad_() for x in qkv_on(device))
        ha.attention(q, k, v).sum().backward()
        packed = ha.quantize(*qkv_on(device))
        dequantize_rows(
            DequantizeRowsArgs(packed, packed.M, packed.N, packed.D, packed.D_v, packed.recipe, q.dtype, bshd=False)
        )
        q, k, v, *ends = varlen_on(device)
        ha.attention_varlen(q.requires_grad_(), k, v, *ends).sum().backward()
    registered = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("helion_attn::")]
    assert sorted(recorder.calls) == sorted(registered)


def test_opcheck_of_bits_of_masks(device: str) -> None:
    """Of blocks that are all seen in part: the bits of others are undefined."""
    dense = torch.arange(2 * 200 * 301, device=device).view(2, 1, 200, 301) % 3 > 0
    with Recorder() as recorder:
        ha.BlockMask.from_dense(dense)
    assert len(recorder.calls) == 2
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_top_blocks(device: str) -> None:
    with Recorder() as recorder:
        ha.masks.top_blocks(*qkv_on(device)[:2], keep=0.5)
    assert len(recorder.calls) == 2
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_top_pages(device: str) -> None:
    q, k, _v, *tables = kv_on(device)
    with Recorder() as recorder:
        top_pages(q, k, *tables)
    ((op, arguments),) = recorder.calls.values()
    torch.library.opcheck(op, arguments, test_utils=CHECKS)


OPCHECKED = {name: RECIPES[name] for name in (*LADDER, "q_block", "e5m2") if name != "bf16"}


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize(
    ("with_rope", "strided"), [(False, False), (True, True)], ids=["no_rope-contiguous", "rope-strided"]
)
@pytest.mark.parametrize("recipe", OPCHECKED.values(), ids=OPCHECKED)
def test_opcheck(recipe: ha.Recipe, with_rope: bool, strided: bool, device: str) -> None:
    q, k, v = (x.transpose(1, 2).contiguous() if strided else x for x in qkv_on(device))
    rope = rope_on(device) if with_rope else None
    layout: Layout = "bshd" if strided else "bhsd"
    with Recorder() as recorder:
        ha.attention(q, k, v, causal=strided, recipe=recipe, rope=rope, layout=layout)
        ha.attention_quantized(ha.quantize(q, k, v, recipe=recipe, rope=rope, layout=layout), causal=strided)
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_block_masks(device: str) -> None:
    q, k, v = qkv_on(device)
    seen = torch.arange(q.size(2) * k.size(2), device=device).view(q.size(2), k.size(2)) % 3 > 0
    mask = ha.BlockMask.from_dense(seen)
    with Recorder() as recorder:
        ha.attention(q, k, v, block_mask=mask)
        ha.attention_quantized(ha.quantize(q, k, v), block_mask=mask)
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_positions(device: str) -> None:
    at = torch.arange(140, device=device)
    rope = dataclasses.replace(rope_on(device), interleaved=True, q_positions=at[:70], k_positions=at.int())
    with Recorder() as recorder:
        ha.quantize(*qkv_on(device), rope=rope)
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_pack(device: str) -> None:
    with Recorder() as recorder:
        ha.pack(**e4m3_on(device))
    ((op, arguments),) = recorder.calls.values()
    torch.library.opcheck(op, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("recipe", [ha.BALANCED, ha.ACCURATE, ha.BF16], ids=["balanced", "accurate", "bf16"])
def test_opcheck_over_ranks(recipe: ha.Recipe, device: str) -> None:
    with Recorder() as recorder:
        over_ranks(device, recipe)
    assert len(recorder.calls) == 4
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("with_rope", [False, True], ids=["no_rope", "rope"])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)
def test_opcheck_of_kv_cache(with_rope: bool, recipe: ha.Recipe, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a page of them does not get stays as memory was.
    made = close_pages.empty_open_pages
    monkeypatch.setattr(
        close_pages, "empty_open_pages", lambda *given: tuple(x.new_zeros(x.shape) for x in made(*given))
    )
    q, k, v, table, seqlens = kv_on(device)
    k_mean = None if recipe == ha.FAST else k.float().mean((0, 2))
    cache = ha.paged_kv_cache(2, 2, 48, device=device, recipe=recipe, k_mean=k_mean)
    for x in (cache.k8, cache.v8):
        x.view(torch.uint8).zero_()
    for x in (cache.k_descale, cache.v_descale):
        x.fill_(1.0)
    with Recorder() as recorder:
        ha.append_kvcache(cache, k, v, table, seqlens, rope=rope_on(device) if with_rope else None)
        ha.attention_kvcache(q, cache, table, seqlens + 30)
    for op, arguments in recorder.calls.values():
        torch.library.opcheck(op, arguments, test_utils=CHECKS)


def test_opcheck_of_a_step(device: str) -> None:
    with Recorder() as recorder:
        step(*kv_on(device))
    ((op, arguments),) = recorder.calls.values()
    torch.library.opcheck(op, arguments, test_utils=CHECKS)


@pytest.mark.once  # the kernel does not run
def test_kernels_take_views_that_do_not_know_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helion refuses a tensor together with a view of it, as packed tensors would be that somebody has copied."""
    packed = ha.quantize(*make_qkv("randn", 1, 1, 1, 3, 5, 512))
    copied = dataclasses.replace(packed, q8=packed.q8.clone(), k8=packed.k8.clone(), v8=packed.v8.clone())
    assert copied.k8.view(-1)._is_view()
    given: list[Any] = []
    monkeypatch.setattr(runners.Interpreted, "__call__", lambda self, *args: given.extend(args))
    ha.attention_quantized(copied)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    assert len(tensors) > 10
    assert not any(x._is_view() for x in tensors)


def test_torch_compile_of_kv_cache(device: str) -> None:
    torch._dynamo.reset()
    given = kv_on(device)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(*given), decode(*given), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)
def test_torch_compile_of_appending_to_a_given_cache(backend: str, recipe: ha.Recipe, device: str) -> None:
    """The cache is an input that a graph writes, and reads after that."""
    torch._dynamo.reset()
    q, k, v, table, seqlens = kv_on(device)
    rope = rope_on(device)

    def step(cache: ha.PagedKVCache, k: torch.Tensor, v: torch.Tensor, seqlens: torch.Tensor) -> torch.Tensor:
        ha.append_kvcache(cache, k * 2, v, table, seqlens, rope=rope)
        return ha.attention_kvcache(q, cache, table, seqlens + k.size(2), softcap=20.0) + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    k_mean = None if recipe == ha.FAST else k.float().mean((0, 2))
    cache, expected = (ha.paged_kv_cache(2, 2, 48, device=device, recipe=recipe, k_mean=k_mean) for _ in range(2))
    names = ("k8", "v8", "k_descale", "v_descale")
    for x in (cache, expected):
        for name in names:
            getattr(x, name).view(torch.uint8).zero_()
    for begin, end in ((0, 20), (20, 30)):
        new = (k[:, :, begin:end], v[:, :, begin:end], seqlens + begin)
        assert torch.equal(compiled(cache, *new), step(expected, *new))
        for name in names:
            assert torch.equal(getattr(cache, name).view(torch.uint8), getattr(expected, name).view(torch.uint8)), name
    assert cache.k_descale[1, :, :30].count_nonzero() == 60


@pytest.mark.parametrize("recipe", LADDER.values(), ids=LADDER)
def test_ops_neither_write_nor_return_their_inputs(recipe: ha.Recipe, device: str) -> None:
    """What opcheck's schema test would say; it has no arithmetic for e4m3."""
    with Recorder() as recorder:
        ha.attention(*qkv_on(device), recipe=recipe, rope=rope_on(device))
        ha.attention_quantized(ha.quantize(*qkv_on(device), recipe=recipe, rope=rope_on(device)))
        ha.pack(**e4m3_on(device))
    assert len(recorder.calls) == 4
    for op, arguments in recorder.calls.values():
        inputs = [x for x in arguments if isinstance(x, torch.Tensor)]
        before = [x.float().clone() for x in inputs]
        results = op(*arguments)
        for x, x_before in zip(inputs, before, strict=True):
            assert torch.equal(x.float(), x_before)
        # Without smooth_k two results are empty and have no storage.
        storages = [x.untyped_storage().data_ptr() for x in (*inputs, *results) if x.numel()]
        assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("recipe", OPCHECKED.values(), ids=OPCHECKED)
@pytest.mark.parametrize("out_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_fakes_give_shapes_and_dtypes(
    out_dtype: torch.dtype | None, recipe: ha.Recipe, layout: Layout, device: str
) -> None:
    """Fields of `quantize` and results of `attention`, faked, have the shape, stride, dtype and device of the real."""

    def results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        packed = ha.quantize(q, k, v, layout=layout, recipe=recipe)
        return [*fields(packed), *ha.attention_quantized(packed, out_dtype=out_dtype, return_lse=True)]

    real = qkv_on(device)
    given = [x.transpose(1, 2) for x in real] if layout == "bshd" else list(real)
    with FakeTensorMode() as mode:
        fakes = results(*(mode.from_tensor(x) for x in given))
    for fake, expected in zip(fakes, results(*given), strict=True):
        assert fake.shape == expected.shape
        assert fake.stride() == expected.stride()
        assert fake.dtype == expected.dtype
        assert fake.device == expected.device


def attention_and_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = ha.attention(q * 2, k, v, causal=True, sm_scale=0.1, return_lse=True)
    return out + 1, lse


def assert_compiles(function: Callable[..., Any], device: str, **options: Any) -> None:
    torch._dynamo.reset()
    qkv = qkv_on(device)
    compiled = torch.compile(function, fullgraph=True, **options)
    for actual, expected in zip(compiled(*qkv), function(*qkv), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_torch_compile(dynamic: bool, device: str) -> None:
    assert_compiles(attention_and_lse, device, backend="aot_eager", dynamic=dynamic)


SCALES: dict[str, Callable[[torch.Tensor], float | None]] = {
    "default": lambda q: None,
    "from_a_size": lambda q: 2 * q.size(-1) ** -0.5,
}


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_torch_compile_of_scales(scale: Callable[[torch.Tensor], float | None], dynamic: bool, device: str) -> None:
    """With dynamic=True they are symbols."""

    def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ha.attention(q * 2, k, v, sm_scale=scale(q), softcap=3.0, return_lse=True)

    assert_compiles(scaled, device, backend="aot_eager", dynamic=dynamic)


def test_torch_compile_once_for_all_lengths(device: str) -> None:
    torch._dynamo.reset()
    graphs = 0

    def count(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(attention_and_lse, fullgraph=True, dynamic=True, backend=count)
    for length in (40, 70, 111):
        qkv = qkv_on(device, length)
        for actual, expected in zip(compiled(*qkv), attention_and_lse(*qkv), strict=True):
            assert torch.equal(actual, expected)
    assert graphs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_with_inductor(mode: str) -> None:
    torch._dynamo.reset()
    qkv = qkv_on("cuda")
    compiled = torch.compile(attention_and_lse, fullgraph=True, mode=mode)
    for _ in range(3):
        out, lse = compiled(*qkv)
        expected, expected_lse = attention_and_lse(*qkv)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("splits", [1, 2])
def test_cuda_graph(splits: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "key_splits", lambda *_: splits)
    qkv, others = qkv_on("cuda"), make_qkv("biased_v", 1, 4, 2, 70, 140, 48, device="cuda", seed=1)
    ha.attention(*qkv, causal=causal)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = ha.attention(*qkv, causal=causal, return_lse=True)
    for x, other in zip(qkv, others, strict=True):
        x.copy_(other)
    graph.replay()
    expected, expected_lse = ha.attention(*others, causal=causal, return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.gpu
def test_cuda_graph_of_decoding() -> None:
    """Lengths are the device's: a graph that appends and attends is replayed step after step."""
    q, k, v, table, seqlens = kv_on("cuda")
    k_mean = k.float().mean((0, 2))
    cache, expected = (ha.paged_kv_cache(2, 2, 48, device="cuda", k_mean=k_mean) for _ in range(2))

    def step(cache: ha.PagedKVCache, new: tuple[torch.Tensor, torch.Tensor], seqlens: torch.Tensor) -> torch.Tensor:
        ha.append_kvcache(cache, *new, table, seqlens)
        return ha.attention_kvcache(q, cache, table, seqlens + 1, softcap=20.0)

    new = k[:, :, :1].clone(), v[:, :, :1].clone()
    step(cache, new, seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(cache, new, seqlens)
    for i in range(5):
        seqlens.fill_(i)
        for x, source in zip(new, (k, v), strict=True):
            x.copy_(source[:, :, i : i + 1])
        graph.replay()
        assert torch.equal(out, step(expected, new, seqlens))


@pytest.mark.gpu
def test_side_stream() -> None:
    qkv = qkv_on("cuda")
    expected = ha.attention(*qkv)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = ha.attention(*qkv)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_import_needs_no_helion_even_to_validate() -> None:
    code = (
        "import sys, torch, helion_attn as ha\n"
        "x = torch.zeros(1, 1, 4, 8)\n"
        "try:\n    ha.attention(x, x, x)\n"
        "except ValueError:\n    print('helion' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def counted(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_flops_are_counted(device: str) -> None:
    """As PyTorch counts its own attention: both products of all scores, hidden or not."""
    q, k, v = make_qkv("randn", 2, 4, 2, 30, 50, 64, D_v=32, device=device)
    expected = 2 * 2 * 4 * 30 * 50 * (64 + 32)
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert counted(lambda: torch.nn.functional.scaled_dot_product_attention(q, keys, values)) == expected
    packed = ha.quantize(q, k, v)
    assert counted(lambda: ha.attention(q, k, v, causal=True)) == expected
    assert counted(lambda: ha.attention_quantized(packed)) == expected
    assert counted(lambda: ha.quantize(q, k, v)) == 0
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert counted(lambda: ha.attention(*fakes)) == expected


def test_flops_over_ranks_are_counted(device: str) -> None:
    q, k, v = qkv_on(device)
    expected = 2 * q.size(0) * q.size(1) * q.size(2) * k.size(2) * (q.size(3) + v.size(3))
    assert counted(lambda: over_ranks(device)) == expected


def test_flops_of_sequences_are_counted(device: str) -> None:
    """Of packed sequences and of a cache, those of each sequence."""
    q, k, v = (x[0].transpose(0, 1) for x in make_qkv("randn", 1, 4, 2, 90, 120, 64, device=device))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 80, 80, 85], [0, 20, 50, 115]))
    assert counted(lambda: ha.attention_varlen(q, k, v, cu_q, cu_k)) == 4 * 4 * 64 * (80 * 20 + 5 * 65)
    cache = ha.paged_kv_cache(4, 2, 64, device=device)
    cache.k_descale.fill_(1), cache.v_descale.fill_(1)
    table = torch.arange(4, dtype=torch.int32, device=device).view(2, 2)
    seqlens = torch.tensor([130, 7], dtype=torch.int32, device=device)
    queries = q[:6].transpose(0, 1).unflatten(1, (2, 3)).movedim(1, 0)
    assert counted(lambda: ha.attention_kvcache(queries, cache, table, seqlens)) == 4 * 4 * 64 * 3 * (130 + 7)


def test_all_is_there() -> None:
    assert sorted(ha.__all__) == dir(ha)
    assert {"attention", "attention_quantized", "quantize", "pack", "dequantize", "QuantizedQKV", "Rope"} <= set(
        ha.__all__
    )
    for name in ha.__all__:
        assert getattr(ha, name) is not None
