"""How an operation of training gets its gradients: autograd keeps what the backward operation is asked of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from helion_attn.ops.declare import Operation, Structure


def differentiate(
    operation: Operation[Any],
    arguments: type,
    kept: Callable[[Any, Sequence[torch.Tensor]], Any],
    backward: Operation[Any],
    backward_arguments: type,
    inputs: Sequence[str],
) -> None:
    """Give an operation a backward pass, which is another operation, and has no derivative itself.

    Args:
        operation: its first outputs are out and lse, and the others have no gradient.
        arguments: the NamedTuple that it takes.
        kept: what the backward pass takes, of these and the outputs, a `backward_arguments`; its `d_out` and `d_lse`
            may be anything.
        backward: returns a gradient for each of `inputs`, an empty one for what was None.
        backward_arguments: the NamedTuple that it takes.
        inputs: paths of the arguments that get a gradient.
    """
    structure, of_backward = Structure(arguments), Structure(backward_arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        values = of_backward.flat(kept(structure.build(inputs), output)._replace(d_out=None, d_lse=None))
        ctx.save_for_backward(*[x if isinstance(x, torch.Tensor) else None for x in values])
        ctx.rest = [None if isinstance(x, torch.Tensor) else x for x in values]

    def run_backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None, *others: None) -> Any:
        found = dict.fromkeys(structure.paths)
        if d_out is not None or d_lse is not None:
            saved = zip(ctx.saved_tensors, ctx.rest, strict=True)
            asked = of_backward.build([value if x is None else x for x, value in saved])
            d_out = torch.zeros_like(asked.out) if d_out is None else d_out
            found.update(zip(inputs, backward(asked._replace(d_out=d_out, d_lse=d_lse)), strict=True))
        needed = zip(found.values(), ctx.needs_input_grad, strict=True)
        return tuple(x if is_needed else None for x, is_needed in needed)

    def refuse(ctx: Any, *gradients: torch.Tensor) -> None:
        raise RuntimeError("helion_attn has no double backward: its gradients have no gradients")

    torch.library.register_autograd(f"helion_attn::{operation.name}", run_backward, setup_context=setup_context)
    torch.library.register_autograd(f"helion_attn::{backward.name}", refuse)


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError for an output dtype of 8 bits, which no gradient can have."""
    if dtype.itemsize == 1:
        raise TypeError(f"out_dtype is {dtype}; where an input requires grad it must be bfloat16, float16 or float32")
