"""How fast the machine is: measured in small, kept for this machine alone, and shown."""

import io
import json
import sys
from pathlib import Path

import pytest
from pytest import MonkeyPatch
from rich.console import Console

from weighin import child_process
from weighin.errors import ConfigError, HarnessError
from weighin.probes import environment
from weighin.recommend import calibration
from weighin.recommend.calibration import FILE, Calibration, calibrate, stored, table
from weighin.units import GIB, MIB


@pytest.fixture
def folder(disk: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """The cache, on a disk: a map or a read of a tmpfs is never cold."""
    folder = disk / tmp_path.name
    monkeypatch.setenv("WEIGHIN_CACHE", str(folder))
    return folder


@pytest.fixture
def small(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_FILE_BYTES", 8 * MIB)
    monkeypatch.setattr(calibration, "_MEMORY_BYTES", 8 * MIB)
    rounds = [
        {"archive_s": seconds, "module_s": 2 * seconds, "init_bytes_per_s": drawn}
        for seconds, drawn in [(0.003, 0.5 * GIB), (0.001, 0.25 * GIB), (0.002, GIB)]
    ]
    monkeypatch.setattr(calibration, "_ask_torch", lambda: rounds)


@pytest.mark.usefixtures("small")
def test_the_best_of_the_rounds_is_kept(folder: Path) -> None:
    said: list[str] = []
    found = calibrate(said.append)
    assert said == [f"measuring the speed of this machine: reading and writing 512 MiB in {folder}"]
    assert (found.archive_s, found.module_s, found.init_bytes_per_s) == (0.001, 0.002, GIB)
    rounds = json.loads((folder / FILE).read_text())["rounds"]
    assert {len(values) for values in rounds.values()} == {3}
    assert found.read_bytes_per_s == max(rounds["read_bytes_per_s"]) > 0
    assert found.map_bytes_per_s == max(rounds["map_bytes_per_s"]) > 0
    assert stored() == found
    assert [path.name for path in folder.iterdir()] == [FILE]  # and not what was read


@pytest.mark.usefixtures("small")
def test_a_calibration_of_another_machine_is_none(folder: Path, monkeypatch: MonkeyPatch) -> None:
    calibrate(lambda _: None)
    here = environment.machine()
    monkeypatch.setattr(environment, "machine", lambda: here | {"kernel": "7.0"})
    assert stored() is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no",
        "[]",
        "{}",
        '{"schema": 1, "figures": {}}',
        '{"figures": {"read_bytes_per_s": "x"}}',
    ],
)
def test_a_damaged_calibration_is_none(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / FILE).write_text(text)
    assert stored() is None


def test_an_older_calibration_is_none(folder: Path) -> None:
    figures = dict.fromkeys(Calibration.__dataclass_fields__, 1.0)
    folder.mkdir()
    older = {"schema": calibration.SCHEMA - 1, "machine": calibration._machine()}
    (folder / FILE).write_text(json.dumps(older | {"figures": figures}))
    assert stored() is None


def test_a_cache_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError) as caught:
        calibrate(lambda _: None)
    assert caught.value.message == f"cannot calibrate in {tmp_path / 'file'}: File exists"
    assert caught.value.repair == "choose another folder: WEIGHIN_CACHE=/path weighin ..."


def test_a_torch_that_does_not_run_is_an_error(monkeypatch: MonkeyPatch) -> None:
    answer = child_process.Answer(1, [], b"no wheel for this machine\n")
    monkeypatch.setattr(child_process, "ask", lambda *_, **__: answer)
    with pytest.raises(HarnessError) as caught:
        calibration._ask_torch()
    assert caught.value.message == "cannot calibrate: torch does not run: no wheel for this machine"


def test_torch_tells_what_only_it_can() -> None:
    rounds = calibration._ask_torch()
    assert len(rounds) == 3
    for found in rounds:
        assert found.keys() == {"archive_s", "module_s", "init_bytes_per_s"}
        assert all(value > 0 for value in found.values())


def test_a_torch_that_hangs_is_an_error(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_TORCH_TIMEOUT_S", 0)
    with pytest.raises(HarnessError) as caught:
        calibration._ask_torch()
    assert caught.value.message == "cannot calibrate: torch takes longer than 0 s"


def test_each_round_imports_the_modules_that_it_times() -> None:
    import_it = "import weighin.recommend.torch_costs, sys; print('torch._dynamo' in sys.modules)"
    command = (sys.executable, "-P", "-c", import_it)
    with child_process.Child(command, child_process.environment()) as child:
        assert child.receive(60) == b"False"


def test_the_table_has_a_line_for_each_figure(folder: Path) -> None:
    found = Calibration(GIB, 2 * GIB, GIB // 2, GIB, GIB, GIB, 0.00025, 0.001)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(found))
    lines = [line.split() for line in console.export_text().splitlines()]
    shown = {line[0]: line[1:3] for line in lines if line and line[0] in found.__slots__}
    assert shown.keys() == set(found.__slots__)
    assert shown["read_direct_bytes_per_s"] == ["2.00", "GiB/s"]
    assert (shown["archive_s"], shown["module_s"]) == (["0.25", "ms"], ["1.00", "ms"])
