"""Build the command that installs weighin with an extra, for errors, ``--help`` and the docs.

The command names the clone or wheel that this weighin was installed from, or else the repository.
weighin therefore need not be on a package index.
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

PLACEHOLDER: Final = "git+URL"
"""Stands for the repository's address in the docs, and in commands if the address is unknown."""
EXPLAINED: Final = "where URL is the address of weighin's repository"


def command(*extras: str, anywhere: bool = False) -> str:
    """Return the command that installs weighin with the given extras.

    With ``anywhere``, the command also works on other machines, because it names the repository and
    not a clone or wheel on this machine.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    try:
        text = metadata.distribution("weighin").read_text("direct_url.json")  # by pip
    except metadata.PackageNotFoundError:
        text = None
    record: dict[str, Any] = json.loads(text or "{}")
    parts = urlsplit(record.get("url", ""))
    path = unquote(parts.path)
    if not anywhere and parts.scheme == "file" and Path(path).exists():
        editable = "--editable " if record.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{path}{chosen}'"
    address = _repository(record) or PLACEHOLDER
    line = f"pip install 'weighin{chosen} @ {address}'"
    return f"{line}, {EXPLAINED}" if address == PLACEHOLDER else line


def upgrade() -> str:
    return command(anywhere=True).replace("pip install", "pip install --upgrade")


def _repository(record: dict[str, Any]) -> str:
    """Return the repository's address in pip's form ("git+https://..."); empty if it is unknown."""
    if "vcs_info" in record:
        return f"{record['vcs_info']['vcs']}+{record['url']}"
    try:
        urls = metadata.metadata("weighin").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # weighin runs from a folder without being installed
        urls = []
    addresses = dict(line.partition(", ")[::2] for line in urls)  # "Source, https://..."
    return f"git+{addresses['Source']}" if "Source" in addresses else ""
