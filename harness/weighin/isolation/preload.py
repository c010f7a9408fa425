"""The libraries that LD_PRELOAD names in a cell's environment, such as another allocator.

The dynamic linker only prints a line where it cannot load one, and the program runs without it. The
figures would then be of the usual allocator. So the files are looked up before a run, and a worker
looks for them in its own memory (``weighin.worker.warmup``).
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError

VARIABLE: Final = "LD_PRELOAD"


def libraries(environment: Mapping[str, str]) -> list[str]:
    """Return the libraries that an environment preloads; names are divided by colons or spaces."""
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
