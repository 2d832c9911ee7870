"""Fused norms and RoPE in transformers: tiny random Llama, Qwen3 and Gemma 3, beside what is not fused."""

from __future__ import annotations

import functools
import gc
import inspect
import io
from collections.abc import Callable
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
from helpers.host_reads import HostReads
from helpers.small_models import SIZES, tokens_of

transformers = pytest.importorskip("transformers")
from helion_attn.integrations import transformers as plain  # noqa: E402
from helion_attn.integrations.fused import fuse_transformers as ours  # noqa: E402
from helion_attn.integrations.fused import qk_prologue  # noqa: E402

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
    assert model.model.layers[0].self_attn.fusing.recipe == ha.ACCURATE
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
    kept = len(qk_prologue._KEPT)
    made_of.clear()
    run(model, tokens_of(1, 17))
    assert len(made_of) == 2
    made_of.clear()
    gc.collect()
    assert len(qk_prologue._KEPT) <= kept, "those of the first forward are gone"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_no_layer_waits_for_the_device(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where each sequence is given positions: then for one answer a table, or in inference mode a layer."""
    monkeypatch.setattr(ours, "attention", lambda q, k, v, **_: torch.zeros_like(q))
    model, given = make_model(name), torch.arange(19).expand(2, -1)
    ha.fuse_transformers(model)
    tables, layers = 2 if name == "gemma3" else 1, 2
    for tokens, options, expected in (
        (tokens_of(1, 19), {}, 0),
        (tokens_of(2, 19), {}, 0),
        (tokens_of(2, 19), {"position_ids": given}, layers if mode is torch.inference_mode else tables),
    ):
        with mode(), HostReads() as reads:
            model(tokens, **options)
        assert len(reads.names) == expected, reads.names


def with_a_hook(norm: torch.nn.Module) -> None:
    norm.register_forward_hook(lambda module, inputs, output: 3 * output)


def with_a_hook_before(norm: torch.nn.Module) -> None:
    norm.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0.5,))


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def with_a_parametrization(norm: torch.nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())


def wrapped(module: Any, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None) -> None:
    """Do to a module's forward what accelerate's hooks do."""
    module._old_forward = module.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return self._old_forward(*args, **kwargs)
        finally:
            after()

    module.forward = functools.update_wrapper(functools.partial(forward, module), module._old_forward)


def offloaded(norm: torch.nn.Module) -> None:
    """Its weight is on the meta device but while it runs, as accelerate and diffusers offload."""
    weights = {name: (x, torch.nn.Parameter(x.to("meta"))) for name, x in norm.named_parameters()}

    def put(place: int) -> None:
        for name, both in weights.items():
            setattr(norm, name, both[place])

    put(1)
    wrapped(norm, lambda: put(0), lambda: put(1))


#: What may be done to a norm, after which it has to be called.
CHANGES = {
    "hook": with_a_hook,
    "hook before": with_a_hook_before,
    "parametrization": with_a_parametrization,
    "offloaded": offloaded,
}


@pytest.mark.parametrize("is_fused_first", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_that_does_more_is_called(change: str, is_fused_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a layer, with what the model hands it; the other norm and RoPE stay fused."""
    for name in ("qwen3", "gemma3"):
        model, tokens = make_model(name), tokens_of(2, 19)
        shapes: list[torch.Size] = []
        if is_fused_first:
            ha.fuse_transformers(model)
        CHANGES[change](model.model.layers[1].self_attn.q_norm)
        model.model.layers[1].self_attn.q_norm.register_forward_pre_hook(
            lambda module, inputs, shapes=shapes: shapes.append(inputs[0].shape)
        )
        model.set_attn_implementation("eager")
        eager = run(model, tokens)
        ha.fuse_transformers(model)
        calls = mock.Mock(side_effect=exact)
        monkeypatch.setattr(ours, "attention", calls)
        assert relative_error(run(model, tokens), eager) < EXACT
        options = [set(call.kwargs) & {"q_norm", "k_norm", "rope"} for call in calls.call_args_list]
        assert options == [{"q_norm", "k_norm", "rope"}, {"k_norm", "rope"}]
        assert len(shapes) == 2
        assert shapes[0] == shapes[1]


def test_a_hook_on_all_modules(counted: dict[str, int]) -> None:
    model, tokens, seen = make_model("qwen3"), tokens_of(1, 19), []
    ha.fuse_transformers(model)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        run(model, tokens)
    finally:
        handle.remove()
    assert counted == {"fused": 2, "plain": 0}
    for layer in model.model.layers:
        assert seen.count(layer.self_attn.q_norm) == seen.count(layer.self_attn.k_norm) == 1


@pytest.mark.parametrize("put", [torch.nn.Identity, torch.nn.LayerNorm], ids=["Identity", "LayerNorm"])
def test_another_norm_in_its_place(put: type[torch.nn.Module], counted: dict[str, int]) -> None:
    """Of K, which also goes into the cache."""
    model, tokens = make_model("qwen3"), tokens_of(1, 19)
    for layer in model.model.layers:
        layer.self_attn.k_norm = put(16)
    eager = run(model, tokens)
    ha.fuse_transformers(model)
    cache = transformers.DynamicCache(config=model.config)
    found = [run(model, x, **{CACHE: cache}) for x in tokens.split([18, 1], 1)]
    assert relative_error(torch.cat(found, 1), eager) < EXACT
    assert counted == {"fused": 2, "plain": 2}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["dispatched", "offloaded"])
def test_a_model_that_accelerate_holds(how: str, name: str, counted: dict[str, int]) -> None:
    """As `device_map` does it, on one device; offloaded, its norms are called and RoPE is fused."""
    accelerate = pytest.importorskip("accelerate")
    model, tokens = make_model(name), tokens_of(1, 19)
    eager = run(model, tokens)
    if how == "dispatched":
        places = dict.fromkeys(
            ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
        )
        model = accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    for _ in range(2):
        ha.fuse_transformers(model)
        assert relative_error(run(model, tokens), eager) < EXACT
    assert counted == {"fused": 4, "plain": 0}
    ha.unfuse(model)
    assert relative_error(run(model, tokens), eager) < EXACT
    assert counted == {"fused": 4, "plain": 0}


def replica(model: torch.nn.Module) -> torch.nn.Module:
    """What `torch.nn.parallel.replicate` makes: shallow copies of the modules. Their weights are twice as large."""
    new: Any = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, made in new.items():
        for name, child in module._modules.items():
            setattr(made, name, new.get(child))
        for name, parameter in module._parameters.items():
            setattr(made, name, None if parameter is None else 2 * parameter.detach())
    replicated: torch.nn.Module = new[model]
    return replicated


@pytest.mark.parametrize("name", MODELS)
def test_replicas_run_their_own_weights(name: str, counted: dict[str, int]) -> None:
    model, tokens = make_model(name), tokens_of(1, 19)
    eager = run(model, tokens), run(replica(model), tokens)
    ha.fuse_transformers(model)
    for own, copied in ((model, eager[0]), (replica(model), eager[1])):
        assert relative_error(run(own, tokens), copied) < EXACT
    assert counted == {"fused": 4, "plain": 0}


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_can_be_saved(name: str) -> None:
    """After it has run, and into a process that knows no attention of this name."""
    from transformers import AttentionInterface

    model, tokens, saved = make_model(name), tokens_of(1, 19), io.BytesIO()
    ha.fuse_transformers(model, recipe="fast")
    before = run(model, tokens)
    torch.save(model, saved)
    AttentionInterface._global_mapping.pop(model.config._attn_implementation)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(run(loaded, tokens), before)
    loaded.set_attn_implementation("eager")
    torch.save(loaded, io.BytesIO())
    ha.unfuse(loaded)
    assert type(loaded.model.layers[0].self_attn) is type(make_model(name).model.layers[0].self_attn)


class Static(torch.nn.Module):
    """A model's rotary module, with tables at fixed addresses, as CUDA graphs want them."""

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self.rotary = rotary
        self.kept: tuple[torch.Tensor, ...] = ()

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        new = self.rotary(x, position_ids)
        self.kept = self.kept or tuple(x.clone() for x in new)
        for kept, x in zip(self.kept, new, strict=True):
            kept.copy_(x)
        return self.kept


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_tables_that_are_written_to(mode: Any, counted: dict[str, int]) -> None:
    """Tensors of inference mode do not count their changes."""
    model, tokens = make_model("llama"), tokens_of(1, 19)
    positions = [{"position_ids": torch.arange(19)[None] * step} for step in (1, 5)]
    eager = [run(model, tokens, **options) for options in positions]
    assert relative_error(eager[0], eager[1]) > 100 * EXACT
    ha.fuse_transformers(model)
    model.model.rotary_emb = Static(model.model.rotary_emb)
    with mode():
        found = [model(tokens, **options).logits for options in positions]
    assert [relative_error(x, y) < EXACT for x, y in zip(found, eager, strict=True)] == [True, True]
    assert counted == {"fused": 4, "plain": 0}


def test_tables_in_a_graph(counted: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is captured converts the tables itself, also those that are kept, and does not look at positions."""
    model = make_model("llama")
    ha.fuse_transformers(model)
    tables = torch.rand(2, 1, 9, 16).unbind(0)
    kept = qk_prologue.get_rope_cache(ours.rope_of, tables)
    for module in (qk_prologue, ours):
        monkeypatch.setattr(module, "is_captured", lambda x: True)
    assert qk_prologue.get_rope_cache(ours.rope_of, tables) is not kept
    run(model, tokens_of(1, 19))
    assert counted == {"fused": 2, "plain": 0}
    run(model, tokens_of(2, 19), position_ids=torch.arange(19).expand(2, -1), attention_mask=torch.ones(2, 19).long())
    assert counted == {"fused": 2, "plain": 2}


def test_orders_do_not_pile_up() -> None:
    rope_cache = qk_prologue.RopeCache(ha.Rope(*torch.rand(2, 9, 8)))
    for _ in range(3 * qk_prologue.MAX_ORDERS):
        order = torch.randperm(9)
        rope = rope_cache.rope(7, order)
        assert rope_cache.rope(7, order) is rope
        assert rope.k_positions is not None
        assert torch.equal(rope.k_positions, order[:7])
    assert len(rope_cache._subsets) <= qk_prologue.MAX_ORDERS


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    """As near to the model in fp32 as what is registered; the norm of K is called in one layer."""
    model, tokens = make_model(name), tokens_of(1, 19)
    if name != "llama":
        model.model.layers[0].self_attn.k_norm.register_forward_hook(lambda *_: None)
    eager, errors = run(model, tokens), []
    for fuse in (False, True):
        ha.register_transformers(recipe="bf16")
        model.set_attn_implementation("helion_fp8")
        if fuse:
            ha.fuse_transformers(model, recipe="bf16")
        with torch.autocast("cpu", torch.bfloat16):
            errors.append(relative_error(run(model, tokens), eager))
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.parametrize("name", MODELS)
def test_unfuse(name: str) -> None:
    """The model is what it was, to the bit, with the attention that it had, or that was set since."""
    ha.register_transformers()
    for implementation in ("eager", "helion_fp8"):
        model, tokens = make_model(name), tokens_of(1, 19)
        model.set_attn_implementation(implementation)
        before, classes = run(model, tokens), [type(module) for module in model.modules()]
        ha.fuse_transformers(model)
        ha.fuse_transformers(model, recipe="fast")
        assert not torch.equal(run(model, tokens), before)
        for _ in range(2):
            ha.unfuse(model)
            assert model.config._attn_implementation == implementation
            assert [type(module) for module in model.modules()] == classes
            assert torch.equal(run(model, tokens), before)
    ha.fuse_transformers(model)
    model.set_attn_implementation("sdpa")
    ha.unfuse(model)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(TypeError, match=r"model is a str; it must be a torch.nn.Module"):
        ha.unfuse("llama")  # type: ignore[arg-type]


@pytest.mark.thorough(but=1)
@pytest.mark.parametrize("change", [None, with_a_hook, with_a_parametrization])
def test_torch_compile(change: Callable[[torch.nn.Module], None] | None, counted: dict[str, int]) -> None:
    """A model as a whole, as without fusing; a norm may do more."""
    model, tokens = make_model("qwen3"), tokens_of(1, 19)
    ha.fuse_transformers(model)
    if change is not None:
        change(model.model.layers[0].self_attn.k_norm)
    expected = run(model, tokens)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert relative_error(run(compiled, tokens, use_cache=True), expected) < EXACT
    assert counted["plain"] == 0


def without_norm(attn: Any) -> None:
    del attn.k_norm


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
        (
            with_another_forward,
            r"whose forward is not that of its class; it must be, or be wrapped by hooks of accelerate alone",
        ),
        (with_softcap, r"whose attn_logit_softcapping is 2.0; it must be None: use register_transformers"),
    ],
)
def test_other_layouts(change: Any, message: str) -> None:
    model = make_model("qwen3")
    before = model.config._attn_implementation
    change(model.model.layers[1].self_attn)
    with pytest.raises(NotImplementedError, match=message):
        ha.fuse_transformers(model)
    assert type(model.model.layers[0].self_attn).__name__ == "Qwen3Attention"
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
