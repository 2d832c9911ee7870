"""`ha.transformers_cache`: keys and values that are quantised once, against eager attention and its own cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.testing import relative_error
from helion_attn.types import Layout
from helpers.small_models import SIZES, tokens_of

transformers = pytest.importorskip("transformers")
from helion_attn.integrations import transformers_cache as module  # noqa: E402
from helpers.generation import CACHE  # noqa: E402

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Llama_heads_of_512": ("LlamaForCausalLM", {"head_dim": 512, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "Mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "Gemma2": ("Gemma2ForCausalLM", {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
    "GptOss": ("GptOssForCausalLM", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 2}),
}


def make_model(name: str) -> Any:
    model_class, options = MODELS[name]
    if name in ("Gemma2", "GptOss"):
        options = options | {"layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(
        getattr(transformers, f"{name.partition('_')[0]}Config")(**SIZES | options)
    ).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_(1.0, 1.0)
    return model


@pytest.fixture(autouse=True)
def registered() -> None:
    ha.register_transformers()


def forced(model: Any, tokens: torch.Tensor, mask: torch.Tensor, parts: list[int], cache: Any) -> torch.Tensor:
    """Logits, the tokens given in parts."""
    logits, end = [], 0
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        for part in tokens.split(parts, 1):
            begin, end = end, end + part.size(1)
            logits.append(
                model(
                    part, attention_mask=mask[:, :end], position_ids=positions[:, begin:end], past_key_values=cache
                ).logits
            )
    return torch.cat(logits, 1)


@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, a part of several tokens, and single ones, past the window; as near eager as without the cache."""
    model, tokens = make_model(name), tokens_of(2, 15)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    parts = [11, 2, 1, 1]
    model.set_attn_implementation("eager")
    eager = forced(model, tokens, mask, parts, transformers.DynamicCache(config=model.config))[mask.bool()]
    model.set_attn_implementation("helion_fp8")
    with monkeypatch.context() as patch:
        patch.setattr("helion_attn.integrations.transformers.attention", ha.reference.fp8_attention)
        modelled = forced(model, tokens, mask, parts, transformers.DynamicCache(config=model.config))[mask.bool()]
    error = relative_error(forced(model, tokens, mask, parts, ha.transformers_cache())[mask.bool()], eager)
    assert 0 < error < 2 * relative_error(modelled, eager) + 0.02
    if name == "Llama":  # one key less would be seen
        lengths = module.PagedLayer.lengths
        monkeypatch.setattr(module.PagedLayer, "lengths", lambda self: (lengths(self) - 1).clamp_min(0))
        wrong = forced(model, tokens, mask, parts, ha.transformers_cache())[mask.bool()]
        assert relative_error(wrong, eager) > 2 * error


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_decoding_is_attention_of_what_the_cache_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact attention on the keys and values as they came, logits are eager's: nothing but roundings is lost."""
    model, tokens = make_model(name), tokens_of(2, 16)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    parts = [10, 3, 1, 1, 1]
    model.set_attn_implementation("eager")
    eager = forced(model, tokens, mask, parts, transformers.DynamicCache(config=model.config))[mask.bool()]
    kept: dict[int, list[Any]] = {}

    def append(cache: Any, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Keys and values of each sequence, at their places, in fp32."""
        held = kept.setdefault(id(cache.k8), [torch.zeros(2, 2, 64, 16), torch.zeros(2, 2, 64, 16)])
        for x, new in zip(held, (k, v), strict=True):
            for b, at in enumerate(lengths.tolist()):
                x[b, :, at : at + new.size(2)] = new[b]

    def attend(
        q: Any, cache: Any, table: Any, lengths: Any, *, layout: Layout, open_pages: None, **options: Any
    ) -> torch.Tensor:
        assert open_pages is None
        held = kept[id(cache.k8)]
        rows = []
        for b, n in enumerate(lengths.tolist()):
            k, v = (x[b : b + 1, :, :n].transpose(1, 2) for x in held)
            rows.append(ha.reference.attention(q[b : b + 1], k, v, layout=layout, **options))
        return torch.cat(rows).to(q.dtype)

    def dense(q: Any, k: Any, v: Any, *, recipe: Any, **options: Any) -> torch.Tensor:
        return ha.reference.attention(q, k, v, **options).to(q.dtype)

    monkeypatch.setattr(module, "append_kvcache", append)
    monkeypatch.setattr(module, "attention_kvcache", attend)
    monkeypatch.setattr("helion_attn.integrations.transformers.attention", dense)
    model.set_attn_implementation("helion_fp8")
    exact = forced(model, tokens, mask, parts, ha.transformers_cache())[mask.bool()]
    assert relative_error(exact, eager) < 1e-5


@pytest.mark.parametrize("recipe", ["fast", "balanced"])
def test_generate_grows_the_pool(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past two pages, with left padding; every layer quantises a token once."""
    model = make_model("Llama")
    tokens = tokens_of(2, 254)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask, "output_logits": True}
    options["return_dict_in_generate"] = True
    model.set_attn_implementation("eager")
    eager = model.generate(tokens, **options)
    appended: list[int] = []
    append = ha.append_kvcache

    def counted(cache: Any, k: torch.Tensor, *rest: Any) -> ha.OpenPages:
        appended.append(k.size(2))
        return append(cache, k, *rest)

    monkeypatch.setattr(module, "append_kvcache", counted)
    monkeypatch.setattr("helion_attn.integrations.transformers.attention", ha.reference.fp8_attention)
    model.set_attn_implementation("helion_fp8")
    cache = ha.transformers_cache(recipe=recipe)
    out = model.generate(tokens, **{CACHE: cache}, **options)
    assert (cache.layers[0].cache.k8.dtype == torch.int8) == (recipe == "balanced")
    assert appended == [254] * 2 + [1] * 6
    assert cache.get_seq_length() == 257
    assert cache.layers[0].pages >= 3
    assert cache.layers[0].lengths().tolist() == [250, 257]
    together = int((out.sequences == eager.sequences).all(0)[254:].long().cumprod(0).sum())
    for ours, theirs in zip(out.logits[: together + 1], eager.logits, strict=False):
        assert 0 < relative_error(ours, theirs) < 0.15


def test_beam_search() -> None:
    """A beam is what a sequence by itself is, however beams were exchanged."""
    model = make_model("Llama")
    model.set_attn_implementation("helion_fp8")
    tokens = tokens_of(1, 9)
    cache = ha.transformers_cache()
    options = {"max_new_tokens": 3, "do_sample": False, "num_beams": 2, "return_dict_in_generate": True}
    out = model.generate(tokens, **{CACHE: cache}, output_scores=True, num_return_sequences=2, **options)
    for beam, score in zip(out.sequences, out.sequences_scores, strict=True):
        given = beam[None, :-1]
        logits = forced(model, given, torch.ones_like(given), [9, 1, 1], ha.transformers_cache())
        likelihood = logits[0, 8:].log_softmax(1).gather(1, beam[9:, None]).sum()
        # Beams attend together and alone with other roundings; another beam's keys would be off by more than 1.
        assert abs(likelihood.item() - score.item() * 3) < 0.3


def test_sequences_are_selected() -> None:
    layer = module.PagedLayer(ha.FAST)
    k, v = torch.randn(2, 3, 2, 150, 32, generator=torch.Generator().manual_seed(0))
    layer.append(k, k, v, [0, 4, 0])
    q = torch.randn(3, 2, 1, 32)
    out = layer.attend(q)
    layer.select(torch.tensor([2, 1, 1, 0]))
    assert layer.lengths().tolist() == [150, 146, 146, 150]
    moved = layer.attend(q[[2, 1, 1, 0]])
    assert torch.equal(moved, out[[2, 1, 1, 0]])
    new = torch.randn(2, 4, 2, 1, 32)
    layer.append(new[0], new[0], new[1], [0, 4, 4, 0])  # of the two that were one, each has its own
    after = layer.attend(q[[2, 1, 1, 0]])
    assert not torch.equal(after[1], after[2])
    layer.batch_repeat_interleave(2)
    assert layer.lengths().tolist() == [151, 151, 147, 147, 147, 147, 151, 151]
    layer.batch_select_indices(torch.tensor([0]))
    layer.crop(-1)
    assert layer.lengths().tolist() == [150]
    assert torch.equal(layer.attend(q[2:]), out[2:])
    with pytest.raises(ValueError, match="tokens_to_remove is 3; it must be negative"):
        layer.crop(3)
    layer.reset()
    assert layer.get_seq_length() == 0


def test_crop_to_where_padding_ends() -> None:
    """Tokens go on from there as at first."""
    model, tokens = make_model("Llama"), tokens_of(2, 7)
    model.set_attn_implementation("helion_fp8")
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    cache = ha.transformers_cache()
    whole = forced(model, tokens, mask, [7], cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 4
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1)[:, 4:]
        again = model(tokens[:, 4:], attention_mask=mask, position_ids=positions, past_key_values=cache).logits
    # V in the cache is not centred, and each key has a descale of its own.
    assert 0 < relative_error(again, whole[:, 4:]) < 0.1


def test_crop_amid_padding_raises() -> None:
    """Padding that came again would be stored as keys."""
    layer = module.PagedLayer(ha.FAST)
    k = torch.randn(3, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    layer.append(k, k, k, [0, 4, 1])
    for kept in (3, 1):
        with pytest.raises(
            NotImplementedError, match=rf"leave {kept} tokens, .* up to \[0, 4, 1\]; .* at least 4, or 0"
        ):
            layer.crop(kept - 9)
        assert layer.get_seq_length() == 9
    layer.batch_select_indices(torch.tensor([2]))
    layer.crop(1 - 9)
    assert layer.lengths().tolist() == [0]
    layer.crop(-9)
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("argument", ["is_encoder_decoder", "add_cross_attention"])
def test_encoder_decoders_raise(argument: str) -> None:
    """Their cross attention would append to the cache as well."""
    model: Any
    if argument == "is_encoder_decoder":
        sizes: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.BartConfig(vocab_size=97, d_model=32, max_position_embeddings=64, **sizes, **heads)
        model = transformers.BartForConditionalGeneration(config).eval()
        inputs = {"input_ids": tokens_of(3, 9), "decoder_input_ids": tokens_of(3, 1)}
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(vocab_size=97, is_decoder=True, add_cross_attention=True, **sizes)
        model = transformers.BertLMHeadModel(config).eval()
        inputs = {"input_ids": tokens_of(3, 2), "encoder_hidden_states": torch.randn(3, 9, 32)}
    model.set_attn_implementation("helion_fp8")
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"config has {argument}=True; .* it must be False"):
        model(**inputs, past_key_values=ha.transformers_cache())


def test_the_mean_of_the_first_keys() -> None:
    """All of them, if a sequence has many, whatever comes later; 0 of a channel that is not finite."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(2, 2, 256, 32, generator=generator) + 90
    k[0, 1, 3, 7] = float("inf")
    q = torch.randn(2, 4, 256, 32, generator=generator)
    layer, few = module.PagedLayer(ha.BALANCED), module.PagedLayer(ha.BALANCED)
    layer.append(q, k, k, [0, 0])
    few.append(q[:, :, :31], k[:, :, :31], k[:, :, :31], [0, 0])
    assert layer.cache is not None
    assert few.cache is not None
    assert layer.cache.k_mean is not None
    expected = k.mean((0, 2))
    expected[1, [7, 6, 23, 15, 31, 11, 3]] = 0  # with those that RoPE may pair with it
    assert torch.equal(layer.cache.k_mean, expected)
    assert few.cache.k_mean is None
    for _ in range(2):
        layer.append(q, -k, -k, [0, 0])
    layer.select(torch.tensor([1, 1, 0]))
    assert torch.equal(layer.cache.k_mean, expected)


def test_the_factors_of_the_first_tokens() -> None:
    """Also once the pool has grown and sequences have moved."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 100, 32, generator=generator), torch.randn(2, 2, 100, 32, generator=generator)
    k[:, 0, :, [3, 19]] *= 64
    layer = module.PagedLayer(ha.BALANCED)
    layer.append(q, k, k, [0, 0])
    expected = torch.ones(2, 32)
    expected[0, [3, 19]] = 8
    for _ in range(2):
        layer.append(q, -k, -k, [0, 0])
    layer.select(torch.tensor([1, 1, 0]))
    assert layer.cache is not None
    assert layer.cache.channel_factors is not None
    assert torch.equal(layer.cache.channel_factors, expected)


def test_padding_is_no_part_of_the_mean() -> None:
    k = torch.randn(2, 2, 400, 32, generator=torch.Generator().manual_seed(0)) + 90
    k[1, :, :100] = 300.0
    layer, few = module.PagedLayer(ha.BALANCED), module.PagedLayer(ha.BALANCED)
    layer.append(k, k, k, [0, 100])
    start = k[1:, :, :130]
    few.append(start, start, start, [100])
    assert layer.cache is not None
    assert layer.cache.k_mean is not None
    torch.testing.assert_close(layer.cache.k_mean, k[:, :, 100:].mean((0, 2)))
    assert few.cache is not None
    assert few.cache.k_mean is None, "30 keys and 100 of padding"


def test_a_first_append_that_raises_leaves_nothing() -> None:
    layer, k = module.PagedLayer(ha.BALANCED), torch.randn(2, 2, 9, 32)
    with pytest.raises(RuntimeError, match="requires grad"):
        layer.append(k, k.clone().requires_grad_(), k, [0, 0])
    layer.append(k[:1], k[:1], k[:1], [0])
    assert layer.tokens == 9


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="recipe is 'bf16'; of a KV cache it must be 'fast' or 'balanced'"):
        ha.transformers_cache(recipe="bf16")
    model, tokens = make_model("Llama"), tokens_of(2, 8)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(TypeError, match="attn_implementation must be one that helion_attn"):
        model(tokens, past_key_values=ha.transformers_cache())
    model.set_attn_implementation("helion_fp8")
    right = torch.ones_like(tokens)
    right[1, 5:] = 0
    with torch.no_grad(), pytest.raises(NotImplementedError, match="padding at the start of sequences alone"):
        model(tokens, attention_mask=right, past_key_values=ha.transformers_cache())
    holes = torch.ones_like(tokens).index_fill(1, torch.tensor(3), 0)
    with (
        torch.no_grad(),
        pytest.raises(NotImplementedError, match=r"alone; here attention_mask is a mask of shape \(2, 1"),
    ):
        model(tokens, attention_mask=holes, past_key_values=ha.transformers_cache())
    left, cache = right.flip(1), ha.transformers_cache()
    with torch.no_grad():
        model(tokens, attention_mask=left, past_key_values=cache)
        more = torch.ones(2, 9, dtype=torch.long)
        with pytest.raises(NotImplementedError, match=r"padding up to \[0, 0\], and had up to \[0, 3\] before"):
            model(tokens[:, :1], attention_mask=more, past_key_values=cache)
    with pytest.raises(NotImplementedError, match="not offloaded"):
        module.PagedLayer(ha.FAST).offload()


@pytest.mark.parametrize("chunk", [2, 3])
def test_a_first_chunk_of_padding_says_what_to_do(chunk: int) -> None:
    """Of one sequence, where another has tokens; a chunk that has one of each is taken."""
    model, tokens = make_model("Llama"), tokens_of(2, 8)
    model.set_attn_implementation("helion_fp8")
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    cache = ha.transformers_cache()
    match = rf"hides all of the first {chunk} tokens of a sequence; .*: pass a larger prefill_chunk_size"
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match=match):
            model(tokens[:, :chunk], attention_mask=mask[:, :chunk], past_key_values=cache)
        assert cache.get_seq_length() == 0
        model(tokens[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
        model(tokens[:, 4:], attention_mask=mask, past_key_values=cache)
    assert cache.layers[0].lengths().tolist() == [8, 5]
