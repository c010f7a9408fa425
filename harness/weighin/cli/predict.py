"""``weighin predict``: predict the memory that loads will need."""

from typing import Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import verb


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

    With --use, the predicted RAM floor (the smallest sufficient RAM limit) also suffices for the
    use of the model after the load.
    """
    from weighin.cell import FORK, FORWARD
    from weighin.errors import ConfigError
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
            "weighin predict takes one model with its own checkpoint, but the suite has"
            f" {len(chosen.checkpoints)}",
            "predict each model in a separate command: weighin predict FOLDER",
        )
    use_paths = registry.chosen_uses(settings.uses)
    if [*use_paths] == [FORK]:
        raise ConfigError(*client.FORK_ALONE)
    is_asked = _options.is_typed(context, "uses") or "uses" in _options.assigned(context)
    planned = loads.cells_of(
        settings,
        chosen.specs,
        registry.chosen(settings, chosen.own_format),
        "process",
        dtypes=chosen.dtypes,
        own_formats=chosen.own_formats,
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
        _console.error("no load was predicted; the result gives the reason for each strategy")
        context.exit(2)
