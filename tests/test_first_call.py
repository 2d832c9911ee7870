"""A process's first call: it tunes nothing, and prints and warns of nothing."""

from __future__ import annotations

import subprocess
import sys

CALL = """
import sys
import torch
import helion_attn as ha
q = torch.randn(1, 2, 70, 64, device=sys.argv[1])
out, lse = ha.attention(q, q, q, causal=True, return_lse=True)
assert out.isfinite().all() and lse.isfinite().all()
"""


def test_a_first_call_says_nothing(device: str) -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", CALL, device], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
