"""Which devices the package runs on, and why not on others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: The compute capability that the kernels are compiled for.
CAPABILITY = (9, 0)


@dataclass(frozen=True)
class Support:
    """Whether a device is supported; true or false in an `if`, and printed, the reason.

    Attributes:
        supported: whether it is.
        reason: what runs there, or what is missing.
    """

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        return f"{'yes' if self.supported else 'no'}: {self.reason}"


def is_supported(device: torch.device | str | int | None = None) -> Support:
    """Whether tensors on a device can be attended to, and why, or why not. Nothing is launched.

    Args:
        device: by default the current CUDA device, or the CPU where there is none.

    Raises:
        TypeError, RuntimeError: what `torch.device` raises of something that is no device.

    Example:
        print(ha.is_supported("cpu"))
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type == "cpu":
        return Support(True, "CPU tensors run in Helion's interpreter: the same arithmetic, slowly")
    if device.type != "cuda":
        return Support(
            False,
            f"{device} is neither the CPU nor a CUDA device of compute capability 9.0 (H100, H200)",
        )
    if not torch.cuda.is_available():
        return Support(False, f"{device} is asked for, and torch {torch.__version__} finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        return Support(False, f"{device} is asked for, and there are {torch.cuda.device_count()} CUDA devices")
    major, minor = torch.cuda.get_device_capability(index)
    name = f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
    if (major, minor) != CAPABILITY:
        return Support(False, f"{name}: not supported, it must be 9.0 (H100, H200)")
    return Support(True, f"{name}: compiled kernels")
