"""Attention over a sequence that several ranks hold, on `torch.distributed`. Imported on first use.

`api` has the functions, `cut` says which tokens a rank holds, `collectives` and `header` what ranks send each other,
and `buffer` what of K and V. A strategy is a file: `allgather`,
`ulysses`, `ring`; `packed` is what packed sequences add to the first.
"""

from helion_attn.distributed.api import (
    Sharding,
    attention,
    attention_varlen,
    positions,
    shard,
    sharding,
    unshard,
)

__all__ = ["Sharding", "attention", "attention_varlen", "positions", "shard", "sharding", "unshard"]
