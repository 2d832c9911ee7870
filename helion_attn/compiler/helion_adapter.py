"""The one place that imports Helion, and what its kernels are told of configs and devices."""

from __future__ import annotations

import functools
import importlib

import torch
import torch._inductor.runtime.triton_compat as triton_compat

if not hasattr(triton_compat, "IntelGPUError"):
    # helion 1.5.1 imports this name, which torch 2.11 does not have yet.
    triton_compat.IntelGPUError = type("IntelGPUError", (Exception,), {})

import helion
import helion._compiler.backend_registry as helion_backends
import helion._compiler.compile_environment as helion_environment
import helion.language as hl
from helion.autotuner.config_fragment import IntegerFragment
from helion.runtime import default_launcher

from helion_attn.configs import LargeTileConfig, TileConfig

__all__ = [
    "MAX_REGISTERS",
    "IntegerFragment",
    "default_launcher",
    "helion",
    "helion_backends",
    "helion_config",
    "helion_environment",
    "helion_kernel",
    "hl",
    "multiprocessors",
]

#: A module that is hidden by a function of its name.
helion_kernel = importlib.import_module("helion.runtime.kernel")

#: A tunable of this name, registered in a kernel, reaches Triton as its option `maxnreg`. Helion's own key for it is
#: refused for grids that are not persistent.
MAX_REGISTERS = "_triton_config_maxnreg"


def helion_config(tile: TileConfig | LargeTileConfig, grid_dims: int = 2) -> helion.Config:
    """The Helion config of an attention kernel, from a row of its tuned table; the last grid dimension is fastest."""
    return helion.Config(
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        range_num_stages=[0, tile.num_stages],
        loop_orders=[[*reversed(range(grid_dims))]],
        indexing="tensor_descriptor",
        host_tensor_descriptors=True,
        **{MAX_REGISTERS: tile.max_registers},
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """SMs of a GPU; the interpreter runs one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
