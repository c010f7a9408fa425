"""Bytecode of what workers import, left beside the code as pip leaves it.

A strategy's imports are part of what it costs. Where no bytecode may be written, as in a container,
every cell would compile them again: 25 ms of a load that streams.
"""

import compileall
from pathlib import Path

import weighin
from weighin.suite.registry import data_folder


def compile_code(*more: Path) -> None:
    """Compile the package, its strategies and ``more`` folders, where that is to do and can be written."""
    for folder in (Path(weighin.__file__).parent, data_folder("strategies"), *more):
        compileall.compile_dir(folder, quiet=2)
