"""Records of a zip archive whose names differ only in case: torch.load reads one of them for both."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.foreign import RESAVE


def in_other_case(folder: Path) -> Path:
    """Write a checkpoint, and add a record data/0 in capitals whose bytes are others."""
    torch.save({"a": torch.zeros(16)}, folder / "plain.pt")
    made = folder / "made.pt"
    shutil.copy(folder / "plain.pt", made)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("plain/DATA/0", torch.ones(16).numpy().tobytes())
    return made


def test_records_whose_names_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    made = in_other_case(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        formats.read(made)
    assert str(caught.value) == (
        f"{made}: damaged: record 'plain/DATA/0' and record 'plain/data/0' have one name for"
        " torch.load\n"
        f"{RESAVE}"
    )


def test_torch_finds_a_record_without_regard_to_case(tmp_path: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(in_other_case(tmp_path)))
    assert reader.get_record("data/0") == reader.get_record("DATA/0")
