"""What the command line says of itself: help that can be pasted from."""

import re

import pytest
import typer
from typer.testing import CliRunner

from weighin import __version__
from weighin.cli import app

VERBS = {
    ("bench",): (
        "Load or save a model with every strategy, each in its own limited container: what did it cost?",
        [
            "weighin bench gpt2-xl --ram 8g --repeats 3",
            "weighin bench gpt2-medium --ram 4g,2500m --strategies mmap_assign,streaming",
            "weighin bench gpt2-large --operation save --ram 8g",
            "weighin bench gpt2-medium --device cuda --vram 1g --trace",
            "weighin bench --model my.nets:build --kwargs '{\"width\": 64}' --checkpoint w.pt",
            "weighin bench --resume results/20261120T093000-gpt2-xl-8GiB",
        ],
    ),
    ("check",): (
        "Compare a run with a committed baseline and with budgets; exits with 1 where one is broken.",
        [
            "weighin check results/RUN --baseline baseline.yaml --update",
            "weighin check results/RUN --baseline baseline.yaml",
            'weighin check results/RUN --budget "streaming: anon <= 2GiB"',
            'weighin check results/RUN --budget "anon <= 2GiB" --expect baseline=oom_killed',
            "weighin check results/RUN --baseline baseline.yaml --github",
        ],
    ),
    ("floor",): (
        "Find the smallest RAM limit under which each strategy loads a model, and what life costs there.",
        [
            "weighin floor gpt2-medium",
            "weighin floor gpt2-xl --strategies mmap_assign,streaming --within 2%",
            "weighin floor gpt2-small --isolation cgroup --json",
            "weighin floor --resume results/20261120T093000-gpt2-medium-floor",
        ],
    ),
    ("compare",): (
        "Set several runs beside each other: two commits, two torch versions; judges nothing.",
        [
            "weighin compare results/torch-2.13 results/torch-2.14",
            "weighin compare results/main results/branch --metrics above_import,ready",
        ],
    ),
    ("convert",): (
        "Write a checkpoint again in another layout or dtype; holds a few pieces of 16 MiB, no more.",
        [
            "weighin convert model.pt parts --format per_param",
            "weighin convert model.pt model-bf16.safetensors --dtype bf16 --verify",
            "weighin convert model.pt shards --format sharded --max-shard-size 2GiB",
        ],
    ),
    ("inspect",): (
        "Say what is in a checkpoint and what a load should need; executes and loads nothing of it.",
        [
            "weighin inspect model.pt",
            "weighin inspect shards --sort size --all",
            "weighin inspect model.safetensors --json",
        ],
    ),
    ("predict",): (
        "Say what loads would need, by running them without values: no GPU, no weights, any size.",
        [
            "weighin predict gpt2-xl",
            "weighin predict llama-70b --device cuda --dtype bf16 -s streaming",
            "weighin predict --suite configs/suites/notebook.yaml --json",
            "weighin predict --check results/20261120T093000-gpt2-xl-8GiB",
        ],
    ),
    ("recommend",): (
        "Say which way of loading fits and is fastest: measured where it was, else predicted.",
        [
            "weighin recommend gpt2-xl --ram 8g",
            "weighin recommend model.safetensors --ram 32g --vram 24g --device cuda",
            "weighin recommend gpt2-large --ram 4g --allow none --json",
        ],
    ),
    ("report",): (
        "Draw a run again: the table here; report.html, report.md, summary.csv and plots in its folder.",
        [
            "weighin report results/20261120T093000-gpt2-xl-8GiB",
            "weighin report results/20261120T093000-gpt2-xl-8GiB --format html,svg",
            "weighin report results/RUN --format bmf,gha,openmetrics,parquet",
        ],
    ),
    ("history",): (
        "Follow a metric over all runs in a folder, and mark where it changed: commit, torch, machine.",
        [
            "weighin history results",
            "weighin history results --metric ready_anon --series streaming --out ready.svg",
        ],
    ),
    ("list",): ("Say what there is: strategies, models, and ways to isolate.", []),
    ("doctor",): (
        "Say what this machine can limit and measure; limits and kills a probe to prove it.",
        [],
    ),
    ("cache", "list"): (
        "Show the checkpoints that were made here, and how much disk they take.",
        [],
    ),
    ("cache", "clear"): (
        "Delete checkpoints that were made here; your own files are never touched.",
        ["weighin cache clear gpt2-xl"],
    ),
}


def shown(*arguments: str) -> tuple[int, str]:
    """The exit code and what a terminal of 80 columns without colours shows."""
    result = CliRunner().invoke(app.app, arguments, env={"COLUMNS": "80", "NO_COLOR": "1"})
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_the_help_of_each_verb_says_what_it_does(verb: tuple[str, ...]) -> None:
    code, text = shown(*verb, "--help")
    summary, _ = VERBS[verb]
    assert code == 0
    assert summary in " ".join(text.split())
    assert f"Usage: root {' '.join(verb)}" in text


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_each_example_is_one_line_to_paste(verb: tuple[str, ...]) -> None:
    _, text = shown(*verb, "--help")
    found = [line.strip() for line in text.splitlines() if line.startswith(" weighin ")]
    assert found == VERBS[verb][1]


def test_every_verb_is_known_here() -> None:
    verbs = {(name,) for name in typer.main.get_command(app.app).commands if name != "cache"}
    assert verbs | {("cache", "list"), ("cache", "clear")} == set(VERBS)


def test_the_version() -> None:
    assert shown("--version") == (0, f"weighin {__version__}\n")


def test_a_verb_that_does_not_exist() -> None:
    code, text = shown("bnech")
    assert code == 2
    assert "No such command 'bnech'. Did you mean 'bench'?" in text


def test_weighin_alone_shows_the_verbs() -> None:
    _, text = shown()
    assert all(f" {verb[0]} " in text for verb in VERBS)
