"""Build the command that installs weighin with an extra, for errors, ``--help`` and the docs: from the clone
or wheel of this weighin, or else from the repository, so that it need not be on a package index.
"""

import json
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def command(*extras: str, anywhere: bool = False) -> str:
    """Return the command for ``extras``; with ``anywhere``, one that also works on other machines."""
    chosen = f"[{','.join(extras)}]" if extras else ""
    record: dict[str, Any] = {}
    urls: list[str] = []
    with suppress(metadata.PackageNotFoundError):  # weighin runs from a folder
        installed = metadata.distribution("weighin")
        record = json.loads(installed.read_text("direct_url.json") or "{}")  # by pip
        urls = installed.metadata.get_all("Project-URL") or []
    parts = urlsplit(record.get("url", ""))
    path = unquote(parts.path)
    if not anywhere and parts.scheme == "file" and Path(path).exists():
        editable = "--editable " if record.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{path}{chosen}'"
    sources = [line.partition(", ")[2] for line in urls if line.startswith("Source, ")]
    if "vcs_info" in record:
        address = f"{record['vcs_info']['vcs']}+{record['url']}"
    else:
        address = f"git+{sources[0]}" if sources else ""
    line = f"pip install 'weighin{chosen} @ {address or 'git+URL'}'"
    return line if address else f"{line}, where URL is the address of weighin's repository"


def upgrade() -> str:
    return command(anywhere=True).replace("pip install", "pip install --upgrade")


def requirements_in(choice: str) -> list[str]:
    """Split at the commas between requirements, and not at those inside of one: ``a>=1,<2,b``."""
    return [one.strip() for one in re.split(r",(?=\s*[A-Za-z])", choice) if one.strip()]
