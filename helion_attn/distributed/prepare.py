"""The beginning of every strategy: ranks tell each other of their calls and parts, and quantise these."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from helion_attn import ops
from helion_attn.distributed import collectives, header
from helion_attn.distributed.call import Call
from helion_attn.distributed.cut import Cut
from helion_attn.numerics import SAMPLED_KEYS
from helion_attn.preprocess import rank_samples
from helion_attn.problem import DescribeRankArgs, QuantizeRankArgs, rope_arguments
from helion_attn.types import PackedTensors, Rope, packed_fields, unchecked_rope


def all_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    length: int,
    pg: dist.ProcessGroup,
    check: bool,
    check_own: Callable[[], None],
    agreed: Callable[[], dict[str, Any]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key lengths of all ranks, which have told each other that they accept and agree, if `check`.

    Args:
        q: and k: with their lengths in dimension `length`.
        k: likewise.
        length: the dimension.
        pg: the group.
        check: whether they tell each other anything.
        check_own: raises if this rank does not accept its arguments.
        agreed: what must be the same on all ranks.
    """
    if not check:
        check_own()
        return (q.size(length),) * pg.size(), (k.size(length),) * pg.size()
    if torch.compiler.is_compiling():
        raise ValueError("check is True; under torch.compile it must be False: the host reads what the ranks say")
    headers = exchanged(q, k, length, pg, check_own, agreed)
    return tuple(h.M for h in headers), tuple(h.N for h in headers)


def exchanged(
    q: torch.Tensor,
    k: torch.Tensor,
    length: int,
    pg: dist.ProcessGroup,
    check_own: Callable[[], None],
    agreed: Callable[[], dict[str, Any]],
) -> list[header.Header]:
    """The headers of all ranks, with the lengths of `q` and `k`; the other arguments are those of `all_lengths`."""
    try:
        check_own()
        own = header.Header(q.size(length), k.size(length), False, json.dumps(agreed()))
    except Exception as refusal:
        header.exchange(header.Header(0, 0, True, f"{type(refusal).__name__}: {refusal}"), pg)
        raise
    return header.exchange(own, pg)


def with_positions(call: Call, rope: Rope | None, device: torch.device) -> Rope | None:
    """`rope` with the positions of this rank's tokens, where it has none."""
    if rope is None:
        return None

    def with_more_keys(given: torch.Tensor | None, cut: Cut, first: int) -> torch.Tensor:
        if given is not None:
            return given
        chunks = [(first + chunk.begin, first + chunk.begin + chunk.size) for chunk in cut.chunks(call.rank)]
        return torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])

    at = with_more_keys(rope.q_positions, call.q_cut, call.more_keys), with_more_keys(rope.k_positions, call.k_cut, 0)
    return unchecked_rope(rope.cos, rope.sin, rope.interleaved, *at)


def quantized_rank(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, needs_lse_shift: bool
) -> PackedTensors:
    """This rank's Q, K and V in the packed format, BHSD, with the constants of all ranks."""
    rotation = rope_arguments(with_positions(call, rope, q.device))
    tokens, _ = rank_samples.sampled_queries(call.H // call.H_kv, call.packing)
    k_samples = [call.k_cut.sample(rank, SAMPLED_KEYS) for rank in range(call.k_cut.ranks)]
    q_samples = [call.q_cut.sample(rank, tokens) for rank in range(call.q_cut.ranks)]
    described = DescribeRankArgs(
        q=q,
        k=k,
        v=v,
        rope=rotation,
        recipe=call.recipe,
        k_rows=max(sample.size for sample in k_samples),
        q_rows=max(sample.size for sample in q_samples),
        k_sample=k_samples[call.rank],
        q_sample=q_samples[call.rank],
    )
    kv_sample = ops.describe_rank(described)
    q_sample, largest = None, kv_sample
    if kv_sample.numel():
        kv_sample = collectives.gather(kv_sample, call.group)
        largest = rank_samples.v_largest(kv_sample, call.D, call.D_v)
        if call.recipe.equalise:
            q_sample = rank_samples.queries_in_order(kv_sample[:, described.k_rows : -1], q_samples)
        kv_sample = rank_samples.in_order(kv_sample[:, : described.k_rows], k_samples)
    tensors = ops.quantize_rank(
        QuantizeRankArgs(
            q=q,
            k=k,
            v=v,
            kv_sample=kv_sample,
            q_sample=q_sample,
            v_largest=largest,
            rope=rotation,
            recipe=call.recipe,
            needs_lse_shift=needs_lse_shift,
            all_keys=call.all_keys,
        )
    )
    return PackedTensors(**packed_fields(tensors, call.recipe, needs_lse_shift))
