"""The kernel's account of its OOM kills, from lines that kernels printed (fixtures/kernel/log-*.txt)."""

import os
import socket
from collections.abc import Collection
from pathlib import Path

import pytest

from weighin.probes import kernel_log
from weighin.result import Kill
from weighin.units import KIB

MOUNT = Path("/sys/fs/cgroup")
LOGS = Path(__file__).parent / "fixtures" / "kernel"
V1_6_18, V2_5_15, V1_5_2, MACHINE_6_8 = (
    (LOGS / f"log-{name}.txt").read_text()
    for name in ("v1-6.18", "v2-5.15", "v1-5.2", "machine-6.8")
)


@pytest.fixture(autouse=True)
def _mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "memory_hierarchy", lambda: (2, MOUNT))


def found_in(
    text: str, group: str | None, main_pid: int, pids: Collection[int] = (), home: str | None = None
) -> list[Kill]:
    """Return the kills in a log; a read gives one message, as of /dev/kmsg."""
    kernel, log = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log.setblocking(False)
    with kernel:
        kernel.send(b"12,1,1,-;Out of memory: Killed process 1 (a program wrote this)")
        for line in text.splitlines():
            kernel.send(f"6,1,1,-;{line}\n SUBSYSTEM=memory\n".encode())
        places = [MOUNT / each[1:] if each else None for each in (group, home)]
        found = kernel_log.kills_since(log.detach(), places[0], main_pid, pids, places[1])
    assert found is not None
    return list(found)


def kill(
    pid: int, name: str, sizes: tuple[int, int, int], limit_of: str = "", *, is_main: bool = False
) -> Kill:
    anon, file, shmem = (size * KIB for size in sizes)
    place = "around" if limit_of.startswith("/") else ""
    return Kill(pid, name, is_main, limit_of, anon, file, shmem, limit_is=place)


PYTHON = (14734, "python3", (65152, 6644, 0))
STRESS = (1284158, "stress-ng-vm", (1045532, 1372, 36))
UVICORN = (2621226, "uvicorn", (595900, 392, 0))
LATER = {text: text.splitlines()[1] for text in (V2_5_15, MACHINE_6_8)}
"""After ten kills in a short time, the kernel names no cause."""

KILLS: dict[str, tuple[str, str | None, int, list[Kill]]] = {
    "v1": (V1_6_18, "/weighin-test-13917", 1, [kill(*PYTHON)]),
    "limit around": (V1_6_18, "/weighin-test-13917/cell", 1, [kill(*PYTHON, "/weighin-test-13917")]),
    "begins so": (V1_6_18, "/weighin-test", 1, []),
    "no group": (V1_6_18, None, 1, []),
    "v2": (V2_5_15, "/user.slice/hello-cg", 1, [kill(*STRESS)]),
    "before 5.3": (V1_5_2, "/foo", 1, [kill(7997, "bash", (8, 4, 0))]),
    "machine": (MACHINE_6_8, "/system.slice/app.service", 1, [kill(*UVICORN, "machine")]),
    "no cause": (LATER[V2_5_15], "/hello-cg", STRESS[0], [kill(*STRESS, "unknown", is_main=True)]),
    "no cause, machine": (LATER[MACHINE_6_8], "/hello-cg", UVICORN[0], [kill(*UVICORN, "machine", is_main=True)]),
    "no cause, another's": (LATER[V2_5_15], "/hello-cg", 1, []),
    "no cause, machine, another's": (LATER[MACHINE_6_8], "/hello-cg", 1, []),
}  # fmt: skip


@pytest.mark.parametrize("name", KILLS)
def test_the_kills_of_a_group(name: str) -> None:
    text, group, main_pid, expected = KILLS[name]
    assert found_in(text, group, main_pid) == expected


def test_a_process_without_a_group_is_found_by_its_pid() -> None:
    assert found_in(MACHINE_6_8, None, 1, {UVICORN[0]}) == [kill(*UVICORN, "machine")]


@pytest.mark.parametrize(
    ("limited", "victim", "home", "limit_is"),
    [
        ("/a", "/a/own", None, "around"),
        ("/a/own", "/a/own/in", None, ""),  # the own limit
        ("/a/own/in", "/a/own/in", None, "below"),
        ("/b", "/b", None, "elsewhere"),  # of a process that has left
        ("/b", "/b/x", "/a/own", "elsewhere"),
        ("/a/owner", "/a/owner", "/a/own", "elsewhere"),
        ("/a/own", "/a/own", "/a/own", "around"),
        ("/", "/a/own", "/a/own", "around"),
        ("/a/own/in", "/a/own/in", "/a/own", "below"),
    ],
)
def test_whose_limit_was_met(limited: str, victim: str, home: str | None, limit_is: str) -> None:
    text = V2_5_15.replace("oom_memcg=/user.slice/hello-cg", f"oom_memcg={limited}")
    text = text.replace("task_memcg=/user.slice/hello-cg", f"task_memcg={victim}")
    group = None if home else "/a/own"  # with a home alone, the command started in it
    (found,) = found_in(text, group, 1284158, (), home)
    assert found.limit_is == limit_is


@pytest.mark.parametrize("kind", ["", "pid", "cgroup", "unreadable"])
def test_in_a_namespace_the_log_has_other_pids_or_paths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    if kind != "unreadable":
        log.touch()
    numbers = {each: Path("/proc/self/ns", each).stat().st_ino for each in ("pid", "cgroup")}
    monkeypatch.setattr(kernel_log, "_LOG", log)
    monkeypatch.setattr(kernel_log, "_FIRST", numbers | ({kind: 1} if kind in numbers else {}))
    opened = kernel_log.position()
    assert (opened is None) == bool(kind)
    if opened is not None:
        os.close(opened)
    assert kernel_log.kills_since(None, None, 1) is None
