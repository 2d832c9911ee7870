"""The backend for vLLM, on its own classes: batches of prompts, chunks, decodes, drafts and padding."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import helion_attn as ha
from helion_attn.integrations import vllm as plugin
from helion_attn.integrations.vllm import warm_up
from helion_attn.kernels.lib.strided import flat_memory

INSTALLED = importlib.util.find_spec("vllm") is not None

VERSION = importlib.metadata.version("vllm") if INSTALLED else "0.0"

#: Whether names are the package's own, and pages of bytes that its spec says.
OWN_NAMES = plugin.generation_of(VERSION) == "vllm_0_33"

#: vLLM's names of dtypes of the cache.
INT8, E4M3 = ("helion_int8", "helion_e4m3") if OWN_NAMES else ("int8_per_token_head", "fp8_per_token_head")

with_vllm = pytest.mark.skipif(not INSTALLED, reason="vLLM is not installed: make test-vllm has it")

PAGE = 128


def config(drafts: int = 0, **layers: Any) -> Any:
    """What the backend reads of vLLM's configuration."""
    speculative = types.SimpleNamespace(num_speculative_tokens=drafts) if drafts else None
    return types.SimpleNamespace(
        speculative_config=speculative,
        compilation_config=types.SimpleNamespace(static_forward_context=layers),
        cache_config=types.SimpleNamespace(kv_sharing_fast_prefill=False, num_gpu_blocks=12),
        parallel_config=types.SimpleNamespace(world_size=1),
        scheduler_config=types.SimpleNamespace(max_num_seqs=16),
        additional_config={},
        model_config=types.SimpleNamespace(dtype=torch.bfloat16, rswa_window=None),
        kv_transfer_config=None,
    )


@pytest.fixture(scope="module")
def backend() -> Iterator[Any]:
    """The backend's class, as vLLM finds it."""
    if not torch.cuda.is_available():
        from helpers import vllm_on_cpu

        vllm_on_cpu.install()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    for _ in range(2):
        plugin.register()
    found = AttentionBackendEnum["HELION" if OWN_NAMES else "CUSTOM"].get_class()
    with mock.patch("helion_attn.integrations.vllm.layer.get_current_vllm_config", config):
        yield found


def test_generations() -> None:
    assert plugin.generation_of("0.26.0") == plugin.generation_of("0.25.1") == "vllm_0_26"
    assert plugin.generation_of("0.33.1") == "vllm_0_33"
    assert plugin.generation_of("0.24.0") is plugin.generation_of("0.30.0") is plugin.generation_of("1.0") is None


def test_an_unknown_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from helion_attn.integrations.vllm import unknown_release

    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.0")
    (reason,) = unknown_release.HelionBackend.validate_configuration(head_size=64)
    assert "9.9.0" in reason
    assert "0.26" in reason
    with pytest.raises(NotImplementedError, match=r"9\.9\.0"):
        unknown_release.HelionBackend.get_name()


def test_another_process_compiles_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is told is what the server has, and all parts together are all kernels."""
    kinds = [
        warm_up.LayerKind(4, 2, 64, "balanced", None, None, has_sinks=False, num_splits=None),
        warm_up.LayerKind(2, 2, 32, "fast", (99, 0), 30.0, has_sinks=True, num_splits=1),
    ]
    server = warm_up.Server(kinds, "bfloat16", drafts=1, max_sequences=3, num_pages=9, device="cpu")
    asked: list[tuple[warm_up.Server, int, int]] = []
    monkeypatch.setattr(warm_up, "plans_of", lambda server: server)
    monkeypatch.setattr("helion_attn.plans.compile_ahead", lambda *given: asked.append(given))
    warm_up.main(json.dumps(server), "2", "3")
    assert asked == [(server, 2, 3)]


def test_what_a_server_compiles() -> None:
    """Steps of decodes and of prompts, of one sequence and of several."""
    kind = warm_up.LayerKind(4, 2, 64, "balanced", (99, 0), 30.0, has_sinks=True, num_splits=None)
    found = warm_up.plans_of(warm_up.Server([kind], "bfloat16", drafts=0, max_sequences=3, num_pages=9, device="cpu"))
    assert len(found) == 2 * 2 * 3
    assert {"fp8_attn_prefill" in plan.kernels for plan in found} == {True, False}
    assert all("append_kv + close_full_pages" in plan.kernels for plan in found)
    assert {"merge_splits_kernel" in plan.kernels for plan in found} == {True, False}


@pytest.mark.parametrize("num_pages", [2, 20_000, 41_130, 80_000, 87_400, 160_000, 164_500, 300_000])
def test_a_server_compiles_for_the_indices_of_its_pool(num_pages: int) -> None:
    """With as many pages as it takes, each of a cache's tensors is large or is not, as in the server's."""
    kind = warm_up.LayerKind(9, 3, 64, "balanced", None, None, has_sinks=False, num_splits=None)

    def are_large(pages: int) -> list[bool]:
        memory = torch.empty(pages, warm_up.page_bytes_of(kind), dtype=torch.uint8, device="meta")
        cache = ha.PagedKVCache.from_buffer(memory, 3, 64, recipe="balanced")
        tensors = cache.k8, cache.v8, cache.k_descale, cache.v_descale
        return [x.numel() >= 2**31 for x in (*tensors, *map(flat_memory, tensors))]

    made = warm_up.pages_for(kind, num_pages)
    assert made <= num_pages
    assert are_large(made) == are_large(num_pages)


GOOD: dict[str, Any] = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": INT8,
    "block_size": PAGE,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": (9, 0),
    "attn_type": "decoder",
    "has_sliding_window": True,
    "use_batch_invariant": True,
}


@with_vllm
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"kv_cache_dtype": E4M3, "head_size": 64}, ""),
        ({"use_kv_connector": True}, "KV connector" if VERSION.startswith("0.25.") else ""),
        ({"head_size": 80}, "" if OWN_NAMES else "head_size"),
        ({"head_size": 512}, "head_size"),
        ({"dtype": torch.float32}, "dtype"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype"),
        ({"use_mla": True}, "MLA"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"device_capability": (10, 0)}, "capability"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"use_non_causal": True}, "non-causal"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(backend: Any, changed: dict[str, Any], reason: str) -> None:
    asked = inspect.signature(backend.validate_configuration).parameters
    found = backend.validate_configuration(**{name: x for name, x in (GOOD | changed).items() if name in asked})
    assert [x for x in found if reason in x] == found
    assert bool(found) == bool(reason)


@with_vllm
def test_what_a_layer_cannot_have_is_refused(backend: Any) -> None:
    impl = backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match="ALiBi"):
        impl(4, 64, 0.125, 2, [1.0] * 4)
    with pytest.raises(NotImplementedError, match="decoders"):
        impl(4, 64, 0.125, 2, attn_type="encoder")


def builder(backend: Any, given: Any, *names: str) -> Any:
    """What makes metadata of a server of such a configuration, of its layers of these names."""
    return backend.get_builder_cls()(None, [*names], given, torch.device("cpu"))


@with_vllm
def test_drafts_and_a_connector_are_refused_together(backend: Any) -> None:
    """A page is closed after the step that fills it, and a connector saves it as it is."""
    given = config(drafts=3)
    builder(backend, given)
    given.kv_transfer_config = types.SimpleNamespace(kv_connector="OffloadingConnector")
    with pytest.raises(
        NotImplementedError, match=r"num_speculative_tokens is 3 and kv_connector is OffloadingConnector"
    ):
        builder(backend, given)
    given.speculative_config = None
    builder(backend, given)


@with_vllm
def test_windows_that_leave_the_prompt_visible_are_refused(backend: Any) -> None:
    given = config()
    given.model_config.rswa_window = 96
    with pytest.raises(NotImplementedError, match=r"rswa_window of the model is 96"):
        builder(backend, given)


@with_vllm
@pytest.mark.skipif(OWN_NAMES, reason="with this release the backend has a name of its own")
def test_another_plugins_custom_stays(backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    ours = custom.get_path()
    register_backend(custom, "other.Backend")
    try:
        plugin.register()
        assert custom.get_path() == "other.Backend"
    finally:
        custom.clear_override()
    said = capsys.readouterr().err
    assert "CUSTOM is other.Backend" in said
    assert "VLLM_PLUGINS=helion_attn" in said
    plugin.register()
    assert custom.get_path() == ours


#: What a process runs that gets a configuration before its plugins are loaded, as an engine's does.
UNPICKLES = """
import pickle, sys, torch
if not torch.cuda.is_available():
    from helpers import vllm_on_cpu
    vllm_on_cpu.install()
attention = pickle.load(sys.stdin.buffer)
from helion_attn.integrations import vllm as plugin
from vllm.config.cache import is_known_kv_cache_dtype
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert is_known_kv_cache_dtype("helion_int8")
plugin.register()
assert attention.backend is AttentionBackendEnum["HELION"]
print(attention.backend.get_class().get_name())
"""


@with_vllm
@pytest.mark.skipif(not OWN_NAMES, reason="this release has a name for the backend")
def test_another_process_unpickles_the_backend(backend: Any) -> None:
    from vllm.config import AttentionConfig

    given = pickle.dumps(AttentionConfig(backend="HELION"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", UNPICKLES]
    done = subprocess.run(command, input=given, env=environment, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split()[-1] == b"HELION"


class Server:
    """A layer of vLLM's, its memory, and what its sequences have seen."""

    def __init__(self, backend: Any, dtype: str, H: int, H_kv: int, D: int, device: str, drafts: int, **options: Any):
        from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

        storage = torch.int8 if dtype.startswith("int8") else torch.uint8
        spec = FullAttentionSpec(
            block_size=PAGE, num_kv_heads=H_kv, head_size=D, dtype=storage, kv_quant_mode=get_kv_quant_mode(dtype)
        )
        if OWN_NAMES:
            spec = backend.customize_spec(spec)
            shape = 12, H_kv, PAGE, spec.state_content_size_bytes
        else:
            shape = backend.get_kv_cache_shape(12, PAGE, H_kv, D, cache_dtype_str=dtype)
        assert shape[0] * spec.page_size_bytes == math.prod(shape)
        self.memory = torch.full((12 * spec.page_size_bytes,), -1, dtype=torch.int8, device=device)
        self.memory = self.memory.view(storage).view(shape)
        self.builder = backend.get_builder_cls()(spec, ["layer"], config(drafts), torch.device(device))
        self.impl = backend.get_impl_cls()(H, D, D**-0.5, H_kv, kv_cache_dtype=dtype, **options)
        self.impl.process_weights_after_loading(torch.bfloat16)
        self.H, self.H_kv, self.D, self.device = H, H_kv, D, device
        self.table = torch.tensor([[3, 7, 1], [5, 2, 9], [4, 8, 11]], dtype=torch.int32)
        self.generator = torch.Generator().manual_seed(0)
        self.bias, self.stored = torch.zeros(()), True
        self.keys = [torch.zeros(H_kv, 0, D)] * 3
        self.values = list(self.keys)

    def step(self, new: dict[int, int], padding: int = 0, rejected: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run a batch of new tokens by sequence; give the output of each, and the oracle's, [H, tokens, D]."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lengths = [*new.values()] + [0] * padding
        tokens = sum(lengths) + padding
        q, k, v = (
            torch.randn(tokens, h, self.D, generator=self.generator).to(torch.bfloat16)
            for h in (self.H, self.H_kv, self.H_kv)
        )
        k = (k.transpose(0, 1) + self.bias).transpose(0, 1).to(torch.bfloat16)
        ends = [0, *itertools.accumulate(lengths)]
        for b, begin, end in zip(new, ends, ends[1:], strict=False):
            self.keys[b] = torch.cat([self.keys[b], k[begin:end].transpose(0, 1)], 1)
            self.values[b] = torch.cat([self.values[b], v[begin:end].transpose(0, 1)], 1)
        seq_lens = torch.tensor([self.keys[b].size(1) for b in new] + [0] * padding, dtype=torch.int32)
        rows = [self.table[b] for b in new] + [torch.zeros(3, dtype=torch.int32)] * padding
        start = torch.tensor(ends, dtype=torch.int32)
        batch = CommonAttentionMetadata(
            query_start_loc=start.to(self.device), query_start_loc_cpu=start, seq_lens=seq_lens.to(self.device),
            num_reqs=len(lengths), num_actual_tokens=tokens, max_query_len=max(lengths),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=torch.stack(rows).to(self.device),
            slot_mapping=torch.full((tokens,), -1 + self.stored, dtype=torch.int64, device=self.device),
        )  # fmt: skip
        out = torch.full((tokens, self.H, self.D), float("nan"), dtype=torch.bfloat16, device=self.device)
        on_device = (x.to(self.device) for x in (q, k, v))
        layer = types.SimpleNamespace(layer_name="model.layers.5.self_attn.attn")
        self.impl.forward(layer, *on_device, self.memory, self.builder.build(0, batch), out)
        found = []
        for b, begin, end in zip(new, ends, ends[1:], strict=False):
            sinks = None if self.impl.sinks is None else self.impl.sinks.cpu()
            expected = ha.reference.attention(
                q[begin:end].transpose(0, 1)[None], self.keys[b][None], self.values[b][None], causal=True,
                window=self.impl.window, softcap=self.impl.softcap, sinks=sinks,
            )  # fmt: skip
            found.append((out[begin:end].transpose(0, 1).cpu(), expected[0]))
            if rejected:
                self.keys[b], self.values[b] = (x[b][:, :-rejected] for x in (self.keys, self.values))
        return found


def worst(results: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest error of a sequence."""
    errors = [(out.double() - expected).norm() / expected.norm() for out, expected in results]
    # Also of NaN, which Python's max may pass over.
    return torch.stack(errors).max().item()


CASES: list[tuple[str, int, int, int, dict[str, Any]]] = [
    (INT8, 4, 2, 64, {}),
    (E4M3, 4, 1, 128, {"sliding_window": 100, "logits_soft_cap": 30.0}),
    (INT8, 2, 2, 256, {"sinks": torch.tensor([0.5, 3.0], dtype=torch.bfloat16)}),
]


@with_vllm
@pytest.mark.parametrize(("dtype", "H", "H_kv", "D", "options"), CASES)
def test_batches(backend: Any, dtype: str, H: int, H_kv: int, D: int, options: dict[str, Any], device: str) -> None:
    """Errors are within 1.5 times what 8 bits give N(0, 1): some sequences have one query."""
    server = Server(backend, dtype, H, H_kv, D, device, drafts=0, **options)
    bound = 0.06 if dtype == INT8 else 0.1
    for new, padding in (
        ({0: 150, 1: 20}, 0),
        ({0: 1, 1: 1, 2: 130}, 0),
        ({0: 1, 1: 60, 2: 70}, 0),
        ({0: 1, 1: 1, 2: 1}, 1),
    ):
        assert worst(server.step(new, padding)) < bound


def second_of_two_ranks(monkeypatch: pytest.MonkeyPatch, additional_config: dict[str, str]) -> Any:
    """Let layers be of the second of two ranks, of a server that is given this; return its configuration."""
    given = config()
    given.additional_config = additional_config
    monkeypatch.setattr("helion_attn.integrations.vllm.layer.get_current_vllm_config", lambda: given)
    for name, x in (("rank", 1), ("world_size", 2)):
        monkeypatch.setattr(f"helion_attn.integrations.vllm.layer.get_tensor_model_parallel_{name}", lambda x=x: x)
    return given


@with_vllm
@pytest.mark.parametrize(
    ("name", "keys_of", "D", "reason"),
    [
        ("model.layers.5.self_attn.attn", None, 64, ""),
        ("draft_model.model.layers.0.self_attn.attn", None, 64, ""),
        ("draft_model.model.layers.0.self_attn.attn", "model.layers.4.self_attn.attn", 64, r"has model\.layers\.4\."),
        ("model.layers.4.self_attn.attn", None, 64, r"has model\.layers\.4\."),
        ("model.layers.6.self_attn.attn", None, 64, r"has model\.layers\.6\."),
        ("model.layers.5.self_attn.attn", None, 128, r"5\.k_mean of shape \(4, 64\); .* head dim 128"),
    ],
)
def test_constants_of_another_model_are_refused_at_the_start(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keys_of: str | None, D: int, reason: str
) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "constants.safetensors"
    save_file({"layers.5.k_mean": torch.zeros(4, 64), "layers.5.channel_factors": torch.ones(4, 64)}, path)
    given = second_of_two_ranks(monkeypatch, {"helion_attn_constants": str(path)})
    impl = backend.get_impl_cls()(4, D, 1.0, 2, kv_cache_dtype=INT8, kv_sharing_target_layer_name=keys_of)
    given.compilation_config.static_forward_context = {name: types.SimpleNamespace(impl=impl)}
    with pytest.raises(ValueError, match=reason) if reason else contextlib.nullcontext():
        builder(backend, given, name)


@with_vllm
def test_constants_of_keys(backend: Any, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys with a bias lose nothing to it; of two ranks, the second has the last heads."""
    from safetensors.torch import save_file

    mean = torch.zeros(4, 64)
    mean[:, 60:] = torch.tensor([[0.0], [0.0], [40.0], [-60.0]])
    names = {"layers.5.k_mean": mean, "layers.5.channel_factors": torch.full((4, 64), 2.0)}
    save_file(names, tmp_path / "constants.safetensors")
    errors = []
    for path in (None, str(tmp_path / "constants.safetensors")):
        second_of_two_ranks(monkeypatch, {} if path is None else {"helion_attn_constants": path})
        server = Server(backend, INT8, 4, 2, 64, device, drafts=0)
        server.bias = mean[2:, None]
        errors.append(worst(server.step({0: 150, 1: 20})))
        assert server.impl.kind.has_constants == (path is not None)
    assert errors[1] < 0.06 < errors[0]


@with_vllm
def test_tokens_that_are_not_to_be_stored_change_nothing(backend: Any, device: str) -> None:
    """As in steps of ranks that have no request, whose tables and lengths are of an earlier step."""
    server = Server(backend, INT8, 4, 2, 64, device, drafts=0)
    server.step({0: 150, 1: 20})
    before = server.memory.clone()
    server.stored = False
    server.step({0: 1, 1: 1})
    assert torch.equal(server.memory, before)


@with_vllm
def test_drafts_that_are_rejected_across_a_page(backend: Any, device: str) -> None:
    server = Server(backend, INT8, 4, 2, 64, device, drafts=3)
    server.step({0: 126, 1: 7})
    for rejected in (3, 2, 0, 3):
        assert worst(server.step({0: 4, 1: 4}, rejected=rejected)) < 0.06
