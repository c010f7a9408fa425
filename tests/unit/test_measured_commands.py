"""A command from its start to its Result: how it ended, what it left, and what the kernel told of it."""

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cgroup_trees import Kernel
from ran_commands import settings_of

from weighin.cell import Cell
from weighin.errors import ConfigError, StillRunning
from weighin.isolation.process import CgroupIsolation, ProcessIsolation, Started
from weighin.probes import kernel_log, page_cache
from weighin.records.verdict import Reference
from weighin.result import Faults, Outcome, Peaks, Result
from weighin.run.commands import CommandSpec
from weighin.run.measure import Measured, measure
from weighin.units import MIB


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other process of the machine be killed for lack of memory."""
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", lambda: 0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, with nothing of other tests."""
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


class Watched(ProcessIsolation):
    """Calls ``changed`` with each command that it starts."""

    def __init__(self, changed: Callable[[Any], None]) -> None:
        self._changed = changed

    def start(self, *arguments: Any) -> Started:
        running = super().start(*arguments)
        self._changed(running)
        return running


Take = Callable[..., tuple[Measured, bool]]


@pytest.fixture
def take(tmp_path: Path) -> Take:
    """Runs the lines of ``script`` in a shell, with other settings if they are given."""

    def run(
        script: str,
        isolation: Any = None,
        *,
        timeout_s: float = 0.0,
        reference: Reference | None = None,
        cell: dict[str, Any] | None = None,
        cold: Sequence[str] = (),
        marks: Sequence[str] = (),
        **settings: Any,
    ) -> tuple[Measured, bool]:
        isolation = isolation or ProcessIsolation()
        planned = Cell.of_command("mine", ("sh", "-c", script), isolation.name, **(cell or {}))
        changes = {"cwd": str(tmp_path), "cold": cold, "marks": marks} | settings
        spec = CommandSpec(planned, settings_of(planned, timeout_s=timeout_s, **changes))
        measured = measure(isolation, spec, {"machine": "this"}, reference)
        return measured, spec.asked_to_end

    return run


@pytest.fixture
def result_of(take: Take) -> Callable[..., Result]:
    return lambda *arguments, **options: take(*arguments, **options)[0].result


def test_a_command_that_is_killed_when_the_machine_has_no_memory(
    result_of: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "position", lambda: None)
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", count(3).__next__)
    result = result_of("kill -KILL $$")
    assert (result.outcome, result.message) == (
        Outcome.OOM_KILLED,
        "killed by the kernel when the whole machine ran out of memory",
    )


def test_files_are_dropped_from_the_page_cache_before_the_start(
    result_of: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "inner").mkdir(parents=True)
    files = [tmp_path / "one", tmp_path / "data" / "a", tmp_path / "data" / "inner" / "b"]
    for file in files:
        file.touch()
    dropped: list[Path] = []
    left = iter([0, 5 * MIB, None])

    def drop(paths: Sequence[Path]) -> int | None:
        dropped.extend(paths)
        return next(left)

    monkeypatch.setattr(page_cache, "drop", drop)
    cold = (str(tmp_path / "one"), str(tmp_path / "data"))
    results = [result_of("true", cold=cold) for _ in range(3)]
    assert sorted(dropped) == sorted(3 * files)
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


def test_a_path_to_drop_that_does_not_exist_is_an_error(
    take: Take, tmp_path: Path, temporary: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        take("touch started", cold=(str(tmp_path / "none"),))
    assert str(caught.value) == f"--cold {tmp_path}/none: there is no such file or folder"
    assert not (tmp_path / "started").exists()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("lines", "kept"), [(3, 3), (1000, 1000), (1001, 1000)])
def test_the_newest_marks_of_the_output_are_kept(
    result_of: Callable[..., Result], lines: int, kept: int
) -> None:
    result = result_of(f"echo other; seq -f 'step %g' {lines}", marks=("^step",))
    assert result.ran
    assert len(result.ran.marks) == kept
    assert result.ran.marks[-1].text == f"step {lines}"


def test_a_command_that_cannot_be_removed_has_its_result_and_its_trouble(take: Take) -> None:
    trouble = StillRunning("it does not end")

    def refuse_to_close(running: Any) -> None:
        close = running.close

        def closing() -> None:
            close()
            raise trouble

        running.close = closing

    measured, _ = take("exit 0", Watched(refuse_to_close))
    assert measured.result.outcome is Outcome.OK
    assert measured.trouble is trouble


def test_folders_of_killed_runs_are_removed(take: Take, temporary: Path) -> None:
    for name in ("weighin-run-1", "another"):
        (temporary / name).mkdir()
    take("exit 0")
    assert [path.name for path in temporary.iterdir()] == ["another"]


def _writing(kernel: Kernel, *figures: tuple[str, str, object]) -> str:
    """Return a script that writes the kernel's figures of its own group: (name on v1, on v2, value).

    Files are not truncated, because they are read meanwhile.
    """
    is_v1 = kernel.memory != kernel.unified
    lines = [
        f"printf '{value}' 1<> {v1 if is_v1 else v2}"
        for v1, v2, value in figures
        if (v1 if is_v1 else v2)
    ]
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


def test_a_command_in_a_cgroup_has_the_kernels_figures(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    result = result_of(_writing(kernel, *figures()), CgroupIsolation())
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
    assert result.ran and (result.ran.needed_bytes, result.ran.needed_is_sampled) == (
        6 * MIB,
        False,
    )
    assert result.faults == Faults(26, 4, 6)
    assert (result.oom_kills, result.pressure) == (0, None)
    assert result.limit_events == ({"max": 0, "oom": 0, "oom_kill": 0} if is_v2 else None)
    assert kernel.groups() == []


def test_the_sampled_need_counts_if_it_is_above_that_of_the_peak(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    result = result_of(_writing(kernel, *figures(peak=1)), CgroupIsolation())
    sampled = 4 if kernel.memory == kernel.unified else 3  # with the kernel's
    assert result.ran and (result.ran.needed_bytes, result.ran.needed_is_sampled) == (
        sampled * MIB,
        True,
    )


def test_a_need_is_sampled_where_much_of_it_is_kernel_memory_without_a_mark(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    result = result_of(_writing(kernel, *figures(anon=1, kernel=2)), CgroupIsolation())
    assert result.ran and result.ran.needed_bytes == 6 * MIB
    assert result.ran.needed_is_sampled is (kernel.memory == kernel.unified)


def test_a_kill_in_the_group_decides_also_if_the_command_lives_on(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    is_v1 = kernel.memory != kernel.unified
    kill = (
        ("memory.oom_control", "", "oom_kill_disable 0\\nunder_oom 0\\noom_kill 1\\n"),
        ("", "memory.events.local", "max 3\\noom 1\\noom_kill 1\\n"),
    )
    script = _writing(kernel, *figures(peak=64), *kill)
    result = result_of(script, CgroupIsolation(), cell={"ram_limit_bytes": 64 * MIB})
    assert (result.outcome, result.message) == (
        Outcome.OOM_KILLED,
        "the kernel killed 1 process for lack of memory: the command reached its RAM limit of"
        " 64 MiB; the command's first process lived on",
    )
    assert result.oom_kills == 1
    assert result.limit_events == (None if is_v1 else {"max": 3, "oom": 1, "oom_kill": 1})


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
def test_a_command_that_thrashes_is_ended_and_its_time_does_not_count(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    script = _writing(kernel, *figures(peak=64, refaults=1000))
    script += "echo $$ > cgroup.procs; exec sleep 60"  # this kernel does not know whom 0 stands for
    result = result_of(
        script,
        CgroupIsolation(),
        reference=Reference(spent_ns=10**15, size_bytes=MIB),
        cell={"ram_limit_bytes": 64 * MIB},
    )
    assert result.outcome is Outcome.THRASHING
    assert result.stopped and result.stopped.reread_bytes == 1000 * os.sysconf("SC_PAGE_SIZE")
    assert result.stopped.timeout_s is None
    assert result.load_ns is result.ready_ns is None
    assert result.cost and result.cost.load_ns is None


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
def test_without_a_limit_or_a_reference_nothing_is_ended(
    kernel: Kernel, result_of: Callable[..., Result]
) -> None:
    script = _writing(kernel, *figures(peak=64, refaults=1000)) + "exec sleep 0.8"
    reference = Reference(spent_ns=10**15, size_bytes=MIB)
    assert result_of(script, CgroupIsolation(), reference=reference).outcome is Outcome.OK
    limited = result_of(script, CgroupIsolation(), cell={"ram_limit_bytes": 64 * MIB})
    assert limited.outcome is Outcome.OK


def test_a_kill_of_another_program_is_not_this_commands(
    result_of: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the log names the machine's processes, and none of these."""
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", count(3).__next__)
    monkeypatch.setattr(kernel_log, "kills_since", lambda *_, **__: ())
    result = result_of("kill -KILL $$")
    assert result.outcome is Outcome.COMMAND_FAILED
    assert result.message.startswith("killed by SIGKILL, not for lack of memory")


@pytest.mark.parametrize("shares_terminal", [True, False])
def test_a_new_size_of_the_terminal_reaches_a_command_once(
    monkeypatch: pytest.MonkeyPatch, shares_terminal: bool
) -> None:
    told: list[str] = []
    cell = Cell.of_command("mine", ("true",), "process")
    spec: Any = CommandSpec(cell, settings_of(cell))
    sending = {"send_signal": lambda _: told.append("the command")}
    spec._running = SimpleNamespace(shares_terminal=shares_terminal, **sending)
    spec._output = SimpleNamespace(resize=iter([True, False]).__next__)
    spec._numbers = ()
    here = os.getpid()
    infos = iter(
        SimpleNamespace(si_signo=number, si_pid=pid, si_code=0)
        for number, pid in (
            (signal.SIGWINCH, here - 1), (signal.SIGWINCH, here), (signal.SIGUSR1, here)
        )
    )  # fmt: skip
    monkeypatch.setattr(signal, "sigwaitinfo", lambda _: next(infos))
    monkeypatch.setattr(os, "killpg", lambda *_: told.append("the group"))
    spec._listen()
    # A container is not in weighin's group.
    assert told == ["the group", *([] if shares_terminal else ["the command"])]
