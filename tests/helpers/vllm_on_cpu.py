"""vLLM's classes on a machine without a GPU: empty modules in place of its compiled ones, and a platform of CUDA."""

from __future__ import annotations

import sys
import types

COMPILED = ("_C", "_C_stable_libtorch", "_moe_C", "cumem_allocator", "spinloop", "fs_io_C")


def install() -> None:
    """Put them in place, before vLLM is imported for the first time."""
    for name in COMPILED:
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):  # type: ignore[misc, valid-type, unused-ignore]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    vllm.platforms._current_platform = Hopper()
