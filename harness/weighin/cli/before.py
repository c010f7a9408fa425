"""``weighin doctor`` and ``list``: what this machine can do, and what runs can name; no slow imports."""

import shutil
from typing import Any, Final

import click

from weighin.cell import USES
from weighin.cli import _console, _options
from weighin.cli._verb import WIDEST, definitions, parameters, verb
from weighin.errors import UnknownName

_HEADINGS: Final = {
    "strategies": "strategies",
    "saving": "strategies for saves (--set operation=save)",
    "models": "models",
    "uses": "uses after a load (--use NAME)",
    "suites": "suites (--suite NAME)",
    "isolations": "isolations (--isolation NAME)",
}
_ISOLATIONS: Final = {
    "docker": "A Docker container for each measurement. Enforces RAM limits.",
    "cgroup": "A memory cgroup for each measurement, without a container. Enforces RAM limits.",
    "process": "A plain process for each measurement. Enforces no RAM limit.",
}


@verb(
    _options.JSON,
    codes=True,
    examples={
        "Test what this machine can limit and measure": "weighin doctor",
        "Print the result as JSON": "weighin doctor --json -",
    },
)
def doctor(context: click.Context, typed: dict[str, Any]) -> None:
    """Test which limits this machine can enforce, and which figures it can measure.

    For each isolation (docker, cgroup, process), a test process allocates more memory than its
    limit, to test that the kernel enforces the limit. `weighin doctor` also cleans up after runs of
    weighin that were killed: it removes their containers, cgroups and processes. The exit code is 3
    if no isolation enforces a limit.
    """
    from weighin import doctor as of_machine

    document = of_machine.as_json(found := of_machine.examine())
    _console.deliver(typed["json"], document, of_machine.table(found))
    if not document["holds_a_limit"]:
        context.exit(3)  # no isolation holds a limit


@verb(
    *parameters({"[KIND]": "What to list: strategies, models, uses, suites or isolations. Default: all five."}, kind="all"),
    _options.JSON,
    name="list",
    examples={
        "List everything": "weighin list",
        "List the isolations": "weighin list isolations",
        "Print the strategies as JSON": "weighin list strategies --json -",
    },
)  # fmt: skip
def list_(_: click.Context, typed: dict[str, Any]) -> None:
    """List the strategies, models, uses, suites and isolations."""
    kind, kinds = typed["kind"], [*(one for one in _HEADINGS if one != "saving"), "all"]
    if kind not in kinds:
        raise UnknownName("list", kind, kinds)
    chosen = {"all": [*_HEADINGS], "strategies": ["strategies", "saving"]}.get(kind, [kind])
    found = {each: _entries(each) for each in chosen}
    width, lines = min(shutil.get_terminal_size().columns, WIDEST), list[str]()
    for each, entries in found.items():
        lines += [*[""] * bool(lines), _HEADINGS[each]]
        lines += definitions([(entry["name"], entry["summary"]) for entry in entries], width)
    _console.deliver(typed["json"], found, "\n".join(lines), folds=False)


def _entries(kind: str) -> list[dict[str, Any]]:
    from weighin.settings.yaml_file import read_mapping
    from weighin.suite import registry

    if kind in ("uses", "isolations"):
        summaries = USES if kind == "uses" else _ISOLATIONS
        return [{"name": name, "summary": summary} for name, summary in summaries.items()]
    found: list[dict[str, Any]] = []
    if kind in ("strategies", "saving"):
        for name, info in registry.strategies("save" if kind == "saving" else "load").items():
            facts = ("formats", "devices", "options", "packages")
            listed = {fact: list(getattr(info, fact)) for fact in facts}
            found.append({"name": name, "summary": info.summary, **listed, "path": str(info.path)})
        return found
    for name, path in registry.files(kind).items():
        content = read_mapping(path)
        more = {"path": str(path)}
        if kind == "models":
            more = {"builder": content["builder"], "kwargs": content.get("kwargs", {})}
        found.append({"name": name, "summary": content.get("description", ""), **more})
    return found
