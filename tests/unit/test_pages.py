"""Our pages say what the published records and the code say, and the manual page what the verbs say.

The committed pages are the known answers: whoever changes a table, a caption or an option sees it there.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from factories import git, make_cell, make_result, refused, run_of, write_samples
from sweeps import a_sweep

from pages import publish
from pages.manual import manual
from pages.tables import draw, fill
from weighin.errors import RecordError
from weighin.probes import environment
from weighin.records import run_folder
from weighin.result import Outcome, Result

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
    run_of(tmp_path / (folder := "results/published/x"), *a_sweep())
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
    run = run_of(published / "x", make_result())
    command = f"benchmarks/predicted_runs.py {run} --json {run}/predicted.json"
    said = refused(fill, block.format(" checked"), tmp_path)
    assert f"create the file: .venv/bin/python {command}" in said


# -- the page of releases


def of_release(version: str, outcome: Outcome | None = None, message: str = "") -> Result:
    cell = make_cell("mmap_assign", releases=f"tinyloader=={version}")
    return make_result(cell, outcome=outcome, message=message)


def test_releases_stand_in_their_order_with_the_reason_of_those_that_failed(tmp_path: Path) -> None:
    why = "cannot import tinyloader==1.2: ImportError: no library | here\nmore"
    page = page_of(
        tmp_path,
        of_release("1.10"),
        of_release("1.2", Outcome.SKIPPED, why),
        of_release("1.3", Outcome.STRATEGY_FAILED, f"OSError: {'w' * 40} {'w' * 40} (x.py:3)"),
        of_release("1.4", Outcome.SKIPPED, why.replace("1.2", "1.4")),
        of_release("1.9"),
    )
    rows = [line for line in page.splitlines() if line.startswith("| 1.")]
    assert rows[:3] == ["| 1.2 | no (1) |", "| 1.3 | no (2) |", "| 1.4 | no (1) |"]
    assert [re.sub(r"\d\.\d\d \|$", "x |", row) for row in rows[3:]] == [
        "| 1.9 | x |",
        "| 1.10 | x |",
    ]
    first = "\n1. cannot import: ImportError: no library \\| here\n"
    assert f"{first}2. OSError: {'w' * 40} ...\n" in page
    (picture,) = draw(page, tmp_path).values()
    drawn = words(picture.decode())
    assert drawn.index("1.2") < drawn.index("1.9") < drawn.index("1.10")
    assert "Loading with each release of tinyloader" in drawn


def test_times_that_are_far_apart_stand_beside_the_peaks(tmp_path: Path) -> None:
    taken = {"1.1": (990_000_000, 1_000_000_000, 5_000_000_000), "1.2": (2_000_000_000,) * 3}
    page = page_of(
        tmp_path,
        *(
            replace(one, ready_ns=ready_ns, cell=replace(one.cell, repeat=repeat))
            for one in map(of_release, taken)
            for repeat, ready_ns in enumerate(taken[one.cell.releases.partition("==")[2]])
        ),
    )
    assert re.findall(r"^\| (1\.\d) \| \d\.\d\d · (.*) \|$", page, re.MULTILINE) == [
        ("1.1", "1.00 s"), ("1.2", "2.00 s"),
    ]  # fmt: skip
    assert "\nmedians of 3 · " in page


def page_of(root: Path, *results: Result) -> str:
    run_of(root / (run := "results/published/x"), *results)
    return fill(f"<!-- {run} releases -->\n<!-- end -->", root)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("code", [4, 5])
def test_a_release_that_cannot_load_is_published(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = of_release("1.2", Outcome.STRATEGY_FAILED, "no")
    monkeypatch.setattr(subprocess, "run", weighin(failed, code, 1))
    publish.measure(publish.Run("x", ("bench", "gpt2-tiny"), ()))
    assert not publish.is_predicted([failed.cell])
    with pytest.raises(SystemExit, match="weighin ended with 1"):
        publish.measure(publish.Run("y", ("bench", "gpt2-tiny"), ()))


# -- make publish: how it measures a run, and what it keeps of it


def weighin(result: Result, *codes: int) -> Mock:
    """Stands for `python -m weighin ...`, which leaves a run's folder, and ends with one code after the other."""
    left = iter(codes)

    def measure(command: list[str], **_: Any) -> Any:
        folder = Path(command[command.index("--out" if "--out" in command else "--resume") + 1])
        run_folder.write_plan(folder, [result.cell])
        run_of(folder, result)
        return subprocess.CompletedProcess(command, next(left))

    return Mock(side_effect=measure)


@pytest.mark.usefixtures("here")
def test_a_stopped_run_goes_on_and_other_code_or_a_wrong_load_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "code", lambda: {"git_commit": "a" * 40})
    result = replace(make_result(), environment={"git_commit": "a" * 40})
    run = publish.Run("x", ("bench", "gpt2-tiny"), (result,))
    monkeypatch.setattr(subprocess, "run", typed := weighin(result, 130, 0))
    with pytest.raises(SystemExit, match="The same command resumes it"):
        publish.measure(run)
    publish.measure(run)
    assert [call.args[0][3:] for call in typed.call_args_list] == [
        ["bench", "gpt2-tiny", "--out", "results/publishing/x"],
        ["bench", "--resume", "results/publishing/x"],
    ]
    monkeypatch.setattr(environment, "code", lambda: {"git_commit": "b" * 40})
    started = "was started at commit aaaaaaaaaa, but this is bbbbbbbbbb"
    with pytest.raises(SystemExit, match=started):
        publish.measure(run)
    assert typed.call_count == 2
    wrong = replace(make_result(), outcome=Outcome.WRONG_WEIGHTS, message="h.0 differs")
    monkeypatch.setattr(subprocess, "run", weighin(wrong, 0))
    with pytest.raises(SystemExit, match="is wrong_weights: h"):
        publish.measure(replace(run, name="y"))


def test_a_whole_run_takes_the_place_of_the_published_one(tmp_path: Path) -> None:
    measured, published = tmp_path / "measured", tmp_path / "published"
    old, new = make_result(make_cell("baseline")), make_result(make_cell("streaming"))
    write_samples(run_of(published, old), old)
    for name in ("report.md", "timeline.png", "predicted.json"):
        (published / name).write_text("old")
    run_folder.write_plan(measured, [new.cell])
    write_samples(run_of(measured, new), new)
    (measured / "report.md").write_text("new")
    publish.put_in_place(measured, published)
    found = {str(path.relative_to(published)) for path in published.rglob("*") if path.is_file()}
    assert found == {"records.jsonl", "timeline.svg"}
    assert [one.cell.strategy for one in run_folder.read(published).results] == ["streaming"]
    picture = (published / "timeline.svg").read_text()
    assert "streaming: ok" in picture and "no samples" not in picture


def test_a_run_is_older_than_other_code_and_not_than_other_words(tmp_path: Path) -> None:
    (file := tmp_path / "harness/weighin/stream/x.py").parent.mkdir(parents=True)
    git(tmp_path, "init", "-q")

    def state(text: str) -> str:
        file.write_text(text)
        return publish.since(tmp_path, first, publish.Run("x", ("bench",), ()))

    file.write_text('def f() -> int:\n    """One."""\n    return 1\n')
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    first = git(tmp_path, "rev-parse", "HEAD").strip()
    assert (
        state('def f() -> int:\n    """The one."""\n    # as before\n    return 1\n')
        == publish.CURRENT
    )
    assert "(x.py changed)" in state("def f() -> int:\n    return 2\n")
    (file.parent / "y.py").write_text("")
    git(tmp_path, "add", ".")
    file.unlink()
    assert "OLDER" in publish.since(tmp_path, first, publish.Run("x", ("bench",), ()))


def test_git_keeps_no_more_of_a_published_run_than_is_said() -> None:
    shown = "".join((ROOT / page).read_text() for page in PAGES)
    files = [Path(name) for name in git(ROOT, "ls-files", "results/published").splitlines()]
    for run in publish.read(ROOT):
        if not run.results:
            continue  # nobody has measured it yet
        cells = [one.cell for one in run.results]
        kept = {"records.jsonl"} | ({"predicted.json"} if publish.is_predicted(cells) else set())
        found = {path.name for path in files if path.parent.name == run.name}
        pictures = {name for name in found if f"{run.name}/{name}" in shown}
        timelines = {name for name in found if name.startswith("timeline.")}
        assert found == kept | pictures | timelines
        assert len(timelines) == publish.has_timeline(cells)
