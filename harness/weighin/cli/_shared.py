"""The two consoles that all verbs print to: results on standard output, all else on standard error."""

from rich.console import Console

out, err = Console(emoji=False), Console(stderr=True, emoji=False)
