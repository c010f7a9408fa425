"""The ledger of a symbolic run: where storages lie, what operations on them touch, and which files are read."""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from weighin.predict.allocators import CachingAllocator
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger, anon_bytes
from weighin.predict.patches import declared, pretended, safetensors_reads
from weighin.result import Memory
from weighin.units import KIB, MIB

BASELINE = Memory(rss_bytes=0, anon_bytes=0, file_bytes=5 * MIB, shmem_bytes=3 * MIB)
MANY = 4 * MIB  # elements; large blocks have a mapping of their own


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger that follows every operation of the test, also those on a simulated GPU."""
    one = Ledger(CachingAllocator(), BASELINE)
    with pretended(one), Operations(one):
        yield one


def cuda_bytes(ledger: Ledger) -> int:
    assert ledger.cuda
    return ledger.cuda.current["requested"]


def added(ledger: Ledger, before: int) -> int:
    """The anonymous memory of tensors at its peak since a sum before."""
    return ledger.peaks["tensor_peak_bytes"] - before


@pytest.mark.parametrize(
    ("source", "target", "dtype", "buffer_bytes"),
    [
        ("cpu", "cuda", torch.float16, 2 * MANY),  # converted on the CPU, into the GPU's dtype
        ("cpu", "cuda", torch.float64, 8 * MANY),
        ("cpu", "cuda", torch.float32, 0),
        ("cuda", "cuda", torch.float16, 0),  # converted on the GPU
        ("cuda", "cpu", torch.float16, 0),
        ("cpu", "cpu", torch.float16, 0),
    ],
)
def test_a_copy_to_the_gpu_that_converts_needs_a_buffer_on_the_cpu(
    ledger: Ledger, source: str, target: str, dtype: torch.dtype, buffer_bytes: int
) -> None:
    given = torch.ones(MANY, device=source)
    onto = torch.zeros(MANY, dtype=dtype, device=target)
    before = ledger.tensor_bytes
    ledger.restart_peaks()
    onto.copy_(given)
    assert added(ledger, before) == buffer_bytes
    assert ledger.tensor_bytes == before  # the buffer is freed


def test_memory_is_counted_where_it_is_written_and_until_it_is_freed(ledger: Ledger) -> None:
    tensor = torch.empty(MANY)
    assert ledger.tensor_bytes == 0
    tensor[: MANY // 2].fill_(1)
    assert ledger.tensor_bytes == 2 * MANY
    tensor.zero_()
    assert ledger.tensor_bytes == 4 * MANY
    assert ledger.work["fresh_bytes"] == 4 * MANY
    del tensor
    assert ledger.tensor_bytes == 0
    assert ledger.peaks["tensor_peak_bytes"] == 4 * MANY


def test_memory_that_torch_did_not_allocate_is_in_no_heap(ledger: Ledger) -> None:
    given = torch.empty(0, dtype=torch.uint8).set_(ledger.reserve(100 * KIB))
    given.fill_(1)
    assert ledger.tensor_bytes == 100 * KIB
    del given
    assert ledger.tensor_bytes == 0  # what a small block leaves in a heap would stay


def test_memory_of_the_gpu_is_the_allocators_and_results_are_where_their_inputs_are(
    ledger: Ledger,
) -> None:
    on_gpu = torch.zeros(MANY, device="cuda")
    assert (ledger.tensor_bytes, cuda_bytes(ledger)) == (0, 4 * MANY)
    assert on_gpu.is_cuda and on_gpu.device == torch.device("cuda", 0)
    assert ledger.work["written_bytes"] == 0  # the processor wrote nothing
    on_cpu = torch.zeros(MANY)
    result = on_gpu * 2
    assert (ledger.tensor_bytes, cuda_bytes(ledger)) == (4 * MANY, 8 * MANY)
    other = on_cpu * 2
    assert (ledger.tensor_bytes, cuda_bytes(ledger)) == (8 * MANY, 8 * MANY)
    assert (result.is_cuda, other.is_cuda) == (True, False)
    del on_gpu, result
    assert cuda_bytes(ledger) == 0


def test_page_locked_memory_is_rounded_up_to_a_power_of_two_and_used_again(ledger: Ledger) -> None:
    before = 0
    for nbytes, locked in {
        3 * MIB: 4 * MIB,
        8 * MIB: 8 * MIB,
        8 * MIB + 1: 16 * MIB,
        65 * KIB: 128 * KIB,
    }.items():
        with ledger.placed("pinned"):
            torch.empty(nbytes, dtype=torch.uint8)
        assert ledger.pinned_bytes - before == locked  # also after it was freed
        before = ledger.pinned_bytes
    assert ledger.tensor_bytes == before
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8)
    first, second = tensor.pin_memory(), tensor.pin_memory()
    assert ledger.pinned_bytes - before == 4 * MIB  # one of the two had been freed
    del first
    third = tensor[: 2 * MIB + 1].pin_memory()  # also 4 MiB, as rounded
    assert ledger.pinned_bytes - before == 4 * MIB
    fourth = tensor.pin_memory()
    assert ledger.pinned_bytes - before == 8 * MIB
    assert {ledger.place_of(one) for one in (second, third, fourth)} == {"pinned"}
    before = ledger.pinned_bytes
    with ledger.pinning(2, 12 * MIB):  # of code that is not run; 16 MiB were freed above
        assert ledger.pinned_bytes - before == 16 * MIB
    again = [torch.empty(12 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(3)]
    assert ledger.pinned_bytes - before == 32 * MIB  # for the third
    del again
    assert ledger.shared_bytes == ledger.pinned_bytes + BASELINE.shmem_bytes


def test_pages_of_a_mapped_file_are_files_until_they_are_written(
    ledger: Ledger, tmp_path: Path
) -> None:
    (path := tmp_path / "file").write_bytes(bytes([7]) * MIB)
    mapped = torch.empty(0, dtype=torch.uint8).set_(ledger.map_file(str(path), MIB))
    assert ledger.place_of(mapped) == "file"
    assert mapped[5].item() == 7
    assert ledger.work["mapped_bytes"] == 4096
    ledger.read(mapped[: 512 * KIB])
    ledger.read(mapped[: 256 * KIB])  # the same pages
    assert ledger.peaks["host_file_peak_bytes"] == BASELINE.file_bytes + 512 * KIB
    assert (ledger.tensor_bytes, ledger.work["mapped_bytes"]) == (0, 512 * KIB)
    total = mapped.float()
    assert (ledger.tensor_bytes, ledger.work["mapped_bytes"]) == (total.nbytes, MIB)
    mapped[:4096].zero_()  # private: its pages are copied
    assert ledger.tensor_bytes == total.nbytes + 4096


def test_places_are_nested_and_come_back(ledger: Ledger) -> None:
    with ledger.placed("cuda"):
        with ledger.placed(None):
            inner = torch.empty(MANY)
        with ledger.placed("host"):
            outer = torch.empty(MANY)
    assert [ledger.place_of(one) for one in (inner, outer, torch.empty(MANY))] == [
        "cuda", "host", "host",
    ]  # fmt: skip
    assert ledger.place_of(torch.empty(MANY, device="meta")) == "meta"


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


def test_buffers_of_code_that_is_not_executed_are_held_for_a_while(ledger: Ledger) -> None:
    with ledger.holding(7 * MIB):
        assert ledger.tensor_bytes == 7 * MIB
    assert (ledger.tensor_bytes, ledger.peaks["tensor_peak_bytes"]) == (0, 7 * MIB)


def test_work_is_counted_by_its_kind(ledger: Ledger) -> None:
    tensor = torch.empty(MANY)
    tensor.fill_(1)
    tensor.normal_()
    torch.rand(MANY)
    assert ledger.work["written_bytes"] == 4 * MANY
    assert ledger.work["random_bytes"] == 8 * MANY


@pytest.mark.parametrize(
    ("make", "shape", "dtype"),
    [
        (lambda n: torch.zeros(n, n), (2, 2), torch.float32),
        (lambda n: torch.ones((n, 3), dtype=torch.int8), (2, 3), torch.int8),
        (lambda n: torch.full((n,), 7), (2,), torch.int64),
        (lambda n: torch.full((n,), 7.5), (2,), torch.float32),
        (lambda n: torch.full((n,), 7, dtype=torch.float16), (2,), torch.float16),
        (lambda n: torch.randint(5, (n,)), (2,), torch.int64),
        (lambda n: torch.randint(5, (n,), dtype=torch.int32), (2,), torch.int32),
        (torch.rand, (2,), torch.float32),
        (torch.eye, (2, 2), torch.float32),
        (lambda n: torch.eye(n, 3), (2, 3), torch.float32),
    ],
)
def test_a_factory_makes_the_same_tensor_small_and_large(
    ledger: Ledger, make: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    small = make(2)
    assert (tuple(small.shape), small.dtype, small.device.type) == (shape, dtype, "cpu")
    assert ledger.tensor_bytes == 0
    large = make(2**17 if len(shape) == 1 or shape[1] == 3 else 2**9)
    assert large.dtype == dtype
    assert ledger.tensor_bytes == large.nbytes > 64 * KIB


def test_values_of_small_tensors_are_those_of_a_real_load(ledger: Ledger) -> None:
    assert torch.eye(2).tolist() == [[1, 0], [0, 1]]
    assert (torch.full((3,), 2) * 2 + 1).tolist() == [5, 5, 5]
    small = torch.zeros(4)
    small.copy_(torch.arange(4))
    assert small.add_(1).tolist() == [1, 2, 3, 4]
    assert int(torch.ones(64 * KIB, dtype=torch.uint8).sum()) == 64 * KIB
    assert ledger.tensor_bytes == 0
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.zeros(MANY).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda: int(torch.ones(64 * KIB + 1, dtype=torch.uint8).sum()), "uses values of tensors"),
        (lambda: (torch.ones(300, 1) * torch.ones(1, 300)).sum().item(), "uses values of tensors"),
        (lambda: torch.zeros(MANY).nonzero(), "nonzero"),
    ],
    ids=["a large tensor", "a large result of small ones", "a shape that needs values"],
)
def test_values_of_large_tensors_are_not_followed(
    ledger: Ledger, use: Callable[[], object], words: str
) -> None:
    with pytest.raises(CannotFollow, match=words):
        use()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (torch.zeros_like, torch.float16),
        (torch.ones_like, torch.float16),
        (torch.rand_like, torch.float16),
        (lambda one: torch.zeros_like(one, dtype=torch.int64), torch.int64),
        (lambda one: torch.full_like(one, 3), torch.float16),
        (lambda one: one.new_ones((2, MANY)), torch.float16),
        (lambda one: one.new_full((2, MANY), 3), torch.float16),
        (lambda one: one.clone(), torch.float16),
        (lambda one: one.float(), torch.float32),
        (lambda one: one.triu(), torch.float16),
        (lambda one: one.to(torch.float64), torch.float64),
        (lambda one: one + 1, torch.float16),
        (lambda one: one.view(-1).double(), torch.float64),
    ],
)
def test_a_tensor_like_another_has_memory_of_its_own(
    ledger: Ledger, make: Any, dtype: torch.dtype
) -> None:
    one = torch.zeros((2, MANY), dtype=torch.float16)
    before = ledger.tensor_bytes
    other = make(one)
    assert (other.dtype, other.numel()) == (dtype, one.numel())
    assert ledger.tensor_bytes - before == other.nbytes


def test_a_copy_has_the_layout_that_is_asked_for(ledger: Ledger) -> None:
    one, channels_last = torch.zeros(2, 4, 512, 512), torch.channels_last
    for copy in (
        one.clone(memory_format=channels_last),
        one.half().to(memory_format=channels_last),
    ):
        assert copy.is_contiguous(memory_format=channels_last)
        assert copy.clone().stride() == copy.stride()


def test_views_share_the_memory_of_their_tensor(ledger: Ledger) -> None:
    one = torch.zeros(2, MANY)
    before = ledger.tensor_bytes
    views = [one[0], one.T, one.view(-1), one.detach(), one.unsqueeze(0), one.expand(2, 2, MANY)]
    views += [*one.split(1), *one.unbind()]
    assert ledger.tensor_bytes == before
    assert {view.untyped_storage().data_ptr() for view in views} == {
        one.untyped_storage().data_ptr()
    }


def test_several_results_and_results_in_given_tensors(ledger: Ledger) -> None:
    one = torch.zeros(2, MANY)
    values, indices = one.max(dim=1)
    assert (values.shape, indices.dtype) == ((2,), torch.int64)
    out, where = torch.empty(2, MANY), torch.empty(2, MANY, dtype=torch.int64)
    before = ledger.tensor_bytes
    found = torch.sort(one, out=(out, where))
    assert found[0] is out and found[1] is where
    assert ledger.tensor_bytes - before == out.nbytes + where.nbytes
    same = torch.add(one, 1, out=out)
    assert same is out


def test_tensors_on_the_meta_device_are_left_alone(ledger: Ledger) -> None:
    one = torch.zeros(MANY, device="meta")
    assert (one + 1).is_meta
    assert one.fill_(1).is_meta
    assert not one.is_cpu
    assert (one.device.type, ledger.tensor_bytes) == ("meta", 0)
    assert torch.empty_like(one, device="cpu").device.type == "cpu"


def test_empty_pinned_tensors_are_page_locked_and_count_once(ledger: Ledger) -> None:
    own = anon_bytes()
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    ctypes.memset(pinned.data_ptr(), 1, pinned.nbytes)  # safetensors reads a file into it, in Rust
    assert ledger.place_of(pinned) == "pinned"
    assert ledger.pinned_bytes == ledger.tensor_bytes == 4 * MIB
    assert anon_bytes() - own < MIB


# -- the simulated GPU


def test_tensors_move_to_the_gpu_and_back(ledger: Ledger) -> None:
    one = torch.zeros(MANY)
    for moved in (one.cuda(), one.to("cuda"), one.to(0), one.to(torch.device("cuda", 0)),
                  one.to(device="cuda"), one.to(device=0), one.cuda(0)):  # fmt: skip
        assert (moved.is_cuda, moved.is_cpu, moved.get_device()) == (True, False, 0)
        assert str(moved.device) == "cuda:0"
        del moved
    on_gpu = one.cuda()
    assert cuda_bytes(ledger) == 4 * MANY
    back = on_gpu.cpu()
    assert (back.is_cpu, back.is_cuda, back.get_device()) == (True, False, -1)
    assert ledger.tensor_bytes == 8 * MANY
    half = one.to("cuda", torch.float16)
    assert (half.dtype, half.is_cuda, cuda_bytes(ledger)) == (torch.float16, True, 6 * MANY)
    like, copied = one.to(half), half.to("cuda", copy=True)
    assert (like.dtype, like.is_cuda, copied.is_cuda) == (torch.float16, True, True)
    assert cuda_bytes(ledger) == 10 * MANY
    assert [on_gpu.cuda() is on_gpu, one.cpu() is one, half.to(half) is half] == [True] * 3
    assert copied is not half
    assert on_gpu.to(torch.float16).is_cuda
    assert one.to("meta").is_meta
    assert one.double().dtype == one.to(torch.float64).dtype == torch.float64


def test_a_block_of_a_device_places_what_is_made_in_it(ledger: Ledger) -> None:
    with torch.device("cuda"):
        inside = torch.zeros(MANY)
        outside = torch.zeros(MANY, device="cpu")
    with torch.device("meta"):
        meta = torch.zeros(MANY)
    assert [one.device.type for one in (inside, outside, meta)] == ["cuda", "cpu", "meta"]
    assert torch.nn.Linear(8, 8, device="cuda").weight.is_cuda
    assert torch.zeros_like(inside).is_cuda
    assert torch.empty_like(inside, device="cpu").is_cpu


def test_only_one_gpu_is_simulated(ledger: Ledger) -> None:
    one = torch.zeros(3)
    moves: list[Callable[[], object]] = [
        lambda: torch.zeros(3, device="cuda:1"), lambda: one.to("cuda:1"), lambda: one.to(1),
        lambda: one.cuda(1), lambda: one.cuda(device="cuda:1"),
    ]  # fmt: skip
    for move in moves:
        with pytest.raises(CannotFollow, match="uses cuda:1, but a prediction simulates only one"):
            move()
    assert torch.zeros(3, device="cuda:0").is_cuda and torch.zeros(3, device=0).is_cuda


def test_the_module_of_the_gpu_answers_as_a_machine_with_one(ledger: Ledger) -> None:
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert (torch.cuda.device_count(), torch.cuda.current_device()) == (1, 0)
    for nothing in (torch.cuda.synchronize, torch.cuda.init, torch.cuda.ipc_collect):
        nothing()
    torch.cuda.set_device(0)
    held = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
    freed = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
    del freed
    assert torch.cuda.memory_allocated() == held.nbytes
    assert torch.cuda.memory_reserved() == 50 * MIB
    assert torch.cuda.max_memory_allocated() == 33 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 20 * MIB
    assert torch.cuda.max_memory_reserved() == 50 * MIB


def test_a_checkpoint_is_loaded_onto_the_gpu_by_way_of_the_cpu(
    ledger: Ledger, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(64)}, tmp_path / "a.pt")
    on_gpu = torch.load(tmp_path / "a.pt", map_location="cuda")["a"]
    on_cpu = torch.load(tmp_path / "a.pt", map_location="cpu")["a"]
    assert (on_gpu.is_cuda, on_cpu.is_cuda) == (True, False)
    assert cuda_bytes(ledger) == 256


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


def test_a_freed_tensor_in_the_middle_leaves_the_others_followed(ledger: Ledger) -> None:
    tensors = [torch.zeros(MANY) for _ in range(4)]
    for number in (1, 0, 1, 0):  # of those that are left: in the middle, the first, the last, all
        del tensors[number]
        assert ledger.tensor_bytes == 4 * MANY * len(tensors)


def test_only_the_written_part_of_a_strided_tensor_counts(ledger: Ledger) -> None:
    one = torch.empty(4, MANY // 4)
    one[1:3].zero_()
    assert ledger.tensor_bytes == 2 * MANY
    one[0, 5:6].fill_(1)
    assert ledger.tensor_bytes == 2 * MANY + 4096


# -- files that are read without an operation of torch

LARGE = {"a": torch.ones(MIB, dtype=torch.int32), "b": torch.ones(2 * MIB, dtype=torch.float16)}
SIZE = 8 * MIB


@pytest.fixture
def reads() -> Iterator[Ledger]:
    """A ledger without a GPU that follows every operation of the test, and every patched read."""
    one = Ledger(None, BASELINE)
    with declared(one), Operations(one):
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
    with declared(Ledger(None, BASELINE)):
        for mean, most in {0: 0.25, 1: 0.125, -1: 0.125}.items():  # bounds are -2 and 2
            assert torch.nn.init.trunc_normal_(tensor, mean, most) is tensor
            with pytest.raises(CannotFollow):
                torch.nn.init.trunc_normal_(tensor, mean, most + 0.001)


def test_drawn_values_that_torch_need_not_look_at_are_torchs(reads: Ledger) -> None:
    small = torch.nn.init.trunc_normal_(torch.empty(8), 0.0, 1.0, -0.5, 0.5)
    assert small.shape == (8,)
    assert float(small.abs().max()) <= 0.5
