"""Fused norms and RoPE in transformers: tiny random Llama, Qwen3 and Gemma 3, beside what is not fused."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any
from unittest import mock

import pytest
import torch

import helion_attn as ha
from helion_attn import auto, plans
from helion_attn.reference.norm import rms_norm
from helion_attn.reference.rope import apply_rope_qk
from helion_attn.testing import relative_error
from helpers.generation import CACHE

transformers = pytest.importorskip("transformers")
from helion_attn.integrations import transformers as plain  # noqa: E402
from helion_attn.integrations import transformers_fused as ours  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # attention that looks somewhere, and logits that differ
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

#: Name -> config class, model class, further sizes, and the fused options that change its outputs.
MODELS: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, ("rope",)),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}, ("rope", "q_norm", "k_norm")),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        ("rope", "q_norm", "k_norm", "window", "sm_scale"),
    ),
}

#: fp32 has 2**-24 a step, and a model some hundred.
EXACT = 1e-5


def make_model(name: str, **more: Any) -> Any:
    """A model in fp32 whose norms differ by channel."""
    config_class, model_class, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**SIZES | sizes | more)).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter += 0.4 * torch.randn(parameter.shape)
    return model


def tokens_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def run(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        logits = model(tokens, **options).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def unfused(model: Any, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
    ha.register_transformers()
    model.set_attn_implementation("helion_fp8")
    return run(model, tokens, **options)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """The fp64 oracle in the place of the kernels, fused or not."""
    assert options["layout"] == "bshd"
    dtype = q.dtype
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q_norm, k_norm, rope = (options.get(name) for name in ("q_norm", "k_norm", "rope"))
    q, k = (x.double() if norm is None else rms_norm(x, norm) for x, norm in ((q, q_norm), (k, k_norm)))
    if rope is not None:
        q, k = apply_rope_qk(q, k, rope)
    kept = {name: options[name] for name in ("causal", "sm_scale", "window", "sinks") if name in options}
    found = ha.reference.attention(q, k, v, **kept)
    assert isinstance(found, torch.Tensor)
    return found.transpose(1, 2).to(dtype)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Calls of exact attention: fused ones, and those of the registered function."""
    calls = {"fused": 0, "plain": 0}

    def count(what: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        calls[what] += 1
        return exact(q, k, v, **options)

    monkeypatch.setattr(ours, "attention", functools.partial(count, "fused"))
    monkeypatch.setattr(plain, "attention", functools.partial(count, "plain"))
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_computes_what_the_model_does(name: str, counted: dict[str, int]) -> None:
    """Up to fp32's rounding, where attention is exact, with a cache and without."""
    model, tokens = make_model(name), tokens_of(2, 19)
    eager = run(model, tokens)
    ha.fuse_transformers(model)
    for use_cache in (False, True):
        assert relative_error(run(model, tokens, use_cache=use_cache), eager) < EXACT
    assert counted == {"fused": 4, "plain": 0}


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, (*_, parts) in MODELS.items() for what in parts])
def test_every_part_counts(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the comparison can fail."""
    model, tokens = make_model(name), tokens_of(2, 19)
    eager = run(model, tokens)
    ha.fuse_transformers(model)
    monkeypatch.setattr(ours, "attention", lambda *qkv, **options: exact(*qkv, **options | {what: None}))
    assert relative_error(run(model, tokens), eager) > 100 * EXACT


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_as_near_as_unfused(name: str) -> None:
    """In fp32, where both round alike but for the order, and in bf16, where less is rounded."""
    model, tokens = make_model(name), tokens_of(1, 19)
    eager = run(model, tokens)
    error = relative_error(unfused(model, tokens), eager)
    ha.fuse_transformers(model)
    assert 0 < relative_error(run(model, tokens), eager) < 1.5 * error
    model.bfloat16()
    model.set_attn_implementation("eager")
    of_bf16 = relative_error(run(model, tokens), eager)
    ha.fuse_transformers(model)
    assert relative_error(run(model, tokens), eager) < 1.5 * (error**2 + of_bf16**2) ** 0.5


@pytest.mark.parametrize("name", MODELS)
def test_generates_with_a_cache(name: str, counted: dict[str, int]) -> None:
    """The prompt is fused, later tokens are not, and the cache holds what the model's own forward puts there."""
    model, tokens = make_model(name), tokens_of(2, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    eager = model.generate(tokens, **options)
    ha.fuse_transformers(model)
    found = model.generate(tokens, **options)
    assert counted == {"fused": 2, "plain": 22}
    assert torch.equal(found.sequences, eager.sequences)
    assert relative_error(torch.stack(found.logits), torch.stack(eager.logits)) < EXACT
    caches = []
    for implementation in ("eager", model.config._attn_implementation):
        model.set_attn_implementation(implementation)
        caches.append(transformers.DynamicCache(config=model.config))
        run(model, tokens, **{CACHE: caches[-1]})
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert relative_error(other.keys, one.keys) < EXACT
        assert relative_error(other.values, one.values) < EXACT


def padding(side: str) -> torch.Tensor:
    mask = (torch.arange(19) < torch.tensor([[12], [19]])).long()
    return mask if side == "right" else mask.flip(1)


#: What the registered function does, by name: inputs of 2 x 19 tokens.
NOT_FUSED: dict[str, dict[str, Any]] = {
    "left_padding": {"attention_mask": padding("left")},
    "right_padding": {"attention_mask": padding("right")},
    "packed": {"position_ids": torch.tensor([[*range(9), *range(10)]] * 2), "use_cache": False},
    "other_positions": {
        "position_ids": torch.arange(19) + torch.tensor([[0], [5]]),
        "attention_mask": torch.ones(2, 19).long(),
    },
    "mask_by_scores": {"attention_mask": torch.ones(2, 1, 19, 19).tril().bool()},
    "softcap": {"softcap": 1.5},
}


@pytest.mark.parametrize("what", NOT_FUSED)
def test_all_else_is_not_fused(what: str, counted: dict[str, int]) -> None:
    """It gives, to the bit, what the registered function gives."""
    model, tokens, options = make_model("qwen3"), tokens_of(2, 19), NOT_FUSED[what]
    expected = unfused(model, tokens, **options)
    ha.fuse_transformers(model)
    assert torch.equal(run(model, tokens, **options), expected)
    assert counted["fused"] == 0


def test_arguments_that_change_nothing(counted: dict[str, int]) -> None:
    """Others raise, as without fusing."""
    model, tokens = make_model("llama"), tokens_of(2, 19)
    ha.fuse_transformers(model)
    run(model, tokens, output_attentions=False, output_hidden_states=True)
    assert counted == {"fused": 2, "plain": 0}
    with pytest.raises(NotImplementedError, match="something is given, of which this attention knows nothing"):
        run(model, tokens, something=1)


def test_the_older_name_of_the_cache(counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an attention module, in both directions: stand-ins for other versions of transformers."""
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward
    newer = ours.CACHES[0] if ours.CACHES[0] in inspect.signature(original).parameters else ours.CACHES[1]
    model, tokens = make_model("llama"), tokens_of(1, 19)
    expected = run(model, tokens)

    def older(
        self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return original(self, hidden_states, position_embeddings, attention_mask, **{newer: past_key_values}, **kwargs)

    def renamed(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {"past_key_values" if name == newer else name: value for name, value in kwargs.items()}

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", older)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(renamed, with_kwargs=True)
    ha.fuse_transformers(model)
    cache = transformers.DynamicCache(config=model.config)
    found = [run(model, x, **{CACHE: cache}) for x in tokens.split([18, 1], 1)]
    assert relative_error(torch.cat(found, 1), expected) < EXACT
    assert counted == {"fused": 2, "plain": 2}


def test_a_copy_is_a_model_of_its_own() -> None:
    model, tokens = make_model("qwen3"), tokens_of(1, 19)
    ha.fuse_transformers(model)
    before = run(model, tokens)
    copied = copy.deepcopy(model)
    assert torch.equal(run(copied, tokens), before)
    with torch.no_grad():
        copied.model.layers[1].self_attn.q_norm.weight.mul_(2.0)
    assert not torch.equal(run(copied, tokens), before)
    assert torch.equal(run(model, tokens), before)


def test_positions_of_all_sequences(counted: dict[str, int]) -> None:
    """They need not begin at 0, and may be given for each sequence."""
    model, tokens = make_model("llama"), tokens_of(2, 19)
    for positions in ((torch.arange(19) + 3)[None], (torch.arange(19) + 3).expand(2, -1)):
        options = {"position_ids": positions, "attention_mask": torch.ones(2, 19).long()}
        model.set_attn_implementation("eager")
        eager = run(model, tokens, **options)
        ha.fuse_transformers(model)
        assert relative_error(run(model, tokens, **options), eager) < EXACT
    assert counted == {"fused": 4, "plain": 0}


def test_chunks_of_a_prompt(counted: dict[str, int]) -> None:
    model, tokens = make_model("gemma3"), tokens_of(1, 20)
    eager = run(model, tokens)
    ha.fuse_transformers(model)
    cache = transformers.DynamicCache(config=model.config)
    chunks = [run(model, x, **{CACHE: cache}) for x in tokens.split([9, 4, 7], 1)]
    assert relative_error(torch.cat(chunks, 1), eager) < EXACT
    assert counted == {"fused": 2, "plain": 4}


def test_a_cache_in_8_bits() -> None:
    """As without fusing: its prompt is not fused."""
    model, tokens = make_model("llama"), tokens_of(1, 9)
    found = []
    for fuse in (False, True):
        ha.register_transformers()
        model.set_attn_implementation("helion_fp8")
        if fuse:
            ha.fuse_transformers(model)
        generated = model.generate(tokens, max_new_tokens=4, do_sample=False, **{CACHE: ha.transformers_cache()})
        found.append(generated)
    assert torch.equal(*found)


def test_another_implementation_takes_it_away() -> None:
    """The model is then what it was, to the bit; and fusing again changes the recipe."""
    model, tokens = make_model("qwen3"), tokens_of(1, 19)
    before = {name: run(model, tokens) for name in ("sdpa", "eager") if model.set_attn_implementation(name) is None}
    ha.fuse_transformers(model, recipe="fast")
    fast = run(model, tokens)
    ha.fuse_transformers(model, recipe=ha.ACCURATE)
    accurate = run(model, tokens)
    assert not torch.equal(fast, accurate)
    assert model.model.layers[0].self_attn.forward.__self__.recipe == ha.ACCURATE
    for name, expected in before.items():
        model.set_attn_implementation(name)
        assert torch.equal(run(model, tokens), expected)
    ha.fuse_transformers(model, recipe="fast")
    assert torch.equal(run(model, tokens), fast)


def test_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table has PyTorch's attention the outputs are those without fusing; elsewhere the preset's, fused."""
    model, tokens = make_model("gemma3").bfloat16(), tokens_of(1, 19)
    outs = {}
    for from_length in (None, 1):
        rows = tuple(row._replace(from_length=from_length) for row in auto.CROSSOVERS)
        monkeypatch.setattr(auto, "CROSSOVERS", rows)
        plans.forget()
        ha.register_transformers(recipe="auto")
        model.set_attn_implementation("helion_fp8")
        without = run(model, tokens)
        ha.fuse_transformers(model, recipe="auto")
        with monkeypatch.context() as patch:
            used = mock.Mock(wraps=ha.attention)
            patch.setattr(ours, "attention", used)
            outs[from_length] = run(model, tokens)
        # A layer with a window is the preset's.
        assert used.call_count == (1 if from_length is None else 2)
        assert relative_error(outs[from_length], without) < 0.05
    plans.forget()
    ha.fuse_transformers(model)
    assert torch.equal(run(model, tokens), outs[1])
    assert not torch.equal(outs[None], outs[1])


def test_a_tower_beside_the_text_keeps_its_attention(counted: dict[str, int]) -> None:
    config = transformers.Gemma3Config(
        text_config=SIZES | MODELS["gemma3"][2],
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            **{"image_size": 28, "patch_size": 14},
        },
        mm_tokens_per_image=4,
    )
    torch.manual_seed(0)
    model, tokens = transformers.Gemma3ForConditionalGeneration(config).eval(), tokens_of(1, 19)
    eager = run(model, tokens)
    tower = model.config.vision_config._attn_implementation
    ha.fuse_transformers(model)
    assert model.config.vision_config._attn_implementation == tower
    assert relative_error(run(model, tokens), eager) < EXACT
    assert counted == {"fused": 2, "plain": 0}


def test_tables_are_made_once_a_forward(monkeypatch: pytest.MonkeyPatch, counted: dict[str, int]) -> None:
    """Gemma 3 has one of windows, and one of the other layers."""
    model, made_of = (
        make_model("gemma3", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        [],
    )
    original = ours.rope_of

    def rope_of(cos: torch.Tensor, sin: torch.Tensor) -> ha.Rope | None:
        made_of.append(cos)
        return original(cos, sin)

    monkeypatch.setattr(ours, "rope_of", rope_of)
    ha.fuse_transformers(model)
    run(model, tokens_of(1, 19))
    assert len(made_of) == 2
    assert counted["fused"] == 4
    tables = model.model.layers[0].self_attn.forward.__self__.tables
    made_of.clear()
    run(model, tokens_of(1, 17))
    assert len(made_of) == 2
    assert len(tables._kept) == 2, "those of the first forward are gone"


def test_torch_compile(counted: dict[str, int]) -> None:
    """A model as a whole, as without fusing."""
    model, tokens = make_model("qwen3"), tokens_of(1, 19)
    ha.fuse_transformers(model)
    expected = run(model, tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_error(run(compiled, tokens, use_cache=True), expected) < EXACT
    assert counted["plain"] == 0


def without_norm(attn: Any) -> None:
    del attn.k_norm


def with_layer_norm(attn: Any) -> None:
    attn.q_norm = torch.nn.LayerNorm(16)


def with_norms_over_heads(attn: Any) -> None:
    attn.q_norm = type(attn.q_norm)(64)


def with_another_forward(attn: Any) -> None:
    attn.forward = lambda *x, **y: None


def with_softcap(attn: Any) -> None:
    attn.attn_logit_softcapping = 2.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without_norm,
            r"Qwen3Attention 'model.layers.1.self_attn', which has no k_norm; transformers is .* 5.24",
        ),
        (with_layer_norm, r"whose q_norm is LayerNorm\(\(16,\).* and no Qwen3RMSNorm of 16 channels"),
        (with_norms_over_heads, r"whose q_norm is Qwen3RMSNorm\(\(64,\).* and no Qwen3RMSNorm of 16 channels"),
        (with_another_forward, r"whose forward is not that of its class; transformers is"),
        (with_softcap, r"whose attn_logit_softcapping is 2.0 and not None"),
    ],
)
def test_other_layouts_name_the_version(change: Any, message: str) -> None:
    model = make_model("qwen3")
    before = model.config._attn_implementation
    change(model.model.layers[1].self_attn)
    with pytest.raises(NotImplementedError, match=message):
        ha.fuse_transformers(model)
    assert "forward" not in vars(model.model.layers[0].self_attn)
    assert model.config._attn_implementation == before


def test_a_forward_that_takes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, hidden_states: torch.Tensor, rotary: torch.Tensor) -> None: ...

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(NotImplementedError, match=r"whose forward takes hidden_states, rotary and not hidden_s"):
        ha.fuse_transformers(make_model("llama"))


def test_models_without_such_attention() -> None:
    with pytest.raises(ValueError, match="model is a Linear without LlamaAttention, Qwen3Attention or Gemma3Attention"):
        ha.fuse_transformers(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="'self_attn' without the model whose config it has"):
        ha.fuse_transformers(make_model("llama").model.layers[0])
    with pytest.raises(TypeError, match=r"model is a str; it must be a torch.nn.Module"):
        ha.fuse_transformers("llama")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recipe is 'best'"):
        ha.fuse_transformers(make_model("llama"), recipe="best")  # type: ignore[arg-type]
