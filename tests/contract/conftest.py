"""What users of weighin rely on, told from outside: see the table in tests/README.md."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from outside import warm_children
from snapshots import Compare, kept

FOLDER = Path(__file__).with_name("snapshots")


@pytest.fixture(scope="session")
def same(pytestconfig: pytest.Config) -> Compare:
    """Call it to compare a text with its snapshot: ``same("verbs/list.txt", output)``."""
    return kept(FOLDER, pytestconfig.getoption("--rewrite"))


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Let processes that prepare or convert checkpoints begin with torch imported."""
    with warm_children():
        yield
