"""What `debug(save=...)` does: measures the output of each call, and writes a bad call to a file; and its replay."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from helion_attn.api import attention, attention_quantized, dense_problem, quantized_problem
from helion_attn.check import Error, _error, _Sample
from helion_attn.compiler.notice import LOG
from helion_attn.debug_state import Seen
from helion_attn.kv_cache import attention_kvcache, decode_problem
from helion_attn.masks.blocks import BlockMask
from helion_attn.plans import plain_kernels
from helion_attn.preprocess.dequantize import dequantize
from helion_attn.problem import (
    NO_ROPE_ARGUMENTS,
    AttentionArgs,
    DecodeArgs,
    DenseArgs,
    VarlenArgs,
    norm_arguments,
)
from helion_attn.public_calls import (
    PublicCall,
    line,
    of_attention,
    of_attention_quantized,
    of_attention_varlen,
    of_decode,
)
from helion_attn.reference.rounding_model import attend, quantize
from helion_attn.reference.shapes import hide_keys_of_rows, to_bhsd
from helion_attn.testing import error_budget
from helion_attn.types import BF16, PagedKVCache, QuantizedQKV, Recipe, RMSNorm, Rope, key_descales
from helion_attn.varlen import attention_varlen, varlen_problem
from helion_attn.version import __version__

#: What a file says of itself, with a number that changes when what it holds does.
FORMAT = "helion_attn report 1"

#: Times the rounding model's error that the kernel may have. Tests hold it to 1.1 on all rows; these are some.
FACTOR = 1.5

#: An error that the output of no preset has on tensors that suit it: noise, whoever is at fault.
NOISE = 0.25

#: Sequences of a batch that are looked at.
SEQUENCES = 8


class Measured(NamedTuple):
    """An output against fp64, on a sample of rows."""

    out: Error  # its error
    bad: int  # entries that are not finite, of all rows
    model: Error | None  # the error of the rounding model on the same rows; None of what came in 8 bits
    budget: Error | None  # the largest error that `out` may have beside that of the model; None without it
    sixteen_bits: Error  # the error of attention with inputs, P and output in 16 bits, on the same rows

    @property
    def fault(self) -> str | None:
        """A sentence on what is wrong with the output, or None."""
        if self.bad:
            return f"the output has {self.bad} entries that are not finite"
        of = f"its error is {self.out.total:.3g}, of the worst row {self.out.worst_row:.3g}"
        budget = self.budget
        if budget is not None and (self.out.total > budget.total or self.out.worst_row > budget.worst_row):
            at_most = f"it must be at most {budget.total:.3g} and {budget.worst_row:.3g} by the rounding model"
            return f"{of}; {at_most}: the kernel is at fault"
        return f"{of}: the tensors are hard for the recipe" if self.out.total > NOISE else None


class Part(NamedTuple):
    """Attention of one or more sequences of the same length that a call computes."""

    problem: DenseArgs  # on what the kernel reads, 8-bit tensors dequantised
    mask: BlockMask | None  # its block mask
    out: torch.Tensor  # [B, H, M, D_v]
    modelled: bool  # whether the rounding model of `problem` has what the kernel rounds


def _parts(a: Any, out: torch.Tensor) -> Iterator[Part]:
    """Parts of a call by its problem."""
    if isinstance(a, DenseArgs):
        yield Part(a, _mask_of(a, a.q.size(2), a.k.size(2)), to_bhsd(out, "bshd" if a.bshd else "bhsd"), True)
    elif isinstance(a, VarlenArgs):
        for rows, keys in _sequences(a):
            q, k, v = (x[of].transpose(0, 1).unsqueeze(0) for x, of in ((a.q, rows), (a.k, keys), (a.v, keys)))
            yield Part(_dense(a, q, k, v, a.recipe), None, out[rows].transpose(0, 1).unsqueeze(0), True)
    elif isinstance(a, AttentionArgs):
        tensors = dequantize(_build("qkv", of_attention_quantized(a).tensors["qkv"]))
        yield Part(_dense(a, *tensors, BF16), _mask_of(a, a.m_len, a.n_len), to_bhsd(out, _layout(a)), False)
    else:
        out = to_bhsd(out, _layout(a))
        for b, length in enumerate(a.cache_seqlens[:SEQUENCES].tolist()):
            if length > 0:
                pages = a.block_table[b, : -(-length // a.cache.page_size)]
                k, v = (x[:, :, :length] for x in _keys_and_values(a.cache, pages.long()))
                yield Part(_dense(a, a.q[b : b + 1], k, v, BF16), None, out[b : b + 1], False)


def _layout(a: AttentionArgs | DecodeArgs) -> str:
    return "bshd" if a.bshd else "bhsd"


def _mask_of(a: DenseArgs | AttentionArgs, M: int, N: int) -> BlockMask | None:
    return BlockMask._of_lists(M, N, *a.block_mask) if a.block_mask.block_sparse else None  # type: ignore[arg-type]


def _dense(a: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, recipe: Recipe) -> DenseArgs:
    """The same scores of tensors [B, heads, S, D]."""
    return DenseArgs(
        q=q,
        k=k,
        v=v,
        rope=NO_ROPE_ARGUMENTS,
        norm=norm_arguments(None, None),
        scores=a.scores,
        bshd=False,
        out_dtype=a.out_dtype,
        recipe=recipe,
        num_splits=None,
        needs_lse_shift=False,
    )


def _sequences(a: VarlenArgs) -> list[tuple[slice, slice]]:
    """Rows and keys of the first sequences that have both."""
    starts = itertools.pairwise(zip(a.cu_seqlens_q.tolist(), a.cu_seqlens_k.tolist(), strict=True))
    both = ((slice(q, q_end), slice(k, k_end)) for (q, k), (q_end, k_end) in starts if q < q_end and k < k_end)
    return list(itertools.islice(both, SEQUENCES))


def _keys_and_values(cache: PagedKVCache, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence's pages, fp32 [1, H_kv, keys, D] and [1, H_kv, keys, D_v]."""
    # [pages, H_kv, page, D_pad]
    k = cache.k8[pages].float() * key_descales(cache.k_descale[pages]).unsqueeze(3)
    # [pages, H_kv, D_v_pad, page / 16, t, a, b], interleaved, in order
    v = cache.v8[pages].float().unflatten(3, (-1, 4, 2, 2)).transpose(4, 5).flatten(3).mT
    v = v * key_descales(cache.v_descale[pages]).unsqueeze(3)
    # [H_kv, keys, D]
    k, v = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
    if cache.channel_factors is not None:
        k = k * cache.channel_factors.unsqueeze(1)
    if cache.k_mean is not None:
        k = k + cache.k_mean.unsqueeze(1)
    return k[None, ..., : cache.D], v[None, ..., : cache.D_v]


def _of_sequences(a: Any, out: torch.Tensor) -> torch.Tensor:
    """The output without tokens of no sequence, which are NaN."""
    if not isinstance(a, VarlenArgs):
        return out
    starts = a.cu_seqlens_q.tolist()
    return out[starts[0] : starts[-1]]


def _modelled(part: Part, sample: _Sample) -> torch.Tensor:
    """The rounding model's output of the sampled rows, [heads, rows, D_v]."""
    a, scores = part.problem, part.problem.scores
    transformed = a.rope.cos is not None or a.norm.q_weight is not None or a.norm.k_weight is not None
    # Rows of Q may share a descale, so all are rounded.
    given = a.rope.q_positions
    positions = torch.arange(sample.N - sample.M, sample.N, device=a.q.device) if given is None else given
    q = torch.stack([sample._rotated(head, positions) for head in sample.query_heads()])
    k, v = (torch.cat(x, 1) for x in list(zip(*((k, v) for _first, k, v in sample.key_blocks()), strict=True)))
    # What neither a norm nor RoPE has changed is in the call's dtype, and the model rounds it as such.
    dtype = torch.float32 if transformed else a.q.dtype
    q, k, v = (x.to(dtype).unsqueeze(0) for x in (q, k, v))
    rounded = quantize(q, k, v, a.recipe)
    of_rows = {name: getattr(rounded, name)[:, :, sample.rows] for name in ("q8", "q_descale", "lse_shift")}
    shown = torch.zeros(len(sample.rows), sample.N, device=q.device)
    window = scores.left, scores.right
    seen = hide_keys_of_rows(shown, sample.rows, 0, sample.M, sample.N, False, window) == 0
    if sample.seen is not None:
        seen = seen & sample.seen
    heads = [h for _b, h, _kv in sample.heads]
    sinks = None if scores.sinks is None else scores.sinks[heads]
    scores = dataclasses.replace(scores, causal=False, window=None, sinks=sinks)
    counted = None if sample.counted is None else sample.counted.unsqueeze(0)
    seen = seen.expand(1, len(heads), -1, -1)
    out, _lse = attend(rounded._replace(**of_rows), a.recipe, scores, seen, a.packing.bn, counted)
    return out[0].to(a.out_dtype).double()


def measure(a: Any, out: torch.Tensor) -> Measured:
    """Hold the output of a call, by its problem, against fp64 and the rounding model."""
    with plain_kernels(out), torch.no_grad():
        bad = int((~_of_sequences(a, out).float().isfinite()).sum())
        outs, references, rounded, modelled = [], [], [], []
        for part in _parts(a, out):
            sample = _Sample(part.problem, part.mask)
            exact, sixteen_bits, _ = sample.attention()
            outs.append(sample.rows_of(part.out).double().flatten(0, 1))
            references.append(exact.flatten(0, 1))
            rounded.append(sixteen_bits.flatten(0, 1))
            if part.modelled and not bad:
                modelled.append(_modelled(part, sample).flatten(0, 1))
        if not outs:
            none = Error(0.0, 0.0)
            return Measured(none, bad, None, None, none)
        exact = torch.cat(references)

        def error(of: Sequence[torch.Tensor]) -> Error:
            return _error(torch.cat(list(of)).unsqueeze(0), exact.unsqueeze(0))

        model = error(modelled) if modelled else None
        budget = None
        if model is not None:
            budget = Error(*(_budget(x, a, out) for x in (model.total, model.worst_row)))
        return Measured(error(outs), bad, model, budget, error(rounded))


def _budget(model_error: float, a: Any, out: torch.Tensor) -> float:
    return error_budget(model_error, a.out_dtype, FACTOR, out.device, a.scores.softcap)


#: What `debug(save=...)` examines, and the function and the checks of each when it is replayed, by name.
CALLS: dict[type, Callable[[Any], PublicCall]] = {
    DenseArgs: of_attention,
    VarlenArgs: of_attention_varlen,
    AttentionArgs: of_attention_quantized,
    DecodeArgs: of_decode,
}
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (attention, dense_problem),
    "attention_varlen": (attention_varlen, varlen_problem),
    "attention_quantized": (attention_quantized, quantized_problem),
    "attention_kvcache": (attention_kvcache, decode_problem),
}


def examine(a: Any, returned: Any, kernels: str, seen: Seen) -> None:
    """Measure a call inside `debug(save=...)`, and write it if it is the first bad one."""
    if type(a) not in CALLS or seen.save is None:
        return
    out: torch.Tensor = returned[0]
    if out.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("helion_attn.debug(save=...) reads outputs, which no captured CUDA graph allows: leave it")
    if out.numel() == 0:
        return
    measured = measure(a, out)
    if (fault := measured.fault) is None:
        return
    call = CALLS[type(a)](a)
    folder, seen.save = seen.save, None
    name = f"{call.function}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:8]}.pt"
    fault += _of_inputs(call) if measured.bad else ""
    write(folder / name, call, out, kernels, fault)
    LOG.warning("%s: %s; saved: python -m helion_attn replay %s", call.function, fault, folder / name)


def _of_inputs(call: PublicCall) -> str:
    """Which tensors of a call are not finite themselves."""
    bad = [
        name
        for name, x in (call.tensors | call.options).items()
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.float().isfinite().all()
    ]
    return f", and so has {', '.join(bad)}" if bad else ", and the inputs are finite"


def write(path: Path, call: PublicCall, out: torch.Tensor, kernels: str, fault: str) -> None:
    """Write a report, of what `torch.load(weights_only=True)` takes."""
    device = torch.cuda.get_device_name(out.device) if out.is_cuda else "CPU"
    tensors = dict(call.tensors)
    if "cache" in tensors:
        tensors["cache"], tensors["block_table"] = _pages_in_use(tensors["cache"], tensors["block_table"])
    report = {
        "format": FORMAT,
        "function": call.function,
        "arguments": {name: _plain(x) for name, x in (tensors | call.options).items()},
        "out": _copied(out, "cpu"),
        "fault": fault,
        "line": line(call, kernels),
        "made on": {
            "device": device,
            "helion_attn": __version__,
            "torch": str(torch.__version__),
            "Triton": triton.__version__,
            "Python": platform.python_version(),
        },
    }
    torch.save(report, path)


def _pages_in_use(cache: dict[str, Any], block_table: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """A cache of the pages in a block table alone, and the table of these."""
    pages, table = block_table.clamp(0, cache["k8"].size(0) - 1).unique(return_inverse=True)
    paged = {name: cache[name][pages] for name in ("k8", "v8", "k_descale", "v_descale")}
    return {**cache, **paged}, table.to(torch.int32).view_as(block_table)


def _plain(x: Any) -> Any:
    """An argument of tensors on the CPU, numbers and names."""
    if isinstance(x, torch.Tensor):
        return _copied(x, "cpu")
    if isinstance(x, Recipe):
        x = {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    return {name: _plain(value) for name, value in x.items()} if isinstance(x, dict) else x


def _copied(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides, of the memory that the tensor spans."""
    if x.numel() == 0:
        return x.detach().to(device, copy=True)
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    copy = x.detach().as_strided((spanned,), (1,)).to(device, copy=True)
    return copy.as_strided(x.shape, x.stride(), 0)


#: What is made of the dict of an argument's fields, by the argument's name.
BUILT: dict[str, Callable[..., Any]] = {
    "recipe": Recipe,
    "rope": Rope,
    "q_norm": RMSNorm,
    "k_norm": RMSNorm,
    "block_mask": BlockMask._of_lists,
    "cache": PagedKVCache,
    "qkv": QuantizedQKV,
}


def _build(name: str, x: Any, device: str | None = None) -> Any:
    """An argument of what is in a report, on a device or where it is."""
    if isinstance(x, torch.Tensor):
        return x if device is None else _copied(x, device)
    if not isinstance(x, dict):
        return x
    return BUILT[name](**{field: _build(field, value, device) for field, value in x.items()})


def load(path: str) -> dict[str, Any]:
    """Read a report.

    Raises:
        ValueError: there is no such file, or it is no report.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except Exception:  # of another format, whose message would advise to load it without weights_only
        found = None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no report of helion_attn.debug(save=...), or one of another helion_attn")
    return found


def replay(found: dict[str, Any], device: str) -> str | None:
    """Make the call of a report again on a device, print it beside the oracle, and return what is wrong with it."""
    made_on = ", ".join(f"{name} {version}" for name, version in found["made on"].items())
    print(f"{found['line']}\nfault    {found['fault']}\nmade on  {made_on}", flush=True)
    if device == "cpu":
        print("here     the CPU, in Helion's interpreter: slow, and without what a GPU alone does", flush=True)
    else:
        print(f"here     {torch.cuda.get_device_name()}", flush=True)
    function, problem = FUNCTIONS[found["function"]]
    arguments = {name: _build(name, x, device) for name, x in found["arguments"].items()}
    recorded = measure(problem(**arguments), found["out"].to(device))
    print(f"{'error against fp64':20}{'total':>10}{'worst row':>12}{'not finite':>12}")
    for label, error in (("16 bits", recorded.sixteen_bits), ("rounding model", recorded.model)):
        if error is not None:
            print(_row(label, error))
    print(_row("recorded", recorded.out, recorded.bad), flush=True)
    returned = function(**arguments)
    again = measure(problem(**arguments), returned[0] if isinstance(returned, tuple) else returned)
    print(_row("again", again.out, again.bad))
    return again.fault


def _row(label: str, error: Error, bad: int | None = None) -> str:
    return f"{label:20}{error.total:10.3g}{error.worst_row:12.3g}{'' if bad is None else bad:>12}"
