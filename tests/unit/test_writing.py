"""What is written piece by piece is what torch.save writes."""

import time
import zipfile
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.checksum import pieces_of
from weighin.formats import zip_writer
from weighin.formats.zip_writer import placeholder, run_parallel, write_pt, write_tensor
from weighin.stream.torch_files import PT


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tied = torch.randn(100, 7)
    return {
        "embedding": tied,
        "half": torch.randn(33).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "mask": torch.tensor([[True, False]]),
        "head": tied,
    }


def write(path: Path, state: dict[str, torch.Tensor], **options: object) -> list[int]:
    written: list[int] = []
    blank: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        blank.setdefault(id(tensor), placeholder(tensor.shape, tensor.dtype))
    blanks = {name: blank[id(tensor)] for name, tensor in state.items()}
    write_pt(path, blanks, lambda name: pieces_of(state[name]), written.append)
    return written


def check_equal(found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(state)
    for name, tensor in state.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_it_and_tied_weights_share(
    tmp_path: Path, state: dict[str, torch.Tensor], mmap: bool
) -> None:
    path = tmp_path / "model.pt"
    written = write(path, state)
    assert sum(written) == sum(t.nbytes for name, t in state.items() if name != "head")
    found = torch.load(path, weights_only=True, mmap=mmap)
    check_equal(found, state)
    assert found["head"].data_ptr() == found["embedding"].data_ptr()


def test_it_is_torch_saves_file_byte_for_byte_but_for_its_id(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    ours, theirs = tmp_path / "ours" / "model.pt", tmp_path / "theirs" / "model.pt"
    for path in (ours, theirs):
        path.parent.mkdir()
    write(ours, state)
    torch.save(state, theirs)
    assert ours.stat().st_size == theirs.stat().st_size
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        assert a.testzip() is None
        for one, other in zip(a.infolist(), b.infolist(), strict=True):
            assert (one.filename, one.header_offset) == (other.filename, other.header_offset)
            if not one.filename.endswith("serialization_id"):
                assert one.CRC == other.CRC
                assert a.read(one) == b.read(other)


def test_every_storage_is_aligned_to_64_bytes(
    tmp_path: Path, state: dict[str, torch.Tensor]
) -> None:
    write(tmp_path / "model.pt", state)
    assert all(place.storage_offset % 64 == 0 for place in PT.read(tmp_path / "model.pt"))


def test_one_tensors_file(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        write_tensor(tmp_path / name, tensor, pieces_of(tensor), None)
        assert torch.equal(torch.load(tmp_path / name, weights_only=True), tensor)


@pytest.mark.parametrize("numel", [9, 11])
def test_pieces_of_another_length_are_refused(tmp_path: Path, numel: int) -> None:
    blanks = {"weight": placeholder((10,), torch.float32)}
    with pytest.raises(ValueError, match="for a tensor whose size"):
        write_pt(tmp_path / "model.pt", blanks, lambda _: [torch.zeros(numel)])


def test_the_first_error_stops_the_jobs_that_wait() -> None:
    done: list[int] = []

    def work() -> None:
        time.sleep(0.001)
        done.append(1)

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_parallel([fail] + [work] * 1000)
    assert len(done) < 1000


def test_a_record_beyond_4_gib_has_its_checksum_in_the_right_place(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    small = torch.arange(5.0)
    # A sparse file: of the large tensor only structure is written, of the small one everything.
    blanks = {
        "large": placeholder((2**32 + 64,), torch.uint8),
        "small": placeholder((5,), small.dtype),
    }
    with torch.serialization.skip_data():
        torch.save(blanks, path)
    with path.open("r+b") as file:
        large, record = zip_writer.data_records(path, file.fileno())
        assert large.size == 2**32 + 64
        flusher = zip_writer.Flusher(file.fileno(), None)
        zip_writer.fill(file.fileno(), record, lambda: [small], flusher)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("model/data/1") == small.numpy().tobytes()
    assert torch.equal(torch.load(path, weights_only=True, mmap=True)["small"], small)
