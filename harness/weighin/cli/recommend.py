"""The command line's ``weighin recommend``: which way of loading to use, why, and the code to paste."""

import json
from pathlib import Path
from typing import Annotated

import typer

from weighin.cli import _arguments, _options
from weighin.cli._shared import err, out

RECOMMEND_EXAMPLES = (
    "Examples:\n\n"
    "weighin recommend gpt2-xl --ram 8g\n\n"
    "weighin recommend model.safetensors --ram 32g --vram 24g --device cuda\n\n"
    "weighin recommend gpt2-large --ram 4g --allow none --json"
)

NOTHING_FITS_EXIT = 1


def recommend(
    what: Annotated[
        str | None, typer.Argument(help="A model of `weighin list models`, or a checkpoint's path.")
    ] = None,
    model_option: _options.Model = None,
    kwargs: _options.Kwargs = "{}",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Your own weights: only their structure is read.")
    ] = None,
    ram: Annotated[str, typer.Option(help="RAM that there is: 8g, 6500m, none.")] = "none",
    vram: Annotated[str, typer.Option(help="Memory of the GPU, without its context.")] = "none",
    device: _options.Device = "cpu",
    dtype: _options.Dtype = "float32",
    allow: Annotated[
        str, typer.Option(help="What may be asked for: resave, packages, weighin; or none.")
    ] = "resave,packages,weighin",
    results: Annotated[
        Path, typer.Option(help="Where this machine's runs are: their records come first.")
    ] = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="All of it, for programs.")] = False,
) -> None:
    """Say which way of loading fits and is fastest: measured where it was, else predicted."""
    from weighin.recommend import answer
    from weighin.recommend.ranking import Limits
    from weighin.suite import registry
    from weighin.suite.config import check_suite

    name, path = _arguments.one_model(what, model_option), checkpoint
    if what and path is None and Path(what).exists():
        path, spec = Path(what), answer.of_checkpoint(Path(what))
    else:
        spec = registry.model(name, _arguments.json_object(kwargs) or None)
    asked = {"models": spec.name, "ram": ram, "vram": vram, "device": device, "dtype": dtype}
    suite = check_suite(asked)
    question = answer.Question(
        model=spec,
        limits=Limits(suite.ram[0], suite.vram[0]),
        checkpoint=path,
        device=suite.device,
        dtype=suite.dtype,
        allow=answer.check_allowed(_arguments.names([allow])),
        results=results,
        python_path=(str(Path.cwd()),),
    )
    with err.status("predicting") as status:
        advice = answer.advise(question, answer.gather(question, status.update))
    if as_json:
        print(json.dumps(advice.as_json()))
    else:
        for part in answer.parts(advice):
            out.print(part, highlight=False, soft_wrap=isinstance(part, str))
    if advice.best is None:
        raise typer.Exit(NOTHING_FITS_EXIT)
