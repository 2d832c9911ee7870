"""Processors that fuse norms and RoPE: tiny random Wan and Flux transformers, beside diffusers' own processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import relative_error

diffusers = pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch as dispatch  # noqa: E402

from helion_attn.integrations import diffusers_fused  # noqa: E402


@pytest.fixture(autouse=True)
def natively() -> Iterator[None]:
    """To set a model's backend makes it that of all."""
    active = dispatch._AttentionBackendRegistry._active_backend
    dispatch._AttentionBackendRegistry.set_active_backend(dispatch.AttentionBackendName.NATIVE)
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(active)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=12, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    inputs = {
        "hidden_states": rand(2, 30, 16),
        "encoder_hidden_states": rand(2, 9, 24, seed=1),
        "pooled_projections": rand(2, 12, seed=2),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(5.0), torch.arange(6.0)),
        "txt_ids": torch.zeros(9, 3),
    }
    return model, inputs


def wan(image_dim: int | None = None) -> tuple[Any, dict[str, Any]]:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32, image_dim=image_dim, added_kv_proj_dim=64 if image_dim else None,
    )  # fmt: skip
    inputs = {
        "hidden_states": rand(2, 4, 2, 8, 10),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": rand(2, 512 if image_dim else 11, 24, seed=1),
    }
    if image_dim:
        inputs["encoder_hidden_states_image"] = rand(2, 7, image_dim, seed=2)
    return model, inputs


def wan_of_images() -> tuple[Any, dict[str, Any]]:
    return wan(24)


MODELS = {"flux": flux, "wan": wan, "wan_of_images": wan_of_images}


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """With weights of one size, so that attention looks somewhere, and norms that differ by channel."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.normal_(1.0, 0.4)
    return model.eval(), inputs


def output(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        found = model(**inputs, return_dict=False)[0]
    assert isinstance(found, torch.Tensor)
    return found


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str,
    recipe: ha.Recipe,
    q_norm: ha.RMSNorm | None,
    k_norm: ha.RMSNorm | None,
    rope: ha.Rope | None,
) -> torch.Tensor:
    """The fp64 oracle in the place of the kernels."""
    assert layout == "bshd"
    dtype = q.dtype
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = (x.double() if norm is None else rms_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
    if rope is not None:
        q, k = apply_rope_qk(q, k, rope)
    found = ha.reference.attention(q, k, v)
    assert isinstance(found, torch.Tensor)
    return found.transpose(1, 2).to(dtype)


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
    fused = relative_error(output(model, inputs), native)
    monkeypatch.setattr(diffusers_fused, "attention", exact)
    # fp32 has 2**-24 a step, and a model some hundred.
    assert relative_error(output(model, inputs), native) < 1e-5
    assert 0 < fused < 1.5 * in_backend


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("what", ["q_norm", "k_norm", "rope"])
def test_every_part_counts(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison can fail."""
    model, inputs = made(name)
    native = output(model, inputs)
    ha.fuse_diffusers(model)
    monkeypatch.setattr(diffusers_fused, "attention", lambda *qkv, **options: exact(*qkv, **options | {what: None}))
    assert relative_error(output(model, inputs), native) > 1e-3


def test_fused_projections() -> None:
    model, inputs = made("wan")
    ha.fuse_diffusers(model)
    before = output(model, inputs)
    for block in model.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()
    assert relative_error(output(model, inputs), before) < 0.02


def test_tables_are_made_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = made("wan")
    ha.fuse_diffusers(model)
    made_of: list[torch.Tensor] = []

    def rope_of(cos: torch.Tensor, sin: torch.Tensor) -> ha.Rope:
        made_of.append(cos)
        return original(cos, sin)

    original = diffusers_fused.rope_of
    monkeypatch.setattr(diffusers_fused, "rope_of", rope_of)
    monkeypatch.setattr(diffusers_fused, "attention", exact)
    output(model, inputs)
    assert len(made_of) == 1
    longer = inputs | {"hidden_states": rand(2, 4, 3, 8, 10)}
    output(model, longer)
    assert len(made_of) == 2
    assert [x.size(1) for x in made_of] == [2 * 4 * 5, 3 * 4 * 5]


def test_norms_without_eps_take_that_of_the_dtype() -> None:
    norm = torch.nn.RMSNorm(32)
    assert diffusers_fused.norm_of(norm, rand(2, 32).bfloat16()).eps == torch.finfo(torch.bfloat16).eps
    assert diffusers_fused.norm_of(torch.nn.RMSNorm(32, eps=1e-5), rand(2, 32)).eps == 1e-5


def test_fusing_again_changes_the_recipe() -> None:
    model, _ = made("flux")
    ha.fuse_diffusers(model, recipe="fast")
    ha.fuse_diffusers(model, recipe=ha.ACCURATE)
    assert model.transformer_blocks[0].attn.processor.recipe == ha.ACCURATE


def test_masks_backends_and_context_parallelism_are_refused() -> None:
    model, inputs = made("flux")
    ha.fuse_diffusers(model)
    masked = inputs | {"joint_attention_kwargs": {"attention_mask": torch.ones(2, 1, 1, 39)}}
    with pytest.raises(NotImplementedError, match=r"attention_mask is a Tensor .* it must be None: use the backend"):
        output(model, masked)
    with pytest.raises(NotImplementedError, match=r"the backend is .*NATIVE"):
        model.set_attention_backend("native")
    model.reset_attention_backend()
    with pytest.raises(NotImplementedError, match="context parallelism is enabled"):
        model.transformer_blocks[0].attn.processor._parallel_config = object()


def without_norm(model: Any) -> None:
    del model.blocks[1].attn1.norm_k


def with_layer_norm(model: Any) -> None:
    model.blocks[1].attn1.norm_q = torch.nn.LayerNorm(64)


def with_norms_by_head(model: Any) -> None:
    model.blocks[1].attn1.norm_q = torch.nn.RMSNorm(32)


def with_another_processor(model: Any) -> None:
    model.blocks[1].attn1.set_processor(lambda attn, hidden_states: hidden_states)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_norm,
            r"WanAttention 'blocks.1.attn1', which has no norm_k; diffusers is .*, and it must be as in 0.42",
        ),
        (
            with_layer_norm,
            r"whose norm_q is LayerNorm\(\(64,\).* and no RMSNorm of 64 channels with a weight; diffusers",
        ),
        (with_norms_by_head, r"whose norm_q is RMSNorm\(\(32,\).* and no RMSNorm of 64 channels with a weight"),
        (with_another_processor, r"whose processor is a function and not a WanAttnProcessor; diffusers is"),
    ],
)
def test_other_layouts_name_the_version(change: Any, message: str) -> None:
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
    with pytest.raises(ValueError, match=r"model is a Linear without WanAttention or FluxAttention"):
        ha.fuse_diffusers(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"model is a str; it must be a torch.nn.Module"):
        ha.fuse_diffusers("wan")  # type: ignore[arg-type]
