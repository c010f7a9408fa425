"""Compile the code that workers import to bytecode, as pip does on installation.

A strategy's imports are part of its measured time. Without bytecode, for instance in a container
that cannot write any, every cell would compile the imported modules again, which takes 25 ms of a
``streaming`` load.
"""

import compileall
from pathlib import Path

import weighin
from weighin.suite.registry import data_folder


def compile_code() -> None:
    """Compile weighin and its strategies, if their folders are writable; skip current bytecode."""
    for folder in (Path(weighin.__file__).parent, data_folder("strategies")):
        compileall.compile_dir(folder, quiet=2)
