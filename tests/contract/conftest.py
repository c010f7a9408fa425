"""What users of weighin rely on, told from outside: see the table in tests/README.md."""

from collections.abc import Iterator

import pytest
from outside import warm_children


@pytest.fixture(scope="session")
def warm() -> Iterator[None]:
    """Let processes that prepare or convert checkpoints begin with torch imported."""
    with warm_children():
        yield
