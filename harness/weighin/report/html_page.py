"""A run as one HTML file that needs nothing else: no network, no other file, no library.

Drawings are SVG and boxes that are laid out here; ``templates/script.js`` sorts, filters and shows
on hover or arrow keys what a mark means. Without scripts everything can still be read.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from weighin import __version__
from weighin.record import Result
from weighin.report import captions, sections, summary
from weighin.report.dataframe import series
from weighin.report.html import bars, facts, scatter, table, timelines

_PACKAGE = "weighin.report.html"  # where the templates are

if TYPE_CHECKING:  # a tenth of a second to import
    from jinja2 import Environment
    from markupsafe import Markup


def render(run: Path, results: Sequence[Result], warnings: Sequence[str] = ()) -> str:
    """Return the report of a run; ``run`` is where its samples are."""
    frame = series(results)
    ids = table.ids(frame)
    parts = [(one.heading, one.html()) for one in sections.of(results, warnings)]
    models = list(dict.fromkeys(frame["model"]))
    return (
        _templates()
        .get_template("report.html")
        .render(
            title=f"{captions.doing(frame).capitalize()} {', '.join(models)}"
            if models
            else "A run without cells",
            paragraphs=summary.paragraphs(frame, results),
            shared=captions.shared(frame, results),
            sections=[one for one in parts if one[0] != sections.FIGURES],
            explained=[one for one in parts if one[0] == sections.FIGURES],
            has_cuda=bool(frame["peak_cuda_allocated_bytes"].notna().any()),
            bars=bars.build(frame, ids),
            scatters=scatter.build(frame),
            timelines=timelines.build(run, results, frame, ids),
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

    # Names and messages are other people's: everything is escaped unless a template says otherwise.
    return Environment(
        autoescape=True,
        loader=PackageLoader(_PACKAGE),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _part(name: str) -> "Markup":
    """Return a part of the page that is our own text: it goes in as it is."""
    from markupsafe import Markup

    text = (resources.files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704  # our own file, no name from outside is in it


def _hash(script: str) -> str:
    """Return the name by which the page's own policy allows this one script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
