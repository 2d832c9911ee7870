"""diffusers' backend: transformers of four pipelines, tiny and random, beside its native backend."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
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
from helpers import diffusion_models  # noqa: E402
from helpers.diffusion_models import rand  # noqa: E402

NAME = "helion_fp8"


@pytest.fixture(autouse=True)
def registered() -> None:
    ha.register_diffusers()


MODELS = ("flux", "wan", "hunyuan_video", "qwen_image_padded")

made = functools.cache(diffusion_models.made)


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
    monkeypatch.setattr("helion_attn.integrations.mask_tensors.attention_varlen", attention_varlen)


@pytest.mark.parametrize("name", MODELS)
def test_exact_attention_is_native(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, scales and layouts are right: nothing but attention's rounding is left."""
    native = run(name, "native")
    with_oracle(monkeypatch)
    assert relative_error(run(name, NAME), native) < 1e-5


@pytest.mark.parametrize("name", ["hunyuan_video", "qwen_image_padded"])
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
    monkeypatch.setattr("helion_attn.integrations.mask_tensors.attention_varlen", modelled_varlen)
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
    learned = q.requires_grad_()
    dispatch.dispatch_attention_fn(learned, k, k, backend=NAME).sum().backward()
    assert learned.grad is not None
    assert learned.grad.isfinite().all()


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


@pytest.mark.parametrize("is_fused", [False, True])
def test_perturbed_attention_guidance(is_fused: bool, device: str) -> None:
    """A hook that returns the values instead of attention changes the output as natively."""
    from diffusers.hooks import LayerSkipConfig, apply_layer_skip

    outs = {}
    for backend in ("native", "helion_fp8"):
        model, inputs = diffusion_models.made("qwen_image")
        model.set_attention_backend(backend)
        skipped = LayerSkipConfig(
            [0], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=True, skip_ff=False
        )
        apply_layer_skip(model, skipped)
        if is_fused and backend == "helion_fp8":
            model.reset_attention_backend()
            ha.fuse_diffusers(model)
        with torch.no_grad():
            outs[backend] = model(**inputs, return_dict=False)[0]
    plain, inputs = diffusion_models.made("qwen_image")
    with torch.no_grad():
        unskipped = plain(**inputs, return_dict=False)[0]
    assert relative_error(unskipped, outs["native"]) > 0.2
    assert relative_error(outs["helion_fp8"], outs["native"]) < 0.1


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


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("is_fused", [False, True], ids=["backend", "fused"])
@pytest.mark.parametrize("name", ["hunyuan_video", "qwen_image_padded"])
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
    assert not [code for code in graphs if "amin" in code or "ones_like" in code or "attention_varlen" in code]


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
