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
        "did you mean 'html'? known: bmf, csv, gha, html, md, parquet, png, svg\n",
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
    unknown = "Invalid enum value 'okay' - at `$.outcome`"
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
