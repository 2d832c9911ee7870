"""Schedules: which preset and mask a call of a diffusion model takes, by its step and its layer.

The step is counted by the scheduler of the pipeline, or given by the caller. The layer is the place of the attention
module in the model, which hooks on the modules tell.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from helion_attn.masks import Reordered
from helion_attn.masks.blocks import BlockMask
from helion_attn.types import Auto, Recipe, RecipeName, as_choice
from helion_attn.validate.dense import described

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    Preset = Recipe | RecipeName | Auto
    Pattern = BlockMask | FlexMask | Reordered

    #: How a call attends, of its step, layer, q [B, H, M, D], k [B, H_kv, N, D]: by a preset, with a mask, or both.
    ScheduleFunction = Callable[
        [int, int, torch.Tensor, torch.Tensor], Preset | Pattern | tuple[Preset, Pattern] | None
    ]

#: What a schedule may give.
ACCEPTED = (
    "a preset, by name or as a Recipe, a mask, which is a BlockMask, PyTorch's or a masks.Reordered, a tuple of a "
    "preset and a mask, or None"
)


#: The step that each schedule is in.
_STEPS: ContextVar[Mapping[Schedule, int]] = ContextVar("steps", default=MappingProxyType({}))


class Schedule:
    """Give a schedule its steps in a sampling loop of your own, without a scheduler of diffusers.

    The model's calls inside `with schedule.step(i):` belong to step i, in the thread or asyncio task that enters it.
    Outside of it the model raises `RuntimeError`.

    Args:
        function: of step, layer, q and k, as `register_diffusers` has it.

    Raises:
        TypeError: `function` is no function.

    Example:
        import diffusers

        model = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=32, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1,
            in_channels=4, out_channels=4,
        )  # fmt: skip
        schedule = ha.Schedule(lambda step, layer, q, k: "bf16" if step < 1 else None)
        ha.fuse_diffusers(model, schedule=schedule)
        for step, time in enumerate((900, 500)):
            with schedule.step(step), torch.no_grad():
                out = model(torch.randn(1, 4, 2, 4, 4), torch.tensor([time]), torch.randn(1, 5, 16)).sample
    """

    def __init__(self, function: ScheduleFunction) -> None:
        if not callable(function):
            raise TypeError(f"function is {described(function)}; it must be a function of step, layer, q and k")
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Schedule:
        """Return the same: a copied model follows the steps that the original does."""
        return self

    @contextmanager
    def step(self, i: int) -> Iterator[None]:
        """Say that the model's calls inside belong to step i.

        Raises:
            TypeError, ValueError: `i` is no int, or negative.
        """
        if not isinstance(i, int) or isinstance(i, bool):
            raise TypeError(f"i is {described(i)}; it must be an int, the number of the step")
        if i < 0:
            raise ValueError(f"i is {i}; it must be the number of the step, from 0")
        token = _STEPS.set({**_STEPS.get(), self: i})
        try:
            yield
        finally:
            _STEPS.reset(token)

    def current(self) -> int:
        """Return the step that this thread or task is in."""
        step = _STEPS.get().get(self)
        if step is None:
            raise RuntimeError(
                "helion_attn: schedule has no step here; call the model inside `with schedule.step(i)`, i from 0"
            )
        return step


#: The `step_index` of a generation's first step, of schedulers that are not told where they begin; None while it runs.
FIRST: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


class SchedulerSteps:
    """Count the steps of a generation by the `step_index` of a scheduler of diffusers.

    Attributes:
        scheduler: of the pipeline.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __deepcopy__(self, memo: dict[int, Any]) -> SchedulerSteps:
        """Return the same: a copied model follows the scheduler that the original does."""
        return self

    def current(self) -> int:
        """Return how often `scheduler.step` was called in this generation."""
        scheduler = self.scheduler
        index, begin = scheduler.step_index, getattr(scheduler, "begin_index", None)
        self._check_inside(index)
        if index is None:  # until the first call of `scheduler.step`, wherever it begins
            FIRST[scheduler] = None
            return 0
        if begin is None:
            begin = FIRST.get(scheduler, 0)
        if begin is None:
            begin = FIRST[scheduler] = index - 1
        return int(index - begin)

    def _check_inside(self, index: int | None) -> None:
        """Raise where the scheduler has not begun a generation, or has ended it: it may not be the pipeline's."""
        if index is None:  # some have no number of steps before they are given one
            is_outside = getattr(self.scheduler, "num_inference_steps", None) is None
        else:
            timesteps = getattr(self.scheduler, "timesteps", None)
            is_outside = timesteps is not None and index >= len(timesteps)
        if is_outside:
            raise RuntimeError(
                f"helion_attn: a model with a schedule is called, and its {type(self.scheduler).__name__} is in no "
                f"generation; if pipeline.scheduler was replaced, give the schedule the new one; to warm up, call the "
                f"pipeline, or scheduler.set_timesteps first"
            )


class BoundSchedule(NamedTuple):
    """A schedule and its steps."""

    function: ScheduleFunction  # of step, layer, q and k
    step: Callable[[], int]  # returns the current step


def check_schedule(schedule: object) -> None:
    """Check that it is a schedule, or None."""
    if schedule is not None and not isinstance(schedule, Schedule) and not callable(schedule):
        raise TypeError(
            f"schedule is {described(schedule)}; it must be a function of step, layer, q and k, a helion_attn.Schedule "
            f"of one, or None"
        )


def bound_schedule(schedule: Schedule | ScheduleFunction | None, scheduler: Any) -> BoundSchedule | None:
    """Return a schedule with what says its steps; None without a schedule."""
    if schedule is None:
        if scheduler is not None:
            raise ValueError(f"scheduler is {described(scheduler)} and schedule None; give both, or none")
        return None
    if isinstance(schedule, Schedule):
        if scheduler is not None:
            raise ValueError(
                f"scheduler is {described(scheduler)} and schedule a helion_attn.Schedule, whose steps you give; give "
                f"a function with scheduler, or a Schedule without"
            )
        return BoundSchedule(schedule.function, schedule.current)
    if scheduler is None:
        raise ValueError(
            "schedule is given, and scheduler is None; give scheduler=pipeline.scheduler, which knows the step, or in "
            "a loop of your own schedule=helion_attn.Schedule(function), and call the model inside "
            "`with schedule.step(i)`"
        )
    if not hasattr(scheduler, "step_index"):
        raise TypeError(
            f"scheduler is {described(scheduler)}, which has no step_index; it must be pipeline.scheduler, of a kind "
            f"that has one, such as UniPCMultistepScheduler; in a loop of your own give "
            f"schedule=helion_attn.Schedule(function) instead"
        )
    return BoundSchedule(schedule, SchedulerSteps(scheduler).current)


class ThreadLocalLayer(threading.local):
    """A number that each thread has for itself: no `ContextVar`, which torch.compile does not trace."""

    value: int | None = None


class Layers:
    """Tell which layer runs in a thread, by hooks on attention modules.

    Args:
        numbers: of the layers, by attention module.

    Attributes:
        running: the number of the layer; None outside of these modules.
        handles: of the hooks.
        watching: whether the hooks do anything.
    """

    def __init__(self, numbers: Mapping[torch.nn.Module, int]) -> None:
        self.running, self.watching = ThreadLocalLayer(), bool(numbers)
        self.handles = [
            handle
            for attn, layer in numbers.items()
            for handle in (
                attn.register_forward_pre_hook(functools.partial(self.begin, layer)),
                attn.register_forward_hook(self.end, always_call=True),
            )
        ]

    def __deepcopy__(self, memo: dict[int, Any]) -> Layers:
        """Return the same: a copied model follows the schedule that the original does."""
        return self

    def __reduce__(self) -> tuple[type[Layers], tuple[dict[torch.nn.Module, int]]]:
        """Make one whose hooks do nothing: a model that is loaded has no schedule."""
        return type(self), ({},)

    def begin(self, layer: int, *_: Any) -> None:
        """Enter a layer: a forward pre-hook."""
        if self.watching:
            check_eager()
            self.running.value = layer

    def end(self, *_: Any) -> None:
        """Leave it: a forward hook."""
        if self.watching:
            self.running.value = None

    def unwatch(self) -> None:
        """Remove the hooks. Those of copied models stay, and do nothing."""
        for handle in self.handles:
            handle.remove()
        self.watching = False


def check_eager() -> None:
    """Raise in torch.compile and in a CUDA graph: the step and the layer are read on the host."""
    # Dynamo does not trace the second question.
    if torch.compiler.is_compiling() or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        raise NotImplementedError(
            "helion_attn: schedule is given; in torch.compile and in a CUDA graph it must be None: the host reads the "
            "step and the layer"
        )


def choice_of(
    schedule: BoundSchedule, layer: int, recipe: Recipe | Auto, q: torch.Tensor, k: torch.Tensor
) -> tuple[Recipe | Auto, Pattern | None]:
    """Ask a schedule for the recipe and the mask of a call of q [B, M, H, D] and k [B, N, H_kv, D].

    `recipe` is taken where the schedule names none. The caller has called `check_eager`.
    """
    given: Any = schedule.function(schedule.step(), layer, q.transpose(1, 2), k.transpose(1, 2))
    if isinstance(given, tuple) and not isinstance(given, Reordered):
        if len(given) != 2:
            raise ValueError(f"schedule gives a tuple of {len(given)}; it must give {ACCEPTED}")
        preset, pattern = given
        if preset is None or pattern is None:
            raise TypeError(f"schedule gives a tuple with None; it must give {ACCEPTED}")
    else:
        preset, pattern = (given, None) if isinstance(given, str | Recipe) else (None, given)
    if not isinstance(preset, str | Recipe | None):
        raise TypeError(f"schedule gives {described(preset)} as the preset; it must give {ACCEPTED}")
    if pattern is not None and not is_mask(pattern):
        raise TypeError(f"schedule gives {described(pattern)}; it must give {ACCEPTED}")
    return recipe if preset is None else as_choice(preset), pattern


def is_mask(value: object) -> bool:
    """Return whether it is a mask that a schedule may give."""
    if isinstance(value, BlockMask | Reordered):
        return True
    from torch.nn.attention.flex_attention import BlockMask as FlexMask

    return isinstance(value, FlexMask)
