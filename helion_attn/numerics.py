"""The constants of the numerics contract, and their only home."""

import math

import torch

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

#: Smallest normal fp32.
FP32_TINY = 2.0**-126

#: Largest finite float8_e4m3fn.
E4M3_MAX = 448.0

#: Values past this round to infinity, and float8_e4m3fn has none: the kernel gives NaN (464 ties to even, down to 448).
E4M3_OVERFLOW = 464.0

#: Largest finite float8_e5m2.
E5M2_MAX = 57344.0

#: Largest int8 that is used: -128 is not, so that the range is symmetric.
INT8_MAX = 127.0

#: What the largest magnitude becomes, by the dtype that a tensor is quantised to.
FORMAT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX, torch.int8: INT8_MAX}

#: What the kernel's int8 scores are too large by: 1.5 * 2**23, from where on floats are the integers.
INT8_SCORE_BIAS = 12582912.0

#: The largest scale of a score, in base 2, up to which one FMA scales it and subtracts the maximum; beyond, each score
#: is scaled first, and rounded. Of int8, the bias times the scale has too few bits left: exponents are off by up to
#: 0.75 of the scale, here 0.0004. Of e4m3, whose products stay below 448**2 * 1024, the maximum has: rounded, it lies
#: up to its last digit, here 1, above the scores. `fp8_attn_fwd_large_d` has no bias, and takes that for int8 as well,
#: whose products are smaller. Of 16 bits nothing bounds them: see `MAX_FUSED_SCORE_LOG2`.
MAX_FUSED_SCALE_LOG2 = {
    torch.int8: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.bfloat16: math.inf,
    torch.float16: math.inf,
}

#: The same of scores in fp16, which end at 65504: up to here a line's offset, 8 times a score in base 2, is rounded by
#: 4 steps of e4m3 at most, and the largest P has 6 to spare.
MAX_FUSED_HALF_SCALE_LOG2 = 2.0**-5

#: Largest finite fp16.
FP16_MAX = 65504.0


def e4m3_up_to(x: float) -> float:
    """The largest e4m3 number that is not above x, which is not below 2**-6."""
    step = 2.0 ** (math.floor(math.log2(x)) - 3)
    return min(step * math.floor(x / step), E4M3_MAX)


def largest_for_half_scores(d: int) -> float:
    """The largest e4m3 number of which `d` squares have a sum that fp16 holds."""
    return e4m3_up_to(math.sqrt(FP16_MAX / d))


#: Where no score is scaled first, that is with 16-bit Q and K, a row whose largest score lies further from 0 than this,
#: in base 2, becomes NaN; where its keys are split, whose largest score of any run. The maximum's last digit is 4 here,
#: and P still precise.
MAX_FUSED_SCORE_LOG2 = 2.0**26

#: The largest offset by P's dtype, which is also the default: 2**15 is the largest power of two in e5m2 and in fp16.
#: bf16 has the range of fp32 and needs none.
MAX_P_OFFSET_LOG2 = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15, torch.bfloat16: 0, torch.float16: 15}

#: A descale is at least this, so that its reciprocal stays finite when a head is all zeros (or all subnormal).
DESCALE_MIN = FP32_TINY

#: Keys of a head, at most, that are known before K and V are read (`preprocess.sample`).
SAMPLED_KEYS = 256

#: Descales of V fit entries of so many times what the sample has: of a head, whose sample has all channels, and of a
#: channel, of whose outliers 256 keys may have none. e4m3 has 15 octaves of full resolution: three to spare cost none,
#: and six none where entries are of one kind.
SAMPLED_HEADROOM = {"head": 8.0, "channel": 64.0}

#: The mean of a sampled channel of K or V is subtracted if it is more than this times the sample's range over the root
#: of its size: of 256 from N(0, 1), four standard errors. What stands out less is noise, or an outlier's, and would
#: only add to small entries, such as those of V at an attention sink.
SIGNIFICANT_MEAN = 0.7

#: A channel has a factor if the ratio of its sizes is this, over the sampled rows, octaves off the mean of channels, or
#: more. Of 16 Gaussian rows 3 channels in 100,000 are so by chance, of 32 some 7 in 10,000; of 64, where all that would
#: not round to 1 have one, 6 in 100,000.
SIGNIFICANT_RATIO_LOG2 = 40.0

#: Factors of channels lie in 2**-32..2**32.
MAX_CHANNEL_FACTOR_LOG2 = 32.0


def equalised_rows(d_row: int, is_transformed: bool) -> int:
    """Rows of Q, and pairs of rows of K, whose sizes give the factors of channels; fewer where they are transformed.

    They are what a program has in registers.
    """
    return min(64, max(16, (4096 if is_transformed else 8192) // d_row))


def equalised_queries(group: int, rows: int) -> tuple[int, int]:
    """How many heads of a group these rows of Q are of, the first ones, and how many queries of each: four or more."""
    heads = min(group, rows // 4)
    return heads, rows // 2 // heads * 2


#: From so many keys of a sequence on, the mean of an 8-bit V is corrected for its rounding (`preprocess.recentre`). At
#: 4096 keys that would save 5 to 12% of the total error of N(0, 1), for 3% of the time from bf16 to bf16; at 131072 it
#: saves 19 to 57%, for 0.1%.
RECENTRED_KEYS = 8192

#: What is this much larger than a format's largest number still rounds to it.
ROUNDS_TO_LARGEST = 1.03

#: The largest block of a Hadamard rotation: its matrix takes 32 KB of a kernel's shared memory, the next one 128.
MAX_HADAMARD_BLOCK = 128

#: Channels that a reflection mixes: I - J/2, J all ones, is orthogonal of this order alone.
REFLECTED_GROUP = 4


def reflected_channels(D: int) -> int:
    """How many channels of a head dim are in whole groups; the others stay."""
    return D // REFLECTED_GROUP * REFLECTED_GROUP


#: The largest seed of a rotation: an op's ints have 64 bits, and a sign.
MAX_SEED = 2**63 - 1

#: The running maximum of a row that has seen no key: finite, so that masked scores, -inf, have P = 0 against it, and so
#: that `E4M3_STEPS` of it are.
NO_KEY = -(2.0**123)

#: How far P's reference, the maximum of the block at hand, may lie below the running one. Sums against it are up to
#: 2**40 times what they are against that, and fp32 holds them.
REFERENCE_REACH_LOG2 = 40.0

#: The same of a page of a KV cache, whose maximum is of weights: probabilities times V's descale. Further below, no key
#: has 2**-20 of the largest probability, since descales differ by 2**52 at most (`MAX_V_DESCALE_LOG2`).
PAGE_REFERENCE_REACH_LOG2 = 72.0

#: Steps of e4m3's bits by octave.
E4M3_STEPS = 8.0

#: The bits of e4m3 at 2**0, less 8 times the mean of log2(1 + f) - f, which is 1.5 - log2(e): where a line of
#: `E4M3_STEPS` an octave passes, so that 2**x and what its bits stand for agree on average (Schraudolph, Neural
#: Computation 11(4), 1999). To the nearest sixteenth, 55.5625: fp16 has no finer steps at the largest P's 119.5625.
E4M3_BITS_OF_ONE = round(16.0 * E4M3_STEPS * (7.0 - (1.5 - LOG2E))) / 16.0

#: The smallest and largest of fp16 that a line from scores in fp16 has.
FP16_TINY, FP16_LARGE = 2.0**-24, 60000.0

#: Descales of e4m3 keys of a KV cache have a finite reciprocal, and fit all of fp32.
MIN_K_DESCALE_LOG2, MAX_K_DESCALE_LOG2 = -126, 120

#: What marks a page of a KV cache as closed, in slot 1 of its descales, which are not negative.
CLOSED = -1.0

#: Descales of int8 keys of a KV cache end at two to this: scores are then fp32's.
MAX_INT8_K_DESCALE_LOG2 = 93

#: The largest score of 256 channels in a KV cache, by the dtype of its keys.
MAX_PAGE_SCORE = {torch.float8_e4m3fn: E4M3_MAX**2 * 256, torch.int8: INT8_MAX**2 * 256}

#: Up to where one FMA takes scores in base 2 to P: there, an offset in e4m3's steps is rounded by 1, and the largest P
#: has 6 to spare.
MAX_PAGE_SCORE_LOG2 = 2.0**21

#: V's descales in a KV cache lie in 2**-26..2**26. Row sums are divided by them, and fp32 holds that, 2**28 numbers of
#: them, 2**`PAGE_REFERENCE_REACH_LOG2` times.
MAX_V_DESCALE_LOG2 = 26

#: The largest sum of a row's P, where its reference is the maximum of its first block, not the running one. A larger
#: limit is passed more rarely, and leaves V less room before P V overflows: here its entries below 2**63 are safe.
MAX_ROW_SUM = 2.0**64

#: Up to this head dim a row keeps its reference; at 256 the products, not the softmax, are what takes long.
MAX_REFERENCE_D = 128


def first_block_max(qk_dtype: torch.dtype, pv_dtype: torch.dtype, d: int) -> bool:
    """Whether P's reference is the maximum of the first block that a row sees; `d` the larger head dim, padded or not.

    bf16 has the range for it. It rounds the largest P of a later block, which against that block's own maximum it would
    not; that is little beside 8-bit scores, but the largest part of the error where no input has 8 bits.
    """
    return qk_dtype.itemsize == 1 and pv_dtype == torch.bfloat16 and d <= MAX_REFERENCE_D


#: Up to this head dim P's bits come from scores: beyond, the products, not the softmax, are what takes long.
MAX_BITS_D = 128


def takes_bits(pv_dtype: torch.dtype, d: int) -> bool:
    """Whether the bits of a P that is summed in two levels come from the scores; `d` as in `first_block_max`."""
    return pv_dtype == torch.float8_e4m3fn and d <= MAX_BITS_D
