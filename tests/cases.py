"""One attention problem with the answers that its tests compare to, computed once per process."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

import helion_attn as ha
from helion_attn.configs import padded_head_dim, tile_config
from helion_attn.testing import error_budget, make_qkv, relative_error
from helion_attn.workloads import WORKLOADS

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    """Inputs, BHSD; the fp64 oracle's answer; and the rounding model's, in fp32."""

    qkv: Tensors
    causal: bool
    sm_scale: float | None
    recipe: ha.Recipe
    oracle: torch.Tensor  # [B, H, M, D]
    oracle_lse: torch.Tensor  # [B, H, M]
    model: torch.Tensor  # [B, H, M, D]
    model_lse: torch.Tensor  # [B, H, M]

    def run(self, out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The package's `(out, lse)`."""
        return ha.attention(
            *self.qkv,
            causal=self.causal,
            sm_scale=self.sm_scale,
            recipe=self.recipe,
            return_lse=True,
            out_dtype=out_dtype,
        )

    def budget(self, out_dtype: torch.dtype = torch.float32) -> float:
        """The largest total error that `out` may have."""
        return error_budget(relative_error(self.model.to(out_dtype), self.oracle), out_dtype, device=self.oracle.device)

    def assert_within_budget(self, out: torch.Tensor) -> None:
        """The total error of `out` is within its budget; NaN is not."""
        error, budget = relative_error(out, self.oracle), self.budget(out.dtype)
        assert error <= budget, f"error {error:.4g}, budget {budget:.4g}"


def make_case(
    qkv: Tensors, causal: bool = False, sm_scale: float | None = None, recipe: ha.Recipe = ha.BALANCED
) -> Case:
    block_n = tile_config(padded_head_dim(qkv[0].size(3)), causal).bn
    oracle = ha.reference.attention(*qkv, causal=causal, sm_scale=sm_scale, return_lse=True)
    model = ha.reference.fp8_attention(
        *qkv,
        causal=causal,
        sm_scale=sm_scale,
        recipe=recipe,
        return_lse=True,
        out_dtype=torch.float32,
        block_n=block_n,
    )
    return Case(qkv, causal, sm_scale, recipe, *oracle, *pair(model))


@functools.lru_cache(maxsize=8)
def workload_case(name: str, kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> Case:
    """A row of `workloads`, filled with one kind of input."""
    w = next(w for w in WORKLOADS if w.name == name)
    return make_case(make_qkv(kind, w.B, w.H, w.H_kv, w.M, w.N, w.D, dtype, device), w.causal)
