"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def torch_threads_restored() -> Iterator[None]:
    """Give torch the number of threads back that it had: our loader and converter set another."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
