"""What `weighin inspect` says of every layout, without torch, and of hostile names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from weighin.checkpoint import inspect
from weighin.checkpoint.inspect import expected
from weighin.cli.app import app
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats
from weighin.stream.folders import MAX_SHARD_BYTES
from weighin.stream.slices import TensorPlan
from weighin.stream.write import write as write_checkpoint
from weighin.suite.registry import StrategyInfo, strategies
from weighin.units import MIB

PLANS = [
    TensorPlan("embedding.weight", (10, 4), torch.float32),
    TensorPlan("blocks.0.a", (6,), torch.bfloat16),
    TensorPlan("blocks.0.steps", (), torch.int64),
    TensorPlan("head.weight", (10, 4), torch.float32, "embedding.weight"),
]

IN_ONE_PROCESS = {name for name, info in strategies().items() if not info.shares_load}


def make(path: Path, layout: str, plans: list[TensorPlan] = PLANS) -> Path:
    shapes = {plan.name: torch.zeros(plan.shape, dtype=plan.dtype) for plan in plans}
    write_checkpoint(layout, path, plans, lambda name: [shapes[name]])
    return path


def run(*arguments: str) -> str:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["inspect", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("layout", formats.NAMES)
def test_every_layout_is_inspected_alike(tmp_path: Path, layout: str) -> None:
    found = inspect.inspect(make(tmp_path / "m", layout))
    assert found["layout"] == layout
    assert [
        (t["name"], t["shape"], t["dtype"], t["bytes"], t["shared_with"]) for t in found["tensors"]
    ] == [
        ("embedding.weight", (10, 4), "float32", 160, None),
        ("blocks.0.a", (6,), "bfloat16", 12, None),
        ("blocks.0.steps", (), "int64", 8, None),
        ("head.weight", (10, 4), "float32", 160, "embedding.weight"),
    ]
    assert [found["totals"][key] for key in ("numbers", "bytes", "largest")] == [
        47,
        180,
        "embedding.weight",
    ]
    assert sum(file["bytes"] for file in found["files"]) > 180


def test_a_note_is_printed_once(tmp_path: Path) -> None:
    torch.save({"slice": torch.zeros(100)[:10]}, path := tmp_path / "m.pt")
    assert " ".join(run(str(path)).split()).count("of the files belong to no tensor") == 1


def test_a_long_table_shows_its_ends(tmp_path: Path) -> None:
    plans = [TensorPlan(f"t{number:03}", (number,), torch.uint8) for number in range(821)]
    path = str(make(tmp_path / "m.safetensors", "safetensors", plans))
    text = run(path)
    assert "... 801 more (--all)" in text
    assert [f"t{n:03}" in text for n in (0, 9, 10, 810, 811)] == [True, True, False, False, True]
    everything = run(path, "--all")
    assert all(f"t{number:03}" in everything for number in range(821))


def test_of_many_files_with_long_names_it_says_how_many_more(tmp_path: Path) -> None:
    plans = [TensorPlan("layer." * 20 + str(n), (1,), torch.uint8) for n in range(7)]
    lines = inspect.tables(inspect.inspect(make(tmp_path / "m", "per_param", plans)))
    (files,) = [line for line in lines if isinstance(line, str) and line.startswith("files: ")]
    assert files.endswith(" and 3 more")


def test_a_name_can_neither_colour_nor_break_the_terminal(tmp_path: Path) -> None:
    name = "[red]\x1b[31m\r\n" + "x" * 10_000
    text = run(
        str(make(tmp_path / "m.safetensors", "safetensors", [TensorPlan(name, (1,), torch.uint8)]))
    )
    assert "\x1b" not in text
    assert "[red]?[31m" in text
    assert len(text) < 10_000


def test_an_unknown_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        inspect.inspect(tmp_path / "none")


def test_of_a_file_of_100_gib_hardly_anything_is_read_and_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save({f"w{n}": torch.empty(2**30, dtype=torch.float32) for n in range(25)}, path)
    code = (
        "import sys; from pathlib import Path; from weighin.checkpoint import inspect as inspecting;"
        "read = lambda: int(Path('/proc/self/io').read_text().split()[1]); before = read();"
        f"found = inspecting.inspect(Path({str(path)!r})); inspecting.tables(found);"
        "assert 'torch' not in sys.modules; assert found['totals']['bytes'] == 100 * 1024**3;"
        "print(read() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * MIB  # modules that are imported late, too


def test_the_header_of_each_shard_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        plans = [TensorPlan(f"w{number}", (4,), torch.float32)]
        make(tmp_path / f"model-{number}.safetensors", "safetensors", plans)
    shards = {f"w{number}": f"model-{number}.safetensors" for number in range(5)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    opened, whole = [], Path.open

    def watched(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path.name)
        return whole(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", watched)
    assert "5 tensors" in run(str(tmp_path))
    assert sorted(name for name in opened if name.endswith(".safetensors")) == sorted(
        shards.values()
    )


def needs(layout: str, sizes: dict[str, int]) -> dict[str, tuple[int | None, int | None]]:
    found = expected([*strategies().values(), StrategyInfo("mine", Path("mine.py"), "", ("pt",), ("cpu",))], layout, sizes)  # fmt: skip
    return {one["strategy"]: (one["anonymous_bytes"], one["mapped_bytes"]) for one in found}


def test_expected_peaks_are_the_arithmetic_of_the_docstrings() -> None:
    sizes = {"emb.weight": 100, "blocks.0.a": 30, "blocks.0.b": 80, "blocks.1.a": 30}
    found = needs("pt", sizes)
    assert set(found) == {*IN_ONE_PROCESS, "mine"}
    assert found["mine"] == (None, None)
    assert found["baseline"] == (480, 0)
    assert found["mmap_assign"] == (0, 240)
    assert found["per_param"] == (340, 0)
    assert found["per_module"] == (350, 0)
    assert found["safetensors_copy"] == (240, 240)
    assert found["sharded"] == (240, 240)
    assert needs("sharded_pt", sizes)["sharded"] == (480, 0)
    assert needs("sharded_pt", sizes)["accelerate"] == (240, 0)
    assert needs("sharded_pt", {"a": MAX_SHARD_BYTES, "b": 5})["sharded"] == (
        2 * MAX_SHARD_BYTES + 5,
        0,
    )


def test_every_strategy_of_ours_that_loads_to_the_cpu_has_an_expectation() -> None:
    missing = [name for name, (size, _) in needs("pt", {"a": 1}).items() if size is None]
    assert missing == ["instanttensor", "peft_merge", "timm", "mine"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["gpt2-tiny"],
            "weighin inspect reads a checkpoint, and gpt2-tiny is a model without one\n"
            "name a file or a folder; for the size of a model: weighin predict gpt2-tiny",
        ),
        (
            [],
            "weighin inspect reads a checkpoint, and none was given\n"
            "name a file or a folder; for the size of a model: weighin predict gpt2-small",
        ),
        (["gone.pt"], "gone.pt: no such file or folder\ncheck the path"),
        (
            ["m.pt", "--model", "gpt2-tiny"],
            "two models are given in place of one: 'm.pt' and 'gpt2-tiny'\n"
            "give one of the two models, or list both models in a suite file: --suite FILE; weights"
            " for a model are --checkpoint FILE",
        ),
        (
            ["m.pt", "--set", 'kwargs={"a": 1}'],
            "m.pt takes no arguments, so kwargs would be ignored\nleave kwargs out",
        ),
    ],
)
def test_what_cannot_be_inspected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m.pt", "pt")
    result = CliRunner().invoke(app, ["inspect", *arguments])
    assert isinstance(result.exception, ConfigError | CheckpointError)
    assert str(result.exception) == text
