"""The ledger of a symbolic run: where storages lie, what operations on them touch, and which files are read."""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from snapshots import Compare, answered

from weighin.cell import ModelSpec
from weighin.predict.allocators import CachingAllocator
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger, anon_bytes
from weighin.predict.patches import declared, pretended, safetensors_reads
from weighin.result import Memory
from weighin.units import KIB, MIB, format_exact

SPEC = ModelSpec("one", "torch.nn:Linear", {})
BASELINE = Memory(rss_bytes=0, anon_bytes=0, file_bytes=5 * MIB, shmem_bytes=3 * MIB)
MANY = 4 * MIB  # elements; large blocks have a mapping of their own
SESSION = Path(__file__).with_name("snapshots") / "ledger.txt"
"""Statements, and below each the values of its expressions and the sums that it changed.

A comment begins again with a new ledger. Add a line ``$ ...``, and ``pytest --rewrite`` writes the answer.
"""


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger that follows every operation of the test, also those on a simulated GPU."""
    one = Ledger(CachingAllocator(), BASELINE)
    with pretended(one), Operations(one):
        yield one


class Session:
    """Executes statements under a ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened = ExitStack()
        self.names: dict[str, Any] = {}

    def begin(self) -> None:
        self.names.clear()  # so that all tensors are freed
        self.opened.close()
        self.ledger = Ledger(CachingAllocator(), BASELINE)
        self.ledger.update()
        self.opened.enter_context(pretended(self.ledger))
        self.opened.enter_context(Operations(self.ledger))
        self.names |= {
            "torch": torch, "ledger": self.ledger, "folder": self.folder, "MANY": MANY, "KIB": KIB,
            "MIB": MIB, "place": self.ledger.place_of, "at_most": self.at_most, "made": self.made,
        }  # fmt: skip

    def answer(self, line: str) -> str:
        if line.startswith("#"):
            self.begin()
            return ""
        shown: list[str] = []

        def show(value: object) -> None:
            if value is not None and not isinstance(value, torch.Tensor):
                shown.append(str(value))

        before = self.sums()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "displayhook", show)
            try:
                exec(compile(f"{line}\n", SESSION, "single"), self.names)
            except CannotFollow as error:
                shown.append(f"CannotFollow: {error}"[:80])
        changed = dict(self.sums().items() - before.items())
        shown += [f"{name}: {format_exact(size)}" for name, size in sorted(changed.items())]
        return "\n".join(shown)

    def sums(self) -> dict[str, int]:
        one = self.ledger
        assert one.cuda
        held = {"host": one.tensor_bytes, "pinned": one.pinned_bytes, "shared": one.shared_bytes}
        pages = {"file pages": one.peaks["host_file_peak_bytes"]}
        work = {name: size for name, size in one.work.items() if name != "modules"}  # of Python
        return held | pages | work | {"GPU": one.cuda.current["requested"]}

    def at_most(self, act: Callable[[], object]) -> str:
        """The anonymous memory that is held for a while beside that of before."""
        before = self.ledger.tensor_bytes
        self.ledger.restart_peaks()
        act()
        return format_exact(self.ledger.peaks["tensor_peak_bytes"] - before)

    def made(self, make: Callable[[], torch.Tensor]) -> str:
        """What a tensor is and holds; from 32 MiB on, it has a mapping of its own."""
        before = self.ledger.tensor_bytes
        one = make()
        size = format_exact(self.ledger.tensor_bytes - before)
        return f"{one.dtype} {[*one.shape]} on {one.device.type}: {size}"


def test_what_each_statement_changes(tmp_path: Path, same: Compare) -> None:
    session = Session(tmp_path)
    with session.opened:
        same(SESSION.name, answered(SESSION, session.answer))


def test_a_phase_has_the_peaks_within_it(ledger: Ledger) -> None:
    with ledger.phase("build"):
        torch.zeros(MANY)
        torch.zeros(MANY, device="cuda")
    with ledger.phase("read"):
        torch.zeros(MANY // 2)
    build, read = ledger.phases
    assert (build.name, read.name) == ("build", "read")
    assert build.cuda_requested_bytes == 4 * MANY
    assert read.cuda_requested_bytes == 0
    assert build.host_anon_peak_bytes and read.host_anon_peak_bytes
    assert build.host_anon_peak_bytes - read.host_anon_peak_bytes == pytest.approx(
        2 * MANY, abs=MIB
    )


def test_tensors_have_the_default_dtype(ledger: Ledger) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.zeros(MANY).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_empty_pinned_tensors_are_page_locked_and_count_once(ledger: Ledger) -> None:
    own = anon_bytes()
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    ctypes.memset(pinned.data_ptr(), 1, pinned.nbytes)  # safetensors reads a file into it, in Rust
    assert ledger.place_of(pinned) == "pinned"
    assert ledger.pinned_bytes == ledger.tensor_bytes == 4 * MIB
    assert anon_bytes() - own < MIB


# -- the sums of a process


def test_peaks_begin_again_at_the_sums_of_now(ledger: Ledger) -> None:
    kept = torch.zeros(MANY)
    del_me = torch.zeros(2 * MANY)
    high = ledger.peaks["host_anon_peak_bytes"]
    del del_me
    ledger.restart_peaks()
    peaks = ledger.peaks
    assert peaks["tensor_peak_bytes"] == kept.nbytes
    assert high - peaks["host_anon_peak_bytes"] == pytest.approx(8 * MANY, abs=MIB)
    for other in ("host_anon_least_bytes", "host_anon_most_bytes"):
        assert peaks[other] == pytest.approx(peaks["host_anon_peak_bytes"], abs=MIB)
    assert peaks["host_file_peak_bytes"] == BASELINE.file_bytes


def test_adopted_memory_is_the_loads(ledger: Ledger) -> None:
    ledger.update()
    before = ledger.peaks["host_anon_peak_bytes"]
    ledger.adopt(64 * MIB)
    ledger.update()
    assert ledger.peaks["host_anon_peak_bytes"] - before == pytest.approx(64 * MIB, abs=MIB)
    without = Ledger(None, BASELINE, own_bytes=64 * MIB)
    without.update()
    assert before - without.peaks["host_anon_peak_bytes"] == pytest.approx(64 * MIB, abs=MIB)


def test_the_usual_peak_lies_between_the_least_and_the_most(ledger: Ledger) -> None:
    peaks = ("host_anon_peak_bytes", "host_anon_least_bytes", "host_anon_most_bytes")
    for found, told in {(5, 7, 3): [5, 5, 5], (5, 3, 7): [5, 3, 7]}.items():
        ledger.peaks = Counter(dict(zip(peaks, found, strict=True)))
        assert [ledger.figures[name] for name in peaks] == told


def test_the_three_heaps_differ_by_what_becomes_of_holes(ledger: Ledger) -> None:
    raise_threshold = torch.zeros(8 * MIB, dtype=torch.uint8)
    del raise_threshold
    ledger.restart_peaks()
    kept = []
    for _ in range(6):
        temporary = torch.zeros(2 * MIB, dtype=torch.uint8)
        kept.append(torch.zeros(2 * MIB, dtype=torch.uint8))
        del temporary
    assert ledger.peaks["host_anon_peak_bytes"] - ledger.peaks["host_anon_least_bytes"] > 8 * MIB
    assert ledger.peaks["host_anon_most_bytes"] >= ledger.peaks["host_anon_peak_bytes"] - MIB
    before = ledger.tensor_bytes
    for heap in ledger.heaps:
        heap.trim()
    assert before - ledger.tensor_bytes > 8 * MIB


# -- files that are read without an operation of torch

LARGE = {"a": torch.ones(MIB, dtype=torch.int32), "b": torch.ones(2 * MIB, dtype=torch.float16)}
SIZE = 8 * MIB


@pytest.fixture
def reads() -> Iterator[Ledger]:
    """A ledger without a GPU that follows every operation of the test, and every patched read."""
    one = Ledger(None, BASELINE)
    with declared(one, SPEC), Operations(one):
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


@pytest.mark.parametrize(
    ("name", "mmap", "place", "archives"),
    [("zip.pt", False, "host", 1), ("legacy.pt", False, "host", 0), ("zip.pt", True, "file", 0)],
    ids=["a zip", "a file of before 1.6", "a mapped zip"],
)
def test_a_file_of_torch_is_read_into_memory_or_mapped(
    reads: Ledger, files: dict[str, Path], name: str, mmap: bool, place: str, archives: int
) -> None:
    state = torch.load(files[name], mmap=mmap)
    assert forms(state) == forms(LARGE)
    assert {reads.place_of(tensor) for tensor in state.values()} == {place}
    held = 0 if mmap else SIZE
    assert reads.tensor_bytes == pytest.approx(held, abs=4 * 4096)  # whole pages
    assert (reads.work["read_bytes"], mmap or reads.work["archives"]) == (held, mmap or archives)
    if not mmap:
        with pytest.raises(CannotFollow):  # no byte was read
            state["a"].sum().item()
    for tensor in state.values():
        reads.read(tensor)
    assert reads.work["mapped_bytes"] == pytest.approx(SIZE - held, abs=4 * 4096)


def test_safetensors_that_are_read_by_the_library_are_copies(
    reads: Ledger, files: dict[str, Path]
) -> None:
    names: dict[str, Any] = {"load_file": safetensors.torch.load_file, "unhashable": []}
    with safetensors_reads(reads, names):  # the global names of a strategy
        state = names["load_file"](str(files["model.safetensors"]), backend="pread")
    assert forms(state) == forms(LARGE)
    assert (reads.tensor_bytes, reads.work["read_bytes"]) == (SIZE, SIZE)
    assert names["load_file"] is safetensors.torch.load_file


def test_the_bytes_of_a_safetensors_file_are_held_beside_its_tensors(
    reads: Ledger, files: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "words.txt").write_text("as it is")
    length = files["model.safetensors"].stat().st_size
    names: dict[str, Any] = {"load": safetensors.torch.load}
    with safetensors_reads(reads, names):
        assert (tmp_path / "words.txt").read_bytes() == b"as it is"
        content: Any = files["model.safetensors"].read_bytes()
        assert reads.work["read_bytes"] == length
        state = names["load"](content)
    assert forms(state) == forms(LARGE)
    assert reads.work["read_bytes"] == length
    assert reads.tensor_bytes == pytest.approx(length + SIZE, abs=4096)
    del content
    assert reads.tensor_bytes == SIZE
    assert files["model.safetensors"].read_bytes()[8:9] == b"{"


def test_drawn_values_need_no_look_if_none_is_out_of_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def looks(*_: object, **__: object) -> None:
        raise CannotFollow("it uses values")

    monkeypatch.setattr(torch.nn.init, "_no_grad_trunc_normal_", looks)
    tensor = torch.empty(4)
    with declared(Ledger(None, BASELINE), SPEC):
        for mean, most in {0: 0.25, 1: 0.125, -1: 0.125}.items():  # bounds are -2 and 2
            assert torch.nn.init.trunc_normal_(tensor, mean, most) is tensor
            with pytest.raises(CannotFollow):
                torch.nn.init.trunc_normal_(tensor, mean, most + 0.001)


def test_drawn_values_that_torch_need_not_look_at_are_torchs(reads: Ledger) -> None:
    small = torch.nn.init.trunc_normal_(torch.empty(8), 0.0, 1.0, -0.5, 0.5)
    assert small.shape == (8,)
    assert float(small.abs().max()) <= 0.5
