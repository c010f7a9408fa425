"""A disk that fills up: no record on it is lost, and a message says how to go on."""

import json
from pathlib import Path

import pytest
from commands import NOT_LIMITED, CommandLine, Ended

FILLING = '''"""Load rightly, and fill the disk of the run where there is a file `fill` beside this one."""

from pathlib import Path

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def load(job):
    model = load_rightly(job)
    if (where := Path(__file__).with_name("fill")).exists():
        with open(where.read_text(), "wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(bytes(size)):
                        pass
                except OSError:
                    continue
    return model
'''

pytestmark = pytest.mark.root


def fill(path: Path) -> None:
    """Take all room of the disk that ``path`` is on."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue


def measured(run: Path) -> dict[str, str]:
    """Return the outcome of each strategy that has a record; every line must be whole."""
    lines = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    return {line["cell"]["strategy"]: line["outcome"] for line in lines}


def bench(command: CommandLine, out: str) -> Ended:
    strategies = "baseline,mine/filling.py,sequential"
    return command.run(
        *("bench", "gpt2-tiny", "--isolation", "process", "--out", out, "-s", strategies)
    )


def test_a_disk_that_fills_up_in_a_cell_loses_no_other_record_and_the_run_goes_on_afterwards(
    command: CommandLine, small: Path
) -> None:
    mine = command.folder / "mine"
    mine.mkdir()
    (mine / "filling.py").write_text(FILLING)
    (mine / "fill").write_text(str(small / "filler"))
    ended = bench(command, "small disk/run")
    assert "Traceback" not in ended.err
    assert (ended.code, ended.left) == (2, [])
    error, repair = ended.err.splitlines()[-2:]
    assert error.startswith(
        "error: cannot write small disk/run/records.jsonl: No space left on device; the measurement of"
        " filling-"
    )
    assert repair == (
        "free disk space, or name a writable folder: weighin bench ... --out FOLDER; then resume:"
        " weighin bench --resume 'small disk/run'"
    )
    assert measured(small / "run") == {"baseline": "ok"}
    (mine / "fill").unlink()
    (small / "filler").unlink()
    resumed = command.run("bench", "--resume", "small disk/run")
    assert (resumed.code, resumed.left) == (0, []), resumed.err
    assert measured(small / "run") == dict.fromkeys(("baseline", "filling", "sequential"), "ok")
    assert [path.name for path in (small / "run").glob(".*")] == []


def test_a_full_disk_is_told_before_a_cell_is_measured_in_vain(
    command: CommandLine, small: Path
) -> None:
    (command.folder / "mine").mkdir()
    (command.folder / "mine" / "filling.py").write_text(FILLING)
    fill(small / "filler")
    full = bench(command, "small disk/run")
    assert full == Ended(
        2,
        "",
        "error: cannot write small disk/run/plan.json: No space left on device\nfree disk space, or"
        " name a writable folder: weighin bench ... --out FOLDER\n",
        [],
    )
    assert {path.name for path in small.rglob("*")} == {"filler", "run"}


def test_a_report_that_finds_no_room_is_an_error_and_a_repair(
    command: CommandLine, small: Path
) -> None:
    assert command.run(
        *("bench", "gpt2-tiny", "--isolation", "process", "--out", "small disk/run"),
        *("-s", "baseline"),
    ).err.startswith(NOT_LIMITED)
    fill(small / "filler")
    ended = command.run("report", "small disk/run", "--format", "bmf")
    assert (ended.code, ended.left) == (2, [])
    assert ended.err == (
        "error: cannot write small disk/run/bmf.json: No space left on device\nfree some space, or"
        " copy the run to a writable folder\n"
    )
