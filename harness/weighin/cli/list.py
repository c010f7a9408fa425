"""``weighin list``: list strategies, models, uses, suites and isolations, without slow imports."""

import shutil
from typing import Any, Final

import click

from weighin.cell import USES
from weighin.cli import _console, _options
from weighin.cli._verb import WIDEST, definitions, parameters, verb, wrap
from weighin.errors import HarnessError, UnknownName

_HEADINGS: Final = {
    "strategies": "strategies",
    "saving": "strategies for saves (--set operation=save)",
    "models": "models",
    "uses": "uses after a load (--use NAME)",
    "suites": "suites (--suite NAME)",
    "isolations": "isolations (--isolation NAME)",
}
_BESIDE: Final = ("name", "summary", "path")
_ISOLATIONS: Final = {
    "docker": "A Docker container for each measurement. Enforces RAM limits.",
    "cgroup": "A memory cgroup for each measurement, without a container. Enforces RAM limits.",
    "process": "A plain process for each measurement. Enforces no RAM limit.",
}


@verb(
    *parameters(
        {
            "[KIND]": "What to list: strategies, models, uses, suites or isolations. Default: all five. Only `weighin list isolations` tests which isolations work on this machine."
        },
        kind="all",
    ),
    _options.JSON,
    name="list",
    examples={
        "List everything": "weighin list",
        "List the isolations, and whether this machine has them": "weighin list isolations",
        "Print the strategies as JSON": "weighin list strategies --json -",
    },
)
def list_(_: click.Context, typed: dict[str, Any]) -> None:
    """List the strategies, models, uses, suites and isolations."""
    kind, kinds = typed["kind"], [*(one for one in _HEADINGS if one != "saving"), "all"]
    if kind not in kinds:
        raise UnknownName("list", kind, kinds)
    chosen = {"all": [*_HEADINGS], "strategies": ["strategies", "saving"]}.get(kind, [kind])
    found = {each: _entries(each, tried=kind == "isolations") for each in chosen}
    width, lines = min(shutil.get_terminal_size().columns, WIDEST), list[str]()
    for each, entries in found.items():
        lines += [*[""] * bool(lines), _HEADINGS[each]]
        longest = max((len(entry["name"]) for entry in entries), default=0)
        indent = " " * (longest + 4)
        for entry in entries:
            lines += definitions([(entry["name"].ljust(longest), entry["summary"])], width)
            lines += (indent + line for line in wrap(_facts(entry), width - len(indent)))
    _console.deliver(typed["json"], found, "\n".join(lines), folds=False)


def _facts(entry: dict[str, Any]) -> str:
    """Return what the JSON says of an entry beside its summary and path; of inner mappings, names."""
    if entry.get("works") is not None:
        return "works here" if entry["works"] else f"does not work here: {entry['why']}"
    facts = []
    for key, found in entry.items():
        value = found
        if isinstance(found, dict):
            value = [one if isinstance(it, dict) else f"{one}={it}" for one, it in found.items()]
        if value and key not in _BESIDE:
            facts.append(f"{key} {', '.join(value) if isinstance(value, list) else value}")
    return "; ".join(facts)


def _entries(kind: str, *, tried: bool) -> list[dict[str, Any]]:
    """Return what the JSON document lists of one kind; isolations are tested only if ``tried``."""
    from weighin.settings.yaml_file import read_mapping
    from weighin.suite import registry

    if kind == "uses":
        return [{"name": name, "summary": summary} for name, summary in USES.items()]
    if kind == "isolations":
        return [_isolation(name, tried=tried) for name in _ISOLATIONS]
    found: list[dict[str, Any]] = []
    if kind in ("strategies", "saving"):
        for name, info in registry.strategies("save" if kind == "saving" else "load").items():
            facts = ("formats", "devices", "options", "packages")
            listed = {fact: list(getattr(info, fact)) for fact in facts}
            found.append({"name": name, "summary": info.summary, **listed, "path": str(info.path)})
        return found
    for name, path in (registry.models if kind == "models" else registry.suites)().items():
        content = read_mapping(path)
        more = {"path": str(path)}
        if kind == "models":
            more = {"builder": content["builder"], "kwargs": content.get("kwargs", {})}
        found.append({"name": name, "summary": content.get("description", ""), **more})
    return found


def _isolation(name: str, *, tried: bool) -> dict[str, Any]:
    works, why = None, ""
    if tried:
        from weighin.isolation import select

        try:
            select.named(name).check()
            works = True
        except HarnessError as error:
            works, why = False, f"{error.message}. {error.repair}"
    return {"name": name, "summary": _ISOLATIONS[name], "works": works, "why": why}
