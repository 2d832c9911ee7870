"""Masks that are given as tensors: what they hide, read from the device, and padding as packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from helion_attn.types import Recipe
from helion_attn.varlen import attention_varlen


@dataclass(frozen=True)
class Visible:
    """What a mask leaves to be seen.

    Attributes:
        spans: (start, stop) of the keys that a sequence of the batch has, for each; the others are padding.
        offset: row i sees keys up to i + offset of its span; None for all of it.
    """

    spans: tuple[tuple[int, int], ...]
    offset: int | None


def kept_spans(kept: torch.Tensor) -> torch.Tensor:
    """`[start, stop, count]` of each row's True, int64 [B, 3], for booleans [B, N]; (0, 0, 0) of a row without any."""
    N = kept.size(1)
    at = torch.arange(N, device=kept.device)
    count = kept.sum(1)
    start = torch.where(kept, at, N).amin(1) * (count > 0)
    stop = torch.where(kept, at + 1, 0).amax(1)
    return torch.stack([start, stop, count], 1)


def read_mask(mask: torch.Tensor, B: int, M: int, N: int) -> Visible:
    """Read a mask of `scaled_dot_product_attention` on the host, once.

    Args:
        mask: broadcasts to [B, H, M, N]: bool, True where a key is seen, or added to the scores, 0 where it is.
        B: sequences.
        M: queries.
        N: keys.

    Raises:
        NotImplementedError: it hides something else than padding at the start or the end of sequences and later keys,
            or differs among heads, or changes scores; or it cannot be read.
        ValueError: it does not broadcast.
    """
    what = f"attn_mask is a {type(mask).__name__} {tuple(mask.shape)} of {mask.dtype}"
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{what}; in torch.compile it must be None: its values cannot be read")
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(f"{what}; in a CUDA graph it must be None: its values cannot be read")
    if not 2 <= mask.dim() <= 4 or any(
        mine not in (1, size) for mine, size in zip(mask.shape[::-1], (N, M, None, B), strict=False) if size is not None
    ):
        raise ValueError(f"{what}; it must broadcast to [B, H, M, N] with B = {B}, M = {M} and N = {N}")
    # [B or 1, H or 1, M or 1, N or 1]
    mask = mask[(None,) * (4 - mask.dim())]
    heads = mask[:, :1]
    if mask.dtype == torch.bool:
        kept, plain = heads, torch.ones((), dtype=torch.bool, device=mask.device)
    elif mask.is_floating_point():
        kept = heads == 0
        hidden = heads == float("-inf")
        # Of the lowest finite number a row that sees nothing is the mean of V, and of -inf 0.
        lowest = (heads == torch.finfo(mask.dtype).min) & kept.any(3, keepdim=True)
        plain = (kept | hidden | lowest).all()
    else:
        raise NotImplementedError(f"{what}; it must be bool or of a floating-point dtype")
    if mask.size(1) > 1:
        plain = plain & (mask == heads).all()
    # [B, M or 1, N]
    kept = kept[:, 0].expand(B, -1, N)
    seen = kept.any(1)
    rows, keys = torch.arange(M, device=mask.device).unsqueeze(1), torch.arange(N, device=mask.device)
    offsets = [N - M, 0] if M != N else [0]
    same = [(kept == seen.unsqueeze(1)).all()]
    same += [(kept == (seen.unsqueeze(1) & (keys <= rows + offset))).all() for offset in offsets]
    facts = torch.cat([torch.stack([plain, *same]).long(), kept_spans(seen).flatten()]).tolist()
    is_plain, is_full, *is_causal = facts[: 2 + len(offsets)]
    spans = [tuple(facts[i : i + 3]) for i in range(2 + len(offsets), len(facts), 3)]
    contiguous = all(stop - start == count for start, stop, count in spans)
    if not (is_plain and contiguous and (is_full or any(is_causal))):
        raise NotImplementedError(
            f"{what}; it must be one that hides nothing, keys after the diagonal, padding at the start or the end of "
            f"sequences, or the last two, alike for all heads (of a floating-point dtype: 0 and -inf)"
        )
    offset = None if is_full else offsets[is_causal.index(1)]
    return Visible(tuple((start, stop) for start, stop, _ in spans), offset)


def attend_to_spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, sm_scale: float | None, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row to what a mask leaves it: one call of packed sequences, and none of padding.

    Rows that lie behind a causal sequence's last key see all of its keys, which is a second call.

    Args:
        q: [B, M, H, D]; D and D_v in 16..256.
        k: [B, N, H_kv, D].
        v: [B, N, H_kv, D_v].
        visible: what is seen.
        sm_scale: as `attention` has it.
        recipe: as `attention_varlen` has it.

    Returns:
        out [B, M, H, D_v] and lse [B, H, M]; 0 and -inf of rows that see no key.
    """
    M = q.size(1)
    if visible.offset is None:
        return _packed(q, k, v, [(0, M)] * len(visible.spans), visible.spans, False, sm_scale, recipe)
    ends = [tuple(min(max(at - visible.offset, 0), M) for at in span) for span in visible.spans]
    out, lse = _packed(q, k, v, [(first, last) for first, last in ends], visible.spans, True, sm_scale, recipe)
    behind = [(last if start < stop else M, M) for (_, last), (start, stop) in zip(ends, visible.spans, strict=True)]
    if any(first < last for first, last in behind):
        out_behind, lse_behind = _packed(q, k, v, behind, visible.spans, False, sm_scale, recipe)
        first = torch.tensor([first for first, _ in behind], device=q.device)
        is_behind = torch.arange(M, device=q.device) >= first.unsqueeze(1)
        out = torch.where(is_behind[:, :, None, None], out_behind, out)
        lse = torch.where(is_behind.unsqueeze(1), lse_behind, lse)
    return out, lse


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: list[tuple[int, int]],
    spans: tuple[tuple[int, int], ...],
    causal: bool,
    sm_scale: float | None,
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `rows[b]` to keys `spans[b]`. What lies between these are sequences without rows, or without keys."""
    (B, M), N = q.shape[:2], k.size(1)
    starts_q, starts_k = [0], [0]
    for b, ((first, last), (start, stop)) in enumerate(zip(rows, spans, strict=True)):
        ends = zip((first, first, last, last, M), (0, start, stop, N, N), strict=True)
        for end_q, end_k in ends:
            if (b * M + end_q, b * N + end_k) != (starts_q[-1], starts_k[-1]):
                starts_q.append(b * M + end_q)
                starts_k.append(b * N + end_k)
    cu_seqlens = torch.tensor([starts_q, starts_k], dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "recipe": recipe}
    out, lse = attention_varlen(q, k, v, cu_seqlens[0], cu_seqlens[1], return_lse=True, **options)
    return out.unflatten(0, (B, M)), lse.unflatten(1, (B, M)).transpose(0, 1)
