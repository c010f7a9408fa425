import re
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_cell, make_result
from sweeps import a_sweep

from pages.tables import draw, fill
from weighin.errors import RecordError
from weighin.records import run_folder

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_on_our_pages_is_what_the_published_records_say(page: str) -> None:
    text = (ROOT / page).read_text()
    assert fill(text, ROOT) == text


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_on_our_pages_is_what_the_published_records_say(page: str) -> None:
    for path, picture in draw((ROOT / page).read_text(), ROOT).items():
        assert words(path.read_text()) == words(picture.decode())


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_on_our_pages_is_there(page: str) -> None:
    links = re.findall(r"results/published/[^)\s]+\.(?:svg|png)", (ROOT / page).read_text())
    assert [link for link in links if not (ROOT / link).exists()] == []


def words(picture: str) -> list[str]:
    """The texts of an SVG: lines may differ between versions of matplotlib."""
    return re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)


def test_pictures_are_drawn_from_records_and_timelines_are_not(tmp_path: Path) -> None:
    folder = "results/published/x"
    run_folder.append(tmp_path / folder, make_result())
    page = f"![a]({folder}/peaks.svg) [b](../{folder}/timeline.svg) ![c]({folder}/peaks.png)"
    drawn = draw(page, tmp_path)
    assert list(drawn) == [tmp_path / folder / "peaks.svg"]
    assert "RAM limit 8 GiB" in " ".join(words(next(iter(drawn.values())).decode()))


def test_a_picture_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        draw("![a](results/published/x/peaks.svg)", tmp_path)


def test_a_block_is_replaced_and_the_rest_is_not(tmp_path: Path) -> None:
    run_folder.append(tmp_path / "results/published/x", make_result())
    old = "a\n<!-- results/published/x -->\nstale\n<!-- end -->\nb"
    new = fill(old, tmp_path)
    assert new.startswith(
        "a\n<!-- results/published/x -->\n| strategy | outcome | import s | load s |"
    )
    assert new.endswith("\n<!-- end -->\nb")
    assert "stale" not in new
    assert fill(new, tmp_path) == new


def test_a_block_can_tell_of_survival_or_compare_searches(tmp_path: Path) -> None:
    for result in a_sweep():
        run_folder.append(tmp_path / "results/published/x", result)
    survival, runs = "results/published/x survival", "results/published/x results/published/x"
    text = f"<!-- {survival} -->\n<!-- end -->\n<!-- {runs} agreement -->\n<!-- end -->\n"
    lines = fill(text, tmp_path).splitlines()
    assert lines[1] == "| strategy | no limit | 16 GiB | 8 GiB | 4 GiB | 1 GiB |"
    start = lines.index(f"<!-- {runs} agreement -->")
    assert lines[start + 1 : start + 4] == [
        "| floor, MiB | x | difference, MiB |",
        "| --- | ---: | ---: |",
        "| baseline | - | - |",
    ]


def test_a_block_has_a_column_for_each_model(tmp_path: Path) -> None:
    folder = tmp_path / "results/published/x"
    for model in ("few", "many"):
        for strategy in ("mmap_assign", "streaming"):
            cell = make_cell(strategy, model=replace(make_cell().model, name=model))
            run_folder.append(folder, make_result(cell))
    lines = fill("<!-- results/published/x models -->\n<!-- end -->", tmp_path).splitlines()
    assert lines[1:3] == ["| strategy | few s | many s |", "| --- | ---: | ---: |"]
    assert [line.split(" ")[1] for line in lines[3:5]] == ["mmap_assign", "streaming"]
    assert all(float(text) > 0 for line in lines[3:5] for text in line.split("|")[2:4])


def test_a_block_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        fill("<!-- results/published/x -->\n<!-- end -->", tmp_path)
