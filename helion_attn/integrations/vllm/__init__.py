"""Attention and an 8-bit cache for vLLM, which `pip install helion_attn` adds to a server.

    vllm serve MODEL --attention-backend CUSTOM --kv-cache-dtype int8_per_token_head     # 0.25, 0.26
    vllm serve MODEL --attention-backend HELION --kv-cache-dtype helion_int8             # 0.33

vLLM calls `register` in each of its processes (entry point `vllm.general_plugins`). docs/vllm.md says which models run,
and what it costs.
"""

from __future__ import annotations

import importlib.metadata

from helion_attn.compiler.notice import LOG

#: The module of each generation of vLLM's interface, by the releases that have it.
GENERATIONS = {"0.25": "vllm_0_26", "0.26": "vllm_0_26", "0.33": "vllm_0_33"}


def generation_of(version: str) -> str | None:
    """The module for a release of vLLM; None if its interface is not known."""
    return GENERATIONS.get(".".join(version.split(".")[:2]))


def register() -> None:
    """Make the backend the one that vLLM calls CUSTOM; from 0.33 on, HELION. With an unknown release, CUSTOM raises.

    vLLM calls this whatever backend it uses, so a release without a registry of backends starts without this one.
    Another plugin's CUSTOM stays.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        LOG.info("this vLLM has no registry of attention backends: helion_attn is not among them")
        return

    module = generation_of(importlib.metadata.version("vllm")) or "unknown_release"
    path = f"{__name__}.{module}.HelionBackend"
    if module == "vllm_0_33":
        from helion_attn.integrations.vllm import names_0_33

        names_0_33.register(path)
        return
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != path:
        LOG.warning(
            "the attention backend CUSTOM is %s; helion_attn leaves it: set VLLM_PLUGINS=helion_attn to load no other "
            "plugin, and CUSTOM is helion_attn",
            custom.get_path(),
        )
    else:
        register_backend(custom, path)
