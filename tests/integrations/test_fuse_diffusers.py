"""Processors that fuse norms and RoPE: tiny, random transformers of pipelines, beside diffusers' processors."""

from __future__ import annotations

import gc
import inspect
import io
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import helion_attn as ha
from helion_attn.backward import prologue
from helion_attn.integrations import mask_tensors
from helion_attn.integrations.fused import qk_prologue
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import relative_error
from helpers.host_reads import HostReads

diffusers = pytest.importorskip("diffusers")
from helion_attn.integrations import diffusers as backend  # noqa: E402
from helion_attn.integrations.fused import diffusers_processors  # noqa: E402
from helpers.diffusion_models import MODELS, made, rand  # noqa: E402

#: Attention of models, of which norms are fused: where it is, and what it has been handed.
HAS_NORMS = {
    "wan": lambda model: model.blocks[0].attn1,
    "wan_of_images": lambda model: model.blocks[0].attn2,
    "flux": lambda model: model.single_transformer_blocks[0].attn,
    "hunyuan_video": lambda model: model.single_transformer_blocks[0].attn,
    "flux2": lambda model: model.single_transformer_blocks[0].attn,
    "z_image": lambda model: model.layers[0].attention,
    "z_image_of_two": lambda model: model.layers[0].attention,
    "minimax_h3": lambda model: model.transformer_blocks[0].attn,
    "ltx2": lambda model: model.transformer_blocks[0].attn2,
    "ltx2_interleaved": lambda model: model.transformer_blocks[0].audio_attn2,
}

#: One of each model.
NAMES = ("flux", "wan", "hunyuan_video", "qwen_image", "hunyuan_video15", "flux2", "z_image", "minimax_h3", "ltx2")

#: Name, and what is fused in some attention of it.
PARTS = [
    *((name, what) for name in HAS_NORMS for what in ("q_norm", "k_norm")),
    *((name, "rope") for name in MODELS if name != "qwen_image_padded" and not name.startswith("ltx2")),
]


def output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """All that a model returns: Z-Image a list of images, and others also audio."""
    with torch.no_grad():
        found = model(**inputs, return_dict=False)
    tensors = found[0] if isinstance(found[0], list) else found
    return torch.cat([x.flatten() for x in tensors])


def processors_of(model: Any) -> dict[str, Any]:
    """By the name of the attention."""
    return {name: module.processor for name, module in model.named_modules() if hasattr(module, "processor")}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """The fp64 oracle in the place of the kernels."""
    assert options["layout"] == "bshd"
    dtype = q.dtype
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q_norm, k_norm, rope = (options.get(name) for name in ("q_norm", "k_norm", "rope"))
    q, k = (x.double() if norm is None else rms_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
    if rope is not None:
        q, k = apply_rope_qk(q, k, rope)
    kept = {name: options[name] for name in ("causal", "sm_scale", "block_mask") if name in options}
    found = ha.reference.attention(q, k, v, **kept)
    assert isinstance(found, torch.Tensor)
    return found.transpose(1, 2).to(dtype)


def exact_varlen(*tensors: torch.Tensor, return_lse: bool, recipe: Any, **options: Any) -> Any:
    out, lse = ha.reference.attention_varlen(*tensors, **options)
    return out.to(tensors[0].dtype), lse.float()


def exact_with_lse(*qkv: torch.Tensor, **options: Any) -> Any:
    return exact(*qkv, **options), None  # which nobody reads


def with_oracle(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> mock.Mock:
    """Exact attention, with some options changed; what it returns counts the calls that are not packed sequences."""
    attention = mock.Mock(side_effect=lambda *qkv, **options: exact(*qkv, **options | changes))
    monkeypatch.setattr(backend, "attention", attention)
    monkeypatch.setattr(mask_tensors, "attention_varlen", exact_varlen)
    monkeypatch.setattr(mask_tensors, "attention", exact_with_lse)
    return attention


@pytest.mark.parametrize("name", MODELS)
def test_computes_what_the_model_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to rounding, where attention is exact; and as near as the backend is, where it is in 8 bits."""
    model, inputs = made(name)
    native = output(model, inputs)
    ha.register_diffusers()
    model.set_attention_backend("helion_fp8")
    in_backend = relative_error(output(model, inputs), native)
    model.reset_attention_backend()
    ha.fuse_diffusers(model)
    in_processors = relative_error(output(model, inputs), native)
    with_oracle(monkeypatch)
    # fp32 has 2**-24 a step, and a model some hundred.
    assert relative_error(output(model, inputs), native) < 1e-5
    assert 0 < in_processors < 1.5 * in_backend


@pytest.mark.parametrize(("name", "what"), PARTS)
def test_every_part_counts(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison can fail."""
    model, inputs = made(name)
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch, **{what: None})
    assert relative_error(output(model, inputs), native) > 1e-3


@pytest.mark.parametrize("name", ["ltx2", "ltx2_interleaved", "ltx2_perturbed"])
def test_rope_of_each_head_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made(name)
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch)
    monkeypatch.setattr(diffusers_processors, "rotate_heads", lambda x, rope: x)
    assert relative_error(output(model, inputs), native) > 1e-3


@pytest.mark.parametrize(
    "name", ["flux", "flux2", "hunyuan_video", "hunyuan_video15", "qwen_image_padded", "z_image_of_two"]
)
def test_what_is_padding_is_not_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first keys of each sequence are fused; others are packed sequences, after norms and RoPE."""
    model, inputs = made(name)
    kept = torch.arange(39) < torch.tensor([[39], [31]])
    if name in ("flux", "flux2"):
        inputs["joint_attention_kwargs"] = {"attention_mask": kept[:, None, None]}
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    calls = with_oracle(monkeypatch)
    assert relative_error(output(model, inputs), native) < 1e-5
    lengths = [call.args[1].shape[:2] for call in calls.call_args_list]
    expected = {"flux": [(1, 39), (1, 31)] * 3, "hunyuan_video": [(1, 43), (1, 36)] * 3, "qwen_image_padded": []}
    expected |= {"flux2": expected["flux"], "hunyuan_video15": [(1, 79), (1, 69)] * 2}
    # Of images, of texts, and of both.
    expected["z_image_of_two"] = [(1, 32), (1, 32), (1, 32), (1, 64), *[(1, 64), (1, 96)] * 2]
    assert lengths == expected[name]
    monkeypatch.setattr(backend, "read_mask", lambda *_: None)
    assert relative_error(output(model, inputs), native) > 1e-3


def given_to(attn: Any, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What a model hands an attention."""
    given: dict[str, Any] = {}

    def keep(module: Any, args: Any, options: Any) -> None:
        given.update(zip(inspect.signature(module.forward).parameters, args, strict=False), **options)

    with attn.register_forward_pre_hook(keep, with_kwargs=True):
        output(model, inputs)
    return given


@pytest.mark.parametrize("name", ["wan", "flux", "flux2", "z_image", "z_image_of_two", "minimax_h3"])
def test_holes_in_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms come before, too."""
    model, inputs = made(name)
    attn = HAS_NORMS[name](model)
    given = given_to(attn, model, inputs)
    B, S, _ = given["hidden_states"].shape
    seen = torch.rand(B, S, generator=torch.Generator().manual_seed(4)) < 0.6
    with_oracle(monkeypatch)
    by_row = (torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) < 0.6) | torch.eye(S).bool()
    # By key; and by row and key, alike for all sequences, and not.
    for mask in (seen[:, None, None], by_row[:1], by_row):
        with torch.no_grad():
            given["attention_mask"] = mask
            ha.unfuse(model)
            native = attn(**given)
            ha.fuse_diffusers(model)
            assert relative_error(attn(**given), native) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_no_layer_waits_for_the_device(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of a mask, which is looked at whether it hides anything, and then what."""
    monkeypatch.setattr(backend, "attention", lambda q, k, v, **_: torch.zeros_like(q))
    model, inputs = made(name)
    ha.fuse_diffusers(model)
    with mode(), HostReads() as reads:
        model(**inputs)
    layers = {"hunyuan_video": 3, "hunyuan_video_of_one_length": 3, "qwen_image_padded": 2}
    layers |= {"hunyuan_video15": 2, "z_image_of_two": 3, "ltx2": 4}
    # This model looks whether there is an image, and this whether all is perturbed, in a block's two self-attentions.
    own = ["__bool__"] * {"hunyuan_video15": 1, "ltx2_perturbed": 2}.get(name, 0)
    # LTX-2's mask is of scores: `item` is of a number that is on the host.
    of_mask = ["__bool__", "item", "tolist"] if name == "ltx2" else ["__bool__", "tolist"]
    assert reads.names == own + of_mask * layers.get(name, 0)


@pytest.mark.parametrize("name", ["ltx2", "ltx2_interleaved"])
def test_masks_of_self_attention_of_ltx2(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By row and key; parts of a key are refused."""
    model, inputs = made(name)
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch)
    dense = output(model, inputs)
    seen = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(4)) < 0.6
    inputs["video_self_attention_mask"] = (seen | torch.eye(40, dtype=torch.bool)).float()
    found = output(model, inputs)
    with pytest.raises(NotImplementedError, match=r"attention_mask is a Tensor .*, with other values than 0 and -inf"):
        output(model, inputs | {"video_self_attention_mask": torch.full((2, 40, 40), 0.5)})
    ha.unfuse(model)
    assert relative_error(found, output(model, inputs)) < 1e-5
    assert relative_error(found, dense) > 1e-3


def test_a_mask_of_ltx2_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers that are handed it, until it is written to."""
    model, inputs = made("ltx2")
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch)
    seen = torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(4)) < 0.6
    with mock.patch.object(ha.BlockMask, "from_dense", wraps=ha.BlockMask.from_dense) as from_dense:
        output(model, inputs | {"video_self_attention_mask": seen.float()})
        assert from_dense.call_count == 1
        attn = model.transformer_blocks[0].attn1
        x, mask, outs = rand(2, 40, 64), seen.clone(), []
        with torch.no_grad():
            for _ in range(2):
                outs += [attn(x, attention_mask=mask) for _ in range(2)]
                mask[:] = torch.eye(40, dtype=torch.bool)
        assert from_dense.call_count == 3
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[2], outs[3])
    assert relative_error(outs[2], outs[0]) > 1e-2
    kept, reference = len(mask_tensors._WITH_HEADS), weakref.ref(mask)
    del mask
    gc.collect()
    assert reference() is None
    assert len(mask_tensors._WITH_HEADS) == kept - 1


def test_shapes_of_masks_of_ltx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that broadcast, by sequence or for all; no mask of each head that has sequences and heads in one."""
    model, _ = made("ltx2")
    attn, x = model.transformer_blocks[0].attn1, rand(2, 40, 64)
    by_head = torch.rand(2, 2, 40, 40, generator=torch.Generator().manual_seed(4)) < 0.6
    keys = by_head[:, 0, 0]
    masks = [
        *((keys, keys[:, None]), (keys[:1], keys[:1, None].expand(2, 1, 40))),
        *((keys[:, None], keys[:, None]), (keys[:1, None], keys[:1, None].expand(2, 1, 40))),
        *((by_head[:, 0], by_head[:, 0]), (by_head[:1, 0], by_head[:1, 0].expand(2, 40, 40))),
        *((by_head[:, :1], by_head[:, 0]), (by_head[:1, :1], by_head[:1, 0].expand(2, 40, 40))),
        *((keys[:, None, None], keys[:, None]), (by_head, by_head.flatten(0, 1))),
    ]
    with torch.no_grad():
        native = [attn(x, attention_mask=mask) for _, mask in masks]
        ha.fuse_diffusers(model)
        with_oracle(monkeypatch)
        for (mask, _), expected in zip(masks, native, strict=True):
            assert relative_error(attn(x, attention_mask=mask), expected) < 1e-5
        for shape in ((4, 40, 40), (4, 1, 40), (40,), (3, 40)):
            with pytest.raises(ValueError, match=rf"attention_mask has shape {re.escape(str(shape))}; with B = 2 it"):
                attn(x, attention_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="attention_mask requires grad"):
        attn(x, attention_mask=torch.zeros(2, 40, 40, requires_grad=True))


@pytest.mark.parametrize("name", ["ltx2", "ltx2_interleaved"])
def test_tables_of_q_and_k_are_converted_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of self-attention; of attention between video and audio each has its own."""
    model, inputs = made(name)
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch)
    make = mock.Mock(side_effect=diffusers_processors.rope_of_heads)
    monkeypatch.setattr(diffusers_processors, "rope_of_heads", make)
    output(model, inputs)
    assert make.call_count == 2 * (1 + 1 + 2 + 2)


def test_values_in_the_place_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sequences: a block's self-attention of video and of audio is not called."""
    model, inputs = made("ltx2_perturbed")
    some = output(model, inputs)
    del inputs["perturbation_mask"]
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    calls = with_oracle(monkeypatch)
    found = output(model, inputs)
    assert relative_error(found, native) < 1e-5
    assert relative_error(some, native) > 1e-3
    assert calls.call_count == 2 * 6 - 2


@pytest.mark.parametrize("name", ["ltx2_interleaved", "ltx2_perturbed"])
def test_gradients_of_rope_of_each_head(name: str) -> None:
    """Of a model that is trained, or is called outside of `torch.no_grad`."""
    model, inputs = made(name)

    def gradients() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        out = model(**inputs, return_dict=False)[0]
        out.square().sum().backward()
        return out.detach(), model.transformer_blocks[0].attn1.to_q.weight.grad

    native = gradients()
    ha.fuse_diffusers(model, recipe="bf16")
    for found, expected in zip(gradients(), native, strict=True):
        assert 0 < relative_error(found, expected) < 2e-2


@pytest.mark.parametrize("kind", ["keys", "scores", "pytorch"])
@pytest.mark.parametrize("name", ["flux", "z_image_of_two"])
def test_gradients_where_rope_comes_before(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks with holes, by key and by score, and calls that "auto" leaves to PyTorch."""
    model, inputs = made(name)
    attn = HAS_NORMS[name](model)
    given = given_to(attn, model, inputs)
    B, S, channels = given["hidden_states"].shape
    at_random = torch.Generator().manual_seed(4)
    by_row = torch.rand(B, 1, S, S, generator=at_random) < 0.6
    seen = {"keys": by_row[:, :, :1], "scores": by_row | torch.eye(S, dtype=torch.bool), "pytorch": None}[kind]
    weight = rand(B, S, channels, seed=6)

    def gradients() -> tuple[torch.Tensor, ...]:
        attn.zero_grad()
        x = given["hidden_states"].clone().requires_grad_()
        (attn(**given | {"hidden_states": x, "attention_mask": seen}) * weight).sum().backward()
        return x.grad, *(parameter.grad for parameter in (attn.to_q.weight, attn.norm_k.weight))

    native = gradients()
    ha.fuse_diffusers(model, recipe="auto" if kind == "pytorch" else "bf16")
    monkeypatch.setattr(backend, "prefers_pytorch", lambda *_, **__: kind == "pytorch")
    if kind == "pytorch":  # on a CPU "auto" takes 8 bits
        with_oracle(monkeypatch)
    with mock.patch.object(qk_prologue, "rotated", wraps=prologue.rotated) as rotated:
        found = gradients()
    assert rotated.call_count == 2 * (2 if name == "z_image_of_two" else 1)
    for one, expected in zip(found, native, strict=True):
        assert 0 < relative_error(one, expected) < (1e-5 if kind == "pytorch" else 2e-2)


def test_tables_are_padded_where_tokens_follow() -> None:
    """Tokens that are not rotated have angle 0."""
    angles = torch.outer(torch.arange(5.0), torch.arange(1.0, 5.0))
    cos, sin = (x.repeat_interleave(2, 1) for x in (angles.cos(), angles.sin()))
    with mock.patch.object(torch.nn.functional, "pad", wraps=torch.nn.functional.pad) as pad:
        rope = diffusers_processors.rope_of(cos, sin)
        assert pad.call_count == 0
        longer = diffusers_processors.rope_of(cos, sin, 3)
    assert torch.equal(rope.cos, angles.cos())
    assert torch.equal(rope.sin, angles.sin())
    assert torch.equal(longer.cos, torch.cat([angles.cos(), torch.ones(3, 4)]))
    assert torch.equal(longer.sin, torch.cat([angles.sin(), torch.zeros(3, 4)]))


def test_norms_without_eps_take_that_of_the_dtype() -> None:
    norm = torch.nn.RMSNorm(32)
    assert qk_prologue.rms_norm_of(norm, rand(2, 32).bfloat16()).eps == torch.finfo(torch.bfloat16).eps
    assert qk_prologue.rms_norm_of(torch.nn.RMSNorm(32, eps=1e-5), rand(2, 32)).eps == 1e-5


def test_backends_and_context_parallelism_are_refused() -> None:
    model, _ = made("flux")
    ha.fuse_diffusers(model)
    with pytest.raises(NotImplementedError, match=r"the backend is .*NATIVE"):
        model.set_attention_backend("native")
    model.reset_attention_backend()
    with pytest.raises(NotImplementedError, match="context parallelism is enabled"):
        model.transformer_blocks[0].attn.processor._parallel_config = object()


def without_norm(model: Any) -> None:
    del model.blocks[1].attn1.norm_k


def with_parallelism(model: Any) -> None:
    model.blocks[1].attn1.processor._parallel_config = object()


def with_another_processor(model: Any) -> None:
    model.blocks[1].attn1.set_processor(lambda attn, hidden_states: hidden_states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_norm,
            r"WanAttention 'blocks.1.attn1', which has no norm_k; diffusers is .*, and it must be as in 0.42",
        ),
        (with_parallelism, r"'blocks.1.attn1', and context parallelism is enabled; .* use the backend of register_dif"),
        (
            with_another_processor,
            r"whose processor is a function; it must be a WanAttnProcessor: use the backend of register_diffusers",
        ),
    ],
)
def test_other_layouts(change: Any, message: str) -> None:
    model, _ = made("wan")
    change(model)
    before = model.blocks[0].attn1.processor
    with pytest.raises(NotImplementedError, match=message):
        ha.fuse_diffusers(model)
    assert model.blocks[0].attn1.processor is before


def test_a_processor_that_takes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_wan

    def call(self: Any, attn: Any, hidden_states: torch.Tensor, freqs: torch.Tensor) -> None: ...

    model, _ = made("wan")
    monkeypatch.setattr(transformer_wan.WanAttnProcessor, "__call__", call)
    with pytest.raises(NotImplementedError, match=r"whose processor takes attn, hidden_states, freqs and not attn, .*"):
        ha.fuse_diffusers(model)


def test_models_without_such_attention() -> None:
    with pytest.raises(
        ValueError, match=r"model is a Linear without attention of Wan .*, Flux, .*LTX-2 or LTX-2.3; it"
    ):
        ha.fuse_diffusers(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is a str; it must be a torch.nn.Module"):
        ha.fuse_diffusers("wan")  # type: ignore[arg-type]


def begun() -> Any:
    """A scheduler before its first step."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    return scheduler


def with_a_hook(attn: Any, name: str) -> None:
    getattr(attn, name).register_forward_hook(lambda module, inputs, output: 3 * output)


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def with_a_parametrization(attn: Any, name: str) -> None:
    torch.nn.utils.parametrize.register_parametrization(getattr(attn, name), "weight", Doubled())


def with_a_bias(attn: Any, name: str) -> None:
    from diffusers.models.normalization import RMSNorm

    (channels,) = getattr(attn, name).weight.shape
    norm = RMSNorm(channels, 1e-6, bias=True)
    torch.nn.init.normal_(norm.bias)
    setattr(attn, name, norm)


def with_another_norm(attn: Any, name: str) -> None:
    setattr(attn, name, torch.nn.LayerNorm(getattr(attn, name).weight.shape))


def offloaded(attn: Any, name: str) -> None:
    """By a hook of diffusers: the weight is on the meta device but while the norm runs."""
    from diffusers.hooks import HookRegistry, ModelHook

    norm = getattr(attn, name)
    weight, elsewhere = norm.weight, torch.nn.Parameter(norm.weight.to("meta"))
    norm.weight = elsewhere

    class Offload(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            module.weight = weight
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            module.weight = elsewhere
            return output

    HookRegistry.check_if_exists_or_initialize(norm).register_hook(Offload(), "offload")


#: What may be done to a norm, after which it has to be called.
CHANGES: dict[str, Callable[[Any, str], None]] = {
    "hook": with_a_hook,
    "parametrization": with_a_parametrization,
    "bias": with_a_bias,
    "another": with_another_norm,
    "offloaded": offloaded,
}


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", HAS_NORMS)
def test_a_norm_that_does_more_is_called(name: str, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with what the model hands it; the other norms and RoPE stay fused."""
    model, inputs = made(name)
    attn, shapes = HAS_NORMS[name](model), []
    ha.fuse_diffusers(model)
    CHANGES[change](attn, "norm_q")
    attn.norm_q.register_forward_pre_hook(lambda module, given: shapes.append(given[0].shape))
    ha.unfuse(model)
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    calls = with_oracle(monkeypatch)
    assert relative_error(output(model, inputs), native) < 1e-5
    assert len(shapes) == 2
    assert shapes[0] == shapes[1]
    # Attention to text and to an image, and a call for each padded sequence, are two calls.
    called = [call for call in calls.call_args_list if "q_norm" not in call.kwargs and "k_norm" in call.kwargs]
    assert len(called) == {"wan_of_images": 2, "hunyuan_video": 2, "z_image_of_two": 2, "ltx2": 2}.get(name, 1)


def test_tables_that_are_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Static tables, as CUDA graphs want them; in inference mode, tensors do not count their changes."""

    def tables(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(torch.arange(40.0) * step, 10000 ** (-torch.arange(16) / 16)).repeat_interleave(2, 1)
        return angles.cos(), angles.sin()

    model, _ = made("flux")
    attn, x = model.single_transformer_blocks[0].attn, rand(1, 40, 64, seed=3)
    with torch.no_grad():
        native = [attn(x, image_rotary_emb=tables(step)) for step in (1, 7)]
    assert relative_error(*native) > 1e-2
    ha.fuse_diffusers(model)
    with_oracle(monkeypatch)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            static = tables(1)
            for step, expected in zip((1, 7), native, strict=True):
                for one, other in zip(static, tables(step), strict=True):
                    one.copy_(other)
                assert relative_error(attn(x, image_rotary_emb=static), expected) < 1e-5


@pytest.mark.gpu
def test_tables_of_a_cuda_graph() -> None:
    """They are written to in place, and the graph is run again."""
    model, _ = made("flux")
    model.to("cuda", torch.bfloat16)
    ha.fuse_diffusers(model)
    attn, x = model.single_transformer_blocks[0].attn, rand(1, 40, 64, seed=3).to("cuda", torch.bfloat16)
    angles = torch.outer(torch.arange(40.0), 10000 ** (-torch.arange(16) / 16)).repeat_interleave(2, 1).cuda()
    static, others = (angles.cos(), angles.sin()), ((7 * angles).cos(), (7 * angles).sin())
    with torch.no_grad():
        expected = attn(x, image_rotary_emb=others)
        before = attn(x, image_rotary_emb=static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = attn(x, image_rotary_emb=static)
        for one, other in zip(static, others, strict=True):
            one.copy_(other)
        graph.replay()
    assert relative_error(before, expected) > 1e-2
    assert relative_error(out, expected) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_a_fused_model_can_be_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has run."""
    model, inputs = made(name)
    ha.fuse_diffusers(model, recipe="fast")
    calls = with_oracle(monkeypatch)
    before, saved = output(model, inputs), io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded, count = torch.load(saved, weights_only=False), calls.call_count
    assert torch.equal(output(loaded, inputs), before)
    assert [call.kwargs["recipe"] for call in calls.call_args_list] == [ha.FAST] * 2 * count


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_made_of_its_class_says_what_to_do(name: str) -> None:
    """As diffusers makes them, for all attention of a model, where it changes some."""
    model, _ = made(name)
    ha.fuse_diffusers(model)
    makes = {type(processor) for processor in processors_of(model).values() if hasattr(processor, "recipe")}
    assert len(makes) == 1 + (name == "flux2")
    for make in makes:
        with pytest.raises(TypeError, match=rf"{make.__name__} is made without a recipe.*helion_attn\.unfuse\(model\)"):
            make()


@pytest.mark.parametrize("name", NAMES)
def test_unfuse(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is what it was, to the bit, with its own processors and their backends."""
    model, inputs = made(name)
    ha.register_diffusers(recipe="fast")
    calls = with_oracle(monkeypatch)
    for backend_name in (None, "helion_fp8"):
        if backend_name is not None:
            model.set_attention_backend(backend_name)
        before, processors = output(model, inputs), processors_of(model)
        ha.fuse_diffusers(model)
        ha.fuse_diffusers(model, schedule=lambda *_: "bf16", scheduler=begun())
        calls.reset_mock()
        output(model, inputs)
        assert {call.kwargs["recipe"] for call in calls.call_args_list} == {ha.BF16}
        for _ in range(2):
            ha.unfuse(model)
            assert processors_of(model) == processors
            assert torch.equal(output(model, inputs), before)
        assert not model._forward_pre_hooks


@pytest.mark.parametrize("kept", [(11, 11), (4, 4)], ids=["whole", "padded"])
def test_masks_of_a_schedule(kept: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense in the first layer, and then tiles of a video, in their own order, with text of which some is padding."""
    pattern = ha.masks.sliding_tile((2, 4, 4), (1, 4, 2), (1, 1, 1), text=11)
    seen = pattern.mask.to_dense()[0, 0][pattern.inverse][:, pattern.inverse]
    assert not torch.equal(pattern.order, torch.arange(43))
    outs, counts = [], []
    for mask in (pattern, ha.BlockMask.from_dense(seen[None, None])):
        model, inputs = made("hunyuan_video")
        inputs["encoder_attention_mask"] = (torch.arange(11) < torch.tensor(kept)[:, None]).long()

        def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor, mask: Any = mask) -> Any:
            return None if layer == 0 else mask if layer == 1 else ("bf16", mask)

        with monkeypatch.context() as patch:
            calls = with_oracle(patch)
            ha.register_diffusers(schedule=schedule, models=model, scheduler=begun())
            model.set_attention_backend("helion_fp8")
            outs.append(output(model, inputs))
            model.reset_attention_backend()
            ha.register_diffusers()
            ha.fuse_diffusers(model, schedule=schedule, scheduler=begun())
            calls.reset_mock()
            outs.append(output(model, inputs))
            counts.append([("rope" in call.kwargs, call.kwargs["recipe"]) for call in calls.call_args_list])
    for out in outs[1:]:
        assert relative_error(out, outs[0]) < 1e-5
    assert counts == [[(True, ha.BALANCED), (True, ha.BALANCED), (True, ha.BF16)]] * 2
    native = output(*made("hunyuan_video"))
    assert relative_error(native, outs[0]) > 1e-3
    # And with the kernels, as near as the backend.
    errors = []
    for fuse in (False, True):
        model, inputs = made("hunyuan_video")
        inputs["encoder_attention_mask"] = (torch.arange(11) < torch.tensor(kept)[:, None]).long()
        if fuse:
            ha.fuse_diffusers(model, schedule=lambda *_: pattern, scheduler=begun())
        else:
            ha.register_diffusers(schedule=lambda *_: pattern, models=model, scheduler=begun())
            model.set_attention_backend("helion_fp8")
        out = output(model, inputs)
        with monkeypatch.context() as patch:
            with_oracle(patch)
            errors.append(relative_error(out, output(model, inputs)))
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("name", ["hunyuan_video15", "flux2", "z_image", "minimax_h3", "ltx2"])
def test_a_mask_of_a_schedule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the backend has it."""
    model, inputs = made(name)
    if name == "hunyuan_video15":  # a schedule's mask goes with padding that sequences have alike
        inputs |= {"encoder_attention_mask": torch.ones(2, 11), "encoder_attention_mask_2": torch.ones(2, 5)}
    native = output(model, inputs)
    tokens = {"hunyuan_video15": 79, "flux2": 39, "z_image": 64, "minimax_h3": 30, "ltx2": 40}[name]
    seen = torch.rand(1, 1, tokens, tokens, generator=torch.Generator().manual_seed(4)) < 0.6
    mask = ha.BlockMask.from_dense(seen | torch.eye(tokens, dtype=torch.bool))

    def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> Any:
        return mask if q.size(2) == k.size(2) == tokens else None

    calls = with_oracle(monkeypatch)
    ha.register_diffusers(schedule=schedule, models=model, scheduler=begun())
    model.set_attention_backend("helion_fp8")
    expected = output(model, inputs)
    model.reset_attention_backend()
    ha.register_diffusers()
    ha.fuse_diffusers(model, schedule=schedule, scheduler=begun())
    calls.reset_mock()
    assert relative_error(output(model, inputs), expected) < 1e-5
    assert relative_error(expected, native) > 1e-3
    masked = [call for call in calls.call_args_list if "block_mask" in call.kwargs]
    assert len(masked) >= 2
    assert all(("rope" in call.kwargs) == (name != "ltx2") for call in masked)


def test_a_mask_of_a_schedule_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of Z-Image is one of the schedule, and each sequence sees what it sees alone, of 64 and 96 tokens."""
    model, inputs = made("z_image_of_two")
    seen = torch.rand(1, 1, 96, 96, generator=torch.Generator().manual_seed(4)) < 0.6
    seen |= torch.eye(96, dtype=torch.bool)
    masks = {tokens: ha.BlockMask.from_dense(seen[..., :tokens, :tokens].contiguous()) for tokens in (64, 96)}
    asked = []

    def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> Any:
        asked.append(layer)
        return masks[q.size(2)] if layer >= 2 else None

    with_oracle(monkeypatch)
    ha.fuse_diffusers(model)
    dense = output(model, inputs)
    ha.fuse_diffusers(model, schedule=schedule, scheduler=begun())
    found = output(model, inputs)
    assert asked == [0, 1, 2, 3]
    alone = [output(model, {name: value[b : b + 1] for name, value in inputs.items()}) for b in range(2)]
    assert relative_error(found, torch.cat(alone)) < 1e-5
    assert relative_error(found, dense) > 1e-3


@pytest.mark.parametrize("kind", ["block_mask", "pytorch", "reordered"])
def test_a_mask_of_each_sequence(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule's mask of a batch: each call of Z-Image has that of its sequence, as the backend has both in one."""
    model, inputs = made("z_image_of_two")
    S = 96
    dense = torch.rand(2, 1, S, S, generator=torch.Generator().manual_seed(4)) < 0.6
    dense |= torch.eye(S, dtype=torch.bool)
    mask: Any = ha.BlockMask.from_dense(dense)
    if kind == "pytorch":
        mask = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], 2, None, S, S, device="cpu")
    if kind == "reordered":  # padding stays last
        order = torch.cat([torch.arange(64).flip(0), torch.arange(64, S)])
        moved = ha.BlockMask.from_dense(dense[:, :, order][:, :, :, order])
        mask = ha.masks.Reordered(moved, order, order.argsort())
    attn = HAS_NORMS["z_image_of_two"](model)
    given = given_to(attn, model, inputs) | {"attention_mask": None}
    with_oracle(monkeypatch)
    with torch.no_grad():
        native = attn(**given | {"attention_mask": dense})
        ha.fuse_diffusers(model, schedule=lambda *_: mask, scheduler=begun())
        assert relative_error(attn(**given), native) < 1e-5
        ha.fuse_diffusers(model, schedule=lambda *_: ha.BlockMask.from_dense(dense[:1]), scheduler=begun())
        assert relative_error(attn(**given), native) > 1e-3
        three = ha.BlockMask.from_dense(torch.cat([dense, dense[:1]]))
        ha.fuse_diffusers(model, schedule=lambda *_: three, scheduler=begun())
        with pytest.raises(ValueError, match="schedule gives a mask with B = 3; it must be 1 or 2"):
            attn(**given)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is given bf16, and the model is as near to fp32 as with its own processors."""
    model, inputs = made(name)
    native = output(model, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        in_bf16 = output(model, inputs)
        ha.fuse_diffusers(model)
        calls = with_oracle(monkeypatch)
        found = output(model, inputs)
    assert relative_error(found, native) < 1.5 * relative_error(in_bf16, native)
    assert calls.call_count
    assert {x.dtype for call in calls.call_args_list for x in call.args} == {torch.bfloat16}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("z_image", "ltx2")])
def test_fused_projections(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' own, before and after; of HunyuanVideo and Qwen-Image it fuses none, and of LTX-2 it cannot."""
    model, inputs = made(name)
    native = output(model, inputs)
    with_oracle(monkeypatch)
    with torch.no_grad():
        for enter in (lambda: ha.fuse_diffusers(model), model.fuse_qkv_projections, model.unfuse_qkv_projections):
            enter()
            assert relative_error(output(model, inputs), native) < 1e-5
        ha.unfuse(model)
        model.fuse_qkv_projections()
        ha.fuse_diffusers(model)
    projections, called = set(), set()
    for projection_name, module in model.named_modules():
        if projection_name.endswith((".to_qkv", ".to_kv")):
            projections.add(module)
            module.register_forward_hook(lambda module, *_: called.add(module))
    assert relative_error(output(model, inputs), native) < 1e-5
    assert called == projections
    assert bool(projections) == (name not in ("hunyuan_video", "hunyuan_video15", "qwen_image"))


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize(
    "name",
    [
        "qwen_image",
        "wan",
        "flux",
        "hunyuan_video15",
        "flux2",
        "z_image",
        "z_image_of_two",
        "minimax_h3",
        "ltx2_interleaved",
    ],
)
def test_torch_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block as a whole, of which a norm may do more; at a mask the graph breaks."""
    model, inputs = made(name)
    ha.fuse_diffusers(model)
    if name in HAS_NORMS:
        with_a_hook(HAS_NORMS[name](model), "norm_q")
    with_oracle(monkeypatch)
    monkeypatch.setattr(backend, "attention", exact)
    expected = output(model, inputs)
    torch._dynamo.reset()
    blocks = [block for part in model.children() if isinstance(part, torch.nn.ModuleList) for block in part]
    assert len(blocks) >= 2
    for block in blocks:
        block.compile(fullgraph=name not in ("hunyuan_video15", "z_image_of_two"), backend="eager")
    assert relative_error(output(model, inputs), expected) < 1e-5
