"""What a user reads for a checkpoint that cannot be used, and what becomes of a good one of his own."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from commands import NOT_LIMITED, CommandLine

from weighin.stream.construct import resolve_builder
from weighin.suite.registry import model


@pytest.fixture(scope="module")
def checkpoints(disk: Path) -> Path:
    """A folder of gpt2-tiny checkpoints: a good one, and what can be wrong with one."""
    folder = disk / "checkpoints"
    folder.mkdir()
    spec = model("gpt2-tiny")
    state = resolve_builder(spec.builder)(**spec.kwargs).state_dict()
    torch.save(state, folder / "good.pt")
    good = (folder / "good.pt").read_bytes()
    (folder / "truncated.pt").write_bytes(good[: len(good) // 2])
    at = good.index(b"data.pkl") + 200
    (folder / "damaged.pt").write_bytes(good[:at] + b"\xff" * 32 + good[at + 32 :])
    (folder / "empty.pt").touch()
    (folder / "noise.pt").write_bytes(bytes(range(200, 256)) * 80)
    renamed = {("extra" if name == "tok_emb.weight" else name): t for name, t in state.items()}
    torch.save(renamed, folder / "keys.pt")
    torch.save(state | {"tok_emb.weight": torch.ones(3, 5)}, folder / "shapes.pt")
    torch.save(state | {"tok_emb.weight": Bomb(folder / "EXECUTED")}, folder / "code.pt")
    return folder


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.proof}",)


REFUSED_CHECKPOINTS = {
    "truncated": "truncated: the zip archive has no end record\ncopy or download the file again\n",
    "damaged": (
        "damaged: the pickle from byte N cannot be read: weighin does not know its instruction 0xff, at"
        " byte N\n"
        "save it again with the program that wrote it; if that program cannot read it either, the file is"
        " damaged\n"
    ),
    "empty": "empty file\ncopy or download the file again\n",
    "noise": (
        "of a kind that weighin does not know; its first bytes are c8 c9 ca cb cc cd ce cf\n"
        "save the weights with torch.save or safetensors, with the program that wrote the file\n"
    ),
    "keys": (
        "does not fit model gpt2-tiny, keys: 1 missing (tok_emb.weight); 1 unexpected (extra)\n"
        "choose the model that this checkpoint was saved from, or correct its arguments\n"
    ),
    "shapes": (
        "does not fit model gpt2-tiny, keys: "
        "1 of another shape (tok_emb.weight is (3, 5), not (1024, 128))\n"
        "choose the model that this checkpoint was saved from, or correct its arguments\n"
    ),
    "code": (
        "holds more than tensors, and was NOT executed: 'tok_emb.weight' refers to posix.system\n"
        "if you trust the file, load it and save plain weights: torch.save(model.state_dict(), ...)\n"
    ),
}


@pytest.mark.parametrize("name", REFUSED_CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used_is_refused(
    command: CommandLine, checkpoints: Path, name: str
) -> None:
    file = checkpoints / f"{name}.pt"
    ended = command.run(
        *("bench", "gpt2-tiny", "--checkpoint", str(file), "--isolation", "process", "--out", "run")
    )
    said = ended.err.replace(NOT_LIMITED, "").replace("reading the checkpoint of gpt2-tiny\n", "")
    said = re.sub(r"byte \d+", "byte N", said)
    assert said == f"error: {file}: {REFUSED_CHECKPOINTS[name]}"
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert not (command.folder / "run").exists()
    assert not (checkpoints / "EXECUTED").exists()


@pytest.mark.parametrize("verb", ["inspect", "convert"])
@pytest.mark.parametrize("name", ["truncated", "damaged", "code"])
def test_the_other_verbs_refuse_it_in_the_same_words(
    command: CommandLine, checkpoints: Path, name: str, verb: str
) -> None:
    file = checkpoints / f"{name}.pt"
    ended = command.run(verb, str(file), *(["new.pt"] if verb == "convert" else []))
    assert re.sub(r"byte \d+", "byte N", ended.err) == f"error: {file}: {REFUSED_CHECKPOINTS[name]}"
    assert (ended.code, ended.out, ended.left) == (2, "", [])
    assert not list(command.folder.glob("*new*"))
    assert not (checkpoints / "EXECUTED").exists()


def test_a_checkpoint_of_ones_own_is_loaded_and_converted(
    command: CommandLine, checkpoints: Path
) -> None:
    ended = command.run(
        *("bench", "gpt2-tiny", "--checkpoint", str(checkpoints / "good.pt")),
        *("--isolation", "process", "--out", "run", "-s", "mmap_assign,per_param"),
    )
    assert (ended.code, ended.left) == (0, [])
    lines = (command.folder / "run" / "records.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    outcomes = {result["cell"]["strategy"]: result["outcome"] for result in results}
    assert outcomes == {"mmap_assign": "ok", "per_param": "ok"}
