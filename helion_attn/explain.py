"""`plan`: a call of `attention` as a value. `explain`: which kernels it takes, and why no others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from helion_attn import auto, ops, plans
from helion_attn.api import attention, dense_problem, split_tensors
from helion_attn.backward.dense import attention_training, backward_kernel
from helion_attn.backward.prologue import without_prologue
from helion_attn.compiler.passes.expected import expected_passes
from helion_attn.compiler.passes.outcome import Outcome
from helion_attn.configs import LargeTileConfig, TileConfig
from helion_attn.names import options_of, reject_unknown_kwargs
from helion_attn.ops.choose import choose, reasons, shape_of_dense
from helion_attn.options import CallOptions
from helion_attn.plans import Plan
from helion_attn.problem import DenseArgs
from helion_attn.types import BALANCED, BlockMask, RMSNorm, Rope, is_auto
from helion_attn.validate.block_mask import check_no_tail
from helion_attn.validate.dense import check_is_norm, check_no_gradients
from helion_attn.validate.derivatives import needs_gradient

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

#: SMs of an H200 and of an H100 SXM: what is said of CPU tensors is said of these.
HOPPER_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Explanation:
    """The kernels of a call of `attention`, and why these. It prints as text.

    Attributes:
        device: what runs it.
        launches: kernels of this package, in their order: preprocessing, attention, the merging of splits. None where
            recipe="auto" chose PyTorch's attention: what follows is then empty, 1 or False.
        kernel: the one of attention, or "scaled_dot_product_attention" of PyTorch.
        tile: its config. Of CPU tensors, whose interpreter has no use for warps and stages, what an H200 would take.
            None of PyTorch's.
        passes: over Triton's IR and PTX, each applied or refused and why; none where nothing was compiled.
        expected: names of the passes that the config was timed with.
        registers: of a thread, as the GPU has loaded the kernel; None where nothing was compiled.
        spills: registers that did not fit, likewise.
        splits: of the keys, one program each, whose results are merged.
        quantises_q: whether the attention kernel quantises Q, which is not packed then.
        lists_keys: whether a block mask says which key blocks a row block visits.
        shares_tiles: whether the query heads of a KV head share tiles.
        heads_at_once: heads whose longest rows begin together, so that the GPU does not run dry at the end.
        backward: where an input requires grad, the kernel of the backward pass, and why that; of CPU tensors, what an
            H200 would take. With `return_lse` also that of a gradient of lse, where it is another. None where there is
            no such pass, or it is PyTorch's.
        reasons: why not others, a sentence each.
    """

    device: str
    launches: tuple[str, ...]
    kernel: str
    tile: TileConfig | LargeTileConfig | None
    passes: tuple[Outcome, ...]
    expected: tuple[str, ...]
    registers: int | None
    spills: int | None
    splits: int
    quantises_q: bool
    lists_keys: bool
    shares_tiles: bool
    heads_at_once: int
    backward: str | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        tile = self.tile
        reasons = [f"  why: {reason}" for reason in self.reasons]
        if tile is None:
            return "\n".join([f"{self.kernel} of PyTorch on {self.device}", *reasons])
        registers = f"at most {tile.max_registers} registers a thread"
        if self.registers is not None:
            registers += f", of which {self.registers} are used and {self.spills} spill"
        before = self.launches[: self.launches.index(self.kernel)]
        lines = [
            f"{self.kernel} on {self.device}",
            f"  tile: {tile.bm} query rows by {tile.bn} keys, {tile.num_warps} warps, {tile.num_stages} stages, "
            f"{registers}, {tile.ctas_per_sm} programs an SM",
            f"  keys: {'those that the block mask lists, ' if self.lists_keys else ''}"
            f"{f'{self.splits} splits, merged' if self.splits > 1 else 'not split'}",
            f"  heads: {'those of a KV head share tiles' if self.shares_tiles else 'none share tiles'}; "
            f"{self.heads_at_once} at once",
            f"  queries: {'quantised by the kernel' if self.quantises_q else 'packed before'}",
            f"  launches before attention: {', '.join(before) or 'none'}",
        ]
        if self.backward is not None:
            lines.append(f"  backward: {self.backward}")
        if self.passes:
            lines += [f"  pass {outcome}" for outcome in self.passes]
        else:
            lines.append(f"  passes: nothing was compiled here; the config has {', '.join(self.expected) or 'none'}")
        return "\n".join([*lines, *reasons])


@reject_unknown_kwargs
@options_of(attention)
def explain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: Unpack[CallOptions]
) -> Explanation:
    """Say which kernel, tile, passes and splits `attention` takes for these arguments, and why not others.

    On a GPU it makes the call once, and reads what the kernels say of themselves. Of CPU tensors nothing is computed:
    it names what the interpreter would run, and the tile, splits and groups that an H200 would take.

    Args:
        q: and all others as in `attention`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        print(ha.explain(q, k, v, causal=True))
    """
    chooses = is_auto(options.get("recipe"))
    if chooses:
        options["recipe"] = BALANCED
    problem = dense_problem(q, k, v, return_lse=return_lse, **options)
    device, count = "the CPU, in Helion's interpreter; the rest is of an H200", HOPPER_MULTIPROCESSORS
    if q.is_cuda:
        properties = torch.cuda.get_device_properties(q.device)
        device, count = properties.name, properties.multi_processor_count
    chosen: tuple[str, ...] = ()
    if chooses:
        where = device if q.is_cuda else "the CPU"
        asked = {"return_lse": return_lse, **options}
        chosen = (auto.reason(problem, asked, where),)
        if auto.pytorch_call(problem, asked) is not None:
            return _of_pytorch(where, chosen)
    operation, backward = ops.attention, None
    if needs_gradient(q, k, v, problem.scores.sinks, problem.norm.q_weight, problem.norm.k_weight):
        check_no_tail(problem.block_mask.tail, "where an input requires grad")
        problem = without_prologue(problem)
        operation, backward = attention_training, _backward(problem, return_lse)
    shape = shape_of_dense(problem)
    choice = choose(shape, count, problem if backward is None else None)
    made = operation.plan(problem, count)
    names = tuple(launch.kernel.name for launch in made.launches)
    kernel = None
    if q.is_cuda:
        from helion_attn.compiler import triton_hook

        made.run(operation.tensors(problem))
        kernel = dict(zip(names, made.compiled(), strict=False)).get(choice.kernel)
    two_level = shape.recipe.is_two_level(choice.tile.two_level)
    return Explanation(
        device=device,
        launches=names,
        kernel=choice.kernel,
        tile=choice.tile,
        passes=() if kernel is None else triton_hook.outcomes(kernel),
        expected=expected_passes(choice.tile, two_level, choice.quantises_q),
        registers=getattr(kernel, "n_regs", None),
        spills=getattr(kernel, "n_spills", None),
        splits=choice.splits,
        quantises_q=choice.quantises_q,
        lists_keys=shape.block_sparse,
        shares_tiles=choice.pack_gqa,
        heads_at_once=choice.head_group,
        backward=backward,
        reasons=(*chosen, *reasons(shape, choice, count, device)),
    )


def _backward(problem: DenseArgs, return_lse: bool) -> str:
    """The kernel of the backward pass, and the one of a gradient of lse where that is another."""
    kernel, of_lse = (backward_kernel(problem, has_lse_gradient) for has_lse_gradient in (False, True))
    if not return_lse or of_lse.name == kernel.name:
        return str(kernel)
    return f"{kernel}; where lse gets a gradient, {of_lse}"


def _of_pytorch(device: str, reasons: tuple[str, ...]) -> Explanation:
    return Explanation(
        device=device,
        launches=(),
        kernel="scaled_dot_product_attention",
        tile=None,
        passes=(),
        expected=(),
        registers=None,
        spills=None,
        splits=1,
        quantises_q=False,
        lists_keys=False,
        shares_tiles=False,
        heads_at_once=1,
        backward=None,
        reasons=reasons,
    )


#: Options of `attention` that hold tensors: a plan is called with those that it was made with.
CALLED_WITH = ("rope", "q_norm", "k_norm", "sinks", "block_mask")


class AttentionPlan:
    """A call of `attention` as a value: print it, or call it on tensors of the layouts that it was made for.

    Printed, it is the fills and launches in their order, what each kernel is compiled for, and what it returns. Called,
    it does what `attention` does, without looking for its plan.
    """

    def __init__(self, made: Plan, key: Hashable, return_lse: bool, texts: Mapping[str, str]) -> None:
        self._plan, self._key, self._return_lse, self._texts = made, key, return_lse, texts

    def __str__(self) -> str:
        return str(self._plan)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rope: Rope | None = None,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: torch.Tensor | None = None,
        block_mask: BlockMask | FlexMask | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run it on the current stream.

        Args:
            q: and k, v, rope, q_norm, k_norm, sinks, block_mask: as in the call that made it, with shapes, strides,
                dtypes, device and alignment as they were there.

        Raises:
            TypeError: q, k or v is no tensor, or a norm no `helion_attn.RMSNorm`.
            ValueError: a tensor is missing, is not as it was there, or is not plain.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        check_is_norm("q_norm", q_norm)
        check_is_norm("k_norm", k_norm)
        tensors = {"rope": rope, "q_norm": q_norm, "k_norm": k_norm, "sinks": sinks, "block_mask": block_mask}
        given, key = _given(q, k, v, tensors)
        if key is None or key != self._key:
            raise ValueError(f"{self._unlike(_texts(q, k, v, tensors))} make another with helion_attn.plan")
        out, lse = self._plan.run(given)
        return (out, lse) if self._return_lse else out

    def _unlike(self, texts: dict[str, str]) -> str:
        """Say in words which argument first differs from the plan's call."""
        for name in (*self._texts, *texts):
            if name not in texts:
                return f"the plan is for a call with {name}, and {name} is None; pass it, or"
            if name not in self._texts:
                return f"the plan is for a call without {name}, and {name} is given; leave it out, or"
            if texts[name] != self._texts[name]:
                return f"the plan is for {name} of {self._texts[name]}, and {name} is {texts[name]};"
        return (
            "the plan is for tensors of these shapes that are plain, require no grad, and have the alignment that they "
            "had there, and for a block mask of the same lengths; where it had one tensor twice, it must have it again;"
        )


def _texts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]) -> dict[str, str]:
    """Say in words what a plan depends on of each given argument but a block mask."""
    texts = {
        name: f"{x.dtype} {[*x.shape]} with strides {[*x.stride()]} on {x.device}"
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    for name in CALLED_WITH:
        if (x := options.get(name)) is not None:
            # Sinks are cast.
            texts[name] = f"shape {[*x.shape]}" if name == "sinks" else repr(x)
            if name == "block_mask":
                texts[name] = "" if getattr(x, "tail", None) is None else "with a tail"
    return texts


def _given(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
) -> tuple[list[torch.Tensor], Hashable | None]:
    """The tensors of a call, and all that its plan depends on of them and their roles; None of what is not plain."""
    more, rest = split_tensors(**{name: options.get(name) for name in CALLED_WITH})
    given = [x for x in (q, k, v, *more) if x is not None]
    return given, plans.key_of("plan", given, (*rest, *[x is None for x in more]))


@reject_unknown_kwargs
@options_of(attention)
def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False, **options: Unpack[CallOptions]
) -> AttentionPlan:
    """What `attention` does for tensors of these layouts, as a value; nothing is computed.

    Args:
        q: and all others as in `attention`, but that `recipe` is not "auto". Only layouts are looked at.

    Returns:
        What prints itself, and can be called on other tensors: `ha.plan(q, k, v, causal=True)(q2, k2, v2)`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        plan = ha.plan(q, k, v, causal=True)
        print(plan)
        out = plan(q, k, v)
    """
    problem = dense_problem(q, k, v, return_lse=return_lse, **options)
    check_no_gradients(q, k, v, options)
    _, key = _given(q, k, v, options)
    return AttentionPlan(ops.attention.plan(problem), key, return_lse, _texts(q, k, v, options))
