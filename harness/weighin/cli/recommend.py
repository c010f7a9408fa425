"""``weighin recommend``: recommend a strategy for a model and an amount of memory."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import LIMITS, parameters, verb
from weighin.errors import ConfigError

if TYPE_CHECKING:
    from weighin.recommend.answer import Question
    from weighin.settings.definition import Settings


@verb(
    _options.MODEL,
    *_options.settings("recommend", uses="none"),
    *parameters(
        {
            "--allow NAMES": "What the answer may need: resave (you convert the checkpoint first), packages (you install some), weighin (you install it), or none."
        },
        LIMITS,
        allow="resave,packages,weighin",
    ),
    *parameters(
        {
            "--results FOLDER": "The runs of this machine: what they measured is not predicted.",
            "--all": "Show all strategies, not only the best five.",
        },
        results=Path("results"),
    ),
    _options.JSON,
    codes=True,
    examples={
        "Recommend a way to load the model on a machine with 8 GiB of RAM": "weighin recommend gpt2-xl --ram 8g",
        "Recommend one for your own checkpoint and a GPU with 24 GiB": "weighin recommend model.safetensors --ram 32g --vram 24g --device cuda",
        "Recommend one for a model that is trained after the load": "weighin recommend gpt2-xl --ram 32g --use adamw",
        "Recommend only what needs no other checkpoint and no package": "weighin recommend gpt2-large --ram 4g --allow none",
    },
)
def recommend(context: click.Context, typed: dict[str, Any]) -> None:
    """Recommend the fastest strategy that fits into the given memory, and show its code.

    The memory and times of a strategy come from the records of this machine (--results); without
    such a record, weighin predicts them.
    """
    from weighin.recommend import answer

    question = question_of(context, _options.read(context, {"uses": ["none"]}))
    with _console.working("starting") as show:
        advice = answer.advise(question, answer.gather(question, show))
    parts = answer.parts(advice, None if typed["all"] else answer.SHOWN)
    _console.deliver(typed["json"], advice.as_json(), *parts, folds=False)
    if not advice.best:
        context.exit(1)


def question_of(context: click.Context, settings: "Settings") -> "Question":
    from weighin.cell import NONE
    from weighin.recommend import answer
    from weighin.recommend.candidates import Limits
    from weighin.slow_disk import Pace
    from weighin.suite import chosen_models, registry

    for key in ("models", "ram", "vram", "disk", "disk_latency", "ranks", "uses"):
        if len(getattr(settings, key)) > 1:
            raise ConfigError(
                f"weighin recommend answers for one value of {key}", "ask for each value in turn"
            )
    ((use, use_path),) = registry.chosen_uses(settings.uses).items()
    chosen = chosen_models.choose(settings)
    _console.note(*chosen.notes)
    return answer.Question(
        model=chosen.specs[0],
        limits=Limits(settings.ram[0], settings.vram[0]),
        checkpoint=chosen.checkpoint,
        selection=chosen.selection,
        device=settings.device,
        ranks=settings.ranks[0],
        disk=Pace(settings.disk[0], settings.disk_latency[0]),
        dtype=chosen.dtypes[chosen.specs[0].title],
        allow=answer.check_allowed(_options.names(context.params["allow"])),
        results=context.params["results"],
        python_path=chosen.python_path,
        use="" if use == NONE else use,
        use_path=use_path,
    )
