"""No verb asks the network for anything, or runs a Python file of the current folder that nobody named."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
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
def connections(command: CommandLine) -> Path:
    """A file for connections. Beside it are the hook, and a model that names its author's repository."""
    (hooks := command.folder / "hooks").mkdir()
    (hooks / "sitecustomize.py").write_text(HOOK)
    kind = pretrained_class("LlamaForCausalLM")
    made = kind(kind.config_class(**SHAPE, name_or_path="owner/name"))
    made.save_pretrained(command.folder / "model")
    return command.folder / "connections"


def variables(connections: Path) -> dict[str, Any]:
    """The environment in which connections are written down, and which allows the Hub to be asked."""
    path = f"{connections.with_name('hooks')}{os.pathsep}{ROOT / 'harness'}"
    return {"PYTHONPATH": path, "CONNECTIONS": str(connections), "HF_HUB_OFFLINE": "0"}


def test_a_connection_would_be_seen(command: CommandLine, connections: Path) -> None:
    script = "import socket; socket.socket().connect_ex(('127.0.0.1', 9))"
    environment = command.environment | variables(connections)
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert "('127.0.0.1', 9)" in connections.read_text()


NIGHTLY = pytest.mark.nightly
VERBS = [
    "inspect model",
    "predict model",
    pytest.param("bench model -s transformers,streaming --isolation process", marks=NIGHTLY),
    pytest.param("bench gpt2-tiny -s accelerate,dcp,runai,fastsafetensors,tensorizer --isolation process", marks=NIGHTLY),
    pytest.param("recommend model --ram 1g", marks=NIGHTLY),
    pytest.param("convert model new --format per_param --keys model", marks=NIGHTLY),
    pytest.param("doctor", marks=[NIGHTLY, pytest.mark.cgroup]),
]  # fmt: skip


@pytest.mark.parametrize("line", VERBS)
def test_no_verb_connects_to_another_machine(
    command: CommandLine, connections: Path, line: str
) -> None:
    ended = command.run(line, patience_s=600, **variables(connections))
    assert ended.code == 0, ended.err
    assert not connections.exists() or connections.read_text() == ""


NAMES = (
    *("torch", "numpy", "random", "json", "tempfile", "pickle", "struct", "subprocess", "ctypes"),
    *("typing", "logging", "weighin", "safetensors", "transformers", "pip", "sitecustomize"),
)
RUN = "-s streaming --isolation process --out run"
LINES = [
    ["convert model.pt model.safetensors --verify", "predict model.pt -s streaming"],
    pytest.param(["inspect model.pt", "list models", "doctor"], marks=NIGHTLY),
    pytest.param(["recommend model.pt --ram 1g"], marks=NIGHTLY),
    pytest.param([f"bench model.pt {RUN}", "report run", "history run"], marks=NIGHTLY),
    pytest.param([f"bench gpt2-tiny {RUN}"], marks=NIGHTLY),
    pytest.param(["floor model.pt -s streaming --isolation cgroup"], marks=[NIGHTLY, pytest.mark.cgroup]),
]  # fmt: skip


@pytest.mark.parametrize("lines", LINES, ids=" and ".join)
def test_no_verb_runs_a_file_of_the_current_folder(command: CommandLine, lines: list[str]) -> None:
    """The folder has Python files with names that programs import; they note that they were executed."""
    torch.save({"weight": torch.ones(8, 8), "bias": torch.zeros(8)}, command.folder / "model.pt")
    executed = command.folder / "executed"
    for name in NAMES:
        note = f"open({str(executed)!r}, 'a').write('{name} ')\nraise ImportError"
        (command.folder / f"{name}.py").write_text(note)
    for line in lines:
        ended = command.run(line)
        assert not executed.exists(), f"{line}: {executed.read_text()}"
        assert (ended.code, ended.left) == (0, []), ended.err
