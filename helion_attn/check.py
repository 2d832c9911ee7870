"""`check`: what quantising costs a call of `attention` on the tensors at hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from typing_extensions import Unpack

from helion_attn.api import attention, dense_problem
from helion_attn.configs import MASK_BLOCK, SUPPORTED_D
from helion_attn.explain import HOPPER_MULTIPROCESSORS
from helion_attn.masks.blocks import BlockMask, as_block_mask
from helion_attn.names import options_of, reject_unknown_kwargs
from helion_attn.ops.choose import choose, shape_of_dense
from helion_attn.options import MaskedOptions
from helion_attn.problem import DenseArgs
from helion_attn.reference.rope import apply_rope
from helion_attn.reference.shapes import block_means, counted_blocks, hide_keys_of_rows, to_bhsd
from helion_attn.types import BF16, PRESETS, Recipe, preset_name
from helion_attn.validate.dense import check_no_gradients

#: The recipes beside the one that was asked for, the fastest first: all presets with 8-bit numbers.
COMPARED = {name: preset for name, preset in PRESETS.items() if preset is not BF16}

#: Heads that are looked at, and rows of each.
HEADS, ROWS = 8, 64

#: Keys whose scores are held at once: bounds the memory at any length.
KEYS_AT_ONCE = 16384

#: Keys that findings are drawn from.
CHECKED_KEYS = 8192

#: Runs of keys whose means tell whether V drifts, and the fewest keys of each: noise must not look like drift.
RUNS, MIN_RUN = 32, 32

#: From here on a finding is said. K's largest mean of a channel over its spread; an entry over the root mean square of
#: its head; the spread of V's means by runs over V's. Normal numbers stay below the second at any length in use.
BIASED, OUTLYING, DRIFTING = 2.0, 12.0, 0.5

#: Likewise for the size of K's largest channel over that of its median one.
LARGE = 4.0

#: Another recipe is recommended where its error is at most this much of that of the one asked for.
BETTER = 0.8


@dataclass(frozen=True)
class Error:
    """How far an output is from fp64's on the same unquantised tensors.

    Attributes:
        total: ||out - ref|| / ||ref|| over all sampled rows; 0 where nothing is off, inf where only ref is 0.
        worst_row: the largest of one row, of those whose ref is not 0.
    """

    total: float
    worst_row: float


@dataclass(frozen=True)
class Check:
    """What `check` found; printed, it is a table.

    Attributes:
        asked: the name in `errors` of the recipe that was asked for: a preset's, or "yours".
        errors: by recipe.
        sixteen_bits: of attention whose inputs, P and output have 16 bits and whose sums fp32.
        rows: how many were looked at.
        findings: what makes the tensors hard for 8 bits, and which recipe helps, a sentence each.
        pattern: what the block mask alone adds: the error of fp64 with it against fp64 without it; None without a mask.
    """

    asked: str
    errors: dict[str, Error]
    sixteen_bits: Error
    rows: int
    findings: tuple[str, ...]
    pattern: Error | None = None

    def __str__(self) -> str:
        lines = [f"error against fp64, {self.rows} rows", f"{'':12}{'total':>10}{'worst row':>12}"]
        for name, error in (*self.errors.items(), ("16 bits", self.sixteen_bits)):
            mark = "  <- asked for" if name == self.asked else ""
            lines.append(f"{name:12}{error.total:10.2g}{error.worst_row:12.2g}{mark}")
        if self.pattern is not None:
            lines.append(f"{'block mask':12}{self.pattern.total:10.2g}{self.pattern.worst_row:12.2g}  besides")
        return "\n".join([*lines, *self.findings])


@reject_unknown_kwargs
@options_of(attention, but=("return_lse", "out_dtype", "num_splits"))
def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[MaskedOptions]) -> Check:
    """Measure what `attention` loses on these tensors, with `recipe` and with the presets, beside 16-bit attention.

    Every recipe is run in full. Errors are those of `ROWS` random rows, the same every time, of up to `HEADS` heads,
    against fp64 on the unquantised tensors, in memory that does not grow with the length. The findings look at the
    same heads: channels of K with a bias, large channels of K and what equalising leaves of them, outliers of Q and K,
    and a V whose mean changes along the keys.

    With a `block_mask` these errors are against fp64 with the same mask. What the mask leaves out is `pattern`, apart.

    Args:
        q: and all others as in `attention`, but that `recipe` is not "auto". The output has q's dtype.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention`.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        print(ha.check(q, k, v, causal=True))
    """
    problem = dense_problem(q, k, v, **options)
    check_no_gradients(q, k, v, options)
    recipe, layout = problem.recipe, options.get("layout", "bhsd")
    sample = _Sample(problem, as_block_mask(options.get("block_mask")))
    reference, rounded, everything = sample.attention()
    asked = preset_name(recipe) or "yours"
    recipes = {name: preset for name, preset in COMPARED.items() if preset.bits[1] == 8 or sample.has_16_bits}
    errors = {}
    for name, options["recipe"] in {asked: recipe, **recipes}.items():
        out = attention(q, k, v, **options)
        errors[name] = _error(sample.rows_of(to_bhsd(out, layout)), reference)
    sums_in_fp32 = recipe.is_two_level(choose(shape_of_dense(problem), HOPPER_MULTIPROCESSORS).tile.two_level)
    findings = (*_not_finite(sample), *_findings(sample, recipe, sums_in_fp32), *_better(asked, errors))
    pattern = None if everything is None else _error(reference, everything)
    rows = reference.size(0) * reference.size(1)
    return Check(asked, errors, _error(rounded, reference), rows, findings, pattern)


class _Norm:
    """An RMSNorm of Q or K [B, heads, S, D], of rows that are looked at later; without a weight, of none."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
        self.weight = None if weight is None else weight.double().view(-1, x.size(3))
        if self.weight is not None:
            # [B, heads or 1, S]
            squares = torch.linalg.vector_norm(x, dim=3, dtype=torch.float64).square() / x.size(3)
            squares = squares.mean(1, keepdim=True) if self.weight.size(0) > 1 else squares
            self.factors = torch.rsqrt(squares + eps)

    def rows(self, x: torch.Tensor, b: int, h: int, rows: torch.Tensor | slice) -> torch.Tensor:
        """Rows of a head, normalised: [rows, D]."""
        if self.weight is None:
            return x[b, h, rows]
        factors = self.factors[b, h % self.factors.size(1), rows]
        return x[b, h, rows].double() * factors.unsqueeze(1) * self.weight[h % self.weight.size(0)]


class _Sample:
    """Some rows of some heads, and the keys that they see."""

    def __init__(self, problem: DenseArgs, mask: BlockMask | None) -> None:
        self.q, self.k, self.v, self.rope = problem.q, problem.k, problem.v, problem.rope
        self.scores, norm = problem.scores, problem.norm
        self.q_norm, self.k_norm = _Norm(self.q, norm.q_weight, norm.q_eps), _Norm(self.k, norm.k_weight, norm.k_eps)
        (B, H, self.M, self.D), self.N = self.q.shape, self.k.size(2)
        every = max(1, B * H // HEADS)
        # (batch, query head, KV head)
        self.heads = [(i // H, i % H, i % H // (H // self.k.size(1))) for i in range(0, B * H, every)][:HEADS]
        # Random, since a stride would meet the same row of every block.
        rows = torch.randperm(self.M, generator=torch.Generator().manual_seed(0))[:ROWS].sort().values
        self.rows = rows.to(self.q.device)
        #: Which keys the mask shows them, bool [heads, rows, N], or None.
        self.seen: torch.Tensor | None = None
        if mask is not None:
            kinds = mask._kinds()
            of_heads = [kinds[b % mask.B, h % mask.H] for b, h, _kv in self.heads]
            self.seen = torch.stack([mask._seen_by(self.rows, x) for x in of_heads])
        #: Which key blocks count for them by their means, bool [heads, rows, N_blocks], or None.
        self.counted = counted_blocks(mask, False, (self.scores.left, self.scores.right), self.rows)
        if self.counted is not None:
            B, H = self.counted.shape[:2]
            self.counted = torch.stack([self.counted[b % B, h % H] for b, h, _kv in self.heads])
        #: Whether the presets with 16-bit P and V have a kernel.
        self.has_16_bits = max(self.D, self.v.size(3)) <= SUPPORTED_D[-1]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """The sampled rows of a tensor with query heads: [heads, rows, ...]."""
        return torch.stack([x[b, h, self.rows] for b, h, _kv in self.heads])

    def queries(self) -> torch.Tensor:
        """fp64 [heads, rows, D], normalised and rotated."""
        given = self.rope.q_positions
        q = torch.stack([self.q_norm.rows(self.q, b, h, self.rows) for b, h, _kv in self.heads])
        return self._rotated(q, self.rows + self.N - self.M if given is None else given[self.rows])

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """fp64 [..., positions, D]."""
        if self.rope.cos is None or self.rope.sin is None:
            return x.double()
        return apply_rope(x, self.rope.cos, self.rope.sin, self.rope.interleaved, positions)

    def _key_positions(self, keys: torch.Tensor) -> torch.Tensor:
        given = self.rope.k_positions
        return keys if given is None else given[keys]

    def query_heads(self) -> list[torch.Tensor]:
        """The sampled heads of Q, whole, normalised: [M, D]."""
        return [self.q_norm.rows(self.q, b, h, slice(None)) for b, h, _kv in self.heads]

    def key_heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The KV heads of K, normalised, or V that they attend to, whole, each once: [N, D]."""
        heads = dict.fromkeys((b, kv) for b, _h, kv in self.heads)
        return [self.k_norm.rows(x, b, kv, slice(None)) if x is self.k else x[b, kv] for b, kv in heads]

    def keys_of(self, x: torch.Tensor, rotated: bool) -> Iterator[torch.Tensor]:
        """Every so many keys of each, fp64."""
        keys = torch.arange(0, self.N, -(-self.N // CHECKED_KEYS), device=x.device)
        for head in self.key_heads(x):
            yield self._rotated(head[keys], self._key_positions(keys)) if rotated else head[keys].double()

    def key_blocks(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """`(first key, K, V)`, fp64 [heads, keys, D] and [heads, keys, D_v], K normalised and rotated."""
        for first in range(0, self.N, KEYS_AT_ONCE):
            of = slice(first, first + KEYS_AT_ONCE)
            keys = torch.arange(first, min(of.stop, self.N), device=self.k.device)
            k = torch.stack([self.k_norm.rows(self.k, b, kv, of) for b, _h, kv in self.heads])
            v = torch.stack([self.v[b, kv, of] for b, _h, kv in self.heads])
            yield first, self._rotated(k, self._key_positions(keys)), v.double()

    def attention(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """fp64 [heads, rows, D_v]: the output, and as 16-bit attention rounds it: Q, K, V, P and the output.

        And the output without the block mask, if there is one.
        """
        dtype = torch.bfloat16 if self.q.dtype == torch.float32 else self.q.dtype
        exact, rounded = (_OnlineSoftmax(self, rounding, self.seen) for rounding in (torch.float64, dtype))
        everything = None if self.seen is None else _OnlineSoftmax(self, torch.float64, None)
        means = []
        for first, k, v in self.key_blocks():
            for softmax in (exact, rounded, everything):
                if softmax is not None:
                    softmax.attend(first, k, v)
            if self.counted is not None:
                means.append((block_means(k), block_means(v)))
        if self.counted is not None:
            mean_k, mean_v = (torch.cat(of, 1) for of in zip(*means, strict=True))
            for softmax in (exact, rounded):
                softmax.attend_to_means(mean_k, mean_v, self.counted)
        without = None if everything is None else everything.output()
        return exact.output(), rounded.output().to(dtype).double(), without


class _OnlineSoftmax:
    """softmax(q k^T) v over blocks of keys (arXiv:1805.02867), in fp64 but for Q, K, V and P, rounded to `dtype`."""

    def __init__(self, sample: _Sample, dtype: torch.dtype, seen: torch.Tensor | None) -> None:
        self.sample, self.dtype, self.seen = sample, dtype, seen
        # [heads, rows, D]
        self.q = self._rounded(sample.queries())
        heads, rows = self.q.shape[:2]
        # [heads, rows, 1]. A sink is one more score, which has no value.
        self.m = self.q.new_full((heads, rows, 1), float("-inf"))
        if sample.scores.sinks is not None:
            self.m = self.m.copy_(torch.stack([sample.scores.sinks[h] for _b, h, _kv in sample.heads])[:, None, None])
        self.l = (self.m > float("-inf")).double()
        # [heads, rows, D_v]
        self.acc = self.q.new_zeros(heads, rows, sample.v.size(3))

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype).double()

    def attend(self, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Attend to the keys from `first` on, too: [heads, keys, D] and [heads, keys, D_v]."""
        of = self.sample
        # [heads, rows, keys]
        s = of.scores.capped(self.q @ self._rounded(k).mT * of.scores.scale)
        s = hide_keys_of_rows(s, of.rows, first, of.M, of.N, False, (of.scores.left, of.scores.right))
        if self.seen is not None:
            s = s.masked_fill(~self.seen[..., first : first + k.size(1)], float("-inf"))
        self._add(s, v)

    def attend_to_means(self, k: torch.Tensor, v: torch.Tensor, counted: torch.Tensor) -> None:
        """Attend to the means of key blocks, too: [heads, N_blocks, D] and [heads, N_blocks, D_v]."""
        of = self.sample
        # [heads, rows, N_blocks]
        s = of.scores.capped(self.q @ self._rounded(k).mT * of.scores.scale) + math.log(MASK_BLOCK)
        self._add(s.masked_fill(~counted, float("-inf")), v)

    def _add(self, s: torch.Tensor, v: torch.Tensor) -> None:
        """Take in scores, and their values."""
        m = torch.maximum(self.m, s.amax(2, keepdim=True))
        shift = torch.where(m == float("-inf"), 0.0, m)
        p, alpha = torch.exp(s - shift), torch.exp(self.m - shift)
        self.l = self.l * alpha + p.sum(2, keepdim=True)
        self.acc = self.acc * alpha + self._rounded(p) @ self._rounded(v)
        self.m = m

    def output(self) -> torch.Tensor:
        """[heads, rows, D_v]; a row that saw no key is 0."""
        return self.acc / torch.where(self.l == 0, 1.0, self.l)


def _error(out: torch.Tensor, reference: torch.Tensor) -> Error:
    """Of [heads, rows, D_v]. A row whose reference is 0 counts in `total` alone, unless it is not finite."""
    off, size = (x.double().norm(dim=2) for x in (out - reference, reference))
    of_rows = torch.where((size == 0) & off.isfinite(), 0.0, off / size)
    total = off.norm() / size.norm() if off.any() else off.new_zeros(())
    return Error(total.item(), of_rows.amax().item())


def _not_finite(sample: _Sample) -> Iterator[str]:
    """A sentence on each input that is not finite."""
    for name, x in (("q", sample.q), ("k", sample.k), ("v", sample.v)):
        largest = torch.linalg.vector_norm(x, math.inf).item()
        if not math.isfinite(largest):
            what = "NaN" if math.isnan(largest) else "inf"
            yield f"{name} holds {what}: rows that it reaches are NaN in any precision; find what makes it."


def _findings(sample: _Sample, recipe: Recipe, sums_in_fp32: bool) -> Iterator[str]:
    """Sentences on each property of Q, K or V that costs 8 bits accuracy, and on the remedy."""
    if recipe.bits[0] == 8:
        # Of few keys noise alone has a mean.
        bias = max(_largest_bias(k) for k in sample.keys_of(sample.k, rotated=True)) if sample.N >= MIN_RUN else 0.0
        if bias > BIASED:
            helps = "it is subtracted first" if recipe.smooth_k else "smooth_k=True subtracts it first"
            yield f"K has a channel whose mean is {bias:.3g} times its spread: {helps}; in a cache `cache_constants`."
        large, equalised = max(_largest_channels(sample), default=(0.0, 0.0))
        if sample.N >= MIN_RUN and large > LARGE:
            helps = "equalising leaves" if recipe.equalise else "equalise=True leaves"
            yield f"K has a channel {large:.3g} times as large as its median one: {helps} {equalised:.2g} times."
        for name, heads in (("Q", sample.query_heads()), ("K", sample.key_heads(sample.k))):
            largest = max(_largest_entry(x) for x in heads)
            if largest > OUTLYING:
                helps = "hadamard spreads it" if recipe.hadamard else "hadamard=True spreads it"
                yield f"{name} has an entry of {largest:.0f} times the root mean square of its head: {helps}."
    if recipe.bits[1] == 8 and sample.N >= RUNS * MIN_RUN:
        drift = max(_largest_drift(v) for v in sample.keys_of(sample.v, rotated=False))
        if drift > DRIFTING:
            helps = "P V is summed in fp32, which keeps it" if sums_in_fp32 else "promote_every=1 sums P V in fp32"
            yield f"V has a channel whose mean moves along the keys by {drift:.1f} of its spread: {helps}."


def _largest_bias(k: torch.Tensor) -> float:
    """The largest mean of a channel over the root mean square of the channel without it: [keys, D]."""
    return (k.mean(0).abs() / k.std(0, unbiased=False).clamp_min(torch.finfo(k.dtype).tiny)).amax().item()


def _largest_channels(sample: _Sample) -> Iterator[tuple[float, float]]:
    """The size of each head's largest channel of K over that of its median one: as it is, and equalised with Q's.

    Sizes are as `preprocess.lib.equalise` has them, about the mean and of more rows. A head yields nothing where no
    size is known.
    """
    queries: dict[tuple[int, int], list[torch.Tensor]] = {}
    for (b, _h, kv), rows in zip(sample.heads, sample.queries(), strict=True):
        queries.setdefault((b, kv), []).append(rows)
    for k, q in zip(sample.keys_of(sample.k, rotated=True), queries.values(), strict=True):
        # [D]
        fourth = (x.square().square() for x in (torch.cat(q), k - k.mean(0)))
        q_size, k_size = (torch.minimum(x[::2].sum(0), x[1::2].sum(0)) ** 0.25 for x in fourth)
        ratio = (k_size / q_size).log2()
        finite = ratio.isfinite()
        if finite.any():
            exponent = ((ratio - ratio[finite].mean()) / 2).round()
            of_k = k_size[finite], (k_size / exponent.exp2())[finite]
            large, equalised = ((size.amax() / size.median()).item() for size in of_k)
            yield large, equalised


def _largest_entry(x: torch.Tensor) -> float:
    """Over the root mean square of all: [rows, D]. Without a copy of x."""
    largest = torch.maximum(x.amax(), -x.amin()).double()
    return (
        largest
        / (torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)) / math.sqrt(x.numel()))
    ).item()


def _largest_drift(v: torch.Tensor) -> float:
    """The largest standard deviation of a channel's means by runs over its own: [keys, D_v]."""
    # [runs, keys of a run, D_v]
    runs = v[: v.size(0) // RUNS * RUNS].unflatten(0, (RUNS, -1))
    return (runs.mean(1).std(0) / v.std(0).clamp_min(torch.finfo(v.dtype).tiny)).amax().item()


def _better(asked: str, errors: dict[str, Error]) -> Iterator[str]:
    """The presets that are clearly more accurate, the fastest first, or that none is; nothing where fp64 is NaN."""
    mine = errors[asked].total
    if mine == 0:
        yield f"{asked} has no error here."
        return
    if not math.isfinite(mine):
        finite = [name for name in COMPARED if name in errors and math.isfinite(errors[name].total)]
        if finite:
            yield f"{asked} gives NaN or inf here, and these do not, the fastest first: {', '.join(finite)}."
        return
    better = [
        f"{name} {errors[name].total / mine:.2f}"
        for name in COMPARED
        if name in errors and errors[name].total <= BETTER * mine
    ]
    if better:
        yield f"Error as a part of that of {asked}, the fastest recipe first: {', '.join(better)}."
    else:
        yield f"No preset has less than {BETTER} of the error of {asked}."
