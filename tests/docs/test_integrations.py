"""docs/integrations.md: its examples run, and its tables are the code's."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import helion_attn as ha
from helion_attn.testing import relative_error

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"

EXAMPLES = re.findall(r"^## (.*?)$(?:(?!^## ).)*?```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)


def run_example(title: str, other: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a section's example, with `other` text in place of some."""
    names: dict[str, Any] = {}
    source = dict(EXAMPLES)[title]
    for text, instead in (other or {}).items():
        assert text in source
        source = source.replace(text, instead)
    exec(compile(source, f"{PAGE.name}: {title}", "exec"), names)
    return names


def test_every_section_has_an_example() -> None:
    sections = re.findall(r"^## (.*)$", PAGE.read_text(), flags=re.MULTILINE)
    assert [*dict(EXAMPLES), "tritonbench"] == sections
    assert len(sections) == 12


def test_flash_attn() -> None:
    names = run_example("flash-attn")
    assert names["out"].shape == names["out8"].shape == (1, 100, 4, 64)
    assert names["lse"].shape == (1, 4, 100)
    assert not torch.equal(names["out"], names["out8"])


def test_flash_attn_varlen() -> None:
    names = run_example("flash-attn with sequences of different lengths")
    assert names["out"].shape == (120, 4, 64)
    assert names["lse"].shape == (4, 120)
    assert not names["out"].isnan().any()


def test_flash_attn_with_kvcache() -> None:
    names = run_example("flash-attn with a KV cache")
    assert names["out"].shape == (2, 1, 8, 64)
    assert names["cache_seqlens"].tolist() == [3, 3]
    assert not names["out"].isnan().any()


def test_kv_cache() -> None:
    page = PAGE.with_name("kv_cache.md")
    example, _ = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, page.name, "exec"), names)
    assert names["out"].shape == (2, 8, 1, 64)
    assert names["seqlens"].tolist() == [152, 152]
    assert not names["out"].isnan().any()


def test_serving_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in chunks and batches are those of a sequence alone; the second shares two pages; the page shows it."""
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    page = PAGE.with_name("kv_cache.md").read_text()
    assert page == importlib.import_module("integrations").with_example(page), "run scripts/integrations.py"
    example = PAGE.parents[1] / "examples" / "serving_loop.py"
    assert len([line for line in example.read_text().splitlines() if line]) <= 60
    names = runpy.run_path(str(example))
    first, second = names["served"]
    assert len(first.tokens) == 304
    assert first.tokens == names["alone"][0].tokens
    assert len(second.tokens) == 283
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    prompt, free, shared = list(range(130)), names["free"], names["shared"]
    names["serve"]({0: (prompt, 1, 200), 1: (prompt, 1, 200)})
    names["serve"]({0: ([*prompt[:50]], 1, 200), 1: (prompt, 2, 100)})
    assert sorted([*free, *{*shared.values()}]) == list(range(8)), "a page is lost, or had twice"


def test_sageattention() -> None:
    names = run_example("SageAttention")
    exact = ha.reference.attention(*(names[x] for x in "qkv"), layout="bshd", causal=True)
    assert relative_error(names["out"], exact) < 0.06
    assert names["lse"].shape == (1, 2, 100)


def test_sdpa() -> None:
    names = run_example("PyTorch's scaled_dot_product_attention")
    assert names["out"].shape == names["causal"].shape == (1, 4, 50, 64)
    assert not torch.equal(names["out"], names["causal"])


@pytest.mark.filterwarnings("error")
def test_transformers() -> None:
    """The example has the newer name of `generate`'s cache; where that is not known, it is run with the older one."""
    pytest.importorskip("transformers")
    from helpers.generation import CACHE

    names = run_example("transformers", {"cache=cache": f"{CACHE}=cache"})
    assert names["generated"].shape == (2, 9)


def test_diffusers() -> None:
    pytest.importorskip("diffusers")
    names = run_example("diffusers")
    assert names["out"].shape == (1, 30, 16)
    assert not names["out"].isnan().any()


def test_torch_compile() -> None:
    torch._dynamo.reset()
    names = run_example("torch.compile")
    for out, qkv in zip(names["outs"], names["inputs"], strict=True):
        assert torch.equal(out, names["attend"](qkv))
    assert names["outs"][1].shape == (1, 100, 128)


def test_pack_has_no_graph(device: str) -> None:
    """As the page says."""
    torch._dynamo.reset()
    x = torch.ones(1, 1, 10, 32, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, 1, device=device)

    def pack() -> ha.QuantizedQKV:
        return ha.pack(x, x, x, q_descale=one, k_descale=one, v_descale=one)

    assert pack().M == 10
    with pytest.raises(RuntimeError, match="data-dependent"):
        torch.compile(pack, fullgraph=True, backend="aot_eager")()


def test_cuda_graphs() -> None:
    names = run_example("CUDA graphs")
    assert torch.equal(names["out"], ha.attention(names["q"], names["k"], names["v"], causal=True))


def test_finding_mistakes() -> None:
    names = run_example("Finding mistakes")
    assert "lengths" in names["message"]


def test_shipping_compiled_kernels() -> None:
    names = run_example("Shipping compiled kernels")
    assert names["out"].shape == (1, names["M"], 32, 128)
    assert not names["out"].isnan().any()


def test_tables_are_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    with_tables = importlib.import_module("integrations").with_tables
    page = PAGE.read_text()
    assert page == with_tables(page), "run scripts/integrations.py"
    assert with_tables(page.replace("`sm_margin`", "`sm`")) == page
    with pytest.raises(ValueError, match="0 blocks unsupported:sdpa"):
        with_tables(page.replace("unsupported:sdpa", "unsupported"))


def test_models_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page lists both kinds, of the version that it names."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(PAGE.parents[1] / "scripts"))
    integrations = importlib.import_module("integrations")
    page = PAGE.read_text()
    kinds = integrations.kinds_of_models()
    assert {"llama", "paligemma", "bert"} - {*kinds["take it"]} == {"paligemma"}, "its parts are gemma and siglip"
    assert {"mpnet", "bloom", "falcon", "gpt_neo"} <= {*kinds["compute attention themselves"]}
    assert {"t5", "longt5"} <= {*kinds["hand it position biases, which raise"]}
    assert len({name for names in kinds.values() for name in names}) == sum(map(len, kinds.values()))
    if f"models of transformers {transformers.__version__} |" not in page:
        pytest.skip(f"the page is not of transformers {transformers.__version__}")
    assert page == integrations.with_models(page), "run scripts/integrations.py"
