"""Turn the prediction for one process into one for several ranks (processes) under one limit.

Each rank loads the whole model. Anonymous memory is private, so that it counts for each rank. The
ranks share mapped pages of files, which count only one time.
"""

from dataclasses import fields, replace
from typing import Any, Final

from weighin.cell import Cell
from weighin.predict.prediction import PredictedUse, Prediction, Work

_PRIVATE: Final = (
    "baseline_anon_bytes",
    "host_anon_peak_bytes",
    "host_anon_least_bytes",
    "host_anon_most_bytes",
    "tensor_peak_bytes",
)
_SHARED_WORK: Final = ("mapped_bytes",)


def of_ranks(cell: Cell, of_one: Prediction) -> Prediction:
    """Return the prediction for all ranks of ``cell`` from ``of_one``, the prediction for one rank.

    The work is the sum over all ranks, because all ranks use the same processors and memory. Only
    the mapped pages count once. The GPU memory is that of one rank, because each has its own GPU.
    """
    if of_one.cannot:
        return replace(of_one, cell=cell)
    ranks = cell.ranks
    floor = of_one.floor_bytes
    if floor is not None:
        floor = (floor - of_one.in_flight_bytes) * ranks + of_one.in_flight_bytes
    work = {
        field.name: getattr(of_one.work, field.name) * (1 if field.name in _SHARED_WORK else ranks)
        for field in fields(Work)
    }
    return replace(
        of_one,
        cell=cell,
        floor_bytes=floor,
        work=Work(**work),
        phases=tuple(
            replace(phase, host_anon_peak_bytes=phase.host_anon_peak_bytes * ranks)
            for phase in of_one.phases
        ),
        reasons=(*of_one.reasons, f"in each of {ranks} ranks"),
        use=of_one.use and replace(of_one.use, **_private(of_one.use, ranks)),
        **_private(of_one, ranks),
    )


def _private(figures: Prediction | PredictedUse, ranks: int) -> dict[str, Any]:
    return {
        name: None if (size := getattr(figures, name)) is None else size * ranks
        for name in _PRIVATE
        if hasattr(figures, name)
    }
