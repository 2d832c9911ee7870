"""Names of arguments and presets, how things print, and that `help` fits a screen."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typing_extensions import assert_type

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.names import NOT_HERE, OTHER_NAMES, WIDTH
from helion_attn.options import ScoreOptions
from helion_attn.types import RecipeName
from helpers.refused import assert_raises

QKV = make_qkv("randn", 1, 2, 2, 4, 4, 32, device="cpu")

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(ha.attention, ha.attention_quantized, ha.attention_varlen, ha.attention_kvcache, ha.append_kvcache),
    *(ha.quantize, ha.pack, ha.check, ha.explain),
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_names_of_others_are_answered_with_the_right_one(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    answered = {other: ours for other, ours in OTHER_NAMES.items() if ours in parameters and other not in parameters}
    assert answered
    for other, ours in answered.items():
        parts = [f"{function.__name__}()", f"no argument {other}"]
        if other != "sliding_window":
            parts.append(f"pass {ours}=0.5")
        assert_raises(function, {other: 0.5}, TypeError, parts)
    for other, remedy in NOT_HERE.items():
        if other not in parameters:
            assert_raises(function, {other: None}, TypeError, [f"no argument {other}: {remedy}"])
    for name in parameters:
        if len(name) > 3:
            misspelt = name[:2] + name[3:]
            assert_raises(function, {misspelt: 0}, TypeError, [f"no argument {misspelt}: did you mean {name}?"])
    assert_raises(function, {"something_else": 1}, TypeError, ["something_else; it has", *parameters])


def test_values_of_others_are_answered_with_the_right_one() -> None:
    for other, ours in (("HND", "bhsd"), ("NHD", "bshd"), ("bshd", "bshd")):
        for name in ("tensor_layout", "kv_layout"):
            assert_raises(ha.attention, {name: other}, TypeError, [f"pass layout='{ours}'"])


#: What a message says of a window in place of a sliding_window.
OWN_KEY = ": a sliding_window counts the query's own key"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"sliding_window": 4}, f"window=(3, 0){OWN_KEY}"),
        ({"sliding_window": 0}, f"window=(sliding_window - 1, 0){OWN_KEY}"),
        ({"sliding_window": True}, f"window=(sliding_window - 1, 0){OWN_KEY}"),
        ({"sliding_window": torch.tensor(4)}, f"window=(sliding_window - 1, 0){OWN_KEY}"),
        ({"window_size": (4, 0)}, "window=(4, 0)"),
        ({"tensor_layout": "sbhd"}, "layout='sbhd'"),
        ({"tensor_layout": 1}, "layout=1"),
        ({"is_causal": True}, "causal=True"),
        ({"query": QKV[0]}, "q=..."),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_to_pass_has_the_value(given: dict[str, Any], passed: str) -> None:
    """A number, a string or a tuple is said again, and of a tensor three dots."""
    ((name, _),) = given.items()
    ours = passed.partition("=")[0]
    with pytest.raises(TypeError) as raised:
        ha.attention(**given)
    assert str(raised.value) == f"attention() has no argument {name}, which is {ours} here: pass {passed}"


@pytest.mark.parametrize("size", [1, 3])
def test_a_sliding_window_and_what_to_pass_see_the_same_keys(size: int) -> None:
    """Row i sees the keys j of i - size < j <= i, as transformers has it."""
    attention: Any = ha.attention
    with pytest.raises(TypeError) as raised:
        attention(*QKV, sliding_window=size)
    window = ast.literal_eval(str(raised.value).partition("window=")[2].removesuffix(OWN_KEY))
    q, k, v = (x.double() for x in make_qkv("randn", 1, 1, 1, 6, 6, 32, device="cpu"))
    distance = torch.arange(6).unsqueeze(1) - torch.arange(6)
    seen = (distance >= 0) & (distance < size)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert torch.allclose(ha.reference.attention(q, k, v, window=window), expected)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (QKV[:2], {}, "missing 1 required positional argument: 'v'"),
        ((*QKV, QKV[0]), {}, "takes 3 positional arguments but 4 were given"),
        (QKV, {"q": QKV[0]}, "got multiple values for argument 'q'"),
        (QKV, {"softcap": "3"}, "softcap is a str; it must be None or a float"),
    ],
    ids=["too_few", "too_many", "twice", "of_another_type"],
)
def test_other_errors_of_arguments_are_as_they_were(
    given: tuple[torch.Tensor, ...], options: dict[str, Any], message: str
) -> None:
    """All their names are known here."""
    attention: Any = ha.attention
    with pytest.raises(TypeError) as raised:
        attention(*given, **options)
    assert message in str(raised.value)
    assert "has no argument" not in str(raised.value)


def test_check_has_not_all_arguments_of_attention() -> None:
    """What changes nothing of an error, though `attention` has it."""
    for given in ({"out_dtype": torch.float32}, {"num_splits": 2}, {"return_lse": True}):
        assert_raises(ha.check, given, TypeError, [f"check() has no argument {next(iter(given))}"])


def test_references_know_near_misses() -> None:
    for function in (ha.reference.attention, ha.reference.attention_varlen):
        parts = [f"reference.{function.__name__}()", "did you mean softcap"]
        assert_raises(function, {"sofcap": 3.0}, TypeError, parts)


def test_the_first_unknown_argument_is_answered_alone() -> None:
    """Without Python's own error, which says less, before it."""
    attention: Any = ha.attention
    with pytest.raises(TypeError) as raised:
        attention(*QKV, causal=True, scale=2.0, dropout_p=0.5)
    assert str(raised.value) == "attention() has no argument scale, which is sm_scale here: pass sm_scale=2.0"
    assert raised.value.__suppress_context__


PUBLIC = [name for name in ha.__all__ if inspect.isfunction(getattr(ha, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_signatures_fit_a_screen(name: str) -> None:
    """And what is printed, of several lines or of one, is Python's for the same arguments and defaults."""
    signature = inspect.signature(getattr(ha, name))
    lines = str(signature).splitlines()
    assert max(map(len, lines)) <= WIDTH
    parameters = list(signature.parameters.values())
    in_a_line = str(inspect.Signature(parameters, return_annotation=signature.return_annotation))
    assert (len(lines) == 1) == (len(in_a_line) <= WIDTH)
    by_kind: dict[Any, list[str]] = {}
    for parameter in parameters:
        by_kind.setdefault(parameter.kind, []).append(parameter.name)
        if len(lines) > 1:
            assert f"    {parameter}," in lines
    (printed,) = ast.parse(f"def f{signature}: ...").body
    assert isinstance(printed, ast.FunctionDef)
    assert not printed.args.posonlyargs
    assert [x.arg for x in printed.args.args] == by_kind.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, [])
    assert [x.arg for x in printed.args.kwonlyargs] == by_kind.get(inspect.Parameter.KEYWORD_ONLY, [])
    assert printed.returns is not None


def test_signatures_of_what_hands_its_options_on() -> None:
    """`explain` and `plan` take what `attention` takes, and `check` all but what is the output's alone."""
    parameters = inspect.signature(ha.attention).parameters
    for function in (ha.explain, ha.plan):
        assert inspect.signature(function).parameters == parameters
        assert inspect.signature(function).return_annotation != inspect.signature(ha.attention).return_annotation
    left_out = {*parameters} - {*inspect.signature(ha.check).parameters}
    assert left_out == {"return_lse", "out_dtype", "num_splits"}


@pytest.mark.parametrize("function", [ha.reference.attention, ha.reference.fp8_attention], ids=lambda f: f.__name__)
def test_signatures_of_references_have_the_options_of_scores(function: Callable[..., Any]) -> None:
    """By keyword alone, with the defaults that they have, and no **options besides."""
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(ScoreOptions):
        assert parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[field.name].default == field.default
    assert list(parameters)[:3] == ["q", "k", "v"]
    assert inspect.Parameter.VAR_KEYWORD not in {x.kind for x in parameters.values()}
    with pytest.raises(TypeError, match="sofcap"):
        function(*QKV, sofcap=3.0)


@pytest.mark.parametrize(
    ("function", "near"),
    [
        (ha.flash_attn_func, "softmax_scale"),
        (ha.flash_attn_varlen_func, "softmax_scale"),
        (ha.flash_attn_with_kvcache, "softmax_scale"),
        (ha.flash_attn_qkvpacked_func, "softmax_scale"),
        (ha.scaled_dot_product_attention, "scale"),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_functions_of_others_know_near_misses(function: Callable[..., Any], near: str) -> None:
    parts = [f"{function.__name__}() has no argument sm_scale: did you mean {near}?"]
    assert_raises(function, {"sm_scale": 1.0}, TypeError, parts)


def test_sinks_of_others() -> None:
    """What flash-attn 4, transformers and vLLM call sinks, of a function that has them, and of one that has none."""
    for other in ("learnable_sink", "s_aux"):
        assert_raises(ha.attention, {other: torch.zeros(2)}, TypeError, [f"no argument {other}, which is sinks here"])
    for other in ("learnable_sink", "s_aux", "sinks"):
        parts = [f"flash_attn_func() has no argument {other}: helion_attn.attention, attention_varlen and"]
        assert_raises(ha.flash_attn_func, {other: torch.zeros(2)}, TypeError, parts)


@pytest.mark.parametrize("function", [ha.distributed.attention, ha.distributed.attention_varlen])
def test_functions_over_ranks_say_so(function: Callable[..., Any]) -> None:
    parts = [
        f"distributed.{function.__name__}() has no argument block_mask: ",
        "attention_quantized take it, on one GPU",
    ]
    assert_raises(function, {"block_mask": None}, TypeError, parts)


def test_checkers_see_names_and_values() -> None:
    """mypy, which `make lint` runs, fails on a `type: ignore` that hides nothing."""
    with pytest.raises(AttributeError, match="attentionn"):
        _ = ha.attentionn  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="layout is 'HND'"):
        ha.attention(*QKV, layout="HND")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="recipe is 'best'"):
        ha.quantize(*QKV, recipe="best")  # type: ignore[arg-type]
    if TYPE_CHECKING:
        ha.distributed.attention(*QKV, strategy="gather")  # type: ignore[arg-type]
        ha.distributed.shard(QKV[0], 0, balance="zag")  # type: ignore[arg-type]
        assert_type(ha.flash_attn_func(*QKV, causal=True), torch.Tensor)
        assert_type(ha.flash_attn_func(*QKV, None, True, return_attn_probs=True), tuple[torch.Tensor, torch.Tensor])
        ha.flash_attn_func(*QKV, causual=True)  # type: ignore[call-overload]


def test_dir_is_the_public_names() -> None:
    assert dir(ha) == sorted(ha.__all__)
    assert {"SwappedLayoutWarning", "FallbackWarning", "distributed"} <= {*dir(ha)}
    assert not {"TYPE_CHECKING", "api", "validate"} & {*dir(ha)}


def test_causal_may_be_0_or_1(device: str) -> None:
    qkv = [x.to(device) for x in QKV]
    attention: Any = ha.attention
    for causal in (0, 1):
        assert torch.equal(attention(*qkv, causal=causal), attention(*qkv, causal=bool(causal)))
    for bad in (2, -1, 1.0, "1", None, torch.tensor(True)):
        with pytest.raises(TypeError, match=r"causal is .*; it must be a bool"):
            attention(*qkv, causal=bad)


@pytest.mark.parametrize("name", ["FAST", "BALANCED", "ACCURATE", "HYBRID", "BF16"])
def test_presets_by_name(name: RecipeName, device: str) -> None:
    """In whatever takes a recipe, in capitals or not."""
    q, k, v = (x.to(device) for x in QKV)
    preset = getattr(ha, name)
    bshd = [x.transpose(1, 2) for x in (q, k, v)]
    packed = [x[0] for x in bshd]
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=device)
    lower: Any = name.lower()
    for given in (name, lower):
        assert torch.equal(ha.attention(q, k, v, recipe=given), ha.attention(q, k, v, recipe=preset))
    assert ha.quantize(q, k, v, recipe=name).recipe is preset.resolved
    flash_attn_func: Any = ha.flash_attn_func
    assert torch.equal(flash_attn_func(*bshd, recipe=name), flash_attn_func(*bshd, recipe=preset))
    model = ha.reference.fp8_attention(q, k, v, recipe=preset)
    assert torch.equal(ha.reference.fp8_attention(q, k, v, recipe=name), model)
    attention_varlen: Any = ha.attention_varlen
    outs = [attention_varlen(*packed, cu_seqlens, cu_seqlens, recipe=given) for given in (name, preset)]
    assert torch.equal(*outs)
    with ha.sdpa(recipe=name):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.equal(out, ha.attention(q, k, v, recipe=preset))
    assert ha.check(q, k, v, recipe=name).asked == name
    assert ha.explain(q, k, v, recipe=name).kernel == ha.explain(q, k, v, recipe=preset).kernel


def test_an_unknown_name_lists_all_presets() -> None:
    names = [f"'{name}'" for name in ("fast", "balanced", "accurate", "hybrid", "bf16")]
    for function in (ha.attention, ha.quantize, ha.check, ha.explain, ha.reference.fp8_attention):
        arguments = dict(zip("qkv", QKV, strict=True))
        assert_raises(function, {**arguments, "recipe": "best"}, ValueError, ["recipe is 'best'", *names, "'auto'"])
        assert_raises(function, {**arguments, "recipe": 8}, TypeError, ["recipe is 8", *names])
    assert_raises(ha.sdpa, {"recipe": "best"}, ValueError, ["recipe is 'best'", *names])


def test_layouts_of_others_are_answered() -> None:
    attention: Any = ha.attention
    for other, ours in (("HND", "bhsd"), ("NHD", "bshd"), ("nhd", "bshd")):
        with pytest.raises(ValueError, match=f"layout is '{other}'; it must be .*: '{ours}' is what others call"):
            attention(*QKV, layout=other)
    with pytest.raises(ValueError, match=r"layout is 'sbhd'; it must be one of \('bhsd', 'bshd'\)$"):
        attention(*QKV, layout="sbhd")


def test_tensors_print_as_shapes(device: str) -> None:
    q, k, v = (x.to(device) for x in QKV)
    where = "" if device == "cpu" else " on cuda:0"
    text = repr(ha.quantize(q, k, v))
    assert text.startswith(f"QuantizedQKV(q8=int8[2, 1, 64, 32]{where}, k8=")
    assert text.endswith("M=4, N=4, D=32, D_v=32, dtype=torch.bfloat16, layout='bhsd', recipe=BALANCED)")
    assert "k_mean=None" in repr(ha.quantize(q, k, v, recipe=ha.BF16))
    cache = repr(ha.paged_kv_cache(2, 1, 64, device=device, recipe="fast"))
    assert cache.startswith(f"PagedKVCache(k8=float8_e4m3fn[2, 1, 128, 64]{where}, v8=")
    assert repr(ha.Rope(torch.zeros(5, 8), torch.zeros(5, 8))) == (
        "Rope(cos=float32[5, 8], sin=float32[5, 8], interleaved=False, q_positions=None, k_positions=None)"
    )
    for shown in (text, cache):
        assert "tensor(" not in shown
        assert len(shown) < 700
