"""The help of the command line: what each verb does, examples to paste, and whole words."""

import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from weighin import __version__
from weighin.cli import app
from weighin.cli._options import MODEL_HELP
from weighin.errors import CheckpointError

VERBS = {
    ("doctor",): (
        "Test which limits this machine can enforce, and which figures it can measure.",
        [
            "weighin doctor",
            "weighin doctor --json -",
        ],
    ),
    ("list",): (
        "List the strategies, models, uses, suites and isolations.",
        [
            "weighin list",
            "weighin list strategies",
            "weighin list isolations",
            "weighin list --json -",
        ],
    ),
    ("bench",): (
        "Measure memory and time of loading a model with each strategy in its own limited process.",
        [
            "weighin bench gpt2-xl --ram 8g --repeats 3",
            "weighin bench gpt2-medium --ram 4g,2500m --strategies mmap_assign,streaming",
            "weighin bench gpt2-large --operation save --ram 8g",
            "weighin bench gpt2-medium --use write,adamw -s baseline,streaming",
            "weighin bench gpt2-medium --disk 50MB/s,200MB/s --disk-latency 5ms",
            "weighin bench gpt2-medium --ranks 4 -s baseline,mmap_assign,shared_memory",
            "weighin bench gpt2-medium --device cuda --vram 1g",
            "weighin bench --model my.nets:build --kwargs '{\"n\": 64}' --checkpoint w.pt",
            "weighin bench --suite ci --out results/ci",
            "weighin bench --suite ci --engine ray --address head:6379 --out results/ray",
            "weighin bench --suite ci --shard 2/8 --out results/shard-2",
            "weighin bench --resume results/20261120T093000-gpt2-xl-8GiB",
        ],
    ),
    ("run",): (
        "Run a command under limits; show its peak memory, the peak's cause, and why it was killed.",
        [
            "weighin run -- python train.py --epochs 1",
            "weighin run --ram 4g -- python train.py",
            "weighin run --ram 8g,4g --repeats 3 --cold w.pt -- python load.py w.pt",
            "weighin run --ram 1g --mark epoch -- sh -c 'cat data | python train.py'",
            "weighin run --ram 16g --image vllm/vllm-openai -- vllm serve ./model",
            "weighin run --suite commands --out results/commands",
            "weighin run --resume results/20261126T090000-train.py-4GiB",
        ],
    ),
    ("floor",): (
        "Find the smallest RAM limit under which each strategy loads a model, and measure that load.",
        [
            "weighin floor gpt2-medium",
            "weighin floor gpt2-xl --strategies mmap_assign,streaming --within 2%",
            "weighin floor gpt2-small --isolation cgroup --json -",
            "weighin floor gpt2-small --ranks 1,2,4 -s baseline,mmap_assign",
            "weighin floor gpt2-small --use write,adamw -s baseline,mmap_assign",
            "weighin floor --cold weights.pt -- python load.py weights.pt",
            "weighin floor --ready-url http://127.0.0.1:8000/health -- vllm serve ./model",
            "weighin floor --resume results/20261120T093000-gpt2-medium-floor",
        ],
    ),
    ("report",): (
        "Show a run, and write report.html, report.md, summary.csv and plots into its folder.",
        [
            "weighin report results/20261120T093000-gpt2-xl-8GiB",
            "weighin report results/20261120T093000-gpt2-xl-8GiB --format html,svg",
            "weighin report results/RUN --format bmf,gha,openmetrics,parquet",
            "weighin report results/RUN --json -",
        ],
    ),
    ("compare",): (
        "Show the figures of several runs side by side, such as two commits or two versions of torch.",
        [
            "weighin compare results/torch-2.13 results/torch-2.14",
            "weighin compare results/main results/branch --metrics above_import,ready",
            "weighin compare results/fleet --by machine",
            "weighin compare results/* --by torch",
        ],
    ),
    ("check",): (
        "Compare a run with a baseline file and with budgets; exit with 1 if a comparison fails.",
        [
            "weighin check results/RUN --baseline baseline.json --update",
            "weighin check results/RUN --baseline baseline.json",
            'weighin check results/RUN --budget "streaming: anon <= 2GiB"',
            'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=timeout',
            "weighin check results/RUN --baseline baseline.json --github --json c.json",
        ],
    ),
    ("history",): (
        "Show a metric over all runs in a folder, and list the runs where the metric changed level.",
        [
            "weighin history results",
            "weighin history results --metric ready_anon --series streaming --out out.svg",
        ],
    ),
    ("recommend",): (
        "Recommend the fastest strategy that fits into the given memory, and show its code.",
        [
            "weighin recommend gpt2-xl --ram 8g",
            "weighin recommend model.safetensors --ram 32g --vram 24g --device cuda",
            "weighin recommend gpt2-large --ram 4g --allow none --json -",
            "weighin recommend gpt2-xl --ranks 8 --ram 64g",
            "weighin recommend gpt2-xl --disk 100MB/s --disk-latency 5ms",
            "weighin recommend gpt2-xl --ram 32g --use adamw",
        ],
    ),
    ("predict",): (
        "Predict the memory of loading a model, without a GPU, without weights and with little memory.",
        [
            "weighin predict gpt2-xl",
            "weighin predict llama-70b --device cuda --dtype bf16 -s streaming",
            "weighin predict gpt2-xl --ranks 8 -s baseline,mmap_assign",
            "weighin predict gpt2-xl --use write,adamw -s baseline,mmap_assign",
            "weighin predict --suite notebook --json -",
            "weighin predict --check results/20261120T093000-gpt2-xl-8GiB",
        ],
    ),
    ("inspect",): (
        "List the tensors of a checkpoint, and estimate the memory of loading it.",
        [
            "weighin inspect model.pt",
            "weighin inspect shards --sort size --all",
            "weighin inspect training.pt --key model",
            "weighin inspect model.safetensors --json -",
            "weighin inspect gpt2-xl",
        ],
    ),
    ("convert",): (
        "Write a checkpoint in another format or dtype, in pieces of 16 MiB to save memory.",
        [
            "weighin convert model.pt parts --format per_param",
            "weighin convert model.pt model-bf16.safetensors --dtype bf16 --verify",
            "weighin convert training.pt model.pt --key model --strip-prefix module.",
            "weighin convert ./folder model.safetensors --keys model",
            "weighin convert ./folder merged.safetensors --adapter ./adapter",
            "weighin convert model.pt shards --format sharded --max-shard-size 2GB",
        ],
    ),
    ("cache", "list"): (
        "List the generated checkpoints, with their sizes on the disk.",
        ["weighin cache list", "weighin cache list --json -"],
    ),
    ("cache", "clear"): (
        "Delete generated checkpoints after a question. Your own checkpoints are never deleted.",
        ["weighin cache clear gpt2-xl", "weighin cache clear --yes"],
    ),
}

ORDER = "doctor list bench run floor report compare check history recommend predict inspect convert cache"
PANELS = ["Before a run", "Measure", "Read and compare", "Choose", "Checkpoints"]


def shown(*arguments: str, columns: int = 80) -> tuple[int, str]:
    """The exit code, and what a terminal of that width without colours shows."""
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"}
    result = CliRunner().invoke(app.app, arguments, env=environment)
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_help_of_each_verb_says_what_it_does(verb: tuple[str, ...]) -> None:
    code, text = shown(*verb, "--help")
    summary, _ = VERBS[verb]
    assert code == 0
    assert summary in " ".join(text.split())
    assert f"Usage: weighin {' '.join(verb)}" in text


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_each_example_is_one_line_to_paste(verb: tuple[str, ...]) -> None:
    _, text = shown(*verb, "--help")
    found = [line.strip() for line in text.splitlines() if line.startswith("    weighin ")]
    assert found == VERBS[verb][1]


def test_an_example_that_is_too_long_for_a_line_can_still_be_pasted() -> None:
    _, text = shown("bench", "--help", columns=60)
    assert (
        "    weighin bench --model my.nets:build --kwargs \\\n"
        "        '{\"n\": 64}' --checkpoint w.pt\n"
    ) in text


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_no_word_of_the_help_is_broken_at_60_columns(verb: tuple[str, ...]) -> None:
    _, wide = shown(*verb, "--help", columns=300)
    _, narrow = shown(*verb, "--help", columns=60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert [word for word in narrow.split() if word != "\\"] == wide.split()


def test_the_verbs_stand_in_the_order_of_work_in_named_panels() -> None:
    _, text = shown("--help")
    headings = re.findall(r"^(\w[\w ]*):$", text, re.MULTILINE)
    assert headings == ["Options", *PANELS]
    _, _, listed = text.partition(f"{PANELS[0]}:\n")
    assert re.findall(r"^  ([a-z]+)  ", listed, re.MULTILINE) == ORDER.split()


def test_every_verb_is_known_here() -> None:
    assert list(app.app.commands) == ORDER.split()
    cache = app.app.commands["cache"]
    assert isinstance(cache, click.Group)
    verbs = {(name,) for name in app.app.commands} - {("cache",)}
    assert verbs | {("cache", name) for name in cache.commands} == set(VERBS)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_writes_json_in_the_same_way(verb: tuple[str, ...]) -> None:
    _, text = shown(*verb, "--help")
    words = " ".join(text.split())
    assert (
        "--json FILE Write the result as JSON to this file. With --json -, weighin prints the JSON"
        " in place of the tables." in words
    )


@pytest.mark.parametrize("verb", [(), *VERBS], ids=" ".join)
def test_help_and_h_show_what_the_long_option_shows(verb: tuple[str, ...]) -> None:
    whole = shown(*verb, "--help")
    assert whole[0] == 0
    assert shown("help", *verb) == shown(*verb, "-h") == whole


def test_help_for_a_verb_that_does_not_exist() -> None:
    code, text = shown("help", "bnech")
    assert code == 2
    assert "No such command 'bnech'" in text
    assert "bench" in text


def test_the_version() -> None:
    assert shown("--version") == (0, f"weighin {__version__}\n")


def test_a_verb_that_does_not_exist() -> None:
    code, text = shown("bnech")
    assert code == 2
    assert "No such command 'bnech'" in text
    assert "bench" in text


def test_weighin_alone_shows_the_verbs() -> None:
    _, text = shown()
    assert all(f"  {verb[0]} " in text for verb in VERBS)


@pytest.mark.parametrize("verb", ["bench", "floor", "predict", "recommend", "inspect"])
def test_every_verb_of_a_model_takes_the_same_argument(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (argument,) = [one for one in app.app.commands[verb].params if one.name == "model"]
    assert isinstance(argument, click.Argument)
    assert argument.help == MODEL_HELP
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    for typed, message in (
        ("./gone.pt", "./gone.pt: no such file or folder"),
        ("from:gone.pt", "gone.pt: no such file or folder"),
        ("lora", "lora: an adapter of a/b, not a whole model"),
    ):
        for words in ([typed], ["--model", typed]):
            error = CliRunner().invoke(app.app, [verb, *words]).exception
            assert isinstance(error, CheckpointError)
            assert error.message == message
