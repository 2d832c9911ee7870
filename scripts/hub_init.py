"""helion_attn out of the folder that this file is in: each of its names is one of this module.

Its modules import each other as `helion_attn.NAME`, and its operations are `torch.ops.helion_attn.NAME`. So a process
has one helion_attn, and after this `import helion_attn` gives it as well.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "helion_attn"


def _loaded() -> ModuleType:
    """The package, under its own name in `sys.modules`.

    Raises:
        ImportError: another one is there.
    """
    here = Path(__file__).resolve().parent / NAME
    if NAME in sys.modules:
        package = sys.modules[NAME]
        if Path(str(package.__file__)).resolve().parent != here:
            raise ImportError(f"{NAME} is imported from {package.__file__}; a process has one, and this is {here}")
        return package
    spec = importlib.util.spec_from_file_location(NAME, here / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[NAME]
        raise
    return package


_package = _loaded()
__all__ = _package.__all__


def __getattr__(name: str) -> object:
    return getattr(_package, name)


def __dir__() -> list[str]:
    return __all__
