"""The fixtures of the tests in this folder: isolations, prepared once, and cells to run under them.

Strategies are the files in ``strategies/``, and the project's own; each is run in a real
worker, and after each nothing may be left.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cells import FILE_BYTES, Bench, Watched, known_file, prepared_isolation

STRATEGIES = Path(__file__).with_name("strategies")


@pytest.fixture(scope="session", autouse=True)
def cache_of_tests(disk: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHIN_CACHE", os.environ.get("WEIGHIN_TEST_CACHE") or str(disk / "cache"))
        yield


@pytest.fixture(scope="session")
def strategies(disk: Path) -> Path:
    """The folder of the tests' strategies, and beside it that of ``known.bin``."""
    folder = Path(tempfile.mkdtemp(dir=disk, prefix="cells-")) / "strategies"
    shutil.copytree(STRATEGIES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    known = known_file(folder)
    known.parent.mkdir()
    known.write_bytes(os.urandom(FILE_BYTES))
    return folder


IN_CGROUP = pytest.param("cgroup", marks=pytest.mark.cgroup)
IN_DOCKER = pytest.param("docker", marks=pytest.mark.docker)


@pytest.fixture(scope="session", params=["process", IN_CGROUP, IN_DOCKER])
def isolation(request: pytest.FixtureRequest) -> Watched:
    """Each isolation of this machine in turn, prepared."""
    return prepared_isolation(request.param)


@pytest.fixture(scope="session", params=[IN_CGROUP, IN_DOCKER])
def limiting(request: pytest.FixtureRequest) -> Watched:
    """Each isolation that can hold a limit in turn, prepared."""
    return prepared_isolation(request.param)


@pytest.fixture(scope="session")
def process() -> Watched:
    """The plain process: for what does not depend on the isolation."""
    return prepared_isolation("process")


@pytest.fixture(scope="session")
def cgroup() -> Watched:
    return prepared_isolation("cgroup")


@pytest.fixture(scope="session")
def bench(disk: Path, strategies: Path) -> Bench:
    """Call it to run a cell: ``bench("baseline", isolation)``."""
    run = strategies.parent / "run"
    (run / "samples").mkdir(parents=True)
    return Bench(run, strategies, str(disk))


@pytest.fixture(scope="session")
def seconds_to_load(bench: Bench) -> Callable[[Watched], float]:
    """How long a whole cell takes here, measured once for each isolation: for time-outs."""
    known: dict[str, float] = {}

    def seconds(isolation: Watched) -> float:
        name = isolation.name
        if name not in known:
            start = time.monotonic()
            bench("baseline", isolation)
            known[name] = time.monotonic() - start
        return known[name]

    return seconds
