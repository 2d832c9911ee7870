"""The attention kernels, one algorithm a file; `lib` holds what is inlined into them."""
