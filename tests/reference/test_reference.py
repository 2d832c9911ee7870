"""The oracle against PyTorch in fp64, and the rotations against other ways to write them."""

from __future__ import annotations

import pytest
import torch

from devtools.inputs import make_qkv
from helion_attn import reference
from helion_attn.reference import oracle as oracle_module
from helion_attn.testing import relative_error
from helpers.cases import PLAIN

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
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        assert torch.all(out[:, :, :30] == 0)
        assert torch.all(lse[:, :, :30] == float("-inf"))
        assert lse[:, :, 30:].isfinite().all()
        assert relative_error(out[:, :, 30:], sdpa(q[:, :, 30:], k, v, bottom_right_mask(20, 20, device))) < 0.1


def test_bshd_is_bhsd_transposed(device: str) -> None:
    qkv = make_qkv("randn", 2, 4, 2, 33, 50, 32, device=device)
    transposed = [x.transpose(1, 2) for x in qkv]
    for attention in (reference.attention, reference.fp8_attention):
        out, lse = attention(*qkv, causal=True, return_lse=True)
        out_bshd, lse_bshd = attention(*transposed, causal=True, return_lse=True, layout="bshd")
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
            attention(*qkv, layout="sbhd")  # type: ignore[call-overload]


def test_scaled_mm_needs_a_gpu() -> None:
    with pytest.raises(NotImplementedError, match=r"q is on cpu.*CUDA"):
        reference.scaled_mm_attention(*make_qkv("randn", 1, 1, 1, 16, 16, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scaled_mm(causal: bool) -> None:
    qkv = make_qkv("randn", 1, 4, 2, 128, 256, 64, device="cuda")
    ref = reference.attention(*qkv, causal=causal)
    recipe = PLAIN
    model_error = relative_error(reference.fp8_attention(*qkv, causal=causal, recipe=recipe), ref)
    # It rounds at the same points, P by 448 instead of 256.
    assert relative_error(reference.scaled_mm_attention(*qkv, causal=causal), ref) < 1.5 * model_error


# ---------------------------------------------------------------------------------------------------------------------
# Hadamard
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("D", "block"),
    [(16, 16), (17, 1), (40, 8), (48, 16), (80, 16), (96, 32), (100, 4), (128, 128), (192, 64), (256, 128)],
)
def test_hadamard_matrix_entry_by_entry(D: int, block: int) -> None:
    """Entry (i, j) of a block is the sign of row i, negative where i & j has an odd number of bits."""
    signs = torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(5)) * 2 - 1
    expected = torch.zeros(D, D, dtype=torch.float64)
    for i in range(D):
        for j in range(i // block * block, (i // block + 1) * block):
            parity = bin((i % block) & (j % block)).count("1") % 2
            expected[i, j] = int(signs[i]) * (-1) ** parity * block**-0.5
    matrix = reference.hadamard_matrix(D, 5)
    assert matrix.dtype == torch.float64
    assert torch.equal(matrix, expected)
    assert torch.count_nonzero(matrix) == D * block


@pytest.mark.parametrize("D", [16, 48, 80, 96, 192, 256])
def test_hadamard_changes_no_product(D: int, device: str) -> None:
    q, k, _ = make_qkv("outlier", 1, 2, 2, 33, 50, D, device=device)
    q_rotated, k_rotated = reference.hadamard(q, 3), reference.hadamard(k, 3)
    assert q_rotated.dtype == torch.float64
    exact = q.double() @ k.double().mT
    assert relative_error(q_rotated @ k_rotated.mT, exact) < FP64_NOISE
    assert relative_error(q_rotated @ reference.hadamard(k, 4).mT, exact) > 0.5
    inverse = reference.hadamard_matrix(D, 3).mT.to(device)
    assert relative_error(q_rotated @ inverse, q.double()) < FP64_NOISE


def test_hadamard_spreads_an_outlier_over_its_block() -> None:
    x = torch.zeros(96)
    x[40] = 8
    rotated = reference.hadamard(x)
    assert torch.all(rotated[32:64].abs() == 8 * 32**-0.5)
    assert torch.all(rotated[:32] == 0)
    assert torch.all(rotated[64:] == 0)


@pytest.mark.parametrize("D", [16, 17, 18, 64, 100, 256])
def test_reflection_entry_by_entry(D: int) -> None:
    """Half of a group's sum less: 1/2 on the diagonal, -1/2 beside it; the last D % 4 channels stay."""
    expected = torch.zeros(D, D, dtype=torch.float64)
    for i in range(D):
        for j in range(D):
            grouped = max(i, j) < D // 4 * 4
            expected[i, j] = float(i == j) - 0.5 * (grouped and i // 4 == j // 4)
    assert torch.equal(reference.reflect(torch.eye(D)), expected)
    assert torch.equal(expected @ expected, torch.eye(D, dtype=torch.float64))
    assert torch.equal(expected, expected.mT)


def test_reflection_spreads_an_outlier_and_keeps_what_is_common() -> None:
    x = torch.zeros(3, 16)
    x[0, 6] = 8
    x[1] = 8
    x[2, 4:8] = torch.tensor([8.0, -8, 8, -8])
    out = reference.reflect(x)
    assert out.dtype == torch.float64
    assert out[0, 4:8].tolist() == [-4, -4, 4, -4]
    assert torch.count_nonzero(out[0]) == 4
    assert torch.equal(out[1:].abs(), x[1:].double().abs())


def test_hadamard_seeds() -> None:
    assert torch.equal(reference.hadamard_matrix(64), reference.hadamard_matrix(64, 0))
    assert not torch.equal(reference.hadamard_matrix(64, 1), reference.hadamard_matrix(64, 2))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(reference.hadamard(x), x.double() @ reference.hadamard_matrix(64, 0))


# ---------------------------------------------------------------------------------------------------------------------
# RoPE
# ---------------------------------------------------------------------------------------------------------------------


def rope_angles(positions: int, R: int, device: str = "cpu") -> torch.Tensor:
    """[positions, R / 2]"""
    frequency = 100.0 ** -(torch.arange(R // 2, dtype=torch.float64, device=device) / (R // 2))
    return torch.arange(positions, device=device).unsqueeze(1) * frequency


def rope_complex(x: torch.Tensor, angle: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The pairs as complex numbers, times e^(i angle); angle is [S, R / 2]."""
    rotary, rest = x.double().split([2 * angle.size(1), x.size(-1) - 2 * angle.size(1)], -1)
    if interleaved:
        z = torch.view_as_complex(rotary.unflatten(-1, (-1, 2)).contiguous())
    else:
        z = torch.complex(*rotary.chunk(2, -1))
    z = z * torch.polar(torch.ones_like(angle), angle)
    rotated = torch.view_as_real(z).flatten(-2) if interleaved else torch.cat([z.real, z.imag], -1)
    return torch.cat([rotated, rest], -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("R", [2, 16, 48, 64])
def test_rope_is_a_complex_product(R: int, interleaved: bool, device: str) -> None:
    x, _, _ = make_qkv("randn", 2, 3, 3, 20, 20, 64, device=device)
    angle = rope_angles(30, R, device)
    out = reference.apply_rope(x, angle.cos(), angle.sin(), interleaved)
    assert out.dtype == torch.float64
    assert relative_error(out, rope_complex(x, angle[:20], interleaved)) < FP64_NOISE
    assert torch.equal(out[..., R:], x[..., R:].double())
    if R > 2:
        other = reference.apply_rope(x, angle.cos(), angle.sin(), not interleaved)
        assert relative_error(out, other) > 0.1


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope_at_positions(interleaved: bool) -> None:
    x, _, _ = make_qkv("randn", 1, 2, 2, 5, 5, 32)
    angle = rope_angles(30, 32)
    positions = torch.tensor([4, 0, 29, 4, 17])
    out = reference.apply_rope(x, angle.cos(), angle.sin(), interleaved, positions)
    assert relative_error(out, rope_complex(x, angle[positions], interleaved)) < FP64_NOISE
    assert torch.equal(out[:, :, 1], x[:, :, 1].double())  # position 0 is no rotation


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_rope_products_depend_on_the_distance_alone(interleaved: bool) -> None:
    q, k, _ = make_qkv("randn", 1, 1, 1, 1, 1, 32)
    angle = rope_angles(100, 24)

    def product(q_position: int, k_position: int) -> torch.Tensor:
        q_rope, k_rope = (
            reference.apply_rope(x, angle.cos(), angle.sin(), interleaved, torch.tensor([position]))
            for x, position in ((q, q_position), (k, k_position))
        )
        return q_rope @ k_rope.mT

    assert relative_error(product(20, 13), product(97, 90)) < FP64_NOISE * 10
    assert relative_error(product(20, 13), product(20, 14)) > 1e-3
    assert relative_error(product(20, 13), product(13, 20)) > 1e-3


def test_rope_outside_the_table_is_nan_in_its_row() -> None:
    x, _, _ = make_qkv("randn", 1, 2, 2, 5, 5, 32)
    angle = rope_angles(30, 16)
    positions = torch.tensor([0, -1, 29, 30, 5])
    out = reference.apply_rope(x, angle.cos(), angle.sin(), False, positions)
    assert torch.equal(out.isnan().all(3), ((positions < 0) | (positions > 29)).expand(1, 2, 5))
    assert torch.equal(out.isnan().any(3), out.isnan().all(3))


def test_rope_takes_16_bit_tables() -> None:
    x, _, _ = make_qkv("randn", 1, 2, 2, 5, 5, 32)
    angle = rope_angles(5, 32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        out = reference.apply_rope(x, cos, sin)
        assert torch.equal(out, reference.apply_rope(x, cos.double(), sin.double()))


def test_rope_errors() -> None:
    x, angle = torch.zeros(1, 1, 5, 32), rope_angles(4, 32)
    with pytest.raises(ValueError, match=r"cos has 4 positions and x 5 rows"):
        reference.apply_rope(x, angle.cos(), angle.sin())
    angle = rope_angles(5, 34)
    with pytest.raises(ValueError, match=r"cos has 17 columns and x head dim 32"):
        reference.apply_rope(x, angle.cos(), angle.sin())


def test_oracle_shares_among_equal_scores_of_any_size() -> None:
    """Of 8e38 a double's last digit is far more than the logarithm of 4."""
    q = torch.full((1, 1, 1, 64), 1e19)
    out, lse = reference.attention(q, q.expand(1, 1, 4, 64), torch.ones(1, 1, 4, 64), return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    assert lse.item() == pytest.approx(8e38)
