"""``--json FILE`` of every verb: data on standard output or in a file, and the tables beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_cli_help import VERBS as ALL_VERBS
from typed_verbs import VERBS, prepare

from weighin.cli import app
from weighin.errors import ConfigError
from weighin.result import Outcome

KEYS = {
    "doctor": {"holds_a_limit", "capabilities"},
    "list": {"strategies", "saving", "models", "uses", "suites", "isolations"},
    "bench": {"run", "series", "warnings", "files"},
    "run": {"run", "series", "warnings", "files"},
    "floor": {"run", "floors", "files"},
    "report": {"run", "series", "warnings", "files"},
    "compare": {"runs", "common", "rows", "warnings"},
    "check": {"passed", "summary", "lines"},
    "history": {"metric", "unit", "runs", "series", "warnings"},
    "recommend": {"model", "recommended", "candidates", "code", "notes"},
    "predict": {"predictions"},
    "inspect": {"path", "files", "totals", "tensors", "expected"},
    "convert": {"source", "target", "format", "bytes", "seconds", "verified"},
    "cache list": {"folder", "checkpoints"},
    "cache clear": {"freed_bytes", "deleted"},
}


@pytest.fixture(autouse=True)
def _prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, monkeypatch)


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, arguments, catch_exceptions=False)


def data(verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(typed(*VERBS[verb], "--json", "-").stdout)
    return found


def test_every_verb_is_here() -> None:
    assert set(VERBS) == set(KEYS) == {" ".join(verb) for verb in ALL_VERBS}


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"run"}))  # whose command writes there, too
def test_standard_output_is_one_document_and_nothing_else(verb: str) -> None:
    result = typed(*VERBS[verb], "--json", "-")
    document = json.loads(result.stdout)
    assert document.keys() >= KEYS[verb]
    assert document["schema"] == 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_gets_the_same_document_and_standard_output_the_usual_text(verb: str) -> None:
    result = typed(*VERBS[verb], "--json", "data/out.json")
    assert json.loads(Path("data/out.json").read_text()).keys() >= KEYS[verb]
    assert result.stdout
    with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
        json.loads(result.stdout)


@pytest.mark.parametrize("verb", ["report", "inspect", "list"])
def test_a_file_that_cannot_be_written_is_an_error(verb: str) -> None:
    with pytest.raises(ConfigError, match=r"^cannot write /proc/out\.json: "):
        typed(*VERBS[verb], "--json", "/proc/out.json")


def test_a_run_has_the_rows_of_its_summary() -> None:
    series = {row["strategy"]: row for row in data("report")["series"]}
    killed, loaded = series["baseline"], series["streaming"]
    assert (killed["outcome"], killed["load_s"]) == (Outcome.OOM_KILLED, None)
    assert loaded["outcome"] == "ok"
    assert isinstance(loaded["peak_rss_bytes"], int)
    assert (loaded["ram_limit_bytes"], loaded["dtype"]) == (8 * 2**30, "float32")


def test_a_bench_names_its_run_and_the_files_of_its_report() -> None:
    document = data("bench")
    assert document["run"] == "new"
    assert [row["strategy"] for row in document["series"]] == ["streaming", "safetensors_copy"]
    assert "new/report.html" in document["files"]
    assert all(Path(file).exists() for file in document["files"])


def test_a_comparison_has_bytes_beside_its_texts() -> None:
    row = next(row for row in data("compare")["rows"] if row["metric"] == "peak_rss")
    assert len(row["texts"]) == 2
    (compared,) = row["compared"]
    assert compared == {
        "unit": "bytes",
        "before": compared["now"],
        "now": compared["now"],
        "changed_beyond_noise": False,
        "verdict": "same",
    }


def test_a_history_has_every_point() -> None:
    document = data("history")
    assert (document["metric"], document["unit"]) == ("peak_rss", "bytes")
    assert [run["run"] for run in document["runs"]] == ["a", "b"]
    line = next(one for one in document["series"] if "streaming" in one["series"])
    assert [point["run"] for point in line["points"]] == ["a", "b"]
    assert line["points"][0]["median"] == line["points"][1]["median"] > 0
    assert (line["steps"], line["outcome_changes"]) == ([], [])
