"""What a declaration makes of a NamedTuple: a schema, arguments that are built again, and one plan for each layout.

The operations are the tests' own, launch nothing but fills, and are gone after each test.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helion_attn import debug_state, plans
from helion_attn.compiler.buffers import Buffer, sm_count
from helion_attn.compiler.notice import LOG
from helion_attn.ops.declare import Operation, Structure
from helion_attn.public_calls import PublicCall


class Choice(NamedTuple):
    """Of no tensor."""

    width: int
    name: str
    is_exact: bool


class Pair(NamedTuple):
    left: torch.Tensor | None
    right: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Kept:
    """A dataclass, as a cache is."""

    pages: torch.Tensor
    size: int
    pair: Pair


class Given(NamedTuple):
    """A field of each kind."""

    x: torch.Tensor
    kept: Kept
    pair: Pair
    window: tuple[int, int] | None
    factor: float
    tokens: int
    most: int | None
    choice: Choice
    dtype: torch.dtype


class Alone(NamedTuple):
    x: torch.Tensor


class Filled(NamedTuple):
    """What `filled` makes an output of."""

    x: torch.Tensor
    pair: Pair
    factor: float


PATHS = [
    "x", "kept.pages", "kept.size", "kept.pair.left", "kept.pair.right", "pair.left", "pair.right", "window", "factor",
    "tokens", "most", "choice.width", "choice.name", "choice.is_exact", "dtype",
]  # fmt: skip

Declare = Callable[..., Operation[Any]]


@pytest.fixture
def declare() -> Iterator[Declare]:
    """Declare an operation, which the end of the test unregisters."""
    with torch.library._scoped_library("helion_attn", "FRAGMENT") as library:

        def declared(*args: Any, **kwargs: Any) -> Operation[Any]:
            names = ("define", "impl", "register_fake")
            of_library = {name: functools.partial(getattr(torch.library, name), lib=library) for name in names}
            with mock.patch.dict(vars(torch.library), of_library):
                return Operation(*args, **kwargs)

        yield declared


def given(device: str = "cpu") -> Given:
    x, pages, left, right = (torch.full((2, 3), float(i), device=device) for i in range(4))
    choice = Choice(width=64, name="fast", is_exact=True)
    return Given(x, Kept(pages, 7, Pair(None, right)), Pair(left, None), (4, 0), 0.5, 3, None, choice, torch.float16)


def leaves(value: Any) -> list[Any]:
    """What is inside of tuples and of `Kept`, in order."""
    if isinstance(value, Kept):
        return leaves((value.pages, value.size, value.pair))
    return [x for inner in value for x in leaves(inner)] if isinstance(value, (Given, Pair, Choice, tuple)) else [value]


def unchanged(a: Given) -> torch.Tensor:
    return torch.empty_like(a.x)


def filled(a: Filled) -> Any:
    """The factor, 10 more without a left tensor, 100 more without a right one."""
    return a.x.new_full(a.x.shape, a.factor + 10 * (a.pair.left is None) + 100 * (a.pair.right is None))


def like_x(a: Filled) -> torch.Tensor:
    return a.x.new_empty(a.x.shape)


def schema_of(operation: Operation[Any]) -> str:
    return str(getattr(torch.ops.helion_attn, operation.name).default._schema)


def test_schemas_have_an_argument_for_each_field_that_is_no_structure(declare: Declare) -> None:
    """Ints are symbols but those of what has no tensor, and tensors that are written have a letter each."""
    mutates = ("kept.pages", "pair.left")
    operation = declare("declared", Given, 2, unchanged, unchanged, mutates)
    assert schema_of(operation) == (
        "helion_attn::declared(Tensor x, Tensor(a!) kept_pages, SymInt kept_size, Tensor? kept_pair_left, "
        "Tensor? kept_pair_right, Tensor(b!)? pair_left, Tensor? pair_right, SymInt[2]? window, float factor, "
        "SymInt tokens, SymInt? most, int choice_width, str choice_name, bool choice_is_exact, ScalarType dtype"
        ") -> (Tensor, Tensor)"
    )


def test_what_is_written_must_be_an_argument(declare: Declare) -> None:
    """Arguments are named by their paths, with dots, and nothing is registered of a declaration that is refused."""
    with pytest.raises(ValueError) as raised:
        declare("declared", Given, 1, unchanged, unchanged, ("kept_pages", "x", "out"))
    assert str(raised.value) == f"declared mutates ['kept_pages', 'out']; its arguments are {PATHS}"
    assert not hasattr(torch.ops.helion_attn, "declared")


def test_arguments_are_built_again_of_their_values() -> None:
    """Also in a graph, where Dynamo traces no attrgetter."""
    structure, arguments = Structure(Given), given()
    assert structure.paths == PATHS
    values = structure.flat(arguments)
    assert list(map(id, values)) == [id(functools.reduce(getattr, path.split("."), arguments)) for path in PATHS]
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        assert list(map(id, structure.flat(arguments))) == list(map(id, values))
    built = structure.build(values)
    assert list(map(type, (built, built.kept, built.kept.pair, built.choice))) == [Given, Kept, Pair, Choice]
    assert list(map(id, structure.flat(built))) == list(map(id, values))
    assert structure.first_tensor(arguments) is arguments.x


def test_a_structure_of_one_field_has_one_value() -> None:
    """Which attrgetter gives as it is, of one name."""
    x = torch.ones(3)
    (value,) = Structure(Alone).flat(Alone(x))
    assert value is x


def test_the_same_choices_are_one_object() -> None:
    """Those that come with every call and have no tensor; other choices are others."""
    structure = Structure(Choice)
    first, same, other = (structure.build(values) for values in ((64, "a", True), (64, "a", True), (32, "a", True)))
    assert first == Choice(64, "a", True)
    assert same is first
    assert other == Choice(32, "a", True)
    x = torch.ones(3)
    pairs = [Structure(Pair).build((x, None)) for _ in range(2)]
    assert pairs[0] is not pairs[1]


def test_tensors_are_replaced_in_the_order_of_the_schema() -> None:
    """In NamedTuples and in dataclasses; what is absent stays so, and what was given is as it was."""
    arguments, met = given(), []
    before = leaves(arguments)

    def name_of(x: torch.Tensor) -> str:
        met.append(int(x[0, 0]))
        return f"tensor {met[-1]}"

    replaced = Structure(Given).with_tensors(arguments, name_of)
    assert met == [0, 1, 3, 2]
    assert isinstance(replaced.kept, Kept)
    assert leaves(replaced) == [
        "tensor 0", "tensor 1", 7, None, "tensor 3", "tensor 2", None, 4, 0, 0.5, 3, None, 64, "fast", True,
        torch.float16,
    ]  # fmt: skip
    assert list(map(id, leaves(arguments))) == list(map(id, before))


def test_values_and_tensors_are_in_the_order_of_the_schema(declare: Declare) -> None:
    """Without those that are absent a plan has the tensors that it runs on."""
    operation, arguments = declare("declared", Given, 1, unchanged, unchanged), given()
    assert [x if x is None else x.shape for x in operation.values(arguments)[:2]] == [(2, 3), (2, 3)]
    assert len(operation.values(arguments)) == len(PATHS)
    assert [int(x[0, 0]) for x in operation.tensors(arguments)] == [0, 1, 3, 2]


@pytest.mark.parametrize("results", [0, 1, 2])
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "unplanned"])
def test_results_are_none_a_tensor_or_a_tuple(results: int, planned: bool, declare: Declare) -> None:
    def launch(a: Filled) -> Any:
        made = tuple(a.x.new_full((4,), float(i)) for i in range(results))
        return made if results > 1 else made[0] if made else None

    operation = declare("declared", Filled, results, launch, launch, planned=planned)
    for _ in range(2):
        found = operation(Filled(torch.ones(3), Pair(None, None), 1.0))
        assert type(found) is {0: type(None), 1: torch.Tensor, 2: tuple}[results]
        tensors = found if results == 2 else () if found is None else (found,)
        assert [x.tolist() for x in tensors] == [[float(i)] * 4 for i in range(results)]


X = torch.arange(24.0).view(4, 6)
LEFT = torch.ones(5)

#: Calls of which each differs from the first in one property that a plan depends on.
OTHERS: dict[str, Filled] = {
    "shape": Filled(X[:3], Pair(LEFT, None), 1.0),
    "strides": Filled(X.t().contiguous().t(), Pair(LEFT, None), 1.0),
    "dtype": Filled(X.double(), Pair(LEFT, None), 1.0),
    "alignment": Filled(torch.arange(25.0)[1:].view(4, 6), Pair(LEFT, None), 1.0),
    "number": Filled(X, Pair(LEFT, None), 2.0),
    "place of a tensor": Filled(X, Pair(None, LEFT), 1.0),
    "one more tensor": Filled(X, Pair(LEFT, LEFT.clone()), 1.0),
    "no tensor": Filled(X, Pair(None, None), 1.0),
    "one tensor twice": Filled(X, Pair(X, None), 1.0),
}


def result_of(a: Filled) -> float:
    return a.factor + 10 * (a.pair.left is None) + 100 * (a.pair.right is None)


@pytest.mark.parametrize("what", OTHERS)
def test_each_layout_has_a_plan_of_its_own(what: str, declare: Declare) -> None:
    """Which is made once, of buffers, and serves the tensors of other calls."""
    made: list[Filled] = []
    operation = declare("declared", Filled, 1, lambda a: made.append(a) or filled(a), like_x)  # type: ignore[func-returns-value]
    first, other = Filled(X, Pair(LEFT, None), 1.0), OTHERS[what]
    clones = first._replace(x=X.clone(), pair=Pair(LEFT.clone(), None))
    for arguments in (first, other, clones, other, first):
        out = operation(arguments)
        assert out.shape == arguments.x.shape
        assert out.dtype == arguments.x.dtype
        assert {*out.flatten().tolist()} == {result_of(arguments)}
    assert len(made) == len(plans._PLANS) == 2
    assert all(isinstance(a.x, Buffer) for a in made)


def test_operations_of_the_same_arguments_have_plans_of_their_own(declare: Declare) -> None:
    arguments = Filled(X, Pair(None, None), 1.0)
    names = {"declared": 1.0, "declared_too": 2.0}
    found = {}
    for name, value in names.items():
        launch = functools.partial(lambda value, a: a.x.new_full((2,), value), value)
        found[name] = declare(name, Filled, 1, launch, like_x)
    for name in (*names, *names):
        assert found[name](arguments).tolist() == [names[name]] * 2


def test_what_has_no_plan_runs_on_the_tensors_themselves(declare: Declare) -> None:
    """In every call, without autocast, and on views that do not know their base."""
    seen: list[tuple[Any, ...]] = []

    def launch(a: Filled) -> torch.Tensor:
        view = a.x.view(-1)
        seen.append((a.x.data_ptr(), a.pair.right, view._is_view(), torch.is_autocast_enabled("cpu")))
        return a.x @ a.x.t()

    operation = declare("declared", Filled, 1, launch, like_x, planned=False)
    x = torch.eye(3)
    with torch.autocast("cpu", torch.bfloat16):
        outs = [operation(Filled(x, Pair(None, None), 1.0)) for _ in range(2)]
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(x.data_ptr(), None, False, False)] * 2
    assert [out.dtype for out in outs] == [torch.float32] * 2
    assert not plans._PLANS
    assert x.view(-1)._is_view()


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "unplanned"])
def test_tensors_without_memory_get_the_fake(planned: bool, declare: Declare) -> None:
    """Of a FakeTensorMode or on the meta device; it is given what was built, and nothing is planned or launched."""
    built: list[Given] = []

    def fake(a: Given) -> torch.Tensor:
        built.append(a)
        return a.x.new_empty((a.tokens, a.x.size(1)), dtype=a.dtype)

    launch = mock.Mock(side_effect=AssertionError("it is launched"))
    operation = declare("declared", Given, 1, launch, fake, planned=planned)
    with FakeTensorMode() as mode:
        faked = operation(Structure(Given).with_tensors(given(), mode.from_tensor))
    on_meta = operation(given("meta"))
    for out, device in ((faked, "cpu"), (on_meta, "meta")):
        assert (*out.shape, out.dtype, out.device.type) == (3, 3, torch.float16, device)
    for a in built:
        assert a.window is not None
        assert (type(a.kept), a.kept.size, a.choice, *a.window) == (Kept, 7, Choice(64, "fast", True), 4, 0)
        assert a.kept.pair.left is None
    assert len(built) >= 2
    assert not plans._PLANS


def test_a_plan_is_for_the_multiprocessors_that_are_asked_for(declare: Declare) -> None:
    """And nothing runs."""
    counts: list[int] = []

    def launch(a: Filled) -> Any:
        counts.append(sm_count(a.x))
        return a.x.new_full((counts[-1], 2), 1.0)

    operation = declare("declared", Filled, 1, launch, like_x)
    arguments = Filled(X, Pair(None, None), 1.0)
    with mock.patch.object(plans.Plan, "run", side_effect=AssertionError("it runs")):
        found = [operation.plan(arguments, sm_count=count) for count in (7, 132)]
    assert counts == [7, 132]
    assert [[x.shape for x in plan.outputs] for plan in found] == [[(7, 2)], [(132, 2)]]
    assert not plans._PLANS
    assert found[0].run(operation.tensors(arguments))[0].tolist() == [[1.0, 1.0]] * 7


def public_call(a: Filled) -> PublicCall:
    return PublicCall("attention", {"q": a.x}, {"sm_scale": a.factor})


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged."""
    found: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler, level = Lines(), LOG.level
    LOG.addHandler(handler)
    yield found
    LOG.setLevel(level)
    LOG.removeHandler(handler)


def test_a_new_plan_is_logged_if_a_public_call_is_for_it(declare: Declare, lines: list[str]) -> None:
    """At level DEBUG; a plan that there was before is not, nor one of what such a call does among others."""
    public = declare("declared", Filled, 1, filled, like_x, call=public_call)
    inner = declare("declared_too", Filled, 1, filled, like_x)
    arguments = Filled(X, Pair(None, None), 0.5)
    assert public.call_of(arguments) == public_call(arguments)
    assert inner.call_of(arguments) is None
    LOG.setLevel(logging.INFO)
    public(arguments._replace(factor=0.25))
    assert lines == []
    LOG.setLevel(logging.DEBUG)
    for _ in range(2):
        public(arguments)
        inner(arguments)
    (line,) = lines
    assert "ha.attention(q, sm_scale=0.5)" in line
    public(arguments._replace(factor=0.25))
    assert lines == [line]


def test_public_calls_are_examined_while_one_is_to_be_saved(declare: Declare, tmp_path: Path) -> None:
    """With the arguments, what was returned and the names of the kernels; after that they are not."""
    examined: list[Any] = []

    def examine(a: Filled, returned: list[torch.Tensor], kernels: str, seen: debug_state.Seen) -> None:
        examined.append((a.x.data_ptr(), a.factor, [x.tolist() for x in returned], kernels))
        if len(examined) == 2:
            seen.save = None

    public = declare("declared", Filled, 1, filled, like_x, call=public_call)
    inner = declare("declared_too", Filled, 1, filled, like_x)
    x = torch.ones(2)
    token = debug_state.SEEN.set(debug_state.Seen(save=tmp_path, examine=examine))
    try:
        for factor in (0.5, 0.25, 0.125):
            inner(Filled(x, Pair(None, None), factor))
            public(Filled(x, Pair(None, None), factor))
    finally:
        debug_state.SEEN.reset(token)
    public(Filled(x, Pair(None, None), 2.0))
    assert examined == [(x.data_ptr(), factor, [[110 + factor] * 2], "") for factor in (0.5, 0.25)]
