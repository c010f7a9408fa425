"""The kernel's account of its OOM kills, from lines that kernels printed."""

import os
import socket
from collections.abc import Collection
from pathlib import Path

import pytest

from weighin.probes import kernel_log
from weighin.result import Kill
from weighin.units import KIB

V1_6_18 = """\
python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0
Tasks state (memory values in pages):
[  pid  ]   uid  tgid total_vm      rss rss_anon rss_file rss_shmem pgtables_bytes swapents oom_score_adj name
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/weighin-test-13917,task_memcg=/weighin-test-13917/cell,task=python3,pid=14734,uid=0
Memory cgroup out of memory: Killed process 14734 (python3) total-vm:221372kB, anon-rss:65152kB, file-rss:6644kB, shmem-rss:0kB, UID:0 pgtables:196kB oom_score_adj:0
"""
V2_5_15 = """\
oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/user.slice/hello-cg,task_memcg=/user.slice/hello-cg,task=stress-ng-vm,pid=1284158,uid=0
Memory cgroup out of memory: Killed process 1284158 (stress-ng-vm) total-vm:1131148kB, anon-rss:1045532kB, file-rss:1372kB, shmem-rss:36kB, UID:0 pgtables:2144kB oom_score_adj:1000
oom_reaper: reaped process 1284158 (stress-ng-vm), now anon-rss:0kB, file-rss:0kB, shmem-rss:36kB
"""
V1_5_2 = """\
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/foo,task_memcg=/foo,task=bash,pid=7997,uid=0
Memory cgroup out of memory: Killed process 7997 (bash) total-vm:12kB, anon-rss:8kB, file-rss:4kB, shmem-rss:0kB
"""
MACHINE_6_8 = """\
oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=user.slice,mems_allowed=0,global_oom,task_memcg=/system.slice/app.service,task=uvicorn,pid=2621226,uid=1000
Out of memory: Killed process 2621226 (uvicorn) total-vm:3392864kB, anon-rss:595900kB, file-rss:392kB, shmem-rss:0kB, UID:1001 pgtables:1888kB oom_score_adj:0
"""


MOUNT = Path("/sys/fs/cgroup")


@pytest.fixture(autouse=True)
def _mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "memory_hierarchy", lambda: (2, MOUNT))


def found_in(
    text: str,
    group: str | None,
    main_pid: int,
    pids: Collection[int] = (),
    home: str | None = None,
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


def kill(pid: int, name: str, sizes: tuple[int, int, int], limit_of: str = "") -> Kill:
    anon, file, shmem = (size * KIB for size in sizes)
    place = "around" if limit_of.startswith("/") else ""
    return Kill(pid, name, False, limit_of, anon, file, shmem, limit_is=place)


@pytest.mark.parametrize(
    ("text", "group", "expected"),
    [
        (V1_6_18, "/weighin-test-13917", [kill(14734, "python3", (65152, 6644, 0))]),
        (
            V1_6_18,
            "/weighin-test-13917/cell",
            [kill(14734, "python3", (65152, 6644, 0), "/weighin-test-13917")],
        ),
        (V1_6_18, "/weighin-test", []),
        (V1_6_18, None, []),
        (V2_5_15, "/user.slice/hello-cg", [kill(1284158, "stress-ng-vm", (1045532, 1372, 36))]),
        (V1_5_2, "/foo", [kill(7997, "bash", (8, 4, 0))]),
        (
            MACHINE_6_8,
            "/system.slice/app.service",
            [kill(2621226, "uvicorn", (595900, 392, 0), "machine")],
        ),
    ],
)
def test_the_kills_of_a_group(text: str, group: str | None, expected: list[Kill]) -> None:
    assert found_in(text, group, 1) == expected


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
def test_where_the_cgroup_is_whose_limit_was_met(
    limited: str, victim: str, home: str | None, limit_is: str
) -> None:
    text = V2_5_15.replace("oom_memcg=/user.slice/hello-cg", f"oom_memcg={limited}")
    text = text.replace("task_memcg=/user.slice/hello-cg", f"task_memcg={victim}")
    group = None if home else "/a/own"  # with a home alone, the command started in it
    (found,) = found_in(text, group, 1284158, (), home)
    assert found.limit_is == limit_is


def test_a_process_without_a_group_is_found_by_its_pid() -> None:
    (found,) = found_in(MACHINE_6_8, None, 1, {2621226})
    assert (found.limit_of, found.is_main) == ("machine", False)


@pytest.mark.parametrize(("text", "limit_of"), [(V2_5_15, "unknown"), (MACHINE_6_8, "machine")])
def test_the_kernel_leaves_out_the_cause_after_ten_kills(text: str, limit_of: str) -> None:
    line = text.splitlines()[1]
    pid = int(line.split("process ")[1].split()[0])
    (found,) = found_in(line, "/hello-cg", pid)
    assert (found.limit_of, found.is_main) == (limit_of, True)
    assert found_in(line, "/hello-cg", 1) == []


@pytest.mark.parametrize("kind", ["", "pid", "cgroup"])
def test_in_a_namespace_the_log_has_other_pids_or_paths(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (log := tmp_path / "log").touch()
    numbers = {each: Path("/proc/self/ns", each).stat().st_ino for each in ("pid", "cgroup")}
    monkeypatch.setattr(kernel_log, "_LOG", log)
    monkeypatch.setattr(kernel_log, "_FIRST", numbers | ({kind: 1} if kind else {}))
    opened = kernel_log.position()
    assert (opened is None) == bool(kind)
    if opened is not None:
        os.close(opened)


def test_a_log_that_may_not_be_read_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "_LOG", Path("/nonexistent"))
    assert kernel_log.position() is None
    assert kernel_log.kills_since(None, None, 1) is None
