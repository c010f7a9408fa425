"""What the command line says of what cannot be done: two lines, a repair in the second, and an exit code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from factories import make_result, mixed_run

from weighin.cli import app as cli
from weighin.errors import ConfigError, HarnessError, Interrupted, IsolationUnavailable, UnknownName
from weighin.isolation.docker import DockerIsolation
from weighin.records import run_folder
from weighin.result import Outcome


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str]]:
    """Run ``main`` as the console script does; returns the exit code and standard error."""

    def run(*arguments: str, shown: bool = False) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["weighin", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        said = capsys.readouterr()
        assert shown or said.out == ""
        return caught.value.code, said.err

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("no"), 2, "error: no\n"),
        (ConfigError("no", "do"), 2, "error: no\ndo\n"),
        (IsolationUnavailable("no engine", "start it"), 3, "error: no engine\nstart it\n"),
        (Interrupted("stopped"), 130, "error: stopped\n"),
        (
            UnknownName("model", "gpt", ["gpt2"]),
            2,
            "error: no model is called 'gpt'\ndid you mean 'gpt2'? known: gpt2\n",
        ),
        (HarnessError("[bold]x[/] :smile:", "[y]"), 2, "error: [bold]x[/] :smile:\n[y]\n"),
        (HarnessError("a " * 100, "b " * 100), 2, f"error: {'a ' * 100}\n{'b ' * 100}\n"),
    ],
)
def test_an_error_is_two_lines_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[object, str]],
    error: HarnessError,
    code: int,
    text: str,
) -> None:
    @click.command()
    def verb() -> None:
        raise error

    monkeypatch.setattr(cli, "app", verb)
    assert run() == (code, text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("gpt2-xl", "--model", "b"), "two models are given in place of one: 'gpt2-xl' and 'b'\ngive one of the two models, or list both models in a suite file: --suite FILE"),
        (
            ("--kwargs", "{width: 64}"),
            "--kwargs is not JSON: Expecting property name enclosed in double quotes:"
            " line 1 column 2 (char 1)\nwrite --kwargs '{\"width\": 64}'",
        ),
        (("--kwargs", "[1]"), "--kwargs is not a JSON object\nwrite --kwargs '{\"width\": 64}'"),
        (("--ram", "8GB"), "--ram: '8GB' is ambiguous: GB is 1000-based for some tools and 1024-based for others\nwrite 8GiB (1024-based), or the number of bytes"),
        (("--device", "gpu"), "--device: 'gpu' is not a device\nwrite cpu, cuda or cuda:1"),
        (("--timeout", "0"), "--timeout: input should be greater than 0, got 0.0"),
        (("--suite", "gone.yaml"), "cannot read gone.yaml: No such file or directory"),
        (("--resume", "gone"), "gone contains no plan.json, so it is not the folder of a run\nname the folder that weighin bench printed at its end, such as results/RUN"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(
    run: Callable[..., tuple[object, str]], arguments: tuple[str, ...], text: str
) -> None:
    assert run("bench", *arguments) == (2, f"error: {text}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ("gpt2-xl", "--suite", "x.yaml", "--ram", "8g", "-s", "baseline"),
            "a suite sets all models and limits: MODEL, --ram, --strategies would be ignored\nwrite"
            " these settings into the suite file, or leave --suite out",
        ),
        (
            ("--resume", "run", "--repeats", "3", "--suite", "x.yaml"),
            "a resumed run keeps its settings: --repeats, --suite would be ignored\n"
            "leave these options out, or start a new run without --resume",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    run: Callable[..., tuple[object, str]], arguments: tuple[str, ...], text: str
) -> None:
    assert run("bench", *arguments) == (2, f"error: {text}\n")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--within", "x"), "--within: cannot read 'x' as a share\nwrite a percentage, such as --within 1%"),
        (("--within", "0%"), "--within 0% is not between 0% and 10%\nwrite a percentage in this range, such as --within 1%"),
        (("--within", "30%"), "--within 30% is not between 0% and 10%\nwrite a percentage in this range, such as --within 1%"),
        (("--resume", "gone"), "gone contains no plan.json, so it is not the folder of a run\nname the folder that weighin bench printed at its end, such as results/RUN"),
        (("--resume", "run", "gpt2-xl", "--within", "2%"), "a resumed run keeps its settings: MODEL, --within would be ignored\nleave these options out, or start a new run without --resume"),
    ],
)  # fmt: skip
def test_options_of_a_floor_that_cannot_be_used(
    run: Callable[..., tuple[object, str]], arguments: tuple[str, ...], text: str
) -> None:
    assert run("floor", *arguments) == (2, f"error: {text}\n")


def test_a_floor_needs_an_isolation_that_can_enforce_a_limit(
    run: Callable[..., tuple[object, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DockerIsolation, "check", lambda _: None)
    assert run("floor", "--isolation", "process") == (
        3,
        "error: --isolation process cannot enforce a RAM limit\nuse --isolation docker; without a"
        " RAM limit, these work: weighin recommend, predict, and bench without --ram\n",
    )


def test_an_unknown_list(run: Callable[..., tuple[object, str]]) -> None:
    assert run("list", "model") == (
        2,
        "error: no list is called 'model'\n"
        "did you mean 'models'? known: all, isolations, models, strategies, suites, uses\n",
    )


def test_the_folder_of_a_report_that_is_no_run(run: Callable[..., tuple[object, str]]) -> None:
    assert run("report", "gone") == (
        2,
        "error: gone contains no records.jsonl, so it is not the folder of a run\nname the folder"
        " that weighin bench printed at its end, such as results/RUN\n",
    )


def test_formats_and_metrics_that_do_not_exist(
    run: Callable[..., tuple[object, str]], tmp_path: Path
) -> None:
    run_folder.append(tmp_path, make_result())
    code, text = run("report", str(tmp_path), "--format", "md,htm", shown=True)
    assert (code, text) == (
        2,
        "error: no format is called 'htm'\n"
        "did you mean 'html'? known: bmf, csv, gha, html, md, openmetrics, parquet, png, svg\n",
    )
    code, text = run("history", str(tmp_path), "--metric", "peak_rs")
    assert code == 2
    assert text.startswith("error: no metric is called 'peak_rs'\ndid you mean 'peak_rss'? known:")
    assert not list(tmp_path.glob("report.*"))


def test_what_is_whole_of_a_damaged_run_is_reported(
    run: Callable[..., tuple[object, str]], tmp_path: Path
) -> None:
    for result in mixed_run()[:3]:
        run_folder.append(tmp_path, result)
    records = tmp_path / run_folder.RECORDS
    first, second, third = records.read_text().splitlines()
    edited = json.loads(second) | {"outcome": "okay"}
    records.write_text("\n".join([first, json.dumps(edited), third, '{"schema": 99}', '{"sch']))
    code, text = run("report", str(tmp_path), "--format", "md,html,csv", shown=True)
    torn, wrong, newer, *error = text.splitlines()
    assert torn.startswith(f"note: {records}, line 5 is incomplete")
    unknown = f"outcome: unknown value 'okay'; known values: {', '.join(Outcome)}"
    assert wrong == f"note: {records}, line 2: {unknown}: this line is left out"
    assert newer == (
        f"note: {records}, line 4: written by a newer weighin (schema 99; this version reads up to 1):"
        " this line is left out"
    )
    assert code == 2
    assert error == [
        f"error: {records}, line 2: {unknown}",
        f"delete the line and repeat its measurement: sed -i 2d {records} && weighin bench --resume"
        f" {tmp_path}",
    ]
    for name in ("report.md", "report.html"):
        report = (tmp_path / name).read_text()
        assert "streaming" in report
        assert "timeout" in report
        assert "okay" in report
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 3


def test_a_run_of_which_nothing_is_whole(
    run: Callable[..., tuple[object, str]], tmp_path: Path
) -> None:
    (tmp_path / run_folder.RECORDS).write_text('{"schema": 99}\n')
    assert run("report", str(tmp_path)) == (
        2,
        f"error: {tmp_path / run_folder.RECORDS}, line 1: written by a newer weighin (schema 99; this"
        " version reads up to 1)\npip install --upgrade 'weighin @ git+URL', where URL is the"
        " address of weighin's repository\n",
    )
