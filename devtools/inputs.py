"""Inputs that tests and benchmarks share."""

from __future__ import annotations

import math

import torch

from helion_attn.reference.rope import apply_rope_qk
from helion_attn.types import Rope

INPUT_KINDS = ("randn", "outlier", "sink", "biased_v", "outlier_channel")

#: The probability that key 0 holds of every row, by kind.
SINK_SHARES = {"sink_v_small_50": 0.5, "sink_v_small_90": 0.9, "sink_v_small_99": 0.99}

#: Inputs that only the accuracy benchmark has: what trained models do to K, what a sum in the tensor core loses, and
#: what a P of 8 bits loses behind a sink.
HARD_KINDS = ("k_channels", "qk_channels", "v_drifts", "v_drifts_16k", "v_drifts_2k", "wide", *SINK_SHARES)

#: Inputs whose K has its size in few channels of either sign, so that no mean takes it away: how many, how many times
#: as large they are, and by which power of that those of Q are divided.
LARGE_CHANNELS = {
    f"k{count}x{factor}{suffix}": (count, factor, power)
    for count, factor in ((3, 8), (3, 30), (2, 100), (8, 10))
    for suffix, power in (("", 0.5), ("q", 1.0), ("b", 0.0))
}

#: And pairs that RoPE has turned, and channels of log-normal sizes.
CHANNEL_KINDS = (*LARGE_CHANNELS, "k_pairs", "k_lognormal")

#: Keys of a period of V's mean; the length itself where there is none.
DRIFT_PERIODS = {"v_drifts": None, "v_drifts_16k": 16384, "v_drifts_2k": 2048}

#: Channels of Q, and as many others of K, that are large in "outlier_channel".
OUTLIER_CHANNELS = 2


def make_qkv(
    kind: str,
    B: int,
    H: int,
    H_kv: int,
    M: int,
    N: int,
    D: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    seed: int = 0,
    D_v: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Test inputs, BHSD.

    Args:
        kind: "randn": N(0, 1). "outlier": N(0, 1) + N(0, 100) * Bernoulli(0.001), FlashAttention-3's distribution.
            "sink": the first key draws most of the probability. "biased_v": V is |N(0, 1)| + 0.5.
            "outlier_channel": the standard deviation of `OUTLIER_CHANNELS` channels of K is 10 to 30 (trained models
            have a few such, the same for all keys: KIVI, arXiv:2402.02750), and so is that of others of Q. Were they
            the same channels, one key would take nearly all of the probability.
            "k_channels": 3% of K's channels in a head have a mean of +-20, and all of Q's one of N(0, 0.25).
            "qk_channels": those of Q are three times as large besides. "v_drifts": V's mean is 3 in the first half of
            the keys and -3 in the second; "v_drifts_16k" and "v_drifts_2k": with periods of so many keys. "wide": Q and
            K times 3, so that scores are nine times as wide. "sink_v_small_50", "sink_v_small_90" and
            "sink_v_small_99": the first key holds about so many percent of every row's probability, more where a mask
            hides others, and its V is a twentieth of theirs. Without that key it is the same input without a sink.
            "k3x30": 3 channels of K are 30 times as large, with either sign, and the same of Q are divided by the root
            of 30; of "k3x30q" by 30, of "k3x30b" by nothing. "k3x8", "k2x100" and "k8x10", also with "q" and "b", are
            others. "k_pairs": RoPE has turned Q and K, of which 2 pairs of channels are 30 times as large, and divided
            by the root. "k_lognormal": a channel's size is exp(N(0, 1)) in K and exp(N(0, 0.25)) in Q.
        B: batch size; and H, H_kv, M, N, D as everywhere.
        dtype: of the tensors.
        device: where they are made (the values depend on it).
        seed: of the generator.
        D_v: of V; D by default.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q, k, v = randn(B, H, M, D), randn(B, H_kv, N, D), randn(B, H_kv, N, D if D_v is None else D_v)
    if kind == "outlier":

        def with_outliers(x: torch.Tensor) -> torch.Tensor:
            hit = torch.rand(x.shape, device=device, generator=generator) < 0.001
            return x + 10 * randn(*x.shape) * hit

        q, k, v = with_outliers(q), with_outliers(k), with_outliers(v)
    elif kind == "sink":
        # A shared direction u: every query has 4 of it, the first key 4, so that its logit is 16 * |u|^2 / sqrt(D).
        u = torch.nn.functional.normalize(randn(D), dim=0) * D**0.25
        q = q + 4 * u
        k[:, :, 0] += 4 * u
        v[:, :, 0] *= 0.05  # as in trained models, the sink's value is small
    elif kind == "biased_v":
        v = v.abs() + 0.5
    elif kind == "outlier_channel":
        channels = torch.randperm(D, device=device, generator=generator)[: 2 * OUTLIER_CHANNELS]
        deviations = 10 + 20 * torch.rand(len(channels), device=device, generator=generator)
        for x, mine in ((q, slice(None, OUTLIER_CHANNELS)), (k, slice(OUTLIER_CHANNELS, None))):
            x[..., channels[mine]] *= deviations[mine]
    elif kind in ("k_channels", "qk_channels"):
        hit = torch.rand(B, H_kv, 1, D, device=device, generator=generator) < 0.03
        k = k + 20 * randn(B, H_kv, 1, D).sign() * hit
        q = q + 0.5 * randn(B, H, 1, D)
        if kind == "qk_channels":
            q = q * torch.where(hit.repeat_interleave(H // H_kv, 1), 3, 1)
    elif kind in DRIFT_PERIODS:
        v = v + drift(N, DRIFT_PERIODS[kind] or N, device=device)[:, None]
    elif kind == "wide":
        q, k = 3 * q, 3 * k
    elif kind in LARGE_CHANNELS:
        count, factor, power = LARGE_CHANNELS[kind]
        large = torch.randperm(D, device=device, generator=generator)[:count]
        q[..., large] /= factor**power
        k[..., large] *= factor
    elif kind == "k_pairs":
        first = torch.randperm(D // 2, device=device, generator=generator)[:2]
        large = torch.cat([first, first + D // 2])
        q[..., large] /= 30**0.5
        k[..., large] *= 30
        angles = torch.outer(torch.arange(max(M, N)), 10000.0 ** (-torch.arange(D // 2) / (D // 2))).to(device)
        positions = torch.arange(N - M, N, device=device).clamp_min(0)
        q, k = apply_rope_qk(q, k, Rope(angles.cos(), angles.sin(), q_positions=positions))
    elif kind == "k_lognormal":
        q, k = q * torch.exp(0.5 * randn(D)), k * torch.exp(randn(D))
    elif kind in SINK_SHARES:
        # All queries share a direction u that the first key alone has: scores of the others are N(0, |q|^2 / D).
        u = torch.nn.functional.normalize(randn(D), dim=0)
        q, k = (x - (x @ u).unsqueeze(3) * u for x in (q, k))
        lse_of_others = math.log(N) + q.square().sum(3, keepdim=True) / (2 * D)
        score = lse_of_others + math.log(SINK_SHARES[kind] / (1 - SINK_SHARES[kind]))
        # Long enough that queries have about as much of u as of all else.
        length = 4 * D**0.25
        q = q + score * D**0.5 / length * u
        k[:, :, 0] = length * u
        v[:, :, 0] *= 0.05
    elif kind != "randn":
        raise ValueError(f"kind is {kind!r}; it must be one of {(*INPUT_KINDS, *HARD_KINDS, *CHANNEL_KINDS)}")
    return q.to(dtype), k.to(dtype), v.to(dtype)


def drift(N: int, period: int, phase: float = 0.0, device: str | torch.device = "cpu") -> torch.Tensor:
    """A mean of V that changes along the keys, fp32 [N]: 3 sign(sin(2 pi (i / period + phase)))."""
    turns = torch.arange(N, device=device, dtype=torch.float64) / period + phase
    return torch.where(turns % 1 < 0.5, 3.0, -3.0)
