"""Gradients: training's own forward operations, which kernel runs their backward pass, and what it is handed."""

from helion_attn.backward.dense import attention_with_gradients
from helion_attn.backward.varlen import attention_varlen_with_gradients

__all__ = ["attention_varlen_with_gradients", "attention_with_gradients"]
