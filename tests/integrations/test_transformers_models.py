"""Which models of transformers take the attention function, as docs/integrations.md lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import helion_attn as ha
from devtools.inputs import make_qkv
from helion_attn.testing import relative_error
from helpers.exact_attention import EXACT, with_oracle
from helpers.small_models import small_config

transformers = pytest.importorskip("transformers")
from helion_attn.integrations import transformers as ours  # noqa: E402
from helion_attn.integrations.transformers_masks import MaskTensor, VisibleKeys, what_is_seen  # noqa: E402
from helion_attn.integrations.transformers_models import has_own_attention  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    ha.register_transformers()


def make(model_type: str, implementation: str = "eager", smaller: Callable[[Any], Any] = small_config) -> Any:
    """A tiny, random model of a type, with a head for text if there is one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    config = smaller(transformers.CONFIG_MAPPING[model_type]())
    config._attn_implementation = implementation
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or MODEL_MAPPING_NAMES[model_type]
    torch.manual_seed(0)
    return getattr(transformers, name)(config).eval()


#: Types that run. Their own code looks at masks in the first four: it asks for `ndim`, slices, joins and pads.
TAKE_IT = (
    *("paligemma", "deepseek_v4", "granite_speech", "ctrl", "afmoe", "albert", "bert", "biogpt", "bitnet", "cohere2"),
    *("deepseek_vl", "diffllama", "distilbert", "mbart", "exaone4", "mistral", "gemma3_text", "gemma4_text"),
    *("glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granitemoe", "jetmoe", "lfm2", "llama4_text"),
    *("llava", "mimo_v2_flash", "minimax_m3_vl", "mixtral", "mllama", "modernbert", "moshi", "nomic_bert", "olmo3"),
    *("opt", "persimmon", "phi4_multimodal", "qwen3_next", "qwen3_vl", "roberta", "smollm3", "stablelm", "vaultgemma"),
)


@pytest.mark.thorough(but=5)
@pytest.mark.parametrize("model_type", TAKE_IT)
def test_models_with_exact_attention_are_eager(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask and with padding on the left, as every layer of them hands its mask on."""
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = make(model_type)
    tokens = torch.randint(3, 99, (2, 24), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0

    def found(implementation: str, mask: torch.Tensor | None) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            out = model(tokens, attention_mask=mask)
        logits = getattr(out, "logits", None)
        return (out[0] if logits is None else logits)[padded.bool()]

    eager = [found("eager", mask) for mask in (None, padded)]
    with_oracle(monkeypatch)
    for expected, mask in zip(eager, (None, padded), strict=True):
        assert relative_error(found("helion_fp8", mask), expected) < EXACT
    # Attention is the registered one.
    monkeypatch.setattr(ours, "attention", lambda q, *_, **__: torch.full_like(q, torch.nan))
    assert found("helion_fp8", None).isnan().any()


@pytest.mark.parametrize("model_type", ["mpnet", "bloom", "falcon", "gpt_neo", "xlnet", "roformer", "git", "sam"])
def test_models_that_compute_attention_themselves_raise(model_type: str) -> None:
    """Before there are parameters, so that whole configs do."""
    with pytest.raises(
        NotImplementedError, match=r"helion_attn: attn_implementation is 'helion_fp8', and \w+ computes"
    ):
        make(model_type, "helion_fp8", lambda config: config)


def test_another_attention_is_left_alone() -> None:
    assert make("bloom", "eager").config._attn_implementation == "eager"


def test_a_part_that_computes_attention_itself_has_its_own_implementation() -> None:
    config = small_config(transformers.BlipConfig())
    config._attn_implementation = "helion_fp8"
    with pytest.raises(NotImplementedError, match=r"BlipTextModel computes .*'': 'helion_fp8', 'NAME_OF_ITS_CONFIG'"):
        transformers.BlipModel(config)
    config._attn_implementation = {"": "helion_fp8", "text_config": "eager", "vision_config": "eager"}
    assert transformers.BlipModel(config).text_model.config._attn_implementation == "eager"


def test_a_model_that_looks_into_a_table_raises_later_too() -> None:
    """Transformers would name the implementation in its config, and run the class that was there before."""
    model = make("git", "eager")
    with pytest.raises(NotImplementedError, match="GitForCausalLM computes attention itself"):
        model.set_attn_implementation("helion_fp8")


def test_what_is_attention_of_its_own() -> None:
    own = "class FooAttention(nn.Module):\n    pass\n"
    assert has_own_attention(own)
    assert not has_own_attention(own + "f = ALL_ATTENTION_FUNCTIONS.get_interface(x, y)\n")
    assert not has_own_attention("class FooModel(nn.Module):\n    pass\n")


#: By type: what it hands to attention that this has not.
HAND_MORE = {"doge": "attention_mask is a Tensor", "t5": "position_bias is a Tensor", "hy_v4": "indices is given"}


@pytest.mark.parametrize("model_type", HAND_MORE)
def test_models_that_hand_attention_more_raise(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = make(model_type, "helion_fp8")
    tokens = torch.arange(4, 20)[None]
    inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad(), pytest.raises(NotImplementedError, match=f"helion_attn: {HAND_MORE[model_type]}"):
        model(tokens, **inputs)


#: Padding at both ends, fewer queries than keys, and a window.
KEYS = VisibleKeys(((0, 5), (1, 4)), 3, 5, True, 2)
SEEN = torch.tensor(
    [
        [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]],
        [[0, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0]],
    ],
    dtype=torch.bool,
).unsqueeze(1)


@pytest.mark.parametrize("seen", [KEYS, SEEN], ids=["described", "by_scores"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_mask_is_a_tensor_as_eager_attention_has_it(seen: VisibleKeys | torch.Tensor, dtype: torch.dtype) -> None:
    """Attention goes on reading what is seen, until something may have been written to the tensor."""
    mask = MaskTensor(seen, dtype, "cpu")
    expected = torch.zeros(SEEN.shape, dtype=dtype).masked_fill(~SEEN, torch.finfo(dtype).min)
    assert (mask.shape, mask.ndim, mask.dtype, mask.device) == (SEEN.shape, 4, dtype, torch.device("cpu"))
    assert torch.equal(mask == 0, SEEN)
    assert torch.equal(torch.cat([mask, mask], 3), torch.cat([expected, expected], 3))
    assert torch.equal(torch.ones_like(expected) + mask, 1 + expected)
    whole = mask[:, :, :, :5]
    for same in (mask, whole, mask.to("cpu"), mask.detach(), mask.to("meta")):
        assert what_is_seen(same) is seen or same.device.type == "meta"
    assert torch.equal(mask[..., :2], expected[..., :2])
    for found in (what_is_seen(mask), what_is_seen(whole)):
        assert torch.equal(found, expected)
    whole[0, 0, 0, 3] = 0
    assert what_is_seen(mask)[0, 0, 0, 3] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [(4, 0), (3, 7)], ids=["left", "all_of_one"])
def test_rows_of_the_lowest_number_see_nothing(hidden: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """A padded mask of four dimensions, as eager attention adds it: rows without a key give 0."""
    q, k, v = make_qkv("randn", 2, 2, 2, 7, 7, 32, dtype, device)
    seen = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    seen = seen & (torch.arange(7, device=device) >= torch.tensor(hidden, device=device)[:, None, None, None])
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)
    module = torch.nn.Module()
    out, expected = (ours.attention_forward(module, q, k, v, given)[0] for given in (mask, seen))
    assert torch.equal(out, expected)
    nothing = ~seen.any(3)[:, 0]
    assert nothing.any()
    assert (out[nothing] == 0).all()
    assert (out[~nothing] != 0).any()


@pytest.mark.parametrize("name", ["PaliGemmaForConditionalGeneration", "ColPaliForRetrieval"])
def test_models_whose_parts_get_a_mask_that_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer model makes the mask, in which a prefix sees all of itself, and the inner one takes it as it is."""
    text = transformers.GemmaConfig(
        vocab_size=120, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    vision = transformers.SiglipVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8,
        projection_dim=64, vision_use_head=False,
    )  # fmt: skip
    config: Any = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, image_token_index=110, projection_dim=64, hidden_size=64
    )
    if name == "ColPaliForRetrieval":
        config = transformers.ColPaliConfig(vlm_config=config, text_config=text, embedding_dim=16)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    tokens = torch.cat([torch.full((1, 16), 110), torch.arange(4, 13)[None]], 1)

    def found(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            return model(
                tokens,
                attention_mask=torch.ones_like(tokens),
                pixel_values=torch.ones(1, 3, 32, 32).cumsum(3) / 32,
            )[0]

    def generated() -> list[int]:
        out = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), pixel_values=torch.ones(1, 3, 32, 32), max_new_tokens=5,
            do_sample=False,
        )  # fmt: skip
        found: list[int] = out[0].tolist()
        return found

    eager = found("eager")
    new = generated() if hasattr(model, "generate") else []
    with_oracle(monkeypatch)
    assert relative_error(found("helion_fp8"), eager) < EXACT
    assert (generated() if hasattr(model, "generate") else []) == new
