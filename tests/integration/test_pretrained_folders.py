"""A Hugging Face folder as the model of ``weighin bench`` and ``weighin recommend``."""

import json
from pathlib import Path
from typing import Any

import predicted_runs
import pytest
import torch
from nightly import nightly
from remote_folder import write_folder
from typed import CommandLine

from weighin.models.pretrained import pretrained_class

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied-llama": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}),
    "half": ("LlamaForCausalLM", DECODER),
    "experts": ("Qwen3MoeForCausalLM", DECODER | EXPERTS),
}


@pytest.fixture(scope="session")
def folders(disk: Path) -> Path:
    root = disk / "pretrained folders"
    for name, (architecture, settings) in MODELS.items():
        kind = pretrained_class(architecture)
        torch.manual_seed(0)
        model = kind(kind.config_class(**settings))
        if name == "half":
            model = model.to(torch.bfloat16)
        model.save_pretrained(root / name)
    return root


ALL = "streaming,transformers,accelerate,safetensors_mmap,baseline"


def outcomes(
    command: CommandLine, folder: Path, *more: str, strategies: str = "streaming,baseline"
) -> dict[str, tuple[str, str]]:
    done = command.run(
        "bench", str(folder), "--isolation", "process", "--out", "run", *more,
        "--strategies", strategies, patience_s=300,
    )  # fmt: skip
    assert done.code == 0, done.err
    results = map(json.loads, (command.folder / "run/records.jsonl").read_text().splitlines())
    return {one["cell"]["strategy"]: (one["outcome"], one["message"]) for one in results}


@pytest.mark.nightly
def test_tied_weights_may_be_missing_from_the_file(command: CommandLine, folders: Path) -> None:
    ended = outcomes(command, folders / "tied-llama")
    assert {outcome for outcome, _ in ended.values()} == {"ok"}, ended


@pytest.mark.parametrize("names", ["streaming,transformers", *nightly(ALL)])
def test_code_of_a_trusted_folder_runs_in_every_strategy(
    command: CommandLine, disk: Path, names: str
) -> None:
    ended = outcomes(
        command, write_folder(disk / "remote code"), "--trust-remote-code", strategies=names
    )
    assert {outcome for outcome, _ in ended.values()} == {"ok"}, ended


def test_a_strategy_that_cannot_convert_keys_says_so(command: CommandLine, folders: Path) -> None:
    ended = outcomes(command, folders / "experts", strategies="streaming,safetensors_mmap")
    assert ended["streaming"][0] == "ok"
    assert ended["safetensors_mmap"] == (
        "skipped",
        "needs keys converted, renamed, computed or left out, as from_pretrained does, but safetensors_mmap expects the model's"
        " own keys: give another --format, or write a checkpoint with those keys: weighin convert"
        " FOLDER TARGET --keys model",
    )


def test_a_folder_is_inspected(command: CommandLine, folders: Path) -> None:
    done = command.run("inspect", str(folders / "tied-llama"))
    assert done.code == 0, done.err
    assert "format safetensors, 20 tensors" in " ".join(done.out.split())


@pytest.mark.nightly
def test_the_peak_of_a_small_model_is_predicted_though_imports_dominate_it(
    command: CommandLine, folders: Path
) -> None:
    done = command.run(
        "bench", str(folders / "half"), "--isolation", "process", "--out", "run",
        "--strategies", "transformers,safetensors_mmap,per_param", patience_s=300, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.code == 0, done.err
    checked = predicted_runs.check(command.folder / "run")
    summary = predicted_runs.summarised(checked)
    assert summary and (summary["series"], summary["killed"]) == (3, 0)
    assert summary["median_error"] < 0.005, checked


def test_a_prediction_in_another_format_reads_the_folders_own_dtype(
    command: CommandLine, folders: Path
) -> None:
    done = command.run("predict", str(folders / "half"), "-s", "mmap_assign", "--json", "-")
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["predictions"]
    assert (found["format"], found["cannot"]) == ("pt", "")
    size = (folders / "half/model.safetensors").stat().st_size
    assert found["disk_read_bytes"] == pytest.approx(size, rel=0.2)


@pytest.mark.nightly
@pytest.mark.parametrize("names", ["safetensors_mmap,baseline", ALL])
def test_every_strategy_keeps_the_dtypes_that_the_model_keeps(
    command: CommandLine, folders: Path, names: str
) -> None:
    ended = outcomes(command, folders / "half", strategies=names)
    assert {outcome for outcome, _ in ended.values()} == {"ok"}, ended


@pytest.mark.nightly  # builds an image with transformers
@pytest.mark.docker
def test_a_container_has_the_transformers_of_the_host(command: CommandLine, folders: Path) -> None:
    done = command.run(
        "bench", str(folders / "half"), "--isolation", "docker", "--ram", "2g", "--out", "run",
        "--strategies", "streaming,transformers", patience_s=900,
    )  # fmt: skip
    assert done.code == 0, done.err
