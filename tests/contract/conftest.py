"""What users of weighin rely on, told from outside: see the table in tests/README.md."""

from pathlib import Path

import pytest
from snapshots import Compare, kept

FOLDER = Path(__file__).with_name("snapshots")


@pytest.fixture(scope="session")
def same(pytestconfig: pytest.Config) -> Compare:
    """Call it to compare a text with its snapshot: ``same("verbs/list.txt", output)``."""
    return kept(FOLDER, pytestconfig.getoption("--rewrite"))
