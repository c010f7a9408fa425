"""Writes every part of a run's report into its folder."""

from io import BytesIO, StringIO
from pathlib import Path
from typing import Final

from harness import journal
from harness.errors import RecordError
from harness.report import look, plots, tables, timeline

REPORT: Final = "report.md"
SUMMARY: Final = "summary.csv"
PEAKS: Final = "peaks.png"
TIMELINE: Final = "timeline.png"


def write_all(run: Path) -> list[Path]:
    """Write report.md, summary.csv, peaks.png and timeline.png; see ``write_report``."""
    records = journal.read(run)
    report, summary = StringIO(), StringIO(newline="")
    tables.write_markdown(
        records.results, report, warnings=records.warnings, images=(PEAKS, TIMELINE)
    )
    tables.write_summary(records.results, summary)
    peaks, times = BytesIO(), BytesIO()
    look.save(plots.draw_peaks(records.results), peaks)
    look.save(timeline.draw_timeline(run, records.results), times)
    parts = {
        REPORT: report.getvalue().encode(),
        SUMMARY: summary.getvalue().encode(),
        PEAKS: peaks.getvalue(),
        TIMELINE: times.getvalue(),
    }
    return [_write(run / name, content) for name, content in parts.items()]


def _write(path: Path, content: bytes) -> Path:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}",
            "free some space, or copy the run to a folder that you may write",
        ) from error
    return path
