"""`quantize` reads any strides in place, and packs the same as from a contiguous copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import helion_attn as ha
from helion_attn.testing import relative_error

B, H, S, D = 2, 3, 70, 48

#: Ways to lay [B, H, S, D] out in memory, from a maker of contiguous tensors.
LAYOUTS: dict[str, Callable[[Callable[..., torch.Tensor]], torch.Tensor]] = {
    "bhsd": lambda make: make(B, H, S, D),
    "bshd": lambda make: make(B, S, H, D).transpose(1, 2),
    "slice_of_packed_bs3hd": lambda make: make(B, S, 3, H, D)[:, :, 1].transpose(1, 2),
    "slice_of_packed_bshd3": lambda make: make(B, S, H, D, 3)[..., 2].transpose(1, 2),
    "transposed_d": lambda make: make(B, H, D, S).mT,
    "expanded_heads": lambda make: make(B, 1, S, D).expand(B, H, S, D),
    "expanded_batch_and_rows": lambda make: make(1, H, 1, D).expand(B, H, S, D),
    "odd_offset": lambda make: make(B * H * S * D + 1)[1:].view(B, H, S, D),
    "odd_row_stride": lambda make: make(B, H, S, D + 3)[..., 3:],
    "every_second_row": lambda make: make(B, H, 2 * S, D)[:, :, 1::2],
    "sbhd": lambda make: make(S, B, H, D).permute(1, 2, 0, 3),
}


def make_x(layout: str, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return LAYOUTS[layout](make)


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
