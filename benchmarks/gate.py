"""Measure how often the gate detects a regression and how often it raises a false alarm.

The script measures a baseline, then alternates an unchanged run with a run of modified strategies.
A modified strategy keeps an extra tensor of 5 % of the model's size. In every second round it
allocates the tensor at the start of the load, in the other rounds at the end (which does not raise
a peak that was reached earlier). Each run is a separate command, as in CI. The script prints the
number of detected regressions, the number of false alarms, and the spread of each metric. Runs that
the --out folder contains are not measured again, so that a later call with more --rounds adds to
these runs.
"""

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weighin.checkpoint import cache
from weighin.gate import baseline, check
from weighin.records.metrics import METRICS
from weighin.records.series import STRATEGY
from weighin.settings.definition import DEFAULT_STRATEGIES
from weighin.show.table import Table
from weighin.suite import registry

SHARE: Final = 0.05
PLACES: Final = ("start", "end")
_PLANTED: Final = """

_planted_load = load


def load(job):
    kept = torch.ones({size_bytes} if {at_start} else 0, dtype=torch.uint8)
    model = _planted_load(job)
    # In the model's __dict__, which contains neither parameters nor buffers.
    model.__dict__["kept"] = kept if {at_start} else torch.ones({size_bytes}, dtype=torch.uint8)
    return model
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small")
    parser.add_argument("--isolation", default="cgroup")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--baselines", type=int, default=3)
    parser.add_argument("--strategies", default=",".join(DEFAULT_STRATEGIES))
    parser.add_argument("--planted", default=",".join(DEFAULT_STRATEGIES))
    parser.add_argument("--out", type=Path, default=Path("results/gate"))
    options = parser.parse_args()
    out, unchanged = options.out, options.strategies.split(",")
    command = ("bench", options.model, "--isolation", options.isolation)
    for number in range(options.baselines):
        _measure(out / f"baseline-{number}", command, unchanged)
    for number in range(options.rounds):
        _measure(out / f"unchanged-{number}", command, unchanged)
        planted = _plant(out, options.model, options.planted.split(","), PLACES[number % 2])
        _measure(out / f"planted-{number}", command, planted)
    _judge(out, options.rounds, options.baselines, unchanged)


def _measure(folder: Path, command: Sequence[str], strategies: Sequence[str]) -> None:
    if (folder / "report.md").exists():
        return
    again = ("bench", "--resume", str(folder), "--trust")
    new = (*command, "--strategies", ",".join(strategies), "--out", str(folder))
    arguments = again if (folder / "plan.json").exists() else new
    subprocess.run((sys.executable, "-m", "weighin", *arguments), check=True, capture_output=True)
    print(f"measured {folder}", flush=True)


def _plant(out: Path, model: str, strategies: Sequence[str], place: str) -> list[str]:
    """Write a copy of each strategy, of the same name, that keeps an extra tensor; return the files."""
    size_bytes = round(SHARE * cache.ensure(registry.model(model), "pt").manifest().model_bytes())
    folder = out / "planted" / place
    folder.mkdir(parents=True, exist_ok=True)
    for name in strategies:
        text = registry.strategy(name).path.read_text()
        text += _PLANTED.format(at_start=place == "start", size_bytes=size_bytes)
        (folder / f"{name}.py").write_text(text)
    return [str(folder / f"{name}.py") for name in strategies]


def _judge(out: Path, rounds: int, baselines: int, strategies: Sequence[str]) -> None:
    path = out / "baseline.json"
    path.unlink(missing_ok=True)
    measured = check.read_runs([out / f"baseline-{number}" for number in range(baselines)])
    wanted = {
        name: one for name, one in measured.series.items() if name.split()[STRATEGY] in strategies
    }
    baseline.write(path, measured.environment, wanted)
    alarms, runs_caught, cells, caught = 0, 0, 0, Counter[str]()
    for number in range(rounds):
        failed = check.check(check.read_runs([out / f"unchanged-{number}"]), path).failed
        alarms += bool(failed)
        for line in failed:
            print(f"  false alarm in unchanged-{number}: {line.series}: {line.what} {line.now} > {line.allowed}")  # fmt: skip
        planted = check.read_runs([out / f"planted-{number}"])
        failed = check.check(planted, path).failed
        detected = {line.series for line in failed} & planted.series.keys()
        caught.update(line.what for line in failed if line.series in detected)
        caught["any metric"] += len(detected)
        cells += len(planted.series)
        runs_caught += len(detected) == len(planted.series)
        for name in planted.series.keys() - detected:
            print(f"  not detected in planted-{number} ({PLACES[number % 2]}): {name}")
    print(f"unchanged: {rounds - alarms} of {rounds} runs pass the gate, {alarms} raise a false alarm")  # fmt: skip
    print(f"planted ({SHARE:.0%} of the model): all strategies of the run are detected in {runs_caught} of {rounds}")  # fmt: skip
    print(f"planted cells detected, of {cells}: {dict(caught.most_common())}\n")
    print(_spreads([out / f"unchanged-{number}" for number in range(rounds)]).markdown())


def _spreads(folders: Sequence[Path]) -> Table:
    """Return the strategy with the widest spread of each metric over the unchanged runs."""
    series = check.read_runs(folders).series
    rows = []
    for metric in METRICS.values():
        figures = {
            name: one.figures[metric.name]
            for name, one in series.items()
            if metric.name in one.figures
        }
        if figures:
            name = max(figures, key=lambda name: figures[name].high - figures[name].low)
            widest = metric.text(figures[name].high - figures[name].low)
            of = metric.text(figures[name].median)
            rows.append([metric.title, widest, of, name.split()[STRATEGY]])
    heads = ("metric", f"widest spread over {len(folders)} runs", "of", "strategy")
    return Table.of(heads, rows)


if __name__ == "__main__":
    main()
