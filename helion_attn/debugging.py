"""`debug`: values on the device are checked, calls are held to those before them, and a bad one is saved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from helion_attn import report
from helion_attn.debug_state import SEEN, Seen


@contextlib.contextmanager
def debug(*, save: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Inside, calls also check what lies on the device, and raise where they would otherwise give NaN, 0 or nonsense.

    Checked are `cu_seqlens` (ascending, within the tokens, no lengths in their place), `cache_seqlens` and `seqlens`
    (within what the block table holds), `block_table` (pages of the pool; of an append, none that is written twice),
    positions of a `Rope`, and descales of `flash_attn_func`. Every call reads them on the host, which waits for the
    device: leave the context where speed counts. It holds for the thread that entered it. Code that torch.compile
    compiled is not checked.

    Calls are also held to those before them in the same context: `attention_kvcache` to the last `append_kvcache`
    (`cache_seqlens` that do not count its keys, a q whose heads are as many as its keys), and
    `helion_attn.distributed`'s attention and `unshard` to the `balance` of `shard` and `positions`.

    With `save`, the output of every call is examined, of compiled code too, and the first bad call is written to a file
    with its tensors, options and output, and the versions. `python -m helion_attn replay FILE` makes it again.

    A call is bad if its output is not finite. Otherwise 64 random rows of up to 8 heads are held against fp64 attention
    on the same inputs, and against the rounding model (`helion_attn.reference.fp8_attention`), which rounds where the
    kernel does. The call is bad if the error, ||out - exact|| / ||exact|| of these rows or of the worst one, is more
    than 1.5 times the model's, plus what the output's dtype and the tensor core add: then the kernel is at fault. It is
    also bad if the error of these rows is more than 0.25: then the tensors are hard for the recipe, and
    `helion_attn.check` says why.

    In packed sequences and a cache, the first 8 sequences are looked at, and tokens of no sequence are left out. What
    `attention_quantized` and `attention_kvcache` are given is in 8 bits already: exact is fp64 attention on that, and
    0.25 the only bound. Of a cache, the file has the pages in the block table. `kv_cache.step`, PyTorch's attention,
    which recipe="auto" may choose, and `helion_attn.distributed`'s are not examined.

    Args:
        save: a folder. The file is named in a warning of `logging.getLogger("helion_attn")`.

    Raises:
        TypeError: `save` is no path.
        ValueError: `save` is no folder.
        RuntimeError: a call inside is captured in a CUDA graph, where nothing can be read.

    The calls inside raise ValueError, naming the argument, its value and what is accepted.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        with ha.debug():
            out = ha.attention(q, k, v)
    """
    token = SEEN.set(Seen(save=None if save is None else _folder(save), examine=report.examine))
    try:
        yield
    finally:
        SEEN.reset(token)


def _folder(save: str | os.PathLike[str]) -> Path:
    if not isinstance(save, (str, os.PathLike)):
        raise TypeError(f"save is {save!r}; it must be the path of a folder")
    if not (folder := Path(save)).is_dir():
        raise ValueError(f"save is {str(folder)!r}, which is no folder; make it first")
    return folder
