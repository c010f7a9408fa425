"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest
import torch

from weighin.loader import disk_readers
from weighin.loader.disk_readers import TimedRead


@pytest.fixture
def torch_threads_restored() -> Iterator[None]:
    """Give torch the number of threads back that it had: our loader and converter set another."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def disk_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk answer at once, however busy this machine is."""
    quick = [TimedRead(4096, 60_000)]
    monkeypatch.setattr(disk_readers, "first_reads", lambda *_: iter(quick))
