"""What ``weighin predict`` and ``benchmarks/predicted_runs.py`` print, in the 80 columns of a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from factories import make_cell
from predicted_runs import Checked, check_table, summarised, summary_line
from rich.console import Console, RenderableType

from weighin.predict.prediction import PredictedUse, Prediction
from weighin.predict.tables import tables
from weighin.units import GIB, MIB


def test_a_summary_counts_the_series_that_their_predicted_floor_would_kill() -> None:
    checked = [
        Checked(
            Prediction(make_cell("mmap_assign"), floor_bytes=floor * MIB),
            (("host_anon_peak_bytes", predicted * MIB, 100 * MIB), ("host_file_peak_bytes", 1, 2)),
            needed * MIB,
        )
        for floor, predicted, needed in ((120, 99, 100), (120, 103, 121), (120, 100, 120))
    ]
    unknown = Checked(Prediction(make_cell("odd"), cannot="it looks at values"), ())
    assert summary_line([*checked, unknown]) == (
        "3 series. Anonymous peak: median error 1.00%, largest 3.00%. A RAM limit of the predicted"
        " floor would have killed 1 (33.3%)."
    )
    assert (summarised([unknown]), summary_line([unknown])) == (None, "")


def test_each_strategy_has_a_line_and_what_explains_its_peak_stands_below() -> None:
    sizes: dict[str, Any] = {
        "model_bytes": 131 * GIB,
        "host_anon_peak_bytes": GIB,
        "host_file_peak_bytes": 80 * MIB,
        "floor_bytes": 2 * GIB,
        "cuda_requested_bytes": 131 * GIB,
        "cuda_allocated_bytes": 132 * GIB,
        "cuda_reserved_bytes": 133 * GIB,
        "disk_read_bytes": 65 * GIB,
    }
    found = [
        Prediction(
            make_cell(name, format="safetensors", device="cuda", **options),
            reasons=("keeps one copy of the weights on the GPU",),
            **sizes,
        )
        for name, options in (("safetensors_mmap", {}), ("streaming", {"options": {"threads": 2}}))
    ]
    found.append(Prediction(make_cell("odd", format="pt", device="cuda"), cannot="looks at values"))
    assert text(tables(found)) == PREDICTED


def test_the_memory_in_a_use_has_a_column() -> None:
    used = Prediction(
        make_cell("baseline", format="pt", use="adamw"),
        model_bytes=6 * GIB,
        host_anon_peak_bytes=13 * GIB,
        floor_bytes=26 * GIB,
        use=PredictedUse("adamw", 25 * GIB, 25 * GIB, 24 * GIB, host_anon_peak_bytes=25 * GIB),
    )
    assert text(tables([used])) == USED


def test_the_anonymous_memory_of_a_use_is_checked_beside_that_of_the_load() -> None:
    cell = make_cell("baseline", format="pt", use="adamw")
    checked = Checked(
        Prediction(cell, floor_bytes=7 * GIB),
        (
            ("host_anon_peak_bytes", 200 * MIB, 202 * MIB),
            ("use_anon_most_bytes", 105 * MIB, 100 * MIB),
        ),
    )
    assert checked.anonymous_error == 0.05
    shown = text([check_table([checked])])
    assert "use=adamw" in shown
    assert "use anon most" in shown


def text(parts: Iterable[RenderableType]) -> str:
    out = io.StringIO()
    for part in parts:
        Console(file=out, width=80).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


PREDICTED = """\

gpt2-xl (131.000 GiB) · device cuda · float32 · predicted peaks, GiB

                                           file   RAM      CUDA            disk
 strategy           format      anonymous pages floor requested reserved   read
 ──────────────────────────────────────────────────────────────────────────────
 safetensors_mmap   safetensors     1.000 0.078 2.000     131.0    133.0 65.000
 streaming          safetensors     1.000 0.078 2.000     131.0    133.0 65.000
 threads=2

Left out at 80 columns: allocated. A wider terminal shows them.
safetensors_mmap, streaming threads=2: keeps one copy of the weights on the GPU
odd (pt) is not predicted: looks at values
Predicted by running each strategy without tensor values. weighin bench
measures.
"""

USED = """\

gpt2-xl (6.000 GiB) · device cpu · float32 · predicted peaks, GiB

                                         in     RAM
 strategy  format  use    anonymous     use   floor
 ──────────────────────────────────────────────────
 baseline  pt      adamw     13.000  25.000  26.000

Predicted by running each strategy without tensor values. weighin bench
measures.
"""
