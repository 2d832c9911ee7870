"""The one place that imports Helion, and the two ways in which this package runs a kernel function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._inductor.runtime.triton_compat as triton_compat

if not hasattr(triton_compat, "IntelGPUError"):
    # helion 1.5.1 imports this name, which torch 2.11 does not have yet.
    triton_compat.IntelGPUError = type("IntelGPUError", (Exception,), {})

import helion
import helion.language as hl
from helion.autotuner.config_fragment import IntegerFragment

__all__ = ["MAX_REGISTERS", "IntegerFragment", "compiled", "helion", "hl", "interpreted"]

#: A tunable of this name, registered in a kernel, reaches Triton as its option `maxnreg`. Helion's own key for it is
#: refused for grids that are not persistent.
MAX_REGISTERS = "_triton_config_maxnreg"


def compiled(fn: Callable[..., Any], config: helion.Config) -> helion.Kernel[Any]:
    """`fn` compiled through Triton with `config`, once for all lengths and strides.

    `triton_do_not_specialize` keeps Triton from compiling anew when a length becomes a multiple of 16.
    """
    return helion.kernel(fn, config=config, static_shapes=False, triton_do_not_specialize=True)


def interpreted(fn: Callable[..., Any]) -> helion.Kernel[Any]:
    """The same source, run step by step with PyTorch operations: for CPU tensors."""
    return helion.kernel(fn, config=helion.Config(), static_shapes=False, ref_mode=helion.RefMode.EAGER)
