"""`recipe="auto"`: the default preset or PyTorch's own attention, whichever was the faster where both were measured.

Where an input requires grad it goes by the time of both passes, which has a table of its own.

PyTorch's is `scaled_dot_product_attention`, with the backend that PyTorch chooses, called so that no `helion_attn.sdpa`
around it takes the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from helion_attn import plans, public_calls
from helion_attn.configs import read_table
from helion_attn.problem import DenseArgs
from helion_attn.types import preset_name
from helion_attn.validate.derivatives import needs_gradient

#: The file of crossovers, which `benchmarks/report.py` makes of the results of suites `auto` and `training`.
TABLE = "auto.json"


class Crossover(NamedTuple):
    """From which length on the default preset is faster."""

    gpu: str  # that was measured
    D: int  # the largest head dim that it is for
    causal: bool  # whether the mask is
    group: int  # the fewest query heads of a KV head that it is for
    heads: int  # B H, the fewest that it is for
    from_length: int | None  # the least of M and N; None if it never is


#: Read at import: torch.compile cannot trace files.
CROSSOVERS = tuple(Crossover(**row) for row in read_table(TABLE))

#: Of the forward and the backward pass together.
TRAINING_CROSSOVERS = tuple(Crossover(**row) for row in read_table(TABLE, "training"))

#: Whose crossovers are taken on a GPU that was not measured, and for CPU tensors; another's where it has none.
FALLBACK_GPU = "NVIDIA H100 80GB HBM3"

#: Options of `attention` that PyTorch's has too, or that say which of the two it is.
OPTIONS = frozenset({"causal", "sm_scale", "layout", "recipe"})

#: Largest head dim of PyTorch's fast backends, and what it must be a multiple of.
MOST_D, STEP_D = 256, 8


class PyTorchCall(NamedTuple):
    """PyTorch's attention, as an operation and as its plan: what it is told besides its tensors."""

    causal: bool
    sm_scale: float
    grouped: bool
    bshd: bool

    def __call__(self, problem: DenseArgs) -> tuple[torch.Tensor, None]:
        """The output, contiguous, and no lse."""
        # By this name, which no mode of `helion_attn.sdpa` takes.
        attend = torch.ops.aten.scaled_dot_product_attention.default
        return self._out(attend, problem.q, problem.k, problem.v), None

    def plan(self, problem: DenseArgs) -> PyTorchCall:
        """For tensors of one layout as for those of another."""
        return self

    def call_of(self, problem: DenseArgs) -> public_calls.PublicCall:
        """Return the call of `attention` that chose it."""
        call = public_calls.of_attention(problem)
        return call._replace(options={**call.options, "recipe": "auto"})

    @property
    def kernels(self) -> str:
        """Name what it launches."""
        return "PyTorch's scaled_dot_product_attention"

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
        """Run it on tensors in the call's layout, as a plan does. No mode listens then.

        The name that modes take costs 4 us less than the other.
        """
        q, k, v = tensors
        if self.bshd:
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return self._out(torch._C._nn.scaled_dot_product_attention, q, k, v), None

    def _out(self, attend: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(q.device.type):
            with torch.autocast(q.device.type, enabled=False):  # it would cast to another dtype
                return self._heads_first(attend, q, k, v)
        return self._heads_first(attend, q, k, v)

    def _heads_first(
        self, attend: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = attend(q, k, v, None, 0.0, self.causal, scale=self.sm_scale, enable_gqa=self.grouped)
        return (out.transpose(1, 2) if self.bshd else out).contiguous()


def other_option(options: Mapping[str, Any]) -> str | None:
    """An option that is given and that PyTorch's fast attention does not have, or None."""
    return next((name for name, x in options.items() if name not in OPTIONS and x is not None and x is not False), None)


def why_not_pytorch(problem: DenseArgs, options: Mapping[str, Any]) -> str | None:
    """Name what PyTorch's fast attention lacks for a call; None if it lacks nothing."""
    q, k, v, scores = problem.q, problem.k, problem.v, problem.scores
    if (name := other_option(options)) is not None:
        return f"{name} is given"
    if scores.sm_scale == 0:
        return "sm_scale is 0"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "q, k and v are neither bf16 nor fp16"
    if v.size(3) != q.size(3):
        return "V's head dim is not Q's"
    if q.size(3) > MOST_D or q.size(3) % STEP_D:
        return f"the head dim is not a multiple of {STEP_D} up to {MOST_D}"
    if any(x.stride(3) != 1 for x in (q, k, v)):
        return "a tensor's last dimension has another stride than 1"
    if scores.right == 0 and q.size(2) != 1 and q.size(2) != k.size(2):
        return "the mask is causal and M is not N"
    return None


def crossover(problem: DenseArgs) -> Crossover:
    """The row that a call goes by: of its card, mask and head dim, with the largest group and most heads it reaches.

    With fewer heads than were measured it is the row of the fewest.
    """
    q, H_kv, trains = problem.q, problem.k.size(1), _trains(problem)
    gpu, causal = gpu_of_table(q.device, trains), _hides_keys(problem)
    rows = [row for row in table(trains) if row.gpu == gpu and row.causal == causal]
    D = min(row.D for row in rows if q.size(3) <= row.D)
    group = max(row.group for row in rows if row.D == D and row.group * H_kv <= q.size(1))
    rows = sorted((row for row in rows if (row.D, row.group) == (D, group)), key=lambda row: row.heads)
    reached = [row for row in rows if row.heads <= q.size(0) * q.size(1)]
    return reached[-1] if reached else rows[0]


def table(trains: bool) -> tuple[Crossover, ...]:
    """The crossovers of both passes, or of the forward pass alone."""
    return TRAINING_CROSSOVERS if trains else CROSSOVERS


def _trains(problem: DenseArgs) -> bool:
    return needs_gradient(problem.q, problem.k, problem.v)


def _hides_keys(problem: DenseArgs) -> bool:
    """Whether a causal mask hides any; a single query is the last one."""
    # A branch, since torch.compile makes a guard of that alone.
    return problem.scores.right == 0 if problem.q.size(2) != 1 else False


def pytorch_call(problem: DenseArgs, options: Mapping[str, Any]) -> PyTorchCall | None:
    """The call of PyTorch's attention, or None where the default preset is chosen.

    It depends on shapes, dtypes, strides, options, the card, and on whether a gradient is needed. Of symbolic shapes it
    is a guard.
    """
    if why_not_pytorch(problem, options) is not None or _is_long(problem, crossover(problem)):
        return None
    q, k = problem.q, problem.k
    return PyTorchCall(_hides_keys(problem), problem.scores.scale, q.size(1) != k.size(1), problem.bshd)


def _is_long(problem: DenseArgs, row: Crossover) -> bool:
    """Whether the default preset is faster; fewer heads than the row's need as many more rows each."""
    if row.from_length is None:
        return False
    (B, H, M), N = problem.q.shape[:3], problem.k.size(2)
    return min(M, N) * min(B * H, row.heads) >= row.from_length * row.heads


def reason(problem: DenseArgs, options: Mapping[str, Any], device: str) -> str:
    """Which of the two is chosen on a device of this name and why, in a sentence."""
    preset = preset_name(problem.recipe)
    lacking = why_not_pytorch(problem, options)
    if lacking is not None:
        return f"auto takes {preset}: PyTorch's attention is not considered where {lacking}"
    row, (B, H, M, _D), N = crossover(problem), problem.q.shape, problem.k.size(2)
    taken = preset if _is_long(problem, row) else "PyTorch's attention"
    mask = "causal" if row.causal else "full"
    passes = "both passes, " if _trains(problem) else ""
    kind = f"{passes}D up to {row.D}, {mask}, {row.heads} heads, {row.group} of a KV head, on {row.gpu}"
    if row.from_length is None:
        limit = f"{preset} was faster at no length"
    else:
        limit = f"{preset} was faster from length {row.from_length} on"
    if row.heads > B * H:
        limit += f", and {B * H} heads need {row.heads / (B * H):.3g} times as much"
    text = f"auto takes {taken}: with {B * H} heads the least of M and N is {min(M, N)}; {limit} ({kind})"
    return text if device == row.gpu else f"{text}; not measured on {device}"


def gpu_of_table(device: torch.device, trains: bool = False) -> str:
    """Whose crossovers a device goes by, in the table of both passes or in the other."""
    if (device, trains) not in _GPUS:
        measured = {row.gpu for row in table(trains)}
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else FALLBACK_GPU
        _GPUS[device, trains] = next((gpu for gpu in (name, FALLBACK_GPU) if gpu in measured), min(measured))
    return _GPUS[device, trains]


# What torch.compiler.assume_constant_result sets; that imports all of torch._dynamo.
vars(gpu_of_table)["_dynamo_marked_constant"] = True

_GPUS: dict[tuple[torch.device, bool], str] = {}


def takes_pytorch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any], problem: Callable[[], DenseArgs]
) -> bool:
    """Whether `pytorch_call` is not None, for a choice that is made before the call.

    Args:
        q: and k, v, options, as `attention` has them.
        k: the keys.
        v: the values.
        options: all else.
        problem: checks the call and makes a problem of it. It is not asked of a call like one that was checked before.
    """
    key = plans.key_of("auto", (q, k, v), (*options, *options.values()))
    taken = plans.lookup(key)
    if taken is None:
        taken = pytorch_call(problem(), options) is not None
        if key is not None:
            plans.remember(key, taken)
    return bool(taken)
