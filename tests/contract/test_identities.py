"""The names of cells and series: a new name parts a run from its records, and a baseline from its run."""

from pathlib import Path

import pytest
import yaml
from outside import PUBLISHED, ROOT, RUNS, Identity, planned, recorded
from snapshots import Compare

SUITES = [
    path
    for path in sorted((ROOT / "configs/suites").glob("*.yaml"))
    # These read folders that their published runs made; the runs' records have the same cells.
    if path.stem
    not in ("after-the-load", "converting", "releases-diffusers", "releases-transformers")
]


def _lines(identities: list[Identity]) -> str:
    return "".join(f"{one.files}  {one.series}\n" for one in identities)


@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_the_cells_of_a_suite_keep_their_names(suite: Path, tmp_path: Path, same: Compare) -> None:
    same(f"identities/suites/{suite.stem}.txt", _lines(planned(suite, tmp_path / "run")))


@pytest.mark.parametrize("run", RUNS)
def test_the_cells_of_a_published_run_keep_their_names(run: str, same: Compare) -> None:
    same(f"identities/published/{run}.txt", _lines(recorded(PUBLISHED / run)))


def test_the_gates_own_baseline_covers_its_suite() -> None:
    """The file was written long ago, by containers and without a limit."""
    written = yaml.safe_load((ROOT / ".ci/baseline.yaml").read_text())["measured"]["series"]
    suite = ROOT / "configs/suites/ci.yaml"
    assert {*written} == {one.series for one in planned(suite, Path("unused"))}
