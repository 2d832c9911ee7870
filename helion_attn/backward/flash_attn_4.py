"""The backward kernel of the package flash-attn-4, where it is installed: also for a gradient of lse.

The function is private there. So one version is called, that of the extra `training`, and no other.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

import torch

from helion_attn.options import ScoreOptions

#: The version whose function this calls.
VERSION = "4.0.0b36"

#: Head dims that are called. With others its accumulators are read in another layout than they are written in, and D_v
#: unlike D raises with groups of heads, or has no room in shared memory.
MAX_D, STEP_D = 256, 32


@functools.cache
def installed_version() -> str | None:
    """The package's version, or None where it is not installed."""
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return None


def is_here() -> bool:
    """Whether the package is installed in the version that is known."""
    return installed_version() == VERSION


def other_version() -> str | None:
    """The package's version where it is installed in one that is not called."""
    found = installed_version()
    return None if found == VERSION else found


def has_head_dims(D: int, D_v: int) -> bool:
    """Whether it is right with these head dims."""
    return D_v == D <= MAX_D and D % STEP_D == 0


def takes(D: int, D_v: int) -> bool:
    """Whether it is here, and is right with these head dims."""
    return is_here() and has_head_dims(D, D_v)


def other_version_text(D: int, D_v: int) -> str:
    """The end of a reason: the installed version, if only it keeps the package from being called. Else empty."""
    found = other_version()
    if found is None or not has_head_dims(D, D_v):
        return ""
    return f"; flash-attn-4 {found} is installed, of which only {VERSION} is called"


def run(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scores: ScoreOptions,
    d_lse: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK and dV of tensors [B, S, heads, D], or of packed sequences [tokens, heads, D].

    Args:
        d_out: 16 bits, as all but lse and its gradient.
        q: queries.
        k: keys.
        v: values.
        out: of the forward pass.
        lse: fp32 [B, H, M], or [H, tokens].
        scores: which scores there are; masks are bottom-right.
        d_lse: gradient of lse, or None.
        cu_seqlens_q: int32 [sequences + 1], of packed sequences. Launches are sized for one that has all tokens.
        cu_seqlens_k: of the keys.
    """
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found]

    is_causal = scores.right == 0
    # An edge further away hides nothing, and might not fit 32 bits.
    left = min(scores.left, k.size(-3)) if scores.left >= 0 else None
    right = min(scores.right, q.size(-3)) if scores.right > 0 else None
    dq, dk, dv, *_ = _flash_attn_bwd(
        q, k, v, out, d_out, lse.contiguous(), softmax_scale=scores.scale, causal=is_causal, window_size_left=left,
        window_size_right=right, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, dlse=d_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv
