"""Plans of launches without a GPU: kernels are fake, and what they would be launched with is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from devtools import sm90
from helion_attn.compiler import linked_launch, runners
from helpers.offline import launching

LINK = linked_launch.link


def encoding(box: TensorDescriptor) -> dict[str, Any]:
    """As Triton's compiler says how to encode a descriptor."""
    return {
        "swizzle": 3,
        "elem_size": box.base.itemsize,
        "elem_type": 1,
        "block_size": box.block_shape,
        "fp4_padded": False,
    }


#: From 3.7 on, one C function launches all kernels.
ONE_FOR_ALL = not hasattr(driver, "make_launcher")


#: The arguments of every launch.
LAUNCHED: list[tuple[Any, ...]] = []


class FakeKernel:
    """What Triton compiled for the arguments `args`. The C function of its launcher remembers what it is given."""

    function, packed_metadata = "function", "packed"

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.launched: list[tuple[Any, ...]] = []
        boxes = [encoding(x) for x in args if isinstance(x, TensorDescriptor)]
        self.metadata = SimpleNamespace(tensordesc_meta=boxes)
        signature = {i: "tensordesc" if isinstance(x, TensorDescriptor) else "other" for i, x in enumerate(args)}
        # What stands between `run` and C is Triton's own.
        self.run = object.__new__(driver.CudaLauncher)
        self.run.launch = driver.wrap_handle_tensordesc(self.in_c, signature, boxes)
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True
        self.run.num_ctas = 1
        self.run.global_scratch_size = self.run.profile_scratch_size = 0
        self.run.global_scratch_align = self.run.profile_scratch_align = 1
        if ONE_FOR_ALL:
            self.run.arg_annotations, self.run.kernel_signature = "annotations", b"signature"
            self.run.gsan_enabled = False

    def in_c(self, *args: Any) -> None:
        if ONE_FOR_ALL:
            *before, annotations, signature, values = args
            assert (annotations, signature) == ("annotations", b"signature")
            # The metadata comes before what is allocated.
            *before, scratch, more_scratch = before
            args = (*before[:7], scratch, more_scratch, *before[7:], *values)
        self.launched.append(tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args))
        LAUNCHED.append(self.launched[-1])

    def launch_metadata(self, grid: tuple[int, ...], stream: int, *args: Any) -> str:
        return "metadata"


def in_c_of(kernel: FakeKernel) -> Any:
    """In place of `linked_launch.in_c`, which asks a driver for what all kernels share."""
    return kernel.in_c


def encode(*args: Any) -> tuple[Any, ...]:
    """In place of the driver's, which makes an opaque object."""
    ENCODED.append(args)
    return args


#: The driver's name for it.
ENCODE = "fill_tma_descriptor_tiled" if ONE_FOR_ALL else "fill_tma_descriptor"

#: What was encoded.
ENCODED: list[tuple[Any, ...]] = []


#: Storages whose addresses were asked for: kept, so that no other has the same.
KEPT: list[torch.UntypedStorage] = []


def address(x: FakeTensor) -> int:
    """A stand-in for the address of a tensor that has none."""
    KEPT.append(x.untyped_storage())
    return 512 * (x.untyped_storage()._cdata % 2**40) + int(x.storage_offset()) * x.element_size()


@contextlib.contextmanager
def planning(stream: Callable[[int], int] = lambda device: 7) -> Iterator[list[tuple[Any, tuple[Any, ...], Any]]]:
    """Host functions that were called for the first time, their arguments, and what came of it."""
    made = []

    def link(run: Any, launches: Any, args: tuple[Any, ...]) -> Any:
        made.append((run, args, LINK(run, launches, args)))
        return made[-1][2]

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> FakeKernel:
        return FakeKernel(args)

    with (
        sm90._offline_hopper(keep_generated=True),
        launching(),
        mock.patch.object(runners, "link", link),
        mock.patch.object(linked_launch, "default_launcher", launch),
        mock.patch.object(FakeTensor, "data_ptr", address),
        mock.patch.object(sm90._OfflineDriver, "get_current_stream", lambda self, device: stream(device)),
        mock.patch.object(sm90._OfflineDriver, "utils", SimpleNamespace(**{ENCODE: encode}), create=True),
        mock.patch.object(linked_launch, "in_c", in_c_of),
    ):
        ENCODED.clear()
        LAUNCHED.clear()
        KEPT.clear()
        yield made
