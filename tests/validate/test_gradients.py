"""Every public function refuses tensors of which somebody waits for a derivative that it has not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import helion_attn as ha
from devtools.sm90 import fake_cuda
from helion_attn import plans
from helion_attn.validate.derivatives import has_tangent, requires_grad
from helpers.no_ops import Launched

pytestmark = pytest.mark.usefixtures("no_launch")

Call = Callable[[torch.Tensor], object]

#: [B, H, S, D]; also read as [B, S, H, D].
X = torch.ones(1, 2, 2, 64, dtype=torch.bfloat16)
TOKENS = X[0]
E4M3 = X.to(torch.float8_e4m3fn)
ENDS = torch.tensor([0, 2], dtype=torch.int32)
TABLE, LENGTHS = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
CACHE = ha.paged_kv_cache(1, 2, 64)
DESCALES: dict[str, Any] = {"k_descale": CACHE.k_descale, "v_descale": CACHE.v_descale}
ROTATION = ha.Rope(torch.ones(2, 32), torch.ones(2, 32))


def sdpa_inside(x: torch.Tensor) -> object:
    with ha.sdpa():
        return F.scaled_dot_product_attention(x, X, X)


#: Public function -> a call of it with one tensor that may have a derivative, shaped as `X`.
CALLS: dict[str, Call] = {
    "append_kvcache": lambda x: ha.append_kvcache(CACHE, X, x, TABLE, LENGTHS),
    "apply_rope": lambda x: ha.apply_rope(x, ROTATION),
    "attention": lambda x: ha.attention(X, x, X),
    "attention_kvcache": lambda x: ha.attention_kvcache(x, CACHE, TABLE, LENGTHS),
    "attention_varlen": lambda x: ha.attention_varlen(TOKENS, x[0], TOKENS, ENDS, ENDS),
    "cache_constants": lambda x: ha.cache_constants(X, x),
    "check": lambda x: ha.check(X, x, X),
    "flash_attn_func": lambda x: ha.flash_attn_func(X, X, x),
    "flash_attn_kvpacked_func": lambda x: ha.flash_attn_kvpacked_func(X, torch.stack([x, X], 2)),
    "flash_attn_qkvpacked_func": lambda x: ha.flash_attn_qkvpacked_func(torch.stack([x, X, X], 2)),
    "flash_attn_varlen_func": lambda x: ha.flash_attn_varlen_func(x[0], TOKENS, TOKENS, ENDS, ENDS, 2, 2),
    "flash_attn_varlen_kvpacked_func": lambda x: ha.flash_attn_varlen_kvpacked_func(
        TOKENS, torch.stack([x[0], TOKENS], 1), ENDS, ENDS, 2, 2
    ),
    "flash_attn_varlen_qkvpacked_func": lambda x: ha.flash_attn_varlen_qkvpacked_func(
        torch.stack([x[0], TOKENS, TOKENS], 1), ENDS, 2
    ),
    "flash_attn_with_kvcache": lambda x: ha.flash_attn_with_kvcache(
        x, CACHE.k8, CACHE.v8, cache_seqlens=LENGTHS, page_table=TABLE, **DESCALES
    ),
    "hadamard": lambda x: ha.hadamard(x),
    "pack": lambda x: ha.pack(E4M3, E4M3, E4M3, q_descale=x.float()[..., 0, 0], k_descale=1.0, v_descale=1.0),
    "quantize": lambda x: ha.quantize(X, X, x),
    "reflect": lambda x: ha.reflect(x),
    "scaled_dot_product_attention": lambda x: ha.scaled_dot_product_attention(x, X, X),
    "sdpa": sdpa_inside,
}

#: Those that compute nothing of such tensors; what quantising made of them is tried in test_validation.py.
OTHERS = {
    "attention_quantized", "debug", "dequantize", "explain", "fuse_diffusers", "fuse_transformers", "hadamard_matrix",
    "is_supported", "paged_kv_cache", "plan", "register_diffusers", "register_flash_attention", "register_transformers",
    "transformers_cache", "unfuse",
}  # fmt: skip


def test_every_function_is_tried() -> None:
    public = {name for name in ha.__all__ if inspect.isfunction(getattr(ha, name))}
    assert public == {*CALLS} | OTHERS


@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_raises(name: str) -> None:
    """Whose derivative would otherwise be 0, in all ways that PyTorch has; under no_grad too."""
    call = CALLS[name]

    def in_dual_level(x: torch.Tensor) -> None:
        with forward_ad.dual_level(), torch.no_grad():
            call(forward_ad.make_dual(x, x))

    ways: list[Call] = [in_dual_level, lambda x: torch.func.jvp(call, (x,), (x,)), torch.func.jacfwd(call)]
    for differentiated in ways:
        with pytest.raises(RuntimeError, match=r"has a tangent, of torch\.func\.jvp, .* no derivative: detach"):
            differentiated(X)


#: Those that have gradients, and the operation that they run then.
TRAINING = {
    "attention": "attention",
    "attention_varlen": "attention_varlen",
    "flash_attn_func": "attention",
    "flash_attn_kvpacked_func": "attention",
    "flash_attn_qkvpacked_func": "attention",
    "flash_attn_varlen_func": "attention_varlen",
    "flash_attn_varlen_kvpacked_func": "attention_varlen",
    "flash_attn_varlen_qkvpacked_func": "attention_varlen",
    "scaled_dot_product_attention": "attention",
    "sdpa": "attention",
}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in TRAINING])
def test_a_gradient_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match="requires grad; helion_attn has no backward pass"):
        CALLS[name](X.clone().requires_grad_())


@pytest.mark.parametrize("name", TRAINING)
def test_a_gradient_takes_the_operation_of_training(name: str) -> None:
    with pytest.raises(Launched, match=f"^{TRAINING[name]}_training$"):
        CALLS[name](X.clone().requires_grad_())
    with torch.no_grad(), pytest.raises(Launched, match=f"^{TRAINING[name]}$"):
        CALLS[name](X.clone().requires_grad_())


def test_plans_have_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="q requires grad; helion_attn has no backward pass"):
        ha.plan(X.clone().requires_grad_(), X, X)
    with pytest.raises(RuntimeError, match="sinks requires grad; helion_attn has no backward pass"):
        ha.plan(X, X, X, sinks=torch.zeros(2).requires_grad_())


def test_an_output_of_8_bits_has_no_gradient() -> None:
    with pytest.raises(TypeError, match=r"out_dtype is torch\.float8_e4m3fn; where an input requires grad it must be"):
        ha.attention(X.clone().requires_grad_(), X, X, out_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("recipe", ["balanced", "auto"])
def test_a_gradient_raises_inside_of_vmap(recipe: Any) -> None:
    """A batch of `torch.vmap` says that it requires none."""

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda one: ha.attention(one, X, X, recipe=recipe))(x[None]).sum()

    for differentiated in (torch.func.grad(call), torch.func.jacrev(call), lambda x: call(x.requires_grad_())):
        with pytest.raises(RuntimeError, match=r"q requires grad inside of torch\.func\.grad or torch\.vmap"):
            differentiated(X.clone())


def test_gradients_of_every_level_are_found() -> None:
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(requires_grad(x))
        return x * 2

    x = torch.ones(3, 4)
    torch.func.grad(lambda y: torch.vmap(torch.vmap(note))(y).sum())(x)
    torch.vmap(torch.func.grad(lambda y: note(y).sum()))(x)
    torch.vmap(note)(x.clone().requires_grad_())
    assert found == [True] * 3
    torch.func.grad(lambda y: (torch.vmap(note)(x) + y).sum())(x)
    torch.vmap(note)(x)
    assert found[3:] == [False] * 2


def test_detached_tensors_are_taken() -> None:
    def call(x: torch.Tensor) -> object:
        with pytest.raises(Launched):
            ha.attention(x.detach(), X, X)
        return x

    torch.func.jvp(call, (X,), (X,))
    torch.func.jacfwd(call)(X)


def test_tangents_of_every_level_are_found() -> None:
    """What a level of `torch.func` wrapped may have its tangent in a level around it."""
    found: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(has_tangent(x))
        return x * 2

    def jvp(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        torch.func.jvp(call, (x,), (x,))

    x = torch.ones(3, 4)
    jvp(lambda y: torch.func.jvp(lambda z: note(y) + z, (x,), (x,))[0])
    jvp(lambda y: torch.vmap(note)(y))
    jvp(torch.func.grad(lambda y: note(y).sum()))
    torch.func.jacfwd(note)(x)
    assert found == [True] * 4
    jvp(lambda y: torch.vmap(note)(x) + y)
    torch.func.jacfwd(lambda y, z: y + note(z))(x, x)
    note(x)
    assert found[4:] == [False] * 3


def test_tangents_inside_compiled_code_raise() -> None:
    """And those that come to code which was compiled without."""
    torch._dynamo.reset()
    compiled = torch.compile(CALLS["attention"], backend="eager")
    for differentiated in (
        lambda: torch.func.jvp(compiled, (X,), (X,)),
        lambda: torch.compile(lambda x: torch.func.jvp(CALLS["attention"], (x,), (x,)), backend="eager")(X),
    ):
        with pytest.raises(RuntimeError, match="k has a tangent"):
            differentiated()


def test_tangents_are_not_planned() -> None:
    """A plan takes addresses, and would not see them."""
    assert plans.can_skip_dispatcher()
    with forward_ad.dual_level():
        assert plans.key_of("attention", [fake_cuda(1)], ()) is None
