"""The driver of a fleet: every cell gets one record, whatever happens to nodes and whatever they send."""

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from factories import make_cell, make_result

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

SMALL = Node("s", "small", 8 * GIB, 6 * GIB, {"process": ""})
LARGE = Node("l", "large", 64 * GIB, 60 * GIB, {"process": ""}, (16 * GIB,))

RECORD = run_folder._line(make_result(make_cell("streaming")))[0].decode()

SHORT = {"short": {"ram_bytes": 8 * GIB, "free_ram_bytes": GIB, "gpu_bytes": []}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "_WAIT_S", 0.01)


Answering = Callable[[Node, dict[str, Any]], dict[str, dict[str, Any]]]


class Crew:
    """Nodes in this process: ``answering`` answers for each of them, and the first able node is taken."""

    slots = 1

    def __init__(self, answering: Answering, *nodes: Node) -> None:
        self.answering = answering
        self.nodes = {node.id: node for node in nodes}
        self.pool = ThreadPoolExecutor(8)
        self.stopped: set[int] = set()

    def names(self) -> dict[str, str]:
        return {place: node.name for place, node in self.nodes.items()}

    @property
    def gpus(self) -> dict[str, int]:
        return {place: len(node.gpu_bytes) for place, node in self.nodes.items()}

    def submit(
        self, assignment: Mapping[str, Any], without: Collection[str], gpus: int
    ) -> Future[Answer]:
        cancelled, asked = Event(), {**assignment, "gpus": gpus}
        future = self.pool.submit(self.measure, asked, without, cancelled.is_set)
        future.cancelled_by = cancelled  # type: ignore[attr-defined]
        return future

    def measure(self, assignment: Mapping[str, Any], without: Collection[str], is_stopped: Callable[[], bool]) -> Answer:  # fmt: skip
        while not is_stopped() and not (able := [n for n, count in self.gpus.items() if n not in without and count >= assignment["gpus"]]):  # fmt: skip
            time.sleep(0.01)
        if is_stopped():
            raise HarnessError("stopped")
        cell = dict(assignment["cell"])
        node = self.nodes[able[0]]
        if (cell["ram_limit_bytes"] or 0) > node.free_ram_bytes:
            has = {name: getattr(node, name) for name in SHORT["short"]}
            return able[0], {"short": has}
        return able[0], self.answering(node, cell)

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


def measured(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"record": {"record": RECORD, "files": {}}}


def run(folder: Path, crew: Crew, planned: list[Cell], progress: Progress | None = None) -> Run:
    if not (folder / "plan.json").exists():
        run_folder.write_plan(folder, planned)
    task = Run(folder, [Planned(each) for each in planned], ProcessIsolation())
    Driver(crew, [*crew.nodes.values()], task, progress or Progress()).run()  # type: ignore[arg-type]
    return task


def recorded(task: Run) -> list[tuple[int, str]]:
    results = run_folder.read(task.folder).results
    return sorted((each.cell.repeat, each.environment["node"]) for each in results)


def test_a_limit_is_never_above_the_free_ram_of_its_node(tmp_path: Path) -> None:
    crew = Crew(measured, SMALL, LARGE)
    task = run(tmp_path, crew, cells(32 * GIB, 7 * GIB, 4 * GIB, None))
    assert recorded(task)[:2] == [(0, "l"), (1, "l")]
    assert len(recorded(task)) == 4


def test_a_node_that_is_short_of_ram_at_the_start_begins_no_cell(tmp_path: Path) -> None:
    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return SHORT if node is SMALL else measured(node, cell)

    crew = Crew(answer, SMALL, LARGE)
    assert recorded(run(tmp_path, crew, cells(4 * GIB, 4 * GIB))) == [(0, "l"), (1, "l")]


def test_nodes_that_are_short_again_and_again_end_the_run(tmp_path: Path) -> None:
    crew = Crew(lambda *_: SHORT, SMALL)
    with pytest.raises(HarnessError, match=r"small has 1\.000 GiB free, less than --ram 4GiB"):
        run(tmp_path, crew, cells(4 * GIB))


def test_a_node_that_was_short_once_is_asked_again_when_nothing_runs(tmp_path: Path) -> None:
    said: list[dict[str, dict[str, Any]]] = [SHORT]
    crew = Crew(lambda *told: said.pop() if said else measured(*told), SMALL)
    assert recorded(run(tmp_path, crew, cells(4 * GIB, 4 * GIB))) == [(0, "s"), (1, "s")]


def test_a_cell_for_a_gpu_goes_to_no_node_without_one_that_joined(tmp_path: Path) -> None:
    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        crew.nodes = {"s": SMALL, "l": LARGE}
        time.sleep(0.1)
        return measured(node, cell)

    crew = Crew(answer, LARGE)
    task = run(tmp_path, crew, cells(None, None, None, device="cuda"))
    assert recorded(task) == [(number, "l") for number in range(3)]


def test_a_cell_for_a_gpu_ends_the_run_if_only_nodes_without_one_are_left(tmp_path: Path) -> None:
    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        crew.nodes = {"s": SMALL}
        time.sleep(0.1)
        return measured(node, cell)

    crew = Crew(answer, LARGE)
    with pytest.raises(HarnessError, match=r"[23] cells cannot run: small has no cuda"):
        run(tmp_path, crew, cells(None, None, None, device="cuda"))


def test_a_node_whose_gpu_fails_goes_on_with_other_cells(tmp_path: Path) -> None:
    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return SHORT if cell["device"] == "cuda" else measured(node, cell)

    with pytest.raises(HarnessError, match="1 cell cannot run: large has no cuda"):
        run(tmp_path, Crew(answer, LARGE), [*cells(None, device="cuda"), *cells(None, None)])
    assert len(run_folder.read(tmp_path).results) == 2


def test_a_cell_for_a_gpu_reserves_the_gpus_of_its_node_and_is_taken_back_if_they_are_lost(
    tmp_path: Path,
) -> None:
    large, reserved = replace(LARGE, gpu_bytes=(GIB, GIB)), []

    class Loses(Crew):
        def measure(self, assignment: Mapping[str, Any], *others: Any) -> Answer:
            reserved.append(assignment["gpus"])
            self.nodes = {"one": replace(LARGE, id="one")}
            return super().measure(assignment, *others)

    task = run(tmp_path, Loses(measured, large), cells(None, device="cuda") + cells(None, GIB))
    assert sorted(reserved) == [0, 0, 1, 2]
    assert {place for _, place in recorded(task)} == {"one"}


def test_the_gpu_is_looked_for_although_a_cell_ran_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cell,) = cells(None, device="cuda")
    task = Run(tmp_path, [Planned(cell)], ProcessIsolation())
    monkeypatch.setattr("weighin.plan.start.resume", lambda *_, **__: task)
    monkeypatch.setattr("weighin.probes.gpu_memory.look", GpuAnswer)
    monkeypatch.setattr("weighin.run.runner.run", lambda *_: pytest.fail("it was measured"))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    sent: list[str] = []

    class Told:
        def send(self, event: str, **fields: Any) -> None:
            sent.append(f"{event} {fields['gpu_bytes']}")

    told = {"cell": asdict(cell), "settings": {}, "is_tested": True, "limits": [], "patience_s": 1}
    fleet_node._measure(told, Told())  # type: ignore[arg-type]
    assert sent == ["short []"]


def test_a_node_waits_for_its_own_free_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = cells(4 * GIB)
    task, free, measured = Run(tmp_path, [Planned(cell)], ProcessIsolation()), [GIB, 5 * GIB], []
    monkeypatch.setattr("weighin.plan.start.resume", lambda *_, **__: task)
    monkeypatch.setattr("weighin.isolation.cgroup.ram_bytes", lambda *_: (8 * GIB, free.pop(0)))
    monkeypatch.setattr("weighin.run.runner.run", lambda *_: measured.append(cell))
    monkeypatch.setattr(fleet_node, "_PAUSE_S", 0)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    told = {"cell": asdict(cell), "settings": {}, "is_tested": True, "limits": [], "patience_s": 1}
    fleet_node._measure(told, None)  # type: ignore[arg-type]
    assert (measured, free) == ([cell], [])


def test_a_node_that_is_to_stop_has_one_deadline_for_all_that_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Talks:
        printed, end_s = b"", time.monotonic() + 5

        def __init__(self, *_: object) -> None: ...

        def receive(self, _: float) -> dict[str, Any]:
            assert time.monotonic() < self.end_s, "it is heard without end"
            time.sleep(0.01)
            return {}

        def wait(self, timeout_s: float = 0.0) -> int:
            return -9

        def send(self, *_: object, **__: object) -> None: ...

        def nothing(self) -> None: ...

        kill = close = nothing

    monkeypatch.setattr(fleet_node, "Child", Talks)
    monkeypatch.setattr(fleet_node, "_PATIENCE_S", 0.1)
    assert fleet_node.run({}, {}, lambda: True) == {"ended": {"why": "exit code -9"}}


def test_a_use_on_a_gpu_is_skipped_if_no_node_has_one() -> None:
    asked = {"models": ["gpt2-tiny"], "strategies": ["baseline"], "isolation": "process"}
    settings = Settings.model_validate(asked | {"uses": ["none", "to-device"]})
    skips = {each.cell.use: each.skip for each in loads.plan(settings, [SMALL])[0]}
    assert "small has no cuda" in skips["to-device"]


def test_a_cell_that_fits_on_no_node_says_why(tmp_path: Path) -> None:
    with pytest.raises(HarnessError) as caught:
        run(tmp_path, Crew(measured, SMALL, replace(SMALL, id="t", name="tiny", ram_bytes=GIB)), cells(7 * GIB))  # fmt: skip
    assert str(caught.value) == (
        "1 cell cannot run: --ram 7GiB is more than tiny has (1.000 GiB); small has 6.000 GiB free,"
        " less than --ram 7GiB\nfree memory on a node, or add a node"
    )


def test_a_cell_for_a_gpu_needs_that_gpu_and_its_memory() -> None:
    def lacks(node: Node, **fields: Any) -> str:
        return Demand.of(cells(None, **fields)[0]).obstacle(node, is_now=True)

    assert lacks(SMALL, device="cuda") == "small has no cuda"
    assert lacks(LARGE, device="cuda") == ""
    assert lacks(LARGE, device="cuda:1") == "large has no cuda:1"
    assert lacks(LARGE, device="cuda", vram_limit_bytes=24 * GIB) == (
        "the GPU of large has 16.000 GiB, less than its limit 24GiB"
    )


def test_a_node_that_cannot_go_on_gets_no_further_cell(tmp_path: Path) -> None:
    error = {"message": "the disk is full", "repair": "free some space", "exit_code": 2}
    said: list[str] = []

    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {"error": error} if node is SMALL else measured(node, cell)

    crew = Crew(answer, SMALL, LARGE)
    task = run(tmp_path, crew, cells(*[None] * 5), Progress(preparing=lambda text, _: said.append(text)))  # fmt: skip
    assert recorded(task) == [(number, "l") for number in range(5)]
    assert set(said) == {"no further cell for small: the disk is full"}
    with pytest.raises(
        HarnessError, match="1 cell cannot run, no node is left: small: the disk is"
    ):
        run(tmp_path / "alone", Crew(answer, SMALL), cells(None))


def test_the_test_of_a_worker_gets_all_limits_of_the_run(tmp_path: Path) -> None:
    sent = []

    class Asked(Crew):
        def submit(self, assignment: Mapping[str, Any], *others: Any) -> Future[Answer]:
            sent.append((len(assignment["is_tested"]), sorted(assignment["limits"])))
            return super().submit(assignment, *others)

    run(tmp_path, Asked(measured, SMALL), [*cells(2 * GIB, 2 * GIB), *cells(4 * GIB, ranks=2)])
    limits = [(2 * GIB, 1), (4 * GIB, 2)]
    assert [each for _, each in sent] == [limits] * 3
    assert sent[0][0] == 0 and sent[-1][0] == 1


def test_a_record_counts_although_the_node_failed_after_it(tmp_path: Path) -> None:
    error = {"message": "the disk is full", "repair": "", "exit_code": 2}
    crew = Crew(lambda node, cell: {**measured(node, cell), "error": error}, SMALL, LARGE)
    assert len(recorded(run(tmp_path, crew, cells(None, None)))) == 2


def test_a_cell_whose_process_died_is_a_failed_measurement(tmp_path: Path) -> None:
    crew = Crew(lambda *_: {"ended": {"why": "exit code -9, Killed"}}, SMALL)
    (result,) = run(tmp_path, crew, cells(None)).results
    assert result.outcome is Outcome.MEASUREMENT_FAILED
    assert result.message == "on small: exit code -9, Killed"


def test_with_nodes_that_are_lost_and_join_every_cell_ends_once(
    tmp_path: Path,
) -> None:
    chance = random.Random(7)

    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if chance.random() < 0.3:
            crew.nodes.pop(node.id, None)  # and another one joins
            name = f"node-{chance.random()}"
            crew.nodes[name] = replace(LARGE, id=name, name=name)
        if chance.random() < 0.2:
            raise HarnessError("the node was lost: as Ray says after the last try")
        return measured(node, cell)

    crew = Crew(answer, LARGE)
    task = run(tmp_path, crew, cells(*[None, 2 * GIB] * 15))
    assert [repeat for repeat, _ in recorded(task)] == list(range(30))


def test_a_record_counts_although_another_cell_failed_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = {"message": "the disk is full", "repair": "", "exit_code": 2}

    def all_done(running: Iterable[Any], *_: object) -> object:
        return wait(running)

    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return measured(node, cell) if cell["repeat"] % 2 else {"error": error}

    monkeypatch.setattr(drivers, "wait", all_done)
    with pytest.raises(
        HarnessError, match="3 cells cannot run, no node is left: small: the disk is"
    ):
        run(tmp_path, Crew(answer, SMALL), cells(None, GIB, 2 * GIB, 3 * GIB, 4 * GIB))
    assert sorted(each.cell.repeat for each in run_folder.read(tmp_path).results) == [1, 3]


def test_the_cells_that_run_at_once_are_not_stopped_by_the_error_of_one(tmp_path: Path) -> None:
    error = {"message": "the disk is full", "repair": "", "exit_code": 2}
    told = Event()

    class Slow(Crew):
        slots = 2

        def measure(self, assignment: Mapping[str, Any], without: Collection[str], is_stopped: Callable[[], bool]) -> Answer:  # fmt: skip
            answer = super().measure(assignment, without, is_stopped)
            if "error" in answer[1]:
                told.wait(10)  # until the other one runs
            else:
                told.set()
                time.sleep(0.3)
            if is_stopped():
                raise HarnessError("stopped")
            return answer

    crew = Slow(lambda n, c: measured(n, c) if c["repeat"] else {"error": error}, SMALL)
    with pytest.raises(
        HarnessError, match="2 cells cannot run, no node is left: small: the disk is"
    ):
        run(tmp_path, crew, cells(*[None] * 3))
    assert [each.cell.repeat for each in run_folder.read(tmp_path).results] == [1]


def test_a_cell_waits_for_no_node_if_all_that_could_run_it_are_lost(
    tmp_path: Path,
) -> None:

    class Dying(Crew):
        def measure(self, assignment: Mapping[str, Any], without: Collection[str], is_stopped: Callable[[], bool]) -> Answer:  # fmt: skip
            del self.nodes["l"]
            while not is_stopped():
                time.sleep(0.01)
            raise HarnessError("stopped")

    with pytest.raises(
        HarnessError,
        match="2 cells cannot run, no node is left: large: the node was lost\nadd a node",
    ):
        run(tmp_path, Dying(measured, LARGE), cells(None, None))
    assert not run_folder.read(tmp_path).results


def test_a_node_that_was_left_out_and_then_lost_is_told_once(tmp_path: Path) -> None:
    error = {"message": "the disk is full", "repair": "free some space", "exit_code": 2}
    said: list[str] = []

    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        if node is SMALL:
            return {"error": error}
        crew.nodes.pop("s", None)
        time.sleep(0.1)
        return measured(node, cell)

    crew = Crew(answer, SMALL, LARGE)
    run(tmp_path, crew, cells(None, None, None), Progress(preparing=lambda text, _: said.append(text)))  # fmt: skip
    assert said == ["no further cell for small: the disk is full"]


@pytest.mark.parametrize("path", ["../owned", "/tmp/owned", "plan.json", "samples/../../owned"])
def test_a_node_can_write_no_file_that_no_record_names(tmp_path: Path, path: str) -> None:
    planned = cells(None)
    run_folder.write_plan(tmp_path / "run", planned)
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}

    def answer(node: Node, cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
        files = {path: "owned"}
        return {"record": measured(node, cell)["record"] | {"files": files}}

    crew = Crew(answer, SMALL)
    with pytest.raises(RecordError, match="which no record names"):
        run(tmp_path / "run", crew, planned)
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before
