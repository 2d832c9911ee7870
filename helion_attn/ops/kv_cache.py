"""`append_kv` and `fp8_attn_decode`: writing a paged cache, and attention over it, by one of two kernels."""

from __future__ import annotations

import torch

from helion_attn import public_calls
from helion_attn.compiler.buffers import sm_count
from helion_attn.configs import scheduling
from helion_attn.ops import flops
from helion_attn.ops.attention import empty_out_and_lse
from helion_attn.ops.declare import Operation
from helion_attn.problem import AppendArgs, DecodeArgs


def _launch_append(a: AppendArgs) -> None:
    from helion_attn.preprocess import append

    append.launch(a)


def empty_outputs(a: DecodeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` and `lse`."""
    B, H, M, _D = a.q.shape
    return empty_out_and_lse(a.q, (B, H, M), a.cache.D_v, a.bshd, a.out_dtype)


def _launch_decode(a: DecodeArgs) -> tuple[torch.Tensor, torch.Tensor]:
    from helion_attn.kernels import decode, prefill

    out, lse = empty_outputs(a)
    (B, H, M, _D), H_kv, max_pages = a.q.shape, a.cache.k8.size(1), a.block_table.size(1)
    queries, splits, sms = H // H_kv * M, a.splits, sm_count(a.q)
    # More splits than pages would all be empty. A split's index times the pages fits 32 bits.
    most = min(max_pages, (2**31 - 1) // max(1, max_pages))
    if queries >= scheduling.MIN_PREFILL_ROWS:
        tile = prefill.prefill_tile(a.cache)
        if splits is None:
            programs = B * H_kv * -(-queries // tile.bm) * prefill.parts_of_v(a.cache.v8.size(2))
            queries_of_tile = -(-tile.bm * H_kv // H) + 1
            pages = scheduling.visible_key_blocks(max_pages, a.scores.left, 0, queries_of_tile, a.cache.page_size)
            splits = scheduling.key_splits(programs, pages, sms, tile.ctas_per_sm, scheduling.MIN_PAGES)
        prefill.launch(a, min(splits, most), out, lse)
        return out, lse
    rows = scheduling.decode_rows(queries)
    if splits is None:
        # The last query sees no keys after its own.
        pages = scheduling.visible_key_blocks(max_pages, a.scores.left, 0, M, a.cache.page_size)
        ctas_per_sm = decode.decode_tile(a.cache, rows).ctas_per_sm
        splits = scheduling.page_splits(B, B * H_kv * -(-queries // rows), pages, sms, ctas_per_sm)
    decode.launch(a, rows, min(splits, most), out, lse)
    return out, lse


append_kv = Operation(
    "append_kv",
    AppendArgs,
    0,
    _launch_append,
    lambda a: None,
    mutates=("cache.k8", "cache.v8", "cache.k_descale", "cache.v_descale"),
    call=public_calls.of_append,
)
decode = Operation(
    "fp8_attn_decode",
    DecodeArgs,
    2,
    _launch_decode,
    empty_outputs,
    flops=flops.of_decode,
    call=public_calls.of_decode,
)
