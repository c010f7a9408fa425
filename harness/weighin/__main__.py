"""Run the command line as ``python -m weighin``."""

import sys

if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose modules must not replace installed ones

from weighin.cli.app import main

main()
