"""The compiler for sm_90, which needs no GPU and no driver.

Helion is told that an H200 is there and binds tensors that have no storage, and Triton compiles for the target that it
is named. Nothing is launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from helion_attn.compiler.passes.outcome import Outcome

#: Registers and shared memory of one Hopper SM (CUDA programming guide, compute capability 9.0).
REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_SM = 228 * 1024
#: What the driver keeps of each resident program's shared memory.
RESERVED_SHARED_BYTES = 1024

_H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=REGISTERS_PER_SM,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 * 1024,
    shared_memory_per_block_optin=227 * 1024,
    shared_memory_per_multiprocessor=SHARED_BYTES_PER_SM,
    warp_size=32,
    L2_cache_size=50 * 2**20,
    total_memory=141 * 10**9,
)


class _OfflineDriver:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@dataclass(frozen=True)
class Sm90Kernel:
    """One compiled kernel: what ptxas and the disassembler say of it."""

    name: str  # of the kernel function
    registers: int  # per thread
    shared_bytes: int  # of dynamic shared memory per program
    num_warps: int  # per program
    opcodes: Counter[str]  # how often each SASS opcode occurs, without its modifiers
    ptx: str  # the PTX text
    sass: str  # the disassembly
    passes: tuple[Outcome, ...] = ()  # what this package's passes did to it, each applied or refused and why

    @property
    def ctas_per_sm(self) -> int:
        """Programs that fit one SM by registers (allocated in units of 8 per thread) and shared memory."""
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        by_shared = SHARED_BYTES_PER_SM // (self.shared_bytes + RESERVED_SHARED_BYTES)
        return min(REGISTERS_PER_SM // registers, by_shared)


def _disassemble(compiled: Any) -> Sm90Kernel:
    import triton

    from helion_attn.compiler.triton_hook import outcomes

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()

        def run(tool: str, *flags: str) -> str:
            command = [str(tools / tool), *flags, cubin.name]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        usage = run("cuobjdump", "-res-usage")
        # Without an analysis of data flow, which changes nothing in this text.
        sass = run("nvdisasm", "-c", "-ndf")
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9]*)", sass)
    return Sm90Kernel(
        name=compiled.metadata.name,
        registers=int(registers.group(1)),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        opcodes=Counter(opcodes),
        ptx=compiled.asm["ptx"],
        sass=sass,
        passes=outcomes(compiled),
    )


@contextlib.contextmanager
def _offline_tracing() -> Iterator[None]:
    """Inside, Helion traces for tensors without storage as for an H200's."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    from helion_attn.compiler.helion_adapter import helion_environment

    CompileEnvironment = helion_environment.CompileEnvironment
    to_fake_tensor = CompileEnvironment._to_fake_tensor
    #: By environment and tensor.
    known: dict[tuple[int, int], torch.Tensor] = {}

    def with_symbolic_sizes(self: Any, tensor: torch.Tensor, source: Any) -> torch.Tensor:
        if (twice := known.get((id(self), id(tensor)))) is not None:
            # What Helion does with a real tensor that comes twice: it takes no layout of it for known.
            self._ambiguous_tensor_input_source_ids.add(id(twice))
            self._tensor_input_source_cache.pop(id(twice), None)
            return twice
        # Helion makes symbols of a real tensor's sizes, and constants of a fake one's. These stand for real tensors.
        n = tensor.dim()
        all_dynamic: Any = StatelessSymbolicContext(
            [DimDynamic.DUCK] * n, [DimDynamic.INFER_STRIDE] * n, [None] * n, [None] * n
        )
        sizes, strides, _ = self.shape_env.create_symbolic_sizes_strides_storage_offset(
            tensor, source, symbolic_context=all_dynamic
        )
        with FakeTensorMode(shape_env=self.shape_env):
            symbolic = torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)
        known[id(self), id(tensor)] = to_fake_tensor(self, symbolic, source)
        return known[id(self), id(tensor)]

    with (
        mock.patch.object(CudaInterface, "get_device_properties", staticmethod(lambda *_: _H200)),
        mock.patch.object(CompileEnvironment, "tensor_descriptor_base_is_aligned", return_value=True),
        mock.patch.object(CompileEnvironment, "_to_fake_tensor", with_symbolic_sizes),
    ):
        yield


@contextlib.contextmanager
def _offline_hopper(keep_generated: bool = False) -> Iterator[list[Any]]:
    """Pretend that cuda:0 is an H200, and collect what Triton compiles instead of launching it.

    Args:
        keep_generated: find the code that Helion generated before for such tensors, and keep what it generates.
    """
    import triton
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.runtime.jit import JITFunction, MockTensor

    from helion_attn.compiler import code_cache, runners, stored_code
    from helion_attn.validate import dense

    compiled: list[Any] = []
    jit_run = JITFunction.run
    read, write, trace = stored_code.read, stored_code.write, code_cache.Generated._trace

    def offline(key: str) -> str:
        # What is generated here is not for tensors that have addresses.
        return hashlib.sha256(f"without storage {key}".encode()).hexdigest()

    def run(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        stand_ins = [MockTensor(a.dtype, list(a.shape)) if isinstance(a, torch.Tensor) else a for a in args]
        compiled.append(jit_run(self, *stand_ins, warmup=True, **options))
        return compiled[-1]

    def trace_offline(self: Any, *args: Any) -> Any:
        with _offline_tracing():
            return trace(self, *args)

    answers = {
        "is_available": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "get_device_properties": _H200,
        "get_device_name": _H200.name,
    }
    driver = triton.runtime.driver
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer: answer))
        patch: Callable[..., Any] = lambda *a: stack.enter_context(mock.patch.object(*a))  # noqa: E731
        patch(torch.version, "cuda", "13.0")
        # A fake tensor has no address; the real ones come from the caching allocator, aligned to 512 bytes.
        patch(FakeTensor, "data_ptr", lambda _: 0)
        patch(JITFunction, "run", run)
        patch(stored_code, "read", lambda key: read(offline(key)) if keep_generated else [])
        patch(stored_code, "write", lambda key, entries: write(offline(key), entries) if keep_generated else None)
        patch(code_cache.Generated, "_trace", trace_offline)
        patch(runners, "link", lambda *_: None)
        patch(driver, "_active", _OfflineDriver())
        patch(dense, "_CAPABLE", set())
        yield compiled


def fake_cuda(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A contiguous tensor on cuda:0 that has no storage, for `compile_for_sm90`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda:0")


def compile_for_sm90(launch: Callable[[], object]) -> list[Sm90Kernel]:
    """Compile every kernel that `launch` would launch, for sm_90a, on any machine.

    Args:
        launch: calls a launcher on tensors from `fake_cuda`, made inside it.

    Returns:
        The kernels in launch order; one that is launched twice is there twice.
    """
    with _offline_hopper(keep_generated=True) as compiled:
        launch()
    return [_disassemble(kernel) for kernel in compiled]
