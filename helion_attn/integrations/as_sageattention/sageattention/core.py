"""The functions under SageAttention's inner name, which some tools import."""

from helion_attn.integrations.as_sageattention.sageattention import *  # noqa: F403
