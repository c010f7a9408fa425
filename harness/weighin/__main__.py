"""Run the command line as ``python -m weighin``."""

from weighin.cli.app import main

main()
