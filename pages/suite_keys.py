"""Write the keys of suite files into a page (``pages.tables``).

The text between the two comments of a block is generated from the pydantic model that reads suite
files, so that the page and the code cannot differ::

    <!-- keys of a suite -->
    ...
    <!-- end -->
"""

import json
import re
from collections.abc import Iterable
from typing import Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weighin.settings.definition import COMMANDS, MODELS, Settings, SuiteCommand, SuiteModel

_KINDS: Final[dict[str, tuple[type[BaseModel], Iterable[str]]]] = {
    "suite": (Settings, Settings.keys(MODELS)),
    "model": (SuiteModel, SuiteModel.keys()),
    "suite of commands": (Settings, Settings.keys(COMMANDS)),
    "command": (SuiteCommand, SuiteCommand.keys()),
}
_BLOCK: Final = re.compile(r"(<!-- keys of a ([\w ]+) -->\n).*?<!-- end -->", re.DOTALL)
_DEFAULTS: Final = {
    ("suite", "models"): "required",
    ("suite", "strategies"): "six strategies",
    ("suite", "timeout_s"): "`600`",
    ("suite of commands", "commands"): "required",
    ("suite of commands", "timeout_s"): "`0`",
}
"""The defaults that depend on other keys."""


def fill(page: str) -> str:
    """Return the page with the table of keys in every block."""
    return _BLOCK.sub(lambda match: f"{match[1]}{keys_of(match[2])}\n<!-- end -->", page)


def keys_of(name: str) -> str:
    """Return the keys of a mapping as a Markdown table, with their defaults and meanings."""
    kind, keys = _KINDS[name]
    fields = {key: kind.model_fields[key] for key in keys}
    rows = [
        f"| `{key}` | {_DEFAULTS.get((name, key)) or _default(field)} | {_meaning(field)} |"
        for key, field in fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_yaml(field.default)}`" if field.default not in ("", [], {}, [{}], None) else "none"


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_yaml, value))
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")


def _meaning(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    listed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return f"{field.description}{listed}".replace("|", "\\|")
