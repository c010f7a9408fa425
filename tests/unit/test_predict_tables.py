"""What ``weighin predict --check`` prints, whole, in the 80 columns of a terminal."""

from __future__ import annotations

import io

from factories import make_cell
from rich.console import Console

from harness.predict.checking import Checked
from harness.predict.prediction import Prediction
from harness.predict.tables import check_table
from harness.units import MIB


def test_predicted_and_measured_peaks_stand_side_by_side() -> None:
    mapped = make_cell("mmap_assign", format="pt")
    by_tensor = make_cell("per_param", format="per_param", options={"threads": 2})
    checked = [
        Checked(
            Prediction(mapped),
            (
                ("host_anon_peak_bytes", 200 * MIB, 202 * MIB),
                ("host_file_peak_bytes", 6500 * MIB, 6500 * MIB + MIB // 2),
            ),
        ),
        Checked(Prediction(by_tensor), (("host_anon_peak_bytes", 1024 * MIB, 1000 * MIB),)),
        Checked(Prediction(make_cell("odd", format="pt"), cannot="it looks at values"), ()),
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(check_table(checked))
    assert "\n".join(line.rstrip() for line in out.getvalue().splitlines()) == WANTED


WANTED = """\
gpt2-xl · float32 · device cpu

                                     predicted   measured   difference
 cell                 peak                 MiB        MiB          MiB        %
 ──────────────────────────────────────────────────────────────────────────────
 mmap_assign pt       anonymous          200.0      202.0         -2.0   -0.99%
                      mapped files     6,500.0    6,500.5         -0.5   -0.01%
 per_param            anonymous        1,024.0    1,000.0        +24.0   +2.40%
 threads=2
 odd pt: it looks
 at values
"""
