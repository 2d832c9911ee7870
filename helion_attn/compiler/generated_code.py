"""Loads the code that Helion generates: without Helion, and without a file.

The code imports Helion and Inductor for a launcher and some functions of Triton's language. `linked` has it import the
modules in which these are, and no others.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
import types
from collections.abc import Callable
from typing import Any

#: A host function that launches one Triton kernel.
HostFn = Callable[..., Any]

#: Lines of generated code, and what stands in their place: a line each, since the line that a kernel begins at is part
#: of Triton's key.
LINKS = {
    "import helion": "from helion_attn.compiler.helion_adapter import helion",
    "import helion.language as hl": "from helion_attn.compiler.helion_adapter import hl",
    "from torch._inductor.runtime import triton_helpers": (
        "from helion_attn.compiler.inductor_runtime import triton_helpers"
    ),
    "from torch._inductor.runtime.triton_helpers import math as tl_math": (
        "from helion_attn.compiler.inductor_runtime.triton_helpers import math as tl_math"
    ),
    "from torch._inductor.runtime.triton_compat import libdevice": (
        "from helion_attn.compiler.inductor_runtime.triton_compat import libdevice"
    ),
    "from helion.runtime.triton import helpers as helion_triton_helpers": (
        "from helion_attn.compiler.helion_runtime import helpers as helion_triton_helpers"
    ),
    "from helion.runtime import default_launcher as _default_launcher": (
        "from helion_attn.compiler.helion_runtime.launcher import default_launcher as _default_launcher"
    ),
    "helion.runtime.set_triton_allocator()": (
        "from helion_attn.compiler.helion_runtime.launcher import set_triton_allocator; set_triton_allocator()"
    ),
}


#: A bound that a kernel's body has: `torch._check` of PyTorch 2.11 imports sympy, for 2 to 4 s.
_BOUND = re.compile(r"^(\s*)torch\._check\((.*)\)$")


def linked(source: str) -> str:
    """Generated code that imports no more of Helion, Inductor and sympy than it needs."""
    lines = (LINKS.get(line, line) for line in source.split("\n"))
    return "\n".join(_BOUND.sub(r"\1assert \2", line) for line in lines)


@functools.cache
def load(source: str, name: str) -> HostFn:
    """The function `name` of `source`, loaded once a process."""
    digest = hashlib.sha256(source.encode()).hexdigest()
    file = f"<{name}-{digest[:16]}>"
    # Where Triton finds the text of a kernel. Without a time of change, it stays.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(f"helion_attn_generated_{digest}")
    exec(compile(source, file, "exec"), vars(module))
    host_fn: HostFn = getattr(module, name)
    return host_fn
