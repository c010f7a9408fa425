"""The record of a command has the amounts that are known of its program.

``tests/commands/test_programs.py`` compares the same amounts with the kernel's counters.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import leftovers
import pytest
from _pytest.mark import ParameterSet
from again import EVICTED, tried_again
from cells import MIB, page_cache
from known_commands import KNOWN, VISIBLE_MS, Known, within
from typed import ROOT, measured

pytestmark = pytest.mark.compiler

BY_DAY_IN_DOCKER = ("spend 256 20", "forks 128 3 2000", "maps FILE", "shares 48 2000")


def case(isolation: str, known: Known) -> ParameterSet:
    is_nightly = isolation == "docker" and known.id not in BY_DAY_IN_DOCKER
    marks = [getattr(pytest.mark, isolation), *[pytest.mark.nightly] * is_nightly]
    return pytest.param(isolation, known, id=f"{isolation}-{known.id}", marks=marks)


CASES = [case(isolation, known) for isolation in ("cgroup", "docker") for known in KNOWN]
VISIBLE = [known for known in KNOWN if known.peak_ms >= VISIBLE_MS]
ISOLATIONS = ["process", pytest.param("cgroup", marks=pytest.mark.cgroup)]
ColdRecord = Callable[[Known, str], dict[str, Any]]


def record(
    command: tuple[str, ...], isolation: str, folder: Path, more: str = ""
) -> dict[str, Any]:
    around = Path(command[0]).parents[1]  # a container sees the working folder alone
    found = measured(folder / "run", command, f"--isolation {isolation} {more}", cwd=around)
    record = found.record
    assert (found.code, record["outcome"], record["exit_code"]) == (0, "ok", 0), found.said
    return record


@pytest.fixture(scope="module")
def cold_record(
    programs: Path, known_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> ColdRecord:
    """Call it to run a known command whose file is not in the page cache; it runs once for all tests."""

    @cache
    def measured(known: Known, isolation: str) -> dict[str, Any]:
        page_cache.drop([known_file])
        command, folder = known.command(programs, known_file), tmp_path_factory.mktemp("cold")
        return record(command, isolation, folder)

    return measured


@pytest.mark.parametrize(("isolation", "known"), CASES)
def test_a_groups_figures_are_known_within_1_percent_and_1_mib(
    known: Known, isolation: str, cold_record: ColdRecord
) -> None:
    found = cold_record(known, isolation)
    peaks, ran = found["peaks"], found["ran"]
    print(known.id, peaks, ran["needed_bytes"], ran["needed_is_sampled"])
    if not known.file_bytes and not known.shmem_bytes:
        assert within(peaks["cgroup_bytes"], known.anon_bytes)
    assert within(ran["needed_bytes"], known.needed_bytes)
    if known.file_bytes:
        assert within(peaks["cgroup_bytes"], known.needed_bytes + known.file_bytes)
        assert within(peaks["file_sampled_bytes"], known.file_bytes)


@pytest.mark.parametrize("known", VISIBLE, ids=lambda known: known.id)
def test_samples_of_processes_are_known_within_5_percent(
    known: Known, cold_record: ColdRecord
) -> None:
    found = cold_record(known, "process")
    ran = found["ran"]
    print(known.id, found["peaks"], ran["needed_bytes"], ran["needed_is_sampled"])
    assert found["peaks"]["cgroup_bytes"] is None
    assert ran["needed_is_sampled"] is True
    assert ran["needed_bytes"] == pytest.approx(known.needed_bytes, rel=0.05, abs=MIB)


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("known", VISIBLE, ids=lambda known: known.id)
def test_the_processes_at_the_peak_have_their_shares(
    known: Known, isolation: str, cold_record: ColdRecord
) -> None:
    ran = cold_record(known, isolation)["ran"]
    running = [each for each in ran["processes"] if each["anon_bytes"] is not None]
    at_peak = [each for each in running if each["anon_bytes"] + each["shmem_bytes"] >= MIB]
    print([(each["command"], each["anon_bytes"], each["shmem_bytes"]) for each in at_peak])
    assert len(at_peak) == len(known.process_bytes)
    shares = sum(each["anon_bytes"] + each["shmem_bytes"] for each in at_peak)
    assert shares == pytest.approx(known.needed_bytes, rel=0.05, abs=MIB)
    highest = sorted((each["highest_rss_bytes"] for each in at_peak), reverse=True)
    for mark, alone in zip(highest, known.process_bytes, strict=True):
        assert mark >= 0.95 * alone


@tried_again(EVICTED)
@pytest.mark.parametrize(
    ("isolation", "name"),
    [
        *(pytest.param("cgroup", name, marks=pytest.mark.cgroup) for name in ("maps", "reads")),
        pytest.param("docker", "maps", marks=pytest.mark.docker),
    ],
)
def test_page_cache_is_no_need_cold_or_warm(
    isolation: str, name: str, programs: Path, known_file: Path, tmp_path: Path
) -> None:
    known = next(known for known in KNOWN if known.name == name)
    command, folder = known.command(programs, known_file), Path(mkdtemp(dir=tmp_path))
    known_file.read_bytes()
    warm = record(command, isolation, folder / "warm")
    cold = record(command, isolation, folder / "cold", f"--cold {known_file}")
    assert cold["ran"]["cold"] == [str(known_file)]
    assert within(cold["peaks"]["cgroup_bytes"] - warm["peaks"]["cgroup_bytes"], known.file_bytes)
    assert within(cold["ran"]["needed_bytes"], known.needed_bytes)
    assert within(warm["ran"]["needed_bytes"], known.needed_bytes)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_daemon_is_ended_and_named(isolation: str, programs: Path, tmp_path: Path) -> None:
    daemon = str(programs / "daemon")
    found = record((daemon, "64", "60"), isolation, tmp_path)
    assert found["ran"]["ended"] == [f"{daemon} 64 60"]
    running = [one for one in leftovers.processes(str(ROOT)) if daemon in one]
    leftovers.end(running)
    assert running == []
