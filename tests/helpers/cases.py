"""The recipes, and one attention problem with the answers that its tests compare to, computed once per process."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from devtools.workloads import WORKLOADS
from helion_attn.configs import ALL_8_BIT, LARGE_TILE_CONFIGS, TILE_CONFIGS, LargeTileConfig, TileConfig
from helion_attn.reference import rounding_model
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.reference.shapes import default_sm_scale, hide_keys
from helion_attn.testing import TANH_ERROR, TENSOR_CORE_ERROR, error_budget, relative_error

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

PRESETS = {"fast": ha.FAST, "balanced": ha.BALANCED, "accurate": ha.ACCURATE}

#: With 16-bit numbers: of V, of everything, and through every stage of preprocessing in fp16.
SIXTEEN_BIT = {
    "hybrid": ha.HYBRID,
    "bf16": ha.BF16,
    "fp16_hadamard_smooth_k": dataclasses.replace(
        ha.BF16, qk_dtype=torch.float16, pv_dtype=torch.float16, hadamard=True, smooth_k=True, center_v=True
    ),
}

LADDER = PRESETS | SIXTEEN_BIT

#: Shipped configs that tests compile, each with one recipe: those of 8 bits with the presets in turn, those of 16 bits
#: with one mask. `scripts/ptx_hashes.py` compiles all with all.
SHIPPED: list[tuple[TileConfig, str]] = [
    *zip((t for t in TILE_CONFIGS if t.bits == ALL_8_BIT), itertools.cycle(PRESETS)),
    *((t, "hybrid") for t in TILE_CONFIGS if t.bits == (8, 16) and t.has_right),
    *((t, "bf16") for t in TILE_CONFIGS if t.bits == (16, 16) and not t.has_right),
]

#: Those of large head dims: the default recipe with the causal mask, the other product on some full ones, and all
#: options where there are the fewest registers to spare. (At D 1024 they spill up to three.)
LARGE_SHIPPED: list[tuple[LargeTileConfig, str]] = [
    *((t, "balanced") for t in LARGE_TILE_CONFIGS if t.has_right),
    *((t, "fast") for t in LARGE_TILE_CONFIGS if not t.has_right and t.D_pad in (192, 640)),
    *((t, "accurate") for t in LARGE_TILE_CONFIGS if t.has_right and t.D_pad == 768),
]


def shipped_id(tile: TileConfig | LargeTileConfig) -> str:
    """The name of a config in tests."""
    v_tile = f"-{tile.v_tile}" if isinstance(tile, LargeTileConfig) else ""
    return f"d{tile.D_pad}{v_tile}-{'causal' if tile.has_right else 'full'}-up-to-{tile.max_query_blocks_per_sm}"


#: e4m3 throughout, and nothing mixed, smoothed or equalised.
IN_E4M3 = ha.Recipe(qk_dtype=torch.float8_e4m3fn, equalise=False, reflect=False, smooth_k=False)

#: And nothing subtracted.
PLAIN = replace(IN_E4M3, center_v=False)

#: Of tensors that `pack` was given.
GIVEN = replace(PLAIN, k_scales="head")

#: The ladder, every single choice that differs from the defaults, and pairs that share code.
RECIPES = LADDER | {
    "plain": PLAIN,
    "not_reflected": IN_E4M3,
    "q_block": replace(IN_E4M3, q_scales="block"),
    "v_channel": replace(IN_E4M3, v_scales="channel"),
    "int8": replace(IN_E4M3, qk_dtype=torch.int8),
    "int8_q_block": replace(IN_E4M3, qk_dtype=torch.int8, q_scales="block"),
    "e5m2": replace(IN_E4M3, pv_dtype=torch.float8_e5m2),
    "e5m2_v_channel": replace(IN_E4M3, pv_dtype=torch.float8_e5m2, v_scales="channel"),
    "smooth_k": replace(IN_E4M3, smooth_k=True),
    "sum_in_tensor_core": replace(IN_E4M3, promote_every=0),
    "p_offset_4": replace(IN_E4M3, p_offset_log2=4),
    "reflect_q_block": replace(IN_E4M3, q_scales="block", reflect=True),
    "reflect_smooth_k": replace(IN_E4M3, reflect=True, smooth_k=True),
    "hadamard_seed_3": replace(IN_E4M3, hadamard=True, hadamard_seed=3),
    "hadamard_q_block": replace(IN_E4M3, q_scales="block", hadamard=True),
    "hadamard_smooth_k": replace(IN_E4M3, hadamard=True, smooth_k=True),
    "int8_smooth_k": replace(IN_E4M3, qk_dtype=torch.int8, smooth_k=True),
    "hybrid_e4m3": replace(IN_E4M3, pv_dtype=torch.bfloat16, v_scales="none"),
    "hybrid_e4m3_fp16": replace(IN_E4M3, pv_dtype=torch.float16, v_scales="none"),
}


def pair(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of a rounding model called with return_lse."""
    assert isinstance(result, tuple)
    return result


def single(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`out` of a rounding model called without return_lse."""
    assert isinstance(result, torch.Tensor)
    return result


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs, BHSD; the fp64 oracle's answer; and the rounding model's, in fp32. Norms and RoPE come before both."""

    qkv: Tensors
    causal: bool
    sm_scale: float | None
    recipe: ha.Recipe
    oracle: torch.Tensor  # [B, H, M, D]
    oracle_lse: torch.Tensor  # [B, H, M]
    model: torch.Tensor  # [B, H, M, D]
    model_lse: torch.Tensor  # [B, H, M]
    rope: ha.Rope | None = None
    window: tuple[int, int] | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    block_mask: ha.BlockMask | None = None
    q_norm: ha.RMSNorm | None = None
    k_norm: ha.RMSNorm | None = None

    def run(self, out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The package's `(out, lse)`."""
        return ha.attention(
            *self.qkv,
            causal=self.causal,
            sm_scale=self.sm_scale,
            recipe=self.recipe,
            rope=self.rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            block_mask=self.block_mask,
            return_lse=True,
            out_dtype=out_dtype,
        )

    def budget(self, out_dtype: torch.dtype = torch.float32, splits: int = 1) -> float:
        """The largest total error that `out` may have, of keys in so many runs."""
        error = relative_error(self.model.to(out_dtype), self.oracle)
        budget = error_budget(error, out_dtype, device=self.oracle.device, softcap=self.softcap)
        budget += self.share_noise() + (self.run_noise() if splits > 1 else 0.0)
        # The errors are of different rows.
        return math.hypot(budget, self.tie_noise() if self.oracle.is_cuda else 0.0)

    def tie_noise(self) -> float:
        """What an FP8 tensor core adds in one-hot rows whose largest scores it cannot tell apart: it takes any of them.

        Such rows have scores of thousands: where the largest is s, `TENSOR_CORE_ERROR * s` is more than 1. (A product
        of int8 is exact, and a softcap leaves no such scores.)
        """
        seen = self.oracle_lse[self.oracle_lse > float("-inf")].abs()
        if self.recipe.qk_dtype != torch.float8_e4m3fn or self.softcap or not (TENSOR_CORE_ERROR * seen > 1).any():
            return 0.0
        q, k, v = self.qkv
        q8, k8 = self.rounded()
        k8, v = (x.double().repeat_interleave(q.size(1) // k.size(1), 1) for x in (k8, v))
        # [B, H, M, N]
        s = q8 @ k8.mT * default_sm_scale(self.sm_scale, q.size(3))
        lost = TENSOR_CORE_ERROR * s.abs().amax(3, keepdim=True)
        s = hide_keys(s, 0, 0, q.size(2), k.size(2), self.causal, self.window)
        if self.block_mask is not None:
            s = s.masked_fill(~self.block_mask.to_dense(), float("-inf"))
        taken = (s.amax(3, keepdim=True) - s <= lost) & (lost > 1)
        errors = torch.cdist(self.oracle, v) * (taken & (taken.sum(3, keepdim=True) > 1))
        return (errors.amax(3).norm() / self.oracle.norm()).item()

    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K as the tensor core has them, dequantised, fp64."""
        r = rounding_model.quantize(*self.qkv, self.recipe, self.rope, self.q_norm, self.k_norm)
        return r.q8.double() * r.q_descale.unsqueeze(3), r.k8.double() * r.k_descale.unsqueeze(3)

    def run_noise(self) -> float:
        """What fp32 leaves of the weight of a run of keys: a power of its lse, which is rounded."""
        size = self.oracle.double().norm(dim=3)
        finite = self.oracle_lse > float("-inf")
        noise = torch.where(finite, self.oracle_lse.abs() * size, 0.0).norm() / size.norm()
        return torch.finfo(torch.float32).eps * noise.item()

    def share_noise(self) -> float:
        """What fp32 leaves of the share that a sink takes: a power of the difference of two logits, each rounded."""
        if self.sinks is None:
            return 0.0
        # [B, H, M]
        lse, sinks = self.oracle_lse, self.sinks.double().view(1, -1, 1)
        share = torch.exp(sinks - lse)
        noise = torch.finfo(torch.float32).eps * share * (lse.abs() + sinks.abs())
        return torch.where(share > 0, noise, 0.0).max().item()

    def assert_within_budget(self, out: torch.Tensor, splits: int = 1) -> None:
        """The total error of `out` is within its budget; NaN is not."""
        error, budget = relative_error(out, self.oracle), self.budget(out.dtype, splits)
        assert error <= budget, f"error {error:.4g}, budget {budget:.4g}"

    def assert_lse_within_budget(self, lse: torch.Tensor) -> None:
        """Likewise for `lse`; rows that see neither key nor sink have -inf."""
        finite = self.oracle_lse > float("-inf")
        assert lse.dtype == torch.float32
        assert torch.all(lse[~finite] == float("-inf"))
        model, oracle = self.model_lse[finite], self.oracle_lse[finite]
        error = relative_error(lse[finite], oracle)
        budget = error_budget(relative_error(model, oracle), torch.float32)
        if lse.is_cuda and self.softcap:
            budget += self.softcap * TANH_ERROR / oracle.abs().mean().item()
        assert error <= budget, f"error {error:.4g} of lse, budget {budget:.4g}"


def make_case(
    qkv: Tensors,
    causal: bool = False,
    sm_scale: float | None = None,
    recipe: ha.Recipe = ha.BALANCED,
    rope: ha.Rope | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    block_mask: ha.BlockMask | None = None,
    q_norm: ha.RMSNorm | None = None,
    k_norm: ha.RMSNorm | None = None,
) -> Case:
    q, k, v = qkv
    normed = q if q_norm is None else rms_norm(q, q_norm), k if k_norm is None else rms_norm(k, k_norm)
    rotated = normed if rope is None else apply_rope_qk(*normed, rope)
    oracle = ha.reference.attention(
        *rotated,
        v,
        causal=causal,
        sm_scale=sm_scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        block_mask=block_mask,
        return_lse=True,
    )
    model = ha.reference.fp8_attention(
        *qkv,
        causal=causal,
        sm_scale=sm_scale,
        recipe=recipe,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        window=window,
        softcap=softcap,
        sinks=sinks,
        block_mask=block_mask,
        return_lse=True,
        out_dtype=torch.float32,
    )
    answers = *oracle, *pair(model)
    return Case(
        qkv, causal, sm_scale, recipe, *answers, rope, window, softcap, sinks, block_mask, q_norm, k_norm
    )  # fmt: skip


@functools.lru_cache(maxsize=8)
def workload_case(name: str, kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A row of `workloads`, filled with one kind of input."""
    w = next(w for w in WORKLOADS if w.name == name)
    return make_case(make_qkv(kind, w.B, w.H, w.H_kv, w.M, w.N, w.D, dtype, device), w.causal)


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """||out - expected|| / ||expected|| of every row; 0 where both are 0."""
    norm = expected.double().norm(dim=-1)
    return (out.double() - expected.double()).norm(dim=-1) / norm.clamp_min(torch.finfo(torch.float32).tiny)
