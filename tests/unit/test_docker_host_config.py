"""The environment variables of a worker in a container."""

import pytest

from weighin.isolation.docker.host_config import worker_environment
from weighin.isolation.docker.mounts import CODE


def test_a_worker_finds_weighins_code_and_writes_into_its_tmpfs() -> None:
    given = worker_environment({"PYTHONPATH": "/elsewhere", "HOME": "/root"})
    assert (given["PYTHONPATH"], given["HOME"]) == (CODE, "/tmp")
    assert given["PYTHONDONTWRITEBYTECODE"] == "1"  # the code is mounted read-only


def test_a_variable_of_the_cell_replaces_this_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    given = worker_environment({"MALLOC_ARENA_MAX": "2"})
    assert (given["OMP_NUM_THREADS"], given["MALLOC_ARENA_MAX"]) == ("4", "2")


@pytest.mark.parametrize("name", ["LD_PRELOAD", "NVIDIA_VISIBLE_DEVICES"])
def test_what_belongs_to_this_machine_is_not_passed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    assert name not in worker_environment({})
