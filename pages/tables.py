"""Write published results into the project's pages: ``python -m pages.tables PAGE...``.

The command also draws the pictures of the pages from the published records. ``make publish`` draws
the timelines, because a timeline needs samples, which are not published.

The text between the two comments of a block is generated from records. A block names a run, and a key
of ``_PARTS``: ``survival`` is the table of survival; without a key, the block is the table of all
results. The block of a run in runs.yaml that has no records yet names the command that measures it.
A block with the key ``agreement`` names several searches, whose RAM floors it compares. A block with
the key ``checked`` names several runs, whose predictions it compares with their measurements.
``suite_keys`` fills the blocks with the keys of suites::

    <!-- results/published/gpt2-xl-8GiB -->
    ...
    <!-- end -->
    <!-- results/published/gpt2-xl-survival survival -->
    ...
    <!-- end -->
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pages import suite_keys
from pages.checked import markdown_checked
from pages.notebook import markdown_notebook
from pages.run_tables import (
    markdown_agreement,
    markdown_converting,
    markdown_models,
    markdown_relative,
    markdown_trained,
)
from weighin.records import run_folder
from weighin.records.run import Measured
from weighin.result import Result
from weighin.settings.yaml_file import read_mapping
from weighin.show import findings, report, style, words
from weighin.show.plots import pictures
from weighin.show.table import Table
from weighin.text import markdown as escaped

_BLOCK: Final = re.compile(
    r"<!-- (?P<runs>results/published/\S+(?: results/published/\S+)*)(?: (?P<part>[a-z]+))? -->\n"
    r".*?<!-- end -->",
    re.DOTALL,
)
_PICTURE: Final = re.compile(r"results/published/(?P<run>[\w.-]+)/(?P<name>[\w-]+)\.svg")


def _tables(read: Callable[[Measured], Iterable[Table]]) -> Callable[[Sequence[Result]], str]:
    """Return a function that writes tables without the reasons of single entries."""
    return lambda results: "\n\n".join(
        replace(table, reasons=()).markdown() for table in read(Measured(results))
    )


def markdown_table(results: Sequence[Result]) -> str:
    """Return the tables of a run as Markdown, with the caption below the tables."""
    run = Measured(results)
    parts = []
    for table in report.tables(run):
        heading = table.title.partition(": ")[2]
        parts += [f"**{escaped(heading)}**"] if heading else []
        parts.append(replace(table, notes=()).markdown())
    return "\n\n".join([*parts, escaped(words.shared(run))])


_PARTS: Final[dict[str | None, Callable[[Sequence[Result]], str]]] = {
    None: markdown_table,
    "relative": markdown_relative,
    "survival": _tables(findings.survival),
    "floors": _tables(findings.floors),
    "passes": _tables(findings.passes),
    "ranks": _tables(findings.ranks),
    "disks": _tables(findings.slow_disks),
    "models": markdown_models,
    "converting": markdown_converting,
    "uses": _tables(findings.uses),
    "trained": markdown_trained,
    "notebook": markdown_notebook,
}


def fill(page: str, root: Path) -> str:
    """Return the page with every block filled from the runs that the block names, below ``root``.

    Raises:
        RecordError: a block names a run that does not exist or is damaged.
    """

    def block(match: re.Match[str]) -> str:
        first = match[0].partition("\n")[0]
        if missing := [run for run in match["runs"].split() if _is_to_measure(run, root)]:
            names = " ".join(run.rpartition("/")[2] for run in missing)
            return f'{first}\nNot measured yet: `make publish ARGS="{names}"`.\n<!-- end -->'
        runs: dict[str, Sequence[Result]] = {
            run: run_folder.read(root / run).results for run in match["runs"].split()
        }
        return f"{first}\n{_content(match['part'], runs, root)}\n<!-- end -->"

    return suite_keys.fill(_BLOCK.sub(block, page))


def _is_to_measure(run: str, root: Path) -> bool:
    """Return whether runs.yaml names a run that has no record yet."""
    folder, _, name = run.rpartition("/")
    planned = root / folder / "runs.yaml"
    return not (root / run).exists() and planned.exists() and name in read_mapping(planned)


def draw(page: str, root: Path) -> dict[Path, bytes]:
    """Return each picture of a page as SVG, by its path; timelines are left out, as they need samples.

    Raises:
        RecordError: a run whose picture the page shows does not exist or is damaged.
    """
    drawn = {}
    for match in _PICTURE.finditer(page):
        path, name = root / match[0], match["name"]
        if name != "timeline":
            run = Measured.of(path.parent, run_folder.read(path.parent))
            drawn[path] = style.svg(pictures(run)[name]()).encode()
    return drawn


def _content(part: str | None, runs: dict[str, Sequence[Result]], root: Path) -> str:
    if part == "checked":
        return markdown_checked({root / run: results for run, results in runs.items()})
    if part == "agreement":
        return markdown_agreement({run.rpartition("/")[2]: one for run, one in runs.items()})
    (results,) = runs.values()
    return _PARTS[part](results)


def main() -> None:
    for name in sys.argv[1:]:
        page = Path(name)
        text = page.read_text()
        page.write_text(fill(text, Path.cwd()))
        for path, picture in draw(text, Path.cwd()).items():
            path.write_bytes(picture)


if __name__ == "__main__":
    main()
