"""Options of the command line that several verbs share, with their words."""

from pathlib import Path
from typing import Annotated

import typer

ModelArgument = Annotated[
    str | None, typer.Argument(help="A model of `weighin list models`. Default: gpt2-small.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", help="The same, or any model as package.module:callable."),
]
Kwargs = Annotated[str, typer.Option(help="The model's arguments, as a JSON object.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Your own weights. Default: seeded ones, made on demand.")
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategies",
        "--strategy",
        "-s",
        help="Names, or files of your own (./mine.py), divided by commas; all. Default: six; of a save, all.",
    ),
]
Isolation = Annotated[str, typer.Option(help="docker, cgroup, process or auto.")]
Device = Annotated[str, typer.Option(help="Where the model ends: cpu, cuda, cuda:1.")]
Dtype = Annotated[
    str, typer.Option(help="What floating-point weights end as: float32, bf16, fp16.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="Layouts to load or to write, divided by commas. Default: each strategy's first.",
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds after which a cell is ended.")]
Seed = Annotated[int, typer.Option(help="Of the weights that are made.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Run what the run's files name, also builders and strategies that are not weighin's.",
    ),
]
BaseImage = Annotated[
    str | None,
    typer.Option(envvar="WEIGHIN_BASE_IMAGE", help="The image that the Docker image is built on."),
]
