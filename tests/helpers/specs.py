"""What the attention kernel is compiled for where a test takes its helpers alone."""

from __future__ import annotations

from helion_attn.kernels.lib.specs import AttentionSpec

#: Of 8-bit P by bits, without a mask, in the interpreter.
SPEC = AttentionSpec(
    s_bias=0.0,
    max_fused_scale=1.0,
    p_offset_log2=8.0,
    q_row_descales=False,
    k_block_descales=False,
    v_channel_descales=False,
    shift_lse=False,
    has_left=False,
    has_right=False,
    has_softcap=False,
    has_sinks=False,
    keeps_reference=False,
    two_level=True,
    own_reference=True,
    p_bits=True,
    half_scores=False,
    in_halves=False,
    varlen=False,
    split=False,
    pack_gqa=False,
    group_log2=0,
    bn_log2=5,
    gathered=False,
    mirrored=False,
    same_places=True,
    bounded=False,
    listed=False,
    query=None,
    is_cuda=False,
)
