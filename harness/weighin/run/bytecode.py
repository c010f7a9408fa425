"""Compile the code that workers import to bytecode, as pip does on installation.

A strategy's imports are part of its measured time. Without bytecode, for instance in a container
that cannot write it, every cell would compile them again: 25 ms of a ``streaming`` load.
"""

import compileall
from pathlib import Path

import weighin
from weighin.suite.registry import data_folder


def compile_code(*more: Path) -> None:
    """Compile the package, its strategies and the folders ``more``, where they are writable.

    Files whose bytecode is up to date are left alone.
    """
    for folder in (Path(weighin.__file__).parent, data_folder("strategies"), *more):
        compileall.compile_dir(folder, quiet=2)
