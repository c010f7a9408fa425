"""``python -m harness`` is ``weighin``."""

from harness.cli import main

main()
