"""The random-sign Hadamard rotation of Q and K.

Row x of head dim D becomes `(x * signs) @ diag(H_b, ..., H_b) / sqrt(b)`: b is the largest power of two, up to 128,
that divides D, H_b the Hadamard matrix in Sylvester's order, and signs are +-1 from a seed. The rotation is orthogonal,
so Q K^T does not change (QuIP, arXiv:2307.13304). It runs on the tensor core: the operands are bf16 values and +-1,
whose products are exact.
"""

from __future__ import annotations

import functools

import torch

from helion_attn.numerics import MAX_HADAMARD_BLOCK


def hadamard_block(D: int) -> int:
    """The largest power of two, up to 128, that divides D: how many channels are mixed."""
    return min(D & -D, MAX_HADAMARD_BLOCK)


def _signs(D: int, seed: int) -> torch.Tensor:
    """fp32 [D]; made on the CPU, whatever PyTorch's default device and dtype are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 2, (D,), generator=generator, device="cpu").float() * 2 - 1


def _sylvester(side: int) -> torch.Tensor:
    """The unnormalised Hadamard matrix, entry (i, j) = (-1)**popcount(i & j)."""
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while h.size(0) < side:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return h


def hadamard_matrix(D: int, seed: int) -> torch.Tensor:
    """The rotation as a matrix, fp32 [D, D] on the CPU."""
    block = hadamard_block(D)
    matrix = torch.block_diag(*[_sylvester(block)] * (D // block))
    return _signs(D, seed).unsqueeze(1) * matrix * block**-0.5


@functools.cache
def rotation(D: int, D_pad: int, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What `rotate.rotate_rows` needs: signs fp32 [D_row], bf16 matrix of +-1 and 0 [side, side], and 1 / sqrt(b).

    A matrix as wide as a row has the signs in it: to flip a product's factor or the other is the same.
    """
    block, side = hadamard_block(D), min(D_pad, MAX_HADAMARD_BLOCK)
    matrix = torch.block_diag(*[_sylvester(block)] * (side // block))
    signs = torch.nn.functional.pad(_signs(D, seed), (0, D_pad - D))
    if side == D_pad:
        matrix = signs.unsqueeze(1) * matrix
    return signs.to(device), matrix.to(device, torch.bfloat16), block**-0.5
