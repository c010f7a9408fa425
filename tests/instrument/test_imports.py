"""The measuring code weighs little, and each part of it imports only what is its own."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from cells import Bench, Watched

import weighin
from weighin.record import Outcome
from weighin.units import KIB, MIB

ROOT = Path(weighin.__file__).resolve().parents[1]
CHECKOUT = Path(__file__).resolve().parents[2]
OF_REPORTS = {"pandas", "matplotlib"}
OF_THE_PARENT = {"docker", "yaml", "psutil", "rich", "pydantic", "click", "filelock"}
HEAVY = OF_REPORTS | OF_THE_PARENT | {"importlib.metadata"}

MEASURED = """
import json, sys
{statement}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([int(status["VmHWM"].split()[0]), sorted(sys.modules)]))
"""


def imported_by(statement: str) -> tuple[int, set[str]]:
    """Return the peak RSS of a fresh interpreter, in bytes, and the modules that it has then."""
    command = [sys.executable, "-P", "-c", MEASURED.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    peak_kib, modules = json.loads(done.stdout)
    return peak_kib * KIB, set(modules)


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    # As an isolation starts its worker; the tests' own strategies import weighin's.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, CHECKOUT))))


def test_what_the_worker_imports_before_torch_is_below_6_mib() -> None:
    bare = median(bare_peak() for _ in range(3))
    worker = [imported_by("import weighin.worker.__main__") for _ in range(3)]
    assert median(peak for peak, _ in worker) - bare < 6 * MIB
    (_, modules), *_ = worker
    assert modules & (HEAVY | {"torch", "numpy"}) == set()


def bare_peak() -> int:
    """Return the peak RSS of an interpreter that imports only what Python itself needs."""
    code = "print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, check=True, text=True
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * KIB


def test_a_whole_worker_imports_nothing_of_the_parent(bench: Bench, isolation: Watched) -> None:
    ours = HEAVY - {"importlib.metadata"}  # that one torch imports itself
    result = bench("modules", isolation, unwanted=sorted(ours))
    assert (result.outcome, result.message) == (Outcome.OK, "")


def test_the_tests_own_check_of_modules_finds_them(bench: Bench, process: Watched) -> None:
    result = bench("modules", process, unwanted=["json", "torch.nn"])
    assert result.outcome is Outcome.STRATEGY_FAILED
    assert result.message.startswith("ImportError: in the measured process: json, torch.nn (")


@pytest.mark.parametrize("verb", ["list strategies", "list models", "--version"])
def test_the_light_verbs_import_nothing_heavy(verb: str) -> None:
    statement = f"""
import weighin.cli.app
try:
    weighin.cli.app.app({verb.split()}, standalone_mode=False)
except SystemExit:
    pass
sys.stdout.write(chr(0))
"""
    command = [sys.executable, "-P", "-c", MEASURED.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    _, modules = json.loads(done.stdout.rpartition("\0")[2])
    assert set(modules) & (OF_REPORTS | {"torch", "numpy", "docker"}) == set()


def imports_of(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it, by its full name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*modules: str) -> set[str]:
    """Return the files of the project that import one of these modules, or something in it."""
    return {
        path.relative_to(CHECKOUT).as_posix()
        for folder in ("harness", "strategies")
        for path in (CHECKOUT / folder).rglob("*.py")
        for name in imports_of(path)
        if any(name == module or name.startswith(f"{module}.") for module in modules)
    }


def outside(files: set[str], *folders: str) -> set[str]:
    return {file for file in files if not file.startswith(folders)}


def test_only_reports_import_pandas_and_matplotlib() -> None:
    found = importers(*OF_REPORTS)
    assert found
    assert outside(found, "harness/weighin/report/") == set()


def test_only_isolations_import_the_docker_sdk() -> None:
    found = importers("docker")
    assert found
    assert outside(found, "harness/weighin/isolation/") == set()


def test_of_the_worker_others_import_the_protocol_alone() -> None:
    worker = [
        f"weighin.worker.{path.stem}"
        for path in (ROOT / "weighin" / "worker").glob("*.py")
        if path.stem not in ("__init__", "protocol")
    ]
    others = outside(importers(*worker), "harness/weighin/worker/")
    assert others == {
        "harness/weighin/predict/__main__.py",
        "harness/weighin/predict/simulate.py",
    }  # as it loads
    protocol = outside(importers("weighin.protocol"), "harness/weighin/worker/")
    assert outside(protocol, "harness/weighin/isolation/") == {
        "harness/weighin/run/runner.py",
        "harness/weighin/run/supervisor.py",
        "harness/weighin/testing/plugin.py",
    }


def test_nothing_that_measures_imports_the_report() -> None:
    verbs = {f"harness/weighin/cli/{verb}.py" for verb in ("floor", "history", "report")}
    assert outside(importers("weighin.report"), "harness/weighin/report/") == verbs


def test_reading_a_manifest_before_the_baseline_imports_nothing_that_a_strategy_pays_for() -> None:
    _, modules = imported_by("import weighin.checkpoint.manifest")
    assert {
        name for name in modules if name.startswith(("weighin.checkpoint.", "weighin.formats."))
    } == {
        "weighin.formats.item_bytes",
        "weighin.checkpoint.manifest",
    }
