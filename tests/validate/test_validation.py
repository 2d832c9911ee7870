"""Every bad input raises before any launch, with a message that names argument, value and what is accepted."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn.integrations.diffusers import Backend
from helion_attn.integrations.torch_flash import flash_attention
from helion_attn.integrations.transformers import attention_forward
from helion_attn.types import Layout
from helion_attn.validate import dense
from helpers.cases import IN_E4M3
from helpers.no_ops import Launched
from helpers.refused import assert_raises

pytestmark = pytest.mark.usefixtures("no_launch")


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good() -> dict[str, Any]:
    """Arguments that pass every check: B = 2, H = 4, H_kv = 2, M = 5, N = 7, D = 32."""
    return {"q": zeros(2, 4, 5, 32), "k": zeros(2, 2, 7, 32), "v": zeros(2, 2, 7, 32)}


def test_good_arguments_reach_the_launch() -> None:
    with pytest.raises(Launched):
        ha.quantize(**good())
    with pytest.raises(Launched):
        ha.attention(**good())


Bad = dict[str, Any]

#: What is wrong: (arguments that replace good ones, exception, what the message names).
TENSORS: dict[str, tuple[Bad, type[Exception], list[str]]] = {
    "q_not_a_tensor": ({"q": [1.0]}, TypeError, ["q is a list", "torch.Tensor"]),
    "k_none": ({"k": None}, TypeError, ["k is a NoneType", "torch.Tensor"]),
    "v_numpy": ({"v": zeros(2, 2, 7, 32).float().numpy()}, TypeError, ["v is a ndarray", "torch.Tensor"]),
    "q_rank_3": ({"q": zeros(4, 5, 32)}, ValueError, ["q has shape (4, 5, 32)", "4 dimensions, [B, H, S, D]"]),
    "v_rank_5": ({"v": zeros(2, 2, 7, 32, 1)}, ValueError, ["v has shape (2, 2, 7, 32, 1)", "4 dimensions"]),
    "rank_in_bshd": ({"q": zeros(2, 5), "layout": "bshd"}, ValueError, ["q has shape (2, 5)", "[B, S, H, D]"]),
    "q_int": (
        {"q": zeros(2, 4, 5, 32, dtype=torch.int32)},
        TypeError,
        ["q has dtype torch.int32", "bfloat16, float16"],
    ),
    "q_double": ({"q": zeros(2, 4, 5, 32, dtype=torch.float64)}, TypeError, ["q has dtype torch.float64", "float32"]),
    "k_e4m3": (
        {"k": zeros(2, 2, 7, 32).to(torch.float8_e4m3fn)},
        TypeError,
        ["k has dtype torch.float8_e4m3fn", "one of bfloat16, float16, float32", "helion_attn.pack"],
    ),
    "mixed_dtypes": (
        {"v": zeros(2, 2, 7, 32, dtype=torch.float16)},
        TypeError,
        ["v has dtype torch.float16 and q has torch.bfloat16", "the same"],
    ),
    "float32_with_strided_columns": (
        {name: x.float() for name, x in good().items()} | {"v": zeros(2, 2, 32, 7, dtype=torch.float32).mT},
        ValueError,
        ["v is float32 with strides", "the last must be 1"],
    ),
    "all_meta": (
        {name: x.to("meta") for name, x in good().items()},
        NotImplementedError,
        ["q is on meta", "CUDA", "compute capability 9.0", "CPU"],
    ),
    "k_meta": ({"k": zeros(2, 2, 7, 32, device="meta")}, ValueError, ["k is on meta and q on cpu", "same device"]),
    "k_batch": ({"k": zeros(3, 2, 7, 32)}, ValueError, ["k has batch size 3 and q has 2", "equal"]),
    "v_batch": ({"v": zeros(1, 2, 7, 32)}, ValueError, ["v has batch size 1 and q has 2", "equal"]),
    "heads_not_a_multiple": (
        {"k": zeros(2, 3, 7, 32), "v": zeros(2, 3, 7, 32)},
        ValueError,
        ["q has 4 heads and k has 3", "multiple"],
    ),
    "more_kv_heads": (
        {"k": zeros(2, 8, 7, 32), "v": zeros(2, 8, 7, 32)},
        ValueError,
        ["q has 4 heads and k has 8", "multiple"],
    ),
    "kv_heads_differ": ({"v": zeros(2, 4, 7, 32)}, ValueError, ["v has 4 heads and k has 2", "equal"]),
    "kv_lengths_differ": ({"v": zeros(2, 2, 8, 32)}, ValueError, ["v has length 8 and k has 7", "equal"]),
    "kv_lengths_differ_in_bshd": (
        {"q": zeros(2, 5, 4, 32), "k": zeros(2, 7, 2, 32), "v": zeros(2, 8, 2, 32), "layout": "bshd"},
        ValueError,
        ["v has length 8 and k has 7", "equal"],
    ),
    "k_head_dim": ({"k": zeros(2, 2, 7, 64)}, ValueError, ["k has head dim 64 and q has 32", "equal"]),
    "v_head_dim": ({"v": zeros(2, 2, 7, 1025)}, ValueError, ["v has head dim 1025", "16..1024"]),
    "head_dim_1025": (
        {name: zeros(1, 1, 3, 1025) for name in "qkv"},
        ValueError,
        ["q has head dim 1025", "16..1024"],
    ),
    "head_dim_15": ({name: zeros(1, 1, 3, 15) for name in "qkv"}, ValueError, ["q has head dim 15", "16..1024"]),
    "no_batch": (
        {"q": zeros(0, 4, 5, 32), "k": zeros(0, 2, 7, 32), "v": zeros(0, 2, 7, 32)},
        ValueError,
        ["q has shape (0, 4, 5, 32)", "at least 1"],
    ),
    "no_queries": ({"q": zeros(2, 4, 0, 32)}, ValueError, ["q has shape (2, 4, 0, 32)", "at least 1"]),
    "no_keys": (
        {"k": zeros(2, 2, 0, 32), "v": zeros(2, 2, 0, 32)},
        ValueError,
        ["k has shape (2, 2, 0, 32)", "at least 1"],
    ),
    "no_kv_heads": (
        {"k": zeros(2, 0, 7, 32), "v": zeros(2, 0, 7, 32)},
        ValueError,
        ["k has shape (2, 0, 7, 32)", "at least 1"],
    ),
    "layout": ({"layout": "sbhd"}, ValueError, ["layout is 'sbhd'", "('bhsd', 'bshd')"]),
    "layout_none": ({"layout": None}, ValueError, ["layout is None", "('bhsd', 'bshd')"]),
    "recipe_string": ({"recipe": "best"}, ValueError, ["recipe is 'best'", "helion_attn.Recipe"]),
    "recipe_class": ({"recipe": ha.Recipe}, TypeError, ["recipe is <class", "helion_attn.Recipe"]),
    "hadamard_of_odd_head_dim": (
        {name: zeros(1, 2, 3, 81) for name in "qkv"} | {"recipe": ha.ACCURATE},
        ValueError,
        ["hadamard=True and the head dim is 81", "even"],
    ),
    "q_requires_grad": (
        {"q": zeros(2, 4, 5, 32).requires_grad_()},
        RuntimeError,
        ["q requires grad", "torch.no_grad() or detach q"],
    ),
    "v_requires_grad": (
        {"v": zeros(2, 2, 7, 32).requires_grad_()},
        RuntimeError,
        ["v requires grad", "torch.no_grad() or detach v"],
    ),
}

#: Likewise, for what both `attention` and `attention_quantized` take.
OPTIONS: dict[str, tuple[Bad, type[Exception], list[str]]] = {
    "sm_scale_inf": ({"sm_scale": float("inf")}, ValueError, ["sm_scale is inf", "0..2**64"]),
    "sm_scale_nan": ({"sm_scale": float("nan")}, ValueError, ["sm_scale is nan", "0..2**64"]),
    "sm_scale_large": ({"sm_scale": 1e39}, ValueError, ["sm_scale is 1e+39", "0..2**64"]),
    "sm_scale_negative": ({"sm_scale": -0.125}, ValueError, ["sm_scale is -0.125", "0..2**64"]),
    "causal_string": ({"causal": "no"}, TypeError, ["causal is 'no'", "a bool"]),
    "causal_tensor": (
        {"causal": torch.ones(9, 9, dtype=torch.bool)},
        TypeError,
        ["causal is a Tensor of torch.bool (9, 9); it must be a bool"],
    ),
    "causal_none": ({"causal": None}, TypeError, ["causal is None", "a bool"]),
    "return_lse_string": ({"return_lse": "no"}, TypeError, ["return_lse is 'no'", "a bool"]),
    "sm_scale_bool": ({"sm_scale": True}, TypeError, ["sm_scale is a bool", "float"]),
    "sm_scale_string": ({"sm_scale": "0.1"}, TypeError, ["sm_scale is a str", "float"]),
    "sm_scale_tensor": ({"sm_scale": torch.tensor(0.1)}, TypeError, ["sm_scale is a Tensor", "float"]),
    "window_int": ({"window": 5}, TypeError, ["window is 5", "(left, right)"]),
    "window_tensor": ({"window": torch.ones(99)}, TypeError, ["window is a Tensor of torch.float32 (99,); it must"]),
    "window_of_one": ({"window": (5,)}, TypeError, ["window is (5,)", "(left, right)"]),
    "window_of_floats": ({"window": (5.0, 1)}, TypeError, ["window is (5.0, 1)", "two ints"]),
    "window_of_bools": ({"window": (True, 1)}, TypeError, ["window is (True, 1)", "two ints"]),
    "window_none_left": ({"window": (None, 0)}, TypeError, ["window is (None, 0)", "two ints"]),
    "window_left": ({"window": (-2, 0)}, ValueError, ["window is (-2, 0)", "-1, for unlimited, or in 0..2**63 - 1"]),
    "window_of_65_bits": ({"window": (2**63, 0)}, ValueError, ["window is (9223372036854775808, 0)", "2**63 - 1"]),
    "window_right": ({"window": (0, -2)}, ValueError, ["window is (0, -2)", "-1, for unlimited, or in"]),
    "window_right_causal": ({"window": (0, -2), "causal": True}, ValueError, ["window is (0, -2)"]),
    "softcap_zero": ({"softcap": 0.0}, ValueError, ["softcap is 0.0", "None, for no cap", "2**-40..2**23"]),
    "softcap_negative": ({"softcap": -50.0}, ValueError, ["softcap is -50.0", "2**-40..2**23"]),
    "softcap_inf": ({"softcap": float("inf")}, ValueError, ["softcap is inf", "2**-40..2**23"]),
    "softcap_nan": ({"softcap": float("nan")}, ValueError, ["softcap is nan", "2**-40..2**23"]),
    "softcap_string": ({"softcap": "50"}, TypeError, ["softcap is a str", "float"]),
    "softcap_bool": ({"softcap": True}, TypeError, ["softcap is a bool", "float"]),
    "softcap_tensor": ({"softcap": torch.tensor(50.0)}, TypeError, ["softcap is a Tensor", "float"]),
    "sinks_list": ({"sinks": [0.0] * 4}, TypeError, ["sinks is a list", "torch.Tensor"]),
    "sinks_int": ({"sinks": torch.zeros(4).int()}, TypeError, ["sinks has dtype torch.int32", "float32"]),
    "sinks_double": ({"sinks": torch.zeros(4).double()}, TypeError, ["sinks has dtype torch.float64", "float32"]),
    "sinks_of_kv_heads": ({"sinks": torch.zeros(2)}, ValueError, ["sinks has shape (2,)", "(4,)", "query head"]),
    "sinks_of_heads_and_batch": ({"sinks": torch.zeros(2, 4)}, ValueError, ["sinks has shape (2, 4)", "(4,)"]),
    "sinks_meta": ({"sinks": torch.zeros(4, device="meta")}, ValueError, ["sinks is on meta", "same device"]),
    "out_dtype_int": ({"out_dtype": torch.int8}, TypeError, ["out_dtype is torch.int8", "bfloat16", "float8_e4m3fn"]),
    "out_dtype_double": ({"out_dtype": torch.float64}, TypeError, ["out_dtype is torch.float64", "float32"]),
    "out_dtype_e5m2": (
        {"out_dtype": torch.float8_e5m2},
        TypeError,
        ["out_dtype is torch.float8_e5m2", "float8_e4m3fn"],
    ),
    "out_dtype_string": ({"out_dtype": "bfloat16"}, TypeError, ["out_dtype is bfloat16", "one of bfloat16"]),
}


@pytest.mark.parametrize(
    ("function", "what"),
    [
        *((ha.quantize, what) for what in TENSORS),
        *((ha.attention, what) for what in TENSORS if not what.endswith("requires_grad")),  # it has gradients
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_bad_tensors(function: Callable[..., object], what: str) -> None:
    bad, error, parts = TENSORS[what]
    assert_raises(function, good() | bad, error, parts)


@pytest.mark.parametrize("what", OPTIONS)
def test_bad_options(what: str) -> None:
    bad, error, parts = OPTIONS[what]
    assert_raises(ha.attention, good() | bad, error, parts)
    assert_raises(ha.attention_quantized, {"qkv": packed()} | bad, error, parts)


def test_sinks_that_require_grad() -> None:
    with pytest.raises(RuntimeError, match=r"sinks requires grad; .* torch\.no_grad\(\) or detach sinks"):
        ha.attention_quantized(packed(), sinks=torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("function", [ha.quantize, ha.attention], ids=lambda f: f.__name__)
def test_misspelt_option(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="is_causal"):
        function(**good(), is_causal=True)


#: Shapes of q and k, and the layout that they are given with; whether heads and lengths look exchanged.
SWAPPED: dict[str, tuple[tuple[int, ...], tuple[int, ...], Layout, bool]] = {
    "bshd_as_bhsd": ((1, 200, 4, 32), (1, 200, 4, 32), "bhsd", True),
    "bshd_as_bhsd_gqa": ((1, 400, 8, 32), (1, 400, 2, 32), "bhsd", True),
    "bhsd_as_bshd": ((1, 4, 200, 32), (1, 4, 200, 32), "bshd", True),
    "bhsd": ((1, 4, 200, 32), (1, 4, 200, 32), "bhsd", False),
    "bshd": ((1, 200, 4, 32), (1, 200, 4, 32), "bshd", False),
    "few_tokens": ((1, 12, 7, 32), (1, 12, 7, 32), "bhsd", False),
    "many_heads": ((1, 128, 4, 32), (1, 128, 4, 32), "bhsd", False),
    "lengths_that_are_no_heads": ((1, 200, 5, 32), (1, 200, 4, 32), "bhsd", False),
    "first_steps_of_decoding": ((1, 32, 1, 32), (1, 8, 3, 32), "bhsd", False),
    "short_prompt_of_few_kv_heads": ((1, 32, 9, 32), (1, 8, 9, 32), "bhsd", False),
}


@pytest.mark.once
@pytest.mark.parametrize("function", [ha.attention, ha.quantize, ha.check, ha.explain], ids=lambda f: f.__name__)
@pytest.mark.parametrize("what", SWAPPED)
def test_more_heads_than_tokens_warn_once(
    what: str, function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the line of the call, with an advice that this function takes."""
    q, k, layout, swapped = SWAPPED[what]
    monkeypatch.setattr(dense, "_SAID", set())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            # `explain` launches nothing on the CPU.
            with contextlib.nullcontext() if function is ha.explain else pytest.raises(Launched):
                function(zeros(*q), zeros(*k), zeros(*k), layout=layout)
    assert len(said) == swapped
    other = "bshd" if layout == "bhsd" else "bhsd"
    for warning in said:
        assert warning.category is ha.SwappedLayoutWarning
        assert warning.filename == __file__
        assert str(warning.message).endswith(f"pass layout='{other}' to {function.__name__}")


def test_layouts_that_are_fixed_warn_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "_SAID", set())
    q = zeros(1, 200, 4, 32)
    swapped = q.transpose(1, 2)
    calls: list[Callable[[], object]] = [
        lambda: ha.flash_attn_func(swapped, swapped, swapped),
        lambda: ha.scaled_dot_product_attention(q, q, q),
        lambda: flash_attention(q, q, q, recipe=ha.BALANCED),
        lambda: attention_forward(torch.nn.Module(), q, q, q, None, is_causal=False),
        lambda: Backend(ha.BALANCED)(swapped, swapped, swapped),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls:
            with pytest.raises(Launched):
                call()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([zeros(3, 2, 32), zeros(5, 2, 32)], layout=layout)
    for function in (ha.attention, ha.quantize, ha.check, ha.explain, ha.flash_attn_func):
        parts = ["q is a nested tensor", "attention_varlen", "q.values()", "q.offsets()"]
        assert_raises(function, dict.fromkeys("qkv", nested), TypeError, parts)
    names = dict.fromkeys(("query", "key", "value"), nested)
    assert_raises(ha.scaled_dot_product_attention, names, TypeError, ["query is a nested tensor", "fallback"])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(dense, "_CAPABLE", set())
    arguments = {name: fake_cuda(*x.shape, dtype=x.dtype) for name, x in good().items()}
    parts = ["q is on cuda:0", f"{capability[0]}.{capability[1]}", "9.0 (H100, H200)"]
    for _ in range(2):
        assert_raises(ha.attention, arguments, NotImplementedError, parts)


@pytest.mark.gpu
def test_device_mix() -> None:
    arguments = good() | {"k": zeros(2, 2, 7, 32, device="cuda")}
    assert_raises(ha.attention, arguments, ValueError, ["k is on cuda:0 and q on cpu", "same device"])


def packed() -> ha.QuantizedQKV:
    """A `QuantizedQKV` of zeros, with smooth_k; B = 2, H = 4, H_kv = 2, M = 5, N = 7, D = 32."""
    from helion_attn.configs import tile_config

    tile = tile_config(32, has_right=False)
    e4m3 = torch.float8_e4m3fn
    return ha.QuantizedQKV(
        q8=zeros(8, 1, tile.bm, 32, dtype=e4m3),
        k8=zeros(4, 1, tile.bn, 32, dtype=e4m3),
        v8=zeros(4, 1, 32, tile.bn, dtype=e4m3),
        q_descale=torch.ones(2, 4, 1, tile.bm),
        k_descale=torch.ones(2, 2, 1),
        v_descale=torch.ones(2, 2, 32),
        v_mean=torch.zeros(2, 2, 32),
        k_mean=torch.zeros(2, 2, 32),
        channel_factors=None,
        lse_shift=torch.zeros(2, 4, 1, tile.bm),
        M=5,
        N=7,
        D=32,
        D_v=32,
        dtype=torch.bfloat16,
        layout="bhsd",
        recipe=replace(IN_E4M3, smooth_k=True),
    )


def test_good_quantized_reaches_the_launch() -> None:
    with pytest.raises(Launched):
        ha.attention_quantized(packed())


FIELDS = ("q8", "k8", "v8", "q_descale", "k_descale", "v_descale", "v_mean", "k_mean", "lse_shift")


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("how", ["dtype", "shape", "rank", "strides", "device", "type"])
def test_broken_quantized(field: str, how: str) -> None:
    x: torch.Tensor = getattr(packed(), field)
    broken = {
        "dtype": x.to(torch.bfloat16),
        "shape": torch.cat([x, x]),
        "rank": x.unsqueeze(0),
        "strides": torch.stack([x, x], -1)[..., 0],
        "device": x.to("meta"),
        "type": None,
    }[how]
    changed: dict[str, Any] = {field: broken}
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        ha.attention_quantized(dataclasses.replace(packed(), **changed))
    # Of a q_descale of another shape it may also say that q8 does not fit it.
    named = f"{field}|q8" if (field, how) == ("q_descale", "shape") else field
    assert re.match(rf"({named}) (is|has) ", str(raised.value)), raised.value


@pytest.mark.parametrize("field", [field for field in FIELDS if getattr(packed(), field).dtype == torch.float32])
def test_quantized_that_requires_grad(field: str) -> None:
    good = packed()
    learned: dict[str, Any] = {field: getattr(good, field).requires_grad_()}
    with pytest.raises(RuntimeError, match=f"{field} requires grad"):
        ha.attention_quantized(dataclasses.replace(good, **learned))


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("M", 1000, ["q8", "M=1000"]),
        ("M", 0, ["M", "0"]),
        ("N", 1000, ["k8", "N=1000"]),
        ("N", 0, ["N", "0"]),
        ("D", 64, ["D", "64"]),
        ("D", 1025, ["D", "1025", "1024"]),
        ("D", 0, ["D", "0", "16"]),
        ("layout", "sbhd", ["layout is 'sbhd'", "('bhsd', 'bshd')"]),
        ("dtype", torch.int8, ["dtype", "torch.int8", "bfloat16"]),
    ],
)
def test_quantized_with_wrong_sizes(field: str, value: Any, parts: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        ha.attention_quantized(dataclasses.replace(packed(), **{field: value}))
    for part in parts:
        assert part in str(raised.value)


def test_quantized_with_heads_not_a_multiple() -> None:
    good = packed()
    three = {name: getattr(good, name)[:3].clone() for name in ("k8", "v8")}
    one_batch = {name: getattr(good, name)[:1].clone() for name in ("q_descale", "lse_shift")}
    channels = {name: torch.ones(1, 3, 32) for name in ("v_descale", "v_mean", "k_mean")}
    changed: dict[str, Any] = (
        three | one_batch | channels | {"q8": good.q8[:4].clone(), "k_descale": torch.ones(1, 3, 1)}
    )
    with pytest.raises(ValueError, match=r"4 heads.*3.*multiple"):
        ha.attention_quantized(dataclasses.replace(good, **changed))


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        (replace(IN_E4M3, qk_dtype=torch.int8, smooth_k=True), "q8"),
        (replace(IN_E4M3, pv_dtype=torch.float8_e5m2, smooth_k=True), "v8"),
        (replace(IN_E4M3, promote_every=1, hadamard=True, smooth_k=True), None),
        (IN_E4M3, None),
    ],
    ids=["int8", "e5m2", "rotated", "not_smoothed"],
)
def test_quantized_with_another_recipe(recipe: ha.Recipe, named: str | None) -> None:
    with pytest.raises(ValueError if named else Launched) as raised:
        ha.attention_quantized(dataclasses.replace(packed(), recipe=recipe))
    assert named is None or str(raised.value).startswith(f"{named} is ")


@pytest.mark.parametrize("value", [None, (1, 2, 3), torch.zeros(1)], ids=["none", "tuple", "tensor"])
def test_not_quantized(value: Any) -> None:
    with pytest.raises(TypeError, match=r"qkv is a \w+; it must be a helion_attn.QuantizedQKV"):
        ha.attention_quantized(value)
    with pytest.raises(TypeError, match=r"qkv is a \w+; it must be a helion_attn.QuantizedQKV"):
        ha.dequantize(value)
