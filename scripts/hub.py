"""Write the package as a repository of the Hugging Face Hub, for `kernels.get_kernel` and `kernels.get_local_kernel`.

python scripts/hub.py OUT

The layout is that of https://huggingface.co/docs/kernels/kernel-requirements: `build/torch-universal` has the package,
a module that loads it from any folder (`hub_init.py`), and `metadata.json`. `README.md` is the repository's card.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import inspect
import json
import shutil
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import helion_attn as ha

ROOT = Path(__file__).parents[1]
NAME = "helion_attn"
VARIANT = Path("build") / "torch-universal"

#: The Hub's name of the licence.
LICENSE = "bsd-3-clause"

#: The Hub keeps 0 for what may still change; helion_attn's first number is 0 as long as that is so.
VERSION = int(ha.__version__.split(".")[0])

CARD = """---
library_name: kernels
license: {license}
tags:
{tags}
---

# {name}

{summary}

It runs on NVIDIA H100 and H200 GPUs, and on CPU tensors, slowly, in an interpreter. It needs

```
pip install kernels {needs}
```

```python
import torch
from kernels import get_kernel

helion_attn = get_kernel("OWNER/NAME", version={version}, trust_remote_code=True)  # this repository
q, k, v = torch.randn(3, 1, 4, 4096, 128, dtype=torch.bfloat16, device="cuda")  # each [B, heads, S, D]
out = helion_attn.attention(q, k, v, causal=True)
```

The name is the one that this repository has on the Hub. `kernels.get_local_kernel(Path(FOLDER))` takes a
copy in a folder.

A process has one helion_attn: where another version was imported, loading this one raises `ImportError`.

## Functions

{functions}
"""


def card(metadata: ProjectMetadata[PluginManager]) -> str:
    """The repository's README.md."""
    public = ((name, getattr(ha, name)) for name in ha.__all__)
    functions = [f"- `{name}`: {first_line(x)}" for name, x in public if inspect.isfunction(x)]
    return CARD.format(
        name=NAME,
        license=LICENSE,
        version=VERSION,
        tags="\n".join(f"- {tag}" for tag in ("kernels", "kernel", *metadata.core.keywords)),
        summary=metadata.core.description,
        needs=" ".join(f"'{need}'" for need in metadata.core.dependencies),
        functions="\n".join(functions),
    )


def first_line(x: object) -> str:
    """The summary of a docstring."""
    return (inspect.getdoc(x) or "").partition("\n")[0]


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path in `folder`, as `metadata.json` has it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in files
    }


def write(out: Path) -> None:
    """Write the repository into `out`, a folder that does not exist or is empty.

    Raises:
        FileExistsError: something is in `out`.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    variant = out / VARIANT
    shutil.copytree(ROOT / NAME, variant / NAME, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    shutil.copy(ROOT / "scripts" / "hub_init.py", variant / "__init__.py")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    files = digests(variant)
    whole = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    metadata = {
        "name": NAME.replace("_", "-"),
        "id": f"_{NAME}_{whole[:12]}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": ["helion"],
        "backend": {"type": "cuda", "archs": ["9.0a"]},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (out / "README.md").write_text(card(ProjectMetadata(str(ROOT), PluginManager())))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that does not exist or is empty")
    write(parser.parse_args().out)
