"""What a run's files name is run only where it is ours, or the user trusts it."""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import make_result

from weighin.errors import ConfigError, Interrupted
from weighin.plan.start import restore, resume, start
from weighin.predict import check
from weighin.probes import environment
from weighin.records import run_folder
from weighin.run import floor_search, resuming
from weighin.settings.reading import check_suite
from weighin.units import GIB

LOAD = '"""Load."""\n\ndef load(job): ...\n'
MINE = hashlib.sha256(LOAD.encode()).hexdigest()[:16]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    return tmp_path


def planned(**suite: Any) -> Path:
    """Plan a run of our own code, and return its folder."""
    options = {"models": "gpt2-tiny", "strategies": "baseline", "isolation": "process"} | suite
    start(check_suite(options), Path("run"))
    return Path("run")


def forge(change: Callable[[dict[str, Any]], None]) -> None:
    """Change a plan as somebody else may have done before handing it on."""
    path = Path("run/plan.json")
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))


def builder(plan: dict[str, Any]) -> None:
    spec = {"builder": "os:system", "kwargs": {"command": "touch \x1b[2Jowned"}}
    plan["cells"][0]["model"] |= spec


def strategy(plan: dict[str, Any]) -> None:
    Path("mine.py").write_text(LOAD)
    plan["settings"]["strategy_paths"]["baseline"] = str(Path("mine.py").resolve())


def base(plan: dict[str, Any]) -> None:
    plan["cells"][0]["isolation"] = "docker"
    plan["settings"]["base_image"] = "evil:1"


def variable(plan: dict[str, Any]) -> None:
    plan["cells"][0]["environment"] = {"LD_PRELOAD": "/evil.so", "MALLOC_ARENA_MAX": "2"}


def mount(plan: dict[str, Any]) -> None:
    plan["settings"]["mounts"] = ["/etc"]


def folder(plan: dict[str, Any]) -> None:
    Path("lib").mkdir(exist_ok=True)
    Path("lib/evil.py").touch()
    plan["settings"]["python_path"] = [str(Path("lib").resolve())]
    plan["cells"][0]["model"] |= {"builder": "evil:build", "kwargs": {}}


def shown(here: Path) -> dict[Callable[[dict[str, Any]], None], str]:
    return {
        builder: 'builder os:system with {"command": "touch \\u001b[2Jowned"}',
        strategy: f"strategy {here}/mine.py (sha256 {MINE})",
        base: "base image evil:1",
        variable: "environment LD_PRELOAD=/evil.so",
        mount: "mount /etc",
        folder: f"builder evil:build in {here}/lib/evil.py with {{}}",
    }


@pytest.mark.parametrize("change", [builder, strategy, base, variable, mount, folder])
def test_foreign_code_of_a_plan_is_shown_and_not_run_without_trust(
    here: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    planned()
    forge(change)
    with pytest.raises(ConfigError) as caught:
        resume(Path("run"))
    assert str(caught.value) == (
        "run/plan.json names code that is not part of weighin and would run here:"
        f" {shown(here)[change]}\n"
        "read that code; if you trust it: weighin bench --resume run --trust; or start a new run"
    )
    assert len(resume(Path("run"), trusted=True).planned) == 1


def test_a_search_for_floors_asks_for_trust_with_its_own_verb() -> None:
    planned()
    forge(builder)
    forge(lambda plan: plan["settings"].update(within=0.01))
    with pytest.raises(ConfigError, match="weighin floor --resume run --trust"):
        floor_search.resume(Path("run"))
    assert floor_search.resume(Path("run"), trusted=True).within == 0.01


@pytest.mark.parametrize("operation", ["load", "save"])
def test_what_is_ours_needs_no_trust(operation: str) -> None:
    planned(operation=operation, strategies="all", models=["gpt2-tiny", "tied-tiny"])
    assert resume(Path("run")).planned


@pytest.mark.parametrize("builder", ["weighin.models.stack:nn", "weighin.construction.skeleton:os"])
def test_a_function_of_our_package_that_is_no_model_is_foreign(builder: str) -> None:
    planned()
    forge(lambda plan: plan["cells"][0]["model"].update(builder=builder))
    with pytest.raises(ConfigError, match=f"builder {re.escape(builder)} with"):
        resume(Path("run"))


def test_a_strategy_that_is_a_pipe_or_gone_is_named_and_not_read(here: Path) -> None:
    import os

    os.mkfifo("pipe.py")
    planned()
    for name, what in (("pipe.py", "not a strategy"), ("gone.py", "no such file")):
        forge(lambda plan, at=name: plan["settings"]["strategy_paths"].update(baseline=at))  # type: ignore[misc]
        with pytest.raises(ConfigError, match=rf"strategy {name} \({what}\)"):
            resume(Path("run"))


def test_a_check_of_predictions_runs_nothing_foreign_without_trust(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    forge(strategy)
    run_folder.append(Path("run"), make_result(restore(Path("run"), trusted=True).planned[0].cell))
    with pytest.raises(ConfigError) as caught:
        check.check(Path("run"))
    assert caught.value.message == (
        f"run names code that is not part of weighin and would run here: {shown(here)[strategy]}"
    )
    assert caught.value.repair == (
        "read that code; if you trust it: weighin predict --check run --trust; or predict the model itself"
    )
    monkeypatch.setattr(check, "predict", lambda *_, **__: [])
    with pytest.raises(KeyError):  # what was to be run was asked for; it gave no prediction
        check.check(Path("run"), trusted=True)


def test_a_folder_of_a_plan_hides_no_module_of_ours(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    forge(lambda plan: plan["settings"].update(python_path=[str(here)]))
    run = restore(Path("run"))
    run_folder.append(Path("run"), make_result(run.planned[0].cell))
    used: list[Any] = []
    monkeypatch.setattr(check, "predict", lambda *_, python_path, **__: used.append(python_path))
    with pytest.raises(TypeError):  # there are no predictions
        check.check(Path("run"))
    assert used == [()]


def test_a_stopped_run_with_code_of_ones_own_says_that_it_wants_trust() -> None:
    Path("mine.py").write_text(LOAD)
    suite = {"models": "gpt2-tiny", "strategies": "mine.py", "isolation": "process"}
    task, _ = start(check_suite(suite), Path("run"))
    with pytest.raises(Interrupted) as caught, resuming.resumable("bench", task):
        raise Interrupted("stopped")
    assert caught.value.repair == "resume it: weighin bench --resume run --trust"
