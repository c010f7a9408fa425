"""Import a package again without torchvision, whose build may not match torch's build.

transformers and diffusers import torchvision for image processors, which no load needs.
"""

import sys
from importlib import import_module
from typing import Any

_IMPORTERS = ("transformers", "diffusers", "peft")


def imported_without_torchvision(package: str) -> Any:
    """Return a package, imported again as if torchvision were not installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _IMPORTERS]:
        del sys.modules[name]
    modules: dict[str, Any] = sys.modules
    modules["torchvision"] = None  # import then fails as if it were not installed
    return import_module(package)
