"""Seeded checkpoints: the same values in every format, and a manifest that tells the truth."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from state_files import assert_same, read_state
from torch import nn

from weighin.cell import ModelSpec
from weighin.checkpoint import generate
from weighin.checkpoint.checksum import (
    PIECE_ELEMENTS,
    RunningChecksum,
    checksum,
    pieces_of,
    summing,
)
from weighin.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from weighin.models.gpt2 import gpt2
from weighin.models.tied import tied
from weighin.stream import formats
from weighin.stream.construct import construct
from weighin.stream.torch_files import read_one

pytestmark = pytest.mark.usefixtures("torch_threads_restored")

TIED = {"vocab_size": 512, "emb_dim": 64, "n_layers": 1, "n_heads": 2}
SPEC = ModelSpec("m", "weighin.models.tied:tied", TIED)
GPT2: dict[str, Any] = {"vocab_size": 64, "context_length": 8, "emb_dim": 16, "n_layers": 2, "n_heads": 2}  # fmt: skip


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


class LazyBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("b", nn.parameter.UninitializedBuffer(), persistent=False)


UNSHAPED: dict[str, Callable[[], nn.Module]] = {
    "_extra_state": lambda: Extra(2, 2), "weight": lambda: nn.LazyLinear(2), "b": LazyBuffer,
}  # fmt: skip


def unshaped(name: str) -> nn.Module:
    return UNSHAPED[name]()


def make(
    folder: Path, fmt: str = "pt", seed: int = 0, spec: ModelSpec = SPEC, **options: Any
) -> Manifest:
    folder.mkdir()
    made = generate.make(spec, seed=seed, fmt=fmt, folder=folder, **options)
    assert read_manifest(folder / "manifest.json") == made
    return made


def entry_of(manifest: Manifest, name: str) -> TensorEntry:
    return next(one for one in manifest.tensors if one.name == name)


def load(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(folder / "pt" / "model.pt", weights_only=True)
    return state


def index(checkpoint: Path, folder: Path, fmt: str = "pt") -> Manifest:
    folder.mkdir(exist_ok=True)
    return generate.index(SPEC, checkpoint=checkpoint, fmt=fmt, folder=folder)


def test_the_model_loads_it_and_the_manifest_is_right(tmp_path: Path) -> None:
    manifest = make(tmp_path / "a")
    model = tied(**TIED)
    model.load_state_dict(load(tmp_path / "a"))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert {entry.name for entry in manifest.tensors} == set(tensors)
    for entry in manifest.tensors:
        for dtype, expected in entry.checksums.items():
            if entry.kind == "non_persistent_buffer":  # as it is constructed in that dtype
                built = construct(lambda: tied(**TIED), getattr(torch, dtype))
                assert checksum(built.get_buffer(entry.name)) == expected
            else:
                assert checksum(tensors[entry.name].to(getattr(torch, dtype))) == expected
    assert [entry.name for entry in manifest.tensors][:-2] == list(model.state_dict())
    assert entry_of(manifest, "head.weight").shared_with == "embedding.weight"
    assert entry_of(manifest, "rotary.cos").kind == "non_persistent_buffer"


def test_values_are_normal_and_the_scales_of_norms_are_about_one(tmp_path: Path) -> None:
    make(tmp_path / "a")
    state = load(tmp_path / "a")
    weight, norm = state["embedding.weight"], state["norm.weight"]
    assert abs(weight.mean()) < 0.001
    assert abs(weight.std() - 0.02) < 0.001
    assert abs(norm.mean() - 1) < 0.02
    make(tmp_path / "b", spec=ModelSpec("m", "weighin.models.gpt2:gpt2", GPT2))
    state = load(tmp_path / "b")
    assert abs(state["final_norm.scale"].mean() - 1) < 0.05
    assert abs(state["final_norm.shift"].mean()) < 0.05
    expected = gpt2(**GPT2).get_buffer("trf_blocks.0.att.mask")
    assert torch.equal(state["trf_blocks.0.att.mask"], expected), "a buffer is as constructed"
    norms = [entry_of(make(tmp_path / f"{seed}", seed=seed), "norm.weight") for seed in (0, 1)]
    assert norms[0].checksums != norms[1].checksums


def test_values_are_the_same_for_ever_and_no_piece_is_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong constant here would silently part old records from new ones."""

    def pieces(name: str, *shape: int) -> list[torch.Tensor]:
        meta = torch.empty(shape, device="meta")
        return [piece.clone() for piece in generate.parameter_pieces(0, name, meta)]

    expected = torch.tensor([0.007854, -0.040794, 0.010506, -0.009473])
    torch.testing.assert_close(pieces("a.weight", 2, 2), [expected], atol=1e-6, rtol=0)
    monkeypatch.setattr(generate, "PIECE_ELEMENTS", 32)
    found = pieces("w", 10, 10)
    assert [len(piece) for piece in found] == [32, 32, 32, 4]
    assert len({float(piece[0]) for piece in found}) == 4


def test_the_needed_space_is_asked_for_first_and_is_enough(tmp_path: Path) -> None:
    asked: list[int] = []

    def permit(needed: int, _read: int) -> None:
        assert not any((tmp_path / "a").iterdir())
        asked.append(needed)

    make(tmp_path / "a", "per_param", permit=permit)
    written = sum(file.stat().st_size for file in (tmp_path / "a" / "per_param").iterdir())
    assert written <= asked[0] < written * 1.2


@pytest.mark.parametrize("name", UNSHAPED)
def test_what_has_no_known_shape_is_refused(tmp_path: Path, name: str) -> None:
    spec = ModelSpec("m", f"{__name__}:unshaped", {"name": name})
    said = refused(make, tmp_path / "a", spec=spec)
    assert re.search(f"'{name}' is neither .*\n.* run the model once in the builder", said)


def test_an_indexed_checkpoint_keeps_its_dtype_but_not_a_tie_of_two_values(tmp_path: Path) -> None:
    state = tied(**TIED).to(torch.bfloat16).state_dict()
    torch.save(state, path := tmp_path / "model.pt")
    entry = entry_of(index(path, tmp_path), "embedding.weight")
    assert (entry.dtype, entry.bytes) == ("bfloat16", 512 * 64 * 2)
    assert entry.checksums["float32"] == checksum(state["embedding.weight"].float())
    torch.save(state | {"head.weight": torch.zeros(512, 64)}, path)
    said = refused(index, path, tmp_path)
    assert "are one tensor in the model, but have different" in said


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_every_layout_is_made_and_converted_with_the_same_values(tmp_path: Path, fmt: str) -> None:
    made = make(tmp_path / "a", fmt=fmt)
    assert made == make(tmp_path / "made", fmt="pt")
    own = formats.checkpoint_in(tmp_path / "a", fmt)
    indexed = index(own, tmp_path / "b", fmt=fmt)
    assert (indexed.tensors, indexed.source) == (made.tensors, str(own))
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["manifest.json"]
    for other in ("pt", "per_param"):
        assert index(own, tmp_path / other, fmt=other).tensors == made.tensors
        if other != fmt:
            written = formats.checkpoint_in(tmp_path / other, other)
            assert_same(read_state(written), read_state(own))


# The checksum sees every change, and nothing but the bytes

LANES = 65_521


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=50)
@given(st.integers(1, 300_000), st.data())
def test_one_changed_element_changes_it(numel: int, data: st.DataObject) -> None:
    tensor = numbers(numel)
    before = checksum(tensor)
    at = data.draw(st.integers(0, numel - 1))
    tensor[at] += 1
    assert checksum(tensor) != before
    tensor[at] -= 1


@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (LANES, 4), (2 * LANES, 4), (3, LANES * 16)])
def test_two_rows_that_changed_places_change_it(rows: int, columns: int) -> None:
    tensor = numbers(rows, columns)
    swapped = tensor.clone()
    swapped[[0, rows - 1]] = tensor[[rows - 1, 0]]
    assert checksum(swapped) != checksum(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(7, 5).t(), numbers(1000, 2100).t(), numbers(3, 4, 5).transpose(0, 1), numbers(101)[1:],
        torch.tensor(3.5), torch.tensor(True), torch.tensor([True, False, True]),
    ],
    ids=["matrix", "large", "cube", "odd address", "scalar", "flag", "flags"],
)  # fmt: skip
def test_strides_and_alignment_do_not_matter(tensor: torch.Tensor) -> None:
    assert checksum(tensor) == checksum(tensor.clone(memory_format=torch.contiguous_format))
    assert checksum(tensor) != checksum(torch.zeros_like(tensor))


def test_length_counts_and_a_known_value_keeps_manifests_valid() -> None:
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.empty(0)) == checksum(torch.zeros(2, 0)) == "0" * 16
    assert checksum(torch.arange(1_000_000, dtype=torch.int64)) == "645f210637849032"


@pytest.mark.parametrize("numel", [0, 1, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, PIECE_ELEMENTS + 3])
def test_pieces_give_the_checksum_of_the_whole(numel: int) -> None:
    for tensor in (numbers(numel), torch.zeros(numel, dtype=torch.bool).fill_(True)):
        running = RunningChecksum(tensor.nbytes)
        for piece in pieces_of(tensor):
            running.update(piece)
        assert running.hexdigest() == checksum(tensor)


def sums_of(tensor: torch.Tensor) -> dict[str, str]:
    sums: dict[str, dict[str, str]] = {}
    for _ in summing("w", pieces_of(tensor), tensor.numel(), tensor.dtype, sums):
        pass
    return sums["w"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_floating_tensor_alone_has_the_checksum_of_each_cell_dtype(dtype: torch.dtype) -> None:
    tensor = numbers(33, 7).to(dtype)
    sums = sums_of(tensor)
    assert set(sums) >= {"float32", "bfloat16", "float16"}
    for name, value in sums.items():
        assert value == checksum(tensor.to(getattr(torch, name)))
    assert sums_of(tensor.t()) == sums_of(tensor.t().contiguous())
    assert sums_of(torch.arange(10)) == {"int64": checksum(torch.arange(10))}
    assert sums_of(torch.zeros(0, dtype=torch.bool)) == {"bool": "0" * 16}


# Manifests, which keep checksums; and where the values of tensors lie


def entry(name: str, shape: tuple[int, ...], dtype: str, **options: Any) -> TensorEntry:
    numel = torch.Size(shape).numel()
    fields: dict[str, Any] = {"kind": "parameter", "shared_with": None}
    fields |= {"checksums": dict.fromkeys(("float32", "bfloat16"), "00")} | options
    return TensorEntry(name, shape, dtype, numel * getattr(torch, dtype).itemsize, **fields)


MANIFEST = Manifest(
    "tiny", "package:build", "seed 0",
    (
        entry("b", (3, 5), "float32"),
        entry("a", (2,), "float32", kind="persistent_buffer"),
        entry("tied", (3, 5), "float32", shared_with="b"),
        entry("steps", (), "int64", kind="persistent_buffer", checksums={"int64": "11"}),
        entry("table", (4,), "float32", kind="non_persistent_buffer"),
    ),
)  # fmt: skip


def test_a_manifest_survives_the_disk_and_counts_tied_tensors_once(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "manifest.json") == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert MANIFEST.model_bytes() == 60 + 8 + 8 + 16
    assert MANIFEST.model_bytes("bfloat16") == 30 + 4 + 8 + 8


def test_views_of_one_storage_lead_to_it(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    torch.save({"first": base[:12].view(3, 4), "second": base[12:]}, tmp_path / "m.pt")
    first, second = formats.read(tmp_path / "m.pt")
    assert first.storage_offset == second.storage_offset == first.offset == second.offset - 48
    assert second.storage_bytes == 96


def test_a_file_of_one_tensor(tmp_path: Path) -> None:
    for name, is_zip in (("w.pt", True), ("w.pth", False)):
        torch.save(torch.ones(3), tmp_path / name, _use_new_zipfile_serialization=is_zip)
        assert read_one(tmp_path / name, "w").shape == (3,)
    torch.save([1], tmp_path / "l.pt")
    assert "holds a list, not a tensor" in refused(read_one, tmp_path / "l.pt", "l")
