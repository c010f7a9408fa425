"""NVML's answers, put in where its library would be: functions of its binary interface."""

import time
from collections.abc import Callable

import pytest
from fake_nvml import Nvml

from weighin.probes import gpu_memory
from weighin.probes.gpu_memory import DriverMemory, NvmlUnavailable

_UNKNOWN_ERROR = 999


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], Nvml]:
    def use(library: Nvml) -> Nvml:
        monkeypatch.setattr(gpu_memory.ctypes, "CDLL", lambda name: library)
        return library

    return use


def test_a_process_is_found_among_all_of_the_gpu(use: Callable[[Nvml], Nvml]) -> None:
    library = use(Nvml([(number, number) for number in range(1, 200)] + [(4321, 512)]))
    memory = DriverMemory("GPU-ab", 4321)
    assert library.uuids == [b"GPU-ab"]
    assert memory.driver_version == "580.1"
    library.processes[-1] = (4321, 1024)
    deadline = time.monotonic() + 10
    while len(memory._points) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    points = memory.stop()
    assert points[0][1] == 512
    assert points[-1][1] == 1024
    assert points == sorted(points)
    assert library.running == 0


def test_the_looks_end_with_the_process(use: Callable[[Nvml], Nvml]) -> None:
    library = use(Nvml([(1, 512)]))
    memory = DriverMemory("GPU-ab", 1)
    library.processes = []
    memory._thread.join(10)
    assert not memory._thread.is_alive()
    assert {used for _, used in memory.stop()} == {512}


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([(2, 5)], "NVML lists no process 1: another PID namespace, or MIG"),
        ([(1, 2**64 - 1)], "NVML does not report memory per process here"),
    ],
)
def test_a_driver_that_does_not_tell_says_why(
    use: Callable[[Nvml], Nvml], processes: list[tuple[int, int]], expected: str
) -> None:
    library = use(Nvml(processes))
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    assert str(caught.value) == expected
    assert library.running == 0


def test_an_unknown_gpu_is_told_in_nvmls_own_words(use: Callable[[Nvml], Nvml]) -> None:
    library = use(Nvml([]))
    library.status = _UNKNOWN_ERROR
    with pytest.raises(NvmlUnavailable, match=r"^NVML: nvmlDeviceGetHandleByUUID: Not Found$"):
        DriverMemory("GPU-ab", 1)


def test_an_old_driver_lacks_a_function(use: Callable[[Nvml], Nvml]) -> None:
    library = use(Nvml([]))
    del library.nvmlDeviceGetComputeRunningProcesses_v3
    with pytest.raises(
        NvmlUnavailable,
        match=r"^this driver's NVML has no nvmlDeviceGetComputeRunningProcesses_v3$",
    ):
        DriverMemory("GPU-ab", 1)


def test_a_machine_without_nvml_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpu_memory.ctypes, "CDLL", missing)
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    assert str(caught.value) == "no NVML: libnvidia-ml.so.1: cannot open shared object file"


def test_a_driver_that_does_not_start_says_so(use: Callable[[Nvml], Nvml]) -> None:
    library = use(Nvml([]))
    library.nvmlInit_v2 = lambda: 18  # type: ignore[method-assign]
    with pytest.raises(NvmlUnavailable, match=r"^NVML does not start: error 18$"):
        DriverMemory("GPU-ab", 1)


def test_without_a_uuid_or_a_pid_there_is_nothing_to_ask() -> None:
    with pytest.raises(NvmlUnavailable, match=r"^this torch does not report the GPU's UUID$"):
        DriverMemory(None, 1)
    with pytest.raises(NvmlUnavailable, match=r"^the worker is not a process of this machine$"):
        DriverMemory("GPU-ab", None)
