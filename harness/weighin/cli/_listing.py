"""Collect the output of ``weighin list`` without slow imports: no torch, pydantic or rich."""

from collections.abc import Iterator
from typing import Any, Final

from weighin.cli import _wrap
from weighin.errors import HarnessError, UnknownName
from weighin.formats.pretrained_folder import BUILDER, dtype_of
from weighin.uses import USES

KINDS: Final = ("strategies", "models", "uses", "suites", "isolations")

_HEADINGS: Final = {
    "strategies": "strategies",
    "saving": "strategies for saves (--operation save)",
    "models": "models",
    "uses": "uses after a load (--use NAME)",
    "suites": "suites (--suite NAME)",
    "isolations": "isolations (--isolation NAME)",
}

_ISOLATIONS: Final = {
    "docker": "A Docker container for each cell. Enforces RAM limits.",
    "cgroup": "A memory cgroup for each cell, without a container. Enforces RAM limits.",
    "process": "A plain process for each cell. Measures, but enforces no limit.",
}


def document(kind: str) -> dict[str, Any]:
    """Return the entries of one kind, or of every kind for "all", as data for ``--json``.

    Raises:
        UnknownName: ``kind`` is neither "all" nor in ``KINDS``.
    """
    if kind != "all" and kind not in KINDS:
        raise UnknownName("list", kind, [*KINDS, "all"])
    found: dict[str, Any] = {}
    if kind in ("all", "strategies"):
        found["strategies"] = _strategies("load")
        found["saving"] = _strategies("save")
    if kind in ("all", "models"):
        found["models"] = _models()
    if kind in ("all", "uses"):
        found["uses"] = [{"name": name, "summary": summary} for name, summary in USES.items()]
    if kind in ("all", "suites"):
        found["suites"] = _suites()
    if kind in ("all", "isolations"):
        found["isolations"] = _isolations(tried=kind == "isolations")
    return found


def lines(listed: dict[str, Any], width: int) -> Iterator[str]:
    """Yield a document as text; no line breaks a word that fits into ``width`` columns."""
    blank = False
    for kind, heading in _HEADINGS.items():
        if kind in listed:
            if blank:
                yield ""
            yield heading
            for entry in listed[kind]:
                yield from _entry(kind, entry, max(len(one["name"]) for one in listed[kind]), width)
            blank = True


def _entry(kind: str, entry: dict[str, Any], longest: int, width: int) -> Iterator[str]:
    """Yield an entry: its name, its summary beside it, and its facts below the summary."""
    name = entry["name"].ljust(longest)
    yield from _wrap.definitions([(name, entry.get("summary", ""))], width)
    indent = " " * (longest + 4)
    for fact in _facts(kind, entry):
        yield from (indent + line for line in _wrap.wrap(fact, width - len(indent)))


def _facts(kind: str, entry: dict[str, Any]) -> Iterator[str]:
    if kind in ("strategies", "saving"):
        reads, loads = ("reads", "loads to") if kind == "strategies" else ("writes", "saves from")
        yield f"{reads} {', '.join(entry['formats'])}; {loads} {', '.join(entry['devices'])}"
        if entry["options"]:
            yield f"options {', '.join(entry['options'])}"
        if entry["packages"]:
            yield f"needs {', '.join(entry['packages'])}"
    elif kind == "models":
        if entry["builder"] == BUILDER:
            kwargs = entry["kwargs"]
            yield f"{kwargs['architecture']} of transformers, {dtype_of(kwargs['config']) or 'float32'}"
        else:
            arguments = ", ".join(f"{key}={value}" for key, value in entry["kwargs"].items())
            yield f"{entry['builder']} {arguments}"
    elif kind == "isolations" and entry["works"] is not None:
        yield "works here" if entry["works"] else f"does not work here: {entry['why']}"


def _strategies(operation: Any) -> list[dict[str, Any]]:
    from weighin.suite import registry

    return [
        {
            "name": name,
            "summary": info.summary,
            "formats": list(info.formats),
            "devices": list(info.devices),
            "options": list(info.options),
            "packages": list(info.packages),
            "path": str(info.path),
        }
        for name, info in registry.strategies(operation).items()
    ]


def _models() -> list[dict[str, Any]]:
    from weighin.suite import registry
    from weighin.suite.yaml_file import read_mapping

    found = []
    for name, path in registry.models().items():
        content = read_mapping(path)
        kwargs = content.get("kwargs", {})
        summary = content.get("description", "")
        found.append(
            {"name": name, "summary": summary, "builder": content["builder"], "kwargs": kwargs}
        )
    return found


def _suites() -> list[dict[str, Any]]:
    from weighin.suite import registry
    from weighin.suite.yaml_file import read_mapping

    return [
        {"name": name, "summary": read_mapping(path).get("description", ""), "path": str(path)}
        for name, path in registry.suites().items()
    ]


def _isolations(*, tried: bool) -> list[dict[str, Any]]:
    """Return the isolations. An entry's ``works`` is None unless the isolations are ``tried``."""
    found = []
    for name, summary in _ISOLATIONS.items():
        works, why = _try(name) if tried else (None, "")
        found.append({"name": name, "summary": summary, "works": works, "why": why})
    return found


def _try(name: str) -> tuple[bool, str]:
    from weighin.isolation import select

    try:
        select.named(name).check()
    except HarnessError as error:
        return False, f"{error.message}. {error.repair}"
    return True, ""
