"""Masks that are given as tensors: what they leave to be seen, read from the device, and attention to that.

Padding becomes packed sequences (`attention_varlen`): what a mask hides lies between them, and is not read. What no
shorter description fits becomes a `BlockMask`, which is kept as long as the mask.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from typing_extensions import Unpack

from helion_attn.api import attention
from helion_attn.integrations.graphs import graph_break, is_captured
from helion_attn.integrations.tensor_memo import TensorMemo
from helion_attn.masks.blocks import BlockMask
from helion_attn.options import ScoreKwargs
from helion_attn.types import Auto, Recipe, preset_of
from helion_attn.validate.block_mask import BLOCK_MASK_DIMS, has_block_masks
from helion_attn.validate.dense import check_no_grad
from helion_attn.validate.varlen import MAX_VARLEN_D
from helion_attn.varlen import attention_varlen

#: Numbers up to this one hide a key when they are added to its score.
HIDES = -1e4

#: Masks by scores that are accepted, in words.
ACCEPTED = "bool, or of 0 and -inf, or -1e4 and below in a row that sees some key"

#: Scores of a kept mask that are compared on every call, up to twice as many: 1 MB of bool ones.
SAMPLE = 2**20


class Part(NamedTuple):
    """Rows of a sequence, and the keys that they see."""

    rows: tuple[int, int]  # (first, last), last exclusive
    keys: tuple[int, int]  # (start, stop) of its keys; of those that `Visible.kept` keeps, if it does


@dataclass(frozen=True, eq=False)
class Visible:
    """The keys that a mask leaves visible. Rows that are of no part see nothing."""

    whole: bool  # nothing is hidden but, if `causal`, keys behind a diagonal that ends at the last row and key
    causal: bool  # the first parts are causal, with their last row at their last key
    first: tuple[Part, ...]  # a part of each sequence of the batch
    second: tuple[Part, ...] = ()  # another part of each, below the first; empty if none has one
    # Bool [B, N], keys that are left where they do not lie together; None where they do.
    kept: torch.Tensor | None = None
    scores: torch.Tensor | None = None  # the mask, where no parts describe it; None where they do

    def first_keys(self, M: int) -> int:
        """How many keys are seen, if they are the first ones of all sequences, alike for all of M rows; 0 if not."""
        parts = set(self.first)
        (rows, (start, stop)) = self.first[0] if len(parts) == 1 else ((0, 0), (0, 0))
        is_plain = not (self.causal or self.second or self.kept is not None)
        return stop if is_plain and rows == (0, M) and start == 0 else 0


def read_mask(
    mask: torch.Tensor, B: int, H: int, M: int, N: int, name: str = "attn_mask", *, lowest_hides: bool = False
) -> Visible:
    """Read a mask of `scaled_dot_product_attention` on the host: whether it hides anything, and if so what.

    Parts describe: any keys that are hidden, alike for all rows; keys behind the diagonal of the first or the last key,
    and padding at both ends; all keys but one run for the first rows of a sequence, and but another for the others. All
    other masks are `scores`. One of which a `BlockMask` is kept is not read.

    Args:
        mask: broadcasts to [B, H, M, N]: bool, True where a key is seen, or added to the scores, 0 where it is seen and
            -inf where it is not (or `HIDES` and below, in a row that sees some key).
        B: sequences.
        H: query heads.
        M: queries.
        N: keys.
        name: of the mask, in errors.
        lowest_hides: whether its dtype's lowest number, or bf16's, hides in a row that sees no key too. PyTorch gives
            such a row the mean of V.

    Raises:
        NotImplementedError: it changes scores, or cannot be read.
        ValueError: it does not broadcast.
        RuntimeError: it requires grad, in grad mode, or has a tangent.
    """
    check_no_grad(name, mask)
    what = f"{name} is a {type(mask).__name__} {tuple(mask.shape)} of {mask.dtype}"
    # Here and not in a function, which torch.compile would trace by itself after a break of the graph.
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{what}; in torch.compile(fullgraph=True) it must be None: its values cannot be read"
        )
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(f"{what}; in a CUDA graph it must be None: its values cannot be read")
    by_dim = zip(mask.shape[::-1], (N, M, H, B), strict=False)
    if not 2 <= mask.dim() <= 4 or any(size not in (1, wanted) for size, wanted in by_dim):
        raise ValueError(f"{what}; it must broadcast to [B, H, M, N] with B = {B}, H = {H}, M = {M} and N = {N}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise NotImplementedError(f"{what}; it must be bool or of a floating-point dtype")
    return _read(mask, B, M, N, what, lowest_hides)


@graph_break
def _read(mask: torch.Tensor, B: int, M: int, N: int, what: str, lowest_hides: bool) -> Visible:
    """`read_mask` of a mask that has passed its checks, `what` in errors."""
    by_scores = Visible(False, False, (), scores=mask)
    if (entry := _KEPT.find((mask,), M, N)) is not None:
        if _matches_sample(mask, entry.sample):
            return by_scores
        _KEPT.drop((mask,), M, N)
    if (mask if mask.dtype == torch.bool else mask == 0).all():
        return Visible(True, False, (Part((0, M), (0, N)),) * B)
    # [B or 1, H or 1, M or 1, N or 1]
    mask = mask[(None,) * (4 - mask.dim())]
    seen, is_plain, for_all_heads = _seen(mask, lowest_hides)
    # [B, M or 1, N]
    kept = seen.expand(B, -1, N)
    # [B, M]: of each row's keys, how many there are, the first, and the one behind the last.
    count = kept.sum(2)
    start = kept.byte().argmax(2) * (count > 0)
    stop = (N - kept.flip(2).byte().argmax(2)) * (count > 0)
    alike = (kept == kept[:, :1]).all()
    together = (stop - start == count).all()
    start, stop, count = (x.expand(B, M) for x in (start, stop, count))
    changes = (start.diff(dim=1) != 0) | (stop.diff(dim=1) != 0)
    changes = torch.nn.functional.pad(changes, (0, 1))  # of one row there is none
    offsets = (N - M, 0)
    facts = [
        start[:, 0],
        stop[:, 0],
        start[:, -1],
        stop[:, -1],
        changes.sum(1),
        changes.byte().argmax(1) + 1,
        count[:, 0],
    ]
    facts += [torch.where(count > 0, start, N).amin(1), stop.amax(1)]
    facts += [_is_causal(start, stop, count, offset) for offset in offsets]
    flags = torch.stack([is_plain, for_all_heads, alike, together]).long()
    read = torch.cat([flags, torch.stack(facts, 1).long().flatten()]).tolist()
    plain, alike_for_heads, alike_for_rows, in_one_piece = read[: len(flags)]
    by_sequence = [read[i : i + len(facts)] for i in range(len(flags), len(read), len(facts))]

    if not plain:
        raise NotImplementedError(f"{what}, with other values than 0 and -inf; it must be {ACCEPTED}")
    if not alike_for_heads:
        return by_scores
    if alike_for_rows and not in_one_piece:
        return Visible(False, False, tuple(Part((0, M), (0, one[6])) for one in by_sequence), kept=kept[:, 0])
    if alike_for_rows:
        spans = [(one[0], one[1]) for one in by_sequence]
        return Visible(all(span == (0, N) for span in spans), False, tuple(Part((0, M), span) for span in spans))
    for i, offset in enumerate(offsets):
        if in_one_piece and all(one[9 + i] for one in by_sequence):
            return _causal([(one[7], one[8]) for one in by_sequence], offset, M, N)
    if in_one_piece and all(one[4] <= 1 for one in by_sequence):
        edges = [one[5] if one[4] else M for one in by_sequence]
        first = tuple(Part((0, edge), (one[0], one[1])) for edge, one in zip(edges, by_sequence, strict=True))
        second = tuple(Part((edge, M), (one[2], one[3])) for edge, one in zip(edges, by_sequence, strict=True))
        return Visible(False, False, first, second)
    return by_scores


def _seen(mask: torch.Tensor, lowest_hides: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read a mask's first head, and what else there is to know of the mask.

    Returns:
        The head's visible keys, bool [B or 1, M or 1, N or 1]; whether no score is changed; whether heads are alike.
    """
    seen = mask if mask.dtype == torch.bool else mask == 0
    alike = (seen == seen[:, :1]).all()
    if mask.dtype == torch.bool:
        return seen[:, 0], torch.ones_like(alike), alike
    # bf16 has no -1e4. A row that has finite numbers for all keys sees some of all, and one that has -inf is 0.
    hides = torch.tensor(HIDES, dtype=mask.dtype, device="cpu").item()
    hidden = (mask == float("-inf")) | ((mask <= hides) & seen.any(3, keepdim=True))
    if lowest_hides:
        hidden |= mask <= max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    return seen[:, 0], (seen | hidden).all(), alike


def _is_causal(start: torch.Tensor, stop: torch.Tensor, count: torch.Tensor, offset: int) -> torch.Tensor:
    """Whether row i sees its sequence's keys up to i + offset: bool [B] of int64 [B, M]."""
    ends = torch.arange(1 + offset, 1 + offset + start.size(1), device=start.device)
    first = torch.where(count > 0, start, torch.iinfo(start.dtype).max).amin(1, keepdim=True)
    ends = torch.minimum(ends, stop.amax(1, keepdim=True))
    return torch.where(ends > first, (start == first) & (stop == ends), count == 0).all(1)


def _causal(spans: list[tuple[int, int]], offset: int, M: int, N: int) -> Visible:
    """Row i sees the keys of its sequence's span up to i + offset; rows behind the last of these see all."""
    first, second = [], []
    for start, stop in spans:
        rows = (min(max(start - offset, 0), M), min(max(stop - offset, 0), M)) if start < stop else (M, M)
        first.append(Part(rows, (start, stop) if start < stop else (0, 0)))
        second.append(Part((rows[1], M), first[-1].keys))
    whole = offset == N - M and all(span == (0, N) for span in spans)
    has_second = any(part.rows[0] < M for part in second)
    return Visible(whole, True, tuple(first), tuple(second) if has_second else ())


class KeptMask(NamedTuple):
    """A mask that was read, kept for later calls."""

    block_mask: BlockMask  # made of it
    sample: torch.Tensor  # what its `_sample` was


def _keep_mask(tensors: tuple[torch.Tensor, ...], M: int, N: int) -> KeptMask:
    (mask,) = tensors
    seen = mask if mask.dtype == torch.bool else mask == 0
    # [B or 1, H or 1, M, N]
    seen = seen[(None,) * (4 - seen.dim())]
    return KeptMask(BlockMask.from_dense(seen.expand(-1, -1, M, N)), _sample(mask).clone())


_KEPT = TensorMemo(_keep_mask)


def _with_heads(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (mask,) = tensors
    # Not a view of the mask itself, which would live as long as its view.
    return mask.detach().unsqueeze(1)


_WITH_HEADS = TensorMemo(_with_heads)


def of_all_heads(mask: torch.Tensor) -> torch.Tensor:
    """A mask [B, M, N] as [B, 1, M, N]: the same tensor in every layer, so that its `BlockMask` is found again."""
    # One that requires grad is refused later, and must not lose it here.
    return mask.unsqueeze(1) if is_captured(mask) or mask.requires_grad else _WITH_HEADS.get((mask,))


def _sample(mask: torch.Tensor) -> torch.Tensor:
    """The scores of a mask that are compared on every call, evenly spread: all of them of a small mask."""
    step, M = -(-mask.numel() // SAMPLE), mask.size(-2)
    return mask[..., :: min(step, M), :: -(-step // M)]


def _matches_sample(mask: torch.Tensor, sample: torch.Tensor) -> bool:
    """Whether a mask's sample is what it was: not after writes that PyTorch does not count.

    Such are `mask.data.copy_` and those of NumPy. On a GPU, where the host would have to wait, an assertion fails,
    which ends the process's CUDA context.
    """
    same = (_sample(mask) == sample).all()
    if mask.is_cuda:
        torch._assert_async(
            same, "attn_mask was written to without PyTorch's count of changes: use mask.copy_(..), and restart"
        )
        return True
    return bool(same)


def block_mask_of(mask: torch.Tensor, M: int, N: int) -> BlockMask:
    """A mask as a `BlockMask`, made once for each mask, M, N and stream where `TensorMemo` keeps it.

    Args:
        mask: as `read_mask` has it.
        M: queries.
        N: keys.
    """
    return _KEPT.get((mask,), M, N).block_mask


def check_visible(
    entry_point: str, visible: Visible, q: torch.Tensor, v: torch.Tensor, recipe: Recipe | Auto, name: str = "attn_mask"
) -> None:
    """Refuse what `attend_to_visible` does not have: head dims, and a mask elsewhere.

    Args:
        entry_point: where errors say that they come from.
        visible: what is seen.
        q: [.., .., .., D].
        v: [.., .., .., D_v].
        recipe: of the call.
        name: of the mask, in errors.

    Raises:
        NotImplementedError: head dims that packed sequences, or block masks, do not have.
        ValueError: the mask is on another device.
    """
    D, D_v = q.size(3), v.size(3)
    if visible.scores is None:
        if max(D, D_v) > MAX_VARLEN_D:
            raise NotImplementedError(
                f"{entry_point}: {name} hides padding and the head dim is {max(D, D_v)}; with padding it must be at "
                f"most {MAX_VARLEN_D}"
            )
        return
    if visible.scores.device != q.device:
        raise ValueError(f"{name} is on {visible.scores.device}; it must be on {q.device}, as the query is")
    preset = preset_of(recipe)
    if not has_block_masks(D, D_v, preset):
        raise NotImplementedError(
            f"{entry_point}: {name} hides other keys than padding and those after the diagonal, with D {D}, D_v {D_v} "
            f"and {preset.bits[0]} bits for Q and K; such a mask is accepted {BLOCK_MASK_DIMS}"
        )


@graph_break
def attend_to_visible(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: Visible,
    recipe: Recipe | Auto,
    **scores: Unpack[ScoreKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row to what a mask leaves it.

    That is a call of packed sequences, two where there are second parts, or one with a block mask.

    Args:
        q: [B, M, H, D]; D and D_v as `check_visible` has them.
        k: [B, N, H_kv, D]. Keys that do not lie together are copied, and their values.
        v: [B, N, H_kv, D_v].
        visible: what is seen.
        recipe: how the tensors become 8-bit numbers; "auto" takes the preset that it may choose.
        scores: as `attention` has them, but for what `visible` says.

    Returns:
        out [B, M, H, D_v] and lse [B, H, M]; 0 and, without sinks, -inf of rows that see no key.
    """
    (B, M), N = q.shape[:2], k.size(1)
    options: dict[str, Any] = {"recipe": preset_of(recipe), **scores}
    if visible.scores is not None:
        block_mask = block_mask_of(visible.scores, M, N)
        return attention(q, k, v, block_mask=block_mask, layout="bshd", return_lse=True, **options)
    keys = [N] * B
    if visible.kept is None:
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    else:
        k, v = k[visible.kept], v[visible.kept]
        keys = [part.keys[1] for part in visible.first]
    q = q.flatten(0, 1)
    out, lse = _packed(q, k, v, visible.first, M, keys, visible.causal, options)
    if visible.second:
        of_second = _packed(q, k, v, visible.second, M, keys, False, options)
        first = torch.tensor([part.rows[0] for part in visible.second], device=q.device)
        is_second = torch.arange(M, device=q.device) >= first.unsqueeze(1)
        out = torch.where(is_second[:, :, None, None], of_second[0], out)
        lse = torch.where(is_second.unsqueeze(1), of_second[1], lse)
    return out, lse


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: tuple[Part, ...],
    M: int,
    keys: list[int],
    causal: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence's part. What lies between parts are sequences without rows, or without keys.

    q is [B M, H, D]; k and v have `keys[b]` tokens of sequence b.
    """
    ends: list[tuple[int, int]] = [(0, 0)]
    for b, (((first, last), (start, stop)), before) in enumerate(
        zip(parts, itertools.accumulate(keys, initial=0), strict=False)
    ):
        for row, key in ((first, 0), (first, start), (last, stop), (last, keys[b]), (M, keys[b])):
            if (end := (b * M + row, before + key)) != ends[-1]:
                ends.append(end)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device="cpu").T.contiguous().to(q.device)
    out, lse = attention_varlen(q, k, v, cu_seqlens[0], cu_seqlens[1], causal=causal, return_lse=True, **options)
    return out.unflatten(0, (-1, M)), lse.unflatten(1, (-1, M)).transpose(0, 1)
