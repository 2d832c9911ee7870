"""The frozen dataclasses of the public API."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from typing_extensions import Self

from helion_attn.numerics import FORMAT_MAX, MAX_P_OFFSET_LOG2, MAX_SEED, largest_for_half_scores, takes_bits

#: How the axes of [B, H, S, D] and [B, S, H, D] tensors are named.
Layout: TypeAlias = Literal["bhsd", "bshd"]

#: Names of `PRESETS`, in capitals or not.
RecipeName: TypeAlias = Literal[
    "fast", "balanced", "accurate", "hybrid", "bf16", "FAST", "BALANCED", "ACCURATE", "HYBRID", "BF16"
]

#: The default preset or PyTorch's own attention, whichever is faster (`helion_attn.auto`).
Auto: TypeAlias = Literal["auto", "AUTO"]

#: How several ranks share a call's work, and how `distributed.shard` cuts a sequence.
Strategy: TypeAlias = Literal["allgather", "ulysses", "ring"]
Balance: TypeAlias = Literal["zigzag"] | None

#: What `Recipe` accepts, by field.
RECIPE_CHOICES: dict[str, tuple[object, ...]] = {
    "qk_dtype": (torch.float8_e4m3fn, torch.int8, torch.bfloat16, torch.float16),
    "pv_dtype": (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16),
    "q_scales": ("block", "token", "none"),
    "k_scales": ("head", "block", "none"),
    "v_scales": ("head", "channel", "none"),
    "equalise": (False, True),
    "hadamard": (False, True),
    "reflect": (False, True),
    "smooth_k": (False, True),
    "center_v": (False, True),
    "half_scores": (False, True),
    "promote_every": (None, 0, 1),
}


#: What an error says of fields that were set by `Recipe.resolved`.
RESOLVED = "of packed tensors, change the recipe that they were made with: in theirs no field is None"

#: The default of a field of `Recipe` that follows from the others; `Any`, since `Recipe.resolved` has a value instead.
IMPLIED: Any = None


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Recipe:
    """How Q, K, V and P become 8- or 16-bit numbers. A choice does not depend on the others, unless it says so.

    Without arguments it is `BALANCED`. Fields whose default is None follow from the others, and stay None:
    `dataclasses.replace(ha.BALANCED, pv_dtype=torch.bfloat16)` is `HYBRID`. `resolved` has their values:
    `ha.BALANCED.resolved.smooth_k` is True. Recipes are equal that do the same. Printed, a preset is its name, and
    another recipe what differs from `BALANCED`.

    Attributes:
        qk_dtype: of Q and K. float8_e4m3fn, or int8: a finer grid and exact sums of products. int8 needs descales of
            rows or blocks. bfloat16 and float16 need a 16-bit `pv_dtype`.
        pv_dtype: of P and V. float8_e4m3fn, or float8_e5m2: more range, half the resolution. With bfloat16 or float16
            and an 8-bit `qk_dtype` this is the hybrid of FlashAttention-3's authors at Colfax Research: the second
            product takes twice the time, and its rounding all but vanishes. 16 bits take head dims up to 256. float16,
            here and for Q and K, ends at 65504: what is larger, also once it is rotated, becomes infinite.
        q_scales: what shares a descale: a packed block of `bm` rows, or a row ("token"). Here and below, "none" is for
            16-bit numbers, which are cast as they are, and only for them. None: "none" for them, otherwise "token".
        k_scales: a packed block of `bn` keys. "head" is for what `pack` was given: nothing quantises K so. None: "none"
            or "block".
        v_scales: a head, or a channel of a head over all keys. None: "none" or "head".
        equalise: multiply each channel of Q, and divide that of K, by a power of two, per (batch, KV head, channel), so
            that both have like sizes (SmoothQuant, arXiv:2211.10438, does so between activations and weights). Q K^T is
            the same, and channels of K that are much larger than the others leave those their resolution. Sizes are
            of at most 64 rows of Q and 64 differences of rows of K, evenly spaced; one query or key gives none, and of
            few rows only large ratios count. It comes after norms and RoPE, and before `hadamard` and `reflect`. None:
            for 8-bit Q and K.
        hadamard: rotate Q and K over the head dim, by random signs and a Hadamard matrix (QuIP, arXiv:2307.13304;
            FlashAttention-3, arXiv:2407.08608, section 3.3). Q K^T is the same, and an outlier is spread over all
            channels of a block: as many as the largest power of two up to 128 that divides the head dim, which
            must be even.
        hadamard_seed: of the signs; 0..2**63 - 1.
        reflect: from every four consecutive channels of Q and K subtract half of their sum. I - J/2, J all ones, is a
            Householder reflection, and for four channels a Hadamard transform: Q K^T is the same, an outlier is spread
            over four channels, and what four have in common keeps its size. A few additions, so nearly free; not
            beside `hadamard`, which mixes more. The last D % 4 channels stay. Four whose sum is beyond fp32 become NaN.
            None: for 8-bit Q and K that are not rotated.
        smooth_k: subtract K's mean over keys, per (batch, KV head, channel), before quantising (SageAttention,
            arXiv:2410.02367). It moves all scores of a row alike; `lse` is corrected. It is the mean of at most 256
            keys, evenly spaced, and 0 where it does not stand out of their noise: any constant would be exact. None:
            for 8-bit Q and K.
        center_v: subtract the mean of such a sample of V, per (batch, KV head, channel), before quantising, and add it
            back in the epilogue. Rows of softmax sum to 1, so the result is the same, and 8 bits go to what varies.
            From 8192 keys on (in a packed batch: of one sequence), with 8-bit V, the mean that is added back is
            corrected for what rounding did to it. None: for 8-bit V.
        half_scores: scores are summed in fp16, two to a register, where Q, K, P and V are e4m3 and head dims at most
            128: the fastest softmax. Q and K are then scaled so that no sum overflows, which costs them range, and not
            precision; a scale of scores is rounded to fp16.
        promote_every: P V is summed in fp32 after every so many key blocks: 1, or 0 for never, inside the tensor core.
            None: 1, and 0 for 16-bit P and V, which the tensor core sums in fp32.
        p_offset_log2: P, at most 1, is stored times two to this. None: 8 for e4m3, 15 for e5m2 and fp16, 0 for bf16,
            which are the largest.

    Raises:
        ValueError: a field has a value that it does not accept, or two fields contradict each other.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        recipe = ha.Recipe(qk_dtype=torch.float8_e4m3fn, hadamard=True)
        out = ha.attention(q, k, v, recipe=recipe)
    """

    qk_dtype: torch.dtype = torch.int8
    pv_dtype: torch.dtype = torch.float8_e4m3fn
    q_scales: str = IMPLIED
    k_scales: str = IMPLIED
    v_scales: str = IMPLIED
    equalise: bool = IMPLIED
    hadamard: bool = False
    hadamard_seed: int = 0
    reflect: bool = IMPLIED
    smooth_k: bool = IMPLIED
    center_v: bool = IMPLIED
    half_scores: bool = False
    promote_every: int | None = None
    p_offset_log2: int | None = None

    def __post_init__(self) -> None:
        given = self._asked()
        missing = {name: value for name, value in self._implied().items() if given[name] is None}
        # Made here, and not when asked for: torch.compile may ask.
        object.__setattr__(self, "_resolved", Recipe(**{**given, **missing}) if missing else self)
        if missing:
            object.__setattr__(self, "_values", self.resolved.__dict__["_values"])
            return  # the values of `resolved` were checked
        for name, accepted in RECIPE_CHOICES.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in accepted):
                raise ValueError(f"{name} is {value!r}; it must be one of {accepted}")
        if type(self.hadamard_seed) is not int or not 0 <= self.hadamard_seed <= MAX_SEED:
            raise ValueError(f"hadamard_seed is {self.hadamard_seed!r}; it must be an int in 0..2**63 - 1")
        if self.hadamard_seed and not self.hadamard:
            raise ValueError(
                f"hadamard_seed is {self.hadamard_seed} and hadamard is False; it must be 0: there is nothing to seed"
            )
        if self.reflect and self.hadamard:
            raise ValueError(
                f"reflect and hadamard are both True; one must be False: the rotation mixes those channels; {RESOLVED}"
            )
        for name, dtype in (("q_scales", self.qk_dtype), ("k_scales", self.qk_dtype), ("v_scales", self.pv_dtype)):
            scales = getattr(self, name)
            if (scales == "none") != (dtype.itemsize == 2):
                raise ValueError(
                    f"{name} is {scales!r}; with {dtype} it must be 'none' if that is a 16-bit dtype, and not "
                    f"otherwise: None is right for both; {RESOLVED}"
                )
        transformed = self.equalise or self.hadamard or self.reflect or self.smooth_k or self.center_v
        if self.is_given and (transformed or not self.qk_dtype == self.pv_dtype == torch.float8_e4m3fn):
            raise ValueError(
                "k_scales is 'head', as of tensors that helion_attn.pack was given: float8_e4m3fn, without equalise, "
                "hadamard, reflect, smooth_k and center_v; otherwise it must be 'block'"
            )
        if self.equalise and self.qk_dtype.itemsize == 2:
            raise ValueError(
                f"equalise is True; with qk_dtype {self.qk_dtype} it must be False: each of its numbers has a scale"
            )
        if self.half_scores and self.qk_dtype != torch.float8_e4m3fn:
            raise ValueError(f"half_scores is True; with qk_dtype {self.qk_dtype} it must be False")
        if self.bits == (16, 8):
            raise ValueError(
                f"pv_dtype is {self.pv_dtype}; with qk_dtype {self.qk_dtype} it must be bfloat16 or float16"
            )
        if self.bits[1] == 16 and self.promote_every == 1:
            raise ValueError(f"promote_every is 1; with pv_dtype {self.pv_dtype}, summed in fp32, it must be 0 or None")
        largest = MAX_P_OFFSET_LOG2[self.pv_dtype]
        offset = self.p_offset_log2
        if offset is not None and (type(offset) is not int or not 0 <= offset <= largest):
            raise ValueError(f"p_offset_log2 is {offset!r}; for {self.pv_dtype} it must be an int in 0..{largest}")
        # All that it says, with what None stands for in its place.
        promoted = self.bits[1] == 8 if self.promote_every is None else self.promote_every == 1
        values = {**self._asked(), "promote_every": promoted, "p_offset_log2": self.p_offset}
        object.__setattr__(self, "_values", tuple(values.values()))

    def _implied(self) -> dict[str, Any]:
        """The values that None stands for, by field."""
        qk_8_bit, pv_8_bit = (getattr(x, "itemsize", 1) == 1 for x in (self.qk_dtype, self.pv_dtype))
        return {
            "q_scales": "token" if qk_8_bit else "none",
            "k_scales": "block" if qk_8_bit else "none",
            "v_scales": "head" if pv_8_bit else "none",
            "equalise": qk_8_bit,
            "reflect": qk_8_bit and not self.hadamard,
            "smooth_k": qk_8_bit,
            "center_v": pv_8_bit,
        }

    @property
    def resolved(self) -> Recipe:
        """An equal recipe in which every field that others imply has its value."""
        return self.__dict__["_resolved"]

    def _asked(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __eq__(self, other: object) -> bool:
        return self.__dict__["_values"] == other.__dict__["_values"] if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.__dict__["_values"])

    def __getstate__(self) -> dict[str, Any]:
        return self._asked()

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__init__(**fields)  # type: ignore[misc]  # what None stands for is derived anew

    def __repr__(self) -> str:
        if (name := preset_name(self)) is not None:
            return name
        default = {**Recipe()._asked(), **self._implied()}
        changed = (f"{name}={x!r}" for name, x in self._asked().items() if x is not None and x != default[name])
        return f"Recipe({', '.join(changed)})"

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of Q and K, and of P and V."""
        return 8 * self.qk_dtype.itemsize, 8 * self.pv_dtype.itemsize

    @property
    def is_given(self) -> bool:
        """Whether `pack` was given the descales: nothing is transformed or scaled."""
        return self.k_scales == "head"

    def is_two_level(self, by_config: bool) -> bool:
        """Whether P V is summed in two levels, where the config has `by_config`."""
        return by_config if self.promote_every is None else self.promote_every == 1

    def qk_largest(self, d: int, d_v: int) -> float:
        """The largest magnitude of packed Q and K, for head dim `d`, and `d_v` of V; 1 for 16 bits."""
        if self.half_scores and takes_bits(self.pv_dtype, max(d, d_v)):
            return largest_for_half_scores(d)
        return FORMAT_MAX.get(self.qk_dtype, 1.0)

    @property
    def p_offset(self) -> int:
        """`p_offset_log2`, or what None stands for."""
        return self.p_offset_log2 if self.p_offset_log2 is not None else MAX_P_OFFSET_LOG2[self.pv_dtype]


#: The least time: e4m3 throughout, channels mixed by fours.
FAST = Recipe(qk_dtype=torch.float8_e4m3fn, half_scores=True)

#: The default: the scores in int8; channels mixed by fours.
BALANCED = Recipe()

#: The least error on outliers that P and V in 8 bits leave.
ACCURATE = Recipe(v_scales="channel", hadamard=True)

#: Scores as in BALANCED, P and V in bf16: between 8 bits and 16, in time and in error.
HYBRID = Recipe(pv_dtype=torch.bfloat16)

#: No 8-bit numbers: the yardstick of the others, and what to fall back to.
BF16 = Recipe(qk_dtype=torch.bfloat16, pv_dtype=torch.bfloat16)

#: The presets by name, the fastest first; `recipe="balanced"` is `recipe=BALANCED`.
PRESETS: dict[str, Recipe] = {
    "FAST": FAST,
    "BALANCED": BALANCED,
    "ACCURATE": ACCURATE,
    "HYBRID": HYBRID,
    "BF16": BF16,
}


def preset_name(recipe: Recipe) -> str | None:
    """The name in `PRESETS` of an equal recipe, or None."""
    return next((name for name, preset in PRESETS.items() if preset == recipe), None)


def is_auto(recipe: object) -> bool:
    """Whether a choice is asked for in place of a recipe."""
    return isinstance(recipe, str) and recipe.upper() == "AUTO"


def preset_of(recipe: Recipe | str) -> Recipe:
    """`as_recipe`, and of "auto" the preset that may be chosen."""
    return as_recipe(BALANCED if is_auto(recipe) else recipe)


def as_choice(recipe: Recipe | str) -> Recipe | Auto:
    """`as_recipe`, or "auto", where both are accepted."""
    return "auto" if is_auto(recipe) else as_recipe(recipe)


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe, or the preset of that name, in capitals or not: resolved, as whatever it is handed to reads it.

    Raises:
        TypeError: neither a Recipe nor a name.
        ValueError: a name that no preset has.
    """
    if isinstance(recipe, Recipe):
        return recipe.resolved
    names = ", ".join(repr(name.lower()) for name in PRESETS)
    where = ", or 'auto' for dense attention"
    if is_auto(recipe):
        where = (
            ": 'auto' is for attention, explain, scaled_dot_product_attention, sdpa, register_transformers, "
            "register_diffusers, fuse_transformers, fuse_diffusers and the flash_attn functions of dense tensors"
        )
    if not isinstance(recipe, str):
        raise TypeError(f"recipe is {recipe!r}; it must be a helion_attn.Recipe or one of {names}")
    if recipe.upper() not in PRESETS:
        raise ValueError(f"recipe is {recipe!r}; it must be one of {names}, or a helion_attn.Recipe{where}")
    return PRESETS[recipe.upper()].resolved


#: The preset of a KV cache that is asked for none.
CACHE_RECIPE = BALANCED


def as_cache_recipe(recipe: Recipe | str) -> Recipe:
    """`as_recipe`, of those that a KV cache has.

    Raises:
        TypeError: neither a Recipe nor a name.
        ValueError: another one.
    """
    found = as_recipe(recipe)
    if found not in (FAST, BALANCED):
        raise ValueError(
            f"recipe is {recipe!r}; of a KV cache it must be 'fast' or 'balanced', or a Recipe equal to one"
        )
    return found


def check_quantises(recipe: Recipe) -> None:
    """Refuse the recipe of tensors that `pack` was given: nothing is quantised by it."""
    if recipe.is_given:
        raise ValueError(
            "recipe has k_scales='head', as of tensors that helion_attn.pack was given; to quantise it must be 'block'"
        )


def _shape_of(value: object) -> str:
    """A tensor's dtype, shape and device; anything else as it prints."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{device}"


class _OfTensors:
    """A dataclass of tensors on one device, which prints their shapes in the place of their values."""

    def _tensors(self) -> dict[str, torch.Tensor]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: x for name, x in fields.items() if isinstance(x, torch.Tensor)}

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self._tensors().values())).device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self._tensors().values())

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """The same on another device, as `torch.Tensor.to` moves its tensors; their dtypes stay.

        Raises:
            TypeError: `device` is no device.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"device is {device!r}; it must be a torch.device, a str or an int")
        moved = {name: x.to(device, non_blocking=non_blocking) for name, x in self._tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    def __repr__(self) -> str:
        fields = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_shape_of(getattr(self, name))}' for name in fields)})"


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class Rope(_OfTensors):
    """Rotary position embedding (RoFormer, arXiv:2104.09864), applied to Q and K while they are quantised.

    Channel pair (a, b) of a row at position t, with i the pair's index, becomes
    `(a cos[t, i] - b sin[t, i], b cos[t, i] + a sin[t, i])`, in fp32. The first R channels are rotated.

    Attributes:
        cos: [positions, R / 2], contiguous, bf16, fp16 or fp32; R at most the head dim.
        sin: same shape and dtype.
        interleaved: pair i is channels (2i, 2i + 1), as in RoFormer and GPT-J; by default (i, i + R / 2), as in
            GPT-NeoX, and in Llama as transformers has it.
        q_positions: int32 or int64 [M]; by default query i is at N - M + i, which needs M <= N.
        k_positions: int32 or int64 [N]; by default key j is at j. A position outside the table makes NaN of
            its row, and of those that share its descale.

    Raises:
        ValueError: a table has every column twice, as those of transformers do: with partial rotation it would pass for
            one of twice the rotated channels. To see that, the last row is read on the host, but not in torch.compile
            and not while a CUDA graph is captured.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        angles = torch.outer(torch.arange(100.0), 10000 ** (-torch.arange(32) / 32))
        rope = ha.Rope(angles.cos(), angles.sin())
        out = ha.attention(q, k, v, causal=True, rope=rope)
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False
    q_positions: torch.Tensor | None = None
    k_positions: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():
            for name in ("cos", "sin"):
                check_columns_differ(f"rope.{name}", getattr(self, name))


def unchecked_rope(
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    q_positions: torch.Tensor | None = None,
    k_positions: torch.Tensor | None = None,
) -> Rope:
    """Make a `Rope` without reading its tables on the host: of tables whose columns are known to differ."""
    rope = object.__new__(Rope)
    fields = {
        "cos": cos,
        "sin": sin,
        "interleaved": interleaved,
        "q_positions": q_positions,
        "k_positions": k_positions,
    }
    for name, value in fields.items():
        object.__setattr__(rope, name, value)
    return rope


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class RMSNorm(_OfTensors):
    """RMSNorm (arXiv:1910.07467), applied to Q or K in fp32 while they are quantised, before RoPE.

    x becomes `x / sqrt(mean(x**2) + eps) * weight`. A weight of D channels is of every head, whose mean is that of its
    own channels, as in Flux, Qwen3 and Gemma 3. One of `heads * D` is of all heads in their order, whose mean is one
    for all channels of a token, as in Wan: the token's heads are read once more. For example
    `ha.attention(q, k, v, q_norm=ha.RMSNorm(attn.norm_q.weight), k_norm=ha.RMSNorm(attn.norm_k.weight), rope=rope)`.

    Models that multiply by `1 + weight`, such as Gemma's, pass that sum. Models round between the norm, its weight and
    RoPE to their dtype; here nothing is rounded.

    Attributes:
        weight: [D] or [heads * D], contiguous, bf16, fp16 or fp32; heads are the query heads of `q_norm`, and the KV
            heads of `k_norm`.
        eps: what is added to the mean; in 1e-12..1.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        norm = ha.RMSNorm(torch.ones(64, dtype=torch.bfloat16))
        out = ha.attention(q, k, v, q_norm=norm, k_norm=norm)
    """

    weight: torch.Tensor
    eps: float = 1e-6


def check_columns_differ(name: str, table: torch.Tensor) -> None:
    """Refuse a table of `Rope` that has every column twice; what else may be wrong with it is checked where it is used.

    A table of one value throughout, such as one of position 0 alone, has no columns to tell apart.
    """
    if not isinstance(table, torch.Tensor) or isinstance(table, FakeTensor) or table.dim() < 2 or table.size(-1) < 4:
        return
    if table.device.type == "meta" or table.numel() == 0 or table.size(-1) % 2:
        return
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    row = table.detach().reshape(-1, table.size(-1))[-1].tolist()
    half = len(row) // 2
    if len(set(row)) == 1:
        return
    if row[:half] == row[half:]:
        which, kept = "the second half of its columns is the first again", f"[..., :{half}]"
    elif row[::2] == row[1::2]:
        which, kept = "every column comes twice in a row", "[..., ::2]"
    else:
        return
    raise ValueError(
        f"{name} has shape {tuple(table.shape)}, and {which}, as in the tables of transformers; it must be "
        f"[positions, R / 2] for R rotated channels: pass {name.removeprefix('rope.')}{kept}"
    )


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class PackedTensors(_OfTensors):
    """The tensors that the attention kernel reads, of dense tensors or of packed sequences.

    `QuantizedQKV` and `PackedVarlen` say how they are shaped. `*_descale` are the multipliers that dequantise:
    `v ~ v8.float() * v_descale + v_mean`. Q and K likewise, but as the recipe has transformed them.

    Attributes:
        q8: blocks of queries, of `recipe.qk_dtype`.
        k8: blocks of keys, likewise.
        v8: blocks of values, of `recipe.pv_dtype`: transposed, its keys interleaved inside every 16: key
            `8a + 2t + b` is stored at `4t + 2a + b` (a, b in {0, 1}, t in 0..3). With 16 bits, neither.
        q_descale: fp32, one a row whatever `recipe.q_scales`; ones for "none".
        k_descale: fp32, one a key block for k_scales="block", otherwise one a head.
        v_descale: fp32, one a channel.
        v_mean: fp32, what is added to the dequantised V; zeros when it was not centred. It is the mean that was
            subtracted before the cast; with 8 bits and 8192 keys or more, corrected, so
            that the dequantised V has V's mean.
        k_mean: fp32, what was subtracted from K, or None.
        channel_factors: fp32 powers of two that Q's channels were multiplied by and K's, less the mean, divided by;
            or None.
        lse_shift: fp32, every query's product with `k_mean`, or None.
    """

    q8: torch.Tensor
    k8: torch.Tensor
    v8: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    v_mean: torch.Tensor
    k_mean: torch.Tensor | None
    channel_factors: torch.Tensor | None
    lse_shift: torch.Tensor | None

    def tensors(self) -> tuple[Any, ...]:
        """These fields, in the order of `PACKED_FIELDS`."""
        return tuple(getattr(self, name) for name in PACKED_FIELDS)


#: Names of the fields of `PackedTensors`.
PACKED_FIELDS = tuple(field.name for field in dataclasses.fields(PackedTensors))


def packed_fields(tensors: Sequence[torch.Tensor], recipe: Recipe, needs_lse_shift: bool) -> dict[str, Any]:
    """The fields of `PackedTensors` by name, from what the quantising ops return."""
    fields: dict[str, Any] = dict(zip(PACKED_FIELDS, tensors, strict=True))
    # An op cannot return None, and returns empty tensors instead.
    if not recipe.smooth_k:
        fields["k_mean"] = None
    if not recipe.equalise:
        fields["channel_factors"] = None
    if not (recipe.smooth_k and needs_lse_shift):
        fields["lse_shift"] = None
    return fields


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class QuantizedQKV(PackedTensors):
    """Q, K and V in the packed format that the attention kernel reads. Made by `helion_attn.quantize`.

    Sequences are zero-padded to whole blocks, and head dims to supported ones, `D_pad` and `D_v_pad`; `M`, `N`, `D` and
    `D_v` are the true sizes. `PackedTensors` says what the tensors mean, `dequantize` undoes the quantisation. It has
    a tensor's `to(device)`, `device` and `nbytes`, and `torch.save` and `torch.load` take it.

    Attributes:
        q8: [B * H, M_blocks, bm, D_pad].
        k8: [B * H_kv, N_blocks, bn, D_pad].
        v8: [B * H_kv, N_blocks, D_v_pad, bn], or of 16 bits [B * H_kv, N_blocks, bn, D_v_pad].
        q_descale: [B, H, M_blocks, bm].
        k_descale: [B, H_kv, N_blocks] for k_scales="block", otherwise [B, H_kv, 1].
        v_descale: [B, H_kv, D_v_pad].
        v_mean: [B, H_kv, D_v_pad].
        k_mean: [B, H_kv, D_row] or None; D_row is the power of two that holds D_pad and D_v_pad.
        channel_factors: [B, H_kv, D_row] or None.
        lse_shift: [B, H, M_blocks, bm] or None.
        M: query length.
        N: key length.
        D: head dim of the unpadded Q and K.
        D_v: head dim of the unpadded V, and of the output.
        dtype: dtype of the unquantised tensors, the default output dtype.
        layout: "bhsd" or "bshd", the layout of the unquantised tensors and of the output.
        recipe: the one that it was made with, resolved. `dataclasses.replace` changes a field of that one.

    Example:
        q, k, v = torch.randn(3, 1, 2, 100, 64, dtype=torch.bfloat16)
        qkv = ha.quantize(q, k, v)
        assert isinstance(qkv, ha.QuantizedQKV)
        smaller = (q.nbytes + k.nbytes + v.nbytes) / qkv.nbytes
    """

    M: int
    N: int
    D: int
    D_v: int
    dtype: torch.dtype
    layout: Layout
    recipe: Recipe

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", self.recipe.resolved)


def key_descales(descale: torch.Tensor) -> torch.Tensor:
    """Return the descale of each key, [..., page_size], of `PagedKVCache.k_descale` or `v_descale`, or pages of it."""
    return torch.where(descale[..., 1:2] < 0, descale[..., :1], descale)


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class PagedKVCache(_OfTensors):
    """Keys and values in pages of `page_size`, packed as the attention kernel reads them. Made by `paged_kv_cache`.

    A page is a block of the packed format of `QuantizedQKV`. While it fills it is open: each of its keys has descales
    of its own, so a new key changes nothing of those that are there. Once full it is closed: it has one descale of K
    and one of V, in slot 0, and a negative number in slot 1 as the mark. With each key's descales,
    `k ~ k8.float() * k_descale * channel_factors + k_mean` and `v ~ v8.float() * v_descale`, a row each. Pages that no
    block table names hold anything. It can be moved, saved and loaded as a `QuantizedQKV`.

    Attributes:
        k8: float8_e4m3fn or int8 [num_pages, H_kv, page_size, D_pad]; pages and heads of it and of the next three may
            lie anywhere, multiples of 16 bytes apart.
        v8: float8_e4m3fn [num_pages, H_kv, D_v_pad, page_size], transposed, its keys interleaved inside every 16: key
            `8a + 2t + b` is stored at `4t + 2a + b` (a, b in {0, 1}, t in 0..3).
        k_descale: fp32 [num_pages, H_kv, page_size], in the order of the keys; of e4m3 keys powers of two.
        v_descale: fp32 [num_pages, H_kv, page_size], likewise; powers of two in 2**-26..2**26.
        k_mean: fp32 [H_kv, D_pad], subtracted from all keys, or None.
        channel_factors: fp32 [H_kv, D_pad], powers of two that channels of all keys, less the mean, are divided by, and
            those of Q multiplied by; or None.
        D: head dim of the unpadded K.
        D_v: head dim of the unpadded V, and of the output.

    Example:
        cache = ha.paged_kv_cache(num_pages=8, H_kv=2, D=64)
        assert isinstance(cache, ha.PagedKVCache)
        tokens = cache.page_size * 8
    """

    k8: torch.Tensor
    v8: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    k_mean: torch.Tensor | None
    channel_factors: torch.Tensor | None
    D: int
    D_v: int
    #: A cache that lies in a caller's memory: `kv_cache.cache_from_buffer`, which knows how large pages are.
    from_buffer: ClassVar[Callable[..., PagedKVCache]]

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.k8.size(2)


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class OpenPages(_OfTensors):
    """Pages as the queries of the keys that an append brought see them, where the cache has another form.

    `append_kvcache` returns it, and `attention_kvcache` takes it. It serves until the next append.

    Attributes:
        k8: the pages that the new keys of each sequence touch, and what follows: as the cache's own.
        v8: likewise.
        k_descale: likewise.
        v_descale: likewise.
        keys: how many were appended to each sequence.
        drafts: how many of them, the last ones, may still be rejected.

    Example:
        cache = ha.paged_kv_cache(num_pages=2, H_kv=2, D=64)
        block_table = torch.tensor([[1]], dtype=torch.int32)
        start = torch.zeros(1, dtype=torch.int32)
        k, v = torch.randn(2, 1, 2, 128, 64, dtype=torch.bfloat16)  # a page, which is closed
        open_pages = ha.append_kvcache(cache, k, v, block_table, start)
        q = torch.randn(1, 2, 128, 64, dtype=torch.bfloat16)
        out = ha.attention_kvcache(q, cache, block_table, start + 128, open_pages=open_pages)
    """

    k8: torch.Tensor
    v8: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    keys: int
    drafts: int


@dataclass(frozen=True, eq=False, repr=False)  # of tensors: == of their fields would be ambiguous
class BlockMask(_OfTensors):
    """The data of a mask, as attention reads it. `masks.blocks.BlockMask` makes it, and says what its fields are."""

    M: int
    N: int
    lists: torch.Tensor
    entries: torch.Tensor
    tile_of: torch.Tensor
    tiles: torch.Tensor
    tail: torch.Tensor | None = None

    @property
    def B(self) -> int:
        """Sequences, or 1."""
        return self.entries.size(0)

    @property
    def H(self) -> int:
        """Heads, or 1."""
        return self.entries.size(1)


# What `torch.load` takes with its default, `weights_only=True`.
torch.serialization.add_safe_globals([Recipe, RMSNorm, Rope, QuantizedQKV, PagedKVCache])
