"""What a user reads when the harness stops, and the exit code that scripts see."""

import pytest

from weighin import errors, install
from weighin.errors import ConfigError, HarnessError, UnknownName, extra


def test_an_error_is_its_cause_and_its_repair() -> None:
    error = HarnessError("the disk is full", "free 2 GiB")
    assert (error.message, error.repair) == ("the disk is full", "free 2 GiB")
    assert str(error) == "the disk is full\nfree 2 GiB"


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("HarnessError", 2),
        ("ConfigError", 2),
        ("UnknownName", 2),
        ("CheckpointError", 2),
        ("RecordError", 2),
        ("StillRunning", 4),
        ("IsolationUnavailable", 3),
        ("Interrupted", 130),
    ],
)
def test_the_exit_codes(name: str, exit_code: int) -> None:
    assert getattr(errors, name).exit_code == exit_code


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    error = UnknownName("strategy", "mmap_asign", ["streaming", "mmap_assign", "baseline"])
    assert str(error) == (
        "no strategy is called 'mmap_asign'\n"
        "did you mean 'mmap_assign'? known: baseline, mmap_assign, streaming"
    )


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (
            ModuleNotFoundError("No module named 'peft'", name="peft"),
            "the Python package peft: No module named 'peft'",
        ),
        (
            ImportError("libx.so.1: cannot open shared object file"),
            "the Python package that fails here: libx.so.1: cannot open shared object file",
        ),
    ],
)
def test_a_package_that_is_missing_or_broken_is_named(error: ImportError, fault: str) -> None:
    with pytest.raises(ConfigError) as caught, extra("hf", "--adapter a"):
        raise error
    assert caught.value.message == f"--adapter a needs {fault}"
    assert caught.value.repair == install.command("hf")
