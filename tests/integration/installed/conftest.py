"""The wheel of weighin, which the tests of this folder install."""

from pathlib import Path

import pytest
from typed import ROOT
from wheels import build


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of weighin, built once."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"))
