"""Import transformers and diffusers although the installed torchvision was built for another torch.

transformers and diffusers import torchvision only for image processors, which no load needs.
"""

import sys
from importlib import import_module, metadata
from typing import Any

from weighin.errors import ConfigError
from weighin.text import one_line

_IMPORTERS = ("transformers", "diffusers", "peft")


def imported_again(package: str, error: Exception) -> Any:
    """After the import of a package failed with ``error``, import the package again as if
    torchvision were not installed.

    Because ``imported_again`` changes ``sys.modules``, it works only in a process that weighin
    started.

    Raises:
        ConfigError: torchvision is not the cause, or weighin did not start this process.
    """
    failed = misfit(package, error)
    if not _fits_badly(error) or not _is_weighins_own_process():
        raise failed from error
    for name in [name for name in sys.modules if name.partition(".")[0] in _IMPORTERS]:
        del sys.modules[name]
    modules: dict[str, Any] = sys.modules
    modules["torchvision"] = None  # makes "import torchvision" fail
    return import_module(package)


def misfit(package: str, error: Exception) -> ConfigError:
    """Return the error for a package that cannot be imported, with the cause and advice."""
    cause = _cause(error)
    reason = one_line(f"{type(cause).__name__}: {cause}")
    if not _fits_badly(error):
        return ConfigError(
            f"{package} cannot be imported: {reason}",
            f"install it again: pip install --force-reinstall {package}",
        )
    torch, torchvision = (metadata.version(name) for name in ("torch", "torchvision"))
    return ConfigError(
        f"{package} imports torchvision {torchvision}, whose build does not fit torch {torch}: {reason}",
        "install the build for this torch, from the index that torch came from; transformers and"
        " diffusers work without torchvision, too: pip uninstall torchvision",
    )


def _fits_badly(error: Exception) -> bool:
    return "torchvision::" in str(_cause(error))  # an operator that torchvision did not define


def _cause(error: BaseException) -> BaseException:
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _is_weighins_own_process() -> bool:
    """Tell whether this process runs a module of weighin, such as ``python -m weighin.worker``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.partition(".")[0] == "weighin"
