"""Terms of the gradients besides products of matrices: of sinks, of lse, and of K's mean.

With p the sink's probability of a row, 0 without one, the sum of its dS is

    sum_j P_j (dP_j - delta + dlse) = delta p + dlse (1 - p), less what `chunked` says of scores that are capped

since sum_j P_j = 1 - p and sum_j P_j dP_j = delta. Computed as a sum over keys it would be rounding alone where it is
0, and K's mean would make an error of that.
"""

from __future__ import annotations

import math

import torch


def row_dots(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dO * O), fp32 [..], of tensors [.., D_v]."""
    return (d_out.float() * out.float()).sum(-1)


def without_keys(lse: torch.Tensor) -> torch.Tensor:
    """`lse` with inf for -inf: P of a row that sees no key is then 0."""
    return torch.where(lse == -math.inf, math.inf, lse)


def gradient_of_lse(d_lse: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor | None:
    """`d_lse` with 0 for a row that sees no key: its lse is -inf whatever the inputs are."""
    return None if d_lse is None else d_lse.masked_fill(lse == -math.inf, 0.0)


def sink_probability(sinks: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor:
    """The probability that each row's sink takes, shaped as lse [.., H, M]; 0 without sinks."""
    return torch.zeros_like(lse) if sinks is None else torch.exp(sinks.unsqueeze(1) - without_keys(lse))


def row_sums(
    delta: torch.Tensor, p: torch.Tensor, d_lse: torch.Tensor | None, capped: torch.Tensor | None
) -> torch.Tensor:
    """The sum of each row of dS."""
    total = delta * p
    if d_lse is not None:
        total = total + d_lse * (1 - p)
    return total if capped is None else total - capped


def sinks_gradient(delta: torch.Tensor, p: torch.Tensor, d_lse: torch.Tensor | None) -> torch.Tensor:
    """dsinks, [H]: a sink has the value 0."""
    d_scores = -p * delta if d_lse is None else p * (d_lse - delta)
    return d_scores.sum(-1).view(-1, p.size(-2)).sum(0)
