"""``weighin inspect``: list the tensors of a checkpoint."""

from dataclasses import replace
from typing import Any

import click

from weighin.cli import _arguments, _console, _options
from weighin.cli._verb import Verb

EXAMPLES = {
    "Show the tensors of a checkpoint and their sizes": "weighin inspect model.pt",
    "Show all tensors of a folder, the largest first": "weighin inspect shards --sort size --all",
    "Show the entry 'model' of a training checkpoint": "weighin inspect training.pt --key model",
    "Print JSON": "weighin inspect model.safetensors --json -",
    "Show the checkpoint that weighin would generate for a built-in model": "weighin inspect gpt2-xl",
}


@click.command(cls=Verb, examples=EXAMPLES)
@_options.model
@click.option(
    "--sort",
    default="file",
    metavar="ORDER",
    help="Order in which the tensors are listed: file (as in the file), name or size.",
)
@click.option(
    "--all",
    "show_all",
    is_flag=True,
    help="Show every tensor of the checkpoint, also if the list is long.",
)
@_options.folder_choice
@_options.selection
@_options.json
@click.pass_context
def inspect(context: click.Context, /, **_: Any) -> None:
    """List the tensors of a checkpoint, and estimate the memory of loading it.

    If MODEL is a path, `weighin inspect` reads no tensor data, executes no code from the
    checkpoint, and does not import torch. For a built-in model or a builder, `weighin inspect`
    lists the tensors of the checkpoint that `weighin bench` would generate. The model is built on
    the meta device, without memory for weights. For a folder of a diffusers pipeline, `weighin
    inspect` lists the parts of the pipeline, and the size of each part.
    """
    from rich.markup import escape

    from weighin.checkpoint import inspect as inspecting
    from weighin.stream.foreign import remembering

    typed = _arguments.read(context)
    if path := _arguments.pipeline(typed):
        ignored = ("show_all", "key", "strip_prefix")
        reason = "for a pipeline, weighin inspect lists parts, not tensors"
        _arguments.refuse(
            context, ignored, reason, "leave these options out, or give the folder of one part"
        )
        document = inspecting.inspect_pipeline(path)
        parts = inspecting.pipeline_tables(document, sort=typed["sort"])
    else:
        with remembering():  # the notes are of the headers that inspect reads
            document = _inspected(typed)
        parts = inspecting.tables(document, sort=typed["sort"], show_all=typed["show_all"])
    shown = [escape(part) if isinstance(part, str) else part for part in parts]
    _console.deliver(typed["json_file"], document, lambda: _console.show(*shown, folds=False))


def _inspected(typed: dict[str, Any]) -> dict[str, Any]:
    from weighin.checkpoint.inspect import inspect
    from weighin.suite import registry

    name = _arguments.noted_model(typed)
    kwargs = _arguments.json_object(typed["kwargs"])
    choice = _arguments.choice(typed)
    if path := registry.path_of(name, kwargs, choice.revision):
        weights = (
            registry.weights_of(path, replace(choice, revision="")) if choice.variant else path
        )
        inspected = inspect(weights, _arguments.selection(typed))
        if not _arguments.selection(typed):
            _console.note(*registry.notes_on(weights, choice))
        return inspected
    from weighin.predict import client
    from weighin.settings.definition import check_suite
    from weighin.suite.chosen_models import choose

    chosen = choose(check_suite({"models": name}).model_copy(update=_arguments.beside(typed)))
    with (
        _console.working("building the model without values"),
        client.generated(chosen.specs[0], chosen.python_path) as path,
    ):
        return inspect(path) | {"path": chosen.specs[0].title}
