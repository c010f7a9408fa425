"""Options of the command line that several verbs share, with their help texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

PATH = click.Path(path_type=Path)

Kind = Literal["models", "strategies", "suites"]


def completed(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return click's function that completes the last name of a comma-separated list in a shell."""

    def complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        from weighin.suite import registry

        if kind == "strategies":
            known = [*registry.strategies(context.params.get("operation") or "load"), "all"]
        else:
            known = list(registry.models() if kind == "models" else registry.suites())
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in known if name.startswith(last)]

    return complete


def several(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a decorator that adds ``options`` to a command; the help lists them in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


MODEL_HELP = (
    "A model of `weighin list models`, or your own model. Your own model is the path of a Hugging Face"
    " folder or of a checkpoint (weights.pt, model.safetensors, an index of shards, a folder), a"
    " builder, or from:CHECKPOINT (see --model). ./NAME is always a path. Default: gpt2-small."
)

model_option = click.option(
    "--model",
    "model_option",
    metavar="NAME",
    shell_complete=completed("models"),
    help="The model, instead of the argument MODEL. A builder is package.module:callable or"
    " path/nets.py:callable (weighin also looks for modules in the current folder and on PYTHONPATH)."
    " from:CHECKPOINT is a model that has the checkpoint's tensors and needs no code. The path of a"
    " checkpoint that is not a Hugging Face folder means from:PATH.",
)
kwargs = click.option(
    "--kwargs",
    metavar="JSON",
    default="{}",
    help="Arguments of the model's builder, as a JSON object.",
)


def checkpoint(help: str) -> Callable[[Any], Any]:  # noqa: A002 (click's word)
    return click.option("--checkpoint", type=PATH, metavar="PATH", help=help)


selection = several(
    click.option(
        "--key",
        default="",
        metavar="KEY",
        help="The key of the state dict in a checkpoint that holds other objects too, such as"
        " --key model, or --key state.model for a dict in a dict. Default: the checkpoint itself is"
        " the state dict.",
    ),
    click.option(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="The prefix to remove from the tensor names in the checkpoint, such as"
        " --strip-prefix module. or --strip-prefix _orig_mod.",
    ),
)
model = several(
    click.argument(
        "model",
        required=False,
        shell_complete=completed("models"),
        help=MODEL_HELP,
    ),
    model_option,
    kwargs,
)
generated = checkpoint(
    "The file or folder with your own weights. Default: weighin generates random weights from --seed."
)
only_structure = checkpoint(
    "The file or folder with your own weights, of which only names, shapes and dtypes are read."
)
strategies = click.option(
    "--strategies",
    "--strategy",
    "-s",
    "strategies",
    multiple=True,
    metavar="NAMES",
    shell_complete=completed("strategies"),
    help="Comma-separated strategy names or files, or `all`. Default for loads: baseline,"
    " sequential, meta_copy, mmap_assign, per_param, streaming; for saves: all.",
)
isolation = click.option(
    "--isolation",
    default="auto",
    metavar="NAME",
    help="The isolation of the measured processes: docker, cgroup or process. auto takes the first of"
    " these three that works on this machine and can enforce the limits. Only docker and cgroup can"
    " enforce a RAM limit.",
)
device = click.option(
    "--device",
    default="cpu",
    metavar="DEVICE",
    help="Device of the loaded model: cpu, cuda or cuda:1.",
)
dtype = click.option(
    "--dtype",
    default="auto",
    metavar="DTYPE",
    help="Dtype of the model's floating-point tensors after the load: float32, bf16, fp16 or auto."
    " auto is the dtype in config.json for a Hugging Face folder or a built-in model of transformers,"
    " and float32 for any other model.",
)
formats = click.option(
    "--format",
    "fmt",
    metavar="NAMES",
    help="Checkpoint formats, comma-separated. Default: the first format that each strategy"
    " declares.",
)
seed = click.option("--seed", default=0, metavar="N", help="Seed of the generated weights.")
environment = click.option(
    "--env",
    "env",
    multiple=True,
    metavar="NAME=VALUE",
    help="An environment variable of the measured process, such as MALLOC_ARENA_MAX=2. Repeatable.",
)
suite = click.option(
    "--suite",
    metavar="NAME",
    shell_complete=completed("suites"),
    help="The suite that sets models, strategies and limits in place of the options above: a name in"
    " `weighin list suites`, or the path of a YAML file.",
)
ranks = click.option(
    "--ranks",
    default="1",
    metavar="NUMBERS",
    help="Numbers of processes that load the model at once under one limit, comma-separated: 1,4. Each"
    " process gets the environment variables of torchrun, and all processes form one"
    " torch.distributed process group.",
)
trust = click.option(
    "--trust",
    is_flag=True,
    help="Run the builders and strategies that the files of the run name, even if the code of a"
    " builder or strategy belongs neither to weighin nor to an installed package.",
)
folder_choice = several(
    click.option(
        "--variant",
        default="",
        metavar="NAME",
        help="The variant of a Hugging Face folder's weights: fp16 for model.fp16.safetensors."
        " Default: the weights without a variant in the file name.",
    ),
    click.option(
        "--revision",
        default="",
        metavar="NAME",
        help="The branch, tag or commit of a model in the cache of the Hugging Face Hub. Default:"
        " main.",
    ),
    click.option(
        "--class",
        "model_class",
        default="",
        metavar="CLASS",
        help="The class of transformers with which to load a Hugging Face folder, for example"
        " BertModel or AutoModelForCausalLM. Default: the class in config.json; if config.json names"
        " no class, the class that AutoModel takes.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run the model's code that comes with a Hugging Face folder (auto_map in config.json)."
        " The code runs with your rights, so read the code before you use this option. Without"
        " this option, weighin uses the class of transformers for the model type, and refuses the"
        " folder if transformers has no such class.",
    ),
)
adapter = click.option(
    "--adapter",
    default="",
    metavar="FOLDER",
    help="A folder with a LoRA adapter that peft saved. weighin merges the adapter into the weights of"
    " the Hugging Face folder or GGUF file.",
)
base_image = click.option(
    "--base-image",
    envvar="WEIGHIN_BASE_IMAGE",
    metavar="IMAGE",
    show_envvar=True,
    help="The base image of the Docker image that weighin builds for --isolation docker.",
)
mounts = click.option(
    "--mount",
    "mounts",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="Mount this file or folder in Docker containers, read-only and at the same path, because the"
    " model or the command reads it. Repeatable.",
)
wait = click.option(
    "--wait",
    is_flag=True,
    help="If another run is measuring on this machine, wait for its end instead of exiting with"
    " code 4.",
)
resume = click.option(
    "--resume",
    type=PATH,
    metavar="FOLDER",
    help="Continue the stopped run in this folder at its first cell without a record.",
)
shard = click.option(
    "--shard",
    metavar="I/N",
    help="Measure only every N-th cell of the plan, beginning with cell I, from 1. `weighin merge`"
    " joins the runs of all shards.",
)
markdown = click.option(
    "--markdown",
    type=PATH,
    metavar="FILE",
    help="Write the result as Markdown to this file.",
)
json = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write the result as JSON to this file. With -, write JSON instead of tables to standard"
    " output.",
)

command = click.argument(
    "command",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="-- COMMAND ...",
    help="The command with its arguments. For a line of shell code: -- sh -c 'LINE'.",
)
image = click.option(
    "--image",
    default="",
    metavar="IMAGE",
    help="Run the command in a container of this image, as docker run does: after the image's"
    " entrypoint, and with the Docker engine's network. The container sees the current folder at the"
    " same path as here, and runs as this user. Of this environment, the container gets only TERM; --env"
    " sets further variables. Default with --isolation docker: weighin's own image, which has torch.",
)
cold = click.option(
    "--cold",
    multiple=True,
    metavar="PATH",
    help="A file or folder to drop from the page cache before each start. Without this option, the"
    " kernel does not charge pages to the command that another program has read. Repeatable.",
)
label = click.option(
    "--name", "label", default="", metavar="LABEL", help="The command's name in tables."
)
server = several(
    click.option(
        "--ready",
        default="",
        metavar="REGEX",
        help="Measure the command as a server: weighin stops the server when a line of the output"
        " contains this regular expression. All figures end at that line.",
    ),
    click.option(
        "--ready-url",
        default="",
        metavar="URL",
        help="Measure the command as a server: weighin stops the server when this address answers"
        " a GET request with a status below 500. All figures end at that answer.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="Seconds between SIGTERM and SIGKILL, which weighin sends to a server that is ready and to"
        " a process that still runs after the command's end.",
    ),
)

engine = several(
    click.option(
        "--engine",
        default="local",
        metavar="NAME",
        help="Where to measure: local means one cell after the other on this machine. ray means a Ray"
        " cluster, with one cell at a time on each node that has the Ray resource weighin_slot.",
    ),
    click.option(
        "--address",
        metavar="ADDRESS",
        help="The Ray cluster for --engine ray: HOST:PORT, or auto, which is the cluster of this"
        " machine. Default: auto.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        metavar="KEY=VALUE",
        help="With --engine ray, use only nodes with this label, such as"
        " ray.io/accelerator-type=H100. Repeatable.",
    ),
)


def out(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--out",
        "folder",
        type=PATH,
        metavar="FOLDER",
        help="The folder to write the run's records and report into, which must not contain a run"
        f" yet. Default: results/{default}.",
    )


def use(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--use",
        default=default,
        metavar="NAMES",
        help="Uses of the model after the load, comma-separated: names of `weighin list uses`, files"
        " of your own (./mine.py) with a function use(model), or none. Each use gets cells of its"
        " own.",
    )


def timeout(seconds: float) -> Callable[[Any], Any]:
    return click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help="Seconds after which weighin kills a cell that has not ended.",
    )
