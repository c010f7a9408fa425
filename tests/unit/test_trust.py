"""What a run's files name is run only where it is ours, or the user trusts it."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from factories import refused
from pytest import MonkeyPatch

from weighin.checkpoint import temporary_folders
from weighin.errors import Interrupted
from weighin.plan import start as plans
from weighin.plan.start import resume, start
from weighin.plan.task import Progress, Run
from weighin.probes import environment
from weighin.run import runner
from weighin.settings.definition import check_suite
from weighin.suite import registry
from weighin.units import GIB

Change = Callable[[dict[str, Any]], object]
LOAD = '"""Load."""\n\ndef load(job): ...\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    return tmp_path


def planned(**suite: Any) -> Path:
    """Plan a run of our own code, and return its folder."""
    options = {"models": "gpt2-tiny", "strategies": "baseline", "isolation": "process"} | suite
    start(check_suite(options), Path("run"))
    return Path("run")


def forge(change: Change) -> None:
    """Change a plan as somebody else may have done before handing it on."""
    path = Path("run/plan.json")
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))


def model(plan: dict[str, Any], builder: str, kwargs: dict[str, Any]) -> None:
    plan["cells"][0]["model"] |= {"builder": builder, "kwargs": kwargs}


def evil_folder(plan: dict[str, Any]) -> None:
    plan["settings"]["python_path"] = [f"{Path.cwd()}/lib"]
    model(plan, "evil:build", {})


def setting(**changes: Any) -> Change:
    return lambda plan: plan["settings"].update(changes)


EVIL = {"name": "ray", "address": "ray://evil:10001", "labels": {}}
RAY = {"name": "ray", "address": ""}
VARIABLES = {"LD_PRELOAD": "/evil.so", "MALLOC_ARENA_MAX": "2"}
FORGED: dict[str, tuple[Change, str]] = {
    "builder": (lambda plan: model(plan, "os:system", {"command": "touch \x1b[2Jowned"}),
                'builder os:system with {"command": "touch \\u001b[2Jowned"}'),
    "builder of ours": (lambda plan: model(plan, "weighin.models.stack:nn", {}), "builder weighin.models.stack:nn with {}"),
    "builder of a module": (lambda plan: model(plan, "weighin.stream.construct:os", {}), "builder weighin.stream.construct:os with {}"),
    "strategy": (lambda plan: plan["settings"].update(strategy_paths={"baseline": f"{Path.cwd()}/mine.py"}), "strategy HERE/mine.py"),
    "variable": (lambda plan: plan["cells"][0].update(environment=VARIABLES),
                 "environment LD_PRELOAD=/evil.so; environment MALLOC_ARENA_MAX=2"),
    "mount": (setting(mounts=["/etc"]), "mount /etc"),
    "cluster": (setting(engine=EVIL), "Ray cluster ray://evil:10001"),
    "image": (setting(image="evil", mounts=[""], engine=RAY), "image evil"),
    "folder": (evil_folder, "builder evil:build with {}; folder of modules HERE/lib"),
}  # fmt: skip
"""What somebody else may have put into a plan, and what is then shown."""


@pytest.mark.parametrize("name", FORGED)
def test_foreign_code_of_a_plan_is_shown_and_not_run_without_trust(here: Path, name: str) -> None:
    (here / "mine.py").write_text(LOAD)
    (here / "lib").mkdir()
    (here / "lib/evil.py").touch()
    change, shown = FORGED[name]
    planned()
    forge(change)
    assert refused(resume, Path("run")).replace(str(here), "HERE") == (
        f"run/plan.json names code that is not part of weighin and would run here: {shown}\n"
        "read that code; if you trust it: weighin bench --resume run --trust; or start a new run"
    )
    if not name.startswith("builder of"):
        assert len(resume(Path("run"), trusted=True).planned) == 1


@pytest.mark.parametrize("operation", ["load", "save"])
def test_what_is_ours_needs_no_trust(operation: str) -> None:
    planned(operation=operation, strategies="all", models=["gpt2-tiny", "tied-tiny"])
    assert resume(Path("run")).planned


def test_each_file_of_a_model_is_read_once_for_all_cells(monkeypatch: MonkeyPatch) -> None:
    planned(repeats=3)
    forge(lambda plan: plan.update(note="changed"))
    monkeypatch.setattr(registry, "read_model", read := Mock(wraps=registry.read_model))
    assert len(resume(Path("run")).planned) == 3
    assert read.call_count == len(registry.files("models"))


def own_run(**options: Any) -> Run:
    """Plan a run of a strategy of one's own."""
    Path("mine.py").write_text(LOAD)
    suite = {"models": "gpt2-tiny", "strategies": "mine.py", "isolation": "process"} | options
    return start(check_suite(suite), Path("run"))[0]


def known_plans() -> Path:
    return temporary_folders.folder() / "plans.sha256"


def needs_trust() -> bool:
    return "names code that is not part of weighin" in refused(resume, Path("run"))


def test_ones_own_plan_needs_no_trust_until_somebody_changes_it() -> None:
    task = own_run()
    assert resume(Path("run")).planned == task.planned
    Path("run").rename("moved")
    assert resume(Path("moved")).planned == task.planned
    Path("moved").rename("run")
    forge(lambda plan: plan["cells"][0]["model"].update(name="x"))
    assert needs_trust()


def test_a_plan_whose_digest_is_gone_or_is_that_of_another_plan_needs_trust() -> None:
    own_run()
    known = known_plans()
    digest = known.read_text()
    known.write_text("0" * 64 + "\n")
    assert needs_trust()
    known.write_text("0" * 30 + digest)  # the disk was full when another digest was written
    assert resume(Path("run"))
    known.write_text(f"{digest}some other file of ours\n")
    assert needs_trust()
    known.unlink()
    assert needs_trust()


def in_a_pipe(known: Path) -> None:
    known.unlink()
    os.mkfifo(known)


PUT: dict[str, Callable[[Path], object]] = {
    "through a link": lambda known: known.symlink_to(known.rename(known.with_name("notes"))),
    "under two names": lambda known: known.with_name("notes").hardlink_to(known),
    "in a file of the group": lambda known: known.chmod(0o660),
    "in a pipe": in_a_pipe,
}


@pytest.mark.parametrize("way", PUT)
def test_a_digest_that_another_user_could_have_put_there_is_not_ours(way: str) -> None:
    own_run()
    PUT[way](known_plans())
    assert needs_trust()
    plans.remember(b"another")
    assert not plans.is_ours(b"another")


def stopped(task: Run) -> str:
    with pytest.raises(Interrupted) as caught, runner.resumable("bench", task):
        raise Interrupted("stopped")
    return caught.value.repair


def test_a_stopped_run_says_whether_it_wants_trust(here: Path, monkeypatch: MonkeyPatch) -> None:
    assert stopped(own_run()) == "resume it: weighin bench --resume run"
    (Path("run") / "plan.json").unlink()
    Path("no folder").touch()
    monkeypatch.setenv("WEIGHIN_CACHE", str(here / "no folder"))
    assert stopped(own_run()) == "resume it: weighin bench --resume run --trust"


def test_storage_moves_the_cache_only_while_its_run_measures(here: Path) -> None:
    task = own_run(storage="elsewhere")
    runner.run(replace(task, planned=[replace(task.planned[0], skip="too long")]), Progress())
    assert temporary_folders.folder() == here / "cache"
    assert stopped(task) == "resume it: weighin bench --resume run"
