"""Attention over a sequence that several ranks hold, on `torch.distributed`. Imported on first use.

`api` has the functions, `cut` says which tokens a rank holds, `collectives` and `header` what ranks send each other,
and `buffer` what of K and V. A strategy is a file: `allgather`, `ulysses`, `ring`.
"""

from helion_attn.distributed.api import attention, positions, shard, unshard

__all__ = ["attention", "positions", "shard", "unshard"]
