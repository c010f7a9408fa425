"""Compare the ready times that ``weighin recommend --disk`` predicts with those of a run on slow disks.

    .venv/bin/weighin bench --suite slow-disk --out results/slow-disk
    .venv/bin/python benchmarks/disk_model.py results/slow-disk

Prints the median ready time of each strategy on each disk, the predicted one and its error, and how often
the strategy that the model puts first is the fastest, or at most 10 % slower.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.recommend.candidates import USUAL, behind, predicted_ready_s
from weighin.records import run_folder
from weighin.result import Outcome
from weighin.slow_disk import Pace
from weighin.suite import registry

_AS_FAST = 1.1

Load = tuple[str, str]
"""A strategy and a format."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    measured: dict[Pace, dict[Load, list[float]]] = defaultdict(lambda: defaultdict(list))
    cells: dict[Load, Cell] = {}
    for run in parser.parse_args().runs:
        for result in run_folder.read(run).results:
            cell = result.cell
            if result.outcome is Outcome.OK and result.ready_ns:
                pace, load = Pace(cell.disk_bytes_per_s, cell.disk_latency_ns), _load(cell)
                measured[pace][load].append(result.ready_ns / 1e9)
                cells[load] = replace(cell, disk_bytes_per_s=None, disk_latency_ns=None)
    _print(measured, _predictions(cells))


def _load(cell: Cell) -> Load:
    return cell.strategy, cell.format


def _predictions(cells: Mapping[Load, Cell]) -> dict[Load, Prediction]:
    planned = [plan_cell(cell, registry.strategy(cell.strategy)) for cell in cells.values()]
    return dict(zip(cells, predict(planned), strict=True))


def _print(
    measured: Mapping[Pace, Mapping[Load, list[float]]], predictions: Mapping[Load, Prediction]
) -> None:
    errors, right = [], 0
    print(f"{'disk':<16}{'strategy':<22}{'measured s':>11}{'model s':>9}{'error':>8}")
    for pace, loads in sorted(measured.items(), key=lambda item: str(item[0])):
        slow = behind(USUAL, pace)
        actual = {load: statistics.median(seconds) for load, seconds in loads.items()}
        model = {load: predicted_ready_s(predictions[load], slow) for load in loads}
        for load, seconds in sorted(actual.items(), key=lambda item: item[1]):
            error = model[load] / seconds - 1
            errors.append(abs(error))
            print(f"{pace!s:<16}{load[0]:<22}{seconds:>11.2f}{model[load]:>9.2f}{error:>+8.0%}")
        right += actual[min(model, key=model.__getitem__)] <= _AS_FAST * min(actual.values())
    middle, worst = statistics.median(errors), max(errors)
    print(f"\n{len(errors)} cells: the median error is {middle:.0%}, the largest {worst:.0%}.")
    print(
        f"On {right} of {len(measured)} disks, the model's first strategy is as fast as the fastest."
    )


if __name__ == "__main__":
    main()
