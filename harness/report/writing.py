"""Writes every part of a run's report into its folder."""

from collections.abc import Sequence
from io import BytesIO, StringIO
from pathlib import Path
from typing import Final

from harness import journal
from harness.errors import RecordError
from harness.record import Result
from harness.report import floors, html, look, plots, tables, timeline

REPORT: Final = "report.md"
PAGE: Final = "report.html"
SUMMARY: Final = "summary.csv"
PEAKS: Final = "peaks.png"
TIMELINE: Final = "timeline.png"


def write_all(run: Path) -> list[Path]:
    """Write report.md, report.html, summary.csv, peaks.png and timeline.png; see ``write_report``."""
    records = journal.read(run)
    report, summary = StringIO(), StringIO(newline="")
    tables.write_markdown(
        records.results,
        report,
        warnings=records.warnings,
        parts=_parts(records.results),
        images=(PEAKS, TIMELINE),
    )
    tables.write_summary(records.results, summary)
    peaks, times = BytesIO(), BytesIO()
    look.save(plots.draw_peaks(records.results), peaks)
    look.save(timeline.draw_timeline(run, records.results), times)
    parts = {
        REPORT: report.getvalue().encode(),
        PAGE: html.render(run, records.results, records.warnings).encode(),
        SUMMARY: summary.getvalue().encode(),
        PEAKS: peaks.getvalue(),
        TIMELINE: times.getvalue(),
    }
    return [_write(run / name, content) for name, content in parts.items()]


def _parts(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return what a report says before its long table, where its cells tell it."""
    return [("RAM floors", floors.markdown_floors(results))] if floors.are_there(results) else []


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}",
            "free some space, or copy the run to a folder that you may write",
        ) from error
    return path
