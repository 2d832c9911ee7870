"""The constants of the numerics contract, and their only home."""

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

#: Largest finite float8_e4m3fn.
E4M3_MAX = 448.0

#: Values past this round to infinity, and float8_e4m3fn has none: the kernel gives NaN (464 ties to even, down to 448).
E4M3_OVERFLOW = 464.0

#: P is stored as P * 2**P_OFFSET_LOG2. Its maximum, 1, becomes 256, the largest power of two in e4m3, and its
#: smallest subnormal, 2**-9, stands for 2**-17.
P_OFFSET_LOG2 = 8.0

#: A descale is at least this, so that its reciprocal stays finite when a head is all zeros (or all subnormal).
DESCALE_MIN = 2.0**-126
