"""A backend that refuses to run: vLLM finds it where the interface of its release is not known."""

from __future__ import annotations

import importlib.metadata

from helion_attn.integrations.vllm import GENERATIONS


class HelionBackend:
    """Refuses to be chosen."""

    def __init_subclass__(cls) -> None:
        raise TypeError(why_unknown())

    @staticmethod
    def get_name() -> str:
        """Raise NotImplementedError."""
        raise NotImplementedError(why_unknown())

    @classmethod
    def validate_configuration(cls, *given: object, **options: object) -> list[str]:
        """Give vLLM the reason."""
        return [why_unknown()]


def why_unknown() -> str:
    """Say which release there is, and which are known."""
    version = importlib.metadata.version("vllm")
    return f"vLLM is {version}; this helion_attn knows the interface of {', '.join(GENERATIONS)}: install one of them"
