"""The two ways in which this package runs a kernel function: compiled for a GPU, and interpreted."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from helion_attn.compiler import code_cache, launch_plans, triton_hook
from helion_attn.compiler.helion_adapter import helion

#: Of a tensor's address, in bytes: what TMA and the widest loads ask for.
ALIGNMENT = 16

#: Argument lists that a kernel remembers.
MAX_REMEMBERED = 4096


class Compiled:
    """A kernel function compiled through Triton with one config: once a specialisation, for all lengths and strides.

    Helion finds the code for a call in 15 us if all sizes are those of the last call, and in 2500 otherwise, most of
    which prepare for the next call of these sizes; a process that is new takes seconds. `code_cache` finds it instead,
    and this remembers the launch (`launches`) that it led to, for every set of sizes and specialisations.
    """

    def __init__(self, kernel: helion.Kernel[Any]) -> None:
        self._generated = code_cache.Generated(kernel)
        self._positions: tuple[list[int], list[int]] | None = None
        self._found: dict[Hashable, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> None:
        """Run it. An argument is a tensor in every call, or in none."""
        if self._positions is None:
            kinds = [isinstance(arg, torch.Tensor) for arg in args]
            self._positions = (
                [i for i, is_tensor in enumerate(kinds) if is_tensor],
                [i for i, is_tensor in enumerate(kinds) if not is_tensor],
            )
        of_tensors, of_values = self._positions
        # All that Helion looks at: layouts, alignment, which arguments are the same tensor, and values.
        tensors = {id(args[i]): args[i] for i in of_tensors}
        layouts = [(x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT) for x in tensors.values()]
        places = list(tensors)
        same = [places.index(id(args[i])) for i in of_tensors]
        key = (args[of_tensors[0]].device, *layouts, *same, *[args[i] for i in of_values])
        found = self._found.get(key)
        if found is not None:
            found(*args)
            return
        if len(self._found) >= MAX_REMEMBERED:
            self._found.clear()
        run = triton_hook.with_passes(self._generated.find(args))
        self._found[key] = launch_plans.launch_first(run, args)


def compiled(fn: Callable[..., Any], config: helion.Config) -> Compiled:
    """`fn` compiled through Triton with `config`, once for all lengths and strides.

    `triton_do_not_specialize` keeps Triton from compiling anew when a length becomes a multiple of 16. A `key` keeps
    Helion from preparing for the next call of these sizes.
    """
    kernel = helion.kernel(
        fn, config=config, static_shapes=False, triton_do_not_specialize=True, key=lambda *args: None
    )
    return Compiled(kernel)


def interpreted(fn: Callable[..., Any]) -> helion.Kernel[Any]:
    """The same source, run step by step with PyTorch operations: for CPU tensors."""
    return helion.kernel(fn, config=helion.Config(), static_shapes=False, ref_mode=helion.RefMode.EAGER)
