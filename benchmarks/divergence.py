"""Latents of sampled images and videos, for suite `quality`: how far they diverge from those of another attention.

Transformers of suite `steps` with fewer layers and random weights, 30 steps of diffusers' Euler scheduler of flow
matching, latents in fp32. Nothing is said of quality: such a model draws noise. It shows how errors add up from step to
step.

Layers as they are initialised would hide attention. So weights are N(0, 1 / inputs), which keeps the size of what goes
through, and RMSNorm of Q and K multiplies by 2: scores spread by 4, and a row attends to few keys. MiniMax-H3's K is
large in few channels, as trained ones' is, and its Q as much smaller there, so that scores stay. Wan also runs with a
quarter of the blocks of self-attention, without a tail and with one.

SGLang's diffusion takes an attention kernel whose largest difference is at most .05 of the largest value.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import helion_attn as ha
from benchmarks import steps
from benchmarks.lib.attends import BASE, BASE_LABEL, Attend, compare, measured
from benchmarks.lib.harness import Loaded, Results, Row
from benchmarks.lib.plots import grid, legend, line, log_axis
from benchmarks.lib.suite import Options, Plot
from benchmarks.lib.tables import LABELS, Table, error_text, series, series_in
from helion_attn.testing import relative_error

STAGE = "divergence"

#: Steps of the sampler, and after which latents are compared; the table has the latter.
STEPS, COMPARED, SHOWN = 30, (1, 2, 3, 5, 10, 20, 30), (1, 10, 30)

#: What RMSNorm of Q and K multiplies by.
SHARPNESS = 2.0

#: MiniMax-H3's channels of K that are larger, both of pairs that RoPE rotates, and how much.
LARGE_CHANNELS, LARGER = (0, 1, 48, 49), 8.0

#: The modules of RMSNorm of Q and K: of a block, and of Flux' text.
NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

#: The share of the blocks that Wan's self-attention visits, with a tail and without.
KEEP = 0.25

#: The name under which diffusers has the attention that is measured.
NAME = "measured"

_WAN = {"num_attention_heads": 12, "num_layers": 6, "ffn_dim": 8960}
MODELS = (
    steps.Model("Wan 2.1 1.3B, 6 of 30 layers, 832 x 480, 81 frames", steps.wan, _WAN, (21, 60, 104), 512, (12, 12)),
    steps.Model(
        "Flux.1, 6 and 6 of 19 and 38 layers, 1024 x 1024",
        steps.flux,
        {"num_layers": 6, "num_single_layers": 6},
        (64, 64),
        512,
    ),
    steps.Model(
        "MiniMax-H3, 4 of 50 blocks, K large in 4 channels, 16,528 tokens",
        steps.minimax_h3,
        {"num_layers": 4},
        (16, 24, 42),
        400,
        (56, 56),
        sound=200,
    ),
)


def sharpen(module: torch.nn.Module) -> None:
    """Give the module weights with which attention matters, in place."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Linear | torch.nn.Conv3d):
            torch.nn.init.normal_(part.weight, std=part.weight[0].numel() ** -0.5)
            if part.bias is not None:
                torch.nn.init.zeros_(part.bias)
        if name.rpartition(".")[2] in NORMS:
            torch.nn.init.constant_(part.weight, SHARPNESS)


@torch.no_grad()
def enlarge_channels(module: torch.nn.Module) -> None:
    """Make some channels of K larger and of Q smaller, in place."""
    for name, part in module.named_modules():
        last = name.rpartition(".")[2]
        if last in ("norm_q", "norm_k"):
            channels = [x for x in LARGE_CHANNELS if x < part.weight.numel()]
            part.weight[channels] *= LARGER if last == "norm_k" else 1 / LARGER


def sampled(module: Any, inputs: dict[str, Any], in_units: bool) -> dict[int, Tensor]:
    """fp32 latents after the steps that are compared, from noise of `inputs`; times go from 0 to 1 with `in_units`."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    given, latents = inputs["hidden_states"], inputs["hidden_states"].float()
    scheduler.set_timesteps(STEPS, device=given.device)
    found = {}
    for i, t in enumerate(scheduler.timesteps, 1):
        timestep = (t / scheduler.config.num_train_timesteps if in_units else t).expand(given.size(0))
        now = {"hidden_states": latents.to(given.dtype), "timestep": timestep.to(inputs["timestep"].dtype)}
        velocity = steps.forward(module, inputs | now)
        latents = scheduler.step(velocity.float(), t, latents, return_dict=False)[0]
        if i in COMPARED:
            found[i] = latents
    return found


def function_of(attend: Attend) -> steps.Attention:
    """The same, as `steps` registers it."""

    def function(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float | None, left: int | None) -> Tensor:
        assert left is None
        scale = q.size(3) ** -0.5 if sm_scale is None else sm_scale
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, causal, scale).transpose(1, 2)

    return function


def sampled_with(module: Any, inputs: dict[str, Any], in_units: bool, attend: Attend) -> dict[int, Tensor]:
    """`sampled`, with an attention."""
    steps.register_other(NAME, function_of(attend))
    module.set_attention_backend(NAME)
    return sampled(module, inputs, in_units)


def errors(model: steps.Model, found: dict[int, Tensor], base: dict[int, Tensor]) -> list[Row]:
    """A row for each step that is compared."""
    shape = {"model": model.name, "heads": model.heads[0], "tokens": model.workload.N, "D": model.D}
    return [
        shape
        | {
            "step": step,
            "error_total": relative_error(latents, base[step].double()),
            "largest": ((latents - base[step]).abs().amax() / base[step].abs().amax()).item(),
        }
        for step, latents in found.items()
    ]


def of_blocks(tail: bool) -> Attend:
    """The best blocks of self-attention, and the others by their means with `tail`; other attention is dense."""

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float) -> Tensor:
        mask = ha.masks.top_blocks(q, k, keep=KEEP, tail=tail) if q.size(2) == k.size(2) else None
        return ha.attention(q, k, v, causal=causal, sm_scale=sm_scale, block_mask=mask)

    return attend


def measure_model(model: steps.Model, options: Options, results: Results, attends: dict[str, Attend]) -> None:
    """Rows for each attention."""
    torch.manual_seed(0)
    with steps.bf16_on(options.device):
        module, inputs = model.build(model)
    sharpen(module.eval())
    if model.build is steps.minimax_h3:
        enlarge_channels(module)
    elif model.build is steps.wan:
        attends = attends | {"blocks": of_blocks(tail=False), "tail": of_blocks(tail=True)}
    run = functools.partial(sampled_with, module, inputs, model.build in (steps.flux, steps.minimax_h3))
    compare(STAGE, attends, results, run, functools.partial(errors, model))
    module.set_attention_backend("native")  # type: ignore[operator]  # what was set last is that of new models


def models_of(options: Options) -> tuple[steps.Model, ...]:
    """On a CPU the tiny ones of suite `steps`."""
    if options.device.type == "cuda":
        return MODELS
    builds = {model.build for model in MODELS}
    return tuple(model for model in (*steps.DRY, *steps.DRY_NEW) if model.build in builds)


def measure(options: Options, results: Results, attends: dict[str, Attend]) -> None:
    """All models."""
    for model in models_of(options)[: 1 if options.quick else None]:
        measure_model(model, options, results, attends)
        if options.device.type == "cuda":
            torch.cuda.empty_cache()


def by_model(loaded: Loaded, figure: str = "error_total") -> dict[str, dict[str, dict[int, float]]]:
    """A figure by model, attention and step, without the base's."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    rows = [row for row in measured(loaded, STAGE) if row["impl"] != BASE and figure in row]
    for name in series_in(rows):
        for row in rows:
            if series(row) == name:
                found.setdefault(row["model"], {}).setdefault(name, {})[row["step"]] = row[figure]
    return found


def tables(loaded: Loaded) -> list[Table]:
    """By model and attention."""
    largest = by_model(loaded, "largest")
    body = [
        [
            model,
            LABELS[name],
            *(error_text(by_step.get(step)) for step in SHOWN),
            *([error_text(largest.get(model, {}).get(name, {}).get(1))] if largest else []),
        ]
        for model, of_model in by_model(loaded).items()
        for name, by_step in of_model.items()
    ]
    title = f"Latents beside those of {BASE_LABEL}, relative L2: divergence, not quality; random weights"
    headers = ["model", "attention", *(f"after {step} step{'s' * (step > 1)}" for step in SHOWN)]
    headers += ["largest, 1 step"] if largest else []
    return [Table(title, headers, body)] if body else []


def plot(loaded: Loaded) -> Figure | None:
    """Divergence by step, a panel a model."""
    models = by_model(loaded)
    if not models:
        return None
    figure, (axes,) = grid(1, len(models), height=3.0)
    for ax, (model, of_model) in zip(axes, models.items(), strict=True):
        for name, by_step in of_model.items():
            line(ax, name, {step: error for step, error in by_step.items() if error > 0}, float)
        log_axis(ax, (1.0, 3.0))
        ax.set_title(model.partition(",")[0])
        ax.set_xlabel("steps")
    axes[0].set_ylabel("relative L2 of latents")
    legend(figure, axes)
    return figure


PLOT = Plot("divergence", f"Divergence of sampled latents from those of {BASE_LABEL}, by step", plot)
