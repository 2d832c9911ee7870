"""`python -m helion_attn`: what is installed, whether a GPU has verified it, and what is lost if not."""

from __future__ import annotations

import importlib.metadata
import platform

import torch
import triton

from helion_attn.compiler.versions import MEASURED_SERIES, VERIFIED_TORCH, known_triton, series


def device() -> str:
    """The GPU that runs the kernels here, or the reason why none does."""
    if not torch.cuda.is_available():
        return "none: CPU tensors run in Helion's interpreter"
    major, minor = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return name if (major, minor) == (9, 0) else f"{name}: not supported, it must be 9.0 (H100, H200)"


def report() -> list[tuple[str, str]]:
    """Labels and what to say of each."""
    known = known_triton()
    if known is None:
        verified = "no: no GPU has run this Triton"
        lost = "the passes, which costs 3 to 23% more time, and repeated launches, which cost the host less"
    else:
        combined = series(torch.__version__) == VERIFIED_TORCH
        verified = f"{'yes' if combined else f'no, but with torch {VERIFIED_TORCH}'}: {known.verified}"
        lost = known.lost
    return [
        ("helion_attn", importlib.metadata.version("helion_attn")),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("Triton", f"{triton.__version__} (figures are of {MEASURED_SERIES})"),
        ("Helion", importlib.metadata.version("helion")),
        ("GPU", device()),
        ("verified", verified),
        ("lost", lost),
    ]


def main() -> None:
    """Print the report."""
    rows = report()
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label:<{width}}  {text}")


if __name__ == "__main__":
    main()
