"""Run the command line as ``python -m weighin``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder: nobody named the modules in it

from weighin.cli.app import main

main()
