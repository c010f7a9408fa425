"""The libraries that LD_PRELOAD names in a cell's environment, such as another allocator.

If the dynamic linker cannot load a library, it only prints a line and runs the program without the
library. The figures would then be figures of the usual allocator. Before a run, weighin therefore
checks that the files exist, and a worker checks that they are mapped into its memory
(``weighin.worker.warmup``).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError

VARIABLE: Final = "LD_PRELOAD"


def libraries(environment: Mapping[str, str]) -> list[str]:
    """Return the libraries that LD_PRELOAD names, separated there by colons or spaces."""
    return [name for name in re.split(r"[: ]+", environment.get(VARIABLE, "")) if name]


def check(environments: Iterable[Mapping[str, str]]) -> None:
    """Raise ConfigError for a library that is not the path of an existing file."""
    for name in [each for environment in environments for each in libraries(environment)]:
        if not Path(name).is_absolute():
            raise ConfigError(
                f"{VARIABLE}: {name!r} is not an absolute path",
                "name the library with its whole path",
            )
        if not Path(name).is_file():
            raise ConfigError(
                f"{VARIABLE}: no such file: {name}",
                "install the library, or name its path: ldconfig -p lists those of this machine",
            )
