"""What the tensor cores can do: the speed of a large GEMM, beside which the speed of attention is seen."""

from __future__ import annotations

import torch
from harness import time_interleaved
from problem import Options


def gemm_tflops(options: Options) -> dict[str, float]:
    """TFLOP/s of PyTorch's GEMMs, 8192 x 8192 x 8192, by the dtype of what is multiplied; bf16 out.

    The FP8 one sums in the tensor core, as its fastest and as the one-level kernels do.
    """
    n = 256 if options.device.type == "cpu" else 8192
    a, b = torch.randn(2, n, n, device=options.device).bfloat16()
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=options.device)

    def fp8() -> torch.Tensor:
        # FP8 takes the second operand column-major only.
        return torch._scaled_mm(a8, b8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    ms = time_interleaved({"e4m3": fp8, "bf16": lambda: a @ b.t()}, options.device, options.repeats)
    return {dtype: float(f"{2 * n**3 / time / 1e9:.6g}") for dtype, time in ms.items()}
