"""Benchmarks: a suite a file, with its measurement, table, plot and bounds, and the commands that run them."""
