"""The functions of `helion_attn.distributed`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from helion_attn.compiler.notice import LOG
from helion_attn.configs import varlen_packing
from helion_attn.debug_state import debugging
from helion_attn.distributed import allgather, collectives, ring, ulysses
from helion_attn.distributed.call import Call
from helion_attn.distributed.collectives import Group
from helion_attn.distributed.cut import Cut, cut_of
from helion_attn.distributed.packed_sequences import bounds_of_rows
from helion_attn.distributed.prepare import all_lengths, exchanged, quantized_rank
from helion_attn.names import reject_unknown_kwargs
from helion_attn.options import DenseOptions, ScoreOptions
from helion_attn.plans import log_call
from helion_attn.public_calls import of_ranks
from helion_attn.types import BALANCED, Balance, Layout, PackedTensors, Recipe, RecipeName, Rope, Strategy, as_recipe
from helion_attn.validate.dense import check_no_grad, check_options, check_recipe
from helion_attn.validate.distributed import check_balance, check_part, check_rope_lengths, check_strategy, rope_text
from helion_attn.validate.values import check_balance_of_ranks, note_balance
from helion_attn.validate.varlen import check_sequence_values, check_varlen

#: What computes `(out, lse)` of a rank's packed part, by the name of the strategy.
STRATEGIES: dict[str, Callable[[Call, PackedTensors], tuple[torch.Tensor, torch.Tensor]]] = {
    "allgather": allgather.run,
    "ulysses": ulysses.run,
    "ring": ring.run,
}


def shard(x: torch.Tensor, dim: int, group: Group = None, *, balance: Balance = None) -> torch.Tensor:
    """This rank's part of a tensor that every rank has whole, along the dimension of its tokens.

    With `balance=None` ranks follow one another: each has as many tokens as the others, but the last, which may have
    fewer. With "zigzag" the tokens are cut into `2 * ranks` chunks, and rank r has chunk r and, behind it, chunk
    `2 * ranks - 1 - r`, which gives all ranks the same causal work. Parts and chunks are multiples of 128 tokens, whole
    blocks of the attention kernel; without zigzag, only where that leaves every rank some. Chunks are equal; where
    tokens end, one is shorter and later ones are empty. Zigzag takes any length from `ranks * 128` on.

    The part of `torch.arange(length)`, which `positions` makes, are the positions of the tokens, for RoPE.

    Args:
        x: any tensor, the same on all ranks; nothing is sent.
        dim: the dimension that is cut.
        group: a process group, or a mesh of one dimension; by default all ranks.
        balance: None or "zigzag".

    Returns:
        A contiguous tensor.

    Raises:
        ValueError: a rank would have no token, or for zigzag no whole chunk; or another `balance`.
        RuntimeError: `torch.distributed` is not initialised.

    Example:
        part = ha.distributed.shard(torch.randn(1, 2, 256, 64), 2, balance="zigzag")
    """
    pg = collectives.resolve(group)
    check_balance(balance)
    cut = _cut_of(x.size(dim), pg.size(), balance)
    if debugging() and pg.size() > 1:
        note_balance(pg.group_name, cut.lengths[pg.rank()], balance)
    return torch.cat([x.narrow(dim, begin, size) for begin, size in cut.chunks(pg.rank())], dim)


def positions(
    length: int, group: Group = None, *, balance: Balance = None, device: torch.device | str | None = None
) -> torch.Tensor:
    """The positions of this rank's tokens, int64, as `shard` cuts a sequence of `length` tokens; raises as it does.

    Example:
        mine = ha.distributed.positions(256)
    """
    return shard(torch.arange(length, device=device), 0, group, balance=balance)


def unshard(x: torch.Tensor, dim: int, group: Group = None, *, balance: Balance = None) -> torch.Tensor:
    """What `shard` cut, whole again on every rank. Ranks tell each other their lengths, which the host waits for.

    Args:
        x: this rank's part, of the others' dtype and, but for `dim`, shape.
        dim: the dimension that was cut.
        group: as in `shard`, and so `balance`.
        balance: None or "zigzag".

    Raises:
        ValueError: the ranks' lengths are none that `shard` makes; another `balance`; or, on all ranks, that they
            disagree or that one of them raises.
        RuntimeError: `torch.distributed` is not initialised; or `x` requires grad, in grad mode, or has a tangent.

    Example:
        x = torch.randn(1, 2, 256, 64)
        whole = ha.distributed.unshard(ha.distributed.shard(x, 2), 2)  # x
    """
    pg = collectives.resolve(group)

    def check_own() -> None:
        check_balance(balance)
        check_no_grad("x", x)
        if debugging():
            check_balance_of_ranks(pg.group_name, (x.size(dim),), balance)

    def agreed() -> dict[str, Any]:
        shape: list[int | None] = [*x.shape]
        shape[dim] = None
        return {"strategy": "unshard", "balance": balance, "dtype": str(x.dtype), "shape": shape}

    lengths = tuple(h.M for h in exchanged(x, x, dim, pg, check_own, agreed))
    cut = Cut(lengths, balance == "zigzag" and pg.size() > 1)
    cut.check("lengths", equal=False)
    # [length, ...], as long on all ranks
    moved = x.movedim(dim, 0).contiguous()
    padded = moved.new_zeros((max(lengths), *moved.shape[1:]))
    padded[: moved.size(0)] = moved
    gathered = collectives.gather(padded, pg)
    chunks = []
    for rank in range(pg.size()):
        of_rank = gathered[rank, : lengths[rank]].split([chunk.size for chunk in cut.chunks(rank)])
        chunks += [(chunk.begin, tokens) for chunk, tokens in zip(cut.chunks(rank), of_rank, strict=True)]
    chunks.sort(key=lambda begin_and_tokens: begin_and_tokens[0])
    return torch.cat([tokens for _, tokens in chunks]).movedim(0, dim).contiguous()


def _cut_of(length: int, ranks: int, balance: Balance) -> Cut:
    return cut_of(length, ranks, balance == "zigzag" and ranks > 1)


@reject_unknown_kwargs
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    strategy: Strategy = "allgather",
    balance: Balance = None,
    causal: bool = False,
    sm_scale: float | None = None,
    layout: Layout = "bhsd",
    recipe: Recipe | RecipeName = BALANCED,
    rope: Rope | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    check: bool = True,
) -> Any:
    """`helion_attn.attention` over a sequence of which every rank holds a part: its queries, keys and values.

    Every rank quantises its own part once, and K, V and their descales travel in the bits of the recipe. Before that
    ranks tell each other a sample of their keys, in one small all-gather, so that what is subtracted from K and V is
    the same on all. The result is that of one process with all keys, but for the rounding of blocks that are cut
    elsewhere.

    Strategies, for P ranks; docs/distributed.md says when which is fastest:
        "allgather": every rank gets the packed K and V of all, and attends to them in one launch.
        "ulysses": ranks exchange tokens for heads, and the output goes back in its dtype. H must be a multiple of P,
            and H_kv a multiple or a divisor: as a divisor, each KV head travels to P / H_kv ranks.
        "ring": K and V go round while the last are attended to, and results are merged in fp32: memory for three parts,
            whatever P is, and parts of any length.

    Args:
        q: [B, H, M, D], bf16, fp16 or fp32, this rank's; D in 16..256; with layout="bshd", H and M swapped; k and v
            likewise.
        k: [B, H_kv, N, D]; M and N may differ.
        v: [B, H_kv, N, D_v].
        group: a process group, or a mesh of one dimension; by default all ranks.
        strategy: "allgather", "ulysses" or "ring"; the same on all ranks, as all but the tensors' values is.
        balance: None if the ranks' parts follow one another, "zigzag" if they are cut as `shard` does it for that. All
            parts are as long as the others but the last, which may be shorter; with strategy="ring" and no balance,
            they may be of any lengths.
        causal: and `window`: as in `helion_attn.attention`, of the whole sequence, aligned bottom-right.
        sm_scale: and the rest, as in `helion_attn.attention`.
        layout: "bhsd" or "bshd".
        recipe: how the tensors become 8- or 16-bit numbers.
        rope: rotate Q and K first. By default their positions are those of this rank's tokens in the whole sequence.
        window: (left, right), -1 is unlimited.
        softcap: as in `helion_attn.attention`.
        sinks: [H], the same on all ranks.
        return_lse: also return the fp32 lse of this rank's rows.
        out_dtype: of the output.
        check: tell the other ranks what this call is, so that all raise if they disagree, or if one of them raises. The
            host waits for that, and learns the lengths of the others' parts. With False ranks trust each other, and
            all must have parts of the same lengths; torch.compile and CUDA graphs ask for that.

    Returns:
        out, shaped as q with D_v for D, and lse [B, H, M] if asked for.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is accepted; on all ranks, if `check`. That ranks
            disagree: naming who has what.
        NotImplementedError: head dims above 256; neither a CUDA device of compute capability 9.0 nor the CPU.
        RuntimeError: an input requires grad, in grad mode, or has a tangent; `torch.distributed` is not initialised; or
            what it raises where a rank is gone.

    Example:
        q, k, v = torch.randn(3, 1, 2, 256, 64, dtype=torch.bfloat16)  # the same on all ranks
        q, k, v = (ha.distributed.shard(x, 2) for x in (q, k, v))
        out = ha.distributed.attention(q, k, v, causal=True)  # this rank's queries
    """
    pg = collectives.resolve(group)
    scores = ScoreOptions(causal=causal, sm_scale=sm_scale, window=window, softcap=softcap, sinks=sinks)

    def check_own() -> None:
        check_strategy(strategy)
        check_balance(balance)
        check_part(q, k, v, recipe, layout, rope)
        heads, length = (1, 2) if layout == "bhsd" else (2, 1)
        check_options(scores, return_lse, out_dtype, q.size(heads), q.device)
        if debugging():
            check_balance_of_ranks(pg.group_name, (q.size(length), k.size(length)), balance)

    def agreed() -> dict[str, Any]:
        heads = 1 if layout == "bhsd" else 2
        return {
            "strategy": strategy,
            "balance": balance,
            **vars(scores),
            "sinks": sinks is not None,
            "layout": layout,
            "recipe": repr(as_recipe(recipe)),
            "rope": rope_text(rope),
            "return_lse": return_lse,
            "out_dtype": str(out_dtype),
            "dtype": str(q.dtype),
            "device": q.device.type,
            "B": q.size(0),
            "H": q.size(heads),
            "H_kv": k.size(heads),
            "D": q.size(3),
            "D_v": v.size(3),
        }

    length = 2 if layout == "bhsd" else 1
    m_lengths, n_lengths = all_lengths(q, k, length, pg, check, check_own, agreed)
    zigzag = balance == "zigzag" and pg.size() > 1
    q_cut, k_cut = Cut(m_lengths, zigzag), Cut(n_lengths, zigzag)
    q_cut.check("M", equal=strategy == "ulysses")
    k_cut.check("N", equal=strategy != "ring")
    check_rope_lengths(rope, q_cut.total, k_cut.total)
    chosen = as_recipe(recipe)
    if not torch.compiler.is_compiling() and LOG.isEnabledFor(logging.DEBUG):
        options = {"strategy": strategy, "balance": balance, "layout": layout, **vars(scores), "recipe": chosen}
        options |= {"return_lse": return_lse, "out_dtype": out_dtype}
        log_call(of_ranks("attention", {"q": q, "k": k, "v": v}, options, rope), f"rank {pg.rank()} of {pg.size()}")
    if layout == "bshd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    (B, H, _, D), H_kv, D_v = q.shape, k.size(1), v.size(3)
    if strategy == "ulysses":
        ulysses.check_heads(H, H_kv, pg.size())
    if strategy == "ring" and torch.compiler.is_compiling():
        raise NotImplementedError("strategy is 'ring'; torch.compile traces 'allgather' and 'ulysses'")
    call = Call(
        group=pg,
        q_cut=q_cut,
        k_cut=k_cut,
        B=B,
        H=H,
        H_kv=H_kv,
        D=D,
        D_v=D_v,
        packing=varlen_packing(D, D_v, chosen.bits),
        recipe=chosen,
        scores=scores.resolved(D),
        bshd=layout == "bshd",
        out_dtype=q.dtype if out_dtype is None else out_dtype,
        return_lse=return_lse,
        all_keys=k_cut.total,
    )
    call.check_places(1 if strategy == "ring" else pg.size())
    packed = quantized_rank(call, q, k, v, rope, call.scores.needs_lse_shift(return_lse))
    out, lse = STRATEGIES[strategy](call, packed)
    return (out, lse) if return_lse else out


@reject_unknown_kwargs
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    sm_scale: float | None = None,
    recipe: Recipe | RecipeName = BALANCED,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    check: bool = True,
) -> Any:
    """`helion_attn.attention_varlen` over a batch whose tokens several ranks hold, by all-gather.

    The tokens of all sequences, one after the other, are cut as `shard` cuts them, wherever sequences begin. What is
    subtracted from K and V before they are quantised is the same for all tokens of the batch, in place of a sequence.

    Args:
        q: [tokens of this rank, H, D], bf16, fp16 or fp32; D and D_v in 16..256.
        k: [tokens of this rank, H_kv, D].
        v: [tokens of this rank, H_kv, D_v].
        cu_seqlens_q: int32 [B + 1], of the whole batch, the same on all ranks: sequence b has tokens `cu_seqlens_q[b]`
            up to `cu_seqlens_q[b + 1]`. It is not read on the host. The results of tokens of no sequence are NaN, and
            so are all if either table descends, or holds a number that is negative or more than there are tokens.
        cu_seqlens_k: int32 [B + 1], of K and V.
        group: and the rest, as in `attention`.
        causal: row i of a sequence sees keys j <= i + N - M of it.
        sm_scale: multiplies q k^T; 1 / sqrt(D) by default.
        recipe: as in `attention`.
        softcap: as in `attention`.
        sinks: [H], the same on all ranks.
        return_lse: also return the fp32 lse of this rank's rows.
        out_dtype: of the output.
        check: as in `attention`.

    Returns:
        out [tokens of this rank, H, D_v], and lse [H, tokens of this rank] if asked for.

    Raises:
        What `attention` raises.

    Example:
        q, k, v = torch.randn(3, 256, 2, 64, dtype=torch.bfloat16)
        cu_seqlens = torch.tensor([0, 100, 256], dtype=torch.int32)  # of the whole batch
        q, k, v = (ha.distributed.shard(x, 0) for x in (q, k, v))
        out = ha.distributed.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)
    """
    pg = collectives.resolve(group)
    scores = ScoreOptions(causal=causal, sm_scale=sm_scale, softcap=softcap, sinks=sinks)

    def check_own() -> None:
        check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, is_part=True)
        if not q.size(0) or not k.size(0):
            raise ValueError(f"q has {q.size(0)} tokens and k {k.size(0)}; every rank must have at least 1")
        check_recipe(as_recipe(recipe), q.size(2), v.size(2))
        check_options(scores, return_lse, out_dtype, q.size(1), q.device)
        if debugging():
            check_balance_of_ranks(pg.group_name, (q.size(0), k.size(0)), None)

    def agreed() -> dict[str, Any]:
        return {
            "strategy": "allgather, packed sequences",
            "sequences": cu_seqlens_q.size(0) - 1,
            **vars(scores),
            "sinks": sinks is not None,
            "recipe": repr(as_recipe(recipe)),
            "return_lse": return_lse,
            "out_dtype": str(out_dtype),
            "dtype": str(q.dtype),
            "device": q.device.type,
            "H": q.size(1),
            "H_kv": k.size(1),
            "D": q.size(2),
            "D_v": v.size(2),
        }

    m_lengths, n_lengths = all_lengths(q, k, 0, pg, check, check_own, agreed)
    q_cut, k_cut = Cut(m_lengths, False), Cut(n_lengths, False)
    q_cut.check("tokens", equal=False)
    k_cut.check("tokens", equal=True)
    check_sequence_values(cu_seqlens_q, cu_seqlens_k, q_cut.total, k_cut.total)
    (_, H, D), H_kv, D_v = q.shape, k.size(1), v.size(2)
    chosen = as_recipe(recipe)
    if not torch.compiler.is_compiling() and LOG.isEnabledFor(logging.DEBUG):
        tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        options = {**vars(scores), "recipe": chosen, "return_lse": return_lse, "out_dtype": out_dtype}
        log_call(of_ranks("attention_varlen", tensors, options, None), f"rank {pg.rank()} of {pg.size()}")
    call = Call(
        group=pg,
        q_cut=q_cut,
        k_cut=k_cut,
        B=1,
        H=H,
        H_kv=H_kv,
        D=D,
        D_v=D_v,
        packing=varlen_packing(D, D_v, chosen.bits),
        recipe=chosen,
        # Causality is in the rows' bounds.
        scores=replace(scores, causal=False).resolved(D),
        bshd=True,
        out_dtype=q.dtype if out_dtype is None else out_dtype,
        return_lse=return_lse,
        all_keys=0,
    )
    call.check_places(pg.size())
    row_bounds, block_bounds, in_sequence = bounds_of_rows(call, cu_seqlens_q, cu_seqlens_k, causal)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    packed = quantized_rank(call, q, k, v, None, call.scores.needs_lse_shift(return_lse))
    out, lse = allgather.run(call, packed, (row_bounds, block_bounds))
    nan = float("nan")
    out = torch.where(in_sequence[:, None, None], out[0], torch.full_like(out[0], nan))
    if not return_lse:
        return out
    return out, torch.where(in_sequence, lse[0], nan)


class ShardedOptions(DenseOptions, total=False):
    """Options of `attention` that a `Sharding` does not say."""

    strategy: Strategy
    return_lse: bool
    check: bool


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a group hold a sequence, said once for all that depends on it. Made by `sharding`.

    Attributes:
        group: of the ranks.
        balance: None or "zigzag", as `shard` has it.

    Example:
        s = ha.distributed.sharding()
        assert isinstance(s, ha.distributed.Sharding)
        part = s.shard(torch.randn(1, 2, 256, 64), 2)
    """

    group: dist.ProcessGroup
    balance: Balance

    def shard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor that every rank has whole."""
        return shard(x, dim, self.group, balance=self.balance)

    def unshard(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What `shard` cut, whole again on every rank."""
        return unshard(x, dim, self.group, balance=self.balance)

    def positions(self, length: int, *, device: torch.device | str | None = None) -> torch.Tensor:
        """The positions of this rank's tokens in a sequence of `length`."""
        return positions(length, self.group, balance=self.balance, device=device)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[ShardedOptions]) -> Any:
        """`attention` of parts that `shard` cut, with its other options."""
        return attention(q, k, v, group=self.group, balance=self.balance, **options)


def sharding(group: Group = None, *, balance: Balance = None) -> Sharding:
    """Say once how ranks hold a sequence; the functions of the same names need `group` and `balance` each time.

    Args:
        group: a process group, or a mesh of one dimension; by default all ranks.
        balance: None or "zigzag", as in `shard`.

    Raises:
        ValueError: another `balance`.
        RuntimeError: `torch.distributed` is not initialised.

    Example:
        q, k, v = torch.randn(3, 1, 2, 256, 64, dtype=torch.bfloat16)
        s = ha.distributed.sharding(balance="zigzag")
        q, k, v = (s.shard(x, 2) for x in (q, k, v))
        out = s.unshard(s.attention(q, k, v, causal=True), 2)
    """
    check_balance(balance)
    return Sharding(collectives.resolve(group), balance)
