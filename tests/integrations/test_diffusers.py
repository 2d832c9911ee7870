"""diffusers' backend: transformers of four pipelines, tiny and random, beside its native backend."""

from __future__ import annotations

import ast
import copy
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers import ranks
from helpers.refused import refused

diffusers = pytest.importorskip("diffusers")
from diffusers.models import attention_dispatch as dispatch  # noqa: E402

from helion_attn.integrations import diffusers as ours  # noqa: E402

NAME = "helion_fp8"


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ha.register_diffusers()
    active = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(active)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def flux() -> tuple[Any, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32, num_attention_heads=2,
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


def wan() -> tuple[Any, dict[str, Any]]:
    """Cross attention has other lengths."""
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": rand(2, 4, 2, 8, 10),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": rand(2, 11, 24, seed=1),
    }
    return model, inputs


def hunyuan_video() -> tuple[Any, dict[str, Any]]:
    """With padding masks: of its own sequence, and in the refiner, whose rows of padding see the first token alone."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, text_embed_dim=24, pooled_projection_dim=12,
        rope_axes_dim=(8, 12, 12),
    )  # fmt: skip
    inputs = {
        "hidden_states": rand(2, 4, 2, 8, 8),
        "timestep": torch.tensor([3, 500]),
        "encoder_hidden_states": rand(2, 11, 24, seed=1),
        "encoder_attention_mask": (torch.arange(11) < torch.tensor([[11], [4]])).long(),
        "pooled_projections": rand(2, 12, seed=2),
        "guidance": torch.tensor([6.0, 6.0]),
    }
    return model, inputs


def qwen_image() -> tuple[Any, dict[str, Any]]:
    """Its padding lies between the text and the image."""
    model = diffusers.QwenImageTransformer2DModel(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=32, num_attention_heads=2,
        joint_attention_dim=24, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip
    inputs = {
        "hidden_states": rand(2, 30, 16),
        "encoder_hidden_states": rand(2, 9, 24, seed=1),
        "encoder_hidden_states_mask": (torch.arange(9) < torch.tensor([[9], [4]])).long(),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_shapes": [[(1, 5, 6)], [(1, 5, 6)]],
    }
    return model, inputs


MODELS = {"flux": flux, "wan": wan, "hunyuan_video": hunyuan_video, "qwen_image": qwen_image}


@functools.cache
def made(name: str) -> tuple[Any, dict[str, Any]]:
    """With weights of one size, so that attention looks somewhere and outputs differ."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
            elif "norm" in parameter_name and parameter_name.endswith("weight"):
                parameter.normal_(1.0, 0.2)
    return model.eval(), inputs


def run(name: str, backend: str) -> torch.Tensor:
    model, inputs = made(name)
    model.set_attention_backend(backend)
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def exact(*changes: str) -> Any:
    """The fp64 oracle in the place of the kernels, dense or packed; with "mask" it sees what is hidden as well."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        kept = {x: options[x] for x in ("causal", "sm_scale", "layout")}
        return ha.reference.attention(q, k, v, **kept).to(q.dtype)

    def attention_varlen(*tensors: torch.Tensor, return_lse: bool, recipe: Any, **options: Any) -> Any:
        q, k, v, cu_seqlens_q, cu_seqlens_k = tensors
        if "mask" in changes:
            cu_seqlens_q, cu_seqlens_k = cu_seqlens_q[[0, -1]], cu_seqlens_k[[0, -1]]
        out, lse = ha.reference.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
        return out.to(q.dtype), lse.float()

    return attention, attention_varlen


def with_oracle(monkeypatch: pytest.MonkeyPatch, *changes: str) -> None:
    attention, attention_varlen = exact(*changes)
    monkeypatch.setattr(ours, "attention", attention)
    monkeypatch.setattr("helion_attn.integrations.masks.attention_varlen", attention_varlen)


@pytest.mark.parametrize("name", MODELS)
def test_exact_attention_is_native(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, scales and layouts are right: nothing but attention's rounding is left."""
    native = run(name, "native")
    with_oracle(monkeypatch)
    assert relative_error(run(name, NAME), native) < 1e-5


@pytest.mark.parametrize("name", ["hunyuan_video", "qwen_image"])
def test_a_mask_that_is_left_out_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = run(name, "native")
    with_oracle(monkeypatch, "mask")
    assert relative_error(run(name, NAME), native) > 1e-2


@pytest.mark.parametrize("name", MODELS)
def test_outputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As near as the rounding model's, and nearer with 16 bits."""
    native = run(name, "native")
    errors = {}
    for recipe in ("balanced", "bf16"):
        ha.register_diffusers(recipe=recipe)
        errors[recipe] = relative_error(run(name, NAME), native)
    assert 0 < errors["bf16"] < 0.5 * errors["balanced"]

    def modelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        return ha.reference.fp8_attention(q, k, v, **options)

    def modelled_varlen(*tensors: torch.Tensor, return_lse: bool, **options: Any) -> Any:
        return ha.reference.fp8_attention_varlen(*tensors, **options)

    ha.register_diffusers(recipe="balanced")
    monkeypatch.setattr(ours, "attention", modelled)
    monkeypatch.setattr("helion_attn.integrations.masks.attention_varlen", modelled_varlen)
    # The kernel's sums have another order, which may flip roundings.
    assert errors["balanced"] < 1.5 * relative_error(run(name, NAME), native) + 1e-3


def test_the_context(device: str) -> None:
    """`attention_backend` holds where no backend was set, and only inside."""
    qkv = [x.transpose(1, 2) for x in make_qkv("randn", 1, 2, 2, 30, 30, 32, device=device)]
    native = dispatch.dispatch_attention_fn(*qkv)
    with diffusers.attention_backend(NAME):
        out = dispatch.dispatch_attention_fn(*qkv)
    assert torch.equal(out, ha.attention(*qkv, layout="bshd"))
    assert torch.equal(dispatch.dispatch_attention_fn(*qkv), native)
    assert 1e-4 < relative_error(out, native) < 0.07


def test_arguments_and_lse(device: str) -> None:
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 2, 4, 2, 30, 30, 32, device=device))
    options = {"backend": NAME, "scale": 0.3, "enable_gqa": True, "attention_kwargs": {"return_lse": True}}
    out, lse = dispatch.dispatch_attention_fn(q, k, v, is_causal=True, **options)
    expected, expected_lse = ha.attention(q, k, v, causal=True, sm_scale=0.3, layout="bshd", return_lse=True)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse.transpose(1, 2))
    mask = torch.arange(30, device=device) < torch.tensor([[30], [11]], device=device)
    for given in (mask, mask[:, None, None]):
        out, lse = dispatch.dispatch_attention_fn(q, k, v, attn_mask=given, **options)
        short, short_lse = ha.attention(
            q[1:], k[1:, :11], v[1:, :11], sm_scale=0.3, layout="bshd", return_lse=True
        )  # fmt: skip
        assert torch.equal(out[1:], short)
        assert torch.equal(lse[1:], short_lse.transpose(1, 2))
        assert lse.shape == (2, 30, 4)


def test_other_masks(device: str) -> None:
    """They become block masks, with lse."""
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 2, 4, 2, 30, 40, 32, device=device))
    mask = torch.rand(2, 4, 30, 40, generator=torch.Generator().manual_seed(0)).to(device) < 0.3
    options = {"backend": NAME, "scale": 0.3, "enable_gqa": True, "attention_kwargs": {"return_lse": True}}
    expected, expected_lse = ha.attention(
        q, k, v, sm_scale=0.3, layout="bshd", block_mask=ha.BlockMask.from_dense(mask), return_lse=True
    )
    for given in (mask, torch.zeros(mask.shape, device=device).masked_fill(~mask, -1e4)):
        out, lse = dispatch.dispatch_attention_fn(q, k, v, attn_mask=given, **options)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse.transpose(1, 2))


@pytest.mark.parametrize("rule", ours.RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any) -> None:
    q = torch.zeros(1, 24, 2, 32)
    with pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        dispatch.dispatch_attention_fn(q, q, q, backend=NAME, **{rule.argument: refused(rule.argument)})


def test_bad_calls_raise() -> None:
    q, k = torch.zeros(1, 24, 2, 32), torch.zeros(1, 30, 2, 32)
    with pytest.raises(NotImplementedError, match="is_causal is True with M = 24, N = 30"):
        dispatch.dispatch_attention_fn(q, k, k, backend=NAME, is_causal=True)
    with pytest.raises(ValueError, match=r"query has 2 heads and key 1; .*enable_gqa=True"):
        dispatch.dispatch_attention_fn(q, k[:, :, :1], k[:, :, :1], backend=NAME)
    with pytest.raises(ValueError, match=r"scale is -1\.0"):
        dispatch.dispatch_attention_fn(q, k, k, backend=NAME, scale=-1.0)
    with pytest.raises(ValueError, match=r"must broadcast to \[B, H, M, N\] with B = 1, H = 2, M = 24 and N = 30"):
        dispatch.dispatch_attention_fn(q, k, k, attn_mask=torch.ones(1, 3, 24, 30).bool(), backend=NAME)
    with pytest.raises(RuntimeError, match="attn_mask requires grad"):
        dispatch.dispatch_attention_fn(q, k, k, attn_mask=torch.zeros(24, 30, requires_grad=True), backend=NAME)
    with pytest.raises(RuntimeError, match="query requires grad"):
        dispatch.dispatch_attention_fn(q.requires_grad_(), k, k, backend=NAME)


def test_other_batches_raise() -> None:
    """With padding, which becomes packed sequences, and without."""
    q, k, v = torch.zeros(2, 24, 2, 32), torch.zeros(4, 24, 2, 32), torch.zeros(4, 12, 2, 32)
    holes = (torch.arange(24) % 7 > 2).expand(2, 24)
    padding = torch.arange(24) < torch.tensor([[24], [9]])
    for mask in (None, padding, holes):
        with pytest.raises(ValueError, match="key has batch size 4 and query has 2; they must be equal"):
            dispatch.dispatch_attention_fn(q, k, k, attn_mask=mask, backend=NAME)
        with pytest.raises(
            ValueError, match=r"key has batch size 1 and query has 2; .* pass key\.expand\(2, -1, -1, -1"
        ):
            dispatch.dispatch_attention_fn(q, k[:1], k[:1], attn_mask=mask, backend=NAME)
        with pytest.raises(ValueError, match="value has batch size 4 and query has 2; they must be equal"):
            dispatch.dispatch_attention_fn(q, k[:2], v, attn_mask=mask, backend=NAME)


def test_the_callers_names() -> None:
    q = torch.zeros(1, 24, 2, 32)
    attend: Any = ours.Backend(ha.BALANCED)
    for i, name in enumerate(("query", "key", "value")):
        given: list[Any] = [*[q] * i, [1.0], *[q] * (2 - i)]
        with pytest.raises(TypeError, match=rf"{name} is a list; it must be a torch\.Tensor"):
            attend(*given)
        given[i] = torch.zeros(1, 24, 2, 8)
        with pytest.raises(ValueError, match=f"{name} has head dim 8"):
            attend(*given)
    for name in ("is_causal", "enable_gqa", "return_lse"):
        with pytest.raises(TypeError, match=f"{name} is 2; it must be a bool"):
            attend(q, q, q, **{name: 2})


def test_a_mask_of_one_query() -> None:
    """[B, N] and [M, N] mean the same with B = M = 1."""
    q, k, v = torch.randn(3, 1, 30, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    mask = (torch.arange(30) < 11)[None]
    out = dispatch.dispatch_attention_fn(q[:, :1], k, v, attn_mask=mask, backend=NAME)
    assert torch.equal(out, ha.attention(q[:, :1], k[:, :11], v[:, :11], layout="bshd"))
    with pytest.raises(NotImplementedError, match=r"which is \[B, N\] and \[M, N\] alike"):
        dispatch.dispatch_attention_fn(
            *(x.expand(2, -1, -1, -1) for x in (q[:, :2], k, v)), attn_mask=mask.expand(2, 30), backend=NAME
        )


def calls_pytorch(source: ast.Module) -> Iterator[str]:
    """Names of the classes and functions of a file that call PyTorch's attention."""
    for defined in source.body:
        if isinstance(defined, ast.ClassDef | ast.FunctionDef):
            called = [node.func for node in ast.walk(defined) if isinstance(node, ast.Call)]
            if any(isinstance(f, ast.Attribute) and f.attr == "scaled_dot_product_attention" for f in called):
                yield defined.name


def test_models_that_no_backend_reaches_are_listed() -> None:
    """A new processor of diffusers that calls PyTorch's attention itself belongs into `OWN_CALLS`."""
    folder = Path(diffusers.__file__).parent / "models"
    sources = [path for path in folder.rglob("*.py") if path.name != "attention_dispatch.py"]
    found = [name for path in sources for name in calls_pytorch(ast.parse(path.read_text()))]
    listed = [name for names in ours.OWN_CALLS.values() for name in names]
    assert sorted(found) == sorted(listed)
    said = " ".join((ha.register_diffusers.__doc__ or "").split())
    for models in ours.OWN_CALLS:
        assert f" {models}" in said


def test_a_model_that_no_backend_reaches(device: str) -> None:
    """It runs under `ha.sdpa`, and as ever without, whatever backend is set."""
    torch.manual_seed(0)
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8, text_embed_dim=8,
        num_layers=1, sample_width=4, sample_height=4, sample_frames=1, patch_size=2, temporal_compression_ratio=4,
        max_text_seq_length=8,
    ).to(device).eval()  # fmt: skip
    inputs = {"hidden_states": rand(1, 1, 4, 4, 4).to(device), "encoder_hidden_states": rand(1, 8, 8).to(device)}

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs, timestep=torch.tensor([3], device=device)).sample

    expected = run()
    model.set_attention_backend(NAME)
    assert torch.equal(run(), expected)
    with ha.sdpa():
        assert 1e-5 < relative_error(run(), expected) < 0.07


def test_registration() -> None:
    ha.register_diffusers("helion_accurate", recipe="accurate")
    assert dispatch.AttentionBackendName("helion_accurate") is dispatch.AttentionBackendName.HELION_ACCURATE
    assert "helion_accurate" in dispatch._AttentionBackendRegistry.list_backends()
    assert "helion_accurate" in dispatch._AttentionBackendRegistry._supports_context_parallel
    ha.register_diffusers("helion_accurate", recipe="fast")
    member = dispatch.AttentionBackendName("helion_accurate")
    assert dispatch._AttentionBackendRegistry._backends[member].recipe == ha.FAST
    assert [x.value for x in dispatch.AttentionBackendName].count("helion_accurate") == 1
    with pytest.raises(ValueError, match="name is 'native', which diffusers uses"):
        ha.register_diffusers("native")
    for bad in ("Helion", "no name"):
        with pytest.raises(ValueError, match="identifier in lower case"):
            ha.register_diffusers(bad)
    with pytest.raises(TypeError, match="name is a NoneType"):
        ha.register_diffusers(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe is 'best'"):
        ha.register_diffusers(recipe="best")  # type: ignore[arg-type]


def test_another_registry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dispatch._AttentionBackendRegistry, "_constraints")
    with pytest.raises(NotImplementedError, match=r"registry of backends has no _constraints; it must be 0\.42"):
        ha.register_diffusers("another")


def test_torch_compile(device: str) -> None:
    qkv = [x.transpose(1, 2) for x in make_qkv("randn", 1, 2, 2, 30, 30, 32, device=device)]
    backend = dispatch.AttentionBackendName(NAME)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dispatch.dispatch_attention_fn(q * 2, k, v, backend=backend)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(attend, fullgraph=True, backend="aot_eager")(*qkv), attend(*qkv))


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("is_fused", [False, True], ids=["backend", "fused"])
@pytest.mark.parametrize("name", ["hunyuan_video", "qwen_image"])
def test_masks_are_read_between_graphs(name: str, is_fused: bool, device: str) -> None:
    """Blocks that are compiled without fullgraph; nothing that reads a mask, or packs by it, is in a graph."""
    model, inputs = copy.deepcopy(made(name))
    model.to(device)
    inputs = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in inputs.items()}
    if is_fused:
        ha.fuse_diffusers(model)
    else:
        model.set_attention_backend(NAME)
    graphs = []

    def collect(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        expected = model(**inputs, return_dict=False)[0]
        torch._dynamo.reset()
        for module in model.children():
            for block in module if isinstance(module, torch.nn.ModuleList) else ():
                block.compile(backend=collect)
        out = model(**inputs, return_dict=False)[0]
    assert torch.equal(out, expected)
    assert graphs
    assert not [code for code in graphs if "amin" in code or "ones_like" in code or "fp8_attn_varlen" in code]


def begun() -> Any:
    """A scheduler before its first step."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(2)
    return scheduler


class Attend:
    """A processor that asks a backend."""

    def __call__(self, attn: Any, *qkv: torch.Tensor, **options: Any) -> Any:
        return dispatch.dispatch_attention_fn(*qkv, backend=dispatch.AttentionBackendName(NAME), **options)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.processor = Attend()

    def forward(self, *qkv: torch.Tensor, **options: Any) -> Any:
        return self.processor(self, *qkv, **options)


class TwoLayers(torch.nn.Module):
    """Calls attention twice with the same tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Attention(), Attention()])

    def forward(self, *qkv: torch.Tensor, **options: Any) -> Any:
        return [block(*qkv, **options) for block in self.blocks]


def test_a_schedule_chooses_masks(device: str) -> None:
    """Dense in the first step and in the first layer, then a pattern: of this package, or PyTorch's."""
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 4, 2, 300, 300, 64, device=device))
    flex = create_block_mask(lambda b, h, i, j: (i - j).abs() < 50, None, None, 300, 300, device=device)
    ours_ = ha.BlockMask.from_flex(flex)
    model = TwoLayers()
    dense, sparse = (ha.attention(q, k, v, layout="bshd", sm_scale=0.2, block_mask=mask) for mask in (None, ours_))
    assert relative_error(sparse, dense) > 0.1
    masks: list[Any] = [ours_, flex]
    for mask in masks:

        def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor, mask: Any = mask) -> Any:
            return mask if step > 0 and layer > 0 else None

        by_hand = ha.Schedule(schedule)
        ha.register_diffusers(schedule=by_hand, models=model)
        for step, expected in enumerate([(dense, dense), (dense, sparse)]):
            with by_hand.step(step):
                outs = model(q, k, v, scale=0.2, enable_gqa=True)
            for out, wanted in zip(outs, expected, strict=True):
                assert torch.equal(out, wanted)


def test_a_schedule_chooses_presets(device: str) -> None:
    """The first step and the last layer in 16 bits; one layer by name and with a mask, and by a recipe."""
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 1, 4, 2, 300, 300, 64, device=device))
    mask = ha.BlockMask.from_dense((torch.rand(300, 300, generator=torch.Generator().manual_seed(0)) < 0.3)[None, None])
    mask = ha.BlockMask.from_dense(mask.to_dense().to(device))
    model = TwoLayers()

    def expected(recipe: Any, block_mask: Any = None) -> torch.Tensor:
        return ha.attention(q, k, v, layout="bshd", sm_scale=0.2, recipe=recipe, block_mask=block_mask)

    def schedule(step: int, layer: int, q: torch.Tensor, k: torch.Tensor) -> Any:
        if step == 2:
            return ("accurate", mask) if layer == 0 else ha.HYBRID
        return "bf16" if step < 1 or layer >= 2 - 1 else None

    by_hand = ha.Schedule(schedule)
    ha.register_diffusers(recipe="fast", schedule=by_hand, models=model)
    by_step = [("bf16", "bf16"), ("fast", "bf16"), (("accurate", mask), ha.HYBRID)]
    for step, recipes in enumerate(by_step):
        with by_hand.step(step):
            outs = model(q, k, v, scale=0.2, enable_gqa=True)
        for out, recipe in zip(outs, recipes, strict=True):
            assert torch.equal(out, expected(*recipe) if isinstance(recipe, tuple) else expected(recipe))
    # Padding that a mask hides is hidden by a preset too.
    kept = (torch.arange(300, device=device) < 200)[None]
    with by_hand.step(0):
        outs = model(q, k, v, scale=0.2, enable_gqa=True, attn_mask=kept)
    short = ha.attention(q, k[:, :200], v[:, :200], layout="bshd", sm_scale=0.2, recipe="bf16")
    assert relative_error(outs[0], short) < 0.01


@pytest.mark.parametrize("keys", [266, 261, 256])
def test_a_schedule_reorders_tokens(keys: int, device: str) -> None:
    """Tiles of a video, from tokens in their own order and back, with text of which some or all is padding."""
    pattern = ha.masks.sliding_tile((2, 8, 16), (1, 8, 8), (1, 1, 1), text=10, device=device)
    q, k, v = (x.transpose(1, 2) for x in make_qkv("randn", 2, 2, 2, 266, 266, 64, device=device))
    # [M, N], of tokens in their own order.
    seen = pattern.mask.to_dense()[0, 0][pattern.inverse][:, pattern.inverse]
    assert not torch.equal(seen, pattern.mask.to_dense()[0, 0])
    model = TwoLayers()
    ha.register_diffusers(recipe="bf16", schedule=lambda *_: pattern, models=model, scheduler=begun())
    kept = (torch.arange(266, device=device) < keys).expand(2, -1)
    options = {"attention_kwargs": {"return_lse": True}, "attn_mask": kept}
    (out, lse), _ = model(q, k, v, **options)
    # [B, H, M, N]
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / 8
    scores = scores.masked_fill(~(seen & kept[0]), float("-inf"))
    expected = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(3), v.double())
    assert 1e-4 < relative_error(out, expected) < 0.01
    assert (lse - scores.logsumexp(3).transpose(1, 2)).abs().max() < 0.02


def test_masks_that_do_not_fit() -> None:
    model, x, scheduler = TwoLayers(), torch.zeros(1, 24, 2, 32), begun()
    mask = ha.BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 30, 30)
    pattern = ha.masks.sliding_tile((1, 5, 6), (1, 5, 3), (1, 1, 1))
    for given in (mask, pattern):
        ha.register_diffusers(schedule=lambda *_, given=given: given, models=model, scheduler=scheduler)
        with pytest.raises(ValueError, match=r"mask.* of 30 queries and 30 keys; it must be of .*24 and .*24"):
            model(x, x, x)
    fitting = ha.BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), 24, 24)
    ha.register_diffusers(schedule=lambda *_: fitting, models=model, scheduler=scheduler)
    hiding: list[dict[str, Any]] = [
        {"is_causal": True},
        {"attn_mask": torch.arange(24)[None] > 9},
        {"attn_mask": torch.arange(24)[None] % 5 > 1},
        {"attn_mask": torch.eye(24).bool()},
        {"attn_mask": torch.ones(24, 24).tril().bool()},
        {"attn_mask": torch.zeros(1, 24).bool()},
    ]
    for options in hiding:
        with pytest.raises(NotImplementedError, match=r"hides other keys than the last .*; there it must give no mask"):
            model(x, x, x, **options)
    ha.register_diffusers(schedule=lambda *_: pattern, models=model, scheduler=scheduler)
    y = torch.zeros(1, 30, 2, 32)
    # On a GPU this is an assertion of the device.
    with pytest.raises(RuntimeError, match="hides are not the last in the schedule's order"):
        model(y, y, y, attn_mask=torch.arange(30)[None] < 25)
    with pytest.raises(NotImplementedError, match="schedule is given; with context parallelism it must be None"):
        model(x, x, x, parallel_config=object())


def parallel(rank: int, folder: str) -> None:
    """One of two processes, each with half of a sequence, over gloo; its errors are written to a file."""
    from diffusers.models._modeling_parallel import ParallelConfig

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ha.register_diffusers(recipe="bf16")
    q, k, v = torch.randn(3, 1, 60, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = ha.reference.attention(q, k, v, layout="bshd").chunk(2, 1)[rank]
    errors = {}
    for kind, shape in (("ring", (2, 1)), ("ulysses", (1, 2))):
        config = diffusers.ContextParallelConfig(**{f"{kind}_degree": 2})
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
        config.setup(rank, 2, torch.device("cpu"), mesh)
        mine = [x.chunk(2, 1)[rank] for x in (q, k, v)]
        with torch.no_grad():
            out = dispatch.dispatch_attention_fn(
                *mine, backend=NAME, parallel_config=ParallelConfig(context_parallel_config=config)
            )
        errors[kind] = relative_error(out, expected)
    Path(folder, f"errors_{rank}").write_text(json.dumps(errors))
    dist.destroy_process_group()


def test_context_parallelism(tmp_path: Path) -> None:
    """Ring and Ulysses. Halves that were not merged would be off by 1."""
    ranks.spawn(parallel, (str(tmp_path),), 2)
    for rank in range(2):
        errors = json.loads((tmp_path / f"errors_{rank}").read_text())
        assert set(errors) == {"ring", "ulysses"}
        assert all(1e-4 < error < 0.01 for error in errors.values()), errors
