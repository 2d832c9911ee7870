"""Helpers that are inlined into the preprocessing kernels."""
