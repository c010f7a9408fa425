"""Our pages say what the published records and the code say, and the manual page what the verbs say.

The committed pages are the known answers: whoever changes a table, a caption or an option sees it there.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from factories import SCRIPTS, make_cell, make_result, make_skipped
from sweeps import a_search, a_sweep

from pages import loaders, notebook
from pages.manual import manual
from pages.tables import draw, fill, keys_of
from weighin.errors import RecordError
from weighin.plan.task import Planned
from weighin.predict.prediction import Prediction
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.suite.registry import model

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


@pytest.mark.parametrize("name", ["suite", "model", "suite of commands", "command"])
def test_every_key_of_a_suite_has_a_meaning(name: str) -> None:
    rows = [row.split(" | ") for row in keys_of(name).splitlines()[2:]]
    assert rows and all(len(meaning.split()) > 3 for _, _, meaning in rows)


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
    with pytest.raises(RecordError) as caught:
        fill(block.format(" checked"), tmp_path)
    run = published / "x"
    command = f"benchmarks/predicted_runs.py {run} --json {run}/predicted.json"
    assert f"create the file: .venv/bin/python {command}" in str(caught.value)


def test_only_cells_that_are_the_notebooks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def foretold(planned: list[Planned]) -> list[Prediction]:
        return [Prediction(one.cell, cannot="ValueError: odd") for one in planned]

    monkeypatch.setattr(notebook, "predict", foretold)
    cell = make_cell("mmap_assign", model=model("gpt2-xl"), ram_limit_bytes=None, device="cuda")
    result = make_result(cell, SCRIPTS["mmap_assign"])
    result = replace(result, peaks=replace(result.peaks, cuda_allocated_bytes=2**30))
    others = [replace(result, outcome=Outcome.CUDA_OOM)] + [
        replace(result, cell=replace(cell, **change))
        for change in ({"device": "cpu"}, {"dtype": "bfloat16"}, {"options": {"map_location": "cpu"}}, {"model": model("gpt2-small")})
    ]  # fmt: skip
    assert "| mmap_assign | 6.4 | 1.000 | - | 5.9 |" in notebook.markdown_notebook([result])
    for other in others:
        assert "| mmap_assign | 6.4 | - | - | 5.9 | - | - |" in notebook.markdown_notebook([other])


def measured(strategy: str, ready_s: float, repeat: int = 0, cache: str = "cold") -> Result:
    cell = make_cell(strategy, ram_limit_bytes=None, repeat=repeat, cache=cache)
    ready_ns = round(ready_s * 1e9)
    return replace(make_result(cell, SCRIPTS[strategy]), ready_ns=ready_ns)


def test_the_table_of_loaders_has_the_fastest_first() -> None:
    cold = [
        measured("mmap_assign", 5.0), measured("streaming", 3.0), measured("streaming", 9.0, 1),
        measured("streaming", 4.0, 2), make_skipped("runai", "runai needs x: install y"),
        make_skipped("eager", "eager needs x: install y"),
    ]  # fmt: skip
    text = loaders.table([cold, [measured("mmap_assign", 1.0, cache="warm")], []])
    assert text.splitlines()[:4] == [
        "| strategy | gpt2-xl, peak RSS MiB | gpt2-xl, private left MiB | gpt2-xl, cold | gpt2-xl, warm |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| streaming | 6912 | 6461 | 4.00 s | - |",
        "| mmap_assign | 6984 | 215 | 5.00 s | 1.00 s |",
    ]
    assert "runai" not in text
    assert loaders.table([[make_skipped("runai", "why")], []]) == ""
