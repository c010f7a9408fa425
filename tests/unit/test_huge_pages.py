"""Memory to read tensors into, on every kernel."""

import mmap
from pathlib import Path

import pytest
import torch

from weighin.run import loads
from weighin.stream.model import load_streaming
from weighin.units import MIB


@pytest.fixture(params=["refused", "unknown to Python"])
def _no_huge_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel that was built without transparent huge pages."""
    if request.param == "refused":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")


@pytest.mark.usefixtures("_no_huge_pages")
def test_a_kernel_without_huge_pages_loads_all_the_same(tmp_path: Path) -> None:
    right = torch.nn.Linear(1000, 2000)
    torch.save(right.state_dict(), tmp_path / "model.pt")
    found = load_streaming(lambda: torch.nn.Linear(1000, 2000), tmp_path / "model.pt")
    assert torch.equal(found.get_parameter("weight"), right.weight)


@pytest.mark.usefixtures("_no_huge_pages")
def test_a_kernel_without_huge_pages_holds_memory_for_steady_times() -> None:
    with loads.held(3 * MIB) as held_bytes:
        assert held_bytes == 3 * MIB
