"""What the tests, examples and benchmarks share: inputs, the error measure, and an sm_90 compiler that needs no GPU."""

from __future__ import annotations

import contextlib
import hashlib
import math
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
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.types import Rope

#: Registers and shared memory of one Hopper SM (CUDA programming guide, compute capability 9.0).
REGISTERS_PER_SM = 65536
SHARED_BYTES_PER_SM = 228 * 1024
#: What the driver keeps of each resident program's shared memory.
RESERVED_SHARED_BYTES = 1024

INPUT_KINDS = ("randn", "outlier", "sink", "biased_v", "outlier_channel")

#: The probability that key 0 holds of every row, by kind.
SINK_SHARES = {"sink_v_small_50": 0.5, "sink_v_small_90": 0.9, "sink_v_small_99": 0.99}

#: Inputs that only the accuracy benchmark has: what trained models do to K, what a sum in the tensor core loses, and
#: what a P of 8 bits loses behind a sink.
HARD_KINDS = ("k_channels", "qk_channels", "v_drifts", "v_drifts_16k", "v_drifts_2k", "wide", *SINK_SHARES)

#: Inputs whose K has its size in few channels of either sign, so that no mean takes it away: how many, how many times
#: as large they are, and by which power of that those of Q are divided.
LARGE_CHANNELS = {
    f"k{count}x{factor}{suffix}": (count, factor, power)
    for count, factor in ((3, 8), (3, 30), (2, 100), (8, 10))
    for suffix, power in (("", 0.5), ("q", 1.0), ("b", 0.0))
}

#: And pairs that RoPE has turned, and channels of log-normal sizes.
CHANNEL_KINDS = (*LARGE_CHANNELS, "k_pairs", "k_lognormal")

#: Keys of a period of V's mean; the length itself where there is none.
DRIFT_PERIODS = {"v_drifts": None, "v_drifts_16k": 16384, "v_drifts_2k": 2048}

#: Channels of Q, and as many others of K, that are large in "outlier_channel".
OUTLIER_CHANNELS = 2


def make_qkv(
    kind: str,
    B: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    D_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Test inputs, BHSD.

    Args:
        kind: "randn": N(0, 1). "outlier": N(0, 1) + N(0, 100) * Bernoulli(0.001), FlashAttention-3's distribution.
            "sink": the first key draws most of the probability. "biased_v": V is |N(0, 1)| + 0.5.
            "outlier_channel": the standard deviation of `OUTLIER_CHANNELS` channels of K is 10 to 30 (trained models
            have a few such, the same for all keys: KIVI, arXiv:2402.02750), and so is that of others of Q. Were they
            the same channels, one key would take nearly all of the probability.
            "k_channels": 3% of K's channels in a head have a mean of +-20, and all of Q's one of N(0, 0.25).
            "qk_channels": those of Q are three times as large besides. "v_drifts": V's mean is 3 in the first half of
            the keys and -3 in the second; "v_drifts_16k" and "v_drifts_2k": with periods of so many keys. "wide": Q and
            K times 3, so that scores are nine times as wide. "sink_v_small_50", "sink_v_small_90" and
            "sink_v_small_99": the first key holds about so many percent of every row's probability, more where a mask
            hides others, and its V is a twentieth of theirs. Without that key it is the same input without a sink.
            "k3x30": 3 channels of K are 30 times as large, with either sign, and the same of Q are divided by the root
            of 30; of "k3x30q" by 30, of "k3x30b" by nothing. "k3x8", "k2x100" and "k8x10", also with "q" and "b", are
            others. "k_pairs": RoPE has turned Q and K, of which 2 pairs of channels are 30 times as large, and divided
            by the root. "k_lognormal": a channel's size is exp(N(0, 1)) in K and exp(N(0, 0.25)) in Q.
        B: batch size; and H, H_kv, M, N, D as everywhere.
        dtype: of the tensors.
        device: where they are made (the values depend on it).
        seed: of the generator.
        D_v: of V; D by default.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q, k, v = randn(B, H, M, D), randn(B, H_kv, N, D), randn(B, H_kv, N, D if D_v is None else D_v)
    if kind == "outlier":

        def with_outliers(x: torch.Tensor) -> torch.Tensor:
            hit = torch.rand(x.shape, device=device, generator=generator) < 0.001
            return x + 10 * randn(*x.shape) * hit

        q, k, v = with_outliers(q), with_outliers(k), with_outliers(v)
    elif kind == "sink":
        # A shared direction u: every query has 4 of it, the first key 4, so that its logit is 16 * |u|^2 / sqrt(D).
        u = torch.nn.functional.normalize(randn(D), dim=0) * D**0.25
        q = q + 4 * u
        k[:, :, 0] += 4 * u
        v[:, :, 0] *= 0.05  # as in trained models, the sink's value is small
    elif kind == "biased_v":
        v = v.abs() + 0.5
    elif kind == "outlier_channel":
        channels = torch.randperm(D, device=device, generator=generator)[: 2 * OUTLIER_CHANNELS]
        deviations = 10 + 20 * torch.rand(len(channels), device=device, generator=generator)
        for x, mine in ((q, slice(None, OUTLIER_CHANNELS)), (k, slice(OUTLIER_CHANNELS, None))):
            x[..., channels[mine]] *= deviations[mine]
    elif kind in ("k_channels", "qk_channels"):
        hit = torch.rand(B, H_kv, 1, D, device=device, generator=generator) < 0.03
        k = k + 20 * randn(B, H_kv, 1, D).sign() * hit
        q = q + 0.5 * randn(B, H, 1, D)
        if kind == "qk_channels":
            q = q * torch.where(hit.repeat_interleave(H // H_kv, 1), 3, 1)
    elif kind in DRIFT_PERIODS:
        v = v + drift(N, DRIFT_PERIODS[kind] or N, device=device)[:, None]
    elif kind == "wide":
        q, k = 3 * q, 3 * k
    elif kind in LARGE_CHANNELS:
        count, factor, power = LARGE_CHANNELS[kind]
        large = torch.randperm(D, device=device, generator=generator)[:count]
        q[..., large] /= factor**power
        k[..., large] *= factor
    elif kind == "k_pairs":
        first = torch.randperm(D // 2, device=device, generator=generator)[:2]
        large = torch.cat([first, first + D // 2])
        q[..., large] /= 30**0.5
        k[..., large] *= 30
        angles = torch.outer(torch.arange(max(M, N)), 10000.0 ** (-torch.arange(D // 2) / (D // 2))).to(device)
        positions = torch.arange(N - M, N, device=device).clamp_min(0)
        q, k = apply_rope_qk(q, k, Rope(angles.cos(), angles.sin(), q_positions=positions))
    elif kind == "k_lognormal":
        q, k = q * torch.exp(0.5 * randn(D)), k * torch.exp(randn(D))
    elif kind in SINK_SHARES:
        # All queries share a direction u that the first key alone has: scores of the others are N(0, |q|^2 / D).
        u = torch.nn.functional.normalize(randn(D), dim=0)
        q, k = (x - (x @ u).unsqueeze(3) * u for x in (q, k))
        lse_of_others = math.log(N) + q.square().sum(3, keepdim=True) / (2 * D)
        score = lse_of_others + math.log(SINK_SHARES[kind] / (1 - SINK_SHARES[kind]))
        # Long enough that queries have about as much of u as of all else.
        length = 4 * D**0.25
        q = q + score * D**0.5 / length * u
        k[:, :, 0] = length * u
        v[:, :, 0] *= 0.05
    elif kind != "randn":
        raise ValueError(f"kind is {kind!r}; it must be one of {(*INPUT_KINDS, *HARD_KINDS, *CHANNEL_KINDS)}")
    return q.to(dtype), k.to(dtype), v.to(dtype)


def drift(N: int, period: int, phase: float = 0.0, device: str | torch.device = "cpu") -> torch.Tensor:
    """A mean of V that changes along the keys, fp32 [N]: 3 sign(sin(2 pi (i / period + phase)))."""
    turns = torch.arange(N, device=device, dtype=torch.float64) / period + phase
    return torch.where(turns % 1 < 0.5, 3.0, -3.0)


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, in fp64. NaN if either holds a NaN."""
    out64, ref64 = out.double(), ref.double()
    return ((out64 - ref64).norm() / ref64.norm()).item()


#: What Hopper's FP8 tensor core may add to a relative error: it keeps about 14 bits of a sum, in every score and, where
#: `promote_every` is 0, in P V.
TENSOR_CORE_ERROR = 2.0**-10


#: Relative error of the GPU's tanh (PTX ISA, `tanh.approx.f32`), and so of a score under a softcap.
TANH_ERROR = 2.0**-11


def error_budget(
    model_error: float,
    out_dtype: torch.dtype,
    factor: float = 1.1,
    device: str | torch.device = "cpu",
    softcap: float | None = None,
) -> float:
    """The largest relative error a kernel may have, when the rounding model's is `model_error`.

    The model has the kernel's rounding points; what it lacks is the order of fp32 sums and the last ulps of exp2. Those
    can move a score or a P across a rounding boundary, hence a factor, and the output's own cast, hence a floor of one
    unit in the last place; on a GPU, the tensor core's own sums besides.

    Args:
        model_error: `relative_error(reference.fp8_attention(...), reference.attention(...))`.
        out_dtype: dtype of the kernel's output.
        factor: how many times the model's error is allowed.
        device: where the kernel ran.
        softcap: what it was given: no score is larger, and a P is off by as much as its score.
    """
    hardware = TENSOR_CORE_ERROR + TANH_ERROR * (softcap or 0.0)
    if torch.device(device).type == "cpu":
        hardware = 0.0
    return factor * model_error + torch.finfo(out_dtype).eps + hardware


# ---------------------------------------------------------------------------------------------------------------------
# The sm_90 compiler. Everything below runs with no GPU and no driver: Helion is told that an H200 is there, binds
# tensors that have no storage, and Triton compiles for the target it is named. Nothing is launched.
# ---------------------------------------------------------------------------------------------------------------------

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
    """One compiled kernel: what ptxas and the disassembler say of it.

    Attributes:
        name: of the kernel function.
        registers: per thread.
        shared_bytes: of dynamic shared memory per program.
        num_warps: per program.
        opcodes: how often each SASS opcode occurs, without its modifiers.
        ptx: the PTX text.
        sass: the disassembly.
        passes: what this package's passes did to it, each applied or refused and why.
    """

    name: str
    registers: int
    shared_bytes: int
    num_warps: int
    opcodes: Counter[str]
    ptx: str
    sass: str
    passes: tuple[Outcome, ...] = ()

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

    from helion_attn.compiler import code_cache, kernels, stored_code
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
        patch(kernels, "link", lambda *_: None)
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
