"""Files that are read without an operation of torch: what a prediction counts of them."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_predict_ledger import BASELINE

from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger
from weighin.predict.patches import declared, safetensors_reads
from weighin.units import MIB

LARGE = {"a": torch.ones(MIB, dtype=torch.int32), "b": torch.ones(2 * MIB, dtype=torch.float16)}
SIZE = 8 * MIB


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger that follows every operation of the test, and every patched read."""
    with ExitStack() as followed:
        one = Ledger(None, BASELINE)
        followed.enter_context(declared(one))
        followed.enter_context(Operations(one))
        yield one


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tensors in files of each kind."""
    folder = tmp_path_factory.mktemp("files")
    found = {name: folder / name for name in ("zip.pt", "legacy.pt", "model.safetensors")}
    torch.save(LARGE, found["zip.pt"])
    torch.save(LARGE, found["legacy.pt"], _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(LARGE, found["model.safetensors"])
    return found


def forms(state: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


@pytest.mark.parametrize(("name", "archives"), [("zip.pt", 1), ("legacy.pt", 0)])
def test_a_file_of_torch_is_read_into_memory(
    ledger: Ledger, files: dict[str, Path], name: str, archives: int
) -> None:
    state = torch.load(files[name])
    assert forms(state) == forms(LARGE)
    assert {ledger.place_of(tensor) for tensor in state.values()} == {"host"}
    assert ledger.tensor_bytes == pytest.approx(SIZE, abs=4 * 4096)  # whole pages
    assert (ledger.work["read_bytes"], ledger.work["archives"]) == (SIZE, archives)
    with pytest.raises(CannotFollow):  # no byte was read
        state["a"].sum().item()


def test_a_file_of_torch_can_be_mapped(ledger: Ledger, files: dict[str, Path]) -> None:
    state = torch.load(files["zip.pt"], mmap=True)
    assert {ledger.place_of(tensor) for tensor in state.values()} == {"file"}
    assert (ledger.tensor_bytes, ledger.work["read_bytes"]) == (0, 0)
    for tensor in state.values():
        ledger.read(tensor)
    assert ledger.work["mapped_bytes"] == pytest.approx(SIZE, abs=4 * 4096)


def reads(ledger: Ledger) -> tuple[ExitStack, dict[str, Any]]:
    """Return the global names of a strategy whose reads of safetensors are followed."""
    names: dict[str, Any] = {
        "load": safetensors.torch.load,
        "load_file": safetensors.torch.load_file,
        "unhashable": [],
    }
    stack = ExitStack()
    stack.enter_context(safetensors_reads(ledger, names))
    return stack, names


def test_safetensors_that_are_read_by_the_library_are_copies(
    ledger: Ledger, files: dict[str, Path]
) -> None:
    stack, names = reads(ledger)
    with stack:
        state = names["load_file"](str(files["model.safetensors"]), backend="pread")
    assert forms(state) == forms(LARGE)
    assert (ledger.tensor_bytes, ledger.work["read_bytes"]) == (SIZE, SIZE)
    assert names["load_file"] is safetensors.torch.load_file


def test_the_bytes_of_a_safetensors_file_are_held_beside_its_tensors(
    ledger: Ledger, files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("as it is")
    length = files["model.safetensors"].stat().st_size
    stack, names = reads(ledger)
    with stack:
        assert (tmp_path / "words.txt").read_bytes() == b"as it is"
        content: Any = files["model.safetensors"].read_bytes()
        assert ledger.work["read_bytes"] == length
        state = names["load"](content)
    assert forms(state) == forms(LARGE)
    assert ledger.work["read_bytes"] == length
    assert ledger.tensor_bytes == pytest.approx(length + SIZE, abs=4096)
    del content
    assert ledger.tensor_bytes == SIZE
    assert files["model.safetensors"].read_bytes()[8:9] == b"{"


@pytest.mark.parametrize(
    ("mean", "std", "follows"),
    [(0, 0.25, True), (0, 0.251, False), (1, 0.125, True), (1, 0.126, False), (-1, 0.126, False)],
)
def test_drawn_values_need_no_look_if_none_is_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch, mean: float, std: float, follows: bool
) -> None:
    def looks(*_: object, **__: object) -> None:
        raise CannotFollow("it uses values")

    monkeypatch.setattr(torch.nn.init, "_no_grad_trunc_normal_", looks)
    tensor = torch.empty(4)
    with declared(Ledger(None, BASELINE)):
        if follows:
            assert torch.nn.init.trunc_normal_(tensor, mean, std) is tensor
        else:
            with pytest.raises(CannotFollow):
                torch.nn.init.trunc_normal_(tensor, mean, std)


def test_drawn_values_that_torch_need_not_look_at_are_torchs(ledger: Ledger) -> None:
    small = torch.nn.init.trunc_normal_(torch.empty(8), 0.0, 1.0, -0.5, 0.5)
    assert small.shape == (8,)
    assert float(small.abs().max()) <= 0.5
