"""Our pages say what the published records and the code say, and the manual page what the verbs say.

The committed pages are the known answers: whoever changes a table, a caption or an option sees it there.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from factories import refused
from sweeps import a_search, a_sweep

from pages.manual import manual
from pages.tables import draw, fill
from weighin.errors import RecordError
from weighin.records import run_folder

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_and_picture_is_what_the_published_records_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT) == text, "write it again: make pages"
    for path, picture in draw(text, ROOT).items():
        assert words(path.read_text()) == words(picture.decode())
    links = re.findall(r"results/published/[^)\s]+\.(?:svg|png)", text)
    assert [link for link in links if not (ROOT / link).exists()] == []


def words(picture: str) -> list[str]:
    """The texts of an SVG: lines may differ between versions of matplotlib."""
    return re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)


def test_the_manual_page_is_that_of_these_verbs_and_groff_reads_it() -> None:
    page = ROOT / "docs" / "weighin.1"
    assert page.read_text() == manual(), "write it again: make man"
    if not shutil.which("groff"):
        pytest.skip("no groff here: apt-get install groff-base")
    command = ["groff", "-man", "-Tutf8", "-ww", str(page)]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""


def test_a_block_is_replaced_and_the_rest_is_not(tmp_path: Path) -> None:
    folder = "results/published/x"
    for result in a_sweep():
        run_folder.append(tmp_path / folder, result)
    old = f"a\n<!-- {folder} survival -->\nstale\n<!-- end -->\nb ![c]({folder}/peaks.svg)"
    new = fill(f"{old} ![d](../{folder}/timeline.svg)", tmp_path)
    assert new.startswith(
        f"a\n<!-- {folder} survival -->\n| strategy | no limit | 16 GiB | 8 GiB | 4 GiB | 1 GiB |"
    )
    assert "\n<!-- end -->\nb " in new and "stale" not in new
    assert fill(new, tmp_path) == new
    assert list(draw(new, tmp_path)) == [tmp_path / folder / "peaks.svg"]  # timelines need samples


def test_a_block_of_a_run_that_is_not_there_says_so(tmp_path: Path) -> None:
    block = "<!-- results/published/x{} -->\nold\n<!-- end -->"
    with pytest.raises(RecordError):
        fill(block.format(""), tmp_path)
    with pytest.raises(RecordError):
        draw("![a](results/published/x/peaks.svg)", tmp_path)
    (published := tmp_path / "results/published").mkdir(parents=True)
    (published / "runs.yaml").write_text("x: bench gpt2-tiny\n")
    for part in ("", " uses", " floors"):
        assert 'Not measured yet: `make publish ARGS="x"`.' in fill(block.format(part), tmp_path)
    run_folder.append(published / "x", a_search()[0])
    run = published / "x"
    command = f"benchmarks/predicted_runs.py {run} --json {run}/predicted.json"
    said = refused(fill, block.format(" checked"), tmp_path)
    assert f"create the file: .venv/bin/python {command}" in said
