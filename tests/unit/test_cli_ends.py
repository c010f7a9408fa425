"""How a command ends: its exit code, the two lines of an error, and what needs a yes or the end of another run."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import click
import pytest
from factories import make_cell, make_result, mixed_run, run_of
from typed_here import typed

from weighin import doctor, errors, install
from weighin.checkpoint import cache, temporary_folders
from weighin.cli import app as cli
from weighin.cli.measure import broken, exit_code_of
from weighin.errors import ConfigError, HarnessError, Interrupted, IsolationUnavailable, UnknownName
from weighin.isolation.process import CgroupIsolation
from weighin.plan.start import start
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.records import run_folder
from weighin.result import Outcome
from weighin.run import runner
from weighin.settings.definition import check_suite
from weighin.units import GIB

ROOT = Path(__file__).parents[2]
SOUND = [Outcome.OK, Outcome.OOM_KILLED, Outcome.CHILD_KILLED, Outcome.TIMEOUT, Outcome.THRASHING, Outcome.CUDA_OOM, Outcome.SKIPPED]  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (SOUND, 0),
        ([Outcome.OK, Outcome.MEASUREMENT_FAILED], 4),
        ([Outcome.OK, Outcome.WRONG_WEIGHTS], 5),
        ([Outcome.OOM_KILLED, Outcome.STRATEGY_FAILED], 5),
        ([Outcome.OK, Outcome.COMMAND_FAILED], 5),
        ([Outcome.WRONG_WEIGHTS, Outcome.MEASUREMENT_FAILED], 5),
    ],
)
def test_the_exit_code_of_a_run(outcomes: list[Outcome], code: int) -> None:
    results = [make_result(make_cell(f"s{n}"), outcome=one) for n, one in enumerate(outcomes)]
    assert exit_code_of(results) == code


def test_each_broken_strategy_is_named_once_with_its_limit_and_why() -> None:
    wrong = make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs")  # fmt: skip
    lossy = [
        replace(wrong, cell=make_cell("lossy", repeat=repeat, ram_limit_bytes=limit))
        for repeat in range(2)
        for limit in (None, GIB)
    ]
    failed = make_result(make_cell("broken"), outcome=Outcome.STRATEGY_FAILED, message="")
    killed = make_result(make_cell("baseline"), outcome=Outcome.OOM_KILLED)
    assert broken([*lossy, failed, killed]) == [
        "lossy: wrong_weights: 1 tensor differs",
        "lossy under 1GiB: wrong_weights: 1 tensor differs",
        "broken under 8GiB: strategy_failed",
    ]


def test_every_error_has_an_exit_code_that_the_help_and_the_page_explain() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert {k.__name__: k.exit_code for k in kinds if issubclass(k, HarnessError)} == {
        "HarnessError": 2, "ConfigError": 2, "UnknownName": 2, "CheckpointError": 2, "RecordError": 2, "FormatLimit": 2,
        "StillRunning": 4, "IsolationUnavailable": 3, "Interrupted": 130,
    }  # fmt: skip
    codes = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "suites.md").read_text(), re.MULTILINE)
    assert list(map(int, codes)) == list(errors.MEANINGS)
    for verb in ("", "bench", "floor", "check", "doctor"):
        assert errors.EXPLAINED in " ".join(typed(f"{verb} --help")[1].split())


@pytest.mark.parametrize(("holds", "code"), [("yes", 0), ("no", 3)])
def test_without_a_limit_that_holds_the_doctor_exits_with_3(
    holds: Literal["yes", "no"], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = doctor.Capability("isolation cgroup enforces a limit", holds, "a probe was killed")
    monkeypatch.setattr(doctor, "examine", lambda: (limit,))
    assert typed("doctor")[0] == code


Main = Callable[..., tuple[object, str, str]]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Run ``main`` as the console script does; returns the exit code and both outputs."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["weighin", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


ERRORS: list[tuple[HarnessError, int, str]] = [
    (ConfigError("no"), 2, "error: no\n"),
    (ConfigError("no", "do"), 2, "error: no\ndo\n"),
    (IsolationUnavailable("no engine", "start it"), 3, "error: no engine\nstart it\n"),
    (Interrupted("stopped"), 130, "error: stopped\n"),
    (UnknownName("model", "gpt", ["gpt2"]), 2, "error: no model is called 'gpt'\ndid you mean 'gpt2'? known: gpt2\n"),
    (HarnessError("[bold]x[/] :smile:", "[y]"), 2, "error: [bold]x[/] :smile:\n[y]\n"),
    (HarnessError("a " * 100, "b " * 100), 2, f"error: {'a ' * 100}\n{'b ' * 100}\n"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "code", "text"), ERRORS, ids=range(len(ERRORS)))
def test_an_error_is_two_lines_and_an_exit_code(
    error: HarnessError, code: int, text: str, ended: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def verb() -> None:
        raise error

    monkeypatch.setattr(cli, "app", verb)
    assert ended() == (code, "", text)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ModuleNotFoundError("No module named 'peft'", name="peft"), "the Python package peft: No module named 'peft'"),
        (ImportError("libx.so.1: cannot open"), "a Python package: libx.so.1: cannot open"),
    ],
    ids=["missing", "broken"],
)  # fmt: skip
def test_a_package_that_is_missing_or_broken_is_named(error: ImportError, fault: str) -> None:
    with pytest.raises(ConfigError) as caught, errors.extra("hf", "--adapter a"):
        raise error
    assert caught.value.message == f"--adapter a needs {fault}"
    assert caught.value.repair == install.command("hf")


def test_what_is_whole_of_a_damaged_run_is_reported(ended: Main, tmp_path: Path) -> None:
    records = run_of(tmp_path, *mixed_run()[:3]) / run_folder.RECORDS
    first, second, third = records.read_text().splitlines()
    edited = json.dumps(json.loads(second) | {"outcome": "okay"})
    records.write_text("\n".join([first, edited, third, '{"schema": 99}', '{"sch']))
    code, _, said = ended("report", str(tmp_path), "--format", "md,html,csv")
    unknown = "Invalid enum value 'okay' - at `$.outcome`"
    torn, *rest = said.splitlines()
    assert code == 2
    assert torn.startswith(f"note: {records}, line 5 is incomplete")
    assert rest == [
        f"note: {records}, line 2: {unknown}: this line is left out, and 1 more",
        f"error: {records}, line 2: {unknown}",
        f"delete the line and repeat its measurement: sed -i 2d {records} && weighin bench --resume {tmp_path}",
    ]
    for name in ("report.md", "report.html"):
        report = (tmp_path / name).read_text()
        assert "streaming" in report and "timeout" in report and "okay" in report
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 3


BOTH = ["gpt2-tiny-0123abcd", "tied-tiny-0123abcd"]


@pytest.fixture
def _cached(here: Path) -> None:
    for name, size in zip(BOTH, (3000, 1000), strict=True):
        folder = temporary_folders.folder() / "models" / name
        (folder / "pt").mkdir(parents=True)
        (folder / "pt" / "model.pt").write_bytes(bytes(size))
        cache.write_marker(folder, "pt")


def names() -> list[str]:
    return sorted(stored["name"] for stored in cache.list_entries())


@pytest.mark.parametrize(
    ("answer", "line", "question", "code", "said", "left"),
    [
        (True, "", "Delete 2 entries (3.906 KiB)?", 0, "deleted 2 entries, freed 3.906 KiB\n", []),
        (False, "tied-tiny", "Delete 1 entry (1000 B)?", 1, "note: nothing was deleted\n", BOTH),
    ],
    ids=["yes", "no"],
)  # fmt: skip
@pytest.mark.usefixtures("_cached")
def test_on_a_terminal_the_answer_decides_what_is_deleted(
    answer: bool, line: str, question: str, code: int, said: str, left: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(click, "confirm", confirm := Mock(return_value=answer))
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda _: True, raising=False)
    found, text = typed(f"cache clear {line}")
    assert (found, names()) == (code, left)
    assert text.endswith(said)
    confirm.assert_called_once()
    assert confirm.call_args.args == (question,)


@pytest.mark.usefixtures("_cached")
def test_with_yes_nothing_is_asked() -> None:
    deleted = "deleted 1 entry, freed 2.930 KiB\n"
    assert typed("cache clear gpt2-tiny --yes") == (0, deleted)
    assert names() == BOTH[1:]
    typed("cache clear -y")
    assert typed("cache clear") == (0, "deleted 0 entries, freed 0 B\n")


LINES = (
    "bench gpt2-tiny --isolation process --out new",
    "floor gpt2-tiny --isolation cgroup --out new",
    "bench --resume run",
)


@pytest.fixture
def _planned(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run to resume, on a machine that passes for one with cgroups."""
    monkeypatch.setattr(CgroupIsolation, "check", lambda _: None)
    start(check_suite({"models": "gpt2-tiny", "isolation": "process"}), Path("run"))


@pytest.mark.usefixtures("_planned")
def test_a_run_waits_for_another_ones_end_if_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    only_run = Mock(side_effect=HarnessError("another run", exit_code=4))
    monkeypatch.setattr(runner, "only_run", only_run)
    for line in LINES:
        for words in (line, f"{line} --set wait=true"):
            assert typed(words)[0] == 4
    assert [call.args[0] > 0 for call in only_run.call_args_list] == [False, True] * len(LINES)


@pytest.mark.usefixtures("_planned")
def test_a_second_run_ends_with_4_and_leaves_no_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(here / "lock"))
    with runner.only_run():
        assert [typed(line)[0] for line in LINES] == [4, 4, 4]
    assert {path.name for path in here.iterdir()} == {"cache", "run"}
