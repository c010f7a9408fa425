"""``weighin recommend``: recommend a strategy for a model and an amount of memory."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _arguments, _console, _options
from weighin.cli._verb import Verb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from weighin.recommend.answer import Advice, PipelineAdvice, Question

EXAMPLES = {
    "Recommend a strategy for a machine with 8 GiB of RAM": "weighin recommend gpt2-xl --ram 8g",
    "Recommend a strategy for your own checkpoint and a GPU with 24 GiB": "weighin recommend model.safetensors --ram 32g --vram 24g --device cuda",
    "Recommend only a strategy that needs no other checkpoint and no package, and print JSON": "weighin recommend gpt2-large --ram 4g --allow none --json -",
    "Recommend a strategy for eight processes that load in parallel": "weighin recommend gpt2-xl --ranks 8 --ram 64g",
    "Recommend a strategy for a slow disk": "weighin recommend gpt2-xl --disk 100MB/s --disk-latency 5ms",
    "Recommend a strategy for a model that is trained after the load": "weighin recommend gpt2-xl --ram 32g --use adamw",
}

NOTHING_FITS_EXIT = 1


@click.command(cls=Verb, examples=EXAMPLES, codes=True)
@_options.model
@_options.folder_choice
@_options.adapter
@_options.only_structure
@_options.selection
@click.option(
    "--ram",
    default="none",
    metavar="SIZE",
    help="The RAM into which the load must fit, such as 8g, 8Gi or 6500m. none: the RAM is not"
    " limited.",
)
@click.option(
    "--vram",
    default="none",
    metavar="SIZE",
    help="The GPU memory into which the model must fit, such as 24g. The memory of the CUDA context"
    " does not count. none: the GPU memory is not limited.",
)
@_options.device
@_options.dtype
@click.option(
    "--ranks",
    default="1",
    metavar="N",
    help="Number of processes that load the model in parallel, under one common RAM limit.",
)
@click.option(
    "--disk",
    default="none",
    metavar="RATE",
    help="Assume that the checkpoint lies on a disk of this rate, such as 100MB/s. none: the disk"
    " of this machine. --disk only changes predictions.",
)
@click.option(
    "--disk-latency",
    default="none",
    metavar="TIME",
    help="Assume that the checkpoint's disk answers each request after this time, such as 5ms."
    " none: the disk of this machine.",
)
@click.option(
    "--use",
    default="none",
    metavar="NAME",
    help="The use of the model after the load, whose memory must fit, too: a name that `weighin"
    " list uses` lists, such as adamw for training, or a file of your own (./mine.py) with a"
    " function use(model). none: only the load must fit.",
)
@click.option(
    "--allow",
    default="resave,packages,weighin",
    metavar="NAMES",
    help="What the recommended strategy may require, comma-separated: resave (you convert the"
    " checkpoint to another format first), packages (you install other Python packages), weighin"
    " (you install the package weighin). none: none of the three.",
)
@click.option(
    "--results",
    type=_options.PATH,
    default=Path("results"),
    metavar="FOLDER",
    help="The folder with runs that this machine measured. weighin predicts only loads that these"
    " runs did not measure.",
)
@click.option("--all", "every", is_flag=True, help="Show all strategies, not only the best five.")
@_options.json
@click.pass_context
def recommend(context: click.Context, /, **_: Any) -> None:
    """Recommend the fastest strategy that fits into the given memory, and show its code.

    The memory and times of a strategy come from the records of this machine (--results); without
    such a record, weighin predicts them.

    For a folder of a diffusers pipeline, weighin gives two recommendations for each part of the
    pipeline: one if all parts stay in memory together, and one if the parts are loaded one after
    the other.
    """
    from weighin.cli._progress import steps
    from weighin.recommend import answer

    typed = _arguments.read(context)
    advice: Advice | PipelineAdvice
    if path := _arguments.pipeline(typed):
        advice, parts = _pipeline(context, path, typed)
    else:
        question = _question(typed)
        with steps(_console.err()) as say:
            advice = answer.advise(question, answer.gather(question, say))
        parts = answer.parts(advice, None if typed["every"] else answer.SHOWN)
    show = partial(_console.show, *parts, folds=False)
    _console.deliver(typed["json_file"], advice.as_json(), show)
    if not advice.best:
        context.exit(NOTHING_FITS_EXIT)


def _pipeline(
    context: click.Context, path: Path, typed: dict[str, Any]
) -> "tuple[PipelineAdvice, Iterator[RenderableType]]":
    """Recommend a strategy for each part of a pipeline; return the advice, and what to print."""
    from weighin.cli._progress import steps
    from weighin.formats import pipeline
    from weighin.recommend import answer

    _arguments.refuse(
        context, ("use",), "--use needs one model, not a pipeline", "give the folder of one part"
    )
    questions = {
        part.name: _question(typed | {"model": str(part.path), "model_option": None})
        for part in pipeline.read(path).models
    }
    with steps(_console.err()) as say:
        advice = answer.advise_pipeline(path.resolve().name, questions, say)
    return advice, answer.pipeline_parts(advice)


def _question(typed: dict[str, Any]) -> "Question":
    from weighin.cell import NONE
    from weighin.recommend import answer
    from weighin.recommend.candidates import Limits
    from weighin.settings.definition import check_suite
    from weighin.slow_disk import Pace
    from weighin.suite import chosen_models, uses

    name = _arguments.noted_model(typed)
    keys = ("ram", "vram", "device", "dtype", "ranks", "disk", "disk_latency")
    limits = {key: typed[key] for key in keys}
    settings = check_suite({"models": name, "uses": [typed["use"]]} | limits)
    ((use, use_path),) = uses.chosen(settings.uses).items()
    chosen = chosen_models.choose(settings.model_copy(update=_arguments.beside(typed)))
    _console.note(*chosen.notes)
    return answer.Question(
        model=chosen.specs[0],
        limits=Limits(settings.ram[0], settings.vram[0]),
        checkpoint=chosen.checkpoint,
        selection=chosen.selection,
        device=settings.device,
        ranks=settings.ranks[0],
        disk=Pace(settings.disk[0], settings.disk_latency[0]),
        dtype=chosen.dtype,
        allow=answer.check_allowed(_arguments.names([typed["allow"]])),
        results=typed["results"],
        python_path=chosen.python_path,
        use="" if use == NONE else use,
        use_path=use_path,
    )
