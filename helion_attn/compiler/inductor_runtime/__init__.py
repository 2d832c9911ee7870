"""Inductor's functions that generated code calls, as submodules of this one: importing Inductor takes a second or more.

Modules in `torch/_inductor/runtime` are found here too, under this package's name. Of those, only ones that import
nothing else of Inductor may be asked for: triton_helpers, triton_compat and cache_dir_utils.
"""

from __future__ import annotations

from pathlib import Path

import torch

__path__ = [str(Path(torch.__file__).parent / "_inductor" / "runtime")]
