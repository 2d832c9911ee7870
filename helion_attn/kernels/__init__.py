"""Helion kernels, one algorithm a file."""
