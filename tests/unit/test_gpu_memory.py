"""The GPUs that torch sees, or not, and NVML's answers, put in where NVIDIA's module of it would be."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from factories import refused
from fake_nvml import Nvml
from leftovers import wait_until

from weighin import child_process
from weighin.plan.task import Demand, check_machines
from weighin.probes import gpu_memory
from weighin.probes.gpu_memory import DriverMemory, Gpu, GpuAnswer, NvmlUnavailable
from weighin.units import GIB

Answer = Callable[..., None]
Use = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    gpu_memory.look.cache_clear()
    yield
    gpu_memory.look.cache_clear()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Let the process that asks torch print that it found GPUs of these sizes."""

    def answer(*sizes: int, torch: str = "2.13.0", cuda: str | None = "13.0") -> None:
        gpus = [{"name": "Example", "total_bytes": size} for size in sizes]
        found = {"torch": torch, "cuda": cuda, "gpus": gpus}
        monkeypatch.setattr(child_process, "ask", lambda *_, **__: (found, ""))

    return answer


def complaint(device: str, *limits: int) -> str:
    demands = [Demand(None, device, limit) for limit in limits or (None,)]
    return refused(check_machines, demands, ())


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    seen = gpu_memory.look()
    assert bool(seen.gpus) == torch.cuda.is_available()
    if torch.version.cuda is None:
        assert seen.why == f"this torch ({torch.__version__}) is built without CUDA"


def test_all_gpus_are_listed_and_more_than_they_have_is_refused(answer: Answer) -> None:
    answer(GIB, 2 * GIB)
    assert gpu_memory.look() == GpuAnswer((Gpu("Example", GIB), Gpu("Example", 2 * GIB)))
    check_machines([Demand(None, "cuda"), Demand(None, "cuda", GIB)], ())
    check_machines([Demand(None, "cuda:1", 2 * GIB)], ())
    assert complaint("cuda:7") == (
        "this machine has no cuda:7\ngive a smaller limit, or another device or machine"
    )
    assert "the GPU of this machine has 1.000 GiB, less than" in complaint("cuda", GIB, 2 * GIB)


PREDICT = "or: weighin predict MODEL --device cuda needs no GPU"


def test_a_torch_without_cuda_and_a_machine_without_a_gpu(answer: Answer) -> None:
    answer(torch="2.13.0+cpu", cuda=None)
    assert complaint("cuda") == (
        "--device cuda: this torch (2.13.0+cpu) is built without CUDA\n"
        f"install a CUDA build (pytorch.org/get-started), {PREDICT}"
    )
    gpu_memory.look.cache_clear()
    answer()
    assert complaint("cuda") == (
        "--device cuda: torch 2.13.0 finds no CUDA GPU\n"
        f"nvidia-smi shows whether the driver finds one, {PREDICT}"
    )


# -- NVML


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    def use(library: Any) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        return library

    return use


def test_a_process_is_found_among_all_of_the_gpu(use: Use) -> None:
    others: list[tuple[int, int | None]] = [(number, number) for number in range(1, 200)]
    library = use(Nvml([*others, (4321, 512)]))
    memory = DriverMemory("GPU-ab", 4321)
    assert library.uuids == ["GPU-ab"]
    assert memory.driver_version == "580.1"
    library.processes[-1] = (4321, 1024)
    wait_until(lambda: memory._points[-1][1] == 1024, "the driver was not asked again")
    points = memory.stop()
    assert points[0][1] == 512
    assert points[-1][1] == 1024
    assert points == sorted(points)
    assert library.running == 0


NOT_TOLD = "NVML does not report the memory of process 1: another PID namespace, or MIG"


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (Nvml([(2, 5)]), NOT_TOLD),
        (Nvml([(1, None)]), NOT_TOLD),
        (Nvml([], cannot_start="NVML Shared Library Not Found"), "NVML: NVML Shared Library Not Found"),
        (None, "nvidia-ml-py is not installed: pip install nvidia-ml-py"),
    ],
    ids=["another process", "no figure", "no driver", "no module"],
)  # fmt: skip
def test_without_a_figure_of_the_driver_there_is_a_reason(use: Use, library: Any, why: str) -> None:
    use(library)
    with pytest.raises(NvmlUnavailable) as caught:
        DriverMemory("GPU-ab", 1)
    assert str(caught.value) == why
