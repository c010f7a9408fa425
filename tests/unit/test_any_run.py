"""Whatever a record may hold, every format of a report can be written."""

import io
from pathlib import Path

import pytest
from factories import make_result, write_samples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from test_html import Page
from test_run_folder import results as any_result

from weighin.records import run_folder
from weighin.report import exports
from weighin.report.html_page import render
from weighin.report.rows import series
from weighin.report.sections import terminal_table
from weighin.report.sentences import paragraphs
from weighin.report.tables import write_summary
from weighin.report.writing import write_markdown
from weighin.result import Result


@given(st.lists(any_result, max_size=4))
@settings(max_examples=10, suppress_health_check=list(HealthCheck))
def test_any_results_can_be_told(tmp_path: Path, results: list[Result]) -> None:
    Page(render(tmp_path, results))
    assert paragraphs(series(results), results)
    Console(width=80, file=io.StringIO()).print(terminal_table(results))
    write_markdown(results, io.StringIO())
    write_summary(results, io.StringIO(newline=""))
    for export in (exports.bencher, exports.github_action_benchmark, exports.openmetrics):
        assert export(results)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-5", "1e400", "9" * 40, "x"])
def test_samples_that_no_sampler_wrote(tmp_path: Path, value: str) -> None:
    result = make_result()
    path = write_samples(tmp_path, result)
    head, first, *rest = path.read_text().splitlines()
    fields = first.split(",")
    for place in range(len(fields)):
        edited = ",".join(value if n == place else field for n, field in enumerate(fields))
        path.write_text("\n".join([head, edited, *rest]) + "\n")
        text = render(tmp_path, [result])
        assert "NaN" not in text
        assert "nan" not in text
        assert "inf" not in text.partition("<svg")[2].replace("data-tip", "")


def test_a_samples_path_that_leads_out_of_the_run_is_not_followed(tmp_path: Path) -> None:
    other = make_result()
    write_samples(tmp_path / "other", other)
    result = make_result(samples_path=f"../other/{other.samples_path}")
    run_folder.append(tmp_path / "run", result)
    assert "no samples" in render(tmp_path / "run", [result])
