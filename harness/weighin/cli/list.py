"""``weighin list``: list strategies, models, uses, suites and isolations, without slow imports."""

import shutil
from collections.abc import Iterator
from typing import Any, Final

import click

from weighin.cell import USES
from weighin.cli import _console, _options
from weighin.cli._verb import WIDEST, Verb, definitions, wrap
from weighin.errors import HarnessError, UnknownName

KINDS: Final = ("strategies", "models", "uses", "suites", "isolations")
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


@click.command(
    "list",
    cls=Verb,
    examples={
        "List everything": "weighin list",
        "List the isolations, and whether this machine has them": "weighin list isolations",
        "Print the strategies as JSON": "weighin list strategies --json -",
    },
)
@click.argument(
    "kind",
    default="all",
    help="What to list: strategies, models, uses, suites or isolations. Default: all five. Only"
    " `weighin list isolations` tests which isolations work on this machine.",
)
@_options.json
def list_(kind: str, json_file: str | None) -> None:
    """List the strategies, models, uses, suites and isolations."""
    if kind not in (*KINDS, "all"):
        raise UnknownName("list", kind, [*KINDS, "all"])
    chosen = {"all": [*_HEADINGS], "strategies": ["strategies", "saving"]}.get(kind, [kind])
    found = {each: _entries(each, tried=kind == "isolations") for each in chosen}
    width = min(shutil.get_terminal_size().columns, WIDEST)
    _console.deliver(json_file, found, lambda: _console.line("\n".join(_lines(found, width))))


def _lines(listed: dict[str, Any], width: int) -> Iterator[str]:
    """Yield the lines to print for a document, of at most ``width`` columns if no word is longer.

    A line shows an entry's name and summary; its facts (``_facts``) are in the lines below it.
    """
    for number, (kind, entries) in enumerate(listed.items()):
        yield from [""] * (number > 0)
        yield _HEADINGS[kind]
        longest = max((len(entry["name"]) for entry in entries), default=0)
        indent = " " * (longest + 4)
        for entry in entries:
            yield from definitions([(entry["name"].ljust(longest), entry["summary"])], width)
            for fact in _facts(kind, entry):
                yield from (indent + line for line in wrap(fact, width - len(indent)))


def _facts(kind: str, entry: dict[str, Any]) -> Iterator[str]:
    if kind in ("strategies", "saving"):
        reads, loads = ("reads", "loads to") if kind == "strategies" else ("writes", "saves from")
        yield f"{reads} {', '.join(entry['formats'])}; {loads} {', '.join(entry['devices'])}"
        for name, verb in (("options", "options"), ("packages", "needs")):
            if entry[name]:
                yield f"{verb} {', '.join(entry[name])}"
    elif kind == "models":
        # A table [tool.weighin] in pyproject.toml makes each command import this module.
        from weighin.stream.pretrained_folder import BUILDER, dtype_of

        kwargs = entry["kwargs"]
        if entry["builder"] == BUILDER:
            yield f"{kwargs['architecture']} of transformers, {dtype_of(kwargs['config']) or 'float32'}"
        else:
            arguments = [
                f"{key} of its configuration" if isinstance(value, dict) else f"{key}={value}"
                for key, value in kwargs.items()
            ]
            yield f"{entry['builder']} {', '.join(arguments)}"
    elif kind == "isolations" and entry["works"] is not None:
        yield "works here" if entry["works"] else f"does not work here: {entry['why']}"


def _entries(kind: str, *, tried: bool) -> list[dict[str, Any]]:
    """Return what the JSON document lists of one kind; isolations are tested only if ``tried``."""
    from weighin.suite import registry

    if kind == "uses":
        return [{"name": name, "summary": summary} for name, summary in USES.items()]
    if kind in ("strategies", "saving"):
        facts = ("formats", "devices", "options", "packages")
        return [
            {
                "name": name,
                "summary": info.summary,
                **{fact: list(getattr(info, fact)) for fact in facts},
                "path": str(info.path),
            }
            for name, info in registry.strategies("save" if kind == "saving" else "load").items()
        ]
    if kind == "isolations":
        return [_isolation(name, tried=tried) for name in _ISOLATIONS]
    from weighin.settings.yaml_file import read_mapping

    if kind == "models":
        read = {name: read_mapping(path) for name, path in registry.models().items()}
        return [
            {
                "name": name,
                "summary": content.get("description", ""),
                "builder": content["builder"],
                "kwargs": content.get("kwargs", {}),
            }
            for name, content in read.items()
        ]
    return [
        {"name": name, "summary": read_mapping(path).get("description", ""), "path": str(path)}
        for name, path in registry.suites().items()
    ]


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
