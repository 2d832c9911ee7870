"""Chooses the configs of the attention kernels by timing them: `python -m devtools.tune`, on a Hopper GPU.

`candidates` says what is tried and on which workloads, `trial` compiles and times one, `journal` keeps every timing as
soon as it is known, and `table` chooses and writes the tables of `helion_attn.configs`.
"""
