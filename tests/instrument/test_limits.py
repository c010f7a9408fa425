"""A limit holds, is as large as it says, and kills in the phase that overruns it."""

import signal

import pytest
from cells import MIB, Bench, Outcome, Result, Watched, known, names_of, phases_of
from nightly import isolations

# `import torch` charges about 150 MiB of anonymous memory to its cgroup: 256 MiB hold an import and
# 60 MiB more, and neither 400 MiB nor the import together with 200 MiB.
LIMIT = 256 * MIB


@pytest.fixture(scope="module")
def killed(bench: Bench, limiting: Watched) -> Result:
    return bench("overrun", limiting, limit_bytes=LIMIT, mib=400)


def test_what_does_not_fit_is_killed_in_its_phase(killed: Result) -> None:
    assert (killed.outcome, killed.last_phase) == (Outcome.OOM_KILLED, "take")
    assert killed.message == "killed by the kernel for lack of memory in phase 'take'"
    assert known(killed.oom_kills) >= 1
    assert killed.exit_code == 128 + signal.SIGKILL
    assert names_of(killed)[-1] == "before"
    assert (killed.load_ns, killed.ready_ns) == (None, None)


def test_the_limit_is_what_it_says_within_5_percent(killed: Result) -> None:
    assert 0.95 * LIMIT <= known(killed.peaks.cgroup_bytes) <= LIMIT
    assert known(killed.peaks.anon_sampled_bytes) <= LIMIT


def test_the_timeline_of_a_killed_cell_reaches_its_last_phase(bench: Bench, killed: Result) -> None:
    before = phases_of(killed)["before"]
    last = [s for s in bench.samples(killed) if (s["t_ns"] or 0) > before.end_ns]
    assert max(sample["anon_bytes"] or 0 for sample in last) > before.end.anon_bytes + 8 * MIB
    assert {sample["swap_bytes"] for sample in last} == {0}


def test_what_fits_lives(bench: Bench, limiting: Watched) -> None:
    result = bench("overrun", limiting, limit_bytes=LIMIT, mib=60)
    assert (result.outcome, result.message, result.oom_kills) == (Outcome.OK, "", 0)
    phases = phases_of(result)
    taken = phases["take"].end.anon_bytes - phases["before"].end.anon_bytes
    assert taken == pytest.approx(60 * MIB, abs=MIB)


@pytest.mark.parametrize("isolation", isolations("cgroup"), indirect=True)
def test_the_same_allocation_lives_without_a_limit(bench: Bench, isolation: Watched) -> None:
    result = bench("overrun", isolation, mib=400)
    assert (result.outcome, result.message) == (Outcome.OK, "")


def test_swap_is_off_for_a_cell_and_its_limit_can_be_lifted(
    bench: Bench, limiting: Watched
) -> None:
    swap: dict[str, str] = {}
    lifted = []

    def look(phase: str) -> None:
        if phase == "hold":
            group = limiting.group
            v1 = ("memory.swappiness", "memory.memsw.limit_in_bytes")
            names = v1 if group.version == 1 else ("memory.swap.max",)
            swap.update({one: group.read(one, one) for one in names if (group.path / one).exists()})
            group.lift()
            lifted.append(group.read("memory.limit_in_bytes", "memory.max"))

    bench("overrun", limiting, limit_bytes=LIMIT, mib=16, on_phase=look)
    assert swap in (
        {"memory.swap.max": "0"},
        {"memory.swappiness": "0", "memory.memsw.limit_in_bytes": str(LIMIT)},
        {"memory.swappiness": "0"},  # a kernel that does not account swap by cgroup
    )
    (limit,) = lifted
    assert limit == "max" or int(limit) > 2**60  # v1 rounds "no limit" to whole pages
