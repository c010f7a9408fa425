"""The project's own strategies leave right models: tied weights and every kind of buffer."""

import pytest
from cells import DEFAULT_STRATEGIES, LARGE, MIB, Bench, Outcome, Watched, names_of, phases_of
from nightly import isolations, nightly


@pytest.mark.parametrize("isolation", isolations("process"), indirect=True)
@pytest.mark.parametrize("strategy", DEFAULT_STRATEGIES)
@pytest.mark.parametrize("model_name", ["tied-tiny", *nightly("gpt2-tiny")])
def test_a_strategy_leaves_a_right_model(
    bench: Bench, isolation: Watched, model_name: str, strategy: str
) -> None:
    result = bench(strategy, isolation, model_name=model_name)
    assert (result.outcome, result.message, result.last_phase) == (Outcome.OK, "", None)
    assert result.exit_code == 0
    assert result.cached_bytes_at_start == 0
    names = names_of(result)
    assert (names[:2], names[-2:]) == (["import", "prepare"], ["touch", "forward"])


@pytest.mark.parametrize("strategy", ["baseline", "mmap_assign", "streaming"])
def test_reading_every_byte_takes_less_than_16_mib(
    bench: Bench, process: Watched, strategy: str
) -> None:
    result = bench(strategy, process, spec=LARGE)
    assert result.outcome is Outcome.OK
    touch = phases_of(result)["touch"]
    before = result.phases[result.phases.index(touch) - 1]
    mapped = touch.end.file_bytes - before.end.file_bytes  # the model itself, where it is a file
    assert touch.peak_rss_bytes - before.end.rss_bytes - mapped < 16 * MIB
    assert touch.end.anon_bytes - before.end.anon_bytes < 16 * MIB
