"""The prediction for several ranks, made from that for one."""

from dataclasses import replace

from factories import make_cell

from weighin.predict.client import of_ranks
from weighin.predict.prediction import PredictedPhase, PredictedUse, Prediction, Work

CELL = make_cell("mmap_assign", ram_limit_bytes=None)
ONE = Prediction(
    CELL,
    model_bytes=100,
    baseline_anon_bytes=10,
    host_anon_peak_bytes=30,
    host_anon_least_bytes=29,
    host_anon_most_bytes=31,
    tensor_peak_bytes=20,
    host_file_peak_bytes=100,
    in_flight_bytes=5,
    floor_bytes=45,
    cuda_requested_bytes=7,
    work=Work(mapped_bytes=100, fresh_bytes=3),
    phases=(PredictedPhase("map", host_anon_peak_bytes=30, host_file_peak_bytes=100),),
)


def test_anonymous_memory_adds_up_and_mapped_pages_count_once() -> None:
    cell = replace(CELL, ranks=4)
    found = of_ranks(cell, ONE)
    assert found.cell is cell
    assert (found.host_anon_peak_bytes, found.host_file_peak_bytes) == (120, 100)
    assert (found.host_anon_least_bytes, found.host_anon_most_bytes) == (116, 124)
    assert found.floor_bytes == 4 * 40 + 5
    assert (found.work.mapped_bytes, found.work.fresh_bytes) == (100, 12)
    assert (found.phases[0].host_anon_peak_bytes, found.phases[0].host_file_peak_bytes) == (
        120,
        100,
    )
    assert (found.model_bytes, found.cuda_requested_bytes) == (100, 7)


def test_the_memory_of_a_use_adds_up() -> None:
    use = PredictedUse("write", 49, 51, 40, host_anon_peak_bytes=50, host_file_peak_bytes=100)
    found = of_ranks(replace(CELL, ranks=4), replace(ONE, use=use)).use
    assert found == PredictedUse(
        "write", 196, 204, 160, host_anon_peak_bytes=200, host_file_peak_bytes=100
    )


def test_what_cannot_be_predicted_for_one_cannot_for_several() -> None:
    cell = replace(CELL, ranks=2)
    assert of_ranks(cell, Prediction(CELL, cannot="why")) == Prediction(cell, cannot="why")
