"""ComfyUI: the override and the node, called as ComfyUI calls them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations import comfyui
from helion_attn.integrations.comfyui import Override
from helion_attn.testing import relative_error

PACK = Path(__file__).parents[2] / "comfyui"


class ComfyUI:
    """Stands for ComfyUI's attention: what models call, and PyTorch's attention below it, which counts its calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **options: Any) -> torch.Tensor:
        """Hand a call to the override of its model's options, which may call this again: not twice, to the override."""
        override = (options.get("transformer_options") or {}).get("optimized_attention_override")
        if override is None or "_inside_attn_wrapper" in options:
            return self.pytorch(*args, **options)
        out = override(self.pytorch, *args, **options, _inside_attn_wrapper=True)
        assert isinstance(out, torch.Tensor)
        return out

    def pytorch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        self.calls.append({"attn_precision": attn_precision, **options})
        if not skip_reshape:
            D = q.size(2) // heads
            q, k, v = (x.unflatten(2, (-1, D)).transpose(1, 2) for x in (q, k, v))
        if mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(1) if mask.dim() == 3 else mask
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False)
        )
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def qkv_of(
    device: str, M: int = 37, N: int = 37, H_kv: int = 2, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (x.to(dtype) for x in make_qkv("randn", 1, 2, H_kv, M, N, 32, device=device))
    return q, k, v


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


def flats(
    device: str, M: int = 37, N: int = 37, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv_of(device, M, N, dtype=dtype)
    return flat(q), flat(k), flat(v)


def options_of(override: Override, **more: Any) -> dict[str, Any]:
    return {"optimized_attention_override": override, **more}


def assert_8_bits(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
    assert out.dtype == dtype
    assert out.shape == expected.shape
    assert 0.005 < relative_error(out, expected) < 0.07


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_layouts(skip_reshape: bool, skip_output_reshape: bool, dtype: torch.dtype, device: str) -> None:
    comfy, qkv = ComfyUI(), qkv_of(device, M=20, N=45, dtype=dtype)
    given = qkv if skip_reshape else tuple(map(flat, qkv))
    out = comfy(
        *given, 2, skip_reshape=skip_reshape, skip_output_reshape=skip_output_reshape, preferred_attention=object(),
        transformer_options=options_of(Override("balanced")),
    )  # fmt: skip
    expected = ha.reference.attention(*qkv)
    assert_8_bits(out, expected if skip_output_reshape else flat(expected), dtype)
    assert comfy.calls == []


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_scale_and_groups(skip_reshape: bool, device: str) -> None:
    comfy, qkv = ComfyUI(), qkv_of(device, H_kv=1)
    given = qkv if skip_reshape else tuple(map(flat, qkv))
    options = options_of(Override("balanced"))
    call: dict[str, Any] = {"skip_reshape": skip_reshape, "transformer_options": options}
    out = comfy(*given, 2, scale=0.5, enable_gqa=True, **call)
    assert_8_bits(out, flat(ha.reference.attention(*qkv, sm_scale=0.5)))
    assert relative_error(out, flat(ha.reference.attention(*qkv))) > 0.1


@pytest.mark.parametrize("ndim", [2, 3, 4])
@pytest.mark.parametrize("additive", [False, True])
def test_masks(additive: bool, ndim: int, device: str) -> None:
    comfy, qkv = ComfyUI(), qkv_of(device, M=20, N=45)
    seen = (torch.arange(45, device=device) < 17).expand(20, 45)
    mask = torch.zeros(20, 45, device=device).masked_fill(~seen, -1e30) if additive else seen
    mask = mask[(None,) * (ndim - 2)]
    out = comfy(*map(flat, qkv), 2, mask, transformer_options=options_of(Override("balanced")))
    q, k, v = (x.double() for x in qkv)
    assert_8_bits(out, flat(F.scaled_dot_product_attention(q, k, v, attn_mask=seen)))
    assert comfy.calls == []


def test_auto_leaves_short_calls_to_pytorch(device: str) -> None:
    qkv = qkv_of(device)
    out = ComfyUI()(*map(flat, qkv), 2, transformer_options=options_of(Override()))
    assert torch.equal(out, flat(ha.attention(*qkv, recipe="auto")))
    assert not torch.equal(out, flat(ha.attention(*qkv)))


# --- what is declined -------------------------------------------------------------------------------------------------


def test_calls_that_must_be_precise(device: str) -> None:
    comfy, qkv = ComfyUI(), flats(device)
    options = options_of(Override("balanced"))
    given: dict[str, Any] = {"attn_precision": torch.float32, "scale": 0.3, "low_precision_attention": False}
    out = comfy(*qkv, 2, **given, transformer_options=options)
    assert torch.equal(out, comfy.pytorch(*qkv, 2, **given))
    assert {name: comfy.calls[0][name] for name in given} == given
    comfy(*qkv, 2, low_precision_attention=True, transformer_options=options)
    assert len(comfy.calls) == 2


REFUSED: dict[str, Callable[[str], tuple[list[torch.Tensor], dict[str, Any], str]]] = {
    "bias": lambda device: (
        [*flats(device)],
        {"mask": torch.randn(37, 37, device=device).bfloat16()},
        "other values than 0 and -inf",
    ),
    "head_dim": lambda device: ([x[:, :, :16] for x in flats(device)], {}, "has head dim 8"),
    "dtype": lambda device: ([*flats(device, dtype=torch.float64)], {}, "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_calls_are_left_and_logged_once(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    comfy, ((q, k, v), given, why) = ComfyUI(), REFUSED[case](device)
    said: list[str] = []
    monkeypatch.setattr(comfyui._LOG, "warning", lambda text, *values: said.append(text % values))
    options = options_of(Override("balanced"))
    outs = [comfy(q, k, v, 2, **given, transformer_options=options) for _ in range(2)]
    assert len(comfy.calls) == 2
    assert all(torch.equal(out, comfy.pytorch(q, k, v, 2, **given)) for out in outs)
    (text,) = said
    assert why in text


def test_heads_that_differ_unasked_are_comfyuis_error(device: str) -> None:
    comfy, (q, k, v) = ComfyUI(), qkv_of(device)
    options = options_of(Override("balanced"))
    with pytest.raises(RuntimeError, match="size of tensor"):
        comfy(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1), 2, skip_reshape=True, transformer_options=options)
    assert len(comfy.calls) == 1


def test_other_overrides_get_what_is_declined(device: str) -> None:
    comfy, qkv, seen = ComfyUI(), flats(device), []

    def other(func: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        seen.append(func)
        return func(*args, **options) + 1

    options = options_of(Override("balanced", before=other))
    out = comfy(*qkv, 2, low_precision_attention=False, transformer_options=options)
    assert torch.equal(out, comfy.pytorch(*qkv, 2) + 1)
    assert seen == [comfy.pytorch]
    comfy(*qkv, 2, transformer_options=options)
    assert len(seen) == 1


# --- the schedule -----------------------------------------------------------------------------------------------------

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2, 0.0])

#: Noise levels that samplers ask for -> steps; 0.6 lies within the second step.
STEPS = {1.0: 0, 0.80001: 1, 0.8: 1, 0.6: 1, 0.5: 2, 0.2: 3}


@pytest.mark.parametrize("sigma", STEPS)
def test_first_steps(sigma: float, device: str) -> None:
    comfy, qkv = ComfyUI(), flats(device)
    options = options_of(
        Override("balanced", first_steps=2),
        sample_sigmas=SIGMAS.to(device),
        sigmas=torch.tensor([sigma], device=device),
    )
    for _ in range(2):
        comfy(*qkv, 2, transformer_options=options)
    assert len(comfy.calls) == (2 if STEPS[sigma] < 2 else 0)


def test_steps_go_on_and_begin_again(device: str) -> None:
    qkv, override = flats(device), Override("balanced", first_steps=1)
    counts = []
    for sigma in (1.0, 0.8, 1.0):
        comfy = ComfyUI()
        options = options_of(override, sample_sigmas=SIGMAS, sigmas=torch.tensor([sigma, sigma]))
        comfy(*qkv, 2, transformer_options=options)
        counts.append(len(comfy.calls))
    assert counts == [1, 0, 1]
    comfy = ComfyUI()
    comfy(*qkv, 2, transformer_options=options_of(override))  # outside of a sampler
    assert comfy.calls == []


@pytest.mark.parametrize(
    ("model", "in_16_bits"),
    [
        ({"block_index": 0, "total_blocks": 6}, True),
        ({"block_index": 1, "total_blocks": 6}, False),
        ({"block_index": 3, "total_blocks": 6}, False),
        ({"block_index": 4, "total_blocks": 6}, True),
        ({"block_index": 5}, False),
        ({"block_index": 0}, False),
        ({}, False),
    ],
)
def test_layers(model: dict[str, int], in_16_bits: bool, device: str) -> None:
    comfy, qkv = ComfyUI(), flats(device)
    override = Override("balanced", first_layers=1, last_layers=2)
    comfy(*qkv, 2, transformer_options=options_of(override, **model))
    assert len(comfy.calls) == in_16_bits


# --- blocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("skip_reshape", [False, True])
def test_blocks_in_the_models_order(skip_reshape: bool, device: str) -> None:
    comfy, qkv = ComfyUI(), qkv_of(device, M=700, N=700)
    given = qkv if skip_reshape else tuple(map(flat, qkv))
    override = Override("balanced", keep_blocks=0.25)
    call: dict[str, Any] = {
        "skip_reshape": skip_reshape,
        "transformer_options": options_of(override, grid_sizes=(3, 4, 5)),
    }
    out = comfy(*given, 2, **call)
    mask = ha.masks.top_blocks(*qkv[:2], keep=0.25)
    assert 0 < mask.blocks.float().mean() < 0.9
    assert torch.equal(out, flat(ha.attention(*qkv, block_mask=mask)))


def exact_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: ha.BlockMask, layout: str, **_: Any
) -> torch.Tensor:
    """Attention to the blocks of a mask, exact."""
    assert layout == "bshd"
    seen = block_mask.blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


def test_blocks_by_tiles(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a tile that are alike draw the queries of that tile: by tiles, few blocks have all of them."""
    grid = (8, 8, 16)  # 8 tiles of (4, 4, 8)
    t, h, w = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
    tile = (t // 4 * 4 + h // 4 * 2 + w // 8).flatten()
    generator = torch.Generator().manual_seed(0)
    towards = 12 * F.normalize(torch.randn(8, 32, generator=generator), dim=1)
    q = (towards[tile] + torch.randn(1024, 32, generator=generator)).expand(1, 2, -1, -1).bfloat16().to(device)
    v = torch.randn(1, 2, 1024, 32, generator=generator).bfloat16().to(device)
    exact = flat(ha.reference.attention(q, q, v))
    monkeypatch.setattr(comfyui, "attention", exact_blocks)
    errors = []
    for model in ({"grid_sizes": torch.Size(grid)}, {"grid_sizes": (8, 8, 8)}, {}):
        override = Override("balanced", keep_blocks=0.125)
        out = ComfyUI()(flat(q), flat(q), flat(v), 2, transformer_options=options_of(override, **model))
        errors.append(relative_error(out, exact))
    assert errors[0] < 0.1
    assert errors[1] == errors[2] > 2 * errors[0]


@pytest.mark.parametrize("case", ["cross", "masked"])
def test_blocks_are_of_self_attention_without_a_mask(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(comfyui, "top_blocks")
    q, k, v = qkv_of(device, M=45 if case == "masked" else 20, N=45)
    mask = torch.ones(45, 45, dtype=torch.bool, device=device) if case == "masked" else None
    override = Override("balanced", keep_blocks=0.1)
    out = ComfyUI()(flat(q), flat(k), flat(v), 2, mask, transformer_options=options_of(override))
    assert torch.equal(out, flat(ha.attention(q, k, v)))
    with pytest.raises(NameError, match="top_blocks"):
        ComfyUI()(flat(k), flat(k), flat(v), 2, transformer_options=options_of(override))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"recipe": "best"}, ValueError, "recipe is 'best'"),
        ({"first_steps": -1}, ValueError, "first_steps is -1; it must be an int, 0 or more"),
        ({"last_layers": 1.5}, ValueError, "last_layers is 1.5"),
        ({"keep_blocks": 0.0}, ValueError, "keep_blocks is 0.0; it must lie above 0"),
        ({"keep_blocks": "all"}, ValueError, "keep_blocks is 'all'"),
        ({"before": 1}, TypeError, "before is a int"),
    ],
)
def test_bad_arguments_raise(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Override(**given)


# --- the node ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pack() -> Iterator[ModuleType]:
    """The pack, imported as ComfyUI does it: from a folder of any name."""
    spec = importlib.util.spec_from_file_location("custom_node", PACK / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "custom_node", module)
        spec.loader.exec_module(module)
        yield module
        sys.modules.pop("custom_node.nodes", None)


class Model:
    """What the node needs of ComfyUI's model patchers."""

    def __init__(self, options: dict[str, Any], device: str) -> None:
        self.model_options, self.load_device = {"transformer_options": options}, torch.device(device)

    def clone(self) -> Model:
        return Model({**self.model_options["transformer_options"]}, str(self.load_device))


def node_of(pack: ModuleType) -> tuple[type, dict[str, Any]]:
    ((name, node),) = pack.NODE_CLASS_MAPPINGS.items()
    assert list(pack.NODE_DISPLAY_NAME_MAPPINGS) == [name]
    return node, node.INPUT_TYPES()["required"]


def test_the_node_patches_a_copy(pack: ModuleType, device: str) -> None:
    node, inputs = node_of(pack)
    chosen = {name: kind[1]["default"] for name, kind in inputs.items() if name != "model"}
    model = Model({"optimized_attention_override": print, "other": 1}, device)
    (patched,) = getattr(node(), node.FUNCTION)(model, **chosen)  # type: ignore[attr-defined]
    assert model.model_options["transformer_options"] == {"optimized_attention_override": print, "other": 1}
    options = patched.model_options["transformer_options"]
    override = options["optimized_attention_override"]
    assert options["other"] == 1
    assert isinstance(override, Override)
    assert override.before is print
    assert (override.recipe, override.keep_blocks, override.first_steps) == ("auto", 1.0, 0)
    (bare,) = node().patch(Model({}, device), "fast", 1, 2, 3, 0.25)
    override = bare.model_options["transformer_options"]["optimized_attention_override"]
    found = (override.first_steps, override.first_layers, override.last_layers, override.keep_blocks, override.before)
    assert found == (1, 2, 3, 0.25, None)
    assert override.recipe == ha.FAST


def test_every_preset_of_the_node_is_one(pack: ModuleType) -> None:
    _, inputs = node_of(pack)
    for preset in inputs["preset"][0]:
        Override(preset)


def test_the_node_refuses_other_devices(pack: ModuleType) -> None:
    node, _ = node_of(pack)
    with pytest.raises(
        RuntimeError, match=r"helion_attn: meta is neither the CPU nor a CUDA device .*; bypass the node"
    ):
        node().patch(SimpleNamespace(load_device=torch.device("meta")), "auto")


def test_the_packs_files(pack: ModuleType) -> None:
    toml = pytest.importorskip("tomllib")
    described = toml.loads((PACK / "pyproject.toml").read_text())
    assert {"PublisherId", "DisplayName"} <= set(described["tool"]["comfy"])
    needed = (PACK / "requirements.txt").read_text().split()
    assert described["project"]["dependencies"] == needed
    imported = {
        module.split(".")[0]
        for path in PACK.glob("*.py")
        for tree in ast.walk(ast.parse(path.read_text()))
        for module in (
            [alias.name for alias in tree.names] if isinstance(tree, ast.Import) else
            [tree.module or ""] if isinstance(tree, ast.ImportFrom) and not tree.level else []
        )
    }  # fmt: skip
    assert imported <= {"__future__", "typing", *needed}


def test_the_workflow(pack: ModuleType) -> None:
    """Every link leads from an output to an input of its type, and the node has a value for each of its widgets."""
    _, inputs = node_of(pack)
    (path,) = (PACK / "example_workflows").glob("*.json")
    workflow = json.loads(path.read_text())
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, source, output, target, place, kind in workflow["links"]:
        assert link in nodes[source]["outputs"][output]["links"]
        assert nodes[target]["inputs"][place]["link"] == link
        assert nodes[source]["outputs"][output]["type"] == nodes[target]["inputs"][place]["type"] == kind
    linked = [entry["link"] for node in nodes.values() for entry in node["inputs"] if entry["name"] != "audio"]
    assert sorted(linked) == [link[0] for link in workflow["links"]]
    (own,) = (node for node in nodes.values() if node["type"] in pack.NODE_CLASS_MAPPINGS)
    kinds = [kind for name, kind in inputs.items() if name != "model"]
    assert len(own["widgets_values"]) == len(kinds)
    for value, (kind, _) in zip(own["widgets_values"], kinds, strict=True):
        assert value in kind if isinstance(kind, list) else isinstance(value, {"INT": int, "FLOAT": float}[kind])
