"""How kernels are compiled and launched: Helion's adapter, the code cache, launches, the sm_90 compiler."""
