"""What the command line says of what cannot be done: two lines, a repair in the second, and an exit code."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from factories import mixed_run

from weighin.cli import app as cli
from weighin.errors import ConfigError, HarnessError, Interrupted, IsolationUnavailable, UnknownName
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
    torn, wrong, *error = text.splitlines()
    assert torn.startswith(f"note: {records}, line 5 is incomplete")
    unknown = "Invalid enum value 'okay' - at `$.outcome`"
    assert wrong == f"note: {records}, line 2: {unknown}: this line is left out, and 1 more"
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
