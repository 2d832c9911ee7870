"""The frozen dataclasses of the public API."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Recipe:
    """How Q, K and V become FP8.

    Q, K and V are e4m3 with one descale per (batch, head): `amax / 448`.

    Attributes:
        center_v: subtract V's mean over keys, per (batch, KV head, channel), before quantising, and add it back in
            the epilogue. Rows of softmax sum to 1, so the result is the same, and e4m3's bits go to what varies.
    """

    center_v: bool = True


#: No pass over V but the amax.
FAST = Recipe(center_v=False)

#: The default.
BALANCED = Recipe(center_v=True)


@dataclass(frozen=True)
class QuantizedQKV:
    """Q, K and V in the packed format that the attention kernel reads. Made by `helion_attn.quantize`.

    Sequences are zero-padded to whole blocks and head dims to a supported one (`D_pad`); `M`, `N` and `D` are the
    true sizes. `*_descale` are the multipliers that dequantise: `k ~ k8.float() * k_descale`.

    Attributes:
        q8: e4m3 [B * H, M_blocks, bm, D_pad].
        k8: e4m3 [B * H_kv, N_blocks, bn, D_pad].
        v8: e4m3 [B * H_kv, N_blocks, D_pad, bn], transposed, its keys interleaved inside every 16: key
            `8a + 2t + b` is stored at `4t + 2a + b` (a, b in {0, 1}, t in 0..3).
        q_descale: fp32 [B, H].
        k_descale: fp32 [B, H_kv].
        v_descale: fp32 [B, H_kv].
        v_mean: fp32 [B, H_kv, D_pad], what was subtracted from V before the cast; zeros when it was not centred.
        M: query length.
        N: key length.
        D: head dim of the unpadded tensors.
        dtype: dtype of the unquantised tensors, the default output dtype.
        layout: "bhsd" or "bshd", the layout of the unquantised tensors and of the output.
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor
    M: int
    N: int
    D: int
    dtype: torch.dtype
    layout: str = "bhsd"
