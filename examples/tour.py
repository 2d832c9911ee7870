"""A tour of helion_attn: presets and their errors, a block mask, a plan, a check of tensors, what `auto` takes.

Runs on a Hopper GPU or, on small tensors in Helion's interpreter, on a CPU in seconds:

    python examples/tour.py [--device cuda] [--length 4096]
"""

from __future__ import annotations

import argparse

import torch

import helion_attn as ha
from helion_attn.testing import relative_error
from helion_attn.types import RecipeName

PRESETS: tuple[RecipeName, ...] = ("fast", "balanced", "accurate", "hybrid", "bf16")

#: No result is further from what it is compared with; a wrong one is off by 1 or so.
ERROR_BOUND = 0.15

HEADS, D = 1, 64


def errors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """Step 1: every preset's error against fp64."""
    exact = ha.reference.attention(q, k, v, causal=True)
    found = [relative_error(ha.attention(q, k, v, causal=True, recipe=preset), exact) for preset in PRESETS]
    print("1. Errors:", ", ".join(f"{preset} {error:.4f}" for preset, error in zip(PRESETS, found, strict=True)))
    return found


def block_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """Step 2: two documents in one sequence, compared with each of them alone."""
    middle = q.size(2) // 3
    ids = (torch.arange(q.size(2), device=q.device) >= middle).long()
    mask = ha.masks.documents(ids, causal=True)
    out = ha.attention(q, k, v, block_mask=mask)
    print(f"2. Two documents: {mask}")
    parts = slice(0, middle), slice(middle, None)
    alone = [ha.attention(q[:, :, part], k[:, :, part], v[:, :, part], causal=True) for part in parts]
    return [relative_error(out[:, :, part], own) for part, own in zip(parts, alone, strict=True)]


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """Step 3: what a call launches, as an object that runs it."""
    planned = ha.plan(q, k, v, causal=True)
    out = planned(q, k, v)
    assert isinstance(out, torch.Tensor), "no lse was asked for"
    same = torch.equal(out, ha.attention(q, k, v, causal=True))
    # Further in stands what each kernel is compiled for.
    steps = [line for line in str(planned).splitlines() if not line.startswith("    ")]
    print("3. A plan, whose output has the bits of a call:" if same else "3. A plan with other bits:", *steps, sep="\n")
    return [0.0 if same else 1.0]


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """Step 4: what makes tensors hard, here a channel of K with a large mean, as trained models have."""
    biased = k.clone()
    biased[..., 5] += 20
    found = ha.check(q, biased, v, causal=True, recipe="fast")
    print(f"4. {found}")
    return [found.errors["BALANCED"].total]


def auto(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[float]:
    """Step 5: 8 bits or PyTorch's attention, whichever was measured to be faster for such shapes."""
    (line,) = (line for line in str(ha.explain(q, k, v, causal=True, recipe="auto")).splitlines() if "auto" in line)
    print(f"5. {line.removeprefix('  why: ')}")
    out = ha.attention(q, k, v, causal=True, recipe="auto")
    return [relative_error(out, ha.reference.attention(q, k, v, causal=True))]


def main(argv: list[str] | None = None) -> int:
    """The tour; 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if ha.is_supported("cuda") else "cpu")
    parser.add_argument("--length", type=int, help="queries and keys (default 4096, on the CPU 300)")
    args = parser.parse_args(argv)
    length = args.length or (300 if args.device == "cpu" else 4096)
    torch.manual_seed(0)
    qkv = torch.randn(3, 1, HEADS, length, D, dtype=torch.bfloat16, device=args.device)
    found = [error for step in (errors, block_mask, plan, check, auto) for error in step(*qkv)]
    good = all(error <= ERROR_BOUND for error in found)  # not so for NaN
    print(f"{'ok' if good else 'WRONG'}: no result is further off than {max(found):.3f}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
