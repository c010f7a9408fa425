"""The command that installs weighin with an extra, as errors, ``--help`` and the docs print it.

No command needs weighin to be on a package index: weighin comes from its repository, or from the place
that this installation came from.
"""

import json
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

PLACEHOLDER: Final = "git+URL"
"""Stands for the repository's address in the docs, and where the package names no repository."""
EXPLAINED: Final = "where URL is the address of weighin's repository"


def command(*extras: str, anywhere: bool = False) -> str:
    """Return the command that installs weighin with these extras.

    ``anywhere`` leaves out the clone or the wheel that this installation came from, for a text that
    is read on other machines, too.
    """
    chosen = f"[{','.join(extras)}]" if extras else ""
    origin, editable = ("", False) if anywhere else _origin()
    if editable:
        return f"pip install --editable '{origin}{chosen}'"
    if origin:
        return f"pip install '{origin}{chosen}'"
    address = _repository() or PLACEHOLDER
    line = f"pip install 'weighin{chosen} @ {address}'"
    return f"{line}, {EXPLAINED}" if address == PLACEHOLDER else line


def upgrade() -> str:
    """Return the command that replaces this weighin by the newest one."""
    return command(anywhere=True).replace("pip install", "pip install --upgrade")


def _repository() -> str:
    """Return pip's address of the repository that weighin came from, or that its metadata name."""
    record = _direct_url()
    if "vcs_info" in record:
        return f"{record['vcs_info']['vcs']}+{record['url']}"
    for line in _read("Project-URL"):
        label, _, url = line.partition(", ")
        if label == "Source":
            return f"git+{url}"
    return ""


def _read(field: str) -> list[str]:
    try:
        return metadata.metadata("weighin").get_all(field) or []
    except metadata.PackageNotFoundError:  # weighin runs from a folder without being installed
        return []


def _direct_url() -> dict[str, Any]:
    """Return what pip wrote of the address that it installed weighin from; empty for an index."""
    try:
        text = metadata.distribution("weighin").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return {}
    record: dict[str, Any] = json.loads(text or "{}")
    return record


def _origin() -> tuple[str, bool]:
    """Return the clone or the wheel that weighin was installed from, if it is still there.

    The second value says whether the installation is editable.
    """
    record = _direct_url()
    parts = urlsplit(record.get("url", ""))
    path = unquote(parts.path)
    if parts.scheme != "file" or not Path(path).exists():
        return "", False
    return path, record.get("dir_info", {}).get("editable", False)
