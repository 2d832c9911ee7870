"""Models of transformers, tiny and random, with attn_implementation="helion_fp8", against eager attention.

The same model, with the fp64 oracle in the place of the kernel, agrees with eager to fp32 rounding: that holds masks,
windows, softcaps, sinks, scales and padding to account. With the kernel, the logits are as far from eager's as they are
with the rounding model, which has the kernel's roundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.exact_attention import EXACT, with_oracle
from helpers.refused import refused
from helpers.small_models import SIZES, tokens_of

transformers = pytest.importorskip("transformers")
from helion_attn.integrations import mask_tensors  # noqa: E402
from helion_attn.integrations import transformers as ours  # noqa: E402
from helion_attn.integrations.transformers_masks import VisibleKeys  # noqa: E402

#: Name -> config class, model class, and what makes the model's attention special.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 7}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 7, "query_pre_attn_scalar": 4}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}

WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")


@functools.cache
def make_model(name: str) -> Any:
    """A model in fp32, of one layer with its window and one without if it has both kinds."""
    config_class, model_class, options = MODELS[name]
    if name in ("gemma2", "gemma3", "gpt_oss"):
        options = options | {"layer_types": ["sliding_attention", "full_attention"]}
    config = getattr(transformers, config_class)(**SIZES | options)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    return model


@pytest.fixture(autouse=True)
def registered() -> None:
    ha.register_transformers()


def run(model: Any, implementation: str, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(tokens, attention_mask=mask).logits


@pytest.mark.parametrize("name", MODELS)
def test_prefill_with_exact_attention_is_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model(name), tokens_of(2, 19)
    eager = run(model, "eager", tokens)
    with_oracle(monkeypatch)
    assert relative_error(run(model, "helion_fp8", tokens), eager) < EXACT


CHANGES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "causal": (["llama"], {"causal": False}),
    "sm_scale": (["gemma2"], {"sm_scale": 0.25}),
    "window_by_one": (list(WINDOWED), {"window": (7, 0)}),
    "no_window": (list(WINDOWED), {"window": None}),
    "no_softcap": (["gemma2"], {"softcap": None}),
    "no_sinks": (["gpt_oss"], {"sinks": None}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_wrong_arguments_would_be_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names, changes = CHANGES[change]
    with_oracle(monkeypatch, **changes)
    for name in names:
        model, tokens = make_model(name), tokens_of(2, 19)
        assert relative_error(run(model, "helion_fp8", tokens), run(model, "eager", tokens)) > 100 * EXACT


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_padding_with_exact_attention_is_eager(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model(name), tokens_of(3, 19)
    mask = torch.ones_like(tokens)
    for row, length in enumerate((12, 19, 3)):
        mask[row, length:] = 0
    if side == "left":
        mask = mask.flip(1)
    kept = mask.bool()
    eager = run(model, "eager", tokens, mask)[kept]
    with_oracle(monkeypatch)
    assert relative_error(run(model, "helion_fp8", tokens, mask)[kept], eager) < EXACT
    assert relative_error(run(model, "helion_fp8", tokens)[kept], eager) > (100 * EXACT if side == "left" else -1)


def generate(model: Any, implementation: str, tokens: torch.Tensor, steps: int, **options: Any) -> Any:
    model.set_attn_implementation(implementation)
    options |= {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    return model.generate(tokens, max_new_tokens=steps, **options)


@pytest.mark.thorough(but=9)
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "left_padded"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_exact_attention_is_eager(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the cache, past the window, and with a batch of two lengths."""
    model, tokens = make_model(name), tokens_of(2, 6)
    mask = torch.ones_like(tokens)
    if padded:
        mask[0, :4] = 0
    eager = generate(model, "eager", tokens, 12, attention_mask=mask)
    with_oracle(monkeypatch)
    exact = generate(model, "helion_fp8", tokens, 12, attention_mask=mask)
    assert torch.equal(exact.sequences, eager.sequences)
    assert relative_error(torch.stack(exact.logits), torch.stack(eager.logits)) < EXACT


def test_chunked_prefill_with_exact_attention_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries that do not start at the first key."""
    with_oracle(monkeypatch)
    tokens = tokens_of(1, 20)
    for name in ("llama", "gemma2"):
        model = make_model(name)
        eager = run(model, "eager", tokens)
        model.set_attn_implementation("helion_fp8")
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            chunks = [model(x, past_key_values=cache).logits for x in tokens.split([9, 4, 7], 1)]
        assert relative_error(torch.cat(chunks, 1), eager) < EXACT


#: By name: tokens of the chunks, and what is 0 of the mask that comes with the last one, or is left out of it.
STALE: dict[str, tuple[list[int], int, bool]] = {
    "one_token": ([15, 1], 1, True),
    "one_token_zero": ([15, 1], 1, False),
    "two_hidden": ([15, 1], 2, True),
    "a_chunk": ([9, 7], 3, True),
    "a_chunk_all_hidden": ([12, 4], 4, False),
}


@pytest.mark.thorough(but=8)
@pytest.mark.parametrize("case", STALE)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_a_mask_that_ends_before_the_tokens_is_eager(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new tokens attend to the keys that the mask leaves, padded sequences among them."""
    chunks, hidden, is_short = STALE[case]
    model, tokens = make_model(name), tokens_of(2, 16)
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    last = mask[:, :-hidden] if is_short else mask.index_fill(1, torch.arange(16 - hidden, 16), 0)

    def logits(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache()
        with torch.no_grad():
            for x, m in zip(tokens.split(chunks, 1), (mask[:, : chunks[0]], last), strict=True):
                out = model(x, attention_mask=m, past_key_values=cache).logits
        return out

    eager = logits("eager")
    with_oracle(monkeypatch)
    assert relative_error(logits("helion_fp8"), eager) < EXACT


def test_a_window_that_a_mask_hides_raises() -> None:
    mask = ours.visible_keys(1, 1, 9, 8, attention_mask=torch.ones(1, 6), mask_function=None)
    assert isinstance(mask, VisibleKeys)
    mask = VisibleKeys(mask.spans, 1, 9, True, 2)
    with pytest.raises(NotImplementedError, match=r"hides the last 3 keys, .* sliding_window of 3; extend attention_m"):
        forward(1, 9, attention_mask=mask)


@pytest.mark.parametrize("name", MODELS)
def test_logits_with_the_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_model(name), tokens_of(1, 19)
    eager = run(model, "eager", tokens)
    error = relative_error(run(model, "helion_fp8", tokens), eager)
    with monkeypatch.context() as patch:
        patch.setattr(ours, "attention", ha.reference.fp8_attention)
        modelled = relative_error(run(model, "helion_fp8", tokens), eager)
        patch.setattr(ours, "attention", lambda q, k, v, **_: torch.zeros_like(q))
        zeros = relative_error(run(model, "helion_fp8", tokens), eager)
    # The kernel's sums have another order, and these models amplify a flipped rounding.
    assert 0 < error < 1.5 * modelled + 1e-3
    assert error < 0.5 * zeros


@pytest.mark.parametrize("M", [1, 9], ids=["one_query", "prefill"])
def test_the_mask_says_whether_attention_is_causal(M: int, device: str) -> None:
    """Not the module, which may not know: it is wrong here on purpose."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    q, k, v = make_qkv("randn", 2, 2, 2, M, 9, 16, torch.float32, device)
    for mask_function, causal in ((bidirectional_mask_function, False), (causal_mask_function, True)):
        for is_causal in (False, True):
            mask = ours.visible_keys(2, M, 9, 9 - M, mask_function=mask_function)
            out, _ = ours.attention_forward(module(is_causal), q, k, v, mask, is_causal=is_causal)
            assert torch.equal(out, ha.attention(q, k, v, causal=causal).transpose(1, 2))


def test_recipe_by_name() -> None:
    ha.register_transformers("helion_accurate", recipe=ha.ACCURATE)
    model, tokens = make_model("llama"), tokens_of(1, 19)
    eager = run(model, "eager", tokens)
    balanced, accurate = (relative_error(run(model, name, tokens), eager) for name in ("helion_fp8", "helion_accurate"))
    assert 0 < accurate < balanced


def test_registration_is_checked() -> None:
    for name in ("sdpa", "eager", "flash_attention_2"):
        with pytest.raises(ValueError, match=f"name is '{name}'"):
            ha.register_transformers(name)
    with pytest.raises(TypeError, match="recipe is"):
        ha.register_transformers(recipe=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name is"):
        ha.register_transformers(None)  # type: ignore[arg-type]


def module(is_causal: bool = True) -> torch.nn.Module:
    made = torch.nn.Module()
    made.is_causal = is_causal  # type: ignore[assignment]
    return made


def forward(M: int = 4, N: int = 4, **options: Any) -> torch.Tensor:
    q, k = torch.zeros(1, 2, M, 16), torch.zeros(1, 2, N, 16)
    options = {"attention_mask": None} | options
    return ours.attention_forward(options.pop("module", module()), q, k, k, **options)[0]


@pytest.mark.parametrize("rule", ours.RULES, ids=lambda rule: rule.argument)
def test_unsupported_arguments_raise(rule: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{rule.argument} is .*; it must be"):
        forward(**{rule.argument: refused(rule.argument)})


def test_other_arguments() -> None:
    forward(**dict.fromkeys(ours.IGNORED, 1), something_new=None)
    with pytest.raises(NotImplementedError, match="something_new is given"):
        forward(something_new=1)


def test_bad_values_have_the_names_of_transformers() -> None:
    with pytest.raises(ValueError, match="sliding_window is 0; it must be None, for no window, or at least 1"):
        forward(sliding_window=0)
    of_size_0 = VisibleKeys(((0, 4),), 4, 4, True, -1)
    with pytest.raises(ValueError, match="sliding_window is 0; it must be None"):
        forward(attention_mask=of_size_0)
    with pytest.raises(ValueError, match=r"scaling is -1\.0"):
        forward(scaling=-1.0)
    with pytest.raises(ValueError, match=r"s_aux has shape \(3,\)"):
        forward(s_aux=torch.zeros(3))
    window_of_one = VisibleKeys(((0, 4),), 4, 4, True, 0)
    with pytest.raises(ValueError, match="sliding_window is 2 and the mask's is 1"):
        forward(attention_mask=window_of_one, sliding_window=2)


def test_ambiguous_masks_raise() -> None:
    with pytest.raises(NotImplementedError, match="without a mask"):
        forward(M=2, N=4)
    with pytest.raises(NotImplementedError, match="not causal"):
        forward(module=module(False), sliding_window=2)
    full = VisibleKeys(((0, 4),), 4, 4, True, None)
    forward(attention_mask=full)
    with pytest.raises(ValueError, match="they must agree"):
        forward(attention_mask=full, sliding_window=2)
    with pytest.raises(ValueError, match="attention_mask is for"):
        forward(N=5, attention_mask=full)


#: Positions of two documents of four tokens, packed into each sequence.
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(2, -1)


def holes() -> torch.Tensor:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 3] = 0
    return mask


def prefix() -> torch.Tensor:
    """[2, 1, 8, 8], another one for each sequence."""
    lengths = torch.tensor([3, 5])[:, None, None, None]
    return torch.ones(8, 8, dtype=torch.bool).tril() | (torch.arange(8) < lengths)


#: What models are called with.
OTHER_MASKS: dict[str, Callable[[], dict[str, Any]]] = {
    "holes": lambda: {"attention_mask": holes()},
    "packed_documents": lambda: {"position_ids": PACKED, "use_cache": False},
    "prefix": lambda: {"attention_mask": prefix()},
    "prefix_added": lambda: {
        "attention_mask": torch.zeros(2, 1, 8, 8).masked_fill(~prefix(), torch.finfo(torch.float32).min)
    },
    "everything": lambda: {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)},
    "causal": lambda: {"attention_mask": torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()},
    "padding": lambda: {
        "attention_mask": (torch.arange(8) < torch.tensor([[8], [5]]))[:, None, None].expand(-1, -1, 8, -1)
    },
}


@pytest.mark.thorough(but=13)
@pytest.mark.parametrize("case", OTHER_MASKS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_other_masks_with_exact_attention_are_eager(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With windows (7), softcaps and sinks. A mask of four dimensions says all; the models leave their windows out."""
    model, tokens = make_model(name), tokens_of(2, 8)
    inputs = OTHER_MASKS[case]()
    seen = inputs.get("attention_mask")
    added = (
        seen if seen is None or seen.dim() == 2 or seen.is_floating_point() else torch.where(seen, 0.0, float("-inf"))
    )

    def logits(implementation: str, **options: Any) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(tokens, **inputs | options).logits

    # Eager attention adds masks.
    eager = logits("eager", attention_mask=added)
    with_oracle(monkeypatch)
    assert relative_error(logits("helion_fp8"), eager) < EXACT
    if case != "causal":
        assert relative_error(run(model, "helion_fp8", tokens), eager) > 100 * EXACT


def test_chunked_attention_and_decoding_with_exact_attention_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama 4's layers see chunks of 5 tokens: in a prompt of 12, and in steps from the cache."""
    config = transformers.Llama4TextConfig(
        **SIZES, attention_chunk_size=5, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=64,
        moe_layers=[],
    )  # fmt: skip
    torch.manual_seed(0)
    model, tokens = transformers.Llama4ForCausalLM(config).eval(), tokens_of(2, 12)
    eager = generate(model, "eager", tokens, 6)
    with_oracle(monkeypatch)
    exact = generate(model, "helion_fp8", tokens, 6)
    assert torch.equal(exact.sequences, eager.sequences)
    assert relative_error(torch.stack(exact.logits), torch.stack(eager.logits)) < EXACT


#: Text with a block of image tokens, 4 to 11, that see one another.
IN_AN_IMAGE = ((torch.arange(19) >= 4) & (torch.arange(19) < 12)).long().expand(2, -1)

#: Models whose masks are their own: config and model class, sizes, and further inputs.
MASKED_MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "modernbert": (
        "ModernBertConfig",
        "ModernBertModel",
        {
            **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
        },
        {},
    ),
    "gemma3_with_images": (
        "Gemma3Config",
        "Gemma3Model",
        {
            "text_config": SIZES | {"sliding_window": 7, "query_pre_attn_scalar": 4},
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
                **{"image_size": 28, "patch_size": 14},
            },
            "mm_tokens_per_image": 4,
        },
        {"token_type_ids": IN_AN_IMAGE},
    ),
}


@pytest.mark.parametrize("name", MASKED_MODELS)
def test_models_with_masks_of_their_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows in both directions, and blocks in causal text; with padding."""
    config_class, model_class, sizes, inputs = MASKED_MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**sizes)).eval()
    tokens = tokens_of(2, 19)
    kept = torch.arange(19) < torch.tensor([[19], [14]])

    def states(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(tokens, attention_mask=kept.long(), **inputs).last_hidden_state[kept]

    eager = states("eager")
    with_oracle(monkeypatch)
    assert relative_error(states("helion_fp8"), eager) < EXACT
    monkeypatch.setattr(mask_tensors, "block_mask_of", lambda *_: None)
    assert relative_error(states("helion_fp8"), eager) > 100 * EXACT


def test_a_mask_is_converted_once_for_all_layers(masks_made: list[torch.Size]) -> None:
    """In inference mode too."""
    model, tokens = make_model("llama"), tokens_of(2, 8)
    model.set_attn_implementation("helion_fp8")
    with torch.inference_mode():
        model(tokens, position_ids=PACKED, use_cache=False)
    assert model.config.num_hidden_layers == 2
    assert masks_made == [(2, 1, 8, 8)]


def test_static_caches_raise() -> None:
    model, tokens = make_model("llama"), tokens_of(2, 8)
    model.set_attn_implementation("helion_fp8")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="DynamicCache"):
        model.generate(tokens, max_new_tokens=3, cache_implementation="static")
    at: Any = {"q_offset": torch.tensor(0), "mask_function": lambda *_: True}
    with pytest.raises(NotImplementedError, match="DynamicCache"):
        ours.visible_keys(2, 8, 8, **at)


def test_masks_that_are_recognised() -> None:
    """A window is one of its own size; all others are made by scores."""
    from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

    sizes: dict[str, Any] = {"batch_size": 2, "q_length": 8, "kv_length": 8, "local_size": 3}
    near = torch.arange(8)[:, None] - torch.arange(8)
    chunks = chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long))
    of_chunks = (near >= 0) & (torch.arange(8)[:, None] // 3 == torch.arange(8) // 3)
    window = (near >= 0) & (near < 4)
    for mask_function, expected in ((chunks, of_chunks), (sliding_window_causal_mask_function(4), window)):
        found = ours.visible_keys(**sizes, mask_function=mask_function)
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected.expand(2, 1, 8, 8))
    found = ours.visible_keys(**sizes, mask_function=sliding_window_causal_mask_function(3))
    assert isinstance(found, VisibleKeys)
    assert found.left == 2


def test_models_train() -> None:
    """Gradients of all weights err at most three times as much as logits."""
    model, logits, gradients = make_model("llama"), [], []
    for implementation in ("sdpa", "helion_fp8"):
        model.set_attn_implementation(implementation)
        logits.append(model(tokens_of(1, 40)).logits)
        gradients.append(torch.autograd.grad(logits[-1].square().mean(), list(model.parameters())))
    bound = 3 * relative_error(logits[1], logits[0])
    assert bound < 0.25
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert relative_error(found, expected) < bound


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_padding_is_read_between_graphs(name: str) -> None:
    """Without fullgraph; nothing that reads the mask, or packs by it, is in a graph."""
    model, tokens = make_model(name), tokens_of(2, 19)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    expected = run(model, "helion_fp8", tokens, mask)
    graphs: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    out = run(torch.compile(model, backend=collect), "helion_fp8", tokens, mask)
    assert torch.equal(out, expected)
    assert graphs
    assert not [code for code in graphs if "amin" in code or "attention_varlen" in code]
