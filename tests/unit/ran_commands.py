"""Records of commands for tests: what ``weighin run`` writes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from factories import ENVIRONMENT, START_NS, write_samples

from weighin.cell import Cell
from weighin.result import (
    SCHEMA,
    Cost,
    Kill,
    Mark,
    OpenFile,
    Outcome,
    Peaks,
    Process,
    Ran,
    Result,
    Sample,
    Stack,
)
from weighin.settings.definition import Settings, SuiteCommand
from weighin.units import MIB

SECOND_NS = 10**9
PID = 100  # of the command of a record that is made
COMMAND = ("python", "train.py", "--epochs", "1")
PYTHON = Process(
    pid=4711, parent_pid=4000, command="python train.py --epochs 1", start_ns=START_NS,
    end_ns=START_NS + 3 * SECOND_NS, highest_rss_bytes=640 * MIB, anon_bytes=500 * MIB,
    file_bytes=20 * MIB, shmem_bytes=0,
    files=(
        OpenFile("/data/model-00003.safetensors", 5016 * MIB, position_bytes=2150 * MIB),
        OpenFile("/data/vocab.bin", 64 * MIB, mapped_bytes=32 * MIB),
    ),
)  # fmt: skip
WORKER = replace(
    PYTHON, pid=4712, parent_pid=4711, command="worker | 1", anon_bytes=57 * MIB,
    shmem_bytes=100 * MIB, files=(),
)  # fmt: skip
EARLIER = replace(
    PYTHON, pid=4713, parent_pid=4711, command="git rev-parse HEAD", anon_bytes=None,
    file_bytes=None, shmem_bytes=None, files=(),
)  # fmt: skip
STACK = Stack(
    START_NS + 2 * SECOND_NS, 4711, "MainThread", 640 * MIB,
    ("load_state_dict (torch/serialization.py:1500)", "main (train.py:14)"),
)  # fmt: skip


def settings_of(
    *cells: Cell, cold: Sequence[str] = (), marks: Sequence[str] = (), **changes: Any
) -> Settings:
    """The settings of a run of these commands."""
    known = {cell.strategy: cell for cell in cells}.items()
    commands = [
        SuiteCommand.model_construct(
            name=name, command=[*cell.command], cold=[*cold], marks=[*marks], environment=cell.environment
        )
        for name, cell in known
    ]  # fmt: skip
    return Settings(commands=commands).model_copy(update=changes)


def make_command(label: str = "train.py", **changes: Any) -> Cell:
    return Cell.of_command(label, changes.pop("command", COMMAND), "cgroup", **changes)


def make_ran(cell: Cell | None = None, outcome: Outcome = Outcome.OK, **changes: Any) -> Result:
    """A command that needs 757 MiB, with 200 MiB of page cache at its peak."""
    cell = cell or make_command()
    changes.setdefault("ran", RAN)
    peaks = Peaks(
        cgroup_bytes=957 * MIB, anon_sampled_bytes=657 * MIB, file_sampled_bytes=200 * MIB,
        unreclaimable_sampled_bytes=757 * MIB, shmem_sampled_bytes=100 * MIB,
    )  # fmt: skip
    base = Result(
        SCHEMA, cell, outcome, peaks=peaks, load_ns=3 * SECOND_NS, ready_ns=3 * SECOND_NS, oom_kills=0,
        exit_code=0, cost=Cost(wall_ns=3 * SECOND_NS + 5, load_ns=3 * SECOND_NS),
        samples_path=f"samples/{cell.id}.csv", started_at="2025-01-02T03:04:05+00:00",
        environment=dict(ENVIRONMENT),
    )  # fmt: skip
    return replace(base, **changes)


RAN = Ran(
    pid=4711, peak_ns=START_NS + 2 * SECOND_NS, needed_bytes=757 * MIB,
    processes=(PYTHON, WORKER, EARLIER), marks=(Mark(START_NS + SECOND_NS, "epoch 1"),),
    stacks=(replace(STACK, usage_bytes=300 * MIB, frames=("read (io.py:1)",)), STACK),
)  # fmt: skip


def make_killed(cell: Cell | None = None) -> Result:
    """The same command under 600 MiB: the kernel kills its first process."""
    cell = cell or make_command(ram_limit_bytes=600 * MIB)
    kill = Kill(4711, "python", True, "", 480 * MIB, 20 * MIB, 0)
    ran = replace(RAN, signal=9, survived=False, kills=(kill,))
    message = "the kernel killed python (pid 4711) for lack of memory: the command reached its RAM limit of 600 MiB"
    return make_ran(cell, Outcome.OOM_KILLED, message=message, oom_kills=1, exit_code=137, ran=ran)


def write_command_samples(run: Path, result: Result) -> Path:
    """Write samples of a cgroup in which the page cache is far larger than the mapped files."""

    def sample(step: int) -> Sample:
        anon, shmem, mapped, cached = (n * step // 30 * MIB for n in (657, 100, 20, 200))
        return Sample(
            START_NS + step * SECOND_NS // 10, anon + shmem + mapped, anon, mapped, shmem, 0, 0, 0,
            anon + shmem + cached, cached + shmem, cgroup_shmem_bytes=shmem,
        )  # fmt: skip

    return write_samples(run, result, [sample(step) for step in range(31)])


def made(
    outcome: Outcome = Outcome.OK,
    *,
    limit: int | None = None,
    needed: int | None = None,
    peaks: Peaks = Peaks(),  # noqa: B008 (frozen)
    message: str = "",
    samples_path: str | None = None,
    **ran: Any,
) -> Result:
    """The result of a command; further arguments are fields of its ``Ran``."""
    cell = Cell.of_command("load.py", ("python", "load.py"), "cgroup", ram_limit_bytes=limit)
    found = Ran(pid=PID, needed_bytes=needed, **ran)
    return Result(SCHEMA, cell, outcome, message, peaks=peaks, samples_path=samples_path, ran=found)


def process(
    pid: int = PID,
    *,
    anon: int,
    shmem: int = 0,
    command: str = "/usr/bin/python load.py",
    parent: int = 1,
    **fields: Any,
) -> Process:
    sizes: dict[str, Any] = {"anon_bytes": anon, "file_bytes": 0, "shmem_bytes": shmem}
    return Process(pid, parent, command, 0, SECOND_NS, **sizes, **fields)


def stack(usage: int, *frames: str, pid: int = PID, t_ns: int = 0, code: str = "") -> Stack:
    """A stack of the main thread; the time follows the usage, unless it is given."""
    return Stack(t_ns or usage, pid, "MainThread", usage, frames, code)


def samples_of(anon: Sequence[int], *, shmem: int = 0, step_ns: int = 100_000_000) -> list[Sample]:
    """Samples at equal intervals, with this anonymous memory."""
    return [
        Sample(at * step_ns, size + shmem, size, 0, shmem, 0, 0, 0, size + shmem + MIB, shmem)
        for at, size in enumerate(anon, 1)
    ]
