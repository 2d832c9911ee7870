"""A call as a value: what it fills and launches, in which memory, and what it returns.

A plan depends on everything about a call but addresses: layouts of the tensors, alignment, options, the GPU. It is made
without running anything (`compiler.buffers`), kept by what it depends on, and run on tensors: `Plan.run` allocates
the outputs and one workspace, and launches.

`run` finds a call's plan before anything is checked, since a call of the same layouts and options was checked before.
It does not where that could leave something out: under torch.compile, tracing, functorch, forward-mode differentiation
or a mode of PyTorch's dispatcher, inside `debug`, and with a tensor of another class. The operation then goes through
PyTorch's dispatcher, to the same plan.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from helion_attn import public_calls
from helion_attn.compiler.buffers import ALIGNMENT, Buffer, Draft, Fill, Launch, Memory
from helion_attn.compiler.notice import LOG
from helion_attn.debug_state import SEEN

if TYPE_CHECKING:
    from helion_attn.compiler.linked_launch import LinkedLaunch

#: Alignment of what shares a workspace, in bytes: that of the caching allocator.
WORKSPACE_ALIGNMENT = 512

#: Plans that are kept.
MAX_PLANS = 1024

#: Bytes from which on `compile_ahead` takes memory once.
LARGE = 2**30


#: Where an argument of a launch lies: the index of one of a call's addresses, which are of its tensors, constants,
#: workspace and outputs, and how many bytes from there.
Source = tuple[int, int]

#: A launch whose kernel is compiled, and where the arguments lie whose addresses it takes.
Linked = tuple["LinkedLaunch", list[Source]]


class Plan:
    """Fills and launches of one call, for tensors of any addresses.

    Attributes:
        steps: fills and launches, in their order.
        outputs: the buffers that are returned.
    """

    def __init__(self, draft: Draft, outputs: Sequence[Buffer]) -> None:
        self.steps, self.outputs = tuple(draft.steps), tuple(outputs)
        self._layouts = [(x.shape, x.stride(), x.dtype) for x in outputs]
        self._device, self._made, self._constants = draft.device, tuple(draft.made), tuple(draft.constants)
        #: Of each memory that is made: which output it is, or else its bytes into the workspace.
        self._returned = {x.memory.number: i for i, x in enumerate(outputs)}
        if len(self._returned) < len(outputs) or any(x.memory.kind != "made" or x.offset for x in outputs):
            raise ValueError("an output is a part of another tensor")
        if any(x.numel() * x.itemsize != size_of(x.memory) for x in outputs):
            raise ValueError("an output is smaller than its memory")
        self._offsets: dict[int, int] = {}
        self._workspace = 0
        for memory in self._made:
            if memory.number not in self._returned:
                self._offsets[memory.number] = self._workspace
                self._workspace += -(-size_of(memory) // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
        self._linked: tuple[Linked | Fill, ...] | None = None
        #: Whether a run has shown that a launch is more than addresses.
        self._only_triton = False

    @property
    def launches(self) -> tuple[Launch, ...]:
        """Launches among the steps, in their order."""
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def kernels(self) -> str:
        """The names of the kernels that it launches, in their order."""
        return " + ".join(launch.kernel.name for launch in self.launches)

    def __str__(self) -> str:
        made = [f"{tuple(x.shape)} {x.dtype}" for x in self.outputs]
        lines = [f"{len(self.steps)} steps on {self._device}, a workspace of {self._workspace} bytes"]
        for step in self.steps:
            if isinstance(step, Fill):
                lines.append(f"  fill {step.buffer.shape} with {step.value}")
                continue
            # What it is compiled for is a NamedTuple of constants.
            specs = [x for x in step.args if isinstance(x, tuple)]
            lines.append(f"  {step.kernel.name}" + "".join(f"\n    {spec}" for spec in specs))
        return "\n".join([*lines, f"  gives {', '.join(made) or 'nothing new'}"])

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it on the current stream, on tensors of the layouts that it is for. A first run compiles kernels."""
        if self._linked is None and (self._only_triton or not self._link(len(tensors))):
            return self._run_and_link(tensors)
        assert self._linked is not None
        if is_elsewhere(self._device):
            with torch.cuda.device(self._device):
                return self.run(tensors)
        like = tensors[0]
        workspace = like.new_empty(self._workspace, dtype=torch.uint8)
        outputs = [like.new_empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in self._layouts]
        bases = [x.data_ptr() for x in (*tensors, *self._constants, workspace, *outputs)]
        for step in self._linked:
            if isinstance(step, Fill):
                self._in_workspace(step.buffer, workspace, outputs).fill_(step.value)
            else:
                launch, sources = step
                launch.at([bases[base] + offset for base, offset in sources])
        return outputs

    def compiled(self) -> list[Any]:
        """What Triton compiled for each launch; nothing before a run, or where Triton is not known."""
        return [step[0].compiled for step in self._linked or () if not isinstance(step, Fill)]

    def _in_workspace(self, x: Buffer, workspace: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """A buffer that is all of a memory, as a tensor."""
        index = x.memory.number
        if index in self._returned:
            return outputs[self._returned[index]]
        begin = self._offsets[index]
        return workspace.narrow(0, begin, x.numel() * x.itemsize).view(x.dtype)

    def _link(self, given: int) -> bool:
        """Link all launches, if their kernels are compiled for other sizes already."""
        linked: list[Linked | Fill] = []
        for step in self.steps:
            if isinstance(step, Fill):
                linked.append(step)
                continue
            launch = step.kernel.linked(step.args)
            if launch is None:
                return False
            linked.append((launch, [self._source(step.args[i], given) for i in launch.reads]))
        self._linked = tuple(linked)
        return True

    def _run_and_link(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run it with a tensor in place of each buffer, and link launches that need no more than addresses then."""
        like = tensors[0]
        made = [like.new_empty(x.shape, dtype=x.dtype) for x in self._made]
        memories = {"given": tensors, "constant": self._constants, "made": made}
        known: dict[int, torch.Tensor] = {}

        def tensor(x: Buffer) -> torch.Tensor:
            if id(x) not in known:
                known[id(x)] = as_tensor(x, memories[x.memory.kind][x.memory.number])
            return known[id(x)]

        linked: list[Linked | Fill] = []
        with plain_kernels(like):
            for step in self.steps:
                if isinstance(step, Fill):
                    tensor(step.buffer).fill_(step.value)
                    linked.append(step)
                    continue
                launch = step.kernel(*[tensor(x) if isinstance(x, Buffer) else x for x in step.args])
                if launch is not None:
                    sources = [self._source(step.args[i], len(tensors)) for i in launch.reads]
                    linked.append((launch, sources))
            if len(linked) == len(self.steps):
                self._linked = tuple(linked)
            else:
                self._only_triton = True
            return [tensor(x) for x in self.outputs]

    def _source(self, x: Buffer, given: int) -> Source:
        kind, index = x.memory.kind, x.memory.number
        if kind == "given":
            return index, x.offset
        if kind == "constant":
            return given + index, x.offset
        workspace = given + len(self._constants)
        if index in self._returned:
            return workspace + 1 + self._returned[index], x.offset
        return workspace, self._offsets[index] + x.offset


class Planned(Protocol):
    """An operation that makes plans (`ops.declare.Operation`)."""

    def plan(self, arguments: Any) -> Plan:
        """Plan the launches for arguments of these layouts."""

    def call_of(self, arguments: Any) -> public_calls.PublicCall | None:
        """Return the call of a public function that it is, or None."""

    def __call__(self, arguments: Any) -> Any:
        """Run it through PyTorch's dispatcher."""


def size_of(memory: Memory) -> int:
    """Bytes of a memory."""
    return math.prod(memory.shape) * memory.dtype.itemsize


def as_tensor(x: Buffer, memory: torch.Tensor) -> torch.Tensor:
    """The tensor of a buffer, in a tensor that is all of its memory."""
    if x.dtype != memory.dtype:
        memory = memory.view(-1).view(x.dtype)
    if x.offset == 0 and tuple(memory.shape) == x.shape and memory.stride() == x.stride():
        return memory
    return memory.as_strided(x.shape, x.stride(), memory.storage_offset() + x.offset // x.itemsize)


@contextlib.contextmanager
def plain_kernels(like: torch.Tensor) -> Any:
    """Inside, kernels run on the device of a tensor, and nothing comes between them and PyTorch's operations.

    The kernels say what is cast; autocast would also cast the fp32 products of the interpreter. Helion does not take a
    tensor together with a view of it; below this key a view does not know its base.
    """
    with (
        torch.cuda.device(like.device) if is_elsewhere(like.device) else contextlib.nullcontext(),
        torch.autocast(like.device.type, enabled=False),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        yield


Kept = TypeVar("Kept")

#: Plans by what they depend on, and what else stands in for one: PyTorch's attention, and whether it is taken.
_PLANS: dict[Hashable, Any] = {}

#: Lines that were logged, up to `MAX_PLANS`.
_LOGGED: set[str] = set()

_LOCK = threading.Lock()


def forget() -> None:
    """Forget all plans, and what was logged."""
    _PLANS.clear()
    _LOGGED.clear()


def lookup(key: Hashable) -> Any:
    """Look up what is kept of a key. None has nothing."""
    # Without the branch torch.compile, which has no keys, compiles anew for each plan that is added.
    return None if key is None else _PLANS.get(key)


def remember(key: Hashable, plan: Kept) -> Kept:
    """Keep a plan, or what stands in for one."""
    with _LOCK:
        if len(_PLANS) >= MAX_PLANS:
            # The oldest half: a server has new lengths in every step, beside those that it always has.
            for old in list(_PLANS)[: MAX_PLANS // 2]:
                del _PLANS[old]
        _PLANS[key] = plan
    return plan


def log_new(operation: Planned, arguments: Any, plan: Plan) -> None:
    """Log the public function's call that a new plan is for, if it is for one, at level DEBUG."""
    if (call := operation.call_of(arguments)) is not None:
        log_call(call, plan.kernels)


def log_call(call: public_calls.PublicCall, comment: str) -> None:
    """Log a call as a line of Python, at level DEBUG; once, while the line is kept."""
    text = public_calls.line(call, comment)
    with _LOCK:
        is_new = text not in _LOGGED
        if len(_LOGGED) >= MAX_PLANS:
            _LOGGED.clear()
        _LOGGED.add(text)
    if is_new:
        LOG.debug("%s", text)


def layouts(tensors: Sequence[torch.Tensor]) -> tuple[Hashable, ...]:
    """All that a plan depends on of tensors."""
    found: list[Hashable] = [tensors[0].device]
    addresses: list[int] = []
    for x in tensors:
        at = x.data_ptr()
        addresses.append(at)
        # The last says which of them are the same.
        found += x.shape, x.stride(), x.dtype, at % ALIGNMENT, addresses.index(at)
    return tuple(found)


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is what its address holds."""
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.layout is not torch.strided:
        return False
    return not (x.is_neg() or x.is_nested or x.is_meta)


def has_default_device_alone() -> bool:
    """Whether the only modes are of a default device, which changes nothing of what is made like a tensor."""
    return all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())


def can_skip_dispatcher() -> bool:
    """Whether nobody but PyTorch's dispatcher would have to know of a call."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and (torch._C._len_torch_function_stack() == 0 or has_default_device_alone())
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def compile_ahead(of: Sequence[Plan], part: int = 0, parts: int = 1) -> None:
    """Compile the kernels that plans launch, so that no call of these layouts has to; of several parts, one.

    What is to be compiled runs once, on zeros: of lengths that are 0 it does nothing.
    """
    # Memory that kernels do not read, such as a pool of pages, is the same for all.
    large: torch.Tensor | None = None
    for launches in [*_by_kernel(of).values()][part::parts]:
        for launch in launches:
            if launch.kernel.linked(launch.args) is not None:
                continue
            device = next(x.device for x in launch.args if isinstance(x, Buffer))
            buffers = {id(x): x for x in launch.args if isinstance(x, Buffer)}
            most = max(map(_bytes_of, buffers.values()))
            if most >= LARGE and (large is None or large.numel() < most):
                large = torch.empty(most, dtype=torch.uint8, device=device)
            zeros = {i: _zeros_like(x, large) for i, x in buffers.items()}
            with torch.cuda.device(device) if is_elsewhere(device) else contextlib.nullcontext():
                launch.kernel(*[zeros.get(id(x), x) for x in launch.args])


def are_stored(of: Sequence[Plan]) -> bool:
    """Whether an earlier process compiled all kernels that plans launch."""
    return all(launch.kernel.is_stored(launch.args) for plan in of for launch in plan.launches)


def _by_kernel(of: Sequence[Plan]) -> dict[Hashable, list[Launch]]:
    """The launches of plans, by what they compile."""
    found: dict[Hashable, list[Launch]] = {}
    for plan in of:
        for launch in plan.launches:
            found.setdefault((launch.kernel, launch.kernel.compiled_for(launch.args)), []).append(launch)
    return found


def _bytes_of(x: Buffer) -> int:
    """Bytes that a buffer spans."""
    spanned = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return max(spanned, 0) * x.itemsize


def _zeros_like(x: Buffer, large: torch.Tensor | None) -> torch.Tensor:
    """Zeros in a buffer's layout; of `LARGE` ones, memory that is not initialised."""
    count = _bytes_of(x)
    if large is not None and count >= LARGE:
        memory = large[:count]
    else:
        memory = torch.zeros(count, dtype=torch.uint8, device=x.device)
    return memory.view(x.dtype).as_strided(x.shape, x.stride())


def is_elsewhere(device: torch.device) -> bool:
    """Whether a device is a GPU that is not the current one."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


def key_of(name: str, tensors: Sequence[Any], options: Sequence[Any]) -> Hashable | None:
    """All that a call depends on but addresses; None if it cannot take a plan at once, or an option has no hash.

    Args:
        name: of the call.
        tensors: all that it is given.
        options: all else; a tuple among them has its entries for options.
    """
    if torch.compiler.is_compiling() or SEEN.get() is not None or not tensors or not all(map(is_plain, tensors)):
        return None
    if not can_skip_dispatcher():
        return None
    device, differentiable = tensors[0].device, torch.is_grad_enabled()
    for x in tensors:
        if x.device != device or (differentiable and x.requires_grad):
            return None
    if is_elsewhere(device):
        return None
    # 1, 1.0 and True are equal, and not all of them are accepted.
    types = [tuple(map(type, option)) if isinstance(option, tuple) else type(option) for option in options]
    key = (name, *layouts(tensors), *options, *types)
    try:
        hash(key)
    except TypeError:  # such an option is none that is accepted
        return None
    return key


def run(
    name: str,
    tensors: Sequence[Any],
    options: Sequence[Any],
    problem: Callable[[], tuple[Planned, Any]],
    written: Sequence[torch.Tensor] = (),
) -> Sequence[torch.Tensor]:
    """Run a call by its plan, which is made for its first run, and return its outputs.

    Args:
        name: of the call.
        tensors: all that it is given, in the order of the operation's; None for one that it is not.
        options: all else that it depends on; a tuple among them has its entries for options.
        problem: checks the call, and makes of it an operation and its arguments.
        written: tensors that it writes.
    """
    given = [x for x in tensors if x is not None]
    key = key_of(name, given, (*options, *[x is None for x in tensors]))
    plan = lookup(key)
    if plan is None:
        operation, arguments = problem()
        if key is None:
            return operation(arguments)
        plan = remember(key, operation.plan(arguments))
        if LOG.isEnabledFor(logging.DEBUG):
            log_new(operation, arguments, plan)
    if written:
        torch.autograd.graph.increment_version(written)
    return plan.run(given)
