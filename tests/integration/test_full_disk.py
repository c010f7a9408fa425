"""A disk that fills up: no record on it is lost, and a message says how to go on."""

import re
import subprocess
from pathlib import Path

import pytest
from typed import CommandLine

pytestmark = pytest.mark.root

BENCH = "bench gpt2-tiny --isolation process --out 'small disk/run' -s"
NO_ROOM = "No space left on device"
REPAIR = "free disk space, or name a writable folder: weighin bench ... --out FOLDER"


def fill(path: Path) -> None:
    """Take all room of the disk that ``path`` is on."""
    subprocess.run(("sh", "-c", 'cat /dev/zero > "$0"', path), check=False, capture_output=True)


def outcomes(command: CommandLine) -> dict[str, str]:
    """Return the outcome of each strategy that has a record; every line must be whole."""
    found = command.records("small disk/run")
    return {one["cell"]["strategy"]: one["outcome"] for one in found}


def test_a_disk_that_fills_up_in_a_cell_loses_no_other_record_and_the_run_goes_on_afterwards(
    command: CommandLine, small: Path
) -> None:
    command.strategy("filling")
    (ask := command.folder / "fill").write_text(str(small / "filler"))
    ended = command.run(f"{BENCH} baseline,./filling.py,sequential")
    assert "Traceback" not in ended.err
    assert (ended.code, ended.left) == (2, [])
    error, repair = ended.err.splitlines()[-2:]
    assert error.startswith(
        f"error: cannot write small disk/run/records.jsonl: {NO_ROOM}; the measurement of filling-"
    )
    assert repair == f"{REPAIR}; then resume: weighin bench --resume 'small disk/run'"
    assert outcomes(command) == {"baseline": "ok"}
    assert (small / "run/records.jsonl").read_text().endswith("}\n")
    ask.unlink()
    (small / "filler").unlink()
    resumed = command.run("bench --resume 'small disk/run'")
    assert (resumed.code, resumed.left) == (0, []), resumed.err
    assert outcomes(command) == dict.fromkeys(("baseline", "filling", "sequential"), "ok")
    assert [path.name for path in (small / "run").glob(".*")] == []


def test_a_full_disk_is_told_before_a_cell_is_measured_in_vain(
    command: CommandLine, small: Path
) -> None:
    fill(small / "filler")
    ended = command.run(f"{BENCH} baseline")
    assert ended.err == f"error: cannot write small disk/run/plan.json: {NO_ROOM}\n{REPAIR}\n"
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert {path.name for path in small.rglob("*")} == {"filler", "run"}


def test_a_cache_without_room_for_a_checkpoint_is_told_before_anything_is_written(
    command: CommandLine, small: Path
) -> None:
    (full := small / "full").write_bytes(bytes(1_200_000))
    words = "bench gpt2-tiny --isolation process --out run"
    ended = command.run(words, WEIGHIN_CACHE=str(small))
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert re.sub(r"\d+\.\d+ ([MK]iB)", r"N \1", ended.err).splitlines()[-2:] == [
        f"error: the pt checkpoint of gpt2-tiny needs N MiB, but only N KiB are free in {small}",
        "put the cache on another disk (WEIGHIN_CACHE=/path weighin ...), or empty the cache"
        " (weighin cache clear)",
    ]
    assert not (command.folder / "run").exists()
    made = {path for path in small.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert {path.name for path in made - {full}} <= {"plans.sha256"}


def test_a_report_that_finds_no_room_is_an_error_and_a_repair(
    command: CommandLine, small: Path
) -> None:
    assert command.run(f"{BENCH} baseline").code == 0
    fill(small / "filler")
    ended = command.run("report 'small disk/run' --format bmf")
    assert (ended.code, ended.left) == (2, [])
    assert ended.err == (
        f"error: cannot write small disk/run/bmf.json: {NO_ROOM}\nfree some space, or copy the run"
        " to a writable folder\n"
    )
