"""Measure what weighin itself costs and how true its figures are: ``make self-bench``.

Three tables, written to --out:

- the wall time that weighin adds to a load, and the processor time of its own process, in each isolation;
- the share of a processor that the samplers take at 1, 5 and 20 ms, and the gaps between their samples,
  on the machine as it is and while every processor computes;
- the memory of C programs whose need is known (``tests/known_commands.py``), according to weighin,
  ru_maxrss, psutil at 100 ms, and optimum-benchmark's tracker.

Run nothing else during the quarter of an hour that the measurement takes. A C compiler is needed. The page
lists each isolation that could not be measured, such as cgroup without root. Install optimum-benchmark
without its dependencies into a folder of its own::

    .venv/bin/pip install --no-deps --target /tmp/optimum optimum-benchmark
    make self-bench ARGS="--optimum /tmp/optimum"
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands
from own_figures import amounts, cells, sampling

from weighin.errors import HarnessError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each load and of each program")
    parser.add_argument("--seconds", type=float, default=5, help="of each sampler at each interval")
    parser.add_argument("--optimum", default="", help="the folder that has optimum-benchmark")
    parser.add_argument("--out", type=Path, help="the page; without it, the page is printed")
    asked = parser.parse_args()
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="weighin-self-", dir="/var/tmp") as name:  # not a tmpfs
        folder = Path(name)
        (programs := folder / "programs").mkdir()
        known_commands.build(programs)
        try:
            costs = cells.measure(folder, asked.repeats)
            sampled = sampling.measure(programs, asked.seconds)
            known = amounts.measure(programs, folder, asked.repeats, asked.optimum)
        except HarnessError as error:
            sys.exit(f"error: {error}")
    from own_figures import page  # imports pandas, which weighin's own process does without

    text = page.text(costs, sampled, known, seconds=asked.seconds, load_average=load_average)
    if asked.out:
        asked.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
