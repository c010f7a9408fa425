"""The driver of a fleet: every cell gets one record, whatever happens to nodes and whatever they send."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_cell, make_result, refused

from weighin.cell import Cell
from weighin.errors import HarnessError, RecordError
from weighin.fleet import driver as drivers
from weighin.fleet import node as fleet_node
from weighin.fleet.driver import Driver
from weighin.fleet.node import Answer
from weighin.isolation.process import ProcessIsolation
from weighin.plan import loads
from weighin.plan.task import Demand, Node, Planned, Progress, Run
from weighin.probes.gpu_memory import GpuAnswer
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.settings.definition import Settings
from weighin.units import GIB

Told = dict[str, dict[str, Any]]
Assignment = Mapping[str, Any]
Places = Collection[str]

SMALL = Node("s", "small", 8 * GIB, 6 * GIB, {"process": ""})
LARGE = Node("l", "large", 64 * GIB, 60 * GIB, {"process": ""}, (16 * GIB,))
TINY = replace(SMALL, id="t", name="tiny", ram_bytes=GIB)

RECORD = run_folder._line(make_result(make_cell("streaming")))[0].decode()
MEASURED: Told = {"record": {"record": RECORD, "files": {}}}
SHORT: Told = {"short": {"ram_bytes": 8 * GIB, "free_ram_bytes": GIB, "gpu_bytes": []}}
FULL: Told = {"error": {"message": "the disk is full", "repair": "free space", "exit_code": 2}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_WAIT_S", 0.01)


class Crew:
    """Nodes in this process: ``answer`` answers for each of them, and the first able node is taken."""

    slots = 1

    def __init__(self, answer: Callable[[Node, dict[str, Any]], Told], *nodes: Node) -> None:
        self.answer_of = answer
        self.nodes = {node.id: node for node in nodes}
        self.pool = ThreadPoolExecutor(8)

    def names(self) -> dict[str, str]:
        return {place: node.name for place, node in self.nodes.items()}

    @property
    def gpus(self) -> dict[str, int]:
        return {place: len(node.gpu_bytes) for place, node in self.nodes.items()}

    def submit(self, assignment: Assignment, without: Places, gpus: int) -> Future[Answer]:
        cancelled, asked = Event(), {**assignment, "gpus": gpus}
        future = self.pool.submit(self.measure, asked, without, cancelled)
        future.cancelled_by = cancelled  # type: ignore[attr-defined]
        return future

    def measure(self, assignment: Assignment, without: Places, cancelled: Event) -> Answer:
        while True:
            able = [n for n, count in self.gpus.items() if count >= assignment["gpus"]]
            if able := [place for place in able if place not in without]:
                break
            if cancelled.wait(0.01):
                raise HarnessError("stopped")
        cell, node = dict(assignment["cell"]), self.nodes[able[0]]
        if (cell["ram_limit_bytes"] or 0) > node.free_ram_bytes:
            return able[0], {"short": {name: getattr(node, name) for name in SHORT["short"]}}
        return able[0], self.answer_of(node, cell)

    def answer(self, done: Future[Answer]) -> Answer:
        try:
            return done.result()
        except HarnessError as lost:
            return "", {"ended": {"why": lost.message}}

    def stop(self, futures: Iterable[Future[Answer]]) -> None:
        for each in [*futures]:
            each.cancelled_by.set()  # type: ignore[attr-defined]
        wait([*futures])

    def placed(self, result: Result, place: str, _name: str) -> Result:
        return replace(result, environment=result.environment | {"node": place})


def cells(*limits: int | None, **fields: Any) -> list[Cell]:
    cell = replace(make_cell("streaming"), isolation="process", **fields)
    return [
        replace(cell, ram_limit_bytes=limit, repeat=number) for number, limit in enumerate(limits)
    ]


ON_GPU = cells(None, device="cuda")


def run(folder: Path, crew: Crew, planned: list[Cell], progress: Progress | None = None) -> Run:
    if not (folder / "plan.json").exists():
        run_folder.write_plan(folder, planned)
    task = Run(folder, [Planned(each) for each in planned], ProcessIsolation())
    Driver(crew, [*crew.nodes.values()], task, progress or Progress()).run()  # type: ignore[arg-type]
    return task


def recorded(folder: Path) -> list[str]:
    """Return the repeat of each record, and the node that it is of."""
    results = run_folder.read(folder).results
    return sorted(f"{each.cell.repeat}{each.environment['node']}" for each in results)


def measured(_node: Node, _cell: dict[str, Any]) -> Told:
    return MEASURED


def first_then(told: Told) -> Callable[[Node, dict[str, Any]], Told]:
    """Answer with ``told`` first, and then with records."""
    answers = [told]
    return lambda *_: answers.pop() if answers else MEASURED


def small_says(told: Told) -> Callable[[Node, dict[str, Any]], Told]:
    return lambda node, _: told if node is SMALL else MEASURED


TWO = cells(4 * GIB, 4 * GIB)


BECOMES: dict[str, tuple[Callable[..., Told], list[Node], list[Cell], list[str], str]] = {
    "a limit is never above the free RAM of its node": (measured, [SMALL, LARGE], cells(32 * GIB, 7 * GIB), ["0l", "1l"], ""),
    "a node is short": (small_says(SHORT), [SMALL, LARGE], TWO, ["0l", "1l"], ""),
    "a node is short once": (first_then(SHORT), [SMALL], TWO, ["0s", "1s"], ""),
    "a node is short for ever": (lambda *_: SHORT, [SMALL], TWO[:1], [], "small has 1.000 GiB free, less than --ram 4GiB"),
    "it fits nowhere": (measured, [SMALL, TINY], cells(7 * GIB), [],
        "1 cell cannot run: --ram 7GiB is more than tiny has (1.000 GiB); small has 6.000 GiB free,"
        " less than --ram 7GiB\nfree memory on a node, or add a node"),
    "a GPU is lost": (lambda _, cell: SHORT if cell["device"] == "cuda" else MEASURED, [LARGE],
        [*ON_GPU, *cells(None, None)], ["0l", "1l"], "1 cell cannot run: large has no cuda"),
    "a disk is full": (small_says(FULL), [SMALL, LARGE], cells(*[None] * 5), ["0l", "1l", "2l", "3l", "4l"], ""),
    "the only disk is full": (small_says(FULL), [SMALL], cells(None), [], "1 cell cannot run, because no node is left: small: the disk is full"),
    "a record counts although its node failed after it": (lambda *_: MEASURED | FULL, [SMALL], TWO[:1], ["0s"], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BECOMES)
def test_what_becomes_of_the_cells(tmp_path: Path, name: str) -> None:
    answer, nodes, planned, records, error = BECOMES[name]
    crew = Crew(answer, *nodes)
    if error:
        assert error in refused(run, tmp_path, crew, planned)
    else:
        run(tmp_path, crew, planned)
    assert recorded(tmp_path) == records


def test_a_cell_whose_process_died_is_a_failed_measurement(tmp_path: Path) -> None:
    crew = Crew(lambda *_: {"ended": {"why": "exit code -9, Killed"}}, SMALL)
    (result,) = run(tmp_path, crew, cells(None)).results
    assert result.outcome is Outcome.MEASUREMENT_FAILED
    assert result.message == "on small: exit code -9, Killed"


@pytest.mark.parametrize("others", [{}, {"l": LARGE}], ids=["alone", "beside another"])
def test_no_cell_for_a_gpu_goes_to_a_node_without(tmp_path: Path, others: dict[str, Node]) -> None:
    def answer(*_: object) -> Told:
        crew.nodes = {"s": SMALL, **others}
        return MEASURED

    crew, planned = Crew(answer, LARGE), cells(None, None, None, device="cuda")
    if others:
        run(tmp_path, crew, planned)
        assert recorded(tmp_path) == ["0l", "1l", "2l"]
    else:  # the first cell may be taken back before it ends
        told = refused(run, tmp_path, crew, planned)
        assert told[1:].startswith(" cells cannot run: small has no cuda")


def test_a_cell_reserves_gpus_and_is_taken_back_if_they_are_lost(tmp_path: Path) -> None:
    large, reserved = replace(LARGE, gpu_bytes=(GIB, GIB)), []

    class Loses(Crew):
        def measure(self, assignment: Assignment, *others: Any) -> Answer:
            reserved.append(assignment["gpus"])
            self.nodes = {"one": replace(LARGE, id="one")}
            return super().measure(assignment, *others)

    run(tmp_path, Loses(measured, large), ON_GPU + cells(None, GIB))
    assert sorted(reserved) == [0, 0, 1, 2]
    assert {each[1:] for each in recorded(tmp_path)} == {"one"}


def test_a_cell_for_a_gpu_needs_that_gpu_and_its_memory() -> None:
    def lacks(node: Node, **fields: Any) -> str:
        return Demand.of(*cells(None, **fields)).obstacle(node, is_now=True)

    assert lacks(SMALL, device="cuda") == "small has no cuda"
    assert lacks(LARGE, device="cuda") == ""
    assert lacks(LARGE, device="cuda:1") == "large has no cuda:1"
    assert lacks(LARGE, device="cuda", vram_limit_bytes=24 * GIB) == (
        "the GPU of large has 16.000 GiB, less than vram=24GiB"
    )


def test_a_use_on_a_gpu_is_skipped_if_no_node_has_one() -> None:
    asked = {"models": ["gpt2-tiny"], "strategies": ["baseline"], "isolation": "process"}
    settings = Settings.model_validate(asked | {"uses": ["none", "to-device"]})
    skips = {each.cell.use: each.skip for each in loads.plan(settings, [SMALL])[0]}
    assert "small has no cuda" in skips["to-device"]


def test_the_test_of_a_worker_gets_all_limits_of_the_run(tmp_path: Path) -> None:
    sent = []

    class Asked(Crew):
        def submit(self, assignment: Assignment, *others: Any) -> Future[Answer]:
            sent.append((len(assignment["is_tested"]), sorted(assignment["limits"])))
            return super().submit(assignment, *others)

    run(tmp_path, Asked(measured, SMALL), [*cells(2 * GIB, 2 * GIB), *cells(4 * GIB, ranks=2)])
    limits = [(2 * GIB, 1), (4 * GIB, 2)]
    assert [each for _, each in sent] == [limits] * 3
    assert sent[0][0] == 0 and sent[-1][0] == 1


# -- several at once, and nodes that are lost


def test_with_nodes_that_are_lost_and_join_every_cell_ends_once(tmp_path: Path) -> None:
    chance = random.Random(7)

    def answer(node: Node, _: object) -> Told:
        if chance.random() < 0.3:
            crew.nodes.pop(node.id, None)  # and another one joins
            name = f"node-{chance.random()}"
            crew.nodes[name] = replace(LARGE, id=name, name=name)
        if chance.random() < 0.2:
            raise HarnessError("the node was lost: as Ray says after the last try")
        return MEASURED

    crew = Crew(answer, LARGE)
    run(tmp_path, crew, cells(*[None, 2 * GIB] * 15))
    repeats = [each.cell.repeat for each in run_folder.read(tmp_path).results]
    assert sorted(repeats) == list(range(30))


def test_a_record_counts_although_another_cell_failed_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "wait", lambda running, *_: wait(running))  # for all
    crew = Crew(lambda _, cell: MEASURED if cell["repeat"] % 2 else FULL, SMALL)
    told = refused(run, tmp_path, crew, cells(None, GIB, 2 * GIB, 3 * GIB, 4 * GIB))
    assert told.startswith("3 cells cannot run, because no node is left: small: the disk is")
    assert recorded(tmp_path) == ["1s", "3s"]


def test_the_cells_that_run_at_once_are_not_stopped_by_the_error_of_one(tmp_path: Path) -> None:
    others_run, failed = Event(), Event()

    class Slow(Crew):
        slots = 2

        def measure(self, assignment: Assignment, without: Places, cancelled: Event) -> Answer:
            answer = super().measure(assignment, without, cancelled)
            if "error" in answer[1]:
                assert others_run.wait(60)
            else:
                others_run.set()
                assert failed.wait(60)
                if cancelled.is_set():
                    raise HarnessError("stopped")
            return answer

    crew = Slow(lambda _, cell: MEASURED if cell["repeat"] else FULL, SMALL)
    progress = Progress(preparing=lambda *_: failed.set())  # it is told that the node is left out
    told = refused(run, tmp_path, crew, cells(*[None] * 3), progress)
    assert told.startswith("2 cells cannot run, because no node is left: small: the disk is")
    assert recorded(tmp_path) == ["1s"]


def test_a_cell_waits_for_no_node_if_all_that_could_run_it_are_lost(tmp_path: Path) -> None:
    class Dying(Crew):
        def measure(self, *given: Any) -> Answer:
            del self.nodes["l"]
            assert given[-1].wait(60)
            raise HarnessError("stopped")

    told = refused(run, tmp_path, Dying(measured, LARGE), cells(None, None))
    assert told == (
        "2 cells cannot run, because no node is left: large: the node was lost\nadd a node"
    )
    assert recorded(tmp_path) == []


def test_a_node_that_was_left_out_and_then_lost_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []

    def answer(node: Node, _: object) -> Told:
        if node is LARGE:
            crew.nodes.pop("s", None)
        return FULL if node is SMALL else MEASURED

    crew = Crew(answer, SMALL, LARGE)
    run(tmp_path, crew, cells(*[None] * 5), Progress(preparing=lambda text, _: said.append(text)))
    assert said == ["no further cell for small: the disk is full"]


@pytest.mark.parametrize("path", ["../owned", "/tmp/owned", "plan.json", "samples/../../owned"])
def test_a_node_can_write_no_file_that_no_record_names(tmp_path: Path, path: str) -> None:
    def files() -> dict[Path, bytes]:
        return {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}

    planned = cells(None)
    run_folder.write_plan(tmp_path / "run", planned)
    before = files()
    told = {"record": MEASURED["record"] | {"files": {path: "owned"}}}
    with pytest.raises(RecordError, match="none of its sample files"):
        run(tmp_path / "run", Crew(lambda *_: told, SMALL), planned)
    assert files() == before


# -- a node


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Let a node measure a cell; return the cells that were measured, and what was sent."""
    done: list[Any] = []
    parent: Any = SimpleNamespace(
        send=lambda event, **told: done.append((event, told["gpu_bytes"]))
    )

    def measure(cell: Cell) -> list[Any]:
        task = Run(tmp_path, [Planned(cell)], ProcessIsolation())
        monkeypatch.setattr("weighin.plan.start.resume", lambda *_, **__: task)
        monkeypatch.setattr("weighin.run.runner.run", lambda *_: done.append(cell))
        monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
        told = {"cell": asdict(cell), "settings": {}, "is_tested": True, "limits": []}
        fleet_node._measure(told | {"patience_s": 1}, parent)
        return done

    return measure


def test_the_gpu_is_looked_for_although_a_cell_ran_on_the_node(
    measure: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighin.probes.gpu_memory.look", GpuAnswer)
    assert measure(ON_GPU[0]) == [("short", [])]


def test_a_node_waits_for_its_own_free_ram(
    measure: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,), free = cells(4 * GIB), [GIB, 5 * GIB]
    monkeypatch.setattr("weighin.isolation.cgroup.ram_bytes", lambda *_: (8 * GIB, free.pop(0)))
    monkeypatch.setattr(fleet_node, "_PAUSE_S", 0)
    assert (measure(cell), free) == ([cell], [])


def test_a_node_that_is_to_stop_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    end_s = time.monotonic() + 60

    def receive(_: float) -> dict[str, Any]:
        assert time.monotonic() < end_s, "it is heard without end"
        time.sleep(0.01)
        return {}

    calls = dict.fromkeys(("send", "kill", "close"), lambda *_, **__: None)
    child = SimpleNamespace(printed=b"", receive=receive, wait=lambda *_, **__: -9, **calls)
    monkeypatch.setattr(fleet_node, "Child", lambda *_: child)
    monkeypatch.setattr(fleet_node, "_PATIENCE_S", 0.1)
    assert fleet_node.run({}, {}, lambda: True) == {"ended": {"why": "exit code -9"}}
