"""``weighin inspect``, ``convert`` and ``cache``: look into, write, list and delete checkpoints."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _console, _options
from weighin.cli._verb import WHAT, WRITE, Option, Verbs, parameters, verb
from weighin.errors import ConfigError, UnknownName
from weighin.units import format_bytes

if TYPE_CHECKING:
    from weighin.show.table import Table


@verb(
    *parameters(
        {
            "[MODEL]": "The checkpoint: a file, a folder, or the Hub id of a downloaded folder.",
            "--all": "Show every tensor of a long list.",
        }
    ),
    *_options.settings("inspect"),
    _options.JSON,
    examples={
        "Show the tensors of a checkpoint and their sizes": "weighin inspect model.pt",
        "Show all tensors of a folder": "weighin inspect shards --all",
        "Show the entry 'model' of a training checkpoint": "weighin inspect training.pt --key model",
    },
)
def inspect(context: click.Context, typed: dict[str, Any]) -> None:
    """List the tensors of a checkpoint, and estimate the memory of loading it.

    No tensor data is read and no code is run, and torch is not imported.
    """
    from weighin.checkpoint import inspect as inspecting
    from weighin.stream.foreign import remembering
    from weighin.suite import registry

    settings = _options.read(context)
    name, choice, selection = settings.models[0].source, settings.choice, settings.selection
    with remembering():  # the notes are of the headers that inspect reads
        path = registry.path_of(name, settings.kwargs, choice.revision)
        if path is None:
            typed_one = _options.one_model(context)
            why = f"{name} is a model without one" if typed_one else "none was given"
            raise ConfigError(
                f"weighin inspect needs a checkpoint, but {why}",
                f"give a file or a folder; or, to predict the memory of the model: weighin predict {name}",
            )
        if choice.variant:
            path = registry.weights_of(path, replace(choice, revision=""))
        document = inspecting.inspect(path, selection)
        if not selection:
            _console.note(*registry.notes_on(path, choice))
    parts = inspecting.tables(document, show_all=typed["all"])
    _console.deliver(typed["json"], document, *parts, folds=False)


@verb(
    *parameters(
        {
            "SOURCE": "The checkpoint to convert, in any format that weighin reads. It stays as it is.",
            "TARGET": "The file or folder to write, which must not exist yet.",
            "--format NAME": "The format to write: pt, safetensors, sharded, per_module, per_param, dcp ... or auto, by the name of TARGET: safetensors for .safetensors, pt for .pt, .pth, .bin and .ckpt, else shards.",
            "--dtype DTYPE": "Convert floating-point tensors to bf16, fp16 or fp32. Default: none is converted.",
            "--max-shard-size SIZE": "The size of a shard, such as 20MB (1000-based) or 2GiB. A larger tensor has its own shard.",
            "--verify": "Read the written checkpoint back, and compare every tensor's checksum.",
        },
        WRITE,
        format="auto",
        max_shard_size="5GiB",
    ),
    Option(
        ["--keys"],
        WHAT,
        "Which names the tensors get. file: those in SOURCE. model: those of the loaded model; from_pretrained may rename, join and stack tensors, and needs memory for the whole model.",
        type=click.Choice(["file", "model"]),
        default="file",
    ),
    *_options.settings("convert"),
    _options.JSON,
    examples={
        "Write the tensors as bfloat16, and read the new file back to verify it": "weighin convert model.pt model-bf16.safetensors --dtype bf16 --verify",
        "Rename the tensors of a Hugging Face folder as from_pretrained does": "weighin convert ./folder model.safetensors --keys model",
        "Add the weights of a LoRA adapter": "weighin convert ./folder merged.safetensors --adapter ./adapter",
    },
)
def convert(context: click.Context, typed: dict[str, Any]) -> None:
    """Write a checkpoint in another format or dtype, in pieces of 16 MiB to save memory.

    A tensor that dcp stores in several parts is held whole. With --keys model or --adapter, the whole
    model is loaded first.
    """
    from weighin.checkpoint.convert import Conversion, sentence
    from weighin.run import interrupts
    from weighin.settings.definition import DTYPES
    from weighin.stream.hugging_face_folder import path_of
    from weighin.suite.registry import notes_on, weights_of
    from weighin.units import parse_bytes

    settings = _options.read(context)
    source, choice, selection = typed["source"], settings.choice, settings.selection
    # The tensor names in an adapter are those of the model's modules, not those in SOURCE.
    model_keys = bool(choice.adapter) or typed["keys"] == "model"
    if choice.model_class and not model_keys:
        raise ConfigError(
            "model_class applies only to --keys model; --keys file keeps the source's tensor names",
            "add --keys model, or leave model_class out",
        )
    if (dtype := typed["dtype"]) and dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    conversion = Conversion(
        source=weights_of(source, choice) if choice.variant else path_of(source, choice.revision),
        target=typed["target"],
        fmt=typed["format"],
        dtype=DTYPES[dtype] if dtype else "",
        max_shard_bytes=parse_bytes(typed["max_shard_size"], decimal=True),
        verify=typed["verify"],
        selection=selection,
        model_keys=model_keys,
        choice=choice,
    )
    if not selection:
        _console.note(*notes_on(conversion.source, choice))
    with _console.working("importing torch") as show:
        done = conversion.run(
            lambda text, share: show(f"{text}: {share or 0:.0%}"), interrupts.ignore
        )
    _console.deliver(typed["json"], done, sentence(done), folds=False)


@verb(
    _options.JSON,
    name="list",
    examples={"List what the cache has": "weighin cache list"},
)
def cache_list(_: click.Context, typed: dict[str, Any]) -> None:
    """List generated checkpoints and the environments of --with, with their sizes on the disk."""
    from weighin.checkpoint import cache, temporary_folders

    folder, stored = temporary_folders.folder(), cache.list_entries()
    document = {"folder": str(folder), "checkpoints": stored}
    parts = f"checkpoints in {folder}", _table(stored)
    _console.deliver(typed["json"], document, *parts, folds=False)


@verb(
    *parameters({
        "[MODEL]": "The model, or the release such as transformers==5.2.0, to delete. Default: everything in the cache.",
        "--yes, -y": "Delete without asking.",
    }),
    _options.JSON,
    name="clear",
    codes=True,
    examples={
        "Delete the generated checkpoints of one model": "weighin cache clear gpt2-xl",
        "Delete everything without a question": "weighin cache clear --yes",
    },
)  # fmt: skip
def cache_clear(context: click.Context, typed: dict[str, Any]) -> None:
    """Delete generated checkpoints and the environments of --with, after a question; never your own files."""
    from weighin.checkpoint import cache, temporary_folders

    model = typed["model"]
    chosen = cache.list_entries(model)
    size = format_bytes(sum(one["bytes"] for one in chosen))
    counted = f"{len(chosen)} {'entry' if len(chosen) == 1 else 'entries'}"
    if chosen and not typed["yes"]:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{counted} ({size}) would be deleted, but without a terminal weighin cannot ask"
                " you first",
                "to delete them without a question, add --yes",
            )
        _console.tell(f"checkpoints in {temporary_folders.folder()}")
        _console.console().print(_table(chosen))
        if not click.confirm(f"Delete {counted} ({size})?", err=True):
            _console.note("nothing was deleted")
            context.exit(1)
    removed = cache.clear(model) if chosen else []
    freed = sum(one["bytes"] for one in removed)
    text = f"deleted {counted}, freed {format_bytes(freed)}"
    _console.deliver(typed["json"], {"freed_bytes": freed, "deleted": removed}, text)


cache = Verbs(
    "cache",
    help="List or delete what weighin cached: generated checkpoints, and environments of --with.",
    panels={"Commands": ("list", "clear")},
    load={"list": cache_list, "clear": cache_clear}.__getitem__,
    no_args_is_help=True,
)


def _table(stored: Sequence[dict[str, Any]]) -> "Table":
    from weighin.show.table import Table

    rows = []
    for one in stored:
        used = datetime.fromisoformat(one["last_used"]).astimezone().strftime("%Y-%m-%d %H:%M")
        rows.append([one["name"], one["format"], used, format_bytes(one["bytes"])])
    return Table.of(("model", "format", "last used", "size"), rows, names=3)
