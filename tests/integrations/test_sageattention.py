"""sageattn: SageAttention 2.2's names, order and defaults, and the calls that tools make of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations import sageattention as ours
from helion_attn.testing import relative_error
from helpers.refused import assert_raises

ROOT = Path(__file__).parents[2]

sageattn: Any = ours.sageattn
sageattn_varlen: Any = ours.sageattn_varlen

#: Of SageAttention 2.2 (sageattention/core.py), in order.
ORDERS = {
    "sageattn": "q k v tensor_layout is_causal sm_scale return_lse",
    "sageattn_varlen": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal sm_scale smooth_k"
    ),
    "sageattn_qk_int8_pv_fp16_triton": (
        "q k v tensor_layout quantization_backend is_causal sm_scale smooth_k return_lse"
    ),
    "sageattn_qk_int8_pv_fp16_cuda": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse"
    ),
    "sageattn_qk_int8_pv_fp8_cuda": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k smooth_v return_lse"
    ),
    "sageattn_qk_int8_pv_fp8_cuda_sm90": (
        "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k return_lse"
    ),
}  # fmt: skip

#: Those of a kernel's name, by the preset that they have.
KERNELS = {name: ha.HYBRID if "fp16" in name else ha.BALANCED for name in ORDERS if "qk_int8" in name}


def hnd(
    device: str, M: int = 37, N: int = 37, H_kv: int = 2, B: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = make_qkv("randn", B, 2, H_kv, M, N, 32, device=device)
    return q, k, v


def nhd(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention in fp64 to what a mask leaves."""
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=seen)


def assert_is(out: torch.Tensor, expected: torch.Tensor, others: tuple[torch.Tensor, ...] = ()) -> None:
    assert out.dtype == torch.bfloat16
    assert out.shape == expected.shape
    assert relative_error(out, expected) < 0.07
    for other in others:
        assert relative_error(out, other) > 0.1


@pytest.mark.parametrize("name", ORDERS)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(ours, name)).parameters
    order = ORDERS[name].split()
    assert [*parameters][: len(order)] == order
    defaults = {
        "tensor_layout": "HND", "is_causal": False, "sm_scale": None, "return_lse": False, "smooth_k": True,
        "smooth_v": False, "qk_quant_gran": "per_thread", "quantization_backend": "triton",
    }  # fmt: skip
    found = {key: parameters[key].default for key in order if key in defaults}
    assert found == {key: default for key, default in defaults.items() if key in order}


#: Calls as SageAttention's README and docstrings have them -> what they mean.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "readme": ({"tensor_layout": "HND", "is_causal": False}, {}),
    "causal": ({"is_causal": True}, {"causal": True}),
    "scale": ({"sm_scale": 0.4}, {"sm_scale": 0.4}),
}


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("case", CALLS)
def test_documented_calls_against_the_oracle(case: str, layout: str, device: str) -> None:
    given, meant = CALLS[case]
    q, k, v = qkv = hnd(device, H_kv=1)
    axes = nhd if layout == "NHD" else torch.Tensor.contiguous
    out = sageattn(axes(q), axes(k), axes(v), **{**given, "tensor_layout": layout}, recipe="balanced")
    others = [ha.reference.attention(*qkv, **other) for _, other in CALLS.values() if other != meant]
    assert_is(axes(out), ha.reference.attention(*qkv, **meant), tuple(others))


def test_lse_is_in_natural_units(device: str) -> None:
    qkv = hnd(device, M=20, N=45)
    out, lse = sageattn(*(nhd(x) for x in qkv), tensor_layout="NHD", return_lse=True)
    expected, of_oracle = ha.reference.attention(*qkv, return_lse=True)
    assert_is(nhd(out), expected)
    assert lse.shape == (1, 2, 20)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), of_oracle.double(), atol=0.03, rtol=0.0)


def test_by_default_short_calls_are_pytorchs(device: str) -> None:
    qkv = hnd(device)
    auto = ha.attention(*qkv, recipe="auto")
    assert torch.equal(sageattn(*qkv), auto)
    assert not torch.equal(auto, ha.attention(*qkv))
    assert torch.equal(sageattn(*qkv, recipe="balanced"), ha.attention(*qkv))


def test_in_the_place_of_scaled_dot_product_attention(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SageAttention's README says so; it ignores the mask and the scale there."""
    q, k, v = hnd(device, M=20, N=45, H_kv=1)
    seen = torch.arange(45, device=device) < 19
    stock = F.scaled_dot_product_attention
    scaled = stock(q.double(), k.double(), v.double(), scale=0.5, enable_gqa=True)
    expected = stock(q.double(), k.double(), v.double(), attn_mask=seen[None, None, None], scale=0.5, enable_gqa=True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sageattn)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen[None, None, None], dropout_p=0.0, is_causal=False, scale=0.5, enable_gqa=True
    )
    assert_is(out, expected, (scaled,))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kind", ["padding", "additive", "causal", "blocks"])
def test_masks(kind: str, layout: str, device: str) -> None:
    q, k, v = qkv = hnd(device, B=2)
    key = torch.arange(37, device=device)
    seen = {
        "padding": (key < torch.tensor([[30], [11]], device=device))[:, None, None],
        "additive": (key < 20)[None, None, None],
        "causal": (key <= key[:, None])[None, None],
        "blocks": ((key // 5) % 2 == (key[:, None] // 7) % 2)[None, None],
    }[kind]
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, float("-inf")) if kind == "additive" else seen
    axes = nhd if layout == "NHD" else torch.Tensor.contiguous
    out, lse = sageattn(*map(axes, qkv), tensor_layout=layout, attn_mask=mask, return_lse=True)
    assert_is(axes(out), masked(q, k, v, seen), (ha.reference.attention(q, k, v),))
    assert lse.shape == (2, 2, 37)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_name(name: str, device: str) -> None:
    """As KJNodes calls them, with the mask that SageAttention ignores; theirs of fp16 have P and V in 16 bits."""
    qkv = hnd(device)
    own = {"quantization_backend": "cuda"} if "triton" in name else {"pv_accum_dtype": "fp32", "smooth_k": False}
    call = getattr(ours, name)
    out = call(*map(nhd, qkv), is_causal=True, attn_mask=None, tensor_layout="NHD", **own)
    expected = ha.attention(*map(nhd, qkv), layout="bshd", causal=True, recipe=KERNELS[name])
    assert torch.equal(out, expected)
    _, lse = call(*qkv, return_lse=True)
    assert lse.shape == (1, 2, 37)
    seen = (torch.arange(37, device=device) < 9)[None, None, None]
    assert_is(call(*qkv, attn_mask=seen), masked(*qkv, seen))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool, dtype: torch.dtype, device: str) -> None:
    q, k, v = hnd(device, M=60, N=60, H_kv=1)
    ends = torch.tensor([0, 23, 60], dtype=dtype, device=device)
    packed = (nhd(x)[0].contiguous() for x in (q, k, v))
    out = sageattn_varlen(*packed, ends, ends, 37, 37, is_causal=causal, sm_scale=0.3, smooth_k=False)
    for part in (slice(0, 23), slice(23, 60)):
        expected = ha.reference.attention(*(x[:, :, part] for x in (q, k, v)), causal=causal, sm_scale=0.3)
        assert_is(out[part].transpose(0, 1)[None], expected)


def test_causal_sequences_of_other_lengths_raise(no_launch: None) -> None:
    q, k = torch.zeros(30, 2, 64), torch.zeros(40, 2, 64)
    ends = (torch.tensor([0, n], dtype=torch.int32) for n in (30, 40))
    with pytest.raises(NotImplementedError, match="is_causal is True with 30 tokens of q and 40 of k"):
        sageattn_varlen(q, k, k, *ends, 30, 40, is_causal=True)


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [
        ({"tensor_layout": "BHSD"}, ValueError, "tensor_layout is 'BHSD'; it must be 'HND' or 'NHD'"),
        ({"tensor_layout": None}, TypeError, "pass a mask by name, attn_mask="),
        ({"dropout_p": 0.1}, NotImplementedError, "sageattn: dropout_p is 0.1; it must be 0"),
        ({"attn_mask": "causal"}, NotImplementedError, "sageattn: attn_mask is 'causal'"),
        ({"attn_mask": torch.randn(37, 37)}, NotImplementedError, "with other values than 0 and -inf"),
        ({"is_causal": True, "attn_mask": torch.ones(37, 37)}, NotImplementedError, "is_causal is True"),
        ({"is_causal": "no"}, TypeError, "is_causal is 'no'; it must be a bool"),
        ({"return_lse": "no"}, TypeError, "return_lse is 'no'; it must be a bool"),
        ({"sm_scale": 0.1, "scale": 0.1}, ValueError, "scale is 0.1 and sm_scale 0.1"),
        ({"scale": -1.0}, ValueError, "scale is -1.0"),
        ({"recipe": "best"}, ValueError, "recipe is 'best'"),
        ({"pv_accum_dtype": "fp32"}, TypeError, "sageattn() has no argument pv_accum_dtype"),
        ({"smooth": True}, TypeError, "sageattn() has no argument smooth: did you mean smooth_k?"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_arguments_raise(options: dict[str, Any], error: type[Exception], part: str, device: str) -> None:
    qkv = hnd(device)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    assert_raises(lambda **given: sageattn(*qkv, **given), moved, error, [part])


def test_a_causal_mask_of_other_lengths_raises(device: str) -> None:
    with pytest.raises(NotImplementedError, match="is_causal is True with M = 20, N = 45"):
        sageattn(*hnd(device, M=20, N=45), is_causal=True)


def test_torch_compile(device: str) -> None:
    qkv = hnd(device)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: sageattn(*x, recipe="fast"), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*qkv), sageattn(*qkv, recipe="fast"))


# --- what tools call --------------------------------------------------------------------------------------------------


def diffusers_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """diffusers' own backends, on these functions."""
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_CAN_USE_SAGE_ATTN", True)
        for name in ORDERS:
            patch.setattr(dispatch, name, getattr(ours, name))
        return dispatch.dispatch_attention_fn(q, k, v, **options)


@pytest.mark.parametrize(
    "backend", ["sage", "sage_varlen", *(f"_{name.replace('sageattn', 'sage')}" for name in KERNELS)]
)
def test_diffusers(backend: str, device: str) -> None:
    qkv = hnd(device, B=2)
    out = diffusers_call(*map(nhd, qkv), backend=backend)
    assert_is(nhd(out), ha.reference.attention(*qkv))


def test_diffusers_padding(device: str) -> None:
    qkv = hnd(device, B=2)
    seen = torch.arange(37, device=device) < torch.tensor([[30], [11]], device=device)
    out = diffusers_call(*map(nhd, qkv), attn_mask=seen, backend="sage_varlen")
    assert_is(nhd(out), masked(*qkv, seen[:, None, None]))


def comfyui_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """ComfyUI: no smoothing of K, the mask by name and only where there is one, if the signature has it."""
    options: dict[str, Any] = {"is_causal": False, "tensor_layout": "NHD", "sm_scale": None, "smooth_k": False}
    if mask is not None:
        assert "attn_mask" in inspect.signature(sageattn).parameters
        options["attn_mask"] = mask
    return sageattn(q, k, v, **options)


def kjnodes_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """KJNodes: fp32 as fp16, the mask always by name."""
    q, k, v = (x.half() for x in (q, k, v))
    return sageattn(q, k, v, is_causal=False, attn_mask=mask, tensor_layout="NHD").bfloat16()


def wan_wrapper_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> Any:
    """WanVideoWrapper: PyTorch's names besides."""
    return sageattn(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, tensor_layout="NHD")


@pytest.mark.parametrize("call", [comfyui_call, kjnodes_call, wan_wrapper_call], ids=lambda f: f.__name__)
def test_tools(call: Callable[..., Any], device: str) -> None:
    q, k, v = qkv = hnd(device, M=20, N=45, B=2)
    assert_is(nhd(call(*map(nhd, qkv), None)), ha.reference.attention(q, k, v))
    seen = (torch.arange(45, device=device) < torch.tensor([[30], [11]], device=device))[:, None, None]
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float16).min)
    assert_is(nhd(call(*map(nhd, qkv), mask)), masked(q, k, v, seen), (ha.reference.attention(q, k, v),))


@pytest.mark.parametrize("return_softmax_lse", [False, True])
def test_sglang_diffusion(return_softmax_lse: bool, device: str) -> None:
    """Its backend returns what sageattn does."""
    qkv = hnd(device)
    found = sageattn(
        *map(nhd, qkv), tensor_layout="NHD", is_causal=True, sm_scale=0.25, return_lse=return_softmax_lse
    )  # fmt: skip
    out = found[0] if return_softmax_lse else found
    assert isinstance(found, tuple) == return_softmax_lse
    assert_is(nhd(out), ha.reference.attention(*qkv, causal=True, sm_scale=0.25))


# --- import sageattention ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_sageattention() -> Iterator[None]:
    """A process that has not imported it, and forgets it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        for name in ("sageattention", "sageattention.core"):
            patch.delitem(sys.modules, name, raising=False)
        yield
        for name in ("sageattention", "sageattention.core"):
            sys.modules.pop(name, None)


@pytest.mark.usefixtures("no_sageattention")
def test_install() -> None:
    ours.install()
    ours.install()
    for module in ("sageattention", "sageattention.core"):
        found = importlib.import_module(module)
        assert {name: getattr(found, name) for name in ORDERS} == {name: getattr(ours, name) for name in ORDERS}
    spec = importlib.util.find_spec("sageattention")
    assert spec is not None
    assert importlib.metadata.version("sageattention") == "2.2.0"
    assert sys.path.count(str(ours.FOLDER)) == 1


@pytest.mark.usefixtures("no_sageattention")
def test_install_refuses_where_another_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sageattention.py").write_text("def sageattn(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("sageattention")
    with pytest.raises(RuntimeError, match=r"sageattention is imported already, from .*sageattention\.py; call"):
        ours.install()
    monkeypatch.setitem(sys.modules, "sageattention", ModuleType("sageattention"))
    with pytest.raises(RuntimeError, match="imported already, from None"):
        ours.install()


#: Calls it itself and in a process that multiprocessing starts, as SGLang's workers are.
SCRIPT = """
import multiprocessing, sys

def where():
    import sageattention
    print(sageattention.__file__, flush=True)

if __name__ == "__main__":
    print(sys.argv[1:], flush=True)
    where()
    process = multiprocessing.get_context("spawn").Process(target=where)
    process.start()
    process.join()
    sys.exit(3)
"""


@pytest.mark.thorough
def test_a_script_runs_under_it(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "helion_attn", "sageattention", "--", str(script), "--use-sage-attention"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    file = str(ours.FOLDER / "sageattention" / "__init__.py")
    assert done.stdout.splitlines() == ["['--use-sage-attention']", file, file]


@pytest.mark.parametrize("name", ["sageattn", *KERNELS])
@pytest.mark.parametrize("tensor_layout", ["HND", "NHD"])
def test_gradients_are_those_of_attention(tensor_layout: str, name: str, device: str) -> None:
    layout: Any = ours.LAYOUTS[tensor_layout]
    given = [x if layout == "bhsd" else x.transpose(1, 2) for x in hnd(device, H_kv=1)]
    learned, alike = ([x.detach().requires_grad_() for x in given] for _ in range(2))
    out, lse = getattr(ours, name)(*learned, tensor_layout=tensor_layout, is_causal=True, return_lse=True)
    recipe: Any = KERNELS.get(name, "auto")
    expected = ha.attention(*alike, causal=True, layout=layout, return_lse=True, recipe=recipe)
    found = torch.autograd.grad(out.float().square().sum() + lse.sum(), learned)
    of_attention = torch.autograd.grad(expected[0].float().square().sum() + expected[1].sum(), alike)
    # cuDNN's sums have no order.
    assert all(relative_error(x, y) < 0.003 for x, y in zip(found, of_attention, strict=True))


def test_gradients_with_a_mask(device: str) -> None:
    """Of padding, which becomes packed sequences, and of scores, which becomes a block mask."""
    padding = (torch.arange(37, device=device) < 30).expand(37, -1)
    holes = torch.rand(37, 37, generator=torch.Generator().manual_seed(0)).to(device) < 0.6
    for mask in (padding, holes):
        q, k, v = (x.requires_grad_() for x in hnd(device))
        found = torch.autograd.grad(sageattn(q, k, v, attn_mask=mask, recipe="balanced").sum(), (q, k, v))
        expected = torch.autograd.grad(ha.scaled_dot_product_attention(q, k, v, mask).sum(), (q, k, v))
        assert all(relative_error(x, y) < 0.003 for x, y in zip(found, expected, strict=True))
