"""What a run's files name is run only where it is ours, or the user trusts it."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from weighin.checkpoint import staging
from weighin.errors import ConfigError, Interrupted
from weighin.plan import start as plans
from weighin.plan.start import resume, start
from weighin.plan.task import Progress, Run
from weighin.probes import environment
from weighin.run import runner
from weighin.settings.definition import check_suite
from weighin.suite import registry
from weighin.units import GIB

LOAD = '"""Load."""\n\ndef load(job): ...\n'


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


def variable(plan: dict[str, Any]) -> None:
    plan["cells"][0]["environment"] = {"LD_PRELOAD": "/evil.so", "MALLOC_ARENA_MAX": "2"}


def mount(plan: dict[str, Any]) -> None:
    plan["settings"]["mounts"] = ["/etc"]


def cluster(plan: dict[str, Any]) -> None:
    plan["settings"]["engine"] = {"name": "ray", "address": "ray://evil:10001", "labels": {}}


def image(plan: dict[str, Any]) -> None:
    plan["settings"] |= {"image": "evil", "mounts": [""], "engine": {"name": "ray", "address": ""}}


def folder(plan: dict[str, Any]) -> None:
    Path("lib").mkdir(exist_ok=True)
    Path("lib/evil.py").touch()
    plan["settings"]["python_path"] = [str(Path("lib").resolve())]
    plan["cells"][0]["model"] |= {"builder": "evil:build", "kwargs": {}}


def shown(here: Path) -> dict[Callable[[dict[str, Any]], None], str]:
    return {
        builder: 'builder os:system with {"command": "touch \\u001b[2Jowned"}',
        strategy: f"strategy {here}/mine.py",
        variable: "environment LD_PRELOAD=/evil.so; environment MALLOC_ARENA_MAX=2",
        mount: "mount /etc",
        cluster: "Ray cluster ray://evil:10001",
        image: "image evil",
        folder: f"builder evil:build with {{}}; folder of modules {here}/lib",
    }


@pytest.mark.parametrize("change", [builder, strategy, variable, mount, cluster, image, folder])
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


@pytest.mark.parametrize("operation", ["load", "save"])
def test_what_is_ours_needs_no_trust(operation: str) -> None:
    planned(operation=operation, strategies="all", models=["gpt2-tiny", "tied-tiny"])
    assert resume(Path("run")).planned


@pytest.mark.parametrize("builder", ["weighin.models.stack:nn", "weighin.stream.construct:os"])
def test_a_function_of_our_package_that_is_no_model_is_foreign(builder: str) -> None:
    planned()
    forge(lambda plan: plan["cells"][0]["model"].update(builder=builder))
    with pytest.raises(ConfigError, match=f"builder {re.escape(builder)} with"):
        resume(Path("run"))


def test_each_file_of_a_model_is_read_once_for_all_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(repeats=3)
    forge(lambda plan: plan.update(note="changed"))
    monkeypatch.setattr(registry, "read_model", read := Mock(wraps=registry.read_model))
    assert len(resume(Path("run")).planned) == 3
    assert read.call_count == len(registry.models())


def own_run(**options: Any) -> Run:
    """Plan a run of a strategy of one's own."""
    Path("mine.py").write_text(LOAD)
    suite = {"models": "gpt2-tiny", "strategies": "mine.py", "isolation": "process"} | options
    return start(check_suite(suite), Path("run"))[0]


def known_plans() -> Path:
    return staging.folder() / "plans.sha256"


@pytest.fixture
def _empty_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(here / "cache"))


def refused() -> bool:
    with pytest.raises(ConfigError, match="names code that is not part of weighin"):
        resume(Path("run"))
    return True


@pytest.mark.usefixtures("_empty_cache")
def test_ones_own_plan_needs_no_trust_until_somebody_changes_it() -> None:
    task = own_run()
    assert resume(Path("run")).planned == task.planned
    Path("run").rename("moved")
    assert resume(Path("moved")).planned == task.planned
    Path("moved").rename("run")
    forge(lambda plan: plan["cells"][0]["model"].update(name="x"))
    assert refused()


@pytest.mark.usefixtures("_empty_cache")
def test_a_plan_whose_digest_is_gone_or_is_that_of_another_plan_needs_trust() -> None:
    own_run()
    known = known_plans()
    digest = known.read_text()
    known.write_text("0" * 64 + "\n")
    assert refused()
    known.write_text("0" * 30 + digest)  # the disk was full when another digest was written
    assert resume(Path("run"))
    known.write_text(f"{digest}some other file of ours\n")
    assert refused()
    known.unlink()
    assert refused()


def through_a_link(known: Path) -> None:
    known.rename(moved := known.with_name("notes"))
    known.symlink_to(moved)


def under_two_names(known: Path) -> None:
    known.with_name("notes").hardlink_to(known)


def in_a_file_of_the_group(known: Path) -> None:
    known.chmod(0o660)


def in_a_pipe(known: Path) -> None:
    known.unlink()
    os.mkfifo(known)


@pytest.mark.usefixtures("_empty_cache")
@pytest.mark.parametrize(
    "put", [through_a_link, under_two_names, in_a_file_of_the_group, in_a_pipe]
)
def test_a_digest_that_another_user_could_have_put_there_is_not_ours(
    put: Callable[[Path], None],
) -> None:
    own_run()
    put(known_plans())
    assert refused()
    plans.remember(b"another")
    assert not plans.is_ours(b"another")


def stopped(task: Run) -> str:
    with pytest.raises(Interrupted) as caught, runner.resumable("bench", task):
        raise Interrupted("stopped")
    return caught.value.repair


def test_a_stopped_run_says_whether_it_wants_trust(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(here / "cache"))
    assert stopped(own_run()) == "resume it: weighin bench --resume run"
    (Path("run") / "plan.json").unlink()
    Path("no folder").touch()
    monkeypatch.setenv("WEIGHIN_CACHE", str(here / "no folder"))
    assert stopped(own_run()) == "resume it: weighin bench --resume run --trust"


def test_storage_moves_the_cache_only_while_its_run_measures(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(here / "cache"))
    task = own_run(storage="elsewhere")
    runner.run(replace(task, planned=[replace(task.planned[0], skip="too long")]), Progress())
    assert staging.folder() == here / "cache"
    assert stopped(task) == "resume it: weighin bench --resume run"
