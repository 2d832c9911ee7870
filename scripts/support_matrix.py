"""Write the tables of docs/support.md: what the public functions take and what they refuse, found by calling them.

python scripts/support_matrix.py

Every function is called with many arguments, on tensors of a few rows, with the package's ops out of reach: a call that
gets as far as an op is taken, and one that raises before is refused. So the tables cannot differ from the checks.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import helion_attn as ha
from helion_attn import plans
from helion_attn.configs import (
    LargeTileConfig,
    TileConfig,
    attention_tile_config,
    large_tile_config,
    packing,
    page_packing,
    uses_large_d,
)
from helion_attn.types import RECIPE_CHOICES
from helion_attn.validate.dense import MAX_D
from integrations import with_blocks

PAGE = Path(__file__).parents[1] / "docs" / "support.md"

B = 2


class Launched(Exception):
    """An op was about to run."""


class NoOps:
    """In place of `torch.ops.helion_attn`."""

    def __getattr__(self, name: str) -> None:
        raise Launched(name)


def dense(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """No gaps. Nobody reads what it holds."""
    return torch.empty(shape, **options)


@dataclass(frozen=True)
class Call:
    """What a function is called with; every probe changes some of it."""

    dtype: torch.dtype | None = None  # of Q, K and V; None is one that the function takes
    H: int = 4
    H_kv: int = 2
    M: int = 5
    N: int = 7
    D: int = 64
    D_v: int = 64
    make: Callable[..., torch.Tensor] = dense  # a tensor of a shape, dtype and device, with the strides that are tried
    requires_grad: bool = False  # of Q, K and V
    grad_mode: bool = True  # whether it is on
    device: str = "cpu"  # of all tensors
    capability: tuple[int, int] | None = None  # of the CUDA device, if it is one
    options: dict[str, Any] = field(default_factory=dict)  # further arguments, by name

    def tensor(self, heads: int, length: int, width: int, default: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """One of Q, K and V in the layout."""
        bshd = self.options.get("layout") == "bshd"
        shape = (B, length, heads, width) if bshd else (B, heads, length, width)
        return self._made(shape, default)

    def packed_tensor(self, heads: int, tokens: int, width: int) -> torch.Tensor:
        """Likewise, [tokens, heads, width]."""
        return self._made((tokens, heads, width), torch.bfloat16)

    def _made(self, shape: tuple[int, ...], default: torch.dtype) -> torch.Tensor:
        x = self.make(shape, dtype=self.dtype or default, device=self.device)
        return x.requires_grad_() if self.requires_grad else x

    def table(self, *shape: int) -> torch.Tensor:
        """Of lengths or pages."""
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def attention(call: Call) -> None:
    """`ha.attention`, called so."""
    q = call.tensor(call.H, call.M, call.D)
    k, v = (call.tensor(call.H_kv, call.N, width) for width in (call.D, call.D_v))
    ha.attention(q, k, v, **call.options)


def pack(call: Call) -> None:
    """`ha.pack`."""
    e4m3 = torch.float8_e4m3fn
    q = call.tensor(call.H, call.M, call.D, e4m3)
    k, v = (call.tensor(call.H_kv, call.N, width, e4m3) for width in (call.D, call.D_v))
    ha.pack(q, k, v, **{"q_descale": 1.0, "k_descale": 1.0, "v_descale": 1.0} | call.options)


def attention_varlen(call: Call) -> None:
    """`ha.attention_varlen`."""
    q = call.packed_tensor(call.H, call.M, call.D)
    k, v = (call.packed_tensor(call.H_kv, call.N, width) for width in (call.D, call.D_v))
    ha.attention_varlen(q, k, v, call.table(B + 1), call.table(B + 1), **call.options)


def append_kvcache(call: Call) -> None:
    """`ha.append_kvcache`."""
    cache = ha.paged_kv_cache(1, call.H_kv, call.D, D_v=call.D_v, device=call.device)
    k, v = (call.tensor(call.H_kv, call.N, width) for width in (call.D, call.D_v))
    ha.append_kvcache(cache, k, v, call.table(B, 1), call.table(B), **call.options)


def attention_kvcache(call: Call) -> None:
    """`ha.attention_kvcache`."""
    cache = ha.paged_kv_cache(1, call.H_kv, call.D, D_v=call.D_v, device=call.device)
    q = call.tensor(call.H, call.M, call.D)
    ha.attention_kvcache(q, cache, call.table(B, 1), call.table(B), **call.options)


CALLERS: tuple[Callable[[Call], None], ...] = (attention, pack, attention_varlen, append_kvcache, attention_kvcache)
FUNCTIONS = {caller.__name__: caller for caller in CALLERS}


def no_key(*_: object) -> None:
    """In place of `plans.key_of`; a mock, made for every call, took half of the time."""


def refusal(function: str, call: Call) -> Exception | None:
    """What the function raises before any op; None if it gets to one."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.ops, "helion_attn", NoOps()))
        stack.enter_context(mock.patch.object(plans, "key_of", no_key))
        stack.enter_context(torch.set_grad_enabled(call.grad_mode))
        if call.capability is not None:
            stack.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=call.capability))
            stack.enter_context(mock.patch("helion_attn.validate.dense._CAPABLE", set()))
            # Fake tensors, which need no GPU, have no values; `pack` reads those of descales.
            stack.enter_context(mock.patch("helion_attn.api.check_descale"))
            stack.enter_context(FakeTensorMode())
        try:
            FUNCTIONS[function](call)
        except Launched:
            return None
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            return error
    raise AssertionError(f"{function} neither raised nor came to an op")


@dataclass(frozen=True)
class Row:
    """What is tried of one argument, or one property of the tensors, by what the tables call it."""

    name: str  # of the row
    calls: dict[Any, Call]  # by name, or by size; sizes are shown as a range
    needs: tuple[str, ...] = ()  # arguments that a function must have for the row to say anything of it

    @property
    def are_sizes(self) -> bool:
        """Whether `calls` is by size."""
        return all(type(name) is int for name in self.calls)


def name_of(dtype: object) -> str:
    """Without the module."""
    return str(dtype).removeprefix("torch.")


def any_order(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Rows of all heads together."""
    *rest, rows, heads, width = shape
    return torch.empty(*rest, heads, rows, width, **options).transpose(-2, -3)


def slice_of_qkv(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """One of three that lie side by side."""
    return torch.empty(*shape[:-2], 3, *shape[-2:], **options).select(-3, 1)


def expanded_rows(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """All rows, or heads, are the same memory."""
    return torch.empty(*shape[:-2], 1, shape[-1], **options).expand(shape)


def odd_rows(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """A gap of one number behind every row."""
    return torch.empty(*shape[:-1], shape[-1] + 1, **options)[..., :-1]


def every_other_channel(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Channels two apart."""
    return torch.empty(*shape[:-1], 2 * shape[-1], **options)[..., ::2]


def expanded_channels(shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    """A row's channels are the same memory."""
    return torch.empty(*shape[:-1], 1, **options).expand(shape)


STRIDES: dict[str, Callable[..., torch.Tensor]] = {
    "dimensions in any order": any_order,
    "a slice of packed QKV": slice_of_qkv,
    "expanded rows or heads": expanded_rows,
    "strides that are no multiples of 4": odd_rows,
    "a strided last dimension": every_other_channel,
    "an expanded last dimension": expanded_channels,
}


def strided(**changed: Any) -> dict[str, Call]:
    """A call for each way that a tensor can lie in memory."""
    return {name: Call(make=make, **changed) for name, make in STRIDES.items()}


def options(name: str, values: Iterable[Any], **others: Any) -> dict[str, Call]:
    """A call for each value of an argument."""
    return {name_of(value): Call(options={name: value, **others}) for value in values}


def rope(positions: int = 16, R: int = 64, **fields: Any) -> ha.Rope:
    """Tables of R channels, and more fields."""
    return ha.Rope(*torch.zeros(2, positions, R // 2), **fields)


def norm(channels: int, eps: float = 1e-6) -> ha.RMSNorm:
    """One of so many channels."""
    return ha.RMSNorm(torch.ones(channels), eps)


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64)
PRESETS = {name: value for name, value in vars(ha).items() if isinstance(value, ha.Recipe)}
DEVICES = {
    "CPU": Call(),
    **{
        f"CUDA, compute capability {major}.{minor}": Call(device="cuda:0", capability=(major, minor))
        for major, minor in ((9, 0), (8, 0), (8, 9), (10, 0), (12, 0))
    },
    "meta": Call(device="meta"),
}

#: Head dims: those around each multiple of 16. All that kernels and checks know are multiples of it.
SIZES = [step + offset for step in range(16, MAX_D + 32, 16) for offset in (-1, 0, 1, 2)]

ROWS = (
    Row("dtype of the tensors", {name_of(dtype): Call(dtype=dtype) for dtype in (*DTYPES, torch.int8)}),
    Row("head dim D", {D: Call(D=D) for D in SIZES}),
    Row("head dim of V, D_v", {D_v: Call(D_v=D_v) for D_v in SIZES}),
    Row("`layout`", options("layout", ("bhsd", "bshd", "sbhd")), needs=("layout",)),
    Row("strides of 16- and 8-bit tensors", strided()),
    Row("strides of float32", strided(dtype=torch.float32)),
    Row(
        "query heads / KV heads",
        {f"{H} / {H_kv}": Call(H=H, H_kv=H_kv) for H, H_kv in ((4, 4), (4, 2), (4, 1), (4, 3), (2, 4))},
        needs=("q",),
    ),
    Row("queries, of 7 keys", {str(M): Call(M=M) for M in (0, 1, 5, 9)}, needs=("q",)),
    Row("keys, of 5 queries", {str(N): Call(N=N) for N in (0, 1, 7)}, needs=("k",)),
    Row("`causal`", options("causal", (False, True)), needs=("causal",)),
    Row("`window`", options("window", ((3, 2), (-1, 2), (3, -1), (-2, 0))), needs=("window",)),
    Row("`window` with `causal`", options("window", ((3, 0), (3, 2)), causal=True), needs=("window",)),
    Row("`softcap`", options("softcap", (30.0, 0.0, float("inf"))), needs=("softcap",)),
    Row(
        "`sinks`",
        {f"[H] {name_of(dtype)}": Call(options={"sinks": torch.zeros(4, dtype=dtype)}) for dtype in DTYPES[:3]}
        | {"[H_kv]": Call(options={"sinks": torch.zeros(2)}), "[B, H]": Call(options={"sinks": torch.zeros(B, 4)})},
        needs=("sinks",),
    ),
    Row("`sm_scale`", options("sm_scale", (0.1, 0.0, -0.1, float("inf"))), needs=("sm_scale",)),
    Row("`return_lse`", options("return_lse", (False, True)), needs=("return_lse",)),
    Row("`out_dtype`", options("out_dtype", (*DTYPES, torch.int8)), needs=("out_dtype",)),
    Row("`dtype`, of the output", options("dtype", DTYPES), needs=("dtype",)),
    Row(
        "`rope`",
        {
            "all channels": Call(options={"rope": rope()}),
            "the first channels": Call(options={"rope": rope(R=32)}),
            "interleaved": Call(options={"rope": rope(interleaved=True)}),
            "positions": Call(
                options={"rope": rope(q_positions=torch.zeros(5).int(), k_positions=torch.zeros(7).int())}
            ),
            "more queries than keys": Call(M=8, options={"rope": rope()}),
            "a table that is too short": Call(options={"rope": rope(positions=6)}),
            "more channels than D": Call(options={"rope": rope(R=66)}),
            "a strided last dimension": Call(make=every_other_channel, options={"rope": rope()}),
        },
        needs=("rope",),
    ),
    *(
        Row(
            f"`{name}`, channels of its weight",
            {
                "D": Call(options={name: norm(64)}),
                f"{heads} * D": Call(options={name: norm(many * 64)}),
                "D / 2": Call(options={name: norm(32)}),
                "D, eps 0": Call(options={name: norm(64, 0.0)}),
                "D, a strided last dimension": Call(make=every_other_channel, options={name: norm(64)}),
            },
            needs=(name,),
        )
        for name, heads, many in (("q_norm", "H", 4), ("k_norm", "H_kv", 2))
    ),
    Row("`recipe`", {name: Call(options={"recipe": recipe}) for name, recipe in PRESETS.items()}, needs=("recipe",)),
    Row("`num_splits`", options("num_splits", (None, 1, 3, 0)), needs=("num_splits",)),
    *(
        Row(
            f"`{name}`",
            {"a number": Call(options={name: 0.5})}
            | {form: Call(options={name: torch.ones(shape)}) for form, shape in forms.items()}
            | {"0": Call(options={name: 0.0}), "nan": Call(options={name: float("nan")})},
            needs=(name,),
        )
        for name, forms in (
            ("q_descale", {"[]": (), "[B, H]": (B, 4), "[B, H_kv]": (B, 2), "[B, H, M]": (B, 4, 5), "[M]": (5,)}),
            ("k_descale", {"[]": (), "[B, H_kv]": (B, 2), "[B, H_kv, N]": (B, 2, 7)}),
            ("v_descale", {"[]": (), "[B, H_kv]": (B, 2), "[B, H_kv, D_v]": (B, 2, 64), "[B, H_kv, N]": (B, 2, 7)}),
        )
    ),
    Row(
        "inputs that require grad",
        {
            "in `torch.no_grad()`": Call(requires_grad=True, grad_mode=False),
            "in grad mode": Call(requires_grad=True),
        },
    ),
    Row("device", DEVICES),
)


def sizes(taken: list[int]) -> str:
    """Those of `SIZES`, as ranges; "-" for none."""
    even = len(taken) > 1 and all(size % 2 == 0 for size in taken)
    tried = [size for size in SIZES if size % 2 == 0 or not even]
    runs = itertools.groupby(taken, key=lambda size: tried.index(size) - taken.index(size))
    ends = [(run[0], run[-1]) for run in ([*run] for _, run in runs)]
    text = ", ".join(str(first) if first == last else f"{first}..{last}" for first, last in ends)
    return f"{text}, even" if even else text or "-"


def markdown(head: tuple[str, ...], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    lines = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([next(lines), "|---" * len(head) + "|", *lines])


def outcomes(row: Row, function: str) -> dict[Any, Exception | None]:
    """What the function raises, or None, by call; empty where the row says nothing of it: "-"."""
    if not set(row.needs) <= set(inspect.signature(getattr(ha, function)).parameters):
        return {}
    results = {name: refusal(function, call) for name, call in row.calls.items()}
    return results if None in results.values() else {}


def functions_table() -> str:
    """What every function takes."""
    rows = []
    for row in ROWS:
        of = [outcomes(row, function) for function in FUNCTIONS]
        if row.are_sizes:
            rows.append((row.name, *(sizes([n for n in row.calls if results.get(n, n) is None]) for results in of)))
            continue
        for name in row.calls:
            answers = ("-" if name not in results else "yes" if results[name] is None else "raises" for results in of)
            rows.append((f"{row.name}: {name}", *answers))
    return markdown(("", *(f"`{function}`" for function in FUNCTIONS)), rows)


def refusals_table() -> str:
    """For each row, what functions say of the first call that they refuse; those that say the same together."""
    rows = []
    for row in ROWS:
        said: dict[tuple[str, str], list[str]] = {}
        for function in FUNCTIONS:
            refused = ((name, error) for name, error in outcomes(row, function).items() if error is not None)
            for name, error in itertools.islice(refused, 1):
                said.setdefault((str(name), f"{type(error).__name__}: {error}"), []).append(f"`{function}`")
        rows += [(f"{row.name}: {name}", ", ".join(which), f"`{text}`") for (name, text), which in said.items()]
    return markdown(("", "of", "raises"), rows)


def kernels_table() -> str:
    """Which kernel runs a head dim, how wide it is padded, and how P V is summed, by the bits of a recipe."""
    kinds: tuple[tuple[str, ha.Recipe, int | None], ...] = (
        ("8", ha.BALANCED, None),
        ("8", ha.BALANCED, 128),
        ("8; P and V 16", ha.HYBRID, None),
        ("16", ha.BF16, None),
    )
    rows = []
    for bits, recipe, fixed_D_v in kinds:
        found: dict[tuple[str, ...], list[int]] = {}
        for D in SIZES:
            D_v = fixed_D_v or D
            if refusal("attention", Call(D=D, D_v=D_v, options={"recipe": recipe})) is None:
                tile, large = packing(D, D_v, recipe.bits), uses_large_d(D, D_v, recipe.bits)
                config: TileConfig | LargeTileConfig = (
                    large_tile_config(D, D_v, False) if large else attention_tile_config(D, D_v, False, recipe.bits)
                )
                how = (
                    "`fp8_attn_fwd_large_d`" if large else "`fp8_attn_fwd`",
                    f"{tile.D_pad}, {tile.D_v_pad}",
                    str(tile.bn),
                    "fp32, block by block" if config.two_level else "in the tensor core",
                )
                found.setdefault(how, []).append(D)
        rows += [(bits, sizes(of), str(fixed_D_v or "D"), *how) for how, of in found.items()]
    return markdown(("bits", "D", "D_v", "kernel", "padded to", "keys of a block", "P V is summed"), rows)


def recipes_table() -> str:
    """The head dims of every preset."""

    def taken(function: str, recipe: ha.Recipe, D_v: int | None = None) -> str:
        calls = {D: Call(D=D, D_v=D_v or D, options={"recipe": recipe}) for D in SIZES}
        return sizes([D for D, call in calls.items() if refusal(function, call) is None])

    rows = (
        (
            f"`{name}`",
            name_of(recipe.qk_dtype),
            name_of(recipe.pv_dtype),
            taken("attention", recipe),
            taken("attention", recipe, D_v=128),
            taken("attention_varlen", recipe),
        )
        for name, recipe in PRESETS.items()
    )
    return markdown(
        ("recipe", "Q and K", "P and V", "`attention`, D = D_v", "`attention`, D_v 128", "`attention_varlen`, D = D_v"),
        rows,
    )


Choice = tuple[str, object]


def all_recipes() -> list[ha.Recipe]:
    """Every one that `RECIPE_CHOICES` spans, and that `Recipe` takes."""
    recipes = []
    for values in itertools.product(*RECIPE_CHOICES.values()):
        fields: dict[str, Any] = dict(zip(RECIPE_CHOICES, values, strict=True))
        with contextlib.suppress(ValueError):
            recipes.append(ha.Recipe(**fields))
    return recipes


def choices_table() -> str:
    """Of every field of `Recipe`, its values, and the values of other fields that no recipe has beside it."""

    def choices_of(recipe: ha.Recipe) -> list[Choice]:
        return [(name, getattr(recipe, name)) for name in RECIPE_CHOICES]

    def described(choices: Iterable[Choice]) -> str:
        by_field: dict[str, list[str]] = {}
        for name, value in choices:
            by_field.setdefault(name, []).append(name_of(value) if isinstance(value, torch.dtype) else repr(value))
        return "; ".join(f"`{name}` {', '.join(values)}" for name, values in by_field.items()) or "-"

    recipes = all_recipes()
    pairs = {pair for recipe in recipes for pair in itertools.product(choices_of(recipe), repeat=2)}
    of_varlen = {
        choice
        for recipe in recipes
        if refusal("attention_varlen", Call(options={"recipe": recipe})) is None
        for choice in choices_of(recipe)
    }
    every = [(name, value) for name, values in RECIPE_CHOICES.items() for value in values]
    rows = []
    for choice in every:
        others = (other for other in every if other[0] != choice[0] and (choice, other) not in pairs)
        rows.append((described([choice]), described(others), "yes" if choice in of_varlen else "raises"))
    return markdown(("choice", "not with", "`attention_varlen`"), rows)


def pages_table() -> str:
    """How wide a KV cache pads head dims, and how many keys a page has."""
    found: dict[tuple[str, ...], list[int]] = {}
    for D in SIZES:
        if refusal("attention_kvcache", Call(D=D, D_v=D)) is None:
            tile = page_packing(D, D)
            found.setdefault((f"{tile.D_pad}, {tile.D_v_pad}", str(tile.page_size)), []).append(D)
    rows = ((sizes(of), "D", "`fp8_attn_decode`, `fp8_attn_prefill`", *how) for how, of in found.items())
    return markdown(("D", "D_v", "kernel", "padded to", "keys of a page"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "functions": functions_table,
    "kernels": kernels_table,
    "pages": pages_table,
    "recipes": recipes_table,
    "choices": choices_table,
    "refusals": refusals_table,
}


def with_tables(page: str) -> str:
    """The page with its tables as the checks have them."""
    return with_blocks(page, {f"support:{name}": table() for name, table in TABLES.items()})


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
