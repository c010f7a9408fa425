"""``weighin check`` as it is typed: exit codes, what is written, and errors in two lines."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from factories import make_cell, make_result
from test_evaluate import STREAMING, grown

from weighin.cli import app
from weighin.errors import HarnessError
from weighin.gate import check
from weighin.records import run_folder
from weighin.result import Outcome, Result


def run_of(folder: Path, *results: Result) -> Path:
    for result in results:
        run_folder.append(folder, result)
    return folder


def typed(*arguments: object, **variables: str) -> tuple[int, str]:
    """The exit code and what is shown; of an error that is ours, its exit code and its text."""
    environment = {"COLUMNS": "80", "NO_COLOR": "1"} | variables
    result = CliRunner().invoke(app.app, [str(one) for one in arguments], env=environment)
    if isinstance(result.exception, HarnessError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.fixture(name="good")
def _good(tmp_path: Path) -> Path:
    return run_of(tmp_path / "good", make_result(STREAMING))


@pytest.fixture(name="bad")
def _bad(tmp_path: Path) -> Path:
    return run_of(tmp_path / "bad", grown())


@pytest.fixture(name="baseline")
def _baseline(tmp_path: Path, good: Path) -> Path:
    path = tmp_path / "baseline.yaml"
    code, text = typed("check", good, "--baseline", path, "--update")
    assert code == 0
    assert f"+++ {path}" in text.splitlines()[1]
    assert text.splitlines()[-1] == "gate passed: 8 same"
    return path


def test_a_run_as_it_was_exits_with_0(good: Path, baseline: Path) -> None:
    code, text = typed("check", good, "--baseline", baseline)
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 8 same"


def test_a_regression_exits_with_1_and_says_how_to_accept_it(bad: Path, baseline: Path) -> None:
    code, text = typed("check", bad, "--baseline", baseline)
    assert code == 1
    assert text.splitlines()[-2:] == [
        "gate failed: 5 regressed, 3 same",
        "note: if the change is intended, accept it with --update, and commit the baseline file",
    ]


def test_an_update_shows_the_difference_and_the_next_check_passes(
    bad: Path, baseline: Path
) -> None:
    code, text = typed("check", bad, "--baseline", baseline, "--update")
    assert code == 0
    assert re.search(r"^-        peak_rss: 7248\d+  # 6.750 GiB$", text, re.MULTILINE)
    assert re.search(r"^\+        peak_rss: 7591\d+  # 7.070 GiB$", text, re.MULTILINE)
    assert typed("check", bad, "--baseline", baseline)[0] == 0
    assert f"{baseline} is up to date" in typed("check", bad, "--baseline", baseline, "--update")[1]


def test_only_the_metrics_that_were_asked_for(bad: Path, baseline: Path) -> None:
    code, text = typed("check", bad, "--baseline", baseline, "--metrics", "load, ready")
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 3 same"


def test_a_budget_needs_no_baseline(bad: Path) -> None:
    assert typed("check", bad, "--budget", "peak_rss <= 1.2 x model")[0] == 0
    code, text = typed("check", bad, "--budget", "peak_rss <= 1.1 x model")
    assert code == 1
    assert text.splitlines()[-1] == "gate failed: 1 over budget"


def test_several_runs_count_as_one_with_more_repeats(good: Path, bad: Path, tmp_path: Path) -> None:
    measured = check.read_runs([good, bad, good])
    [series] = measured.series.values()
    assert series.repeats == 3
    figure = series.figures["peak_rss"]
    assert figure.low == figure.median < figure.high


def test_every_output_at_once(bad: Path, baseline: Path, tmp_path: Path) -> None:
    files = [tmp_path / "out" / name for name in ("check.md", "check.xml", "check.json")]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    code, text = typed(
        "check", bad, "--baseline", baseline, "--github",
        "--markdown", files[0], "--junit", files[1], "--json", files[2],
        GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert code == 1
    assert text.count(f"::error file={baseline},title=regressed%3A gpt2-xl streaming") == 5
    assert [path.read_text()[:15] for path in files] == [
        "## ❌ weighin ch",
        "<?xml version='",
        '{\n "schema": 1,',
    ]
    assert summary.read_text() == "before\n" + files[0].read_text()


def test_a_record_that_was_torn_is_said(good: Path, baseline: Path) -> None:
    with (good / "records.jsonl").open("a") as file:
        file.write('{"torn')
    code, text = typed("check", good, "--baseline", baseline)
    assert code == 0
    assert f"note: {good}/records.jsonl, line 2 is incomplete" in text


def test_what_cannot_be_checked(good: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    run_folder.write_plan(empty, [STREAMING])
    assert typed("check", good) == (
        2,
        'check has neither a baseline file nor a budget to compare the run with\ngive a baseline file, a budget or both: --baseline FILE, --budget "peak_rss <= 8GiB"',
    )
    assert typed("check", good, "--update") == (
        2,
        "--update needs a file to write\nname the baseline file: --baseline baseline.yaml",
    )
    assert typed("check", empty, "--budget", "peak_rss < 1g") == (
        2,
        f"{empty} contains no record: nothing was measured\nmeasure first: weighin bench --resume"
        f" {empty}",
    )
    assert typed("check", tmp_path, "--budget", "peak_rss < 1g") == (
        2,
        f"{tmp_path} contains no records.jsonl, so it is not the folder of a run\nname the folder"
        " that weighin bench printed at its end, such as results/RUN",
    )


def test_what_could_not_be_measured_becomes_no_baseline(tmp_path: Path) -> None:
    result = make_result(STREAMING, outcome=Outcome.MEASUREMENT_FAILED, message="no disk")
    run = run_of(tmp_path / "run", result)
    path = tmp_path / "baseline.yaml"
    assert typed("check", run, "--baseline", path, "--update") == (
        2,
        "gpt2-xl streaming safetensors float32 cpu cold docker ram=8GiB could not be measured: no"
        " disk\nmeasure the run again: a baseline without a figure would accept any value of it",
    )
    assert not path.exists()


def test_cells_of_two_machines_become_no_baseline(tmp_path: Path) -> None:
    other = make_result(make_cell("baseline"), environment={"kernel": "5.4"})
    run = run_of(tmp_path / "run", make_result(STREAMING), other)
    code, text = typed("check", run, "--baseline", tmp_path / "b.yaml", "--update")
    assert code == 2
    assert text == (
        "the cells of one baseline must be comparable, but these cells were measured under different settings (kernel: 5.4 | 6.18.0)\n"
        "measure all cells again on one machine, with the same packages and variables"
    )


def test_a_run_without_a_plan_and_without_records_says_no_way_to_resume(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").touch()
    code, text = typed("check", tmp_path, "--budget", "peak_rss < 1g")
    assert (code, "--resume" in text) == (2, False)
    assert text.startswith(f"{tmp_path} contains no record")


def file_of(folder: Path, head: str, run: Path) -> Path:
    """A baseline file of a run, with these rules of its owner."""
    path = folder / "owned.yaml"
    path.write_text(f"schema: 1\n{head}\n")
    check.update(check.read_runs([run]), path, accept=lambda _: True)
    return path


def test_a_metric_that_is_chosen_is_judged_though_the_file_switches_it_off(
    good: Path, bad: Path, tmp_path: Path
) -> None:
    head = "metrics: {peak_rss: off, anon: {relative: 0.9}}"
    path, measured = file_of(tmp_path, head, good), check.read_runs([bad])
    # The file has no figure of a metric that was off, and its own tolerance of the other one.
    chosen = check.check(measured, path, metrics=["anon", "ready_anon"])
    assert [(line.what, line.verdict.value) for line in chosen.lines if line.metric] == [
        ("ready_anon", "regressed"),
        ("anon (sampled)", "same"),
    ]
    path = file_of(tmp_path, "", good)
    path.write_text(path.read_text().replace("schema: 1", "schema: 1\nmetrics: {peak_rss: off}"))
    assert "peak_rss" not in {line.what for line in check.check(measured, path).lines}
    [line] = check.check(measured, path, metrics=["peak_rss"]).failed
    assert (line.what, line.verdict.value) == ("peak_rss", "regressed")


def test_budgets_and_expectations_of_the_file_and_of_the_command_all_count(
    tmp_path: Path, good: Path
) -> None:
    head = "budgets: [anon <= 9 x model]\nexpect: {gone: timeout}"
    path = file_of(tmp_path, head, good)
    judgement = check.check(
        check.read_runs([good]),
        path,
        extra_budgets=["peak_rss <= 9 x model", "peak_cgroup <= 9 x model"],
        expected=["lost=oom_killed"],
    )
    assert {line.what for line in judgement.lines if line.is_budget} == {
        "anon <= 9 x model",
        "peak_rss <= 9 x model",
        "peak_cgroup <= 9 x model",
    }
    assert sorted(note.split()[1] for note in judgement.notes) == [
        "gone=timeout",
        "lost=oom_killed",
    ]


def test_a_cell_that_could_not_be_measured_and_says_nothing_is_named_by_its_outcome(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", make_result(STREAMING, outcome=Outcome.MEASUREMENT_FAILED))
    code, text = typed("check", run, "--baseline", tmp_path / "b.yaml", "--update")
    assert code == 2
    assert text.splitlines()[0].endswith("could not be measured: measurement_failed")


def test_settings_that_differ_are_named_up_to_three(tmp_path: Path) -> None:
    changed = {"kernel": "5.4", "torch": "1", "cpu": "Z80", "git_commit": "f"}
    other = make_result(make_cell("baseline"), environment=changed)
    run = run_of(tmp_path / "run", make_result(STREAMING), other)
    with pytest.raises(HarnessError) as caught:
        check.update(check.read_runs([run]), tmp_path / "b.yaml", accept=lambda _: True)
    assert caught.value.message.count(" | ") == 3


def test_runs_of_two_machines_are_read_for_each(good: Path, tmp_path: Path) -> None:
    other = make_result(make_cell("baseline"), environment={"cpu": "Z80", "node": {"name": "b"}})
    run = run_of(tmp_path / "two", make_result(STREAMING), other)
    both = check.read_runs([run, good])
    assert (len(both.machines), both.nodes) == (2, ("b",))
    machines = check.read_machines([run, good])
    assert list(machines) == list(both.machines)
    first, second = machines.values()
    assert [[name.split(" ")[1] for name in one.series] for one in (first, second)] == [
        ["streaming"],
        ["baseline"],
    ]
    assert [one.repeats for one in first.series.values()] == [2]
    assert (first.nodes, second.nodes) == ((), ("b",))
