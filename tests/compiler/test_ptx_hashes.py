"""Shipped kernels have the PTX whose hashes are in the repository: a sample here, all by scripts/ptx_hashes.py."""

from __future__ import annotations

import pytest

from helion_attn.compiler.versions import MEASURED_SERIES
from helpers import ptx
from helpers.offline import MEASURED, TORCH

#: One of each kernel, and none that another test does not compile, too.
SAMPLE = [
    "attention fast D64 causal <=inf",
    "attention balanced D128 full <=inf",
    "decode D128",
    "quantize balanced D128",
]

pytestmark = pytest.mark.skipif(not MEASURED, reason=f"the hashes are of Triton {MEASURED_SERIES} and PyTorch {TORCH}")


@pytest.mark.thorough(but=2)
@pytest.mark.parametrize("name", SAMPLE)
def test_kernels_have_the_ptx_of_the_hashes(name: str) -> None:
    assert ptx.hashes(ptx.cases()[name]) == ptx.stored()[name]


def test_every_case_has_its_hashes() -> None:
    assert list(ptx.stored()) == list(ptx.cases())


def test_comments_and_lines_do_not_count() -> None:
    code = "\tadd.s32 %r1, %r2, %r3; // one\n\n\t.loc 1 2 3\n"
    assert ptx.digest(code) == ptx.digest("\tadd.s32 %r1, %r2, %r3;\n\t.section\t.debug_str\nx")
    assert ptx.digest(code) != ptx.digest(code.replace("add", "sub"))
