"""``weighin recommend`` and ``predict``: recommend a strategy for an amount of memory, and predict what loads need."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import LIMITS, parameters, verb
from weighin.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from weighin.recommend.answer import Question
    from weighin.settings.definition import Settings


@verb(
    _options.MODEL,
    *_options.settings("recommend", uses="none"),
    *parameters(
        {"--allow NAMES": "What the recommended code may need: resave (you convert the checkpoint first), packages (other than torch), weighin (the code imports it), or none."},
        LIMITS,
        allow="resave,packages,weighin",
    ),
    *parameters(
        {
            "--results FOLDER": "A folder of runs. What they measured on this machine replaces predictions of the same load.",
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
)  # fmt: skip
def recommend(context: click.Context, typed: dict[str, Any]) -> None:
    """Recommend the fastest strategy that fits into the given memory, and show its code."""
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
            why = f"weighin recommend takes one value of {key}"
            raise ConfigError(why, "run it once for each value")
    ((use, use_path),) = registry.chosen_uses(settings.uses).items()
    chosen = chosen_models.choose(settings)
    _console.note(*chosen.notes)
    allow = _options.names(context.params["allow"])
    for word in allow if allow != ["none"] else ():
        if word not in answer.ALLOWED:
            raise UnknownName("requirement", word, [*answer.ALLOWED, "none"])
    return answer.Question(
        model=chosen.specs[0],
        limits=Limits(settings.ram[0], settings.vram[0]),
        checkpoint=chosen.checkpoint,
        selection=chosen.selection,
        device=settings.device,
        ranks=settings.ranks[0],
        disk=Pace(settings.disk[0], settings.disk_latency[0]),
        dtype=chosen.dtypes[chosen.specs[0].title],
        allow=tuple(one for one in allow if one != "none"),
        results=context.params["results"],
        python_path=chosen.python_path,
        use="" if use == NONE else use,
        use_path=use_path,
    )


@verb(
    _options.MODEL,
    *_options.settings("predict", uses="none"),
    _options.SUITE,
    _options.JSON,
    examples={
        "Predict the memory of each of six ways of loading": "weighin predict gpt2-xl",
        "Predict a load onto a GPU that this machine need not have": "weighin predict llama-70b --device cuda --dtype bf16 -s streaming",
        "Predict each measurement of a suite, and print JSON": "weighin predict --suite notebook --json -",
    },
)
def predict(context: click.Context, typed: dict[str, Any]) -> None:
    """Predict the memory of loading a model, without a GPU, without weights and with little memory.

    With --use, the predicted RAM floor (the smallest RAM limit that suffices) includes the use of
    the model after the load.
    """
    from weighin.cell import FORK, FORWARD
    from weighin.plan import loads
    from weighin.predict import client, tables
    from weighin.stream import quantised
    from weighin.suite import chosen_models, registry

    settings = _options.read(context, {"uses": ["none"]})
    chosen = chosen_models.choose(settings)
    _console.note(*chosen.notes)
    for spec in chosen.specs:
        found = quantised.of_model(spec)
        if found and chosen.checkpoint and not found.dequantises:
            raise found.error(chosen.checkpoint)
    if chosen.checkpoints:
        raise ConfigError(
            "weighin predict takes a checkpoint for one model alone, but the suite has"
            f" {len(chosen.specs)} models",
            "predict each of them in a command of its own: weighin predict FOLDER",
        )
    use_paths = registry.chosen_uses(settings.uses)
    if [*use_paths] == [FORK]:
        raise ConfigError(*client.FORK_ALONE)
    is_asked = _options.is_typed(context, "uses") or "uses" in _options.assigned(context)
    strategies, own = registry.chosen(settings, chosen.own_format), chosen.own_formats
    planned = loads.cells_of(
        settings, chosen.specs, strategies, "process", dtypes=chosen.dtypes, own_formats=own
    )
    with _console.working("importing torch") as show:
        predictions = client.predict(
            planned,
            checkpoint=chosen.checkpoint,
            selection=chosen.selection,
            python_path=chosen.python_path,
            forward=FORWARD in use_paths and (is_asked or not typed["suite"]),
            use_paths=use_paths,
            report=lambda done, strategy: show(f"{strategy}: {done} of {len(planned)} done"),
        )
    _console.deliver(typed["json"], tables.as_json(predictions), *tables.tables(predictions))
    if all(prediction.cannot for prediction in predictions):
        _console.error("no load could be predicted; the result says why, for each strategy")
        context.exit(2)
