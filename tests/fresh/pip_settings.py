"""What pip is told on this machine, for a pip in another root folder: variables, and the places that they name."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LINE = re.compile(r"^(?:global|install|:env:)\.([\w-]+)=(.*)$", re.MULTILINE)


def read() -> dict[str, str]:
    """Return the settings from all of pip's files and variables, as variables."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    lines = sorted(listed.splitlines(), reverse=True)  # a later line wins: global, then :env:
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    return {f"PIP_{m[1].upper().replace('-', '_')}": str(ast.literal_eval(m[2])) for m in found}


def places(settings: dict[str, str]) -> list[Path]:
    """Return the files and folders of this machine that the settings name.

    The pages of an index link to files beside its folder, so the folder above it is needed.
    """
    found = []
    for name, value in settings.items():
        for word in value.split():
            is_url = word.startswith("file:")
            path = Path(unquote(urlsplit(word).path) if is_url else word)
            if path.is_absolute() and path.exists():
                found.append(path.parent if name.endswith("INDEX_URL") else path)
    return sorted(set(found) - {Path("/")})
