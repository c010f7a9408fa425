"""Which node gets which cell: by limits, GPUs and losses, in the plan's order."""

import random
from dataclasses import replace

from factories import make_cell
from hypothesis import given
from hypothesis import strategies as st

from weighin.cell import Cell
from weighin.engines.scheduler import MOST_LOSSES, Scheduler
from weighin.plan.nodes import Node
from weighin.units import GIB

SMALL = Node("s", "small", ram_bytes=8 * GIB, free_ram_bytes=6 * GIB)
LARGE = Node("l", "large", ram_bytes=64 * GIB, free_ram_bytes=60 * GIB, gpu_bytes=(16 * GIB,))


def cell(limit: int | None = None, **fields: object) -> Cell:
    return replace(make_cell("streaming"), ram_limit_bytes=limit, **fields)  # type: ignore[arg-type]


def test_cells_leave_in_the_plans_order() -> None:
    scheduler = Scheduler([cell(repeat=n) for n in range(3)])
    assert [scheduler.take(SMALL) for _ in range(4)] == [0, 1, 2, None]


def test_a_node_gets_the_first_cell_whose_limit_its_free_ram_covers() -> None:
    scheduler = Scheduler([cell(32 * GIB), cell(7 * GIB), cell(4 * GIB), cell(None)])
    assert scheduler.take(SMALL) == 2
    assert scheduler.take(replace(SMALL, free_ram_bytes=7 * GIB)) == 1
    assert scheduler.take(SMALL) == 3
    assert scheduler.take(SMALL) is None
    assert scheduler.take(LARGE) == 0


def test_a_node_is_prepared_for_the_cells_that_it_could_run_later() -> None:
    scheduler = Scheduler([cell(32 * GIB), cell(7 * GIB), cell(None)])
    assert sorted(scheduler.wants(SMALL)) == [1, 2]


def test_a_cell_for_a_gpu_needs_that_gpu_and_its_memory() -> None:
    cells = [
        cell(device="cuda"),
        cell(device="cuda:1"),
        cell(device="cuda", vram_limit_bytes=24 * GIB),
    ]
    scheduler = Scheduler(cells)
    assert scheduler.take(SMALL) is None
    assert scheduler.take(LARGE) == 0
    assert scheduler.take(LARGE) is None
    assert scheduler.stuck([LARGE]) == "large has no cuda:1"
    two = replace(LARGE, gpu_bytes=(16 * GIB, 16 * GIB))
    assert scheduler.take(two) == 1
    assert scheduler.stuck([two]) == ("the GPU of large has 16.000 GiB, less than --vram 24GiB")


def test_the_reasons_why_no_node_can_go_on() -> None:
    scheduler = Scheduler([cell(7 * GIB)])
    assert not scheduler.can_take(SMALL)
    assert scheduler.stuck([SMALL, replace(SMALL, name="tiny", ram_bytes=GIB)]) == (
        "small has 6.000 GiB free, less than --ram 7GiB; tiny has 1.000 GiB, less than --ram 7GiB"
    )


def test_a_cell_that_loses_nodes_again_and_again_is_given_up() -> None:
    scheduler = Scheduler([cell(), cell(repeat=1)])
    for attempt in range(1, MOST_LOSSES + 1):
        assert scheduler.take(SMALL) == 0  # again the first
        assert scheduler.lost(0) == (attempt < MOST_LOSSES)
    assert scheduler.take(SMALL) == 1
    assert len(scheduler) == 0


def test_a_node_that_cannot_begin_a_cell_is_no_loss_of_it() -> None:
    scheduler = Scheduler([cell()])
    for _ in range(2 * MOST_LOSSES):
        assert scheduler.take(SMALL) == 0
        scheduler.give_back(0)
    assert len(scheduler) == 1


@given(
    limits=st.lists(st.sampled_from([None, 2 * GIB, 7 * GIB, 32 * GIB]), max_size=40),
    seed=st.integers(0, 10_000),
)
def test_with_lost_nodes_every_cell_still_ends_once(limits: list[int | None], seed: int) -> None:
    chance = random.Random(seed)
    scheduler = Scheduler([cell(limit, repeat=n) for n, limit in enumerate(limits)])
    ended: list[int] = []
    while len(scheduler):
        index = scheduler.take(chance.choice([SMALL, LARGE]))
        if index is None:
            continue
        if chance.random() < 0.3 and scheduler.lost(index):
            continue
        ended.append(index)
    assert sorted(ended) == list(range(len(limits)))
