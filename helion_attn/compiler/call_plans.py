"""A whole call again, for tensors of which only the addresses are other: its launches, its outputs, one workspace.

A call is checked, chooses kernels, configs, grids and sizes, and allocates some 15 tensors. For tensors of the same
layouts and for the same options all of that comes out the same. So the second such call is recorded (`Tape`), and from
the third on `CallPlan` allocates the outputs and a workspace and launches.

A call is not planned where that could leave something out: under torch.compile, tracing, functorch, forward-mode
differentiation or a mode of PyTorch's dispatcher, with a tensor of another class, and where it runs more than this
package's kernels. It then takes the way through PyTorch's dispatcher, with the same result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from helion_attn.validate.tangents import is_forward_mode

if TYPE_CHECKING:
    from helion_attn.compiler.launch_plans import Plan

#: Alignment of an address that TMA and the widest loads ask for, in bytes.
ALIGNMENT = 16

#: Alignment of what shares a workspace, in bytes: that of the caching allocator.
WORKSPACE_ALIGNMENT = 512

#: Calls that are remembered.
MAX_PLANS = 1024

#: Recordings of a call that came to nothing until it is no longer tried. The first may make what later ones find.
MAX_ATTEMPTS = 2

_ALLOCATES = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)


_FILLS: dict[Any, Callable[[Any], float]] = {
    torch.ops.aten.new_zeros.default: lambda args: 0.0,
    torch.ops.aten.new_ones.default: lambda args: 1.0,
    torch.ops.aten.new_full.default: lambda args: args[2],
}


class Source(NamedTuple):
    """Where an argument of a launch lies.

    Attributes:
        base: index among the addresses of a call: its tensors, constants, workspace and outputs.
        offset: bytes from there.
    """

    base: int
    offset: int


class Output(NamedTuple):
    """A tensor that a call returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Fill(NamedTuple):
    """A tensor that is made of one value.

    Attributes:
        output: which one it is, or None for a part of the workspace.
        begin: bytes into the workspace.
        end: likewise.
        dtype: of the tensor.
        value: of its elements.
    """

    output: int | None
    begin: int
    end: int
    dtype: torch.dtype
    value: float


class CallPlan(NamedTuple):
    """The launches of a call, for tensors of which only the addresses are other than when it was recorded.

    Attributes:
        fills: what is filled before the launches.
        launches: each with the places of the arguments that it reads.
        constants: tensors that are the same in every call.
        workspace: bytes of everything that is neither given nor returned.
        outputs: what is returned.
    """

    fills: list[Fill]
    launches: list[tuple[Plan, dict[int, Source]]]
    constants: list[torch.Tensor]
    workspace: int
    outputs: list[Output]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Launch it on the current stream, on the device that it was recorded on."""
        like = tensors[0]
        workspace = like.new_empty(self.workspace, dtype=torch.uint8)
        outputs = [like.new_empty_strided(*output[:2], dtype=output.dtype) for output in self.outputs]
        for output, begin, end, dtype, value in self.fills:
            filled = workspace.narrow(0, begin, end - begin).view(dtype) if output is None else outputs[output]
            filled.fill_(value)
        bases = [x.data_ptr() for x in (*tensors, *self.constants, workspace, *outputs)]
        for plan, sources in self.launches:
            plan.at({arg: bases[base] + offset for arg, (base, offset) in sources.items()})
        return outputs


class Tape(TorchDispatchMode):
    """Records what a call allocates and launches."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        #: By identity. They are kept, so that no two have the same.
        self.made: dict[int, torch.UntypedStorage] = {}
        #: By identity of its storage: a tensor that is all of it, and what it was filled with.
        self.filled: dict[int, tuple[torch.Tensor, float]] = {}
        #: What else ran.
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATES or func in _FILLS:
            storage = result.untyped_storage()
            self.made[storage._cdata] = storage
            if func in _FILLS:
                self.filled[storage._cdata] = result, _FILLS[func](args)
        elif not func.is_view and func.namespace != "prim":  # questions, such as that for a fake tensor's device
            self.others.append(str(func))
        return result

    def plan(self, tensors: Sequence[torch.Tensor], returned: Sequence[torch.Tensor]) -> CallPlan | None:
        """The plan that repeats the call, or None if a plan would leave something out.

        Args:
            tensors: what the call was given.
            returned: what it returned.
        """
        from helion_attn.compiler.launch_plans import Plan

        given = {place_of(x): i for i, x in enumerate(tensors)}
        given_storages = {storage for storage, _ in given}
        owned = {place_of(x): i for i, x in enumerate(returned) if x.numel()}
        if self.others or any(storage not in self.made or offset for storage, offset in owned):
            return None
        if len(owned) != sum(x.numel() > 0 for x in returned):
            return None
        constants: list[torch.Tensor] = []
        offsets: dict[int, int] = {}
        workspace = 0
        # Bases are numbered once it is known how many constants there are.
        launches: list[tuple[Plan, dict[int, tuple[str, int, int]]]] = []
        for plan, args in self.launches:
            if not isinstance(plan, Plan):
                return None
            places = {}
            for i in plan.reads:
                storage, offset = place_of(args[i])
                if (storage, 0) in owned:
                    places[i] = "output", owned[storage, 0], offset
                elif storage in self.made:
                    if storage not in offsets:
                        offsets[storage] = workspace
                        workspace += -(-self.made[storage].nbytes() // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
                    places[i] = "workspace", 0, offsets[storage] + offset
                elif (storage, offset) in given:
                    places[i] = "given", given[storage, offset], 0
                elif storage in given_storages:
                    return None
                else:
                    places[i] = "constant", len(constants), 0
                    constants.append(args[i])
            launches.append((plan, places))
        fills = []
        for storage, (x, value) in self.filled.items():
            if (storage, 0) in owned:
                fills.append(Fill(owned[storage, 0], 0, 0, x.dtype, value))
            elif storage in offsets:
                begin = offsets[storage]
                fills.append(Fill(None, begin, begin + x.numel() * x.element_size(), x.dtype, value))
        first = {"given": 0, "constant": len(tensors), "workspace": len(tensors) + len(constants)}
        first["output"] = first["workspace"] + 1
        return CallPlan(
            fills,
            [(plan, {i: Source(first[of] + j, at) for i, (of, j, at) in places.items()}) for plan, places in launches],
            constants,
            workspace,
            [Output(tuple(x.shape), x.stride(), x.dtype) for x in returned],
        )


def place_of(x: torch.Tensor) -> tuple[int, int]:
    """The identity of a tensor's storage, and bytes from its beginning."""
    return x.untyped_storage()._cdata, int(x.storage_offset()) * x.element_size()


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)

_PAUSED: ContextVar[bool] = ContextVar("paused", default=False)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside, every call is checked and run as if it was the first."""
    token = _PAUSED.set(True)
    try:
        yield
    finally:
        _PAUSED.reset(token)


def recording() -> bool:
    """Whether this call is recorded."""
    return _TAPE.get() is not None


def note(launch: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Record what was launched, and on which arguments, if this call is recorded."""
    if (tape := _TAPE.get()) is not None:
        tape.launches.append((launch, args))


@contextlib.contextmanager
def not_recorded() -> Iterator[None]:
    """Inside, PyTorch's operations are not recorded: they compile a kernel."""
    if recording():
        with _disable_current_modes():
            yield
    else:
        yield


#: By call: its plan, or how often it was seen before that.
_PLANS: dict[Hashable, CallPlan | int] = {}


def forget() -> None:
    """Forget all plans."""
    _PLANS.clear()


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is what its address holds."""
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cuda and not x.is_neg() and not x.is_nested


def nothing_listens() -> bool:
    """Whether nobody but PyTorch's dispatcher would have to know of a call."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not is_forward_mode()
    )


def key_of(name: str, tensors: Sequence[Any], options: Sequence[Any]) -> Hashable | None:
    """All that a call depends on but addresses, or None if it cannot be planned.

    Args:
        name: of the call.
        tensors: all that it is given.
        options: all else; a tuple among them has its entries for options.
    """
    if torch.compiler.is_compiling() or _PAUSED.get() or not all(map(is_plain, tensors)) or not nothing_listens():
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    device = tensors[0].device
    if device.index != torch.cuda.current_device():
        return None
    addresses = [x.data_ptr() for x in tensors]
    layouts = [(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT) for x in tensors]
    # 1, 1.0 and True are equal, and not all of them are accepted.
    types = [tuple(map(type, option)) if isinstance(option, tuple) else type(option) for option in options]
    return (name, *layouts, *map(addresses.index, addresses), *options, *types)


def planned(
    name: str,
    tensors: Sequence[Any],
    options: Sequence[Any],
    run: Callable[[], Sequence[torch.Tensor]],
    written: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """What `run()` returns, which checks and does everything, or its plan in its place.

    Args:
        name: of the call.
        tensors: all that it is given; None for one that it is not.
        options: all else that it depends on; a tuple among them has its entries for options.
        run: the call; returns tensors of which none is another or a part of it, and which nothing else keeps.
        written: those of `tensors` that it writes.
    """
    given = [x for x in tensors if x is not None]
    key = key_of(name, given, (*options, *[x is None for x in tensors]))
    if key is None or recording():
        return run()
    try:
        known = _PLANS.get(key, 0)
    except TypeError:  # an option that has no hash is none that is accepted
        return run()
    if isinstance(known, CallPlan):
        torch.autograd.graph.increment_version(written)
        return known(given)
    if not 0 < known <= MAX_ATTEMPTS:
        # A call that comes once is not worth a plan.
        if known == 0:
            if len(_PLANS) >= MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = 1
        return run()
    tape = Tape()
    token = _TAPE.set(tape)
    try:
        with tape:
            returned = run()
    finally:
        _TAPE.reset(token)
    _PLANS[key] = tape.plan(given, returned) or known + 1
    return returned
