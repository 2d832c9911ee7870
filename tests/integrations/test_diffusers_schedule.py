"""Schedules: which step and which layer each call of a diffusion model is given, as a backend and fused."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import helion_attn as ha

diffusers = pytest.importorskip("diffusers")
from helion_attn.integrations import diffusers as backend  # noqa: E402
from helpers.diffusion_models import flux, hunyuan_video, inputs_of, qwen_image, wan  # noqa: E402

NAME = "helion_fp8"

#: Layers that a step of `wan(4)` calls: self- and cross-attention of each block.
OF_WAN = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.fixture(autouse=True)
def instant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is instant: what is tested is who is asked what."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        return q.new_zeros(*q.shape[:3], v.size(3))

    monkeypatch.setattr(backend, "attention", attention)
    yield
    ha.register_diffusers()


def predict(model: Any, timestep: Any = 500) -> None:
    with torch.no_grad():
        model(**inputs_of(model) | {"timestep": torch.as_tensor(timestep).reshape(1).expand(2)})


def as_backend(*models: Any, **options: Any) -> None:
    ha.register_diffusers(models=models, **options)
    for model in models:
        model.set_attention_backend(NAME)


def fused(*models: Any, **options: Any) -> None:
    for model in models:
        ha.fuse_diffusers(model, **options)


both_ways = pytest.mark.parametrize("enter", [as_backend, fused])


def scheduler_of(steps: int, kind: Any = diffusers.FlowMatchEulerDiscreteScheduler) -> Any:
    scheduler = kind()
    scheduler.set_timesteps(steps)
    return scheduler


def generate(scheduler: Any, call: Callable[[torch.Tensor], Any], begin: int = 0) -> list[Any]:
    """Run the loop of a pipeline; return what the calls do."""
    latents, given = torch.zeros(1, 4, 2, 2), []
    for time in scheduler.timesteps[begin:]:
        given.append(call(time))
        latents = scheduler.step(torch.zeros_like(latents), time, latents, return_dict=False)[0]
    return given


@both_ways
def test_steps_whose_timesteps_are_one_in_bf16(enter: Any) -> None:
    """Two of the 50 of FLUX.2."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    model, scheduler = wan(1), diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    seen: list[int] = []
    enter(model, schedule=lambda step, layer, q, k: seen.append(step), scheduler=scheduler)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 50, 50), mu=compute_empirical_mu(4096, 50))
    times = scheduler.timesteps.bfloat16().float()
    generate(scheduler, lambda time: predict(model, time.bfloat16().float()))
    assert seen == [step for step in range(50) for _ in range(2)]
    assert len(times.unique()) < 50


@both_ways
@pytest.mark.parametrize("name", ["UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_steps_after_a_warm_up_and_from_an_image(name: str, enter: Any) -> None:
    """A call between generations raises and shifts nothing; each begins at 0, in the middle of the timesteps too."""
    model, scheduler = wan(1), getattr(diffusers, name)()
    seen: list[int] = []
    enter(model, schedule=lambda step, layer, q, k: seen.append(step), scheduler=scheduler)
    with pytest.raises(RuntimeError, match=rf"its {name} is in no generation; .* scheduler\.set_times"):
        predict(model, 1)
    scheduler.set_timesteps(3)
    predict(model, 1)
    assert seen == [0, 0], "that is what the message says"
    for steps, begin, is_told in (
        (5, 0, False),
        (5, 0, True),
        (1, 0, False),
        (5, 2, True),
        (5, 2, False),
        (3, 0, False),
    ):
        scheduler.set_timesteps(steps)
        if is_told:
            scheduler.set_begin_index(begin)
        seen.clear()
        generate(scheduler, lambda time: predict(model, time), begin)
        assert seen == [step for step in range(steps - begin) for _ in range(2)], (steps, begin, is_told)
        with pytest.raises(RuntimeError, match=r"if pipeline\.scheduler was replaced, give the schedule the new one"):
            predict(model, 999)


@both_ways
@pytest.mark.parametrize(("kind", "steps"), [("FlowMatchEuler", 4), ("FlowMatchHeun", 7)])
def test_guidance_and_schedulers_of_second_order(enter: Any, kind: str, steps: int) -> None:
    """Calls of one step have its number; Heun's scheduler makes two steps of one but the last."""
    model, scheduler = wan(1), scheduler_of(4, getattr(diffusers, f"{kind}DiscreteScheduler"))
    seen: list[int] = []
    enter(model, schedule=lambda step, layer, q, k: seen.append(step), scheduler=scheduler)

    def call(time: torch.Tensor) -> None:
        for _ in range(2):
            predict(model, time)

    generate(scheduler, call)
    assert seen == [step for step in range(steps) for _ in range(2 * 2)]


@both_ways
def test_experts_share_steps(enter: Any) -> None:
    """Two models that take turns, as Wan 2.2's; each has layers of its own."""
    models, scheduler = (wan(1), wan(2)), diffusers.UniPCMultistepScheduler()
    seen: list[tuple[int, int]] = []
    enter(*models, schedule=lambda step, layer, q, k: seen.append((step, layer)), scheduler=scheduler)
    scheduler.set_timesteps(2)
    predict(models[1])  # a warm-up
    for _ in range(2):
        scheduler.set_timesteps(4)
        seen.clear()
        generate(scheduler, lambda time: predict(models[int((scheduler.step_index or 0) >= 2)], time))
        low = [(step, layer) for step in (2, 3) for layer in (0, 0, 1, 1)]
        assert seen == [(0, 0)] * 2 + [(1, 0)] * 2 + low


def every_second_call_is_skipped(model: Any) -> Callable[[int], None]:
    """diffusers' PyramidAttentionBroadcast, in two of four blocks."""
    now = [0]
    model.enable_cache(
        diffusers.PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(100, 900),
            spatial_attention_block_identifiers=("blocks.0", "blocks.1"), current_timestep_callback=lambda: now[0],
        )
    )  # fmt: skip
    return lambda step: now.__setitem__(0, (600, 550)[step])


def a_block_is_skipped(model: Any) -> Callable[[int], None]:
    """diffusers' LayerSkip."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    apply_layer_skip(model, LayerSkipConfig(indices=[1], fqn="blocks"))
    return lambda step: None


def a_step_is_skipped(model: Any) -> Callable[[int], None]:
    """diffusers' FirstBlockCache: the second step computes the first block alone."""
    from diffusers.hooks import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    return lambda step: model._set_context("cond") if hasattr(model, "_set_context") else None


@both_ways
@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (every_second_call_is_skipped, [OF_WAN, [0, 1, 2, 2, 3, 3]]),
        (a_block_is_skipped, [[0, 0, 2, 2, 3, 3]] * 2),
        (a_step_is_skipped, [OF_WAN, [0, 0]]),
    ],
)
def test_skipped_calls_shift_no_layer(enter: Any, skip: Any, expected: list[list[int]]) -> None:
    model, scheduler = wan(4), scheduler_of(2)
    seen: list[tuple[int, int]] = []
    enter(model, schedule=lambda step, layer, q, k: seen.append((step, layer)), scheduler=scheduler)
    before = skip(model)

    def call(time: torch.Tensor) -> None:
        before(0 if scheduler.step_index is None else scheduler.step_index)
        with model.cache_context("cond"):
            predict(model, time)

    generate(scheduler, call)
    assert seen == [(step, layer) for step, layers in enumerate(expected) for layer in layers]


@pytest.mark.parametrize(
    ("make", "expected"),
    [(wan, [0, 0, 1, 1]), (flux, [0, 1, 2]), (hunyuan_video, [0, 1, 2]), (qwen_image, [0, 1])],
)
@both_ways
def test_backend_and_fused_number_layers_alike(enter: Any, make: Any, expected: list[int]) -> None:
    """Over two lists of blocks, one after the other; attention that asks no backend has no number."""
    seen: list[int] = []
    model, schedule = make(), ha.Schedule(lambda step, layer, q, k: seen.append(layer))
    enter(model, schedule=schedule)
    with schedule.step(0):
        predict(model)
    assert seen == expected


@both_ways
def test_all_calls_of_a_module_have_its_layer(enter: Any) -> None:
    """Wan's cross-attention to a text and an image."""
    model = wan(2, image_dim=24, added_kv_proj_dim=64)
    seen: list[int] = []
    schedule = ha.Schedule(lambda step, layer, q, k: seen.append(layer))
    enter(model, schedule=schedule)
    with schedule.step(0):
        predict(model)
    assert seen == [0, 0, 0, 1, 1, 1]


def test_other_models_and_the_end() -> None:
    """Calls of other models have no schedule; to register again, or to fuse again, ends it without a trace."""
    model, other = wan(1), wan(1)
    seen: list[int] = []
    schedule = ha.Schedule(lambda step, layer, q, k: seen.append(step))
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    for _ in range(3):
        as_backend(model, schedule=schedule)
    other.set_attention_backend(NAME)
    predict(other)
    assert seen == []
    with schedule.step(3):
        predict(model)
    assert seen == [3, 3]
    ha.register_diffusers()
    predict(model)
    fused(model, schedule=schedule)
    fused(model)
    predict(model)
    assert seen == [3, 3]
    assert [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()] == hooks


@both_ways
def test_steps_of_a_loop(enter: Any) -> None:
    """They nest, end with the block also where the model fails, and are needed."""
    model = wan(1)
    seen: list[int] = []
    schedule = ha.Schedule(lambda step, layer, q, k: seen.append(step))
    enter(model, schedule=schedule)
    with schedule.step(4):
        with schedule.step(7):
            predict(model)
        predict(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), schedule.step(5), torch.no_grad():
        model(torch.zeros(1, 4, 2, 4, 4), torch.tensor([5]), torch.zeros(1, 5, 17))
    assert seen == [7, 7, 4, 4]
    with pytest.raises(RuntimeError, match=r"schedule has no step here; call the model inside `with schedule\.step"):
        predict(model)
    for i, error, message in (
        (-1, ValueError, "i is -1; it must be the number of the step, from 0"),
        (1.0, TypeError, "i is a float; it must be an int"),
        (True, TypeError, "i is a bool; it must be an int"),
    ):
        with pytest.raises(error, match=message), schedule.step(i):  # type: ignore[arg-type]
            pass
    assert seen == [7, 7, 4, 4]


@both_ways
def test_threads_have_steps_and_layers_of_their_own(enter: Any) -> None:
    """Two run a model at once, in other steps and layers."""
    model, meet = wan(2), threading.Barrier(2, timeout=60)
    seen: dict[str, list[tuple[int, int]]] = {"first": [], "second": []}

    def choose(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        meet.wait()
        seen[threading.current_thread().name].append((step, layer))
        meet.wait()

    schedule = ha.Schedule(choose)
    enter(model, schedule=schedule)

    def run(step: int, blocks: list[int]) -> None:
        with schedule.step(step), torch.no_grad():
            for block in blocks:
                model.blocks[block].attn1(torch.zeros(1, 8, 64), None, None, None)

    threads = [
        threading.Thread(target=run, args=(1, [0, 1, 1]), name="first"),
        threading.Thread(target=run, args=(2, [1, 0, 0]), name="second"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first": [(1, 0), (1, 1), (1, 1)], "second": [(2, 1), (2, 0), (2, 0)]}


def nothing(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
    """A schedule that can be pickled."""


@both_ways
@pytest.mark.parametrize("by_hand", [False, True])
def test_models_are_copied_and_saved(enter: Any, by_hand: bool) -> None:
    """A copy follows the schedule of the original, and a model that is loaded has none."""
    model, scheduler, schedule = wan(1), scheduler_of(2), ha.Schedule(nothing)
    enter(model, **({"schedule": schedule} if by_hand else {"schedule": nothing, "scheduler": scheduler}))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert pickle.loads(pickle.dumps(schedule)).function is nothing
    seen: list[int] = []
    counted = ha.Schedule(lambda step, layer, q, k: seen.append(step))
    enter(model, **({"schedule": counted} if by_hand else {"schedule": counted.function, "scheduler": scheduler}))
    copied = copy.deepcopy(model)
    scheduler._step_index = 1
    with counted.step(1):
        predict(copied)
        if enter is as_backend:
            predict(loaded)
    assert seen == [1, 1]
    if enter is as_backend:
        ha.register_diffusers()
        predict(copied)
        predict(torch.compile(copied, fullgraph=True, backend="eager"))
    assert seen == [1, 1]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("best", ValueError, "recipe is 'best'; it must be one of 'fast'"),
        (3, TypeError, "schedule gives a int; it must give a preset, by name or as a Recipe, a mask, which is a Block"),
        (["bf16", None], TypeError, "schedule gives a list; it must give a preset, .* a tuple of a preset and a mask"),
        (
            torch.ones(24, 24).bool(),
            TypeError,
            r"schedule gives a Tensor of torch\.bool \(24, 24\); it must",
        ),
        (("bf16",), ValueError, "schedule gives a tuple of 1; it must give a preset"),
        (("bf16", None), TypeError, "schedule gives a tuple with None; it must give a preset"),
        (("bf16", [1]), TypeError, "schedule gives a list; it must give a preset"),
        ((3, 4), TypeError, "schedule gives a int as the preset; it must give a preset"),
    ],
)
@both_ways
def test_what_a_schedule_gives_is_checked(enter: Any, given: Any, error: type[Exception], message: str) -> None:
    model = wan(1)
    enter(model, schedule=lambda *_: given, scheduler=scheduler_of(1))
    with pytest.raises(error, match=message):
        predict(model)


@both_ways
def test_schedules_are_checked(enter: Any) -> None:
    model = wan(1)
    bad: Any = 3
    scheduler, by_hand = scheduler_of(1), ha.Schedule(nothing)
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "schedule is a int; it must be a function of", {"schedule": bad, "scheduler": scheduler}),
        (ValueError, r"scheduler is None; give .*with schedule\.step", {"schedule": nothing}),
        (ValueError, "or a Schedule without", {"schedule": by_hand, "scheduler": scheduler}),
        (TypeError, "a DDIMScheduler, which has no", {"schedule": nothing, "scheduler": diffusers.DDIMScheduler()}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            enter(model, **options)
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(TypeError, match="function is a int; it must be a function of step, layer, q and k"):
        ha.Schedule(bad)


def test_models_are_checked() -> None:
    scheduler: Any = scheduler_of(1)
    bad: Any = 3
    with pytest.raises(TypeError, match=r"models\[1\] is a int; it must be a torch.nn.Module"):
        ha.register_diffusers(schedule=nothing, models=[wan(1), bad], scheduler=scheduler)
    with pytest.raises(ValueError, match="schedule is given with 0 models"):
        ha.register_diffusers(schedule=nothing, scheduler=scheduler)
    with pytest.raises(ValueError, match="schedule is None with 1 models"):
        ha.register_diffusers(models=wan(1))
    with pytest.raises(ValueError, match=r"models\[0\] is a Linear, in which no module has a processor that asks"):
        ha.register_diffusers(schedule=nothing, models=torch.nn.Linear(1, 1), scheduler=scheduler)
    with pytest.raises(ValueError, match="scheduler is a FlowMatchEulerDiscreteScheduler and schedule None"):
        ha.register_diffusers(scheduler=scheduler)
    with pytest.raises(ValueError, match="scheduler is a FlowMatchEulerDiscreteScheduler and schedule None"):
        ha.fuse_diffusers(wan(1), scheduler=scheduler)


@both_ways
def test_torch_compile(enter: Any) -> None:
    model = wan(1)
    enter(model, schedule=nothing, scheduler=scheduler_of(1))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"in torch\.compile and in a CUDA graph it must be None|NotImplementedError"):
        predict(torch.compile(model, fullgraph=True, backend="eager"))
