"""A command from its start to its Result: how it ended, what it left, and what the kernel told of it."""

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cgroup_trees import Kernel
from ran_commands import settings_of

from weighin.cell import Cell
from weighin.errors import StillRunning
from weighin.isolation.process import CgroupIsolation, ProcessIsolation, Started
from weighin.probes import kernel_log, page_cache
from weighin.records.verdict import Reference
from weighin.result import Faults, Outcome, Peaks, Result
from weighin.run.commands import CommandSpec
from weighin.run.measure import Measured, measure
from weighin.units import MIB

Take = Callable[..., Measured]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: Patch) -> None:
    """Let no other process of the machine be killed for lack of memory."""
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", lambda: 0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The folder for temporary files, with nothing of other tests and programs: runs remove folders there."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Runs the lines of ``script`` in a shell, with other settings if they are given."""

    def run(
        script: str,
        isolation: Any = None,
        reference: Reference | None = None,
        ram: int | None = None,
        **changes: Any,
    ) -> Measured:
        isolation = isolation or ProcessIsolation()
        cell = Cell.of_command("mine", ("sh", "-c", script), isolation.name, ram_limit_bytes=ram)
        settings = settings_of(cell, cwd=str(tmp_path), timeout_s=0.0, **changes)
        return measure(isolation, CommandSpec(cell, settings), {"machine": "this"}, reference)

    return run


@pytest.mark.parametrize(
    ("told", "outcome", "message"),
    [
        ({"position": None}, "oom_killed", "killed by the kernel when the whole machine ran out of memory"),
        ({"kills_since": ()}, "command_failed", "killed by SIGKILL, not for lack of memory"),
    ],
    ids=["no log", "a log of other processes"],
)  # fmt: skip
def test_a_command_that_is_killed_as_the_machine_has_no_memory(
    told: dict[str, Any], outcome: str, message: str, take: Take, monkeypatch: Patch
) -> None:
    ((function, answer),) = told.items()
    monkeypatch.setattr(kernel_log, function, lambda *_, **__: answer)
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", count(3).__next__)
    result = take("kill -KILL $$").result
    assert result.outcome == outcome
    assert result.message.startswith(message)


def test_files_are_dropped_from_the_page_cache_before_the_start(
    take: Take, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    files = {tmp_path / "data" / "a", tmp_path / "data" / "inner" / "b", tmp_path / "one"}
    for file in files:
        file.touch()
    drop = Mock(side_effect=[0, 5 * MIB, None])
    monkeypatch.setattr(page_cache, "drop", drop)
    cold = (str(tmp_path / "one"), str(tmp_path / "data"))
    results = [take("true", cold=cold).result for _ in range(3)]
    assert [{*call.args[0]} for call in drop.call_args_list] == 3 * [files]
    assert [each.cached_bytes_at_start for each in results] == [0, 5 * MIB, None]
    assert [each.warnings[1:] for each in results] == [
        (),
        ("5.000 MiB of the --cold files could not be dropped from the page cache",),
        (
            "weighin cannot tell whether the --cold files left the page cache: Linux reports cached"
            " pages only to a user who owns the files or may write them",
        ),
    ]
    assert results[0].ran and results[0].ran.cold == cold


def test_a_new_size_of_the_terminal_reaches_a_command_in_a_container_once(
    monkeypatch: Patch,
) -> None:
    told: list[str] = []
    cell = Cell.of_command("mine", ("true",), "process")
    spec: Any = CommandSpec(cell, settings_of(cell))
    spec._running = Mock(shares_terminal=False, send_signal=lambda _: told.append("the command"))
    spec._output = Mock(resize=Mock(side_effect=[True, False]))
    spec._numbers, here = (), os.getpid()
    came = ((signal.SIGWINCH, here - 1), (signal.SIGWINCH, here), (signal.SIGUSR1, here))
    infos = iter(SimpleNamespace(si_signo=one, si_pid=pid, si_code=0x80) for one, pid in came)
    monkeypatch.setattr(signal, "sigwaitinfo", lambda _: next(infos))
    monkeypatch.setattr(os, "killpg", lambda *_: told.append("the group"))
    spec._listen()
    assert told == ["the group", "the command"]


@pytest.mark.parametrize(("lines", "kept"), [(3, 3), (1000, 1000), (1001, 1000)])
def test_the_newest_marks_of_the_output_are_kept(take: Take, lines: int, kept: int) -> None:
    result = take(f"echo other; seq -f 'step %g' {lines}", marks=("^step",)).result
    assert result.ran
    assert len(result.ran.marks) == kept
    assert result.ran.marks[-1].text == f"step {lines}"


def test_a_command_that_cannot_be_removed_has_its_result_and_its_trouble(
    take: Take, monkeypatch: Patch
) -> None:
    close, trouble = Started.close, StillRunning("it does not end")

    def closing(running: Started) -> None:
        close(running)
        raise trouble

    monkeypatch.setattr(Started, "close", closing)
    measured = take("exit 0")
    assert measured.result.outcome is Outcome.OK
    assert measured.trouble is trouble


def test_of_the_shared_temporary_folder_only_what_killed_runs_left_is_removed(
    take: Take, temporary: Path
) -> None:
    for name in ("weighin-run-1", "another"):
        (temporary / name).mkdir()
    take("exit 0")
    assert [path.name for path in temporary.iterdir()] == ["another"]


@pytest.mark.parametrize(
    ("within", "limit_bytes", "hidden"),
    [
        (None, None, (False, False, False)),
        (None, 2**30, (False, False, False)),
        (0.01, None, (True, False, False)),  # a search reads nothing from standard input
        (0.01, 2**30, (True, True, True)),  # and shows only the output without a limit
    ],
    ids=["run", "run with a limit", "search", "search with a limit"],
)
def test_which_streams_a_search_keeps_from_its_commands(
    within: float | None, limit_bytes: int | None, hidden: tuple[bool, ...]
) -> None:
    cell = Cell.of_command("mine", ("true",), "process", ram_limit_bytes=limit_bytes)
    spec = CommandSpec(cell, settings_of(cell, within=within))
    with ExitStack() as opened:
        spec.enter(opened)
        streams = spec._output.streams
        given = (streams.stdin, streams.stdout, streams.stderr)
        assert tuple(each is not None for each in given) == hidden
        for each in filter(None, given):
            assert os.path.samestat(os.fstat(each), Path(os.devnull).stat())


def _writing(kernel: Kernel, *figures: tuple[str, str, object]) -> str:
    """Return a script that writes the kernel's figures of its own group: (name on v1, on v2, value).

    Files are not truncated, because they are read meanwhile.
    """
    is_v1 = kernel.memory != kernel.unified
    files = [(v1 if is_v1 else v2, value) for v1, v2, value in figures]
    lines = [f"printf '{value}' 1<> {file}" for file, value in files if file]
    return "\n".join([f"cd {kernel.memory}/weighin.*", *lines, ""])


def figures(**changes: int) -> list[tuple[str, str, object]]:
    """What a command has that needs 6 MiB beside 1 MiB of page cache."""
    now = {"anon": 2, "shmem": 1, "file": 2, "refaults": 6, "peak": 7, "kernel": 1}
    now |= changes
    names = {"anon": "total_rss", "shmem": "total_shmem", "file": "total_cache"}
    counts = f"workingset_refault_file {now['refaults']}\\n"
    v1 = "".join(f"{of_v1} {now[name] * MIB}\\n" for name, of_v1 in names.items())
    v2 = "".join(f"{name} {now[name] * MIB}\\n" for name in (*names, "kernel"))
    return [
        ("memory.stat", "", f"{v1}{counts}total_pgfault 30\\ntotal_pgmajfault 4\\n"),
        ("", "memory.stat", f"{v2}{counts}pgfault 30\\npgmajfault 4\\n"),
        ("memory.max_usage_in_bytes", "memory.peak", now["peak"] * MIB),
        ("memory.usage_in_bytes", "memory.current", 6 * MIB),
    ]


Need = tuple[float, bool]


def need_of(result: Result) -> Need:
    """Return what the command needed, in MiB, and whether that was sampled."""
    assert result.ran and result.ran.needed_bytes is not None
    return result.ran.needed_bytes / MIB, result.ran.needed_is_sampled


def test_a_command_in_a_cgroup_has_the_kernels_figures(kernel: Kernel, take: Take) -> None:
    result = take(_writing(kernel, *figures()), CgroupIsolation()).result
    assert (result.outcome, result.message, result.warnings) == (Outcome.OK, "", ())
    is_v2 = kernel.memory == kernel.unified
    kernel_bytes = MIB if is_v2 else 0  # memory.stat of v1 has no line "kernel"
    assert result.peaks == Peaks(
        cgroup_bytes=7 * MIB,
        anon_sampled_bytes=2 * MIB,
        file_sampled_bytes=MIB,
        unreclaimable_sampled_bytes=3 * MIB + kernel_bytes,
        shmem_sampled_bytes=MIB,
    )
    # Of the peak, only page cache can be reclaimed.
    assert need_of(result) == (6, False)
    assert result.faults == Faults(26, 4, 6)
    assert (result.oom_kills, result.pressure) == (0, None)
    assert result.limit_events == ({"max": 0, "oom": 0, "oom_kill": 0} if is_v2 else None)
    assert kernel.groups() == []


@pytest.mark.parametrize(
    ("told", "v1", "v2"),
    [
        # Above that of the peak, it is sampled; on v2 with the kernel's.
        ({"peak": 1}, (3, True), (4, True)),
        # Much of it is kernel memory without a mark.
        ({"anon": 1, "kernel": 2}, (6, False), (6, True)),
        ({"file": 4, "peak": 9}, (6, True), (6, True)),  # 3 MiB of page cache, at any moment
    ],
    ids=["above the peak", "kernel memory", "page cache"],
)
def test_a_need_is_sampled_where_the_mark_does_not_tell_it(
    told: dict[str, int], v1: Need, v2: Need, kernel: Kernel, take: Take
) -> None:
    result = take(_writing(kernel, *figures(**told)), CgroupIsolation()).result
    assert need_of(result) == (v2 if kernel.memory == kernel.unified else v1)


def test_a_kill_in_the_group_decides_also_if_the_command_lives_on(
    kernel: Kernel, take: Take
) -> None:
    is_v1 = kernel.memory != kernel.unified
    kill = (
        ("memory.oom_control", "", "oom_kill_disable 0\\nunder_oom 0\\noom_kill 1\\n"),
        ("", "memory.events.local", "max 3\\noom 1\\noom_kill 1\\n"),
    )
    script = _writing(kernel, *figures(peak=64), *kill)
    result = take(script, CgroupIsolation(), ram=64 * MIB).result
    assert (result.outcome, result.message) == (
        Outcome.OOM_KILLED,
        "the kernel killed 1 process for lack of memory: the command reached its RAM limit of"
        " 64 MiB; the command's first process lived on",
    )
    assert result.oom_kills == 1
    assert result.limit_events == (None if is_v1 else {"max": 3, "oom": 1, "oom_kill": 1})


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
def test_a_command_that_thrashes_is_ended_and_its_time_does_not_count(
    kernel: Kernel, take: Take
) -> None:
    script = _writing(kernel, *figures(peak=64, refaults=1000))
    script += "echo $$ > cgroup.procs; exec sleep 60"  # this kernel does not know whom 0 stands for
    reference = Reference(spent_ns=10**15, size_bytes=MIB)
    result = take(script, CgroupIsolation(), reference, ram=64 * MIB).result
    assert result.outcome is Outcome.THRASHING
    assert result.stopped and result.stopped.reread_bytes == 1000 * os.sysconf("SC_PAGE_SIZE")
    assert result.stopped.timeout_s is None
    assert result.load_ns is result.ready_ns is None
    assert result.cost and result.cost.load_ns is None
