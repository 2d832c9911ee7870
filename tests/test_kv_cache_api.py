"""The KV cache's arguments, and `flash_attn_with_kvcache`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations.flash_attn_arguments import KVCACHE_RULES
from helion_attn.validate.kv_cache import CONSTANTS
from helpers.no_ops import Launched, NoOps
from helpers.paged import append_all, make_cache
from helpers.refused import assert_raises, refused


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def good() -> dict[str, Any]:
    """Arguments that pass every check, of append_kvcache; B = 2, H_kv = 2, L = 3, D = 32, D_v = 80."""
    return {
        "cache": ha.paged_kv_cache(4, 2, 32, D_v=80, k_mean=zeros(2, 32), channel_factors=zeros(2, 32)),
        "k": zeros(2, 2, 3, 32),
        "v": zeros(2, 2, 3, 80),
        "block_table": zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": zeros(2, dtype=torch.int32),
    }


def good_attention() -> dict[str, Any]:
    """Likewise of attention_kvcache; H = 4, M = 1."""
    arguments = good() | {"q": zeros(2, 4, 1, 32)}
    del arguments["k"], arguments["v"]
    return arguments


@pytest.mark.usefixtures("no_launch")
def test_good_arguments_reach_the_launch() -> None:
    with pytest.raises(Launched):
        ha.append_kvcache(**good())
    with pytest.raises(Launched):
        ha.attention_kvcache(**good_attention())


def test_the_format() -> None:
    cache = ha.paged_kv_cache(4, 2, 20, D_v=80)
    assert cache.page_size == 128
    assert (cache.k8.shape, cache.v8.shape) == ((4, 2, 128, 32), (4, 2, 128, 128))
    assert cache.k_descale.shape == cache.v_descale.shape == (4, 2, 128)
    # V's channels are the M of a WGMMA.
    assert ha.paged_kv_cache(1, 1, 16).v8.shape == (1, 1, 64, 128)
    # Above 256, as many bytes in half as many keys.
    for D, D_v, padded in ((257, 512, (512, 512)), (512, 80, (512, 128)), (64, 300, (64, 512))):
        cache = ha.paged_kv_cache(1, 1, D, D_v=D_v)
        assert (cache.k8.shape, cache.v8.shape) == ((1, 1, 64, padded[0]), (1, 1, padded[1], 64))


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [
        ((0, 2, 32), ValueError, ["num_pages is 0", "1.."]),
        ((True, 2, 32), TypeError, ["num_pages is a bool"]),
        ((4, 2**25, 32), ValueError, ["H_kv is 33554432"]),
        ((4, 2, 8), ValueError, ["D is 8", "16..512"]),
        ((4, 2, 513), ValueError, ["D is 513", "16..512"]),
        ((4, 2, 64.0), TypeError, ["D is a float"]),
    ],
    ids=str,
)
def test_bad_sizes(arguments: tuple[Any, ...], error: type[Exception], parts: list[str]) -> None:
    make: Any = ha.paged_kv_cache
    with pytest.raises(error) as raised:
        make(*arguments)
    assert all(part in str(raised.value) for part in parts)
    with pytest.raises(ValueError, match="D_v is 576"):
        ha.paged_kv_cache(4, 2, 64, D_v=576)


@pytest.mark.parametrize("recipe", ["balanced", ha.BALANCED, ha.Recipe()], ids=["name", "preset", "equal"])
def test_the_format_of_int8_keys(recipe: Any) -> None:
    constants: dict[str, Any] = dict.fromkeys(CONSTANTS, zeros(2, 20))
    cache = ha.paged_kv_cache(4, 2, 20, D_v=80, recipe=recipe, **constants)
    fast = ha.paged_kv_cache(4, 2, 20, D_v=80, recipe="FAST", **constants)
    assert (cache.k8.dtype, fast.k8.dtype) == (torch.int8, torch.float8_e4m3fn)
    for field in FIELDS:
        x, other = getattr(cache, field), getattr(fast, field)
        assert x.shape == other.shape
        assert x.dtype == other.dtype or field == "k8"


@pytest.mark.parametrize(
    ("recipe", "error", "parts"),
    [
        ("accurate", ValueError, ["recipe is 'accurate'", "'fast' or 'balanced'"]),
        (ha.HYBRID, ValueError, ["recipe is HYBRID", "'fast' or 'balanced'"]),
        (ha.Recipe(qk_dtype=torch.float8_e4m3fn), ValueError, ["recipe is Recipe(qk_dtype", "'fast' or 'balanced'"]),
        ("auto", ValueError, ["recipe is 'auto'"]),
        (torch.int8, TypeError, ["recipe is torch.int8"]),
    ],
    ids=str,
)
def test_bad_recipes(recipe: Any, error: type[Exception], parts: list[str]) -> None:
    with pytest.raises(error) as raised:
        ha.paged_kv_cache(4, 2, 64, recipe=recipe)
    assert all(part in str(raised.value) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_format_of_a_mean(dtype: torch.dtype) -> None:
    given = torch.arange(40, dtype=dtype).view(2, 20)
    mean = ha.paged_kv_cache(4, 2, 20, k_mean=given).k_mean
    assert mean is not None
    assert (mean.dtype, tuple(mean.shape)) == (torch.float32, (2, 32))
    assert torch.equal(mean[:, :20], given.float())
    assert mean[:, 20:].count_nonzero() == 0
    assert ha.paged_kv_cache(4, 2, 20).k_mean is None


def test_factors_become_powers_of_two() -> None:
    """The nearest by their logarithms; 1 of what is none, and of padding."""
    given = [1.0, 0.3, 5.0, 6.0, 2.0**-40, 1e30, 0.0, -4.0, float("nan"), float("inf")]
    factors = ha.paged_kv_cache(4, 2, 20, channel_factors=torch.tensor([given + 10 * [1.4]] * 2)).channel_factors
    assert factors is not None
    assert (factors.dtype, tuple(factors.shape)) == (torch.float32, (2, 32))
    expected = [1.0, 0.25, 4.0, 8.0, 2.0**-32, 2.0**32, 1.0, 1.0, 1.0, 1.0]
    assert factors.tolist() == [expected + 22 * [1.0]] * 2
    assert ha.paged_kv_cache(4, 2, 20).channel_factors is None


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize(
    ("x", "error", "parts"),
    [
        (zeros(2, 20), ValueError, ["has shape (2, 20)", "(2, 64), H_kv and D"]),
        (zeros(64), ValueError, ["has shape (64,)"]),
        (zeros(2, 64, dtype=torch.int32), TypeError, ["is", "int32", "floating-point"]),
        (0.0, TypeError, ["is", "None or a floating-point tensor"]),
        (torch.zeros(2, 64, requires_grad=True), RuntimeError, ["requires grad"]),
    ],
)
def test_bad_constants(x: Any, error: type[Exception], parts: list[str], name: str) -> None:
    parts = [f"{name} {parts[0]}", *parts[1:]]
    assert_raises(ha.paged_kv_cache, {"num_pages": 4, "H_kv": 2, "D": 64, name: x}, error, parts)


@pytest.mark.parametrize(
    ("bad", "error", "parts"),
    [
        ({"q": zeros(1, 3, 5, 32)}, ValueError, ["q has shape (1, 3, 5, 32)", "k (1, 2, 5, 32)", "multiple of k's"]),
        ({"q": zeros(1, 4, 5, 64)}, ValueError, ["q has shape (1, 4, 5, 64)", "head dim"]),
        ({"q": zeros(2, 4, 5, 32)}, ValueError, ["q has shape (2, 4, 5, 32)", "batch"]),
        ({"q": zeros(1, 4, 5, 32).float()}, TypeError, ["float32", "bfloat16"]),
        ({"rotary": 31}, ValueError, ["rotary is 31", "even int in 0..32"]),
        ({"rotary": 34}, ValueError, ["rotary is 34"]),
        ({"rotary": 32.0}, ValueError, ["rotary is 32.0"]),
        ({"interleaved": "no"}, TypeError, ["interleaved is 'no'"]),
        ({"positions": 0}, ValueError, ["positions is 0"]),
        ({"layout": "hbsd"}, ValueError, ["layout is 'hbsd'"]),
    ],
)
def test_bad_samples(bad: dict[str, Any], error: type[Exception], parts: list[str]) -> None:
    arguments = {"q": zeros(1, 4, 5, 32), "k": zeros(1, 2, 5, 32)} | bad
    assert_raises(ha.cache_constants, arguments, error, parts)


FIELDS = ("k8", "v8", "k_descale", "v_descale", *CONSTANTS)

Bad = dict[str, Any]

TABLES: dict[str, tuple[Bad, type[Exception], list[str]]] = {
    "table_list": ({"block_table": [[0]]}, TypeError, ["block_table is a list", "int32"]),
    "table_int64": ({"block_table": zeros(2, 2, dtype=torch.int64)}, TypeError, ["block_table has dtype torch.int64"]),
    "table_batch": ({"block_table": zeros(3, 2, dtype=torch.int32)}, ValueError, ["block_table has shape (3, 2)", "2"]),
    "table_empty": ({"block_table": zeros(2, 0, dtype=torch.int32)}, ValueError, ["block_table has shape (2, 0)"]),
    "table_strided": (
        {"block_table": zeros(2, 2, dtype=torch.int32).T.contiguous().T},
        ValueError,
        ["block_table has strides (1, 2)", "contiguous"],
    ),
    "table_of_a_wider_one": (
        {"block_table": zeros(2, 5, dtype=torch.int32)[:, :2]},
        ValueError,
        ["block_table has strides (5, 1)", "contiguous"],
    ),
    "lengths_none": ({"cache_seqlens": None}, TypeError, ["cache_seqlens is a NoneType"]),
    "lengths_int": ({"cache_seqlens": 3}, TypeError, ["cache_seqlens is a int"]),
    "lengths_batch": ({"cache_seqlens": zeros(1, dtype=torch.int32)}, ValueError, ["cache_seqlens has shape (1,)"]),
    "lengths_device": (
        {"cache_seqlens": zeros(2, dtype=torch.int32).to("meta")},
        ValueError,
        ["cache_seqlens", "meta", "cpu"],
    ),
    "no_cache": ({"cache": None}, TypeError, ["cache is a NoneType", "PagedKVCache"]),
    "layout": ({"layout": "sbhd"}, ValueError, ["layout is 'sbhd'"]),
}

APPEND: dict[str, tuple[Bad, type[Exception], list[str]]] = TABLES | {
    "k_none": ({"k": None}, TypeError, ["k is a NoneType"]),
    "v_e4m3": ({"v": zeros(2, 2, 3, 80).to(torch.float8_e4m3fn)}, TypeError, ["v has dtype torch.float8_e4m3fn"]),
    "v_dtype": ({"v": zeros(2, 2, 3, 80).half()}, TypeError, ["v has dtype torch.float16 and k has torch.bfloat16"]),
    "k_head_dim": ({"k": zeros(2, 2, 3, 64)}, ValueError, ["k has head dim 64", "32"]),
    "v_head_dim": ({"v": zeros(2, 2, 3, 32)}, ValueError, ["v has head dim 32", "80"]),
    "v_length": ({"v": zeros(2, 2, 4, 80)}, ValueError, ["v has", "(2, 2, 4)", "(2, 2, 3)"]),
    "k_heads": ({"k": zeros(2, 4, 3, 32), "v": zeros(2, 4, 3, 80)}, ValueError, ["k has 4 heads", "2"]),
    "k_fp32_strided": (
        {"k": torch.zeros(2, 2, 3, 64)[..., ::2], "v": torch.zeros(2, 2, 3, 80)},
        ValueError,
        ["k is float32 with strides"],
    ),
    "k_grad": ({"k": zeros(2, 2, 3, 32).requires_grad_()}, RuntimeError, ["k requires grad"]),
    "rope": ({"rope": (1, 2)}, TypeError, ["rope is a tuple"]),
    "k_too_long": ({"k": zeros(2, 2, 257, 32), "v": zeros(2, 2, 257, 80)}, ValueError, ["257 keys", "2 pages of 128"]),
    "rope_grad": (
        {"rope": ha.Rope(zeros(9, 16).requires_grad_(), zeros(9, 16))},
        RuntimeError,
        ["rope.cos requires grad"],
    ),
    "rope_positions": (
        {"rope": ha.Rope(zeros(9, 16), zeros(9, 16), k_positions=torch.arange(3))},
        ValueError,
        ["rope.k_positions is given", "None"],
    ),
    "rope_width": ({"rope": ha.Rope(zeros(9, 17), zeros(9, 17))}, ValueError, ["rope.cos has shape (9, 17)"]),
    "rope_strided": (
        {"k": zeros(2, 2, 3, 64)[..., ::2], "rope": ha.Rope(zeros(9, 16), zeros(9, 16))},
        ValueError,
        ["k has a last-dimension stride of 2"],
    ),
}

ATTENTION: dict[str, tuple[Bad, type[Exception], list[str]]] = TABLES | {
    "q_rank": ({"q": zeros(2, 4, 32)}, ValueError, ["q has shape (2, 4, 32)"]),
    "q_head_dim": ({"q": zeros(2, 4, 1, 64)}, ValueError, ["q has head dim 64", "32"]),
    "q_heads": ({"q": zeros(2, 3, 1, 32)}, ValueError, ["q has 3 heads", "2"]),
    "causal": ({"causal": "yes"}, TypeError, ["causal is 'yes'"]),
    "num_splits": ({"num_splits": 0}, ValueError, ["num_splits is 0"]),
    "out_dtype": ({"out_dtype": torch.float8_e4m3fn}, TypeError, ["out_dtype is torch.float8_e4m3fn", "bfloat16"]),
    "softcap": ({"softcap": 0.0}, ValueError, ["softcap is 0.0", "None"]),
    "sinks": ({"sinks": zeros(3)}, ValueError, ["sinks has shape (3,)", "(4,)"]),
    "misspelt": ({"soft_cap": 1.0}, TypeError, ["soft_cap"]),
}


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("bad", "error", "parts"), APPEND.values(), ids=APPEND)
def test_bad_append(bad: Bad, error: type[Exception], parts: list[str]) -> None:
    assert_raises(ha.append_kvcache, good() | bad, error, parts)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(("bad", "error", "parts"), ATTENTION.values(), ids=ATTENTION)
def test_bad_attention(bad: Bad, error: type[Exception], parts: list[str]) -> None:
    assert_raises(ha.attention_kvcache, good_attention() | bad, error, parts)


def from_memory_of_others(x: torch.Tensor, past: int) -> torch.Tensor:
    """A copy of `x` that begins `past` bytes past a multiple of 16, and is not a view of a larger tensor."""
    memory = bytearray(x.nbytes + 32)
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    copy = torch.frombuffer(memory, dtype=torch.uint8, offset=-begin % 16 + past, count=x.nbytes)
    assert copy.storage_offset() == 0
    copy = copy.view(x.dtype).view(x.shape)
    return copy.copy_(x)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("how", ["dtype", "shape", "rank", "strides", "alignment", "address", "device", "type"])
def test_broken_cache(field: str, how: str) -> None:
    arguments = good_attention()
    x: torch.Tensor = getattr(arguments["cache"], field)
    broken = {
        "dtype": x.to(torch.float16),
        "shape": torch.cat([x, x], -1),
        "rank": x.unsqueeze(0),
        "strides": torch.stack([x, x], -1)[..., 0],
        "alignment": x.new_empty(x.numel() + 1)[1:].view(x.shape),
        "address": from_memory_of_others(x, 4),
        "device": x.to("meta"),
        "type": 1.0,
    }[how]
    changed: dict[str, Any] = {field: broken}
    arguments["cache"] = dataclasses.replace(arguments["cache"], **changed)
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"cache.{field} (is|has)") as raised:
        ha.attention_kvcache(**arguments)
    assert how != "type" or ("None or" in str(raised.value)) == (field in CONSTANTS)


def test_a_fake_cache_has_no_address() -> None:
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ha.attention_kvcache(**good_attention()).shape == (2, 4, 1, 80)


# --- flash_attn_with_kvcache ----------------------------------------------------------------------------------------

#: Its result is a tensor or a pair, by a bool.
flash_attn_with_kvcache: Any = ha.flash_attn_with_kvcache


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """140 and 20 keys in a cache; queries; 3 new keys and values. BHSD."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: ha.PagedKVCache
    table: torch.Tensor
    seqlens: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        return {
            "q": self.q.transpose(1, 2),
            "k_cache": self.cache.k8,
            "v_cache": self.cache.v8,
            "cache_seqlens": self.seqlens,
            "page_table": self.table,
            "k_descale": self.cache.k_descale,
            "v_descale": self.cache.v_descale,
            **{name: getattr(self.cache, name) for name in CONSTANTS},
        }


def make_problem(device: str) -> Problem:
    q, k, v = make_qkv("randn", 2, 4, 2, 3, 143, 64, device=device)
    k_mean = k.float().mean((0, 2)) + 1
    factors = torch.linspace(0.1, 9, 64, device=device).expand(2, -1)
    cache, table, seqlens = make_cache([140, 20], 2, 64, device=device, k_mean=k_mean, channel_factors=factors)
    append_all(cache, k, v, table, [140, 20])
    return Problem(q, k[:, :, 140:], v[:, :, 140:], cache, table, seqlens)


#: Made once, for tests that write nothing.
PROBLEM = functools.cache(lambda: make_problem("cpu"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_is_attention_of_the_same_arguments(causal: bool, device: str) -> None:
    problem = make_problem(device)
    out, lse = flash_attn_with_kvcache(
        **problem.arguments(), causal=causal, softmax_scale=0.3, window_size=(70, -1), softcap=20.0, num_splits=2,
        return_softmax_lse=True,
    )  # fmt: skip
    expected, expected_lse = ha.attention_kvcache(
        problem.q, problem.cache, problem.table, problem.seqlens, causal=causal, sm_scale=0.3,
        window=(70, -1), softcap=20.0, num_splits=2, return_lse=True,
    )  # fmt: skip
    assert out.shape == (2, 3, 4, 64)
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    tensor: torch.Tensor = flash_attn_with_kvcache(**problem.arguments(), causal=causal)
    assert tensor.shape == out.shape


def test_new_keys_are_appended_and_seen(device: str) -> None:
    problem = make_problem(device)
    new = {"k": problem.k.transpose(1, 2), "v": problem.v.transpose(1, 2)}
    out = flash_attn_with_kvcache(**problem.arguments(), **new, causal=True)
    other = make_problem(device)
    ha.append_kvcache(other.cache, other.k, other.v, other.table, other.seqlens)
    expected = ha.attention_kvcache(other.q, other.cache, other.table, other.seqlens + 3)
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(problem.cache.k8.view(torch.uint8), other.cache.k8.view(torch.uint8))
    assert torch.equal(problem.seqlens, other.seqlens), "cache_seqlens is not advanced"


def test_one_length_for_all(device: str) -> None:
    problem = make_problem(device)
    expected = flash_attn_with_kvcache(**problem.arguments() | {"cache_seqlens": torch.full_like(problem.seqlens, 20)})
    assert torch.equal(flash_attn_with_kvcache(**problem.arguments() | {"cache_seqlens": 20}), expected)


@pytest.mark.parametrize("rule", KVCACHE_RULES, ids=lambda rule: rule.argument)
@pytest.mark.usefixtures("no_launch")
def test_unsupported_arguments_raise(rule: Any) -> None:
    q = zeros(1, 1, 2, 64)
    with pytest.raises(NotImplementedError, match=f"flash_attn_with_kvcache: {rule.argument} is"):
        flash_attn_with_kvcache(q, q, q, **{rule.argument: refused(rule.argument)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1"),
        ({"page_table": None}, ValueError, "page_table is None"),
        ({"k_descale": None}, ValueError, "k_descale is None"),
        ({"k_mean": zeros(2, 64)}, ValueError, "^k_mean is"),
        ({"channel_factors": torch.ones(4, 64)}, ValueError, "^channel_factors is"),
        ({"v_descale": torch.ones(1, 2)}, ValueError, "^v_descale is"),
        ({"k_cache": zeros(5, 128, 2, 64)}, TypeError, "^k_cache is .*bfloat16.*paged_kv_cache.*append_kvcache"),
        ({"v_cache": zeros(3, 2, 64, 128)}, TypeError, "^v_cache is .*bfloat16.*paged_kv_cache.*append_kvcache"),
        ({"k_cache": zeros(5, 2, 99, 64, dtype=torch.float8_e4m3fn)}, ValueError, "^k_cache is"),
        ({"v_cache": zeros(5, 128, 2, 64, dtype=torch.float8_e4m3fn)}, ValueError, "^v_cache.size.2. is 2"),
        ({"k_descale": [1.0]}, TypeError, "^k_descale is a list"),
        ({"page_table": zeros(2, 2, dtype=torch.int64)}, TypeError, r"page_table\.to\(torch\.int32\)"),
        ({"block_table": zeros(2, 2)}, ValueError, "block_table and page_table are both given"),
        ({"alibi_slopes": zeros(4)}, NotImplementedError, "alibi_slopes is a Tensor"),
        ({"k": zeros(2, 999, 2, 64), "v": zeros(2, 999, 2, 64)}, ValueError, "the width of page_table"),
        ({"k": zeros(2, 3, 2, 64)}, ValueError, "v is None and k is not"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale is -1"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_arguments_raise_before_the_cache_is_written(
    options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = PROBLEM().arguments() | options
    monkeypatch.setattr(torch.ops, "helion_attn", NoOps())
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**arguments)
