"""Predictions of small models: the whole way, through the process that runs strategies."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import leftovers
import pytest
import torch
from click.testing import CliRunner
from factories import planned
from nightly import nightly

from weighin import install
from weighin.cell import ModelSpec
from weighin.cli.app import app
from weighin.predict import client
from weighin.predict.client import predict
from weighin.predict.prediction import Prediction
from weighin.suite import registry
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB, KIB, MIB

# Untied, so that a state dict has every tensor. So large that copies can be told from imports: the
# first use of the meta device takes 34 MiB in torch 2.6.
SIDE = 8192
SPEC = ModelSpec("wide", "torch.nn:Linear", {"in_features": SIDE, "out_features": SIDE})
WEIGHT_BYTES = SIDE * SIDE * 4
BIAS_BYTES = SIDE * 4


def written(path: Path, text: str) -> Path:
    path.write_text(dedent(text))
    return path


def predicted(
    *names: str,
    device: str = "cpu",
    dtype: str = "float32",
    spec: ModelSpec = SPEC,
    **settings: Any,
) -> list[Prediction]:
    strategies: tuple[tuple[StrategyInfo, dict[str, Any]], ...] = tuple(
        (registry.strategy(name), {}) for name in names
    )
    cells = planned((spec,), strategies, device=device, dtypes={spec.title: dtype})
    return predict(cells, **settings)


def above(one: Prediction) -> float:
    """Return the anonymous peak above the import of torch, as copies of the weight."""
    assert one.cannot == ""
    assert one.host_anon_peak_bytes and one.baseline_anon_bytes
    return (one.host_anon_peak_bytes - one.baseline_anon_bytes) / WEIGHT_BYTES


def test_copies_on_the_cpu_are_counted() -> None:
    names = ("baseline", "sequential", "load_assign", "streaming")
    copies = [round(above(one)) for one in predicted(*names)]
    assert copies == [2, 2, 1, 1]


def test_buffers_are_no_larger_than_what_is_read() -> None:
    """Each of the threads has a buffer: together four times this model, if all were used.

    A large read uses four pages of it.
    """
    small = ModelSpec("small", "torch.nn:Linear", {"in_features": 768, "out_features": 768})
    (one,) = predict(planned((small,), ((registry.strategy("streaming"), {}),)))
    weight, bias = 768 * 768 * 4, 768 * 4
    assert one.tensor_peak_bytes == pytest.approx(weight + 2 * bias + 16 * KIB, abs=4 * KIB)


def test_mapped_weights_are_pages_of_the_file() -> None:
    mapped, read = predicted("mmap_assign", "load_assign")
    assert above(mapped) < 0.4
    assert mapped.host_file_peak_bytes and read.host_file_peak_bytes
    # Two processes map more or less of the libraries: once, 124 KiB.
    assert mapped.host_file_peak_bytes - read.host_file_peak_bytes == pytest.approx(
        WEIGHT_BYTES + BIAS_BYTES, abs=512 * KIB
    )


def test_a_floor_has_room_for_page_tables_and_for_what_is_read_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "read_ahead_bytes", lambda _folder: 3 * MIB)
    windows = {"mmap_assign": 4, "load_assign": 0}
    for one in predicted(*windows):
        most = one.host_anon_most_bytes
        assert most and one.floor_bytes and one.floor_least_bytes
        in_flight = windows[one.strategy] * 3 * MIB
        assert one.floor_bytes == most + most // 512 + 16 * MIB + in_flight
        assert one.floor_least_bytes == one.floor_bytes - in_flight


def with_options(name: str, fmt: str, dtype: str = "float32", **options: Any) -> Prediction:
    pair = (registry.strategy(name), options)
    (one,) = predict(planned((SPEC,), (pair,), dtypes={SPEC.title: dtype}, format=[fmt]))
    return one


def test_accelerate_maps_safetensors_and_reads_other_files() -> None:
    mapped, read = (with_options("accelerate", fmt) for fmt in ("safetensors", "pt"))
    assert above(mapped) < 0.6
    assert round(above(read)) == 1
    assert mapped.host_file_peak_bytes and read.host_file_peak_bytes
    assert mapped.host_file_peak_bytes - read.host_file_peak_bytes == pytest.approx(
        WEIGHT_BYTES + BIAS_BYTES, abs=MIB
    )
    half = with_options("accelerate", "safetensors", "bfloat16")
    assert round(2 * above(half)) == 1  # the converted copy, beside mapped pages


def test_accelerate_that_writes_the_weights_to_a_folder_is_not_followed() -> None:
    one = with_options("accelerate", "safetensors", offload_state_dict=True)
    assert one.host_anon_peak_bytes is None
    assert one.cannot == (
        "weighin cannot predict the memory of weights that are written to a folder and read back"
    )


def test_a_format_that_weighin_does_not_write_is_told_with_its_repair() -> None:
    said = "ConfigError: weighin reads the format pt_legacy, but does not write it: name another"
    assert with_options("load_assign", "pt_legacy").cannot.startswith(said)


def test_cuda_sums_are_the_allocators() -> None:
    baseline, mapped = predicted("baseline", "mmap_assign", device="cuda")
    assert baseline.cuda_requested_bytes == 2 * (WEIGHT_BYTES + BIAS_BYTES)
    assert baseline.cuda_allocated_bytes == 2 * (WEIGHT_BYTES + BIAS_BYTES)
    assert baseline.cuda_reserved_bytes == 2 * WEIGHT_BYTES + 2 * MIB
    assert mapped.cuda_requested_bytes == WEIGHT_BYTES + BIAS_BYTES
    assert [phase.name for phase in mapped.phases] == ["build", "map", "assign", "buffers", "touch"]


MOVES = (
    "to('cuda')",
    "to(device='cuda')",
    "to(device=torch.device('cuda', 0), dtype=torch.float32)",
    "to(0)",
    "to(torch.empty(0, device='cuda'))",
    "cuda()",
    "cuda(device=0)",
)


def test_a_model_on_the_gpu_stays_there_if_it_is_moved_again(tmp_path: Path) -> None:
    lines = ["import torch", "def load(job):", "    model = job.build_model().to(job.device)"]
    for number, move in enumerate(MOVES):
        lines.append(f"    with job.phase('{number}'): model.{move}")
    text = "\n".join([*lines, "    return model", "DEVICES = ('cuda',)"])
    (one,) = predicted(str(written(tmp_path / "twice.py", text)), device="cuda")
    assert one.cannot == ""
    for move, phase in zip(MOVES, one.phases, strict=False):
        assert phase.cuda_requested_bytes == WEIGHT_BYTES + BIAS_BYTES, move
        assert (phase.host_anon_peak_bytes or 0) - (
            one.baseline_anon_bytes or 0
        ) < WEIGHT_BYTES / 2, move


WITH_BUFFERS = [
    "tied-tiny",
    "minilm",
    "llama-70b",
    *nightly(
        "qwen3-0.6b",
        "gemma-3-1b",
        "bert-base",
        "clip-base",
        "deepseek-v3-bf16",
        "flux",
        "gpt-oss-20b",
        "gpt-oss-20b-bf16",
        "qwen3-30b-a3b",
        "llama-8b",
        "mistral-7b",
        "qwen3-8b",
    ),
]


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_streaming_to_a_gpu_needs_little_ram_for_a_model_with_buffers_of_its_own(name: str) -> None:
    """The buffers are built on the CPU, so that the loader moves the loaded model once more."""
    (one,) = predicted("streaming", device="cuda", dtype="bfloat16", spec=registry.model(name))
    assert one.cannot == ""
    assert one.floor_bytes and one.floor_bytes < 3 * GIB
    assert one.cuda_requested_bytes and one.model_bytes
    assert one.model_bytes <= one.cuda_requested_bytes < 1.01 * one.model_bytes + 64 * MIB


def test_the_checkpoint_of_a_model_has_the_dtype_of_its_published_files() -> None:
    (half,) = predicted("streaming", dtype="bfloat16", spec=registry.model("llama-70b"))
    assert half.checkpoint_dtype == "bfloat16"
    assert half.disk_read_bytes == pytest.approx(70_553_706_496 * 2, abs=MIB)
    assert predicted("streaming")[0].checkpoint_dtype == "float32"


def test_a_users_checkpoint_gives_the_structure(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    state = {"weight": torch.empty(SIDE, SIDE), "bias": torch.empty(SIDE)}
    with torch.serialization.skip_data():
        torch.save({name: one.to(torch.float16) for name, one in state.items()}, file)
    found = predicted("load_assign", "per_param", checkpoint=file)
    assert [one.disk_read_bytes for one in found] == [(WEIGHT_BYTES + BIAS_BYTES) // 2] * 2


def test_a_strategy_of_ones_own_is_predicted_by_the_same_run(tmp_path: Path) -> None:
    own = written(
        tmp_path / "three.py",
        '''
        """Three copies."""
        import torch

        def load(job):
            with job.phase("build"):
                model = job.build_model()
            with job.phase("copies"):
                state = torch.load(job.checkpoint)
                other = {name: tensor * 2 for name, tensor in state.items()}
                model.load_state_dict(other)
            return model
        ''',
    )
    (found,) = predicted(str(own))
    assert round(above(found)) == 3


def test_what_cannot_be_followed_says_so(tmp_path: Path) -> None:
    own = written(
        tmp_path / "looks.py",
        '''
        """Looks at values."""
        import torch

        def load(job):
            state = torch.load(job.checkpoint)
            if state["weight"].sum().item() > 0:
                print("positive")
            return job.build_model()
        ''',
    )
    looks, missing = predicted(str(own)), predicted("safetensors_copy", device="cuda")
    assert missing[0].cannot == ""
    assert looks[0].cannot == (
        "CannotFollow: the code uses values of tensors, but a prediction runs without values"
    )
    assert looks[0].host_anon_peak_bytes is None


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
    "caught": "\n        try: os.fork()\n        except Exception: pass",
}


def test_a_strategy_that_starts_a_process_is_refused_and_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
    import ctypes, multiprocessing, os, subprocess, time

    def load(job):
        {start}
        return job.build_model()
    """
    paths = [
        written(tmp_path / f"{name}.py", text.format(start=how)) for name, how in STARTS.items()
    ]
    monkeypatch.setenv("PREDICTS", str(tmp_path))
    assert [one.cannot for one in predicted(*map(str, paths))] == [
        "CannotFollow: the strategy starts a process, whose memory a prediction cannot compute"
    ] * len(STARTS)
    assert leftovers.processes(f"PREDICTS={tmp_path}") == []


@pytest.mark.nightly
def test_truncated_normal_values_are_followed_if_no_value_is_out_of_bounds(tmp_path: Path) -> None:
    written(
        tmp_path / "truncated.py",
        """
        import torch

        def build(std):
            model = torch.nn.Linear(8192, 8192)
            torch.nn.init.trunc_normal_(model.weight, std=std)
            return model
        """,
    )
    narrow, wide = (
        predicted(
            "baseline",
            spec=ModelSpec("truncated", "truncated:build", {"std": std}),
            python_path=[str(tmp_path)],
        )[0]
        for std in (0.02, 1.0)
    )
    assert round(above(narrow)) == 2
    # torch before 2.13 does not read the values
    assert not wide.cannot or wide.cannot.startswith(
        "CannotFollow: the code uses values of tensors"
    )


def test_without_another_dtype_the_checkpoint_is_as_bench_writes_it() -> None:
    pytest.importorskip("transformers", reason=install.command("hf"))
    (found,) = predicted("mmap_assign", dtype="bfloat16", spec=registry.model("qwen3-0.6b"))
    assert found.cannot == ""
    assert found.disk_read_bytes == pytest.approx(596_049_920 * 2, rel=1e-3)


def test_a_strategy_that_fails_says_how() -> None:
    strategies: tuple[tuple[StrategyInfo, dict[str, Any]], ...] = (
        (registry.strategy("per_param"), {}),
    )
    (found,) = predict(planned((ModelSpec("no", "torch.nn:Nothing", {}),), strategies))
    assert found.cannot.startswith(
        "ConfigError: builder 'torch.nn:Nothing': module 'torch.nn' has no"
    )


def test_a_command_that_predicts_nothing_ends_with_code_2_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"weight": torch.ones(4, 4)}, path)
    ended = CliRunner().invoke(app, ["predict", str(path), "-s", "dcp_fsdp,transformers"])
    text = " ".join(ended.output.split())
    assert ended.exit_code == 2, text
    assert "transformers (pt) is not predicted: transformers loads Hugging Face" in text
    assert "error: no load was predicted" in text
    assert "Predicted by running each strategy" not in text
    ended = CliRunner().invoke(app, ["predict", str(path), "--use", "fork"])
    assert str(ended.exception).startswith("the use fork can only be measured\nmeasure it: ")
    ended = CliRunner().invoke(app, ["predict", str(path), "-s", "streaming,transformers"])
    assert ended.exit_code == 0, ended.output
