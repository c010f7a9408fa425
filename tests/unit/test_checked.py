"""Predictions beside published runs, as a table of a page."""

import json
from pathlib import Path
from typing import Any

import pytest
from sweeps import a_search

from pages.tables import fill
from weighin.errors import RecordError
from weighin.records import run_folder
from weighin.units import MIB

BLOCK = "<!-- results/published/x checked -->\n<!-- end -->"


def predicted(strategy: str, floor_mib: int, anon_mib: tuple[int, int], cannot: str = "") -> Any:
    sizes = {"predicted": anon_mib[0] * MIB, "measured": anon_mib[1] * MIB}
    figures = {
        "host_anon_least_bytes": sizes,
        "host_file_peak_bytes": {"predicted": 0, "measured": 9**12},
    }
    return {
        "strategy": strategy, "format": "pt", "cannot": cannot, "floor_bytes": floor_mib * MIB,
        "figures": figures,
    }  # fmt: skip


def test_a_block_says_how_far_predictions_and_measurements_are_apart(tmp_path: Path) -> None:
    run = tmp_path / "results" / "published" / "x"
    for result in a_search():
        run_folder.append(run, result)
    told = {
        "schema": 1,
        "predicted_at": "2026-11-24T01:02:03+00:00",
        "environment": {"git_commit": "ab" * 20, "git_dirty": False},
        "checked": [
            predicted("streaming", 4310, (100, 104)),
            predicted("mmap_assign", 230, (107, 100)),
            predicted("broken", 1, (900, 1), "ValueError: odd"),
        ],
    }
    (run / "predicted.json").write_text(json.dumps(told))
    assert fill(BLOCK, tmp_path).splitlines()[1:6] == [
        "| run | code | series | largest difference of anonymous MiB | strategy"
        " | largest difference of floors MiB | strategy |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| x | measured on an unknown day with weighin commit unknown | 2 | 7 | mmap_assign | 26 | mmap_assign |",
        "",
        "Predicted 2026-11-24 with weighin commit ababababab.",
    ]


def test_a_run_without_predictions_says_how_to_make_them(tmp_path: Path) -> None:
    run = tmp_path / "results" / "published" / "x"
    run_folder.append(run, a_search()[0])
    with pytest.raises(RecordError) as caught:
        fill(BLOCK, tmp_path)
    assert (
        f"create the file: .venv/bin/python benchmarks/predicted_runs.py {run} --json {run}/predicted.json"
        in str(caught.value)
    )
