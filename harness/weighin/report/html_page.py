"""Write the report of a run as one HTML file that needs no network, no other file, and no library.

The modules of ``weighin.report.html`` compute coordinates, and the templates write the drawings as
SVG. ``templates/script.js`` sorts and filters the table of results. The script also shows a text
for the point or bar under the mouse. A browser without scripts shows the same drawings and numbers.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from weighin import __version__
from weighin.report import captions, operations, sections, sentences
from weighin.report.html import bars, facts, scatter, table, timelines
from weighin.report.rows import has, series
from weighin.result import Result

_PACKAGE = "weighin.report.html"  # the package that contains the folder of templates

if TYPE_CHECKING:  # the import of jinja2 takes a tenth of a second
    from jinja2 import Environment
    from markupsafe import Markup


def render(run: Path, results: Sequence[Result], warnings: Sequence[str] = ()) -> str:
    """Return the report of a run as HTML; ``run`` is the run's folder, from which samples are read."""
    rows = series(results)
    ids = table.ids(rows)
    parts = [(section.heading, section.html()) for section in sections.of(results, warnings)]
    return (
        _templates()
        .get_template("report.html")
        .render(
            title=captions.title(rows) if rows else "A run without cells",
            paragraphs=sentences.paragraphs(rows, results),
            shared=captions.shared(rows, results),
            sections=[part for part in parts if part[0] != sections.FIGURES],
            explained=[part for part in parts if part[0] == sections.FIGURES],
            has_cuda=has(rows, "peak_cuda_allocated_bytes"),
            kind=operations.first_of(rows),
            bars=bars.build(rows, ids),
            scatters=scatter.build(rows),
            timelines=timelines.build(run, results, rows, ids),
            environment=facts.environment(results),
            when=facts.when(results),
            version=__version__,
            run_name=run.resolve().name,
            style=_part("style.css"),
            script=_part("script.js"),
            script_hash=_hash(_part("script.js")),
        )
    )


@cache
def _templates() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    # autoescape: names and error messages may contain HTML, which a browser must not run.
    return Environment(
        autoescape=True,
        loader=PackageLoader(_PACKAGE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _part(name: str) -> "Markup":
    """Return a file in weighin's ``templates``; as Markup, so that jinja2 does not escape its text."""
    from markupsafe import Markup

    text = (resources.files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704  # the file is part of weighin


def _hash(script: str) -> str:
    """Return the hash of a script, which the page's content security policy names as allowed."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
