"""Files of tensorizer's own format: the package writes them, its strategy loads them, nothing else does."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harms import complaint
from model_differences import state_differences
from state_files import write_state
from worker_jobs import checked_load

from weighin import install
from weighin.cell import ModelSpec
from weighin.checkpoint import cache, generate
from weighin.errors import ConfigError, FormatLimit
from weighin.stream import formats
from weighin.stream import write as writing

SPEC = ModelSpec(
    "tied",
    "weighin.models.tied:tied",
    {"vocab_size": 64, "emb_dim": 8, "n_layers": 2, "n_heads": 2},
)


def state() -> dict[str, torch.Tensor]:
    return {
        "half": torch.randn(3, 5).bfloat16(),
        "quarter": torch.randn(7).to(torch.float8_e4m3fn),
        "steps": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 4),
    }


def package() -> Any:
    return pytest.importorskip("tensorizer", reason=install.command("loaders"))


def test_the_package_reads_the_values_that_were_written(tmp_path: Path) -> None:
    reader, values = package().TensorDeserializer, state()
    write_state(tmp_path / "m.tensors", "tensorizer", values)
    with reader(str(tmp_path / "m.tensors"), "cpu", verify_hash=True) as opened:
        found = {name: opened[name].detach() for name in opened}
    assert list(found) == list(values)
    assert state_differences(found, values) == []


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {"num_readers": 2, "verify_hash": True}), (torch.bfloat16, {})],
)
def test_the_strategy_loads_a_tied_model_with_the_right_values(
    tmp_path: Path, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    package()
    made = generate.make(SPEC, seed=0, fmt="tensorizer", folder=tmp_path)
    path = formats.checkpoint_in(tmp_path, "tensorizer")
    checked_load(SPEC, path, made, dtype, "tensorizer", **options)
    assert formats.detect(path) == "tensorizer"
    assert formats.files(path) == [path]
    assert "tensorizer" not in formats.NAMES


def test_a_users_own_file_is_refused_with_the_repair(tmp_path: Path) -> None:
    (path := tmp_path / "mine.tensors").write_bytes(b"|TZR|" + bytes(64))
    error = complaint(lambda: cache.ensure(SPEC, "tensorizer", checkpoint=path))
    assert error.message == (
        f"{path}: a file of tensorizer's format, which only the package tensorizer reads"
    )
    assert "give the checkpoint from which this file was made" in error.repair


def test_only_names_that_fit_into_the_index_are_written(tmp_path: Path) -> None:
    reader = package().TensorDeserializer
    each = writing._TENSORIZER_ENTRY_BYTES + len("torch.bfloat16") + 4 * 3
    count = writing._TENSORIZER_INDEX_BYTES // (each + 1000)
    values = {f"{n:01000}": torch.ones(1, 1, 1, dtype=torch.bfloat16) for n in range(count)}
    write_state(tmp_path / "m.tensors", "tensorizer", values)
    with reader(str(tmp_path / "m.tensors"), "cpu") as opened:
        assert list(opened) == list(values)
    more = values | {"x" * 2000: torch.ones(1)}
    with pytest.raises(FormatLimit, match=f"the names of {count + 1:,} tensors need"):
        write_state(tmp_path / "more.tensors", "tensorizer", more)
    assert [path.name for path in tmp_path.iterdir()] == ["m.tensors"]


def test_without_the_package_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorizer", None)
    with pytest.raises(ConfigError) as caught:
        write_state(tmp_path / "m.tensors", "tensorizer", state())
    assert caught.value.repair == install.command("loaders")
    assert not list(tmp_path.iterdir())
