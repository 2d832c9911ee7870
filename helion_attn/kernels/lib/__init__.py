"""Helpers that are inlined into the attention kernels."""
