"""Which kernel runs a backward pass, and calls of them, on whatever output and lse they are given.

All take Q, K and V in 16 bits, K without its mean, and the lse that belongs to these: P = exp(S - lse) is then what the
forward pass had. PyTorch declares these operators private; they are called where `tests/backward` holds them on a GPU.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from helion_attn.backward import flash_attn_4
from helion_attn.options import ScoreOptions

#: Largest head dim of PyTorch's flash attention, and what it and cuDNN's must be a multiple of.
FLASH_D, STEP_D = 256, 8

#: From this version on cuDNN has backward passes of head dims up to 256 on Hopper, before up to 128.
CUDNN_WITH_D_256 = 91000


class Case(NamedTuple):
    """Sizes and options by which a backward kernel is chosen."""

    is_cuda: bool  # whether a GPU runs it
    M: int  # queries
    N: int  # keys
    D: int  # head dim of Q and K
    D_v: int  # of V
    scores: ScoreOptions  # which scores there are
    block_sparse: bool  # there is a block mask
    has_lse_gradient: bool  # lse has a gradient too
    packed_sequences: bool  # M and N are tokens of several sequences


class BackwardKernel(NamedTuple):
    """A backward kernel."""

    name: Literal["cudnn", "flash_attn_4", "flash", "chunked"]  # of it
    reason: str  # why no faster one
    is_slow: bool = False  # it takes many times as long as a kernel would

    def __str__(self) -> str:
        return f"{DESCRIPTIONS[self.name]}: {self.reason}"


DESCRIPTIONS = {
    "cudnn": "cuDNN's 16-bit kernel, through PyTorch",
    "flash_attn_4": "flash-attn-4's 16-bit kernel",
    "flash": "PyTorch's 16-bit flash attention",
    "chunked": "fp32 products in PyTorch, a run of rows at a time",
}


def why_chunked(case: Case) -> str | None:
    """Say what no kernel has of a case; None if one has all."""
    if not case.is_cuda:
        return "the tensors are on the CPU"
    if not case.scores.is_linear:
        return "no kernel that is called has a softcap"
    if case.block_sparse:
        return "no kernel that is called has a block mask"
    if flash_attn_4.takes(case.D, case.D_v):
        return None
    reason = why_not_flash(case)
    return None if reason is None else reason + flash_attn_4.other_version_text(case.D, case.D_v)


def why_not_flash(case: Case) -> str | None:
    """Say what neither PyTorch's flash attention nor cuDNN's has of a case without a softcap and a block mask."""
    if case.has_lse_gradient:
        return (
            f"a gradient of lse takes flash-attn-4=={flash_attn_4.VERSION}, and D = D_v, a multiple of "
            f"{flash_attn_4.STEP_D} up to {flash_attn_4.MAX_D}"
        )
    if case.D_v != case.D or case.D > FLASH_D or case.D % STEP_D:
        return f"kernels have D = D_v, a multiple of {STEP_D} up to {FLASH_D}"
    left, right = flash_edges(case.scores, case.M, case.N)
    # It takes a right edge of N keys or more for none, and for none takes one of N keys where there is a left edge.
    # Either is another mask where the first query is more than N keys before the last key.
    if case.N < case.M - 1 and not 0 <= right < case.N and (left >= 0 or right >= 0):
        return "PyTorch's flash attention has no right edge beyond N keys"
    if case.D % flash_attn_4.STEP_D and active_flash_impl() == "FA4" and why_not_cudnn(case) is not None:
        return f"PyTorch's flash attention is FA4, which is called with head dims of {flash_attn_4.STEP_D}s alone"
    return None


def flash_edges(scores: ScoreOptions, M: int, N: int) -> tuple[int, int]:
    """The window's edges; -1 for one that hides no key, which might not fit 32 bits.

    M and N are those of the longest sequence, or more.
    """
    return scores.left if scores.left < N - 1 else -1, scores.right if scores.right < M - 1 else -1


def active_flash_impl() -> str | None:
    """Name the implementation of PyTorch's flash attention that was activated, if this PyTorch has others."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    name: str | None = None if current is None else current()
    return name


def largest_cudnn_d() -> int:
    """Return the largest head dim of which this machine's cuDNN has a backward pass."""
    return 256 if (torch.backends.cudnn.version() or 0) >= CUDNN_WITH_D_256 else 128


def why_not_cudnn(case: Case) -> str | None:
    """Say what cuDNN's kernel, as PyTorch calls it, does not have of a case; None if it has all."""
    scores = case.scores
    if case.packed_sequences:
        return "the sequences are packed"
    if case.has_lse_gradient:
        return "lse has a gradient"
    if scores.left >= 0 or scores.right > 0:
        return "PyTorch hands cuDNN no window"
    if scores.right == 0 and case.M != case.N:
        return "PyTorch's cuDNN aligns a causal mask to the first key"
    if (largest := largest_cudnn_d()) < case.D:
        return f"this cuDNN has a backward pass of head dims up to {largest}"
    if min(case.M, case.N) == 1:
        return "PyTorch's cuDNN takes no single query or key"
    if torch.are_deterministic_algorithms_enabled():
        return "cuDNN's sums have no order, and deterministic algorithms are asked for"
    return None


def choose(case: Case) -> BackwardKernel:
    """Choose the kernel of a backward pass."""
    if (reason := why_chunked(case)) is not None:
        return BackwardKernel("chunked", reason, is_slow=case.is_cuda)
    if (reason := why_not_cudnn(case)) is None:
        return BackwardKernel("cudnn", "the fastest that takes the mask")
    if flash_attn_4.takes(case.D, case.D_v):
        return BackwardKernel("flash_attn_4", reason)
    return BackwardKernel("flash", reason + flash_attn_4.other_version_text(case.D, case.D_v))


Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run(
    kernel: BackwardKernel,
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: ScoreOptions,
    d_lse: torch.Tensor | None,
) -> Three:
    """dQ, dK and dV of tensors [B, heads, S, D] by a kernel that is not "chunked"; lse and its gradient [B, H, M]."""
    if kernel.name == "cudnn":
        return cudnn(d_out, q, k, v, out, lse, scores)
    d_out, q, k, v, out = (x.transpose(1, 2) for x in (d_out, q, k, v, out))
    if kernel.name == "flash_attn_4":
        found = flash_attn_4.run(d_out, q, k, v, out, lse, scores, d_lse)
    else:
        found = _flash(d_out, q, k, v, out, lse, scores, q.size(1), k.size(1), None, None)
    dq, dk, dv = found
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def cudnn(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: ScoreOptions,
) -> Three:
    """dQ, dK and dV of tensors [B, heads, S, D], without a mask or causal with M = N; lse fp32 [B, H, M].

    PyTorch tells graphs of cuDNN apart by how Q, K and V lie: the others must lie as Q does.
    """
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        d_out, q, k, v, out, lse.unsqueeze(3).contiguous(), seed, seed, None, None, None, q.size(2), k.size(2), 0.0,
        scores.right == 0, scale=scores.scale,
    )  # fmt: skip


def run_varlen(
    kernel: BackwardKernel,
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: ScoreOptions,
    d_lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
) -> Three:
    """dQ, dK and dV of packed sequences [tokens, heads, D]; lse and its gradient [H, tokens].

    The host does not know the longest sequence: launches are sized for one that has all tokens. Without queries or keys
    nothing is launched.
    """
    if q.size(0) == 0 or k.size(0) == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if kernel.name == "flash_attn_4":
        return flash_attn_4.run(d_out, q, k, v, out, lse, scores, d_lse, cu_seqlens_q, cu_seqlens_k)
    return _flash(d_out, q, k, v, out, lse, scores, q.size(0), k.size(0), cu_seqlens_q, cu_seqlens_k)


def _flash(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: ScoreOptions,
    M: int,
    N: int,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
) -> Three:
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    left, right = (edge if edge >= 0 else None for edge in flash_edges(scores, M, N))
    return torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse.contiguous(), cu_q, cu_k, M, N, 0.0, scores.right == 0, state, unused,
        scale=scores.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
