"""``weighin convert``: write a checkpoint in another format."""

from typing import Any

import click

from weighin.cli import _arguments, _console, _options
from weighin.cli._verb import Verb
from weighin.errors import ConfigError, UnknownName
from weighin.run import interrupts

EXAMPLES = {
    "Write one file for each parameter": "weighin convert model.pt parts --format per_param",
    "Write the tensors as bfloat16, and read the new file back to verify it": "weighin convert model.pt model-bf16.safetensors --dtype bf16 --verify",
    "Take the entry 'model' of a training checkpoint, without 'module.' in its keys": "weighin convert training.pt model.pt --key model --strip-prefix module.",
    "Rename the tensors of a Hugging Face folder as from_pretrained does": "weighin convert ./folder model.safetensors --keys model",
    "Add the weights of a LoRA adapter": "weighin convert ./folder merged.safetensors --adapter ./adapter",
    "Write files of at most 2 GB": "weighin convert model.pt shards --format sharded --max-shard-size 2GB",
}


@click.command(cls=Verb, examples=EXAMPLES)
@click.argument(
    "source",
    type=_options.PATH,
    help="The checkpoint to convert, in any format that weighin reads. weighin does not change"
    " the checkpoint.",
)
@click.argument(
    "target",
    type=_options.PATH,
    help="The file or folder to write, which must not exist yet.",
)
@click.option(
    "--format",
    "fmt",
    default="auto",
    metavar="NAME",
    help="The format to write: pt, safetensors, sharded, per_module, per_param, dcp ... or auto,"
    " which takes the format from the name of TARGET: safetensors for .safetensors, pt for .pt,"
    " .pth, .bin and .ckpt, and a folder with shards for any other name.",
)
@click.option(
    "--dtype",
    metavar="DTYPE",
    help="Convert floating-point tensors to bf16, fp16 or fp32. Without --dtype, each tensor"
    " keeps its dtype.",
)
@click.option(
    "--max-shard-size",
    default="5GiB",
    metavar="SIZE",
    help="Maximum size of a shard, such as 20MB or 2GiB (GB is 1000-based, GiB is 1024-based). A"
    " tensor that is larger than this maximum gets a shard for itself.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Read the written checkpoint back, and compare the checksum of every tensor with the"
    " checksum of the values that were written.",
)
@click.option(
    "--keys",
    type=click.Choice(["file", "model"]),
    default="file",
    help="The names of the written tensors. file: the names in SOURCE. model: the names in the"
    " model's state dict; weighin stacks, joins and renames the tensors of a Hugging Face folder as"
    " from_pretrained does, which takes memory for the whole model.",
)
@_options.folder_choice
@_options.adapter
@_options.selection
@_options.json
def convert(**typed: Any) -> None:
    """Write a checkpoint in another format or dtype, in pieces of 16 MiB to save memory.

    With --keys model or --adapter, the whole model is loaded first.
    """
    from weighin.checkpoint.convert import Conversion, sentence
    from weighin.formats.pretrained_folder import path_of
    from weighin.settings.definition import DTYPES
    from weighin.suite.registry import notes_on, weights_of
    from weighin.units import parse_bytes

    source, selection = typed["source"], _arguments.selection(typed)
    choice = _arguments.choice(typed)
    # The tensor names in an adapter are those of the model's modules, not those in SOURCE.
    keys = "model" if choice.adapter else typed["keys"]
    if choice.model_class and keys == "file":
        raise ConfigError(
            "--class applies only to --keys model; --keys file keeps the source's tensor names",
            "add --keys model, or leave --class out",
        )
    if (dtype := typed["dtype"]) and dtype not in DTYPES:
        raise UnknownName("dtype", dtype, DTYPES)
    conversion = Conversion(
        source=weights_of(source, choice) if choice.variant else path_of(source, choice.revision),
        target=typed["target"],
        fmt=typed["fmt"],
        dtype=DTYPES[dtype] if dtype else "",
        max_shard_bytes=parse_bytes(typed["max_shard_size"], decimal=True),
        verify=typed["verify"],
        selection=selection,
        model_keys=keys == "model",
        choice=choice,
    )
    if not selection:
        _console.note(*notes_on(conversion.source, choice))
    done = conversion.run(_console.err(), interrupts.ignore)
    _console.deliver(typed["json_file"], done, lambda: _console.line(sentence(done)))
