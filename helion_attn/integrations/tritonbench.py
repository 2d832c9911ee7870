"""The tritonbench plugin: helion_attn as a backend of tritonbench's `fp8_attention` operator.

tritonbench (https://github.com/meta-pytorch/tritonbench) is not on PyPI: clone it and put the clone on
PYTHONPATH, or install it with `pip install --editable` (a wheel of it lacks a data file). Then, in the clone,

    python run.py --op fp8_attention --plugin helion_attn.tritonbench.register ...

or, with a clone too old to know `--plugin`, and from anywhere,

    python -m helion_attn.tritonbench --op fp8_attention ...

Useful options: `--metrics latency,tflops,helion_attn_error`, `--only helion_attn`, `--causal`, `--seq-len 4096`,
`--d-head 128 --n-heads 24` (their product must be `--embedding-dim`, 3072 by default). On a machine without a GPU,
`--device cpu --metrics helion_attn_error` runs in the interpreter, but not in newer clones: their operator asks Triton
for a GPU when it is imported. `--isolate` runs `run.py` anew, which needs `--plugin`.
The operator does not halve its FLOPs when causal, and its own metric `accuracy` passes an all-zeros output:
`helion_attn_error` is there for that, and measures every backend.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from typing import Any

import torch

from helion_attn import reference
from helion_attn.api import attention_quantized, quantize
from helion_attn.testing import relative_error

OPERATOR = "fp8_attention"
BACKEND = "helion_attn"
METRIC = "helion_attn_error"


def register() -> None:
    """Add the backend `helion_attn` and the metric `helion_attn_error` to the `fp8_attention` operator.

    tritonbench calls this whenever it constructs an operator; calling it again changes nothing.
    """
    from tritonbench.operators.fp8_attention.operator import Operator
    from tritonbench.utils.triton_op import REGISTERED_METRICS, register_benchmark

    add_backend = register_benchmark(operator_name=OPERATOR, func_name=BACKEND, label=BACKEND, fwd_only=True)
    setattr(Operator, BACKEND, add_backend(backend))
    # Not register_metric: it takes the operator's name from the module's path, and appends at every call.
    if METRIC not in REGISTERED_METRICS[OPERATOR]:
        REGISTERED_METRICS[OPERATOR].append(METRIC)
    setattr(Operator, METRIC, error)


def backend(self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Quantise Q, K and V ([B, H, N, D]) and return what tritonbench times: the attention kernel alone."""
    # The operator's inputs require grad (except in mode fwd_no_grad), and packed tensors have no gradient.
    qkv = quantize(q.detach(), k.detach(), v.detach())
    causal, sm_scale = self.causal, self.sm_scale
    return lambda: attention_quantized(qkv, causal=causal, sm_scale=sm_scale)


def error(self: Any, fn: Any, example_inputs: tuple[torch.Tensor, ...], metrics: Any) -> float:
    """A backend's relative error ||out - ref|| / ||ref|| against the fp64 oracle on the operator's inputs.

    An all-zeros output gives 1, one with a nan gives nan. tritonbench defines the signature; `metrics`, what it
    has measured so far, is of no use here.
    """
    q, k, v = (t.detach() for t in example_inputs)
    # Not fn(), which was timed: in mode fwd_no_grad older checkouts wrap it in one that returns nothing.
    with torch.no_grad():
        out = getattr(self, fn._name)(q, k, v)()

    ref = reference.attention(q, k, v, causal=self.causal, sm_scale=self.sm_scale)
    return relative_error(out, ref)


def main(argv: list[str] | None = None) -> None:
    """Run tritonbench's own command line, with helion_attn registered."""
    register()
    from tritonbench.utils import path_utils, run_utils

    if hasattr(run_utils, "tritonbench_run"):
        run = run_utils.tritonbench_run
    else:  # older checkouts have it in the script beside the package
        run = runpy.run_path(str(path_utils.REPO_PATH / "run.py"))["run"]
    run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    main()
