"""A cell's environment reaches the worker in every isolation, and a library in it is really loaded."""

from pathlib import Path

import pytest
from cells import Bench, Outcome, Watched
from nightly import isolations


def test_the_worker_starts_with_the_variables_of_its_cell(bench: Bench, isolation: Watched) -> None:
    variables = {"MALLOC_ARENA_MAX": "2", "OF_THIS_TEST": "a b=c"}
    wanted = [f"{name}={value}" for name, value in variables.items()]
    result = bench("looks", isolation, environment=variables, wanted=wanted)
    assert (result.outcome, result.message) == (Outcome.OK, "")
    assert result.cell.environment == variables


@pytest.mark.parametrize("isolation", isolations("docker"), indirect=True)
def test_a_library_that_the_linker_does_not_load_is_no_measurement(
    bench: Bench, isolation: Watched, tmp_path: Path
) -> None:
    (library := tmp_path / "liballocator.so").write_text("not a library")
    result = bench("baseline", isolation, environment={"LD_PRELOAD": str(library)})
    assert result.outcome is Outcome.MEASUREMENT_FAILED
    assert "the dynamic linker did not load" in result.message


@pytest.mark.parametrize("isolation", isolations("docker"), indirect=True)
def test_a_library_that_the_linker_loads_is_measured(bench: Bench, isolation: Watched) -> None:
    names = ("libSegFault.so", "libpthread.so.0")
    libraries = [one for name in names for one in Path("/usr/lib").glob(f"*-linux-gnu/{name}")]
    if not libraries:
        pytest.skip("no small library to preload on this machine")
    result = bench("baseline", isolation, environment={"LD_PRELOAD": str(libraries[0])})
    assert (result.outcome, result.message) == (Outcome.OK, "")
