"""Measure the figures that a change of weighin's own code must not change, and compare two measurements.

    .venv/bin/python benchmarks/kept.py measure FOLDER [--isolation process,cgroup,docker] [--repeats 10]
    .venv/bin/python benchmarks/kept.py compare benchmarks/kept/8cdd5a93 FOLDER

``measure`` loads gpt2-small with six strategies, and runs the C programs whose memory is known, by the
command ``weighin`` that belongs to this Python, so it also measures other versions. It keeps only the
records. ``compare`` prints, for each series, the median of every peak in both folders and their ratio:
peaks are exact, so that 0.2 % is a difference. Times are comparable on one machine only: measure both
versions in turn, with nothing beside them.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands

WEIGHIN: Final = str(Path(sys.executable).with_name("weighin"))
ISOLATIONS: Final = "process,cgroup,docker"
Series = dict[tuple[str, ...], dict[str, list[int]]]


def measure(out: Path, isolations: list[str], repeats: int) -> None:
    """Write ``out/ISOLATION-loads.jsonl`` and ``-commands.jsonl``: a record per line, as weighin wrote it."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weighin-kept-", dir="/var/tmp") as name:  # not a tmpfs
        folder = Path(name)
        (programs := folder / "programs").mkdir()
        known_commands.build(programs)
        read = folder / "file"
        read.write_bytes(bytes(known_commands.FILE_BYTES))
        for isolation in isolations:
            common = ("--isolation", isolation, "--repeats", str(repeats))
            loads, commands = folder / f"{isolation}-loads", out / f"{isolation}-commands.jsonl"
            _weighin("bench", "gpt2-small", *common, "--out", str(loads))
            shutil.copy(loads / "records.jsonl", out / f"{isolation}-loads.jsonl")
            commands.write_text("")
            for known in known_commands.KNOWN:
                if isolation == "docker" and known.shmem_bytes > 64 * 1024**2:
                    continue  # a container's /dev/shm has 64 MiB
                run = folder / f"{isolation}-{known.id.replace(' ', '-').replace('/', '-')}"
                cold = ("--cold", str(read)) if known.file_bytes else ()
                command = known.command(programs, read)
                named = ("--name", known.id, "--out", str(run), "--set", f"mounts={folder}")
                _weighin("run", *common, *named, *cold, "--no-stacks", "--", *command)
                with commands.open("a") as file:
                    file.write((run / "records.jsonl").read_text())


def _weighin(*arguments: str) -> None:
    print("weighin", *arguments, flush=True)
    done = subprocess.run((WEIGHIN, *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}weighin ended with {done.returncode}")


def _figures(record: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the peaks of a record, of the whole and of each phase, and its times."""
    for phase in record["phases"]:
        yield f"{phase['name']} time_ns", phase["end_ns"] - phase["start_ns"]
        for key in ("peak_rss_bytes", "peak_cgroup_bytes"):
            if phase[key] is not None:
                yield f"{phase['name']} {key}", phase[key]
    for key, value in (record["peaks"] or {}).items():
        if value is not None:
            yield key, value
    for key in ("load_ns", "ready_ns"):
        if record[key] is not None:
            yield key, record[key]


def _read(folder: Path) -> Series:
    found: Series = {}
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            series = found.setdefault((file.stem, record["cell"]["strategy"]), {})
            for key, value in _figures(record):
                series.setdefault(key, []).append(value)
    return found


def compare(before: Path, after: Path) -> int:
    """Print both medians of every figure; return 1 if the median of a peak differs by more than 0.2 %."""
    old, new = _read(before), _read(after)
    worst = 0.0
    for series, figures in old.items():
        for key, values in figures.items():
            if others := new.get(series, {}).get(key):
                was, now = statistics.median(values), statistics.median(others)
                ratio = now / was if was else 1.0
                if key.endswith("_bytes") and "sampled" not in key:
                    worst = max(worst, abs(ratio - 1))
                spread = f"{min(values)}..{max(values)}"
                row = f"{was:>14.0f} {now:>14.0f} {ratio:7.4f}  {spread}"
            else:
                row = "missing now"
            print(f"{' '.join(series):44} {key:36} {row}")
    print(f"largest difference of a peak: {100 * worst:.2f} %")
    return int(worst > 0.002)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure")
    measuring.add_argument("out", type=Path)
    measuring.add_argument("--isolation", default=ISOLATIONS)
    measuring.add_argument("--repeats", type=int, default=10)
    comparing = verbs.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.verb == "compare":
        return compare(asked.before, asked.after)
    measure(asked.out, asked.isolation.split(","), asked.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
