"""What the attention kernel is compiled for where a test takes its helpers alone."""

from __future__ import annotations

from helion_attn.kernels.lib.specs import AttentionSpec
from helion_attn.options import ScoreOptions

#: Of 8-bit P by bits, without a mask, in the interpreter.
SPEC = AttentionSpec(
    s_bias=0.0,
    max_fused_scale=1.0,
    p_offset_log2=8.0,
    q_row_descales=False,
    k_block_descales=False,
    v_channel_descales=False,
    scores=ScoreOptions().spec(has_lse_shift=False),
    two_level=True,
    block_max=True,
    is_cuda=False,
    schraudolph_exp2=True,
    bn_log2=5,
    same_kv_layout=True,
)
