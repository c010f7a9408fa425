"""What is said of the GPUs that torch sees, and of those that it does not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weighin import child_process
from weighin.errors import IsolationUnavailable
from weighin.plan.task import Demand, check_machines
from weighin.probes import gpu_memory
from weighin.probes.gpu_memory import Gpu, GpuAnswer
from weighin.units import GIB

Answer = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gpu_memory.look.cache_clear()
    yield
    gpu_memory.look.cache_clear()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Let the process that asks torch print this, or fail with these words."""

    def answer(found: dict[str, Any] | None = None, why: str = "") -> None:
        monkeypatch.setattr(child_process, "ask", lambda *_, **__: (found, why))

    return answer


def gpus(*sizes: int) -> dict[str, Any]:
    found = [{"name": "Example", "total_bytes": size} for size in sizes]
    return {"torch": "2.13.0", "cuda": "13.0", "gpus": found}


def complaint(device: str, limits: list[int | None] | None = None) -> str:
    with pytest.raises(IsolationUnavailable) as caught:
        check_machines([Demand(None, device, limit) for limit in limits or [None]], ())
    return str(caught.value)


def test_torch_is_asked_in_a_process_of_its_own() -> None:
    seen = gpu_memory.look()
    assert bool(seen.gpus) == torch.cuda.is_available()
    if torch.version.cuda is None:
        assert seen.why == f"this torch ({torch.__version__}) is built without CUDA"


def test_all_gpus_are_listed(answer: Answer) -> None:
    answer(gpus(GIB, 2 * GIB))
    assert gpu_memory.look() == GpuAnswer((Gpu("Example", GIB), Gpu("Example", 2 * GIB)))
    check_machines([Demand(None, "cuda"), Demand(None, "cuda", GIB)], ())
    check_machines([Demand(None, "cuda:1", 2 * GIB)], ())


def test_a_torch_without_cuda(answer: Answer) -> None:
    answer({"torch": "2.13.0+cpu", "cuda": None, "gpus": []})
    assert complaint("cuda") == (
        "--device cuda: this torch (2.13.0+cpu) is built without CUDA\n"
        "install a CUDA build (pytorch.org/get-started), or: weighin predict MODEL --device cuda"
        " needs no GPU"
    )


def test_a_machine_without_a_gpu(answer: Answer) -> None:
    answer(gpus())
    assert complaint("cuda") == (
        "--device cuda: torch 2.13.0 finds no CUDA GPU\n"
        "nvidia-smi shows whether the driver finds one, or: weighin predict MODEL --device cuda needs no"
        " GPU"
    )


def test_a_gpu_or_a_limit_beyond_those_of_this_machine(answer: Answer) -> None:
    answer(gpus(GIB, 2 * GIB))
    assert complaint("cuda:7") == (
        "this machine has no cuda:7\ngive a smaller limit, or another device or machine"
    )
    assert "the GPU of this machine has 1.000 GiB, less than" in complaint("cuda", [None, 2 * GIB])
