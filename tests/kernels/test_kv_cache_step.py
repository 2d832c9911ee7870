"""`kv_cache.step`: prompts, chunks and decodes of a paged cache in one call, on packed tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn import ops, plans
from helion_attn.configs import scheduling
from helion_attn.testing import error_budget, relative_error
from helion_attn.types import CACHE_RECIPE
from helpers.paged import append_all, make_cache

BOTH = pytest.mark.parametrize("recipe", [ha.FAST, ha.BALANCED], ids=str)


def cache_tensors(cache: ha.PagedKVCache) -> tuple[torch.Tensor, ...]:
    return cache.k8, cache.v8, cache.k_descale, cache.v_descale


#: What rows of the output that are not written hold.
UNWRITTEN = 7.0

EMPTY = torch.empty(0)


@dataclasses.dataclass
class Step:
    """A cache with keys, and new tokens of several sequences: (new tokens, keys that are there), or -1 of padding."""

    q: torch.Tensor  # [tokens, H, D]
    k: torch.Tensor  # [B, H_kv, keys, D], with the new ones
    v: torch.Tensor
    new_k: torch.Tensor  # [tokens, H_kv, D]
    new_v: torch.Tensor
    sequences: list[tuple[int, int]]
    cache: ha.PagedKVCache
    cu_seqlens: torch.Tensor
    table: torch.Tensor
    seqlens: torch.Tensor
    recipe: ha.Recipe

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)`."""
        out = torch.full((*self.q.shape[:2], self.cache.D_v), UNWRITTEN, device=self.q.device)
        step: Any = ha.kv_cache.step
        return step(
            self.q, self.new_k, self.new_v, self.cache, self.cu_seqlens, self.table, self.seqlens, out=out,
            return_lse=True, **options,
        )  # fmt: skip

    def rows(self, b: int) -> slice:
        """Tokens of a sequence."""
        return slice(int(self.cu_seqlens[b]), int(self.cu_seqlens[b + 1]))

    def check(self, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Every sequence within its budget; what is padding is not written."""
        assert torch.all(out[int(self.cu_seqlens[-1]) :] == UNWRITTEN)
        for b, (new, stored) in enumerate(self.sequences):
            of_b = out[self.rows(b)].transpose(0, 1).unsqueeze(0)
            if stored < 0:
                assert torch.all(of_b == UNWRITTEN)
                continue
            if new == 0:
                continue
            # [1, heads, ...]
            tokens = (
                self.q[self.rows(b)].transpose(0, 1).unsqueeze(0),
                *(x[b : b + 1, :, : stored + new] for x in (self.k, self.v)),
            )
            oracle, oracle_lse = ha.reference.attention(*tokens, causal=True, return_lse=True, **options)
            model, model_lse = ha.reference.fp8_attention_kvcache(
                *tokens, recipe=self.recipe, own_pages_open=True, **options
            )
            softcap = options.get("softcap")
            budget = error_budget(relative_error(model, oracle), out.dtype, device=out.device, softcap=softcap)
            error = relative_error(of_b, oracle)
            assert error <= budget, f"sequence {b}: error {error:.4g}, budget {budget:.4g}"
            of_lse = error_budget(relative_error(model_lse, oracle_lse), lse.dtype, device=out.device, softcap=softcap)
            assert relative_error(lse[:, self.rows(b)].unsqueeze(0), oracle_lse) <= of_lse


def make_step(
    sequences: list[tuple[int, int]],
    device: str,
    H: int = 4,
    H_kv: int = 2,
    D: int = 64,
    D_v: int | None = None,
    recipe: ha.Recipe = CACHE_RECIPE,
    behind: int = 3,
) -> Step:
    """Of tokens whose keys are random; `behind`: tokens behind the last sequence, whose keys and values are NaN."""
    generator = torch.Generator().manual_seed(len(sequences))
    D_v, B = D if D_v is None else D_v, len(sequences)
    keys = [new + stored if stored >= 0 else 0 for new, stored in sequences]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    k, v = normal(B, H_kv, max(keys), D), normal(B, H_kv, max(keys), D_v)
    cache, table, _ = make_cache([max(n, 1) for n in keys], H_kv, D, D_v, device, recipe=recipe)
    append_all(cache, k, v, table, [max(stored, 0) for _, stored in sequences])
    ends = [sum(new for new, _ in sequences[:b]) for b in range(B + 1)]
    tokens = ends[-1] + behind
    new_k, new_v = (torch.full((tokens, H_kv, d), float("nan"), dtype=k.dtype, device=device) for d in (D, D_v))
    for b, (new, stored) in enumerate(sequences):
        if stored >= 0:
            for to, of in ((new_k, k), (new_v, v)):
                to[ends[b] : ends[b] + new] = of[b, :, stored : stored + new].transpose(0, 1)
    lengths = [n if stored >= 0 else stored for n, (_, stored) in zip(keys, sequences, strict=True)]
    return Step(
        normal(tokens, H, D), k, v, new_k, new_v, sequences, cache,
        torch.tensor(ends, dtype=torch.int32, device=device), table,
        torch.tensor(lengths, dtype=torch.int32, device=device), recipe,
    )  # fmt: skip


#: Decodes in and at the ends of pages, prompts, chunks, padding, and a sequence without new tokens.
MIXED = [(1, 200), (1, 127), (5, 0), (130, 60), (1, -1), (300, 0), (0, 50), (1, 128), (2, 255)]

#: By name: the sequences, heads, head dims, options.
BATCHES: dict[str, tuple[list[tuple[int, int]], dict[str, Any], dict[str, Any]]] = {
    "mixed": (MIXED, {}, {}),
    "mixed_splits": (MIXED, {}, {"num_splits": 2}),
    "decodes": ([(1, n) for n in (0, 127, 128, 300)], {"H": 8, "H_kv": 1, "behind": 0}, {"num_splits": 3}),
    "one_token": ([(1, 130)], {"behind": 0}, {}),
    "one_prompt": ([(260, 0)], {"H": 2, "behind": 0}, {}),
    "window": (MIXED, {}, {"window": (100, 0), "num_splits": 2}),
    "softcap": (MIXED, {}, {"softcap": 5.0}),
    "drafts": ([(4, 126), (4, 125), (4, 0), (4, 60), (4, 253)], {}, {"drafts": 3}),
    "drafts_of_a_chunk": ([(200, 60), (9, 120), (9, 127), (70, 100)], {"H": 8}, {"drafts": 8, "num_splits": 2}),
    "wide": ([(1, 70), (70, 60), (3, 126)], {"D": 256, "D_v": 128}, {}),
    "narrow_v": (MIXED, {"D": 128, "D_v": 40}, {"num_splits": 2}),
    "widest": ([(1, 63), (40, 60)], {"D": 300, "D_v": 512, "H": 2, "H_kv": 1}, {}),
}


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("name", BATCHES)
@BOTH
def test_batches(name: str, recipe: ha.Recipe, device: str) -> None:
    sequences, sizes, options = BATCHES[name]
    step = make_step(sequences, device, recipe=recipe, **sizes)
    out, lse = step.run(**options)
    step.check(out, lse, **{x: y for x, y in options.items() if x not in ("drafts", "num_splits")})


@pytest.mark.parametrize("first", [(130, 60), (1, -1), (0, 5)], ids=["prompt", "padding", "no_queries"])
@pytest.mark.parametrize(("stored", "splits"), [(200, 2), (1100, None)], ids=["given", "chosen"])
def test_sequences_without_splits_come_first(
    first: tuple[int, int], stored: int, splits: int | None, device: str
) -> None:
    """Also where no sequence has any."""
    for sequences in ([first, (1, stored)], [first, (130, stored - 130)]):
        step = make_step(sequences, device, H=2, H_kv=1)
        out, lse = step.run(num_splits=splits)
        step.check(out, lse)


def test_sinks(device: str) -> None:
    sinks = torch.linspace(-2, 3, 4, device=device)
    step = make_step(MIXED, device)
    for splits in (1, 2):
        out, lse = step.run(num_splits=splits, sinks=sinks)
        step.check(out, lse, sinks=sinks)


def test_a_mean_and_factors(device: str) -> None:
    """Of the cache: the lse gets back what the mean takes."""
    step = make_step(MIXED, device)
    mean = torch.linspace(-3, 3, 128, device=device).view(2, 64)
    cache = ha.paged_kv_cache(len(step.cache.k8), 2, 64, device=device, k_mean=mean, channel_factors=mean.abs() + 0.1)
    append_all(cache, step.k, step.v, step.table, [max(stored, 0) for _, stored in step.sequences])
    plain, plain_lse = step.run(num_splits=2)
    with_constants = dataclasses.replace(step, cache=cache)
    out, lse = with_constants.run(num_splits=2)
    rows = torch.cat([torch.arange(64)[step.rows(b)] for b, (_, stored) in enumerate(step.sequences) if stored == 200])
    assert relative_error(out[rows], plain[rows]) < 0.1
    assert relative_error(lse[:, rows], plain_lse[:, rows]) < 0.02


@pytest.mark.thorough(but=4)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("new", "drafts"), [(1, 0), (1, 1), (4, 3), (40, 0), (150, 10)])
@BOTH
def test_has_the_bits_of_two_calls(new: int, drafts: int, splits: int, recipe: ha.Recipe, device: str) -> None:
    """Of sequences with as many new tokens each: the cache's, the outputs and lse."""
    sequences = [(new, 125), (new, 0), (new, 127), (new, 300)]
    step, other = (make_step(sequences, device, recipe=recipe, behind=0) for _ in range(2))
    out, lse = step.run(drafts=drafts, num_splits=splits)
    q, k, v = (x.unflatten(0, (4, new)) for x in (other.q, other.new_k, other.new_v))
    start = other.seqlens - new
    pages = ha.append_kvcache(other.cache, k, v, other.table, start, layout="bshd", drafts=drafts)
    expected, expected_lse = ha.attention_kvcache(
        q, other.cache, other.table, other.seqlens, layout="bshd", open_pages=pages, num_splits=splits,
        return_lse=True, out_dtype=torch.float32,
    )  # fmt: skip
    for name, x in other.cache._tensors().items():
        assert torch.equal(getattr(step.cache, name).view(torch.uint8), x.view(torch.uint8)), name
    found = out.unflatten(0, (4, new)), lse.unflatten(1, (4, new)).transpose(0, 1)
    for x, y in zip(found, (expected, expected_lse), strict=True):
        # The interpreter adds up products of other tiles in another order.
        assert torch.equal(x, y) if x.is_cuda else relative_error(x, y) < 1e-5


def test_rejected_drafts_leave_no_trace(device: str) -> None:
    """A page's last draft is rejected and its tokens come anew: later bits are those of a sequence without drafts."""
    recipe = ha.FAST
    of_all = make_step([(4, 126)], device, recipe=recipe, behind=0)
    drafted = make_step([(4, 126)], device, recipe=recipe, behind=0)
    wrong = dataclasses.replace(drafted, new_k=drafted.new_k * 3, new_v=-drafted.new_v)
    for name in ("new_k", "new_v"):  # the first one stays
        getattr(wrong, name)[0] = getattr(drafted, name)[0]
    wrong.run(drafts=3, num_splits=1)
    again = dataclasses.replace(
        drafted, q=drafted.q[1:], new_k=drafted.new_k[1:], new_v=drafted.new_v[1:], cu_seqlens=drafted.cu_seqlens - 1
    )
    again.cu_seqlens[0] = 0
    (out, _), (expected, _) = again.run(num_splits=1), of_all.run(num_splits=1)
    assert relative_error(out, expected[1:]) < 1e-6
    for name, x in of_all.cache._tensors().items():
        assert torch.equal(getattr(drafted.cache, name).view(torch.uint8), x.view(torch.uint8)), name


def test_layers_that_share_keys(device: str) -> None:
    """One appends and leaves its open pages; another attends alone, and sees what the first does."""
    step = make_step(MIXED, device, recipe=ha.BALANCED)
    pages = ha.kv_cache.step_open_pages(step.cache, step.q.size(0), len(MIXED))
    out, lse = step.run(open_pages=pages)
    tables: Any = (step.cache, step.cu_seqlens, step.table, step.seqlens)
    alone = torch.full_like(out, UNWRITTEN)
    _, alone_lse = ha.kv_cache.step(step.q, None, None, *tables, open_pages=pages, out=alone, return_lse=True)
    assert torch.equal(alone, out)
    seen = torch.cat([torch.arange(lse.size(1))[step.rows(b)] for b, (_, n) in enumerate(MIXED) if n >= 0])
    assert torch.equal(alone_lse[:, seen], lse[:, seen])
    closed = ha.kv_cache.step(step.q, None, None, *tables, out=torch.full_like(out, UNWRITTEN))
    assert not torch.equal(closed, out), "pages of the cache are not closed"


@BOTH
@pytest.mark.parametrize(("stored", "drafts"), [(0, 0), (0, 3), (256, 3)])
def test_a_prefix_that_comes_in_the_same_step(stored: int, drafts: int, recipe: ha.Recipe, device: str) -> None:
    """Two sequences read pages that a third one fills in this step, or that drafts left open before it."""
    sequences = [(5, 256), (301 - stored, stored), (9, 256)]
    together, apart = (make_step(sequences, device, recipe=recipe) for _ in range(2))
    for step in (together, apart):
        step.table[[0, 2], :2] = step.table[1, :2]
        for x in (step.k, step.v):
            x[[0, 2], :, :256] = x[1, :, :256]
        if stored:  # its last page stays open
            table, start = step.table[1:2].contiguous(), torch.zeros(1, dtype=torch.int32, device=device)
            ha.append_kvcache(step.cache, step.k[1:2, :, :stored], step.v[1:2, :, :stored], table, start, drafts=drafts)
    out, _ = together.run(drafts=drafts, num_splits=1)
    # First the one, then the others.
    for only in ([1], [0, 2]):
        seqlens = torch.full_like(apart.seqlens, -1)
        seqlens[only] = apart.seqlens[only]
        one = dataclasses.replace(apart, seqlens=seqlens)
        expected, _ = one.run(drafts=drafts, num_splits=1)
        for b in only:
            assert torch.equal(out[together.rows(b)], expected[together.rows(b)])
    for page in together.table[1, :2].tolist():
        for x, y in zip(cache_tensors(together.cache), cache_tensors(apart.cache), strict=True):
            assert torch.equal(x[page].view(torch.uint8), y[page].view(torch.uint8))


@BOTH
@pytest.mark.parametrize(("new", "stored"), [(257, 0), (256, 0), (1, 255)])
def test_a_prefix_that_drafts_would_keep_open(new: int, stored: int, recipe: ha.Recipe, device: str) -> None:
    """What another sequence has before its first new key is no draft: whose page it is closes it."""
    sequences = [(5, 256), (new, stored), (40, 256)]
    step = make_step(sequences, device, recipe=recipe)
    step.table[[0, 2], :2] = step.table[1, :2]
    for x in (step.k, step.v):
        x[[0, 2], :, :256] = x[1, :, :256]
    step.check(*step.run(drafts=3))
    assert torch.all(step.cache.k_descale[step.table[1, :2].long(), :, 1] < 0)


@BOTH
def test_pages_behind_the_window_are_others(recipe: ha.Recipe, device: str) -> None:
    """A page that a table lists, and no query sees any more, is not closed: another sequence begins to fill it."""
    window = (127, 0)
    steps = [make_step([(1, 383), (60, 0)], device, recipe=recipe) for _ in range(2)]
    steps[1].table[0, 1] = steps[1].table[1, 0]
    outs = [step.run(window=window, num_splits=1) for step in steps]
    steps[1].check(*outs[1], window=window)
    assert torch.equal(outs[0][0], outs[1][0])
    page = int(steps[1].table[1, 0])
    assert torch.all(steps[1].cache.k_descale[page, :, 1] >= 0), "the page is closed before it is full"


@BOTH
def test_fewer_new_tokens_than_drafts(recipe: ha.Recipe, device: str) -> None:
    """Keys that were there before cannot be rejected: pages that drafts left open are closed."""
    sequences = [(1, 128), (2, 127), (1, 256), (3, 300)]
    outs = []
    for drafts in (0, 3):
        step = make_step(sequences, device, recipe=recipe)
        for b, (_, stored) in enumerate(sequences):
            table, start = step.table[b : b + 1].contiguous(), torch.zeros(1, dtype=torch.int32, device=device)
            k, v = (x[b : b + 1, :, :stored] for x in (step.k, step.v))
            ha.append_kvcache(step.cache, k, v, table, start, drafts=drafts)
        outs.append(step.run(drafts=drafts, num_splits=1)[0][:7])
    assert torch.equal(outs[0], outs[1])


def test_rope(device: str) -> None:
    angles = torch.outer(torch.arange(600.0, device=device), 10.0 ** -torch.arange(0, 4, 4 / 32, device=device))
    rope = ha.Rope(angles.cos(), angles.sin())
    step, other = make_step(MIXED, device), make_step(MIXED, device)
    step.run(rope=rope)
    for b, (new, stored) in enumerate(MIXED):
        if new and stored >= 0:
            k, v = (x[other.rows(b)].unsqueeze(0) for x in (other.new_k, other.new_v))
            table, start = other.table[b : b + 1].contiguous(), torch.full_like(other.seqlens[:1], stored)
            ha.append_kvcache(other.cache, k, v, table, start, layout="bshd", rope=rope)
    for name, x in other.cache._tensors().items():
        assert torch.equal(getattr(step.cache, name).view(torch.uint8), x.view(torch.uint8)), name


def test_lengths_are_not_in_the_plan(device: str, monkeypatch: Any) -> None:
    """Other lengths, pages and padding, as many tokens and rows: one plan, and nothing is read on the host."""
    keys: set[Any] = set()
    remember = plans.remember

    def noted(key: Any, plan: Any) -> Any:
        keys.add(key)
        return remember(key, plan)

    monkeypatch.setattr(plans, "remember", noted)
    plans.forget()
    for sequences in ([(5, 0), (1, 200), (1, -1), (60, 10)], [(1, 130), (64, 0), (1, 3), (1, 250)]):
        step = make_step(sequences, device)
        table = torch.full((4, 4), -1, dtype=torch.int32, device=device)
        table[:, : step.table.size(1)] = step.table
        pool = [torch.cat((x, x[:1].repeat(16 - len(x), *[1] * (x.dim() - 1)))) for x in step.cache._tensors().values()]
        cache = ha.PagedKVCache(pool[0], pool[1], pool[2], pool[3], None, None, 64, 64)
        step = dataclasses.replace(step, table=table, cache=cache)
        step.check(*step.run(max_seqlen_q=64, max_seqlen_k=64))
    assert sum(isinstance(key, tuple) and key[0] == "kv_cache.step" for key in keys) == 1


def test_a_step_of_decodes_launches_nothing_for_prompts(device: str, monkeypatch: Any) -> None:
    step = make_step([(1, 200), (1, -1), (1, 10)] * 20, device)
    launched: list[str] = []
    remember = plans.remember

    def noted(key: Any, plan: Any) -> Any:
        launched.append(plan.kernels)
        return remember(key, plan)

    monkeypatch.setattr(plans, "remember", noted)
    step.check(*step.run(max_seqlen_q=1))
    assert ["fp8_attn_decode" in x for x in launched if "append_kv" in x] == [True]
    assert ["fp8_attn_prefill" in x for x in launched if "append_kv" in x] == [False]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_seqlen_q": 4}, r"max_seqlen_q is 4, and cu_seqlens gives sequence 0 5 tokens"),
        ({"seqlens": torch.tensor([4, 3], dtype=torch.int32)}, r"seqlens\[0\] is 4, and cu_seqlens gives .* 5 tokens"),
        ({"seqlens": torch.tensor([5, 999], dtype=torch.int32)}, r"seqlens\[1\] is 999; it must be at most 128"),
        ({"block_table": torch.tensor([[0], [9]], dtype=torch.int32)}, r"block_table\[1, 0\] is 9; it must lie in"),
        ({"block_table": torch.tensor([[1], [1]], dtype=torch.int32)}, r"block_table has page 1 for sequences 0 and 1"),
        ({"cu_seqlens": torch.tensor([0, 5, 9], dtype=torch.int32)}, r"cu_seqlens has 5 and 9"),
    ],
)
def test_debug_checks_values(changed: dict[str, Any], message: str) -> None:
    q, k = torch.randn(8, 4, 64), torch.randn(8, 2, 64)
    given: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, 5, 8], dtype=torch.int32),
        "block_table": torch.tensor([[1], [0]], dtype=torch.int32),
        "seqlens": torch.tensor([5, 3], dtype=torch.int32),
    }
    with ha.debug():
        ha.kv_cache.step(q, k, k, ha.paged_kv_cache(2, 2, 64), **given)
        with pytest.raises(ValueError, match=message):
            ha.kv_cache.step(q, k, k, ha.paged_kv_cache(2, 2, 64), **given | changed)


def test_which_kernel_takes_what() -> None:
    """Tiles of one new token and its drafts; none where these are as many rows as a prompt has."""
    found = [scheduling.decode_queries(group, drafts) for group, drafts in ((1, 0), (8, 0), (8, 1), (8, 3), (8, 7))]
    assert found == [16, 2, 2, 4, 0]


def test_opcheck(device: str) -> None:
    step = make_step([(1, 127), (70, 3)], device, behind=0)
    problem: Any = ha.kv_cache.step_problem
    for k, v in ((step.new_k, step.new_v), (None, None)):
        a = problem(step.q, k, v, step.cache, step.cu_seqlens, step.table, step.seqlens)
        # Not "test_schema": PyTorch does not compare numbers of 8 bits.
        checks = "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic"
        torch.library.opcheck(torch.ops.helion_attn.kv_cache_step, ops.step.values(a), test_utils=checks)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": None}, ValueError, r"k is None and v is not"),
        ({"q": torch.zeros(5, 3, 64)}, ValueError, r"q has 3 heads and the cache 2"),
        ({"q": torch.zeros(4, 4, 64)}, ValueError, r"k is \(5, 2, 64\) on cpu; with this cache and 4 tokens of q"),
        ({"q": torch.zeros(5, 4, 32)}, ValueError, r"q is \(5, 4, 32\) on cpu"),
        ({"cu_seqlens": torch.zeros(1, dtype=torch.int32)}, ValueError, r"cu_seqlens has shape \(1,\)"),
        ({"cu_seqlens": torch.zeros(3)}, TypeError, r"cu_seqlens has dtype torch.float32"),
        ({"seqlens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"seqlens has shape \(3,\); it must be \(2,\)"),
        ({"drafts": 65}, ValueError, r"drafts is 65; it must be an int in 0\.\.64"),
        ({"out": torch.zeros(5, 4, 32)}, ValueError, r"out is torch.float32 \(5, 4, 32\)"),
        (
            {"open_pages": ha.OpenPages(EMPTY, EMPTY, EMPTY, EMPTY, keys=3, drafts=3)},
            ValueError,
            r"open_pages\.drafts is 3; it must be 0",
        ),
        ({"open_pages": 3}, TypeError, r"open_pages is .* it must be None or"),
        ({"max_seqlen_q": 0}, ValueError, r"max_seqlen_q is 0"),
        ({"rope": ha.Rope(torch.ones(9, 32), torch.ones(9, 32)), "k": None, "v": None}, ValueError, r"rope is given"),
    ],
)
def test_what_it_refuses(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = ha.paged_kv_cache(4, 2, 64)
    given: dict[str, Any] = {
        "q": torch.zeros(5, 4, 64),
        "k": torch.zeros(5, 2, 64),
        "v": torch.zeros(5, 2, 64),
        "cache": cache,
        "cu_seqlens": torch.tensor([0, 4, 5], dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "seqlens": torch.tensor([4, 1], dtype=torch.int32),
    }
    with pytest.raises(error, match=message):
        ha.kv_cache.step(**{**given, **changed})


@pytest.mark.gpu
def test_a_graph_serves_other_batches() -> None:
    """Captured once, replayed with other lengths and pages."""
    batches = [make_step(x, "cuda") for x in ([(5, 0), (1, 200), (60, 10)], [(1, 130), (64, 0), (1, 250)])]
    first, second = batches
    pages = max(x.table.size(1) for x in batches)
    given = {x: getattr(first, x).clone() for x in ("q", "new_k", "new_v", "cu_seqlens", "seqlens")}
    table = torch.full((3, pages), -1, dtype=torch.int32, device="cuda")
    cache = ha.paged_kv_cache(16, 2, 64, device="cuda")
    out = torch.empty(first.q.shape, device="cuda")

    def call() -> None:
        ha.kv_cache.step(
            given["q"], given["new_k"], given["new_v"], cache, given["cu_seqlens"], table, given["seqlens"], out=out
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for step in (first, second):
        for name, x in given.items():
            x.copy_(getattr(step, name))
        table[:, : step.table.size(1)] = step.table
        for name, x in step.cache._tensors().items():
            getattr(cache, name)[: len(x)] = x
        out.fill_(UNWRITTEN)
        graph.replay()
        lse = torch.zeros(4, step.q.size(0), device="cuda")
        _, lse = ha.kv_cache.step(
            step.q, step.new_k, step.new_v, step.cache, step.cu_seqlens, step.table, step.seqlens, return_lse=True
        )
        step.check(out, lse)
