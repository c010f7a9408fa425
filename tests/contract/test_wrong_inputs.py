"""Exit codes and texts for all that can be wrong: a table for each verb, in ``snapshots/wrong_inputs``.

A table has the commands and what they answer. To add a command, add a line ``$ weighin ...``, or
``$ NAME=VALUE weighin ...``, to its table, and let ``pytest --rewrite`` write the answer. ``FILES``
are the files that the commands name.
"""

import json
import re
import shlex
import shutil
import socket
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from old_files import BUILDER, KWARGS, put_cache, put_run
from outside import Ended, typed
from snapshots import Compare

TABLES: Final = sorted(Path(__file__).with_name("snapshots").glob("wrong_inputs/*.txt"))
_LONGEST: Final = 160  # characters of a line: lists of known names grow
BENCH: Final = (
    "bench", "--model", BUILDER, "--set", f"kwargs={json.dumps(KWARGS)}", "--isolation", "process",
)  # fmt: skip
VARIES: Final = {
    r"(weighin: Killed by SIGKILL).*": r"\1",
    r"weighin: The command needs .*\n": "",
    r"more than this machine has \(.*\)": "more than this machine has (RAM)",
}

FILES: Final = {
    "no_load.py": '"""A strategy without a load."""\n', "typo.py": "def load(job:\n",
    "page.safetensors": "<!DOCTYPE html>\n<html><body>Sign in</body></html>\n",
    "pointer.safetensors": "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3\n",
    "text.pt": "weights\n", "empty.pt": "", "folder/config.json": '{"model_type": "gpt2"}',
    "lora/adapter_config.json": '{"base_model_name_or_path": "a/b"}',
    "layers/config.json": '{"model_type": "gpt2", "n_layer": 1000000000}',
    "inner/config.json": '{"model_type": "gpt2", "text_config": {"inner": {"n_layer": 1000000000}}}',
    "unknown/config.json": '{"model_type": "nothing", "architectures": ["Nothing"]}',
    "shards/config.json": '{"model_type": "gpt2"}',
    "shards/model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors"}}',
    "suites/list.yaml": "- models\n", "suites/tab.yaml": "models:\tx\n\tram: 8g\n",
    "suites/unknown.yaml": "models: gpt2-tiny\nrams: 8g\n",
    "suites/value.yaml": "models: gpt2-tiny\nrepeats: many\n",
    "suites/permission.yaml": "models: gpt2-tiny\ntrust_remote_code: true\n",
    "suites/none.yaml": "description: nothing\n", "suites/model.yaml": "models: gpt2-tinny\n",
    "suites/keyed.yaml": f"models: {{name: mine, builder: '{BUILDER}', key: model}}\n",
    "suites/parts.yaml": f"models: [gpt2-tiny, {{name: mine, builder: '{BUILDER}', key: model}}]\n",
    "suites/strategy.yaml": "models: gpt2-tiny\nstrategies: streeming\n",
    "suites/option.yaml": "models: gpt2-tiny\nstrategies: [{name: streaming, options: {granularty: tensor}}]\n",
    "suites/command.yaml": "commands: [{name: a, command: ./gone}]\nisolation: process\n",
    "suites/twice.yaml": "commands: [{name: a, command: 'true'}, {name: a, command: 'false'}]\n",
    "baselines/list.yaml": "- schema\n", "baselines/future.yaml": "schema: 99\n",
    "baselines/key.yaml": "schema: 1\nmeasure: {}\n",
    "baselines/metric.yaml": "schema: 1\nmetrics: {peek: off}\n",
    "baselines/budget.yaml": "schema: 1\nbudgets: ['* <= 3']\n", "plans/text/plan.json": "{",
    "plans/list/plan.json": "[]", "plans/future/plan.json": '{"schema": 99, "cells": []}',
    "plans/empty/plan.json": '{"schema": 1, "cells": []}',
    "plans/key/plan.json": '{"schema": 1, "cells": [{"model": 3}]}',
    "records/text/records.jsonl": "nothing\n", "records/list/records.jsonl": "[]\n",
    "records/future/records.jsonl": '{"schema": 99}\n', "records/key/records.jsonl": '{"schema": 1}\n',
    "taken": "mine\n", "program": "not executable\n",
    "inner/my-nets.py": "", "inner/queue.py": "", "inner/write.py": "def use(model): ...\n",
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    entry = put_cache(folder / "cache")
    _make_checkpoints(folder, (entry / "pt/model.pt").read_bytes())
    return folder


@pytest.fixture
def inputs(made: Path, here: Path) -> Path:
    """The current folder, with all that the commands name."""
    shutil.copytree(made, here, dirs_exist_ok=True)
    for name in ("bench", "run", "floor"):
        put_run(name, here / "runs" / name)
    put_run("bench", here / "runs/elsewhere", checkout=Path("/home/them/weighin"))
    return here


def _make_checkpoints(folder: Path, content: bytes) -> None:
    at = content.index(b"data.pkl") + 100
    file = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    twice = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}}'
    for name, data in {
        "good.pt": content,
        "truncated.pt": content[: len(content) // 2],
        "pickle.pt": content[:at] + b"\xff" * 16 + content[at + 16 :],
        "zeros.pt": bytes(5000),
        "code.pt": b"\x80\x02cposix\nsystem\nX\x0b\x00\x00\x00touch PROOF\x85R.",
        "short.safetensors": len(file).to_bytes(8, "little") + file + bytes(8),
        "overlap.safetensors": len(twice).to_bytes(8, "little") + twice + bytes(24),
        "header.safetensors": (2**40).to_bytes(8, "little") + file,
        "short.gguf": b"GGUF" + (3).to_bytes(4, "little") + (7).to_bytes(8, "little"),
    }.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_what_is_wrong_is_said_and_has_its_exit_code(
    inputs: Path, same: Compare, table: Path
) -> None:
    before = _tree(inputs)
    lines = [line for line in table.read_text().splitlines() if line.startswith("$ ")]
    assert lines
    answers = []
    for line in lines:
        variables, _, words = line[2:].partition("weighin ")
        ended = typed(*shlex.split(words), **dict(one.split("=") for one in variables.split()))
        answers.append(f"{line}\nexit code {ended.code}\n{_plain(ended, inputs)}")
    same(f"wrong_inputs/{table.name}", "\n".join(answers))
    after = _tree(inputs)
    assert [name for name, content in before.items() if after.get(name) != content] == []
    left = {name.split("/")[0] for name in after.keys() - before.keys()}
    assert left <= {"cache", "1", "2", "3", "4", "5", "6", "j.json", "new"}


def _tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file by its name; of a folder, an empty one."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def _plain(ended: Ended, folder: Path) -> str:
    """Return what a command said, without what depends on the machine and the moment."""
    text = ended.err.replace(str(folder), "FOLDER")
    for pattern, word in VARIES.items():
        text = re.sub(pattern, word, text)
    lines = [line.rstrip() for line in text.splitlines()]
    if ended.code == 1:
        lines.append(f"last line: {ended.out.rstrip().splitlines()[-1]}")
    return "".join(
        f"{line[:_LONGEST]}...\n" if len(line) > _LONGEST else f"{line}\n" for line in lines
    )


def test_a_second_run_on_the_machine_is_refused(inputs: Path) -> None:
    lock = str(inputs / "lock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        held.bind(f"\0weighin-measuring-{crc32(lock.encode()):08x}")
        ended = typed(*BENCH, "-s", "baseline", WEIGHIN_LOCK=lock)
    assert (ended.code, ended.out) == (4, "")
    assert ended.err.endswith(
        "error: another run is measuring on this machine\nwait for its end: weighin bench --set"
        " wait=true; parallel runs would distort each other's figures\n"
    )


STRATEGIES: Final = {
    "wrong": "model = job.build_model()\n    return model.to(job.dtype)",
    "raising": "raise RuntimeError('no')",
    "crashing": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
}


def test_strategies_that_fail_are_results_and_end_with_5(inputs: Path, same: Compare) -> None:
    for name, body in STRATEGIES.items():
        Path(f"{name}.py").write_text(f'"""Fail."""\n\ndef load(job):\n    {body}\n')
    names = ",".join(f"./{name}.py" for name in STRATEGIES)
    ended = typed(*BENCH, "--use", "none", "--out", "run", "-s", names)
    assert ended.code == 5
    said = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    same("failing_strategies.txt", "\n".join(said) + "\n")
