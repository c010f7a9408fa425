"""Write published results into the project's pages: ``python -m pages.tables PAGE...``.

The command also draws the pictures of the pages from the published records. ``make publish`` draws
the timelines, because a timeline needs samples, which are not published.

The text between the two comments of a block is generated. A block names a run, and a key
of ``_PARTS``: ``survival`` is the table of survival; without a key, the block is the table of all
results, and ``short`` is this table with the columns that decide. After the key, ``of NAME,NAME`` names the
strategies that the table has, then without options of theirs. ``releases`` is for a run of several releases of a
package, whose picture is releases.svg. The block of a run in runs.yaml that has no
records yet names the command that measures it. A block ``checked`` names several runs, whose predictions it
compares with their measurements. A block can also have the keys of suite files, which come from the pydantic model that reads suite files::

    <!-- results/published/gpt2-xl-8GiB -->
    ...
    <!-- end -->
    <!-- results/published/gpt2-xl-survival survival of baseline,streaming -->
    ...
    <!-- end -->
    <!-- keys of a suite -->
    ...
    <!-- end -->
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pages import run_tables
from pages.notebook import markdown_notebook
from pages.releases import draw_releases, markdown_releases
from weighin.records import run_folder
from weighin.records.series import Measured
from weighin.result import Result
from weighin.settings.definition import (
    COMMANDS,
    KEYS,
    MODELS,
    Option,
    Settings,
    SuiteCommand,
    SuiteModel,
)
from weighin.settings.yaml_file import read_mapping
from weighin.show import findings, report, style, words
from weighin.show.plots import pictures
from weighin.show.table import Table
from weighin.text import markdown as escaped

_BLOCK: Final = re.compile(
    r"<!-- (?P<runs>results/published/\S+(?: results/published/\S+)*)(?: (?P<part>[a-z]+)(?: of (?P<of>\S+))?)? -->\n"
    r".*?<!-- end -->",
    re.DOTALL,
)
_KEYS: Final = re.compile(r"(<!-- keys of a ([\w ]+) -->\n).*?<!-- end -->", re.DOTALL)
_PICTURE: Final = re.compile(r"results/published/(?P<run>[\w.-]+)/(?P<name>[\w-]+)\.svg")
_KINDS: Final[dict[str, tuple[type[BaseModel], Iterable[str]]]] = {
    "suite": (Settings, KEYS[MODELS]),
    "model": (SuiteModel, [key for key in SuiteModel.model_fields if key not in KEYS[MODELS]]),
    "suite of commands": (Settings, [key for key in KEYS[COMMANDS] if key not in KEYS[MODELS]]),
    "command": (SuiteCommand, SuiteCommand.model_fields),
}
_DEFAULTS: Final = {("suite of commands", "commands"): "required"}
"""The defaults that depend on other keys."""
_SECOND: Final = frozenset({
    "import", "import transformers", "above import", "cgroup peak", "one step below", "at 1.1x ready", "sum of peak RSS",
    "unreclaimable (sampled)", "exit code", "shared (sampled)", "above the model", "written",
})  # fmt: skip
"""The columns that decide nothing, which only a run's own report has."""


def _decisive(table: Table) -> Table:
    """Return a table without ranges, and without the columns, notes and reasons that decide nothing."""
    places = [
        at
        for at, column in enumerate(table.columns)
        if column.title not in _SECOND
        and not (column.title == "outcome" and {row[at].text for row in table.entries} == {"ok"})
    ]
    rows = [[replace(row[at], spread="") for at in places] for row in table.entries]
    columns = [table.columns[at] for at in places]
    return replace(table, columns=columns, rows=rows, notes=(), reasons=())


def _most_ranks(run: Measured) -> Iterable[Table]:
    """Return the table of ranks with the rows of the most ranks, which alone have the growth."""
    return [
        replace(table, rows=[row for row in table.entries if row[-1].text])
        for table in findings.ranks(run)
    ]


def _tables(read: Callable[[Measured], Iterable[Table]]) -> Callable[[Sequence[Result]], str]:
    """Return a function that writes a run's tables with the columns that decide, and a caption."""

    def markdown(results: Sequence[Result]) -> str:
        run = Measured(results)
        tables = [_decisive(table).markdown() for table in read(run)]
        return "\n\n".join([*tables, run_tables.caption(run)])

    return markdown


def markdown_table(results: Sequence[Result]) -> str:
    """Return the tables of a run as Markdown, with all columns and the whole caption."""
    run = Measured(results)
    parts = []
    for table in report.tables(run):
        heading = table.title.partition(": ")[2]
        parts += [f"**{escaped(heading)}**"] if heading else []
        parts.append(replace(table, notes=()).markdown())
    return "\n\n".join([*parts, escaped(words.shared(run))])


_PARTS: Final[Mapping[str | None, Callable[[Sequence[Result]], str]]] = {
    None: markdown_table,
    "short": _tables(report.tables),
    "survival": _tables(findings.survival),
    "floors": _tables(findings.floors),
    "ranks": _tables(_most_ranks),
    "disks": _tables(findings.slow_disks),
    "models": run_tables.markdown_models,
    "converting": run_tables.markdown_converting,
    "uses": _tables(findings.uses),
    "notebook": markdown_notebook,
}


def fill(page: str, root: Path) -> str:
    """Return the page with every block filled from the runs that the block names, below ``root``.

    Raises:
        RecordError: a block names a run that does not exist or is damaged.
    """
    planned = root / "results/published/runs.yaml"
    commands = read_mapping(planned) if planned.exists() else {}

    def block(match: re.Match[str]) -> str:
        runs, part = [root / name for name in match["runs"].split()], match["part"]
        missing = [run.name for run in runs if run.name in commands and not run.exists()]
        if missing:
            text = f'Not measured yet: `make publish ARGS="{" ".join(missing)}"`.'
        else:
            found = {run: run_folder.read(run).results for run in runs}
            if part == "checked":
                text = run_tables.markdown_checked(found)
            elif part == "releases":
                text = markdown_releases(found[runs[0]], f"../{match['runs']}/releases.svg")
            else:
                (results,) = found.values()
                shown = match["of"].split(",") if match["of"] else []
                text = _PARTS[part](
                    [
                        one
                        for one in results
                        if not shown or (one.cell.strategy in shown and not one.cell.options)
                    ]
                )
        return f"{match[0].partition(chr(10))[0]}\n{text}\n<!-- end -->"

    page = _BLOCK.sub(block, page)
    return _KEYS.sub(lambda match: f"{match[1]}{keys_of(match[2])}\n<!-- end -->", page)


def keys_of(name: str) -> str:
    """Return the keys of a mapping: a table with their defaults and meanings, and a line of those in the help.

    The keys of a model are those that a suite does not have itself.
    """
    kind, keys = _KINDS[name]
    verb = "bench" if name == "suite" else "run"
    lines, told = ["| key (default) | meaning |", "|---|---|"], []
    fields = {field.alias or name: field for name, field in kind.model_fields.items()}
    for key in keys:
        field = fields[key]
        if names := _options(key, field, verb):
            told.append(
                f"`{key}`" if f"--{key.replace('_', '-')}" in names else f"`{key}` (`{names[0]}`)"
            )
            continue
        meaning = (field.description or "").replace("|", "\\|")
        default = _DEFAULTS[name, key] if (name, key) in _DEFAULTS else _default(field)
        lines.append(f"| `{key}`{default and f' ({default})'} | {meaning} |")
    if told:
        lines += ["", f"`weighin {verb} --help` explains these: {', '.join(told)}."]
    return "\n".join(lines)


def _options(key: str, field: FieldInfo, verb: str) -> Sequence[str]:
    """Return the names of a key's option, as in ``--use``; empty if the verb has none."""
    for one in field.metadata:
        if isinstance(one, Option) and verb in one.verbs.split():
            names = one.names or (f"--{key.replace('_', '-')}",)
            return [name.partition("/")[0] for name in names]
    return ()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"`{_yaml(field.default)}`" if field.default not in ("", [], {}, (), [{}], None) else ""


def _yaml(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(_yaml, value))
    return value if isinstance(value, str) else json.dumps(value).replace("null", "none")


def draw(page: str, root: Path) -> dict[Path, bytes]:
    """Return each picture of a page as SVG, by its path; timelines are left out, as they need samples.

    Raises:
        RecordError: a run whose picture the page shows does not exist or is damaged.
    """
    drawn = {}
    for match in _PICTURE.finditer(page):
        path, name = root / match[0], match["name"]
        if name == "releases":
            found = run_folder.read(path.parent).results
            drawn[path] = style.svg(draw_releases(found)).encode()
        elif name != "timeline":
            run = Measured.of(path.parent, run_folder.read(path.parent))
            drawn[path] = style.svg(pictures(run)[name]()).encode()
    return drawn


def main() -> None:
    for page in map(Path, sys.argv[1:]):
        text = fill(page.read_text(), Path.cwd())
        page.write_text(text)
        for path, picture in draw(text, Path.cwd()).items():
            path.write_bytes(picture)


if __name__ == "__main__":
    main()
