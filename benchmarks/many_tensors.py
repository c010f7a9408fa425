"""Measure the processor time of a load per tensor: many small tensors, side by side and nested.

    python benchmarks/many_tensors.py FOLDER

writes four checkpoints of 312 MiB and 288 MiB to FOLDER if they are missing. Each row is a process
of its own: the load into a model that was built before the clock, and the construction with the
load. The files are in the page cache. All figures are medians of --rounds.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weighin.models.stack import stack
from weighin.stream.model import load_streaming


def _nested(layers: int, experts: int, width: int) -> nn.Module:
    """Return the modules of a mixture of experts, each expert of three matrices."""

    def expert() -> nn.Module:
        parts = {name: nn.Linear(width, width, bias=False) for name in ("gate", "up", "down")}
        return nn.ModuleDict(parts)

    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList(expert() for _ in range(experts))})

    return nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(layers))})


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "flat": lambda: stack(layers=20_000, width=64),
    "nested": lambda: _nested(48, 128, 64),
    "few": lambda: stack(layers=20, width=2024),
}
LOADERS: Final = ("streaming", "torch")
FORMATS: Final = ("safetensors", "pt")


def _file(folder: Path, model: str, suffix: str) -> Path:
    return folder / f"{model}.{suffix}"


def _write(folder: Path, model: str) -> None:
    torch.manual_seed(0)
    state = MODELS[model]().state_dict()
    torch.save(state, _file(folder, model, "pt"))
    save_file(state, _file(folder, model, "safetensors"))


def _state(path: Path) -> Any:
    return load_file(path) if path.suffix == ".safetensors" else torch.load(path)


def _measured(loader: str, build: Callable[[], nn.Module], path: Path, *, built: bool) -> str:
    model: Any = build() if built else build
    path.read_bytes()
    used, started = time.process_time_ns(), time.monotonic_ns()
    if loader == "streaming":
        model = load_streaming(model, path)
    else:
        model = model if built else model()
        model.load_state_dict(_state(path))
    wall, cpu = time.monotonic_ns() - started, time.process_time_ns() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return json.dumps({"cpu_ns": cpu, "wall_ns": wall, "peak_bytes": peak})


def _rounds(arguments: list[str], rounds: int) -> dict[str, float]:
    command = [sys.executable, __file__, *arguments]
    lines = [
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout for _ in range(rounds)
    ]
    records = [json.loads(line) for line in lines]
    return {key: statistics.median(record[key] for record in records) for key in records[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["flat", "nested"])
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=LOADERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    folder = chosen.folder
    if chosen.one:
        model, suffix, loader, built = chosen.one
        path = _file(folder, model, suffix)
        print(_measured(loader, MODELS[model], path, built=built == "built"))
        return
    folder.mkdir(exist_ok=True)
    print(f"{os.cpu_count()} processors, torch {torch.__version__}")
    for model in chosen.models:
        if not _file(folder, model, "safetensors").exists():
            _write(folder, model)
        count = sum(1 for _ in MODELS[model]().parameters())
        for built in ("built", "builds"):
            for suffix in FORMATS:
                for loader in chosen.loaders:
                    given = [str(folder), "--one", model, suffix, loader, built]
                    found = _rounds(given, chosen.rounds)
                    print(
                        f"{model:7} {count:6,} {suffix:11} {built:6} {loader:9}"
                        f" {found['cpu_ns'] / 1000 / count:7.1f} us CPU a tensor,"
                        f" {found['cpu_ns'] / 1e9:6.2f} s CPU, {found['wall_ns'] / 1e9:6.2f} s,"
                        f" peak RSS {found['peak_bytes'] / 2**20:,.0f} MiB",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
