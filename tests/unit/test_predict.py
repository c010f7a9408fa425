"""Predictions of small models and of what uses them: the whole way, through the process that runs strategies."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

import leftovers
import pytest
import torch
from nightly import nightly
from snapshots import Compare

from weighin import install
from weighin.cell import Cell, ModelSpec
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict import client
from weighin.predict.client import predict
from weighin.predict.prediction import PredictedUse, Prediction
from weighin.suite import registry
from weighin.units import GIB, KIB, MIB

# Untied, so that a state dict has every tensor. So large that copies can be told from imports: the
# first use of the meta device takes 34 MiB in torch 2.6.
SIDE = 8192
SPEC = ModelSpec("wide", "torch.nn:Linear", {"in_features": SIDE, "out_features": SIDE})
WEIGHT_BYTES = SIDE * SIDE * 4
WEIGHTS = WEIGHT_BYTES + SIDE * 4  # with the bias
PAGE_BYTES = 4 * KIB
READ_AHEAD_BYTES = 3 * MIB

SMALL = ModelSpec("small", "torch.nn:Linear", {"in_features": 768, "out_features": 768})
TIED = ModelSpec("tied", "weighin.models.tied:tied", {
    "vocab_size": WEIGHT_BYTES // 4 // 256, "emb_dim": 256, "n_layers": 1, "n_heads": 2,
})  # fmt: skip
CHECKS = ModelSpec("checks", "checks:build", {})
"""A model whose forward pass cannot be followed."""

MODULE = f"""
import torch

class Checks(torch.nn.Linear):
    def forward(self, given):
        return super().forward(given) if self.weight.sum() > 0 else given

def build():
    return Checks({SIDE}, {SIDE})

def example_inputs():
    return torch.zeros(1, {SIDE})
"""
OWN = {
    "three copies": """
with job.phase("build"):
    model = job.build_model()
with job.phase("copies"):
    state = torch.load(job.checkpoint)
    model.load_state_dict({name: tensor * 2 for name, tensor in state.items()})
return model
""",
    "looks at values": """
state = torch.load(job.checkpoint)
if state["weight"].sum().item() > 0:
    print("positive")
return job.build_model()
""",
    "compares tensors": """
state = torch.load(job.checkpoint)
if torch.equal(state["weight"], state["weight"].clone()):
    print("equal")
return job.build_model()
""",
}
MOVES = (
    "to('cuda')", "to(device='cuda')", "to(device=torch.device('cuda', 0), dtype=torch.float32)",
    "to(0)", "to(torch.empty(0, device='cuda'))", "cuda()", "cuda(device=0)",
)  # fmt: skip
RUN = "ctypes.CDLL(None).system(b'true')"
STARTS = {
    "reported": "subprocess.Popen(['sleep', '61'])",
    "runs": "subprocess.run(['touch', job.checkpoint.with_name('ran')])",
    "replaces": "os.execvp('true', ['true'])",
    "forks": "os.fork() or time.sleep(61)",
    "forks and waits": "(pid := os.fork()) and os.waitpid(pid, 0)",
    "unreported": "ctypes.CDLL(None).fork() or time.sleep(61)",
    "unreported, waits": "(pid := ctypes.CDLL(None).fork()) and os.waitpid(pid, 0)",
    "spawned": "multiprocessing.get_context('spawn').Process(target=time.sleep, args=(61,)).start()",
    "ended": RUN,
    "fails": f"{RUN}; raise ValueError",
    "caught": "\ntry: os.fork()\nexcept Exception: pass",
}
USES = ("write", "sgd", "adamw", "deepcopy", "save", "twice")
TWICE = """
def use(model):
    return [parameter.detach() * 2 for parameter in model.parameters()]
"""


Followed = Mapping[str, Prediction]


def planned(strategy: str, use: str = "", model: ModelSpec = SPEC, **changes: Any) -> Planned:
    info = registry.strategy(strategy)
    fields: dict[str, Any] = {"format": info.formats[0], "use": use, "passes": 0} | changes
    return plan_cell(Cell(model, strategy, "process", **fields), info)


def own(folder: Path, name: str, body: str, **changes: Any) -> Planned:
    path = folder / f"{name}.py"
    imports = "import ctypes, multiprocessing, os, subprocess, time, torch"
    path.write_text(f"{imports}\nDEVICES = ('cpu', 'cuda')\ndef load(job):\n{indent(body, '    ')}")
    return planned(str(path), **changes)


def cells(folder: Path) -> Mapping[str, Planned]:
    """Return what is predicted, by its name here; uses are "STRATEGY USE"."""
    moves = "model = job.build_model().to(job.device)\n"
    for number, move in enumerate(MOVES):
        moves += f"with job.phase('{number}'): model.{move}\n"
    loads = ("baseline", "sequential", "load_assign", "streaming", "mmap_assign", "per_param")
    used = ("mmap_assign", "load_assign")
    return {
        **{name: planned(name) for name in loads},
        **{f"{name} cuda": planned(name, device="cuda")
           for name in ("baseline", "mmap_assign", "safetensors_copy")},
        **{f"accelerate {fmt}": planned("accelerate", format=fmt) for fmt in ("pt", "safetensors")},
        "accelerate bf16": planned("accelerate", format="safetensors", dtype="bfloat16"),
        "offload": planned("accelerate", format="safetensors", options={"offload_state_dict": True}),
        "pt_legacy": planned("load_assign", format="pt_legacy"),
        "no such model": planned("per_param", model=ModelSpec("no", "torch.nn:Nothing", {})),
        "small": planned("streaming", model=SMALL),
        "moves": own(folder, "moves", f"{moves}return model", device="cuda"),
        **{name: own(folder, name, body) for name, body in OWN.items()},
        **{f"starts: {name}": own(folder, name, f"{how}\nreturn job.build_model()")
           for name, how in STARTS.items()},
        **{f"{name} {use}": planned(name, use) for name in used for use in USES},
        "mmap_assign to-device": planned("mmap_assign", "to-device"),
        "mmap_assign adamw cuda": planned("mmap_assign", "adamw", device="cuda"),
        "tied sgd": planned("load_assign", "sgd", model=TIED),
        "checks sgd": planned("load_assign", "sgd", model=CHECKS),
        "checks forward": planned("load_assign", model=CHECKS, passes=1),
        "forward": planned("load_assign", model=registry.model("gpt2-tiny"), passes=1),
        "forward, without inputs": planned("load_assign", passes=1),
    }  # fmt: skip


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """All predictions of ``cells``, by one process."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "twice.py").write_text(TWICE)
    (folder / "checks.py").write_text(MODULE)
    asked = cells(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "read_ahead_bytes", lambda _folder: READ_AHEAD_BYTES)
        patch.setenv("PREDICTS", str(folder))
        found = predict(
            [*asked.values()],
            forward=True,
            python_path=[str(folder)],
            use_paths={"twice": str(folder / "twice.py")},
        )
    assert leftovers.processes(f"PREDICTS={folder}") == []
    return dict(zip(asked, found, strict=True))


def above(one: Prediction | PredictedUse, load: Prediction) -> float:
    """Return an anonymous peak above the import of torch, as copies of the weight."""
    assert load.cannot == ""
    assert one.host_anon_peak_bytes and load.baseline_anon_bytes
    return (one.host_anon_peak_bytes - load.baseline_anon_bytes) / WEIGHT_BYTES


def used(one: Prediction) -> PredictedUse:
    assert one.cannot == ""
    assert one.use
    return one.use


def told(one: Prediction) -> list[str]:
    """What is said of a prediction; sizes that differ a little from process to process in copies of the weight.

    Up to 0.6 copies are imports and small tensors; up to 0.8 still count as none.
    """
    if one.cannot:
        assert one.host_anon_peak_bytes is None
        # Without the path of a file and the words of torch.
        return [f"cannot: {one.cannot.partition(' in /')[0].partition('.default: ')[0]}"]
    facts = {"is mixed": one.is_mixed, "computes buffers": one.computes_buffers}
    read, mapped = (
        round(size / PAGE_BYTES) for size in (one.disk_read_bytes or 0, one.work.mapped_bytes)
    )
    from_disk = "an unknown size" if one.disk_read_bytes is None else f"{read} pages"
    said = [
        f"{one.model_bytes} B, {one.checkpoint_dtype}",
        f"reads {one.work.read_bytes} B, archives: {one.work.archives}, maps {mapped} pages; {from_disk} from the disk",
        *one.reasons,
        f"phases: {', '.join(phase.name for phase in one.phases)}",
        *(fact for fact, is_so in facts.items() if is_so),
    ]
    if (one.cell.dtype, one.cell.device) == ("float32", "cpu"):
        said.append(f"holds {round(above(one, one) - 0.3)}")
        said += [f"{one.use.name} holds {round(above(one.use, one))}"] if one.use else []
    sums = (one.cuda_requested_bytes, one.cuda_allocated_bytes)
    if any(size is not None for size in (*sums, one.cuda_reserved_bytes)):
        said.append(f"GPU: {sums}, reserved {one.cuda_reserved_bytes}")
    if one.use and one.use.cuda_requested_bytes:
        said.append(f"GPU of the use: {one.use.cuda_requested_bytes} B")
    return said


def test_what_is_predicted(followed: Followed, same: Compare) -> None:
    said = ("\n  ".join([name, *told(one)]) for name, one in followed.items())
    same("predicted_loads.txt", "\n".join(said) + "\n")


def test_accelerate_keeps_the_converted_copy_beside_mapped_pages(followed: Followed) -> None:
    one = followed["accelerate bf16"]
    assert round(2 * above(one, one)) == 1


def test_buffers_are_no_larger_than_what_is_read(followed: Followed) -> None:
    """Each of the threads has a buffer: together four times this model, if all were used.

    A large read uses four pages of it.
    """
    weight, bias = 768 * 768 * 4, 768 * 4
    expected = weight + 2 * bias + 16 * KIB
    assert followed["small"].tensor_peak_bytes == pytest.approx(expected, abs=4 * KIB)


@pytest.mark.parametrize(
    ("mapping", "reading"),
    [("mmap_assign", "load_assign"), ("accelerate safetensors", "accelerate pt")],
)
def test_mapped_weights_are_pages_of_the_file(
    followed: Followed, mapping: str, reading: str
) -> None:
    mapped, read = followed[mapping], followed[reading]
    assert mapped.host_file_peak_bytes and read.host_file_peak_bytes
    # Two processes map more or less of the libraries: once, 124 KiB.
    more = mapped.host_file_peak_bytes - read.host_file_peak_bytes
    assert more == pytest.approx(WEIGHTS, abs=512 * KIB)
    assert above(mapped, mapped) < 0.4  # of a copy
    assert mapped.work.mapped_bytes == mapped.disk_read_bytes


@pytest.mark.parametrize(("name", "windows"), [("mmap_assign", 4), ("load_assign", 0)])
def test_a_floor_has_room_for_page_tables_and_for_what_is_read_ahead(
    followed: Followed, name: str, windows: int
) -> None:
    one = followed[name]
    most = one.host_anon_most_bytes
    assert most and one.floor_bytes
    assert one.in_flight_bytes == windows * READ_AHEAD_BYTES
    assert one.floor_bytes == most + most // 512 + 16 * MIB + one.in_flight_bytes


def test_a_model_on_the_gpu_stays_there_if_it_is_moved_again(followed: Followed) -> None:
    one = followed["moves"]
    for move, phase in zip(MOVES, one.phases, strict=False):
        assert phase.cuda_requested_bytes == WEIGHTS, move
        again = (phase.host_anon_peak_bytes or 0) - (one.baseline_anon_bytes or 0)
        assert again < WEIGHT_BYTES / 2, move


# -- uses


def test_a_floor_holds_the_load_and_the_use(followed: Followed) -> None:
    one = followed["load_assign adamw"]
    most = used(one).host_anon_most_bytes
    possible = most + most // 100 + 16 * MIB
    assert one.floor_bytes == possible + possible // 512 + 16 * MIB
    assert (one.host_anon_peak_bytes or 0) < most  # that of the load alone


def test_the_work_of_a_load_does_not_include_the_use(followed: Followed) -> None:
    load, trained = followed["load_assign"], followed["load_assign adamw"]
    assert load.work.written_bytes == trained.work.written_bytes


# -- other checkpoints and models


def test_a_users_checkpoint_gives_the_structure(tmp_path: Path) -> None:
    state = {"weight": torch.empty(SIDE, SIDE), "bias": torch.empty(SIDE)}
    with torch.serialization.skip_data():
        torch.save({name: one.bfloat16() for name, one in state.items()}, tmp_path / "half.pt")
    asked = [planned("load_assign"), planned("per_param")]
    asked += [
        planned(name, "to-float32", dtype="bfloat16") for name in ("mmap_assign", "load_assign")
    ]
    read, split, mapped, copied = predict(asked, checkpoint=tmp_path / "half.pt")
    assert (read.disk_read_bytes, split.disk_read_bytes) == (WEIGHTS // 2, WEIGHTS // 2)
    assert read.checkpoint_dtype == "bfloat16"
    # A conversion keeps one weight of the old dtype.
    assert (round(above(used(mapped), mapped), 1), round(2 * above(used(copied), copied))) == (1, 3)


@pytest.mark.parametrize("are_equal", [False, True])
def test_matrices_that_a_config_ties_are_one_if_they_are_equal_in_the_file(
    tmp_path: Path, are_equal: bool
) -> None:
    transformers = pytest.importorskip("transformers", reason=install.command("hf"))
    sizes = {"vocab_size": 8192, "n_embd": 1024, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=False)
    model = transformers.GPT2LMHeadModel(config)
    if are_equal:
        model.lm_head.weight.data.copy_(model.transformer.wte.weight)
    model.save_pretrained(tmp_path)
    tied = (tmp_path / "config.json").read_text().replace('embeddings": false', 'embeddings": true')
    (tmp_path / "config.json").write_text(tied)
    spec, source = registry.model_and_checkpoint(str(tmp_path))
    asked = [
        planned(name, model=spec, format=fmt)
        for name, fmt in (
            ("streaming", "safetensors"),  # the user's file
            ("streaming", "sharded"),  # files without values
            ("transformers", "safetensors"),
        )
    ]
    expected = sum(one.nbytes for one in model.parameters())
    expected -= model.lm_head.weight.nbytes if are_equal else 0
    for found in predict(asked, checkpoint=source):
        assert (found.cannot, found.model_bytes) == ("", expected), found.cell.id


BY_DAY = ("tied-tiny", "minilm", "llama-70b")
AT_NIGHT = (
    "qwen3-0.6b", "gemma-3-1b", "bert-base", "clip-base", "deepseek-v3-bf16", "flux", "gpt-oss-20b",
    "gpt-oss-20b-bf16", "qwen3-30b-a3b", "llama-8b", "mistral-7b", "qwen3-8b",
)  # fmt: skip


@pytest.mark.parametrize("names", [BY_DAY, *nightly(*zip(AT_NIGHT, strict=True))], ids=",".join)
def test_streaming_to_a_gpu_needs_little_ram_for_a_model_with_buffers_of_its_own(
    names: tuple[str, ...],
) -> None:
    """The buffers are built on the CPU, so that the loader moves the loaded model once more."""
    models = [registry.model(name) for name in names]
    settings = {"device": "cuda", "dtype": "bfloat16"}
    for one in predict([planned("streaming", model=model, **settings) for model in models]):
        assert one.cannot == ""
        assert one.floor_bytes and one.floor_bytes < 3 * GIB
        assert one.cuda_requested_bytes and one.model_bytes
        assert one.model_bytes <= one.cuda_requested_bytes < 1.01 * one.model_bytes + 64 * MIB
    if names is BY_DAY:
        assert (one.is_mixed, one.computes_buffers) == (False, False)
        # The checkpoint has the dtype of the published files.
        assert one.checkpoint_dtype == "bfloat16"
        assert one.disk_read_bytes == pytest.approx(70_553_706_496 * 2, abs=MIB)


def test_without_another_dtype_the_checkpoint_is_as_bench_writes_it() -> None:
    pytest.importorskip("transformers", reason=install.command("hf"))
    asked = planned("mmap_assign", model=registry.model("qwen3-0.6b"), dtype="bfloat16")
    (found,) = predict([asked])
    assert found.cannot == ""
    assert found.disk_read_bytes == pytest.approx(596_049_920 * 2, rel=1e-3)
