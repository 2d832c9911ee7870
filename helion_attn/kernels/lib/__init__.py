"""Helpers that are inlined into the attention kernels, and into others, too."""
