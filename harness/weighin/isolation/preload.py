"""Check the libraries (such as another allocator) that LD_PRELOAD names in a cell's environment.

If the dynamic linker cannot load a library, it prints a line and runs the program with the usual
allocator, so that the figures would be wrong. Before a run, weighin therefore checks that the
libraries' files exist. A worker checks that the libraries are mapped into its memory
(``weighin.worker.warmup``).
"""

import re
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError

VARIABLE: Final = "LD_PRELOAD"


def libraries(environment: Mapping[str, str]) -> list[str]:
    """Return the libraries that LD_PRELOAD names; colons or spaces separate them in the variable."""
    return [name for name in re.split(r"[: ]+", environment.get(VARIABLE, "")) if name]


def check(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError if LD_PRELOAD has anything but absolute paths of existing files."""
    for name in chain.from_iterable(map(libraries, environments)):
        if not Path(name).is_absolute():
            raise ConfigError(
                f"{VARIABLE}: {name!r} is not an absolute path",
                "write the library's whole path, which begins with /",
            )
        if not Path(name).is_file():
            raise ConfigError(
                f"{VARIABLE}: there is no file {name}",
                "install the library, or write its path into the variable: `ldconfig -p` lists this"
                " machine's libraries",
            )
