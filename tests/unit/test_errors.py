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
        ("NoNodeLeft", 4),
        ("IsolationUnavailable", 3),
        ("Interrupted", 130),
    ],
)
def test_the_exit_codes(name: str, exit_code: int) -> None:
    assert getattr(errors, name).exit_code == exit_code


def test_the_tree_of_the_docstring_is_whole() -> None:
    classes = [HarnessError, *_below(HarnessError)]
    ours = {each.__name__ for each in classes if each.__module__ == "weighin.errors"}
    assert errors.__doc__
    assert ours == {name for name in ours if f" {name} " in errors.__doc__}


def _below(kind: type) -> list[type]:
    subclasses: list[type] = kind.__subclasses__()
    return [each for sub in subclasses for each in (sub, *_below(sub))]


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
            "the Python package peft, which is not installed",
        ),
        (
            ImportError("cannot import name 'x' from 'y'", name="y"),
            "a Python package that cannot be imported: cannot import name 'x' from 'y'",
        ),
    ],
)
def test_a_package_that_is_missing_or_broken_is_named(error: ImportError, fault: str) -> None:
    with pytest.raises(ConfigError) as caught, extra("hf", "--adapter a"):
        raise error
    assert caught.value.message == f"--adapter a needs {fault}"
    assert caught.value.repair == install.command("hf")
