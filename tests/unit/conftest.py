"""Fixtures of the unit tests."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path
from typing import Any

import fakes
import pytest
from cgroup_trees import LAYOUTS, Kernel, installed
from warm_children import Forks

from weighin import child_process
from weighin.probes import sampler
from weighin.stream import foreign


@pytest.fixture(scope="session", autouse=True)
def _warm_children() -> Iterator[None]:
    """Let the children that a unit test starts begin with torch imported; elsewhere they are cold."""
    with (
        closing(Forks("weighin.checkpoint", "weighin.models.description")) as forks,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(child_process, "module", forks.command)
        yield


@pytest.fixture(scope="session", autouse=True)
def _played_observers() -> Iterator[None]:
    """Let a played worker have a played observer."""
    with pytest.MonkeyPatch.context() as patch:
        fakes.play(patch)
        yield


@pytest.fixture(autouse=True)
def _not_the_program() -> Iterator[None]:
    """Let weighin be a part of pytest again after a test that calls its ``main``."""
    yield
    child_process.is_program = False


@pytest.fixture
def torch_threads_restored() -> Iterator[None]:
    """Give torch the number of threads back that it had: our converter sets another."""
    import torch  # some tests of this folder run where an import of torch takes half a minute

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=LAYOUTS)
def kernel(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kernel]:
    """A tree of cgroups of plain files, of each layout in turn.

    No process is really in such a cgroup, so that none is seen to leave it.
    """
    monkeypatch.setattr(sampler, "outside", lambda *_: None)
    with installed(tmp_path, monkeypatch, request.param) as kernel:
        yield kernel


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process of this user, which the code under test may kill."""
    with subprocess.Popen(["sleep", "600"]) as running:
        yield running.pid
        running.kill()


@pytest.fixture
def no_garbage() -> None:
    """Free what earlier tests left, lest it be freed amidst a test that counts memory or files."""
    gc.collect()


@pytest.fixture
def disk_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk answer at once, however busy this machine is."""
    monkeypatch.setattr("weighin.stream.bytes._LATE_NS", inf)
    monkeypatch.setattr(foreign, "_LATE_S", inf)


_opened: list[str] | None = None


@pytest.fixture(scope="session")
def _audited() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _opened is not None:
            _opened.append("" if isinstance(arguments[0], int) else os.fsdecode(arguments[0]))

    sys.addaudithook(audit)


@pytest.fixture
def opened(_audited: None) -> Iterator[list[str]]:
    """The paths of all files that this process opens, as it opens them."""
    global _opened  # noqa: PLW0603 (a hook stays for ever, and asks for it)
    _opened = []
    yield _opened
    _opened = None
