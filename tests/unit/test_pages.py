from pathlib import Path

import pytest
from factories import make_result
from sweeps import a_sweep

from harness import journal
from harness.errors import RecordError
from harness.report.pages import fill

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_on_our_pages_is_what_the_published_records_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT) == text


def test_a_block_is_replaced_and_the_rest_is_not(tmp_path: Path) -> None:
    journal.append(tmp_path / "results/published/x", make_result())
    old = "a\n<!-- results/published/x -->\nstale\n<!-- end -->\nb"
    new = fill(old, tmp_path)
    assert new.startswith("a\n<!-- results/published/x -->\n| strategy | outcome | load s |")
    assert new.endswith("\n<!-- end -->\nb")
    assert "stale" not in new
    assert fill(new, tmp_path) == new


def test_a_block_can_tell_of_survival_or_compare_searches(tmp_path: Path) -> None:
    for result in a_sweep():
        journal.append(tmp_path / "results/published/x", result)
    survival, runs = "results/published/x survival", "results/published/x results/published/x"
    text = f"<!-- {survival} -->\n<!-- end -->\n<!-- {runs} agreement -->\n<!-- end -->\n"
    lines = fill(text, tmp_path).splitlines()
    assert lines[1] == "| strategy | no limit | 16 GiB | 8 GiB | 4 GiB | 1 GiB |"
    start = lines.index(f"<!-- {runs} agreement -->")
    assert lines[start + 1 : start + 4] == [
        "| floor, MiB | x | apart, MiB |",
        "| --- | ---: | ---: |",
        "| baseline | - | - |",
    ]


def test_a_block_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        fill("<!-- results/published/x -->\n<!-- end -->", tmp_path)
