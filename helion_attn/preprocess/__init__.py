"""The kernels that run before attention, one a file; `lib` holds what is inlined into them."""
