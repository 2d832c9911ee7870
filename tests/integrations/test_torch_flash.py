"""`ha.register_flash_attention`: the operator behind PyTorch's flash attention backend, and its registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations.torch_flash import FlashImplementation
from helion_attn.testing import relative_error

operator: Any = torch.ops.aten._scaled_dot_product_flash_attention


@pytest.fixture
def replaced(device: str) -> Iterator[None]:
    """The operator, on the tests' device; on the CPU it has no kernel of its own."""
    implementation = FlashImplementation(ha.BALANCED, "CUDA" if device == "cuda" else "CPU")
    yield
    implementation.remove()


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)], ids=["bhsd", "bshd", "shbd"])
def test_operator(order: tuple[int, ...], device: str) -> None:
    """Its results are `attention`'s, and lie in memory as the query does."""
    q, k, v = make_qkv("randn", 2, 2, 1, 40, 40, 64, device=device)
    q = q.permute(order).contiguous().permute(order)  # each order is its own inverse
    qkv = q, k, v
    for causal in (False, True):
        out, lse, *_, M, N, _, _, _ = operator(*qkv, 0.0, causal, False, scale=0.3)
        expected, expected_lse = ha.attention(*qkv, causal=causal, sm_scale=0.3, return_lse=True)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
        assert (M, N) == (40, 40)
        assert out.stride() == qkv[0].stride()
        assert relative_error(out, ha.reference.attention(*qkv, causal=causal, sm_scale=0.3)) < 0.07


@pytest.mark.usefixtures("replaced")
def test_schema(device: str) -> None:
    """PyTorch's own fake of the operator agrees on shapes, dtypes and strides."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    qkv = make_qkv("randn", 2, 2, 2, 40, 40, 64, device=device)
    returned = operator(*qkv)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(x) for x in qkv))
    for ours, theirs in zip(returned[:2], fake[:2], strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())


@pytest.mark.usefixtures("replaced")
def test_no_backward_pass_of_another(device: str) -> None:
    """Not in a graph either, whose forward pass runs without grad: PyTorch's would take the 16-bit tensors."""
    qkv = [x.requires_grad_() for x in make_qkv("randn", 2, 2, 1, 40, 40, 64, device=device)]
    with pytest.raises(RuntimeError, match="query requires grad"):
        operator(*qkv)
    out = torch.compile(lambda q, k, v: operator(q, k, v)[0], backend="aot_eager", fullgraph=True)(*qkv)
    with pytest.raises(NotImplementedError, match=r"no backward pass.*helion_attn\.sdpa"):
        out.sum().backward()


@pytest.mark.usefixtures("replaced")
def test_what_it_refuses(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 24, 40, 32, device=device)
    with pytest.raises(NotImplementedError, match=r"dropout_p is 0\.1; it must be 0"):
        operator(q, k, v, 0.1)
    with pytest.raises(ValueError, match=r"query has head dim 8; it must lie in 16\.\.1024"):
        operator(*(x[..., :8] for x in (q, k, v)))
    with pytest.raises(ValueError, match="key has batch size 1 and query has 2"):
        operator(q.expand(2, -1, -1, -1), k, v)
    with pytest.raises(ValueError, match=r"scale is -1\.0; it must lie in"):
        operator(q, k, v, scale=-1.0)
    with pytest.raises(NotImplementedError, match="return_debug_mask is True"):
        operator(q, k, v, 0.0, False, True)
    with pytest.raises(NotImplementedError, match="is_causal is True with 24 queries and 40 keys"):
        operator(q, k, v, 0.0, True)


def test_registry() -> None:
    ha.register_flash_attention("helion_test", recipe="fast")
    assert "helion_test" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None  # a provider must not activate itself
    registry.activate_flash_attention_impl("helion_test")
    assert registry.current_flash_attention_impl() == "helion_test"
    registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None
    with pytest.raises(ValueError, match="name is 'FA3', which PyTorch uses"):
        ha.register_flash_attention("FA3")
    with pytest.raises(TypeError, match="name is a NoneType"):
        ha.register_flash_attention(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe is 'best'"):
        ha.register_flash_attention(recipe="best")  # type: ignore[arg-type]


@pytest.mark.gpu
def test_sdpa_reaches_it() -> None:
    """From `scaled_dot_product_attention`, eager and compiled; and no longer once it is restored."""
    qkv = make_qkv("randn", 2, 4, 4, 256, 256, 64, device="cuda")
    ha.register_flash_attention()
    expected = ha.attention(*qkv, causal=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION), torch.no_grad():
        stock = attend(*qkv)
        registry.activate_flash_attention_impl("helion_fp8")
        try:
            assert torch.equal(attend(*qkv), expected)
            assert torch.equal(torch.compile(attend, backend="aot_eager")(*qkv), expected)
        finally:
            registry.restore_flash_attention_impl()
        assert torch.equal(attend(*qkv), stock)
        assert not torch.equal(stock, expected)
