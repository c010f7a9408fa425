"""Write a run's report as markdown."""

from collections.abc import Sequence
from typing import TextIO

from weighin.record import Result
from weighin.report import captions, sections
from weighin.report.markdown import plain
from weighin.report.rows import series
from weighin.text import markdown as escaped


def write_markdown(
    results: Sequence[Result],
    file: TextIO,
    *,
    warnings: Sequence[str] = (),
    images: Sequence[str] = (),
) -> None:
    """Write the report of a run as markdown, with links to ``images`` at the end."""
    rows = series(results)
    title = escaped(plain(captions.title(rows)))
    print(f"# {title}\n\n{escaped(captions.shared(rows, results))}", file=file)
    for section in sections.of(results, warnings):
        print(f"\n## {escaped(section.heading)}\n\n{section.markdown()}", file=file)
    for image in images:
        print(f"\n![{image.rpartition('.')[0]}]({image})", file=file)
