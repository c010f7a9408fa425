"""Build the command that installs weighin with an extra, for errors, ``--help`` and the docs: from the clone
or wheel of this weighin, or else from the repository, so that it need not be on a package index.
"""

import json
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

PLACEHOLDER: Final = "git+URL"
"""Stands for the repository's address in the docs, and in commands if the address is unknown."""
EXPLAINED: Final = "where URL is the address of weighin's repository"


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
    addresses = dict(line.partition(", ")[::2] for line in urls)  # "Source, https://..."
    if "vcs_info" in record:
        address = f"{record['vcs_info']['vcs']}+{record['url']}"
    else:
        address = f"git+{addresses['Source']}" if "Source" in addresses else PLACEHOLDER
    line = f"pip install 'weighin{chosen} @ {address}'"
    return f"{line}, {EXPLAINED}" if address == PLACEHOLDER else line


def upgrade() -> str:
    return command(anywhere=True).replace("pip install", "pip install --upgrade")
