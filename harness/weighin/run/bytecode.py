"""Compile the code that workers import to bytecode, as pip does on installation.

A strategy's imports are part of its load time. A container cannot write bytecode. Without this
compilation, every measurement would compile the imported modules again, which takes 25 ms in a load
with the strategy ``streaming``.
"""

import compileall
from pathlib import Path

import weighin
from weighin.suite.registry import data_folder


def compile_code() -> None:
    """Compile the modules of weighin and its strategies that have no current bytecode."""
    for folder in (Path(weighin.__file__).parent, data_folder("strategies")):
        compileall.compile_dir(folder, quiet=2)
