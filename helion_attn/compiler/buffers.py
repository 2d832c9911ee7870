"""Tensors of a plan: layouts without memory. A kernel that is run on them becomes a launch of the plan.

Functions that choose sizes and launch kernels are written once. On tensors they run; on buffers, which have the part of
a tensor's interface that such functions use, they say what would run (`Draft`), and touch no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from helion_attn.compiler.helion_adapter import multiprocessors

#: Alignment of an address that TMA and the widest loads ask for, in bytes: all that a plan knows of addresses.
ALIGNMENT = 16


class Memory(NamedTuple):
    """Memory that buffers lie in."""

    kind: str  # "given" to the call, "made" by it, or "constant": the same in every call
    number: int  # among the memories of its kind
    shape: tuple[int, ...]  # of the tensor that is all of it
    strides: tuple[int, ...]  # of that tensor
    dtype: torch.dtype  # of that tensor
    misaligned: int  # its address, modulo `ALIGNMENT`


class Fill(NamedTuple):
    """A buffer that is made of one value."""

    buffer: Buffer
    value: float


class Launch(NamedTuple):
    """A `runners.Runner` and what it is run on, in the order of its parameters: buffers, numbers and its spec."""

    kernel: Any
    args: tuple[Any, ...]


class Draft:
    """A plan while it is made.

    Attributes:
        device: where it is to run.
        sm_count: SMs of that.
        tensor_type: the class of tensors that it is for.
        steps: what it does, in this order.
        made: memories that it allocates.
        constants: tensors that are the same in every call.
    """

    def __init__(self, device: torch.device, sm_count: int) -> None:
        self.device, self.sm_count, self.tensor_type = device, sm_count, torch.Tensor
        self.is_cuda = device.type == "cuda"
        self.steps: list[Launch | Fill] = []
        self.made: list[Memory] = []
        self.constants: list[torch.Tensor] = []
        self._given = 0

    def given(self, x: torch.Tensor) -> Buffer:
        """The buffer of a tensor that the call is given."""
        memory = Memory("given", self._given, tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
        self.tensor_type = tensor_type(x)
        self._given += 1
        return Buffer(self, memory, 0, memory.shape, memory.strides, memory.dtype)

    def constant(self, x: torch.Tensor) -> Buffer:
        """The buffer of a tensor that is the same in every call."""
        memory = Memory("constant", len(self.constants), tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)
        self.constants.append(x)
        return Buffer(self, memory, 0, memory.shape, memory.strides, memory.dtype)

    def launch(self, kernel: Any, args: Sequence[Any]) -> None:
        """Add a launch."""
        if any(issubclass(kind, torch.Tensor) for kind in {*map(type, args)}):
            of_tensors = {id(x): self.constant(x) for x in args if isinstance(x, torch.Tensor)}
            args = [of_tensors.get(id(x), x) for x in args]
        self.steps.append(Launch(kernel, tuple(args)))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    return tuple(strides[::-1])


def tensor_type(x: torch.Tensor | Buffer) -> type[torch.Tensor]:
    """The class of a tensor, or of those that a buffer stands for; a parameter is a tensor."""
    if isinstance(x, Buffer):
        return x.draft.tensor_type
    return torch.Tensor if type(x) is torch.nn.Parameter else type(x)


def sm_count(x: torch.Tensor | Buffer) -> int:
    """SMs of the GPU that a launch on `x` has."""
    return x.draft.sm_count if isinstance(x, Buffer) else multiprocessors(x.device)


def sizes_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    """A shape that is given as one argument, or as several."""
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args


class Buffer:
    """A tensor of a plan, which has a layout and no memory.

    Attributes:
        draft: the plan.
        memory: what it lies in.
        offset: bytes from the memory's beginning.
        shape: and strides, dtype, itemsize, as a tensor's.
        device: where the plan is to run.
        is_cuda: whether that is a GPU.
    """

    __slots__ = ("_strides", "device", "draft", "dtype", "is_cuda", "itemsize", "memory", "offset", "shape")

    def __init__(
        self,
        draft: Draft,
        memory: Memory,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.draft, self.memory, self.offset, self.shape, self._strides, self.dtype = (
            draft, memory, offset, shape, strides, dtype,
        )  # fmt: skip
        self.device, self.is_cuda, self.itemsize = draft.device, draft.is_cuda, dtype.itemsize

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def size(self, dim: int | None = None) -> Any:
        """A size, or all."""
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        """A stride, or all."""
        return self._strides if dim is None else self._strides[dim]

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        """Its address, modulo `ALIGNMENT`."""
        return (self.memory.misaligned + self.offset) % ALIGNMENT

    def is_contiguous(self) -> bool:
        """Whether rows follow each other without gaps."""
        wanted = contiguous(self.shape)
        return self._strides == wanted or all(
            size == 1 or stride == whole for size, stride, whole in zip(self.shape, self._strides, wanted, strict=True)
        )

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> Buffer:
        """A buffer of the plan's own, contiguous."""
        sizes, dtype = sizes_of(shape), self.dtype if dtype is None else dtype
        memory = Memory("made", len(self.draft.made), sizes, contiguous(sizes), dtype, 0)
        self.draft.made.append(memory)
        return Buffer(self.draft, memory, 0, sizes, memory.strides, dtype)

    def new_full(self, shape: Any, value: float, dtype: torch.dtype | None = None) -> Buffer:
        """One of the plan's own, of one value."""
        made = self.new_empty(shape, dtype=dtype)
        self.draft.steps.append(Fill(made, value))
        return made

    def new_zeros(self, *shape: Any, dtype: torch.dtype | None = None) -> Buffer:
        """One of zeros."""
        return self.new_full(sizes_of(shape), 0.0, dtype)

    def new_ones(self, *shape: Any, dtype: torch.dtype | None = None) -> Buffer:
        """One of ones."""
        return self.new_full(sizes_of(shape), 1.0, dtype)

    def as_strided(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> Buffer:
        """A view of these sizes and strides, which begins so many elements into this buffer."""
        offset = self.offset + elements * self.dtype.itemsize
        return Buffer(self.draft, self.memory, offset, tuple(shape), tuple(strides), self.dtype)

    def narrow(self, dim: int, begin: int, length: int) -> Buffer:
        """A part of one dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self.as_strided(shape, self._strides, begin * self._strides[dim])

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> Buffer:
        """One dimension as two, of which the first may be -1."""
        outer, inner = sizes
        outer = self.shape[dim] // inner if outer == -1 else outer
        shape = (*self.shape[:dim], outer, inner, *self.shape[dim + 1 :])
        step = self._strides[dim]
        return self.as_strided(shape, (*self._strides[:dim], step * inner, step, *self._strides[dim + 1 :]))

    def permute(self, *dims: Any) -> Buffer:
        """Its dimensions in another order."""
        order = sizes_of(dims)
        return self.as_strided([self.shape[i] for i in order], [self._strides[i] for i in order])

    def transpose(self, a: int, b: int) -> Buffer:
        """Two of its dimensions swapped."""
        order = [*range(self.dim())]
        order[a], order[b] = order[b], order[a]
        return self.permute(order)

    def unsqueeze(self, dim: int) -> Buffer:
        """With one more dimension, of size 1."""
        shape, strides = [*self.shape], [*self._strides]
        at = dim % (self.dim() + 1)
        step = self._strides[at] * self.shape[at] if at < self.dim() else 1
        return self.as_strided([*shape[:at], 1, *shape[at:]], [*strides[:at], step, *strides[at:]])

    def squeeze(self, dim: int) -> Buffer:
        """Without a dimension if its size is 1."""
        at = dim % self.dim()
        if self.shape[at] != 1:
            return self
        return self.as_strided(
            (*self.shape[:at], *self.shape[at + 1 :]), (*self._strides[:at], *self._strides[at + 1 :])
        )

    def view(self, *shape: Any) -> Buffer:
        """In another shape, or in another dtype, for which it must be contiguous."""
        if isinstance(shape[0], torch.dtype):
            return self._in(shape[0])
        sizes, count = sizes_of(shape), math.prod(self.shape)
        if -1 in sizes:
            given = -math.prod(sizes)
            sizes = tuple([(count // given if given else 0) if size == -1 else size for size in sizes])
        if sizes == self.shape:
            return self
        if math.prod(sizes) != count:
            raise ValueError(f"{self.shape} has no view of {sizes}")
        if not self.is_contiguous():
            raise ValueError(f"a view of {self.shape} with strides {self._strides} needs it contiguous")
        return Buffer(self.draft, self.memory, self.offset, sizes, contiguous(sizes), self.dtype)

    def _in(self, dtype: torch.dtype) -> Buffer:
        before, after = self.itemsize, dtype.itemsize
        strides = [stride * before // after for stride in self._strides[:-1]]
        shape = (*self.shape[:-1], self.shape[-1] * before // after)
        return Buffer(self.draft, self.memory, self.offset, shape, (*strides, 1), dtype)

    def __getitem__(self, rows: slice) -> Buffer:
        begin, end, _ = rows.indices(self.shape[0])
        return self.narrow(0, begin, end - begin)
