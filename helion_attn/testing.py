"""The error of an output, and how large a kernel's may be."""

from __future__ import annotations

import torch


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
