"""FP8 attention on random bf16 tensors: checked against fp64, and on a Hopper GPU timed.

Every shape runs full and causal. The error is ||out - ref|| / ||ref||, against the fp64 oracle on the
unquantised inputs, and on a GPU also against the same attention written with `torch._scaled_mm`, which is
what one would do without a kernel. Fails if an error exceeds its bound. With no GPU the same kernels run in
Helion's interpreter, which is slow: there, the shapes are smaller.

    python examples/fp8_attention.py [--device cuda] [--shape 2,4,256,64]...
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from triton.testing import do_bench

import helion_attn as ha
from helion_attn.testing import relative_error

#: (B, H, S, D)
SHAPES_GPU = [(1, 2, 128, 64), (2, 4, 256, 64), (4, 8, 512, 128), (4, 16, 4096, 128)]
SHAPES_CPU = [(1, 2, 128, 64), (2, 2, 256, 64), (1, 2, 512, 128), (1, 1, 1024, 64)]

#: Rounding to e4m3 changes numbers by 2.6% (root mean square). Q and K both change: the logits, of variance
#: 1, err by 3.7%, and P with them; then P and V are rounded. Together, sqrt(3.7**2 + 2 * 2.6**2) = 5.2%.
ERROR_BOUND = 0.07

#: Both sides err by as much, in part through the same roundings.
SCALED_MM_BOUND = 0.1


@dataclass(frozen=True)
class Row:
    """A line of the table. Without a GPU there is no time (ms) and no `torch._scaled_mm` to compare with."""

    shape: tuple[int, int, int, int]
    causal: bool
    error: float
    error_scaled_mm: float = 0.0
    ms_kernel: float = 0.0
    ms_total: float = 0.0  # with quantisation

    @property
    def ok(self) -> bool:
        """Whether both errors are within their bounds; nan is not."""
        return self.error <= ERROR_BOUND and self.error_scaled_mm <= SCALED_MM_BOUND

    @property
    def tflops(self) -> float:
        """Of the kernel alone. A causal one does half of the work."""
        B, H, S, D = self.shape
        return 4 * B * H * S * S * D / (2 if self.causal else 1) / self.ms_kernel / 1e9


def run(shape: tuple[int, int, int, int], causal: bool, device: str, advance: Callable[[int], None]) -> Row:
    """Check one shape, and on a GPU time it. Calls `advance` with how many more of the B sequences are done."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    B = shape[0]
    # One sequence at a time in the interpreter, so that there is progress to see.
    step = 1 if device == "cpu" else B
    out = torch.empty_like(q)
    for b in range(0, B, step):
        some = slice(b, b + step)
        out[some] = ha.attention(q[some], k[some], v[some], causal=causal)
        advance(step)
    error = relative_error(out, ha.reference.attention(q, k, v, causal=causal))
    if device == "cpu":
        return Row(shape, causal, error)

    scaled_mm = ha.reference.scaled_mm_attention(q, k, v, causal=causal)
    qkv = ha.quantize(q, k, v)
    return Row(
        shape,
        causal,
        error,
        error_scaled_mm=relative_error(out, scaled_mm),
        ms_kernel=do_bench(lambda: ha.attention_quantized(qkv, causal=causal), return_mode="median"),
        ms_total=do_bench(lambda: ha.attention(q, k, v, causal=causal), return_mode="median"),
    )


def make_table(rows: list[Row], device: str) -> Table:
    """The rows, with the columns that only a GPU fills if it did."""
    gpu = device != "cpu"
    where = torch.cuda.get_device_name(device) if gpu else "the CPU (interpreter)"
    table = Table(title=f"FP8 attention on {where}", box=box.SIMPLE, padding=(0, 0, 0, 1))  # fits 80 columns
    columns = ["B,H,S,D", "mask", f"error to\nfp64\n<= {ERROR_BOUND}"]
    if gpu:
        columns += [f"error to\nscaled_mm\n<= {SCALED_MM_BOUND}", "kernel\nms", "TFLOP/s", "total\nms"]
    for column in [*columns, ""]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = [",".join(map(str, row.shape)), "causal" if row.causal else "full", f"{row.error:.4f}"]
        if gpu:
            cells += [f"{row.error_scaled_mm:.4f}", f"{row.ms_kernel:.3f}", f"{row.tflops:.0f}"]
            cells += [f"{row.ms_total:.3f}"]
        table.add_row(*cells, "[green]ok" if row.ok else "[red]FAILED")
    return table


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Parse `B,H,S,D`."""
    B, H, S, D = map(int, text.split(","))
    return B, H, S, D


def main(argv: list[str] | None = None) -> int:
    """Check (and on a GPU time) every shape; return 1 if an error exceeds its bound."""
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda" if on_hopper else "cpu")
    parser.add_argument(
        "--shape", type=parse_shape, action="append", metavar="B,H,S,D", help="run this one; repeatable"
    )
    args = parser.parse_args(argv)
    if args.device == "cpu":
        torch.set_num_threads(1)  # the interpreter's tiles are so small that threads only get in its way
    shapes = args.shape or (SHAPES_CPU if args.device == "cpu" else SHAPES_GPU)

    console = Console()
    rows = []
    with Progress(console=console, transient=True) as progress:
        for shape in shapes:
            for causal in (False, True):
                task = progress.add_task(f"{shape} {'causal' if causal else 'full'}", total=shape[0])
                rows.append(run(shape, causal, args.device, partial(progress.advance, task)))
    console.print(make_table(rows, args.device))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
