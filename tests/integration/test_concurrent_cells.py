"""``jobs``: real cells that run at once on this machine, and leave nothing behind."""

import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import leftovers
import pytest
from commands import CommandLine, Started

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]

PAUSING = '''"""Wait while this file is marked as a program, then load rightly."""

import time
from pathlib import Path

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def load(job):
    with job.phase("pause"):
        while Path(__file__).stat().st_mode & 0o100:
            time.sleep(0.01)
    return load_rightly(job)
'''


def test_cells_of_several_ranks_can_run_at_once(command: CommandLine) -> None:
    done = command.run(
        *(
            "bench",
            "gpt2-tiny",
            "--ranks",
            "2",
            "--ram",
            "1200m",
            "--isolation",
            "cgroup",
            "--set",
            "jobs=2",
        ),
        *("--strategies", "streaming,baseline", "--out", "run"),
        patience_s=300,
    )
    assert done.code == 0, done.err
    measured = records(command)
    assert [(each["outcome"], len(each["ranks"])) for each in measured] == [("ok", 2)] * 2
    for path in (rank["samples_path"] for each in measured for rank in each["ranks"]):
        assert (command.folder / "run" / path).exists()


@pytest.fixture
def hold(command: CommandLine) -> Path:
    """A strategy that waits in the midst of its load until it is let go."""
    path = command.folder / "pausing.py"
    path.write_text(PAUSING)
    path.chmod(0o755)
    return path


def records(command: CommandLine) -> list[dict[str, Any]]:
    return command.records("run")


def start_two(command: CommandLine) -> Started:
    """Start four cells, two at once, and return when two workers wait."""
    started = command.start(
        *("bench", "gpt2-tiny", "--ram", "1g,900m", "--isolation", "cgroup", "--set", "jobs=2"),
        *("--strategies", "streaming,pausing.py", "--out", "run"),
    )
    leftovers.wait_until(
        lambda: (
            started.process.poll() is not None
            or (len(records(command)) == 2 and len(workers(command)) == 2)
        ),
        "no two cells ran at once",
        patience_s=120,
    )
    assert started.process.poll() is None, started.process.communicate()
    return started


def workers(command: CommandLine) -> list[str]:
    return [each for each in leftovers.processes(str(command.cache)) if "weighin.worker" in each]


def test_two_cells_run_at_once_and_their_records_say_so(command: CommandLine, hold: Path) -> None:
    started = start_two(command)
    hold.chmod(0o644)
    ended = started.end()
    assert (ended.code, ended.left) == (0, []), ended.err
    found = records(command)
    assert [record["outcome"] for record in found] == ["ok"] * 4
    first, second = found[2:]  # both had begun when the first of them ended
    begun = datetime.fromisoformat(second["started_at"])
    took = timedelta(microseconds=first["cost"]["wall_ns"] / 1000)
    assert begun < datetime.fromisoformat(first["started_at"]) + took
    for record in found:
        assert record["environment"]["concurrent_cells"] == 2
        assert record["warnings"] == ["up to 2 cells ran at once (jobs): times are not comparable"]
        assert record["cached_bytes_at_start"] == 0
        assert (command.folder / "run" / record["samples_path"]).stat().st_size > 100
    assert not [*command.cache.glob("jobs*")]


def test_ctrl_c_ends_all_cells_and_the_run_can_go_on(command: CommandLine, hold: Path) -> None:
    stopped = start_two(command).end(signal.SIGINT)
    assert (stopped.code, stopped.left) == (130, []), stopped.err
    assert stopped.err.splitlines()[-2:] == [
        "error: stopped; nothing is left running; 2 of 4 cells measured",
        "resume it: weighin bench --resume run",
    ]
    assert not [*command.cache.glob("jobs*")]
    hold.chmod(0o644)
    ended = command.run("bench", "--resume", "run")
    assert (ended.code, ended.left) == (0, []), ended.err
    cells = [(r["cell"]["strategy"], r["cell"]["ram_limit_bytes"]) for r in records(command)]
    assert len(set(cells)) == len(cells) == 4
