"""The settings of a run's machine: what a difference in each of them means for the gate."""

from fnmatch import fnmatchcase
from typing import Any

from snapshots import Compare

from weighin.gate.check import TIMING
from weighin.gate.compare import fingerprint
from weighin.records.machine import Setting, differences, policy_of, settings_of
from weighin.units import GIB

MACHINE: dict[str, Any] = {
    "machine": "x86_64", "cpu": "Example CPU", "cpus": 8, "ram_bytes": 64 * GIB, "swap_bytes": 0,
    "kernel": "6.18.0", "cgroup_version": 2, "thp": "madvise", "page_bytes": 4096, "gpu": None,
}  # fmt: skip
NAMES = """
torch cuda gpu machine cgroup_version thp page_bytes settings.MALLOC_ARENA_MAX
kernel cpu cpus ram_gib python isolation.engine concurrent_cells torchvision
isolation.image isolation.groups node.name disk.rate storage.device git_commit psi governor swap_bytes
threads settings.OMP_NUM_THREADS
"""


def test_what_a_difference_in_a_setting_means_and_whether_times_can_be_compared(
    same: Compare,
) -> None:
    lines = []
    for name in NAMES.split():
        spoils = any(fnmatchcase(name, pattern) for pattern in TIMING)
        lines.append(f"{name}: {policy_of(name, {})}{', no times' if spoils else ''}\n")
    same("machine.txt", "".join(lines))
    assert policy_of("thp", {"t*": "ignore"}) == "ignore"  # a chosen policy comes first
    assert policy_of("thp", {"x*": "ignore"}) == "fail"


def test_differences_are_sorted_and_leave_out_what_is_ignored() -> None:
    was: dict[str, Setting] = {"torch": "2.12", "psi": True, "cpus": 8, "kernel": "6.1"}
    now: dict[str, Setting] = {"torch": "2.13", "psi": False, "cpus": 8, "numa": 2}
    assert [str(each) for each in differences(was, now, {})] == [
        "kernel: 6.1 -> not set",
        "numa: not set -> 2",
        "torch: 2.12 -> 2.13",
    ]
    assert [each.policy for each in differences(was, now, {"numa": "fail"})] == [
        "warn", "fail", "fail",
    ]  # fmt: skip


def test_settings_are_flat_and_a_setting_with_two_values_shows_both() -> None:
    first = MACHINE | {"settings": {"A": 1, "B": [1, 2]}}
    second = MACHINE | {"settings": {"A": 2, "B": [1, 2]}}
    found = settings_of([first, second])
    assert list(found) == sorted(found)
    assert (found["settings.A"], found["settings.B"]) == ("1 | 2", "[1, 2]")
    assert (found["cpus"], found["gpu"], found["ram_gib"]) == (8, None, 64)
    assert "ram_bytes" not in found
    # The size of RAM is rounded, because it differs between boots.
    assert settings_of([MACHINE | {"ram_bytes": 64 * GIB - 5 * 4096}])["ram_gib"] == 64
    assert settings_of([MACHINE | {"ram_bytes": 63 * GIB}])["ram_gib"] == 63


def test_machines_of_one_kind_have_one_name_whatever_runs_on_them() -> None:
    assert fingerprint(MACHINE | {"torch": "3.0", "git_commit": "abc"}) == fingerprint(MACHINE)
    assert len(fingerprint(MACHINE)) == 8
    for name in MACHINE:
        other = MACHINE | {name: 16 * GIB if name == "ram_bytes" else "other"}
        assert fingerprint(other) != fingerprint(MACHINE), name
