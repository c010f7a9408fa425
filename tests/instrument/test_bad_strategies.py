"""Whatever a strategy does, its cell ends with the right outcome, and nothing is left behind.

``bench`` itself asserts after every cell that no process, cgroup or container is left.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cells import MIB, Bench, Outcome, Result, Watched, hide_kills_elsewhere, known, phases_of
from nightly import by_day, isolations, nightly

BAD_ENDS = (Path(__file__).parent / "strategies" / "bad_ends.py").read_text().splitlines()

TEXTS = json.loads(Path(__file__).with_name("bad_ends.json").read_text())
"""What the record says, for each way of the strategies to end badly."""
RAISED, ENDED, SPOILED = (TEXTS[kind] for kind in ("raised", "ended", "spoiled"))


@pytest.fixture(autouse=True)
def _no_kills_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_kills_elsewhere(monkeypatch)


def place_of(way: str) -> str:
    """Return "bad_ends.py:LINE" of the line that a way to end is marked at."""
    (number,) = (n for n, line in enumerate(BAD_ENDS, 1) if line.endswith(f"# here: {way}"))
    return f"bad_ends.py:{number}"


@pytest.mark.parametrize("how", by_day(RAISED, "raises_a_novel", "nests_phases", "exits"))
def test_an_error_is_one_line_with_its_place(bench: Bench, process: Watched, how: str) -> None:
    result = bench("bad_ends", process, how=how)
    assert (result.outcome, result.last_phase) == (Outcome.STRATEGY_FAILED, "bad")
    assert result.message == f"{RAISED[how]} ({place_of(how)})"
    assert result.exit_code == 1


def test_an_error_is_the_same_under_every_isolation(bench: Bench, isolation: Watched) -> None:
    result = bench("bad_ends", isolation, how="raises")
    assert (result.outcome, result.last_phase) == (Outcome.STRATEGY_FAILED, "bad")
    assert result.message == f"{RAISED['raises']} ({place_of('raises')})"
    assert [phase.name for phase in result.phases][-2:] == ["good", "bad"]
    assert bench.samples(result)


ENDED_BY_DAY = ("exits_at_once_as_if_all_were_well", "exits_after_a_word", "segfaults", "returns_none")  # fmt: skip


@pytest.mark.parametrize("how", by_day(ENDED, *ENDED_BY_DAY))
def test_an_end_says_how_and_where(bench: Bench, process: Watched, how: str) -> None:
    result = bench("bad_ends", process, how=how)
    assert (result.outcome, result.last_phase) == (Outcome.STRATEGY_FAILED, "bad")
    assert result.message == ENDED[how]


@pytest.mark.parametrize("how", ["kills_itself", *nightly("exits_at_once", "segfaults")])
def test_a_sudden_end_is_not_taken_for_lack_of_memory(
    bench: Bench, limiting: Watched, how: str
) -> None:
    result = bench("bad_ends", limiting, how=how, limit_bytes=512 * MIB)
    assert (result.outcome, result.last_phase) == (Outcome.STRATEGY_FAILED, "bad")
    assert (result.message, result.oom_kills) == (ENDED[how], 0)
    assert phases_of(result)["good"]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"), indirect=True)
@pytest.mark.parametrize("how", ["hangs_with_the_gil_held", *nightly("sleeps")])
def test_a_hang_is_ended_in_time_and_keeps_its_timeline(
    bench: Bench, isolation: Watched, how: str, seconds_to_load: Callable[[Watched], float]
) -> None:
    timeout_s = round(2 * seconds_to_load(isolation) + 1)
    start = time.monotonic()
    result = bench("bad_ends", isolation, how=how, timeout_s=timeout_s)
    assert time.monotonic() - start < timeout_s + 20
    assert (result.outcome, result.last_phase) == (Outcome.TIMEOUT, "bad")
    assert result.message == f"still running after {timeout_s} s, in phase 'bad'"
    good = phases_of(result)["good"]
    hung = [s for s in bench.samples(result) if (s["t_ns"] or 0) > good.end_ns]
    assert len(hung) > 10  # more than half the time-out, at 5 ms a look
    assert known(result.peaks.rss_bytes) >= good.end.rss_bytes


def test_an_end_that_leaves_a_child_is_seen_at_once(bench: Bench, isolation: Watched) -> None:
    start = time.monotonic()
    result = bench("bad_ends", isolation, how="leaves_a_child_and_kills_itself")
    assert time.monotonic() - start < 60
    assert result.outcome is Outcome.STRATEGY_FAILED
    assert result.message == "the measured process was ended by SIGKILL in phase 'bad'"


@pytest.mark.parametrize(
    "how", by_day(SPOILED, "one_value_of_a_buffer_in_no_checkpoint", "left_on_meta", "untied")
)
def test_a_spoiled_model_is_caught(bench: Bench, process: Watched, how: str) -> None:
    model_name = "gpt2-tiny" if "persistent" in how else "tied-tiny"
    result = bench("wrong_weights", process, model_name=model_name, how=how)
    assert (result.outcome, result.message) == (Outcome.WRONG_WEIGHTS, SPOILED[how])
    assert result.last_phase in ("spoil", "touch")


def test_one_wrong_value_is_caught_under_every_isolation(bench: Bench, isolation: Watched) -> None:
    how = "one_value_of_a_parameter"
    result = bench("wrong_weights", isolation, how=how)
    assert (result.outcome, result.message) == (Outcome.WRONG_WEIGHTS, SPOILED[how])
    assert result.ready_ns  # it was read through before it was judged


NOISE = (
    "prints_10_mib_without_an_end", "prints_what_looks_like_events", "closes_its_streams",
    "reads_from_stdin", "lets_a_child_print",
)  # fmt: skip
LEFT = ("leaves_a_child_in_another_session", *nightly("leaves_a_child", "leaves_a_child_with_its_streams"))  # fmt: skip


@pytest.mark.parametrize("isolation", isolations("docker"), indirect=True)
@pytest.mark.parametrize("how", NOISE)
def test_noise_changes_nothing(bench: Bench, isolation: Watched, how: str) -> None:
    assert_ok(bench("noisy", isolation, how=how))


@pytest.mark.parametrize("how", LEFT)
def test_children_that_outlive_the_worker_are_ended(
    bench: Bench, isolation: Watched, how: str
) -> None:
    start = time.monotonic()
    assert_ok(bench("noisy", isolation, how=how))
    assert time.monotonic() - start < 60  # it was not waited for


@pytest.mark.parametrize("isolation", isolations("cgroup", "docker"), indirect=True)
def test_dev_shm_is_charged_to_the_cell(bench: Bench, isolation: Watched) -> None:
    result = bench("fills_shm", isolation)
    assert_ok(result)
    if isolation.limits:
        written, before = phases_of(result)["write"].end, phases_of(result)["prepare"].end
        rise = known(written.cgroup_bytes) - known(before.cgroup_bytes)
        assert rise == pytest.approx(64 * MIB, abs=4 * MIB)


def assert_ok(result: Result) -> None:
    assert (result.outcome, result.message) == (Outcome.OK, "")
