"""Write the keys of suite files into a page (``pages.tables``).

The text between the two comments of a block is generated from the pydantic model that reads suite
files, so that the page and the code cannot differ::

    <!-- keys of a suite -->
    ...
    <!-- end -->
"""

import json
import re
from typing import Final, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from weighin.suite.commands import CommandSuite, SuiteCommand
from weighin.suite.config import Suite, SuiteModel

_KINDS: Final[dict[str, type[BaseModel]]] = {
    "suite": Suite,
    "model": SuiteModel,
    "suite of commands": CommandSuite,
    "command": SuiteCommand,
}
_BLOCK: Final = re.compile(r"(<!-- keys of a ([\w ]+) -->\n).*?<!-- end -->", re.DOTALL)
_DEFAULT_OF_A_FACTORY: Final = "six strategies"


def fill(page: str) -> str:
    """Return the page with the table of keys in every block."""
    return _BLOCK.sub(lambda match: f"{match[1]}{keys_of(_KINDS[match[2]])}\n<!-- end -->", page)


def keys_of(kind: type[BaseModel]) -> str:
    """Return the keys of a mapping as a Markdown table, with their defaults and meanings."""
    rows = [
        f"| `{name}` | {_default(field)} | {_meaning(field)} |"
        for name, field in kind.model_fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory:
        return _DEFAULT_OF_A_FACTORY
    return f"`{_yaml(field.default)}`" if field.default not in ("", [], {}, [{}], None) else "none"


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_yaml, value))
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")


def _meaning(field: FieldInfo) -> str:
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    listed = f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""
    return f"{field.description}{listed}".replace("|", "\\|")
