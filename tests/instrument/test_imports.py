"""The measuring code weighs little, and the worker imports nothing of the parent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest
from cells import CACHE, KIB, MANIFEST, MIB, WORKER, Bench, Outcome, Watched
from nightly import isolations

ROOT = Path(__file__).resolve().parents[2]
OF_REPORTS = {"pandas", "matplotlib"}
OF_THE_PARENT = {"docker", "yaml", "psutil", "rich", "pydantic", "msgspec", "click", "filelock"}
HEAVY = OF_REPORTS | OF_THE_PARENT | {"importlib.metadata"}

MEASURED = """
import sys
{statement}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["VmHWM"].split()[0], *sorted(sys.modules))
"""


def imported_by(statement: str) -> tuple[int, set[str]]:
    """Return the peak RSS of a fresh interpreter, in bytes, and the modules that it has then."""
    command = [sys.executable, "-P", "-c", MEASURED.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    peak_kib, *modules = done.stdout.rpartition("\0")[2].split()
    return int(peak_kib) * KIB, set(modules)


def imported_by_command(*words: str) -> set[str]:
    """Return the modules that a command of weighin has when it ends."""
    _, modules = imported_by(f"""
import runpy
sys.argv = ["weighin", *{words!r}]
try:
    runpy.run_module("weighin", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
sys.stdout.write(chr(0))
""")
    return modules


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join((str(ROOT / "harness"), str(ROOT)))  # as an isolation starts its worker
    monkeypatch.setenv("PYTHONPATH", path)


def test_what_the_worker_imports_before_torch_is_below_6_mib() -> None:
    bare = median(imported_by("pass")[0] for _ in range(3))
    worker = [imported_by(f"import {WORKER}") for _ in range(3)]
    assert median(peak for peak, _ in worker) - bare < 6 * MIB
    (_, modules), *_ = worker
    assert modules & (HEAVY | {"torch", "numpy"}) == set()


@pytest.mark.parametrize("isolation", isolations("process", "docker"), indirect=True)
def test_a_whole_worker_imports_nothing_of_the_parent(bench: Bench, isolation: Watched) -> None:
    ours = HEAVY - {"importlib.metadata"}  # that one torch imports itself
    result = bench("looks", isolation, unwanted=sorted(ours))
    assert (result.outcome, result.message) == (Outcome.OK, "")


def test_the_tests_own_check_of_modules_finds_them(bench: Bench, process: Watched) -> None:
    result = bench("looks", process, unwanted=["json", "torch.nn"])
    assert result.outcome is Outcome.STRATEGY_FAILED
    assert result.message.startswith("ImportError: in the measured process: json, torch.nn (")


VERBS = ("list strategies", "list models", "list all", "list suites", "cache list", "--version")
MODULES = (CACHE, "weighin.doctor", "weighin.records.explanation", "weighin.suite.registry")
SLOW = OF_REPORTS | {"torch", "numpy", "docker"}


@pytest.mark.parametrize("verb", VERBS)
def test_the_light_verbs_import_nothing_heavy(verb: str) -> None:
    assert imported_by_command(*verb.split()) & SLOW == set()


@pytest.mark.parametrize("module", MODULES)
def test_the_parent_imports_no_torch(module: str) -> None:
    assert imported_by(f"import {module}")[1] & SLOW == set()


def test_a_report_without_pictures_imports_neither_pandas_nor_matplotlib(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ROOT / "tests/integration/fixtures/gpt2-xl-8GiB", run)
    modules = imported_by_command("report", str(run), "--format", "md,csv,bmf,gha")
    assert modules & OF_REPORTS == set()


def test_reading_a_manifest_before_the_baseline_imports_nothing_that_a_strategy_pays_for() -> None:
    _, modules = imported_by(f"import {MANIFEST}")
    ours = {name for name in modules if name.startswith(("weighin.checkpoint.", "weighin.stream."))}
    assert ours == {MANIFEST, "weighin.stream.slices"}
