"""What `weighin inspect` says of every layout, without torch, and of hostile names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from snapshots import Compare
from typed_here import typed

from weighin.checkpoint import inspect
from weighin.checkpoint.inspect import expected
from weighin.stream import formats
from weighin.stream.sharded_files import MAX_SHARD_BYTES
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


def make(path: Path, layout: str, plans: list[TensorPlan] = PLANS) -> Path:
    shapes = {plan.name: torch.zeros(plan.shape, dtype=plan.dtype) for plan in plans}
    write_checkpoint(layout, path, plans, lambda name: [shapes[name]])
    return path


def run(*arguments: object) -> str:
    code, said = typed("inspect", *arguments, columns=100)
    assert code == 0, said
    return said


@pytest.mark.parametrize("layout", formats.NAMES)
def test_every_layout_is_inspected_alike(tmp_path: Path, layout: str) -> None:
    found = inspect.inspect(make(tmp_path / "m", layout))
    assert found["layout"] == layout
    keys = ("name", "shape", "dtype", "bytes", "shared_with")
    assert [tuple(one[key] for key in keys) for one in found["tensors"]] == [
        ("embedding.weight", (10, 4), "float32", 160, None),
        ("blocks.0.a", (6,), "bfloat16", 12, None),
        ("blocks.0.steps", (), "int64", 8, None),
        ("head.weight", (10, 4), "float32", 160, "embedding.weight"),
    ]
    totals = found["totals"]
    assert (totals["numbers"], totals["bytes"], totals["largest"]) == (47, 180, "embedding.weight")
    assert sum(file["bytes"] for file in found["files"]) > 180


def test_a_note_is_printed_once(tmp_path: Path) -> None:
    torch.save({"slice": torch.zeros(100)[:10]}, path := tmp_path / "m.pt")
    assert " ".join(run(path).split()).count("of the files belong to no tensor") == 1


def test_a_long_table_shows_its_ends(tmp_path: Path) -> None:
    plans = [TensorPlan(f"t{number:03}", (number,), torch.uint8) for number in range(821)]
    text = run(path := make(tmp_path / "m.safetensors", "safetensors", plans))
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
    plans = [TensorPlan("[red]\x1b[31m\r\n" + "x" * 10_000, (1,), torch.uint8)]
    text = run(make(tmp_path / "m.safetensors", "safetensors", plans))
    assert "\x1b" not in text
    assert "[red]?[31m" in text
    assert len(text) < 10_000


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


def test_the_header_of_each_shard_is_opened_once(tmp_path: Path, opened: list[str]) -> None:
    shards = {f"w{number}": f"model-{number}.safetensors" for number in range(5)}
    for name, shard in shards.items():
        make(tmp_path / shard, "safetensors", [TensorPlan(name, (4,), torch.float32)])
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    del opened[:]
    assert "5 tensors" in run(tmp_path)
    headers = [Path(file).name for file in opened if file.endswith(".safetensors")]
    assert sorted(headers) == sorted(shards.values())


def test_expected_peaks_are_the_arithmetic_of_the_docstrings(same: Compare) -> None:
    mine = StrategyInfo("mine", Path("mine.py"), "", ("pt",), ("cpu",))
    sizes = {"emb.weight": 100, "blocks.0.a": 30, "blocks.0.b": 80, "blocks.1.a": 30}
    large = {"a": MAX_SHARD_BYTES, "b": 5}
    lines = []
    for layout, tensors in (("pt", sizes), ("sharded_pt", sizes), ("sharded_pt", large)):
        lines.append(f"{layout}, tensors of {', '.join(map(str, tensors.values()))} bytes\n")
        for one in expected([*strategies().values(), mine], layout, tensors):
            sums = f"{one['anonymous_bytes']} anonymous, {one['mapped_bytes']} mapped"
            lines.append(f"  {one['strategy']}: {sums}\n")
    same("expected_peaks.txt", "".join(lines))
