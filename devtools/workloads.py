"""Named shapes, one table for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

#: The grid that FlashAttention-3's paper uses: tokens in a batch, and heads times head dim.
BENCH_TOKENS, BENCH_HIDDEN = 16384, 2048


@dataclass(frozen=True)
class Workload:
    """One attention call. `tags`: ci (small, ragged), bench (the speed grid), tune (picks configs), long (drift)."""

    name: str
    B: int
    H: int
    H_kv: int
    M: int
    N: int
    D: int
    causal: bool
    tags: frozenset[str]
    #: V's head dim, where it is another.
    D_v: int | None = None


def _bench(S: int, D: int, causal: bool) -> Workload:
    H = BENCH_HIDDEN // D
    tags = {"bench"} | ({"tune"} if S == 4096 else set())
    name = f"bench_d{D}_s{S}_{'causal' if causal else 'full'}"
    return Workload(name, BENCH_TOKENS // S, H, H, S, S, D, causal, frozenset(tags))


def _tune(B: int, D: int, causal: bool) -> Workload:
    H, S = BENCH_HIDDEN // D, 4096
    name = f"tune_d{D}_b{B}_{'causal' if causal else 'full'}"
    return Workload(name, B, H, H, S, S, D, causal, frozenset({"tune"}))


def _ci(name: str, B: int, H: int, H_kv: int, M: int, N: int, D: int, causal: bool) -> Workload:
    return Workload(name, B, H, H_kv, M, N, D, causal, frozenset({"ci"}))


WORKLOADS = (
    _ci("one_token", 1, 1, 1, 1, 1, 64, False),
    _ci("one_query", 2, 2, 2, 1, 200, 64, False),
    _ci("one_key", 1, 2, 2, 17, 1, 64, False),
    _ci("block_less_one", 1, 2, 2, 63, 127, 64, False),
    _ci("whole_blocks", 1, 2, 2, 64, 128, 128, False),
    _ci("block_more_one", 1, 2, 2, 65, 129, 128, False),
    _ci("ragged", 2, 2, 2, 111, 200, 128, False),
    _ci("ragged_causal", 2, 2, 2, 200, 200, 64, True),
    _ci("causal_square_blocks", 1, 2, 2, 256, 256, 128, True),
    _ci("causal_more_keys", 1, 2, 2, 63, 200, 128, True),
    _ci("causal_more_queries", 1, 2, 2, 200, 111, 64, True),
    _ci("causal_one_query", 1, 2, 2, 1, 200, 64, True),
    _ci("gqa", 1, 6, 2, 65, 200, 64, False),
    _ci("mqa_causal", 2, 4, 1, 111, 129, 64, True),
    _ci("d16", 1, 2, 2, 63, 65, 16, False),
    _ci("d32_causal", 1, 2, 2, 111, 111, 32, True),
    _ci("d48", 1, 2, 2, 65, 129, 48, False),
    _ci("d80_causal", 1, 2, 1, 129, 129, 80, True),
    _ci("d192", 1, 2, 2, 129, 200, 192, False),
    _ci("d256", 1, 2, 2, 129, 200, 256, False),
    _ci("d256_causal", 1, 2, 1, 200, 300, 256, True),
    *(
        _bench(S, D, causal)
        for causal in (False, True)
        for D in (64, 128, 256)
        for S in (512, 1024, 2048, 4096, 8192, 16384)
    ),
    # Beside the benchmark's four: launches of two to sixty query blocks of 128 an SM.
    *(_tune(B, D, causal) for causal in (False, True) for D in (64, 128, 256) for B in (1, 2, 16)),
    *(
        Workload(f"long_d{D}_n{N}", 1, 8, 8, 128, N, D, False, frozenset({"long"}))
        for D in (64, 128, 256)
        for N in (4096, 32768, 131072)
    ),
)


def tagged(tag: str) -> list[Workload]:
    """The workloads with `tag`, in table order."""
    return [workload for workload in WORKLOADS if tag in workload.tags]
