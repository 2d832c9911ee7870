"""The Hadamard rotation of Q and K, in fp64."""

from __future__ import annotations

import torch

from helion_attn.numerics import MAX_HADAMARD_BLOCK


def hadamard_block(D: int) -> int:
    """How many channels are mixed: the largest power of two that divides D, at most 128.

    1, none, for an odd D, to which `quantize` gives no rotation but an error.
    """
    return min(D & -D, MAX_HADAMARD_BLOCK)


def hadamard_matrix(D: int, seed: int = 0) -> torch.Tensor:
    """The rotation R = diag(signs) H / sqrt(b), fp64 [D, D] on the CPU: orthogonal, block-diagonal.

    H holds Sylvester-ordered Hadamard matrices of size b, the largest power of two up to 128 that divides D. Signs:
    `torch.randint(0, 2, (D,), generator=torch.Generator().manual_seed(seed)) * 2 - 1`.

    Args:
        D: head dim.
        seed: of the signs.

    Example:
        R = ha.reference.hadamard_matrix(64)
        assert torch.allclose(R @ R.T, torch.eye(64, dtype=torch.float64))
    """
    block = hadamard_block(D)
    # [block, block]; entry (i, j) is -1 where i and j share an odd number of bits.
    H = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while H.size(0) < block:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    signs = torch.randint(0, 2, (D,), generator=torch.Generator("cpu").manual_seed(seed), device="cpu") * 2 - 1
    return signs.unsqueeze(1) * torch.block_diag(*[H] * (D // block)) * block**-0.5


def hadamard(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """`x @ hadamard_matrix(D, seed)` in fp64.

    Args:
        x: [..., D], any floating dtype and device.
        seed: of the signs.

    Example:
        y = ha.reference.hadamard(torch.randn(100, 64))
    """
    return x.double() @ hadamard_matrix(x.size(-1), seed).to(x.device)
