"""`with ha.sdpa():` what scaled_dot_product_attention becomes, where, and what raises."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as bound_before
from torch.utils.checkpoint import checkpoint

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.integrations import mask_tensors
from helion_attn.integrations.sdpa import RULES, Fallback
from helion_attn.testing import relative_error
from helpers.refused import refused

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def qkv_on(device: str, M: int = 24, N: int = 24, H_kv: int = 2) -> Qkv:
    return make_qkv("randn", 1, 2, H_kv, M, N, 32, device=device)


def is_stock(out: torch.Tensor, qkv: Qkv) -> bool:
    return relative_error(out, ha.reference.attention(*qkv)) < 0.01


def test_scope(device: str) -> None:
    """Inside, FP8; after it, and after an exception, what it was; the innermost context counts."""
    qkv = qkv_on(device)
    fast, balanced = ha.attention(*qkv, recipe=ha.FAST), ha.attention(*qkv)
    assert not torch.equal(fast, balanced)
    stock = F.scaled_dot_product_attention
    with ha.sdpa():
        assert torch.equal(F.scaled_dot_product_attention(*qkv), balanced)
        with ha.sdpa(recipe=ha.FAST):
            assert torch.equal(F.scaled_dot_product_attention(*qkv), fast)
            with pytest.raises(NotImplementedError, match="dropout_p"):
                F.scaled_dot_product_attention(*qkv, dropout_p=0.5)
        with pytest.raises(ZeroDivisionError), ha.sdpa(recipe=ha.FAST):
            _ = 1 / 0
        assert torch.equal(F.scaled_dot_product_attention(*qkv), balanced)
        assert torch.equal(bound_before(*qkv), balanced)
    assert F.scaled_dot_product_attention is stock
    assert is_stock(F.scaled_dot_product_attention(*qkv), qkv)


def test_only_the_thread_that_entered(device: str) -> None:
    qkv = qkv_on(device)
    out: list[torch.Tensor] = []
    with ha.sdpa():
        thread = threading.Thread(target=lambda: out.append(F.scaled_dot_product_attention(*qkv)))
        thread.start()
        thread.join()
    assert is_stock(out[0], qkv)


def test_recipe_is_checked() -> None:
    with pytest.raises(TypeError, match="recipe is 8"):
        ha.sdpa(recipe=8)  # type: ignore[arg-type]


CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any], dict[str, Any]]] = {
    "full": ((24, 40, 2), {}, {}),
    "scale": ((24, 40, 2), {"scale": 0.5}, {"sm_scale": 0.5}),
    "causal": ((24, 24, 2), {"is_causal": True}, {"causal": True}),
    "gqa": ((24, 40, 1), {"enable_gqa": True}, {}),
    "lower_right": ((24, 40, 2), {"attn_mask": causal_lower_right(24, 40)}, {"causal": True}),
    "upper_left": ((24, 24, 2), {"attn_mask": causal_upper_left(24, 24)}, {"causal": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_means_what_it_means_to_pytorch(case: str, device: str) -> None:
    (M, N, H_kv), options, ours = CASES[case]
    qkv = qkv_on(device, M, N, H_kv)
    stock = F.scaled_dot_product_attention(*qkv, **options)
    with ha.sdpa():
        out = F.scaled_dot_product_attention(*qkv, **options)
    assert torch.equal(out, ha.attention(*qkv, **ours))
    assert 1e-4 < relative_error(out, stock) < 0.07


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any, device: str) -> None:
    with ha.sdpa(), pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        F.scaled_dot_product_attention(*qkv_on(device), **{rule.argument: refused(rule.argument)})


def test_top_left_causal_of_other_lengths_raises(device: str) -> None:
    """Decoding, too: to PyTorch one query with is_causal sees one key."""
    for M, N in ((1, 24), (24, 40), (40, 24)):
        qkv = qkv_on(device, M, N)
        for options in ({"is_causal": True}, {"attn_mask": causal_upper_left(M, N)}):
            with ha.sdpa(), pytest.raises(NotImplementedError, match="top-left"):
                F.scaled_dot_product_attention(*qkv, **options)


BROADCAST = r"key has batch size 2 and query has 1; they must be equal: pass query\.expand\(2, -1, -1, -1\); or pass"

BAD: dict[str, tuple[Callable[[Qkv], tuple[Any, ...]], dict[str, Any], type[Exception], str]] = {
    "mask_of_other_lengths": (tuple, {"attn_mask": causal_lower_right(24, 25)}, ValueError, "24 and 25"),
    "two_masks": (tuple, {"attn_mask": causal_lower_right(24, 24), "is_causal": True}, ValueError, "is_causal"),
    "float64": (lambda qkv: tuple(x.double() for x in qkv), {}, TypeError, "float64"),
    "scale": (tuple, {"scale": -1.0}, ValueError, "scale is -1.0"),
    "value_of_rank_3": (lambda qkv: (*qkv[:2], qkv[2][0]), {}, ValueError, "value has shape"),
    "rank_3": (lambda qkv: tuple(x[0] for x in qkv), {}, ValueError, "4 dimensions"),
    "mask_of_5_dimensions": (tuple, {"attn_mask": torch.ones(1, 1, 1, 24, 24)}, ValueError, "must broadcast to"),
    "mask_of_other_keys": (tuple, {"attn_mask": torch.ones(24, 23)}, ValueError, "must broadcast to .* N = 24"),
    "mask_of_other_heads": (tuple, {"attn_mask": torch.ones(3, 24, 24)}, ValueError, "must broadcast to .* H = 2"),
    "mask_of_other_heads_that_hides": (
        tuple,
        {"attn_mask": torch.ones(1, 3, 24, 24).tril() > 0},
        ValueError,
        "must broadcast to .* H = 2",
    ),
    "mask_of_ints": (tuple, {"attn_mask": torch.ones(24, 24).int()}, NotImplementedError, "must be bool or of a"),
    "heads": (lambda qkv: (qkv[0], qkv[1][:, :1], qkv[2][:, :1]), {}, ValueError, "enable_gqa"),
    "head_dim": (lambda qkv: tuple(x[..., :8] for x in qkv), {}, ValueError, "head dim"),
    "meta": (lambda qkv: tuple(x.to("meta") for x in qkv), {}, NotImplementedError, "meta"),
    "keys_of_other_batch": (
        lambda qkv: (qkv[0], *(x.expand(2, -1, -1, -1) for x in qkv[1:])),
        {},
        ValueError,
        BROADCAST,
    ),
    "values_of_other_length": (lambda qkv: (*qkv[:2], qkv[2][:, :, :9]), {}, ValueError, "value has length 9 and key"),
    "typo": (tuple, {"dropout": 0.0}, TypeError, "dropout"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_raise(case: str, device: str) -> None:
    change, options, error, message = BAD[case]
    with ha.sdpa(), pytest.raises(error, match=message):
        F.scaled_dot_product_attention(*change(qkv_on(device)), **options)


def test_what_is_no_tensor_raises(device: str) -> None:
    """With a fallback too: there is nothing that PyTorch could do with it."""
    qkv = qkv_on(device)
    for i, name in enumerate(("query", "key", "value")):
        call: list[Any] = [*qkv[:i], [1.0], *qkv[i + 1 :]]
        for fallback in ("raise", "silent"):
            with pytest.raises(TypeError, match=rf"{name} is a list; it must be a torch\.Tensor"):
                ha.scaled_dot_product_attention(*call, fallback=fallback)


def test_flags_are_checked(device: str) -> None:
    for name in ("is_causal", "enable_gqa"):
        flag: dict[str, Any] = {name: "no"}
        with pytest.raises(TypeError, match=f"{name} is 'no'; it must be a bool"):
            ha.scaled_dot_product_attention(*qkv_on(device), **flag)


def test_refusals_name_the_fallback(device: str) -> None:
    q, k, v = qkv_on(device)
    for call in (
        lambda: ha.scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        lambda: ha.scaled_dot_product_attention(q[..., :8], k[..., :8], v[..., :8]),
    ):
        with pytest.raises((NotImplementedError, ValueError), match='or pass fallback="warn", which'):
            call()


def tril(M: int, N: int, offset: int) -> torch.Tensor:
    return torch.ones(M, N, dtype=torch.bool).tril(offset)


def padding(*spans: tuple[int, int], N: int = 40) -> torch.Tensor:
    at = torch.arange(N)
    return torch.stack([(at >= start) & (at < stop) for start, stop in spans])[:, None, None]


#: Masks that are understood, for B = 2, H = 2, M = 24 and N = 40; boolean.
MASKS: dict[str, torch.Tensor] = {
    "all_true": torch.ones(24, 40, dtype=torch.bool),
    "all_true_of_one": torch.ones(1, 1, 1, 1, dtype=torch.bool),
    "causal": tril(24, 40, 16),
    "causal_of_all": tril(24, 40, 16).expand(2, 2, 24, 40),
    "causal_top_left": tril(24, 40, 0),
    "padding_right": padding((0, 40), (0, 11)),
    "padding_left": padding((29, 40), (0, 40)),
    "padding_both": padding((3, 30), (9, 40)),
    "padding_between": padding((0, 40), (0, 33)) & (torch.arange(40) % 13 < 8),
    "two_runs": torch.cat(
        [padding((0, 9), (0, 31)).expand(2, 1, 11, 40), padding((0, 1), (0, 31)).expand(2, 1, 13, 40)], 2
    ),
    "one_row": padding((0, 9), (2, 31))[:, :, :1],
    "nothing_is_left": padding((0, 0), (0, 40)),
    "padding_and_causal": padding((5, 40), (20, 33)) & tril(24, 40, 16),
    "padding_right_and_causal": padding((0, 18), (0, 40)) & tril(24, 40, 16),
    "padding_left_and_causal": padding((39, 40), (17, 40)) & tril(24, 40, 16),
    "padding_and_causal_top_left": padding((5, 40), (0, 9)) & tril(24, 40, 0),
}

#: Masks that become block masks, for the same sizes.
BLOCK_MASKS: dict[str, torch.Tensor] = {
    "holes": torch.eye(24, 40, dtype=torch.bool),
    "window": tril(24, 40, 16) & ~tril(24, 40, 8),
    "hole_in_causal": tril(24, 40, 16) & (torch.arange(40) != 7),
    "three_runs": (torch.arange(24).unsqueeze(1) // 8) * 8 < torch.arange(40),
    "off_by_one": tril(24, 40, 15),
    "by_head": torch.stack([tril(24, 40, 16), tril(24, 40, 0)]),
    "keys_by_head": (torch.arange(40) < torch.tensor([[40], [17]]))[None, :, None],
    "rows_by_sequence": (torch.arange(24) % 3 > torch.tensor([[0], [1]]))[:, None, :, None],
    "prefix": tril(24, 40, 16) | (torch.arange(40) < 20),
    "bits": torch.rand(2, 2, 24, 40, generator=torch.Generator().manual_seed(0)) < 0.3,
    "rows_that_see_nothing": torch.eye(24, 40, dtype=torch.bool).roll(1, 1) & (torch.arange(24) % 5 > 0).unsqueeze(1),
}


def as_bias(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))


@pytest.mark.thorough(but=13)
@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("name", MASKS | BLOCK_MASKS)
def test_masks_of_tensors(name: str, added: bool, device: str) -> None:
    """As PyTorch has them, rows that see nothing included."""
    seen = (MASKS | BLOCK_MASKS)[name]
    mask = (as_bias(seen) if added else seen).to(device)
    qkv = make_qkv("randn", 2, 2, 2, 24, 40, 32, device=device)
    q, k, v = (x.float() for x in qkv)
    # On a GPU its kernels take no bias whose last dimension is broadcast.
    whole = mask.expand(2, 2, 24, 40).contiguous()
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=whole.float() if added else whole)
    out = ha.scaled_dot_product_attention(*qkv, attn_mask=mask)
    hidden = ~seen.expand(2, 2, 24, 40).any(3).to(device)
    assert (out[hidden] == 0).all()
    assert 1e-4 < relative_error(out, stock) < 0.07
    for row, expected in zip(out[~hidden], stock[~hidden], strict=True):
        assert relative_error(row, expected) < 0.25


#: K and V beside Q [2, 2, 24, 32] and a mask of 24 keys, and what is refused.
OTHER_BATCHES: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "more": ((4, 24), (4, 24), "key has batch size 4 and query has 2; they must be equal"),
    "one": ((1, 24), (1, 24), r"key has batch size 1 and query has 2; .*: pass key\.expand\(2, -1, -1, -1\)"),
    "values_of_one": ((2, 24), (1, 24), r"value has batch size 1 and query has 2; .* pass value\.expand"),
    "as_many_values": ((2, 24), (4, 12), "value has batch size 4 and query has 2; they must be equal"),
    "as_many_keys": ((1, 48), (1, 48), "key has batch size 1 and query has 2"),
    "values_of_other_length": ((2, 24), (2, 12), "value has length 12 and key has 24; they must be equal"),
}


@pytest.mark.parametrize("name", ["padding_both", "padding_between"])
@pytest.mark.parametrize("case", OTHER_BATCHES)
def test_padding_of_other_batches_raises(case: str, name: str, device: str) -> None:
    """Packed, they have as many tokens, or give numbers all the same; what PyTorch can do, it does if asked to."""
    of_k, of_v, message = OTHER_BATCHES[case]
    mask = MASKS[name][..., :24].to(device)
    q = make_qkv("randn", 2, 2, 2, 24, 24, 32, device=device)[0]
    k, v = (torch.randn(B, 2, N, 32, dtype=q.dtype, device=device) for B, N in (of_k, of_v))
    with pytest.raises(ValueError, match=message):
        ha.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with ha.sdpa(), pytest.raises(ValueError, match=message):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if case in ("one", "values_of_one"):
        out = ha.scaled_dot_product_attention(q, k, v, attn_mask=mask, fallback="silent")
        assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("name", ["causal", "padding_both", "padding_between", "two_runs", "padding_right_and_causal"])
def test_another_mask_would_be_seen(name: str, device: str) -> None:
    """Every mask above but by a key: the same bounds see it."""
    moved = MASKS[name].expand(2, 1, 24, 40).roll(1, 3).to(device)
    qkv = make_qkv("randn", 2, 2, 2, 24, 40, 32, device=device)
    q, k, v = (x.float() for x in qkv)
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=moved)
    assert relative_error(ha.scaled_dot_product_attention(*qkv, attn_mask=MASKS[name].to(device)), stock) > 0.1


#: Masks that change scores.
BIASES: dict[str, torch.Tensor] = {
    "bias": torch.zeros(24, 40).masked_fill(~tril(24, 40, 16), -1.0),
    "bias_of_a_later_head": torch.zeros(2, 24, 40) + torch.arange(2)[:, None, None],
    "nan": torch.zeros(24, 40).masked_fill(~tril(24, 40, 16), float("nan")),
    "lowest_for_all_keys": torch.full((24, 40), torch.finfo(torch.float32).min),
    "hides_too_little": torch.zeros(24, 40).masked_fill(~tril(24, 40, 16), -9990.0),
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_fall_back_if_asked_to(name: str, device: str) -> None:
    mask = BIASES[name].to(device)
    q, k, v = (x.float() for x in make_qkv("randn", 2, 2, 2, 24, 40, 32, device=device))
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.raises(
        NotImplementedError, match=r"attn_mask is a Tensor .*other values than 0 and -inf; it must be bool"
    ):
        ha.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.warns(ha.FallbackWarning, match="PyTorch's attention runs, as attn_mask is a Tensor"):
        warned = ha.scaled_dot_product_attention(q, k, v, attn_mask=mask, fallback="warn")
    with warnings.catch_warnings(), ha.sdpa(fallback="silent"):
        warnings.simplefilter("error")
        silent = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    for out in (warned, silent):
        assert torch.equal(out.nan_to_num(9), stock.nan_to_num(9))


@pytest.mark.parametrize(("D", "D_v", "recipe"), [(272, 64, ha.BALANCED), (160, 64, ha.BALANCED), (160, 160, ha.BF16)])
def test_head_dims_without_block_masks_fall_back_if_asked_to(D: int, D_v: int, recipe: ha.Recipe, device: str) -> None:
    mask = BLOCK_MASKS["window"].to(device)
    q, k, v = (x.float() for x in make_qkv("randn", 1, 1, 1, 24, 40, D, device=device, D_v=D_v))
    with pytest.raises(
        NotImplementedError, match=rf"attn_mask hides other keys .* D {D}, D_v {D_v} .*; such a mask is acc"
    ):
        ha.scaled_dot_product_attention(q, k, v, attn_mask=mask, recipe=recipe)
    out = ha.scaled_dot_product_attention(q, k, v, attn_mask=mask, recipe=recipe, fallback="silent")
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_a_mask_on_another_device_is_refused() -> None:
    elsewhere = mask_tensors.Visible(False, False, (), scores=torch.ones(24, 40, dtype=torch.bool, device="meta"))
    q = torch.zeros(1, 2, 24, 32)
    with pytest.raises(ValueError, match="attn_mask is on meta; it must be on cpu"):
        mask_tensors.check_visible("helion_attn.sdpa", elsewhere, q, q, ha.BALANCED)


def test_a_block_mask_is_kept_while_its_mask_is_as_it_was(device: str, masks_made: list[torch.Size]) -> None:
    mask = BLOCK_MASKS["window"].to(device).clone()
    before = len(mask_tensors._KEPT)
    qkv = make_qkv("randn", 1, 2, 2, 24, 40, 32, device=device)
    outs = [ha.scaled_dot_product_attention(*qkv, attn_mask=mask) for _ in range(2)]
    assert masks_made == [(1, 1, 24, 40)]
    assert torch.equal(*outs)
    # In place: by PyTorch, which counts it, and by giving the tensor other memory.
    mask[:, 20] = True
    changed = ha.scaled_dot_product_attention(*qkv, attn_mask=mask)
    assert len(masks_made) == 2
    assert torch.equal(changed, ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(mask)))
    assert not torch.equal(changed, outs[0])
    mask.data = BLOCK_MASKS["window"].to(device).clone()
    assert torch.equal(ha.scaled_dot_product_attention(*qkv, attn_mask=mask), outs[0])
    # One that is broadcast is another for other lengths.
    by_head = BLOCK_MASKS["keys_by_head"].to(device).clone()
    for M in (24, 9):
        out = ha.scaled_dot_product_attention(qkv[0][:, :, :M], *qkv[1:], attn_mask=by_head)
        expected = ha.attention(
            qkv[0][:, :, :M], *qkv[1:], block_mask=ha.BlockMask.from_dense(by_head.expand(-1, -1, M, -1))
        )
        assert torch.equal(out, expected)
    assert len(mask_tensors._KEPT) == before + 3
    del mask, by_head
    gc.collect()
    assert len(mask_tensors._KEPT) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there an assertion fails, which ends the process's CUDA")
@pytest.mark.parametrize("write", ["data", "numpy", "one_row"])
def test_a_write_that_pytorch_does_not_count_is_noticed(write: str, masks_made: list[torch.Size]) -> None:
    """In a mask of less than a sample, whatever is written: the block mask is made again."""
    mask, other = torch.rand(2, 150, 150, generator=torch.Generator().manual_seed(0)) < 0.5
    qkv = make_qkv("randn", 1, 2, 2, 150, 150, 32)
    for changed in (mask, other):
        if changed is other:
            version = mask._version
            if write == "data":
                mask.data.copy_(other)
            elif write == "numpy":
                mask.numpy()[:] = other.numpy()
            else:
                mask.data[77] = other[77]
            assert mask._version == version
        for _ in range(2):
            out = ha.scaled_dot_product_attention(*qkv, attn_mask=mask)
            assert torch.equal(out, ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(mask.clone())))
    assert masks_made.count(torch.Size((1, 1, 150, 150))) == 2


@pytest.mark.parametrize("shape", [(2, 1, 40, 30), (40, 30), (3, 1, 1, 50), (1, 5000), (2, 3, 2, 900)], ids=str)
def test_the_sample_of_a_mask(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all sequences and heads, evenly spread, and of a long row its columns: a view of bounded size."""
    mask = torch.arange(math.prod(shape)).view(shape)
    assert torch.equal(mask_tensors._sample(mask), mask)
    monkeypatch.setattr(mask_tensors, "SAMPLE", 300)
    sample = mask_tensors._sample(mask)
    assert min(150, mask.numel() / 2) <= sample.numel() <= 600
    assert sample.shape[:-2] == mask.shape[:-2]
    assert sample.data_ptr() == mask.data_ptr()
    (row, column), (rows, columns) = sample.stride()[-2:], shape[-2:]
    assert (row // columns * sample.size(-2) >= rows) or sample.size(-2) == 1
    assert column * sample.size(-1) >= columns


def test_masks_of_inference_mode_are_not_kept(device: str) -> None:
    """They do not count their changes."""
    qkv = make_qkv("randn", 1, 2, 2, 24, 40, 32, device=device)
    with torch.inference_mode():
        mask = BLOCK_MASKS["window"].to(device).clone()
        for _ in range(2):
            out = ha.scaled_dot_product_attention(*qkv, attn_mask=mask)
            assert torch.equal(out, ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(mask)))
            mask[:, 20] = True


def test_masks_that_a_graph_writes_are_not_kept(device: str) -> None:
    """torch.compile's CUDA graphs return the same tensor from every replay, which counts no change."""
    qkv = make_qkv("randn", 1, 2, 2, 24, 40, 32, device=device)
    mask = BLOCK_MASKS["window"].to(device).clone()
    torch._C._set_cached_tensors_enabled(True)
    torch._C._add_cached_tensor(mask)
    try:
        for _ in range(2):
            out = ha.scaled_dot_product_attention(*qkv, attn_mask=mask)
            assert torch.equal(out, ha.attention(*qkv, block_mask=ha.BlockMask.from_dense(mask)))
            mask.data[:, 20] = True
    finally:
        torch._C._remove_cached_tensor(mask)
        torch._C._set_cached_tensors_enabled(False)


def test_a_fallback_warns_at_the_call(device: str) -> None:
    """Of the function, in the context, and from within PyTorch's modules."""
    qkv = qkv_on(device)
    module = torch.nn.MultiheadAttention(32, 2, device=device).eval()
    tokens = torch.zeros(4, 1, 32, device=device)
    calls: list[Callable[[], object]] = [
        lambda: ha.scaled_dot_product_attention(*qkv, dropout_p=0.1, fallback="warn"),
        lambda: F.scaled_dot_product_attention(*qkv, dropout_p=0.1),
        lambda: module(tokens, tokens, tokens, need_weights=True),
    ]
    with torch.no_grad(), ha.sdpa(fallback="warn"):
        for call in calls:
            with pytest.warns(ha.FallbackWarning) as said:
                call()
            assert {warning.filename for warning in said} == {__file__}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_low_numbers_hide_as_infinity_does(name: str, dtype: torch.dtype, device: str) -> None:
    """The lowest one, with which transformers fills its masks, and -1e4, which other models have."""
    seen = (MASKS | BLOCK_MASKS)[name].to(device)
    qkv = make_qkv("randn", 2, 2, 2, 24, 40, 32, device=device)
    expected = ha.scaled_dot_product_attention(*qkv, attn_mask=seen)
    for low in (torch.finfo(dtype).min, -1e4):
        mask = torch.zeros(24, 40, dtype=dtype, device=device).masked_fill(~seen, low)
        assert torch.equal(ha.scaled_dot_product_attention(*qkv, attn_mask=mask), expected)


#: The arguments of PyTorch's function, in its order.
DEFAULTS: dict[str, Any] = {
    **{"query": None, "key": None, "value": None, "attn_mask": None},
    **{"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
}


@pytest.mark.parametrize("case", [case for case in BAD if case not in ("rank_3", "value_of_rank_3", "typo", "meta")])
def test_what_pytorch_can_run_falls_back(case: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To PyTorch's function, with the arguments of the call: what that returns is returned, what it raises is raised.

    Its numbers are not compared: of a negative scale its kernels on a GPU make NaN, or other ones from run to run.
    """
    change, options, _, _ = BAD[case]
    qkv = change(qkv_on(device))
    stock = F.scaled_dot_product_attention
    calls: list[dict[str, Any]] = []
    ended: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(dict(zip(list(DEFAULTS), args, strict=False)) | kwargs)
        try:
            ended.append(stock(*args, **kwargs))
        except Exception as error:
            ended.append(error)
            raise
        return ended[0]

    monkeypatch.setattr("helion_attn.integrations.sdpa.STOCK", recorded)
    try:
        found: Any = ha.scaled_dot_product_attention(*qkv, **options, fallback="silent")
    except Exception as error:
        found = error
    assert found is ended[0]
    (call,) = calls
    expected = DEFAULTS | dict(zip(list(DEFAULTS), qkv, strict=False)) | options
    assert call.keys() == expected.keys()
    for name, value in expected.items():
        assert call[name] is value if isinstance(value, torch.Tensor) else call[name] == value, name


def test_gradients_are_those_of_attention(device: str) -> None:
    """Also with a mask of padding, which becomes packed sequences, and under autocast."""
    padding = (torch.arange(24, device=device) < 20)[None, None, None]
    for mask, keys in ((None, 24), (padding, 20)):
        q, k, v = (x.detach().requires_grad_() for x in qkv_on(device))
        out = ha.scaled_dot_product_attention(q, k, v, mask)
        found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        out = ha.attention(q, k[:, :, :keys], v[:, :, :keys])
        expected = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        for x, y in zip(found, expected, strict=True):
            assert relative_error(x, y) < 0.02
    q, k, v = (x.float().requires_grad_() for x in qkv_on(device))
    with torch.autocast(device, torch.bfloat16), ha.sdpa():
        out = F.scaled_dot_product_attention(q, k, v)
    assert out.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.sum(), (q, k, v)))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("way", ["decorated", "decorated_reentrant", "context_fn"])
def test_checkpoints(way: str, device: str) -> None:
    """What runs again in the backward pass, where the context is left, is what ran before."""

    def gradients(call: Any) -> list[torch.Tensor]:
        qkv = [x.detach().requires_grad_() for x in qkv_on(device)]
        with ha.sdpa():
            loss = call(*qkv).float().square().sum()
        loss.backward()
        return [x.grad for x in qkv if x.grad is not None]

    if way == "context_fn":
        options: dict[str, Any] = {"context_fn": lambda: (contextlib.nullcontext(), ha.sdpa())}
        found = gradients(lambda *qkv: checkpoint(causal, *qkv, use_reentrant=False, **options))
    else:
        reentrant = way == "decorated_reentrant"
        found = gradients(lambda *qkv: checkpoint(ha.sdpa()(causal), *qkv, use_reentrant=reentrant))
    expected = gradients(causal)
    assert len(found) == len(expected) == 3
    assert all(relative_error(x, y) < 0.003 for x, y in zip(found, expected, strict=True))
    q, k, v = (x.detach().requires_grad_() for x in qkv_on(device))
    in_16_bits = torch.autograd.grad(causal(q, k, v).float().square().sum(), (q, k, v))
    assert all(relative_error(x, y) > 0.006 for x, y in zip(found, in_16_bits, strict=True))


def test_masks_that_learn(device: str) -> None:
    """A bias that requires grad would have no gradient."""
    q, k, v = (x.float() for x in qkv_on(device))
    bias = torch.zeros(24, 24, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"attn_mask requires grad; .* or detach attn_mask; or pass fallback"):
        ha.scaled_dot_product_attention(q, k, v, bias)
    # Not the bias alone: PyTorch's kernel for a GPU keeps no lse for that, and its backward calls it "not aligned".
    learning = q.clone().requires_grad_()
    ha.scaled_dot_product_attention(learning, k, v, bias, fallback="silent").sum().backward()
    assert bias.grad is not None
    with torch.no_grad():
        assert torch.equal(ha.scaled_dot_product_attention(q, k, v, bias), ha.attention(q, k, v))
    assert torch.equal(ha.scaled_dot_product_attention(q, k, v, bias.detach()), ha.attention(q, k, v))


def test_what_goes_wrong_later_does_not_fall_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr("helion_attn.integrations.sdpa.attention", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        ha.scaled_dot_product_attention(*qkv_on(device), fallback="silent")


def test_fallback_is_checked(device: str) -> None:
    word: Any = "no"
    for call in (
        lambda: ha.sdpa(fallback=word),
        lambda: ha.scaled_dot_product_attention(*qkv_on(device), fallback=word),
    ):
        with pytest.raises(ValueError, match=r"fallback is 'no'; it must be one of \('raise', 'warn', 'silent'\)"):
            call()


def test_decorator(device: str) -> None:
    qkv = qkv_on(device)

    @ha.sdpa(recipe="fast")
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, depth: int = 0) -> torch.Tensor:
        """Its own."""
        return attend(q, k, v, depth - 1) if depth else F.scaled_dot_product_attention(q, k, v)

    assert attend.__doc__ == "Its own."
    for depth in (0, 2):
        assert torch.equal(attend(*qkv, depth), ha.attention(*qkv, recipe=ha.FAST))
    assert is_stock(F.scaled_dot_product_attention(*qkv), qkv)

    def later() -> Any:
        yield F.scaled_dot_product_attention(*qkv)

    async def coroutine() -> None:
        pass

    async def both() -> Any:
        yield F.scaled_dot_product_attention(*qkv)

    for function in (later, coroutine, both):
        with pytest.raises(TypeError, match="must be an ordinary function: decorate those that it calls, and leave"):
            ha.sdpa()(function)
    # The advice leaks nothing.
    inside = ha.sdpa(recipe="fast")(lambda: F.scaled_dot_product_attention(*qkv))

    def advised() -> Any:
        yield inside()
        with ha.sdpa(recipe="fast"):
            out = F.scaled_dot_product_attention(*qkv)
        yield out

    expected, stock = ha.attention(*qkv, recipe="fast"), F.scaled_dot_product_attention(*qkv)
    for out in advised():
        assert torch.equal(out, expected)
        assert torch.equal(F.scaled_dot_product_attention(*qkv), stock)


X = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(0))

#: What `torch.nn.MultiheadAttention` is called with, besides its inputs.
MHA_CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "key_padding": {"key_padding_mask": torch.arange(24) >= torch.tensor([[24], [9]])},
    "causal": {"attn_mask": ~tril(24, 24, 0), "is_causal": True},
    "causal_mask": {"attn_mask": ~tril(24, 24, 0)},
    "both": {"attn_mask": ~tril(24, 24, 0), "key_padding_mask": torch.arange(24) >= torch.tensor([[24], [9]])},
}


@pytest.mark.parametrize("case", MHA_CALLS)
def test_multihead_attention(case: str, device: str) -> None:
    """What its attention would be with the exact oracle is what it is without; with the kernel it is near."""
    x = X.to(device)
    options = {name: y.to(device) if isinstance(y, torch.Tensor) else y for name, y in MHA_CALLS[case].items()}
    module = torch.nn.MultiheadAttention(64, 2, batch_first=True, device=device).eval()
    with torch.no_grad():
        stock, _ = module(x, x, x, need_weights=False, **options)
        with ha.sdpa():
            out, _ = module(x, x, x, need_weights=False, **options)
        with ha.sdpa(recipe=ha.BF16):
            near, _ = module(x, x, x, need_weights=False, **options)
    assert 1e-4 < relative_error(out, stock) < 0.07
    assert 0 < relative_error(near, stock) < 0.01


def test_fused_encoders_raise(device: str) -> None:
    """PyTorch takes them where no mode is active; whoever calls them inside must not get bf16 attention unasked."""
    x = X.to(device)
    with ha.sdpa(), pytest.raises(NotImplementedError, match="_native_multi_head_attention is not supported"):
        torch._native_multi_head_attention(x, x, x, 64, 2, x, x, x, x)


def test_masks_are_not_read_in_a_graph(device: str) -> None:
    torch._dynamo.reset()
    qkv, mask = qkv_on(device), torch.ones(24, 24, dtype=torch.bool, device=device)

    def attend(fallback: Fallback) -> torch.Tensor:
        return ha.scaled_dot_product_attention(*qkv, attn_mask=mask, fallback=fallback)

    # Dynamo of torch 2.11 does not format an exception: it shows its class, and what was added to its message.
    shown = (
        r"in torch\.compile\(fullgraph=True\) it must be None"
        r'|NotImplementedError.*; or pass fallback="warn", which hands such calls'
    )
    with pytest.raises(Exception, match=shown):
        torch.compile(attend, fullgraph=True, backend="eager")("raise")


def test_a_mask_is_read_in_every_call(device: str) -> None:
    """A tensor does not count all that changes it: not what a collective, or a kernel of somebody's, writes."""
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool, device=device)
    version = mask._version
    for hidden in (0, 3):
        mask.data[1, ..., 40 - hidden :] = False
        assert [part.keys for part in mask_tensors.read_mask(mask, 2, 2, 24, 40).first] == [(0, 40), (0, 40 - hidden)]
    assert mask._version == version


def test_a_mask_is_read_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    tolist = torch.Tensor.tolist

    def counted(x: torch.Tensor) -> Any:
        reads.append(x.shape)
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    mask_tensors.read_mask(MASKS["padding_and_causal"].to(device), 2, 2, 24, 40)
    assert len(reads) == 1


def test_autocast_is_as_in_pytorch(device: str) -> None:
    q, k, v = (x.float() for x in qkv_on(device))
    with torch.autocast(device, dtype=torch.bfloat16), ha.sdpa():
        out = F.scaled_dot_product_attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, ha.attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 2, k, v, is_causal=True) + 1


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_around_a_compiled_function(device: str) -> None:
    """What was compiled outside is not what runs inside, nor the other way round."""
    qkv = qkv_on(device)
    function = compiled(attend)
    stock = function(*qkv)
    assert torch.equal(stock, attend(*qkv))
    for recipe in (ha.BALANCED, ha.FAST):
        with ha.sdpa(recipe=recipe):
            assert torch.equal(function(*qkv), attend(*qkv))
            assert not torch.equal(function(*qkv), stock)
    assert torch.equal(function(*qkv), stock)


def test_inside_a_compiled_function(device: str) -> None:
    def with_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with ha.sdpa(recipe=ha.FAST):
            return attend(q, k, v)

    qkv = qkv_on(device)
    out = compiled(with_context)(*qkv)
    assert torch.equal(out, with_context(*qkv))
    assert not torch.equal(out, attend(*qkv))
