"""No verb asks the network for anything: each connection of weighin's processes is written down."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typed import ROOT, CommandLine

from weighin.models.pretrained import pretrained_class

SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
# Python imports it first, in each process: a look-up of a name, or a connection that is no Unix socket.
HOOK = """
import os, sys
def audit(event, arguments):
    if event == "socket.getaddrinfo" or event == "socket.connect" and isinstance(arguments[1], tuple):
        with open(os.environ["CONNECTIONS"], "a") as file:
            print(sys.argv, event, arguments[-1] if event == "socket.connect" else arguments[:2], file=file)
sys.addaudithook(audit)
"""


@pytest.fixture
def variables(command: CommandLine) -> dict[str, Any]:
    """The environment in which connections are written down, and which allows the Hub to be asked."""
    hooks = command.folder / "hooks"
    hooks.mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    return {
        "PYTHONPATH": f"{hooks}{os.pathsep}{ROOT / 'harness'}",
        "CONNECTIONS": str(command.folder / "connections"),
        "HF_HUB_OFFLINE": "0",
    }


@pytest.fixture
def model(command: CommandLine) -> Path:
    """A folder of transformers that names the repository of its author."""
    kind = pretrained_class("LlamaForCausalLM")
    made = kind(kind.config_class(**SHAPE, name_or_path="owner/name"))
    made.save_pretrained(command.folder / "model")
    return command.folder / "model"


def connections(command: CommandLine) -> str:
    path = command.folder / "connections"
    return path.read_text() if path.exists() else ""


def test_a_connection_would_be_seen(command: CommandLine, variables: dict[str, Any]) -> None:
    script = "import socket; socket.socket().connect_ex(('127.0.0.1', 9))"
    subprocess.run([sys.executable, "-c", script], env=command.environment | variables, check=True)
    assert "('127.0.0.1', 9)" in connections(command)


@pytest.mark.parametrize(
    "arguments",
    [
        "bench model -s transformers,streaming --isolation process --out run",
        pytest.param(
            "bench gpt2-tiny -s accelerate,dcp,runai,fastsafetensors,tensorizer --isolation process",
            marks=pytest.mark.nightly,
        ),
        pytest.param("recommend model --ram 1g", marks=pytest.mark.nightly),
        pytest.param(
            "convert model new --format per_param --keys model", marks=pytest.mark.nightly
        ),
        pytest.param("doctor", marks=[pytest.mark.nightly, pytest.mark.cgroup]),
    ],
)
def test_no_verb_connects_to_another_machine(
    command: CommandLine, variables: dict[str, Any], model: Path, arguments: str
) -> None:
    ended = command.run(*arguments.split(), patience_s=600, **variables)
    assert ended.code == 0, ended.err
    assert connections(command) == ""


def test_reading_a_checkpoint_connects_to_no_other_machine(
    command: CommandLine, variables: dict[str, Any], model: Path
) -> None:
    for verb in ("inspect", "predict"):
        ended = command.run(verb, str(model), **variables)
        assert ended.code == 0, ended.err
    assert connections(command) == ""
