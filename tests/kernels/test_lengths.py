"""Every M and N: outputs start as NaN, and come back fully written and right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.configs import padded_head_dim, tile_config
from helion_attn.types import Layout
from helpers.cases import make_case

LENGTHS = (1, 17, 63, 64, 65, 111, 127, 128, 129, 200, 1000)
#: Each length once as M and once as N per row: equal, nearly equal, and far apart.
PAIRS = [(M, LENGTHS[(i + shift) % len(LENGTHS)]) for shift in (0, 1, 5, 8) for i, M in enumerate(LENGTHS)]

Poisoned = Callable[[], AbstractContextManager[None]]


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_poison_is_nan(dtype: torch.dtype, device: str, poisoned: Poisoned) -> None:
    x = torch.ones(8, device=device)
    with poisoned():
        for empty in (x.new_empty(8, dtype=dtype), torch.empty_like(x, dtype=dtype)):
            assert empty.float().isnan().all()


@pytest.mark.thorough(but=17)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("M", "N"), PAIRS, ids=lambda n: str(n))
def test_fully_written(M: int, N: int, causal: bool, device: str, poisoned: Poisoned) -> None:
    case = make_case(make_qkv("randn", 1, 2, 1, M, N, 32, device=device), causal)
    with poisoned():
        out, lse = case.run()
    assert not out.isnan().any()
    assert not lse.isnan().any()
    case.assert_within_budget(out)
    no_key = case.oracle_lse == float("-inf")
    assert torch.all(out[no_key] == 0)
    assert torch.equal(lse == float("-inf"), no_key)


@pytest.mark.thorough(but=7)
@pytest.mark.parametrize("D", [16, 33, 64, 100, 128, 200, 256])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_fully_written_around_blocks(D: int, layout: Layout, device: str, poisoned: Poisoned) -> None:
    tile = tile_config(padded_head_dim(D), True)
    M, N = tile.bm + 1, tile.bn + 1
    case = make_case(make_qkv("randn", 1, 2, 1, M, N, D, device=device), causal=True)
    given = case.qkv if layout == "bhsd" else [x.transpose(1, 2) for x in case.qkv]
    with poisoned():
        out = ha.attention(*given, causal=True, layout=layout)
    case.assert_within_budget(out if layout == "bhsd" else out.transpose(1, 2))
