"""`quantize` reads any strides in place, and packs the same as from a contiguous copy."""

from __future__ import annotations

import pytest
import torch

import helion_attn as ha
from helion_attn.testing import relative_error
from helpers.layouts import LAYOUTS, B, D, H, S, make_x


@pytest.mark.thorough(but=11)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_as_from_a_contiguous_copy(layout: str, dtype: torch.dtype, device: str) -> None:
    views = [make_x(layout, dtype, device, seed) for seed in range(3)]
    if dtype == torch.float32 and (views[0].stride(3) != 1 or any(stride % 4 for stride in views[0].stride()[:3])):
        with pytest.raises(
            ValueError, match=r"q is float32 with strides .*; the last must be 1 and the others multiples"
        ):
            ha.quantize(*views)
        return
    copies = [x.contiguous() for x in views]
    packed, expected = ha.quantize(*views, recipe=ha.FAST), ha.quantize(*copies, recipe=ha.FAST)
    for name in ("q8", "k8", "v8", "q_descale", "k_descale", "v_descale"):
        assert torch.equal(getattr(packed, name).float(), getattr(expected, name).float()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_expanded_head_dim_is_refused(dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(B, H, S, 1, dtype=dtype, device=device).expand(B, H, S, D)
    with pytest.raises(ValueError, match=r"q has strides .*; the last dimension must not be an expanded one"):
        ha.quantize(x, x, x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_centres_as_from_a_contiguous_copy(layout: str, device: str) -> None:
    q, k, v = (make_x(layout, torch.bfloat16, device, seed) for seed in range(3))
    restored, expected = (ha.dequantize(ha.quantize(q, k, x))[2] for x in (v, v.contiguous()))
    # A GPU may sum V's channels in another order.
    assert relative_error(restored, expected) <= (0.0 if device == "cpu" else 1e-3)


@pytest.mark.parametrize("layout", ["slice_of_packed_bs3hd", "transposed_d"])
def test_attention_on_views(layout: str, device: str) -> None:
    q, k, v = (make_x(layout, torch.bfloat16, device, seed) for seed in range(3))
    out, expected = ha.attention(q, k, v), ha.attention(*(x.contiguous() for x in (q, k, v)))
    assert relative_error(out, expected) <= (0.0 if device == "cpu" else torch.finfo(out.dtype).eps)
