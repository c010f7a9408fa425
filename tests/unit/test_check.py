"""``weighin check``, ``compare`` and ``history`` as they are typed on small runs: exit codes, tables, and errors."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import SCRIPTS, make_cell, make_result, refused, run_of
from snapshots import Compare, answered
from test_evaluate import STREAMING, grown, search
from typed_here import typed

from weighin.gate import baseline, check
from weighin.gate.compare import compare
from weighin.records import run_folder
from weighin.records.floor import next_cell
from weighin.result import Outcome, Peaks, Result
from weighin.units import GIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
SESSIONS = Path(__file__).with_name("snapshots") / "gate"
"""What is typed one after the other in a folder. Add a line ``$ VERB ...``, and ``pytest --rewrite`` writes the answer."""


def killed(strategy: str = "baseline", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes))


def ok(strategy: str = "streaming", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes), SCRIPTS["streaming"])


def of(result: Result, commit: str = "", **environment: Any) -> Result:
    known = {"git_commit": commit * 40} if commit else {}
    return replace(result, environment=result.environment | known | environment)


def of_day(day: int, gib: float, commit: str = "") -> Result:
    peaks = Peaks(rss_bytes=round(gib * GIB), anon_sampled_bytes=round(gib * GIB))
    return of(replace(ok(), peaks=peaks, started_at=f"2026-11-{day:02}T00:00:00+00:00"), commit)


WRONG = make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs")
FAILED = make_result(make_cell("broken"), outcome=Outcome.STRATEGY_FAILED, message="KeyError: 1")
GOOD, BAD, LATE = make_result(STREAMING), grown(), make_result(make_cell("baseline"), outcome=Outcome.TIMEOUT, message="still running")  # fmt: skip
REPEATS = [make_result(make_cell("mmap_assign", repeat=number)) for number in range(2)]
KILLED_REPEAT = make_result(make_cell("mmap_assign", repeat=2), outcome=Outcome.OOM_KILLED)
NODES: list[dict[str, Any]] = [{"cpu": cpu, "node": {"name": name, "id": name}} for cpu, name in (("EPYC", "a"), ("EPYC", "b"), ("Grace", "c"))]  # fmt: skip

RUNS: dict[str, Sequence[Result]] = {
    "good": [GOOD], "bad": [BAD], "torn": [GOOD], "empty": [],
    "older": [of(GOOD, torch="2.12.0")],
    "ok": [ok()],
    "accepted": [ok(), killed()],
    "late": [ok(), LATE],
    "better": [ok(), ok("baseline")],
    "other-limit": [ok(), killed(), killed(ram_limit_bytes=4 * GIB)],
    "mixed": [ok(), killed(), WRONG, FAILED],
    "repeats": [*REPEATS, KILLED_REPEAT],
    "unmeasured": [make_result(STREAMING, outcome=Outcome.MEASUREMENT_FAILED, message="no disk")],
    "kernels": [ok(), make_result(make_cell("baseline"), environment={"kernel": "5.4"})],
    "main": [of(GOOD, "a"), of(ok("baseline"), "a")],
    "branch": [of(BAD, "b", torch="2.14.0"), of(killed(), "b", torch="2.14.0"),
               of(make_result(make_cell("sequential"), outcome=Outcome.TIMEOUT), "b", torch="2.14.0")],
    "third": [ok("baseline")],
    "both": [make_result(make_cell("streaming")), ok("baseline"), ok("gone")],
    "more": [of(BAD, "c", torch="2.14.0")],
    "process": [make_result(replace(STREAMING, isolation="process"))],
    "kernel": [of(GOOD, kernel="6.19.0", torch="3")],
    **{f"days/run{day}": [of_day(day, gib, commit)]
       for day, gib, commit in ((1, 1, "a"), (2, 1.001, "a"), (3, 2, "b"), (4, 2, "b"), (5, 2, "b"))},
    **{f"noisy/run{day}": [of_day(day, gib)] for day, gib in enumerate((1, 2, 0.5, 3, 3), 1)},
    "fleet": [of(GOOD, **NODES[0]), of(ok("baseline"), **NODES[1]), of(BAD, **NODES[2])],
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with all runs."""
    monkeypatch.chdir(tmp_path)
    for name, results in RUNS.items():
        run_of(Path(name), *results)
    with Path("torn/records.jsonl").open("a") as records:
        records.write('{"torn')
    run_folder.write_plan(Path("empty"), [STREAMING])
    run_folder.write_plan(Path("part"), [make_cell("streaming"), make_cell("baseline")])
    run_of(Path("part"), make_result(make_cell("streaming")))
    for name, floor_mib in (("floors/a", 6800), ("floors/b", 7100)):
        tried = search(floor_mib).results
        with_room = next_cell(tried[0].cell, tried, within=0.01, highest=16 * GIB)
        assert with_room  # the last one of the search
        run_folder.write_plan(Path(name), [tried[0].cell], {"within": 0.01})
        run_of(Path(name), *tried, make_result(with_room, SCRIPTS["streaming"], Outcome.OK))
    free = make_cell("lossy", ram_limit_bytes=None)
    run_folder.write_plan(Path("found"), [free], {"within": 0.01})
    run_of(Path("found"), make_result(free, SCRIPTS["streaming"]), WRONG)
    Path("published").symlink_to(PUBLISHED)
    return tmp_path


def answer(line: str) -> str:
    """Type the words before " #"; return the exit code and what is shown, or written as Markdown."""
    code, text = typed(*shlex.split(line, comments=True), columns=200)
    lines = [one.rstrip() for one in text.splitlines()]
    if (written := Path("out.md")).exists():
        lines += ["", written.read_text()]
        written.unlink()
    return "\n".join([f"[{code}]", *lines])


@pytest.mark.parametrize("session", ["check", "compare", "outcomes", "history"])
@pytest.mark.usefixtures("here")
def test_a_session(session: str, same: Compare) -> None:
    same(f"gate/{session}.txt", answered(SESSIONS / f"{session}.txt", answer))


@pytest.mark.parametrize("count", [0, 1, 27])
def test_two_to_26_runs_can_be_compared(count: int, here: Path) -> None:
    said = refused(compare, [here / "good"] * count)
    assert said.startswith(f"cannot compare {count} run{'s' * (count != 1)}\n")
    assert len(compare([here / "good"] * 26)[1]["runs"]) == 26


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "no record has this fact\nname runs in which commit differs, or leave out --by commit"),
        (
            1,
            "all records have commit 00\nname runs in which commit differs, or leave out --by commit",
        ),
        (27, "it has 27 values in the records, more than 26\nname runs with at most 26 values"),
    ],
)
@pytest.mark.usefixtures("here")
def test_two_to_26_commits_can_be_compared(count: int, said: str) -> None:
    one = make_result(make_cell("streaming"))
    commits = [{"git_commit": f"{number:02}"} for number in range(count)] or [{}]
    run_of(Path("many"), *(replace(one, environment={"cpus": 1} | each) for each in commits))
    assert refused(compare, [Path("many")], by="commit") == f"cannot compare by commit: {said}"


@pytest.mark.usefixtures("here")
def test_settings_are_keys_of_pyproject() -> None:
    assert typed("check older --baseline baseline.json --update")[0] == 0
    assert typed("check good --baseline baseline.json")[0] == 1
    Path("pyproject.toml").write_text(
        '[tool.weighin.check]\nbaseline = "baseline.json"\nsetting = ["torch=ignore"]\n'
        'tolerance = ["load=off", "ready=off"]\nbudget = "anon <= 9 x model"\n'
    )
    code, text = typed("check good")
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 1 within budget, 6 same")


@pytest.mark.usefixtures("here")
def test_a_metric_that_only_a_later_version_knows_is_passed_over() -> None:
    assert typed("check good --baseline baseline.json --update")[0] == 0
    text = Path("baseline.json").read_text()
    later = text.replace('"peak_rss": 7', '"of_tomorrow": 5, "peak_rss": 7', 1)
    assert later != text
    Path("baseline.json").write_text(later)
    assert typed("check good --baseline baseline.json")[0] == 0


def test_several_runs_count_as_one_with_more_repeats(here: Path) -> None:
    [series] = check.read_runs([here / name for name in ("good", "bad", "good")]).series.values()
    assert series.repeats == 3
    figure = series.figures["peak_rss"]
    assert figure.low == figure.median < figure.high


@pytest.mark.usefixtures("here")
def test_every_output_at_once() -> None:
    typed("check good --baseline baseline.json --update")
    summary = Path("summary.md")
    summary.write_text("before\n")
    code, text = typed(
        "check bad --baseline baseline.json --github"
        " --markdown out/check.md --junit out/check.xml --json out/check.json",
        GITHUB_STEP_SUMMARY=str(summary),
    )
    assert code == 1
    regressed = "::error file=baseline.json,title=regressed%3A gpt2-xl streaming"
    assert text.count(regressed) == 5
    written = [Path(f"out/check.{form}").read_text() for form in ("md", "xml", "json")]
    assert [one[:15] for one in written] == [
        "## ❌ weighin ch",
        "<?xml version='",
        '{\n "schema": 1,',
    ]
    assert summary.read_text() == "before\n" + written[0]


def test_a_killed_repeat_counts_in_the_baseline(here: Path) -> None:
    measured = check.read_runs([here / "repeats"])
    check.update(measured, here / "baseline.json")
    assert baseline.read(here / "baseline.json").series[next(iter(measured.series))].repeats == 3
