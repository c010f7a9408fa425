"""Saves by real workers: right ones are read back, wrong ones are told, and copies are seen."""

import pytest
from cells import DEFAULT_SAVING, LARGE, MIB, Bench, Outcome, Watched, known, names_of, phases_of
from nightly import isolations

TIED_BYTES = 32768 * 768 * 4  # of LARGE: cloned name by name, its tied head is copied twice


@pytest.mark.parametrize("isolation", isolations("process"), indirect=True)
@pytest.mark.parametrize("strategy", DEFAULT_SAVING)
def test_a_strategy_writes_the_model(bench: Bench, isolation: Watched, strategy: str) -> None:
    result = bench(strategy, isolation, model_name="tied-tiny", operation="save")
    assert (result.outcome, result.message) == (Outcome.OK, "")
    assert names_of(result) == ["import", "prepare", "write", "sync", "verify"]
    size_bytes = known(result.model_bytes)
    assert result.written
    assert size_bytes * 0.5 < result.written.file_bytes < size_bytes * 3
    assert known(result.ready_ns) > known(result.load_ns)


@pytest.mark.parametrize(
    ("how", "outcome", "message"),
    [
        ("nothing", Outcome.STRATEGY_FAILED, "save() left no file in job.target"),
        ("raises", Outcome.STRATEGY_FAILED, "OSError: [Errno 28] No space left on device (saving_badly.py:"),
        ("truncated", Outcome.WRONG_WEIGHTS, "the saved checkpoint cannot be read: "),
        ("left out", Outcome.WRONG_WEIGHTS, "1 tensor missing from the saved checkpoint: "),
        ("lossy", Outcome.WRONG_WEIGHTS, "1 tensor saved with other values: "),
    ],
)  # fmt: skip
def test_a_wrong_save_is_told(
    bench: Bench, process: Watched, how: str, outcome: Outcome, message: str
) -> None:
    result = bench("saving_badly", process, operation="save", how=how)
    assert result.outcome is outcome
    assert result.message.startswith(message)


@pytest.mark.parametrize("isolation", isolations("cgroup"), indirect=True)
def test_a_copy_of_the_model_is_seen_above_the_model(bench: Bench, isolation: Watched) -> None:
    plain = bench("torch_save", isolation, spec=LARGE, operation="save")
    copied = bench("saving_badly", isolation, spec=LARGE, operation="save", how="copy")
    assert plain.outcome is copied.outcome is Outcome.OK
    size_bytes = known(plain.model_bytes)
    assert plain.baseline and copied.baseline
    assert plain.baseline.rss_bytes > size_bytes
    assert known(plain.peaks.rss_bytes) - plain.baseline.rss_bytes < 16 * MIB
    more_bytes = known(copied.peaks.rss_bytes) - copied.baseline.rss_bytes
    assert abs(more_bytes - size_bytes - TIED_BYTES) < 16 * MIB
    assert phases_of(plain)["verify"].peak_rss_bytes < plain.baseline.rss_bytes + 96 * MIB


def test_a_model_that_does_not_fit_is_killed_before_the_save(
    bench: Bench, limiting: Watched
) -> None:
    result = bench("torch_save", limiting, spec=LARGE, operation="save", limit_bytes=160 * MIB)
    assert result.outcome is Outcome.OOM_KILLED
    assert result.written is None
