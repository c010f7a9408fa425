"""NVML's answers, put in where NVIDIA's Python module of it would be."""

import sys
import time
from collections.abc import Callable

import pytest
from fake_nvml import Nvml

from weighin.probes.gpu_memory import DriverMemory, NvmlUnavailable


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Nvml], Nvml]:
    def use(library: Nvml) -> Nvml:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return use


def test_a_process_is_found_among_all_of_the_gpu(use: Callable[[Nvml], Nvml]) -> None:
    others: list[tuple[int, int | None]] = [(number, number) for number in range(1, 200)]
    library = use(Nvml([*others, (4321, 512)]))
    memory = DriverMemory("GPU-ab", 4321)
    assert library.uuids == ["GPU-ab"]
    assert memory.driver_version == "580.1"
    library.processes[-1] = (4321, 1024)
    deadline = time.monotonic() + 60
    while memory._points[-1][1] != 1024 and time.monotonic() < deadline:
        time.sleep(0.01)
    points = memory.stop()
    assert points[0][1] == 512
    assert points[-1][1] == 1024
    assert points == sorted(points)
    assert library.running == 0


@pytest.mark.parametrize("processes", [[(2, 5)], [(1, None)]])
def test_a_driver_that_does_not_tell_says_why(
    use: Callable[[Nvml], Nvml], processes: list[tuple[int, int | None]]
) -> None:
    use(Nvml(processes))
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    why = "NVML does not report the memory of process 1: another PID namespace, or MIG"
    assert str(caught.value) == why


def test_a_driver_that_does_not_start_says_so(use: Callable[[Nvml], Nvml]) -> None:
    def missing() -> None:
        raise Nvml.NVMLError("NVML Shared Library Not Found")

    library = use(Nvml([]))
    library.nvmlInit = missing  # type: ignore[method-assign]
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    assert str(caught.value) == "NVML: NVML Shared Library Not Found"


def test_without_nvidias_module_the_reason_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    assert str(caught.value) == "nvidia-ml-py is not installed: pip install nvidia-ml-py"
