"""`explain` says what `attention` does."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any
from unittest import mock

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.sm90 import _offline_hopper
from helion_attn import plans
from helion_attn.backward import flash_attn_4
from helion_attn.compiler import runners
from helion_attn.compiler.helion_adapter import helion
from helion_attn.compiler.passes import early_copies, hoist_q_scale, row_sums, shared_q
from helion_attn.configs import large_tile_config, tile_config
from helpers.offline import fake_qkv, launching


def explained(shape: tuple[int, int, int, int, int, int], **options: Any) -> Any:
    """Of CPU tensors: B, H, H_kv, M, N, D."""
    return ha.explain(*make_qkv("randn", *shape), **options)


def test_it_takes_what_attention_takes() -> None:
    taken = [*inspect.signature(ha.attention).parameters.values()]
    assert [*inspect.signature(ha.explain).parameters.values()] == taken
    assert [*inspect.signature(ha.plan).parameters.values()] == taken


def test_cpu_tensors_are_named_and_not_computed() -> None:
    with mock.patch.object(helion.Kernel, "__call__", side_effect=AssertionError("it is run")):
        found = explained((1, 4, 2, 100, 200, 64), causal=True)
    assert found.launches == ("sample", "pack_kv", "recentre", "fp8_attn_fwd")
    assert found.quantises_q
    assert found.tile == tile_config(64, True)
    assert (found.passes, found.registers, found.spills) == ((), None, None)
    assert found.expected == (shared_q.NAME, hoist_q_scale.NAME, early_copies.NAME, row_sums.NAME)
    text = str(found)
    for part in (
        "fp8_attn_fwd on the CPU, in Helion's interpreter",
        "64 query rows by 128 keys, 4 warps, 2 stages",
        "queries: quantised by the kernel",
        "launches before attention: sample, pack_kv, recentre",
        "nothing was compiled here; the config has shared_q, hoist_q_scale, early_copies, row_sums",
        "keys are not split: a program sees 2 blocks",
    ):
        assert part in text


@pytest.mark.once  # kernels are counted
def test_the_interpreter_runs_what_is_named() -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 130, 64)
    run = []
    call = runners.Interpreted.__call__

    def recording(self: Any, *args: Any) -> None:
        run.append(self._kernel.fn.__name__)
        call(self, *args)

    with mock.patch.object(runners.Interpreted, "__call__", recording):
        out = ha.attention(q, k, v)
        assert out.isfinite().all()
    assert ha.explain(q, k, v).launches == tuple(run)


@pytest.mark.parametrize(
    ("shape", "options", "splits", "shares", "reason"),
    [
        ((1, 2, 2, 64, 20_000, 64), {}, 19, False, "leave a part of it idle"),
        ((1, 8, 2, 16, 20_000, 64), {}, 19, True, "16 queries of 4 heads fill fewer tiles together"),
        ((64, 8, 8, 64, 6000, 64), {}, 1, False, "would not be 1.04 times as fast"),
        ((1, 2, 2, 64, 20_000, 64), {"window": (100, 100)}, 1, False, "a program sees 4 blocks"),
        ((1, 2, 1, 64, 6000, 512), {"recipe": ha.FAST}, 1, False, "fp8_attn_fwd_large_d has no split-KV"),
        ((1, 2, 2, 64, 200, 64), {"recipe": ha.BF16}, 1, False, "it has 8-bit numbers only"),
        ((1, 4, 2, 640, 200, 64), {}, 1, False, "would not fill an eighth fewer tiles"),
    ],
)
def test_splits_and_groups(
    shape: tuple[int, ...], options: dict[str, Any], splits: int, shares: bool, reason: str
) -> None:
    B, H, H_kv, M, N, D = shape
    # Nothing is read.
    q, k, v = (torch.empty(D, dtype=torch.bfloat16).expand(B, h, s, D) for h, s in ((H, M), (H_kv, N), (H_kv, N)))
    found = ha.explain(q, k, v, **options)
    assert (found.splits > 1, found.shares_tiles) == (splits > 1, shares)
    assert reason in str(found)


def test_a_large_head_dim() -> None:
    found = explained((1, 1, 1, 20, 30, 320), recipe=ha.FAST, causal=True)
    assert found.kernel == "fp8_attn_fwd_large_d"
    assert found.tile == large_tile_config(320, 320, True)
    assert found.launches[-1] == found.kernel


def test_a_gpu_s_kernels_say_what_was_done_to_them() -> None:
    """Compiled for sm_90, and not launched."""

    with (
        _offline_hopper(keep_generated=True) as compiled,
        launching(),
        mock.patch.object(plans.Plan, "compiled", return_value=compiled),
    ):
        found = ha.explain(*fake_qkv(2, 4, 2, 1000, 3000, 64), causal=True)
    assert found.device == "NVIDIA H200"
    assert found.launches == ("sample", "pack_kv", "recentre", "fp8_attn_fwd")
    assert found.quantises_q
    assert found.tile == tile_config(64, True)
    assert [x.name for x in found.passes if x.applied] == [*found.expected]
    assert f"pass {row_sums.NAME}: applied" in str(found)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_a_plan_is_printed_and_called(layout: Any, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 70, 130, 64, device=device)
    others = make_qkv("biased_v", 1, 2, 2, 70, 130, 64, device=device)
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        others = others[0].transpose(1, 2), others[1].transpose(1, 2), others[2].transpose(1, 2)
    sinks = torch.tensor([0.5, -1.0], device=device)
    made: Any = ha.plan(q, k, v, causal=True, layout=layout, sinks=sinks, return_lse=True)
    for name in ("sample", "pack_kv", "fp8_attn_fwd", "(1, 2, 70) torch.float32"):
        assert name in str(made)
    called = made(*others, sinks=sinks)
    expected = ha.attention(*others, causal=True, layout=layout, sinks=sinks, return_lse=True)
    assert all(map(torch.equal, called, expected))
    for wrong in ((others[0][:, :, :1], *others[1:]), (others[0].float(), *others[1:]), others[:1] * 3):
        with pytest.raises(ValueError, match=r"make another with helion_attn\.plan"):
            made(*wrong, sinks=sinks)
    for options in ({}, {"rope": None}):
        with pytest.raises(ValueError, match="a call with sinks, and sinks is None; pass it, or make another with"):
            made(*others, **options)
    with pytest.raises(ValueError, match="a call without k_norm, and k_norm is given; leave it out, or make another"):
        made(*others, sinks=sinks, k_norm=ha.RMSNorm(torch.ones(64, device=device)))
    with pytest.raises(ValueError, match=r"for sinks of shape \[2\], and sinks is shape \[1\]; make another"):
        made(*others, sinks=sinks[:1])
    with pytest.raises(TypeError, match="q_norm is a module, RMSNorm"):
        made(*others, sinks=sinks, q_norm=torch.nn.RMSNorm(64))
    with pytest.raises(TypeError, match="k is a NoneType"):
        made(others[0], None, others[2], sinks=sinks)
    for q in (others[0].detach().requires_grad_(), torch._neg_view(others[0])):
        with pytest.raises(ValueError, match="the plan is for"):
            made(q, *others[1:], sinks=sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 256])
def test_what_a_gpu_launched(D: int) -> None:
    q, k, v = make_qkv("randn", 1, 64, 32, 300, 3000, D, device="cuda")
    for _ in range(2):
        found = ha.explain(q, k, v, causal=True)
        pack_q = () if D == 64 else ("pack_q",)
        assert found.launches == ("sample", "pack_kv", *pack_q, "recentre", "fp8_attn_fwd")
        assert found.quantises_q == (D == 64)
        assert [x.name for x in found.passes if x.applied] == [*found.expected]
        assert found.registers is not None
        assert found.tile is not None
        assert found.registers <= found.tile.max_registers
        assert found.spills == 0


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (ha.FAST, "are equalised before they are rounded"),
        (dataclasses.replace(ha.BALANCED, equalise=False), "not equalised: the recipe has equalise=False"),
        (ha.BF16, "not equalised: Q and K have 16 bits"),
    ],
)
def test_it_says_whether_channels_are_equalised(recipe: ha.Recipe, said: str) -> None:
    assert said in str(explained((1, 2, 2, 64, 200, 64), recipe=recipe))


def test_a_gradient_of_lse_may_take_another_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 40, 40, 64)
    q.requires_grad_()

    def backward(**options: Any) -> str:
        found = ha.explain(q, k, v, **options).backward
        assert found is not None
        return found

    monkeypatch.setattr(flash_attn_4, "is_here", lambda: False)
    cudnn = "cuDNN's 16-bit kernel, through PyTorch: the fastest that takes the mask"
    assert backward() == cudnn
    of_lse = "; where lse gets a gradient, "
    assert backward(return_lse=True).startswith(f"{cudnn}{of_lse}fp32 products in PyTorch, a run of rows at a time: a")
    assert backward(return_lse=True, softcap=5.0) == backward(softcap=5.0)
    monkeypatch.setattr(flash_attn_4, "is_here", lambda: True)
    assert backward(return_lse=True) == f"{cudnn}{of_lse}flash-attn-4's 16-bit kernel: lse has a gradient"
    assert backward(return_lse=True, window=(9, 0)) == backward(window=(9, 0))
