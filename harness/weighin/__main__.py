"""``python -m weighin`` is ``weighin``."""

from weighin.cli.app import main

main()
