"""The ``weighin`` commands in the code blocks of README and docs."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/*.md", "*/README.md")


def pages() -> list[Path]:
    """Return the files of ``PAGES``."""
    return sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of each documented command, without its comment and its pipe."""
    found = []
    for page in pages():
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                if line.startswith("weighin "):
                    command = re.split(r"\s+#\s|\s+\|\s", line, maxsplit=1)[0].strip()
                    found.append((str(page.relative_to(ROOT)), command))
    return found


def words(command: str) -> list[str]:
    """Return the words after ``weighin``."""
    return shlex.split(command)[1:]
