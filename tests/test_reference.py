"""The oracle against PyTorch in fp64."""

from __future__ import annotations

import pytest
import torch
from cases import pair, single

from helion_attn import reference
from helion_attn.reference import oracle as oracle_module
from helion_attn.testing import make_qkv, relative_error

#: Sums of a few hundred fp64 terms in another order.
FP64_NOISE = 1e-13


def bottom_right_mask(M: int, N: int, device: str) -> torch.Tensor:
    """[M, N], True where row i sees key j."""
    rows, keys = torch.arange(M, device=device)[:, None], torch.arange(N, device=device)[None, :]
    return keys <= rows + (N - M)


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    group = q.size(1) // k.size(1)
    q64, k64, v64 = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    return torch.nn.functional.scaled_dot_product_attention(q64, k64, v64, attn_mask=mask, scale=scale)


@pytest.mark.parametrize("kind", ["randn", "outlier", "sink", "biased_v"])
def test_full(kind: str, device: str) -> None:
    q, k, v = make_qkv(kind, 2, 3, 3, 33, 70, 40, device=device)
    assert relative_error(reference.attention(q, k, v), sdpa(q, k, v)) < FP64_NOISE


def test_causal_square_matches_is_causal(device: str) -> None:
    q, k, v = (x.double() for x in make_qkv("randn", 2, 2, 2, 65, 65, 32, device=device))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert relative_error(reference.attention(q, k, v, causal=True), expected) < FP64_NOISE


@pytest.mark.parametrize(("M", "N"), [(1, 50), (20, 50), (49, 50), (50, 50)])
def test_causal_is_bottom_right(M: int, N: int, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, M, N, 32, device=device)
    out = reference.attention(q, k, v, causal=True)
    assert relative_error(out, sdpa(q, k, v, bottom_right_mask(M, N, device))) < FP64_NOISE


@pytest.mark.parametrize("H_kv", [1, 2, 3])
def test_gqa(H_kv: int, device: str) -> None:
    q, k, v = make_qkv("randn", 2, 6, H_kv, 33, 50, 32, device=device)
    assert relative_error(reference.attention(q, k, v), sdpa(q, k, v)) < FP64_NOISE


@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0])
def test_sm_scale(scale: float, device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 33, 50, 32, device=device)
    assert relative_error(reference.attention(q, k, v, sm_scale=scale), sdpa(q, k, v, scale=scale)) < FP64_NOISE


def test_value_head_dim_differs(device: str) -> None:
    q, k, _ = make_qkv("randn", 1, 2, 2, 33, 50, 32, device=device)
    _, _, v = make_qkv("randn", 1, 2, 2, 33, 50, 48, device=device)
    out = reference.attention(q, k, v)
    assert out.shape == (1, 2, 33, 48)
    assert relative_error(out, sdpa(q, k, v)) < FP64_NOISE


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_lse(causal: bool, device: str) -> None:
    q, k, v = make_qkv("randn", 2, 4, 2, 33, 50, 32, device=device)
    _, lse = reference.attention(q, k, v, causal=causal, return_lse=True)
    s = q.double() @ k.double().repeat_interleave(2, 1).mT / 32**0.5
    if causal:
        s = s.masked_fill(~bottom_right_mask(33, 50, device), float("-inf"))
    assert relative_error(lse, torch.logsumexp(s, 3)) < FP64_NOISE


def test_rows_without_keys(device: str) -> None:
    q, k, v = make_qkv("randn", 1, 2, 2, 50, 20, 32, device=device)
    for attention in (reference.attention, reference.fp8_attention):
        out, lse = pair(attention(q, k, v, causal=True, return_lse=True))
        assert torch.all(out[:, :, :30] == 0)
        assert torch.all(lse[:, :, :30] == float("-inf"))
        assert lse[:, :, 30:].isfinite().all()
        assert relative_error(out[:, :, 30:], sdpa(q[:, :, 30:], k, v, bottom_right_mask(20, 20, device))) < 0.1


def test_bshd_is_bhsd_transposed(device: str) -> None:
    qkv = make_qkv("randn", 2, 4, 2, 33, 50, 32, device=device)
    transposed = [x.transpose(1, 2) for x in qkv]
    for attention in (reference.attention, reference.fp8_attention):
        out, lse = pair(attention(*qkv, causal=True, return_lse=True))
        out_bshd, lse_bshd = pair(attention(*transposed, causal=True, return_lse=True, layout="bshd"))
        assert torch.equal(out_bshd.transpose(1, 2), out)
        assert torch.equal(lse_bshd, lse)


def test_chunks_of_rows_change_nothing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = make_qkv("randn", 1, 2, 2, 33, 50, 32, device=device)
    whole, whole_lse = reference.attention(*qkv, causal=True, return_lse=True)
    monkeypatch.setattr(oracle_module, "_SCORES_AT_ONCE", 7 * 50)
    chunked, chunked_lse = reference.attention(*qkv, causal=True, return_lse=True)
    assert relative_error(chunked, whole) < FP64_NOISE
    assert relative_error(chunked_lse, whole_lse) < FP64_NOISE


def test_unknown_layout_raises() -> None:
    qkv = make_qkv("randn", 1, 1, 1, 2, 2, 16)
    for attention in (reference.attention, reference.fp8_attention):
        with pytest.raises(ValueError, match=r"'sbhd'.*'bhsd' or 'bshd'"):
            attention(*qkv, layout="sbhd")


def test_scaled_mm_needs_a_gpu() -> None:
    with pytest.raises(NotImplementedError, match=r"q is on cpu.*CUDA"):
        reference.scaled_mm_attention(*make_qkv("randn", 1, 1, 1, 16, 16, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scaled_mm(causal: bool) -> None:
    qkv = make_qkv("randn", 1, 4, 2, 128, 256, 64, device="cuda")
    ref = reference.attention(*qkv, causal=causal)
    model_error = relative_error(single(reference.fp8_attention(*qkv, causal=causal)), ref)
    # It rounds at the same points, P by 448 instead of 256 and V not centred.
    assert relative_error(reference.scaled_mm_attention(*qkv, causal=causal), ref) < 1.5 * model_error
