"""Measure the figures that a change of weighin's own code must not change.

    .venv/bin/python benchmarks/kept.py FOLDER [--isolation process,cgroup,docker] [--repeats 10]
    .venv/bin/weighin compare benchmarks/kept/8cdd5a93/cgroup-loads FOLDER/cgroup-loads

Loads gpt2-small with six strategies, and runs the C programs whose memory is known, by the command ``weighin``
that belongs to this Python, so it also measures other versions. Keeps only the records, in FOLDER/ISOLATION-loads
and FOLDER/ISOLATION-commands. Peaks are exact, so that 0.2 % is a difference. Times are comparable on one machine
only: measure both versions in turn, with nothing beside them.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands

WEIGHIN: Final = str(Path(sys.executable).with_name("weighin"))
RECORDS: Final = "records.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--isolation", default="process,cgroup,docker")
    parser.add_argument("--repeats", default="10")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weighin-kept-", dir="/var/tmp") as name:  # not a tmpfs
        folder = Path(name)
        (programs := folder / "programs").mkdir()
        known_commands.build(programs)
        read = folder / "file"
        read.write_bytes(bytes(known_commands.FILE_BYTES))
        for isolation in asked.isolation.split(","):
            loads, commands = (asked.out / f"{isolation}-{what}" for what in ("loads", "commands"))
            loads.mkdir(parents=True)
            commands.mkdir()
            common = ("--isolation", isolation, "--repeats", asked.repeats)
            run = folder / f"{isolation}-loads"
            _weighin("bench", "gpt2-small", *common, "--out", str(run))
            shutil.copy(run / RECORDS, loads)
            for number, known in enumerate(known_commands.KNOWN):
                if isolation == "docker" and known.shmem_bytes > 64 * 1024**2:
                    continue  # a container's /dev/shm has 64 MiB
                run = folder / f"{isolation}-{number}"
                cold = ("--cold", str(read)) if known.file_bytes else ()
                named = ("--name", known.id, "--out", str(run), "--set", f"mounts={folder}", *cold)
                command = known.command(programs, read)
                _weighin("run", *common, *named, "--no-stacks", "--", *command)
                with (commands / RECORDS).open("a") as file:
                    file.write((run / RECORDS).read_text())


def _weighin(*arguments: str) -> None:
    print("weighin", *arguments, flush=True)
    done = subprocess.run((WEIGHIN, *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}weighin ended with {done.returncode}")


if __name__ == "__main__":
    main()
