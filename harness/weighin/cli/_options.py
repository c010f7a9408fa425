"""Options of the command line that several verbs share, with their help texts."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import click

from weighin.units import LONGEST_S

PATH = click.Path(path_type=Path)


class _Seconds(click.FloatRange):
    """A time-out, or another time that weighin waits."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not isfinite(seconds):
            self.fail(f"{value} is not a number of seconds", param, ctx)
        return seconds


SECONDS = _Seconds(min=0, max=LONGEST_S)

Kind = Literal["models", "strategies", "suites"]


def completed(kind: Kind) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a function with which click completes the last name of a comma-separated list."""

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
    """Return a decorator that adds ``options`` to a click command. The command's help lists them in
    the given order.
    """

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


MODEL_HELP = (
    "A name that `weighin list models` lists, the path of a Hugging Face folder or of a checkpoint"
    " (weights.pt, model.safetensors, an index of shards, a folder), a builder, or from:CHECKPOINT."
    " The text on --model explains builders and from:CHECKPOINT. ./NAME is always a path. Default:"
    " gpt2-small."
)

model_option = click.option(
    "--model",
    "model_option",
    metavar="NAME",
    shell_complete=completed("models"),
    help="The model, in place of the argument MODEL. A builder is a function that returns the"
    " model, given as package.module:callable or path/nets.py:callable (weighin also looks for"
    " modules in the current folder and on PYTHONPATH). from:CHECKPOINT is a model without code:"
    " weighin makes it from the names and shapes of the checkpoint's tensors. A checkpoint's path"
    " alone means from:PATH, unless the checkpoint lies in a Hugging Face folder.",
)
kwargs = click.option(
    "--kwargs",
    metavar="JSON",
    default="{}",
    help="Arguments with which weighin calls the model's builder, as a JSON object.",
)


def checkpoint(help: str) -> Callable[[Any], Any]:  # noqa: A002 (click's word)
    return click.option("--checkpoint", type=PATH, metavar="PATH", help=help)


selection = several(
    click.option(
        "--key",
        default="",
        metavar="KEY",
        help="The key under which a training checkpoint holds the model's weights (state dict),"
        " beside other objects such as an optimizer. For example, --key model, or --key"
        " state.model for a dict in a dict. Without --key, weighin takes the whole checkpoint as"
        " the model's state dict.",
    ),
    click.option(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help="A prefix that weighin removes from the tensor names in the checkpoint, because the"
        " names in the model lack it. DistributedDataParallel adds the prefix `module.` to names,"
        " and torch.compile adds `_orig_mod.`",
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
    "The file or folder with your own weights. Default: random weights, which weighin generates"
    " from --seed."
)
only_structure = checkpoint(
    "The file or folder with your own weights. weighin reads only the tensors' names, shapes and"
    " dtypes."
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
    " sequential, meta_copy, mmap_assign, per_param and streaming. Default for saves: all"
    " strategies that can save.",
)
isolation = click.option(
    "--isolation",
    default="auto",
    metavar="NAME",
    help="How to isolate each measured process: docker (a container), cgroup (a memory cgroup) or"
    " process (a plain process). auto takes the first of docker, cgroup and process that works on"
    " this machine and can enforce the run's limits. Only docker and cgroup can enforce a RAM"
    " limit.",
)
device = click.option(
    "--device",
    default="cpu",
    metavar="DEVICE",
    help="The device that holds the model after the load: cpu, cuda or cuda:1.",
)
dtype = click.option(
    "--dtype",
    default="auto",
    metavar="DTYPE",
    help="The dtype that the model's floating-point tensors have after the load: float32, bf16,"
    " fp16 or auto. With auto, a Hugging Face folder or a built-in model of transformers gets the"
    " dtype in its config.json, and any other model gets float32.",
)
formats = click.option(
    "--format",
    "fmt",
    metavar="NAMES",
    help="File formats of the checkpoint, comma-separated. Default: the first format in the list"
    " FORMATS of each strategy's file.",
)
seed = click.option(
    "--seed", default=0, metavar="N", help="Seed of the random weights that weighin generates."
)
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
    help="A suite, which is a YAML file that sets models, strategies and limits in place of the"
    " options above: a name that `weighin list suites` lists, or the path of a file.",
)
ranks = click.option(
    "--ranks",
    default="1",
    metavar="NUMBERS",
    help="How many processes load the model in parallel, under one common limit. Give several"
    " numbers, such as 1,4, to get separate results for each number. Each process gets the"
    " environment variables of torchrun, and all processes form one torch.distributed process"
    " group.",
)
trust = click.option(
    "--trust",
    is_flag=True,
    help="Allow weighin to execute the commands, builders and strategies that the files of a resumed"
    " or checked run name, because the files of another person's run could name harmful code."
    " Without --trust, weighin executes only code of weighin itself and of installed packages, and"
    " resumes the runs that you started here yourself.",
)
folder_choice = several(
    click.option(
        "--variant",
        default="",
        metavar="NAME",
        help="The variant of the weights in a Hugging Face folder: --variant fp16 loads"
        " model.fp16.safetensors. Default: the weights without a variant in the file name, such as"
        " model.safetensors.",
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
        " BertModel or AutoModelForCausalLM. Default: the class that config.json names, or else the"
        " class that transformers' AutoModel chooses.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run the model's code that comes with a Hugging Face folder (auto_map in config.json)."
        " The code runs with your rights, so read it first. Without --trust-remote-code, weighin"
        " loads the folder with transformers' own class for the model type, and refuses the folder"
        " if there is none.",
    ),
)
adapter = click.option(
    "--adapter",
    default="",
    metavar="FOLDER",
    help="A folder with an adapter that peft saved, such as LoRA. peft merges it into the loaded"
    " model of the Hugging Face folder or GGUF file.",
)
mounts = click.option(
    "--mount",
    "mounts",
    multiple=True,
    type=PATH,
    metavar="PATH",
    help="A file or folder that the model or the command reads. weighin mounts it read-only in"
    " Docker containers, at its path on this machine. Repeatable.",
)
wait = click.option(
    "--wait",
    is_flag=True,
    help="If another run of weighin is measuring on this machine, wait for the end of that run."
    " Without --wait, weighin exits with code 4.",
)
resume = click.option(
    "--resume",
    type=PATH,
    metavar="FOLDER",
    help="Continue the stopped run in this folder: weighin makes the missing measurements.",
)
shard = click.option(
    "--shard",
    metavar="I/N",
    help="Measure only every N-th cell (measurement) of the run, beginning with the I-th cell:"
    " --shard 2/8 measures cells 2, 10, 18, and so on.",
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
    help="Write the result as JSON to this file. With --json -, weighin prints the JSON in place of"
    " the tables.",
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
    help="Run the command in a container of this Docker image, as docker run does: the image's"
    " entrypoint gets the command as its arguments, and the container uses the Docker engine's"
    " network. In the container, the current folder has the same path as on this machine, and the"
    " command runs with your user id. Of the shell's environment variables, the container gets only"
    " TERM; --env sets others. With --isolation docker and without --image, the container sees this"
    " machine's own programs, this Python and its packages, and also gets PATH.",
)
cold = click.option(
    "--cold",
    multiple=True,
    metavar="PATH",
    help="A file or folder that weighin drops from the page cache before each start of the"
    " command. Without --cold, pages that another program has read before are missing in the"
    " command's figures, because the kernel charges a page to the program that read it first."
    " Repeatable.",
)
label = click.option(
    "--name",
    "label",
    default="",
    metavar="LABEL",
    help="The name that the command gets in tables, such as --name train.",
)
server = several(
    click.option(
        "--ready",
        default="",
        metavar="REGEX",
        help="Measure the command as a server: weighin stops the server when a line of its output"
        " matches this regular expression. The figures cover the time from the command's start to"
        " that line.",
    ),
    click.option(
        "--ready-url",
        default="",
        metavar="URL",
        help="Measure the command as a server: weighin stops the server when this address answers"
        " a GET request with a status below 500. The figures cover the time from the command's"
        " start to that answer.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=SECONDS,
        default=10.0,
        metavar="SECONDS",
        help="How many seconds weighin waits between SIGTERM and SIGKILL when it ends a server that"
        " is ready, or a process that outlives the command.",
    ),
)

engine = several(
    click.option(
        "--engine",
        default="local",
        metavar="NAME",
        help="Where to measure. local: on this machine, one measurement after the other. ray: on"
        " the nodes of a Ray cluster that have the Ray resource weighin_slot, with one measurement"
        " at a time on each node.",
    ),
    click.option(
        "--address",
        metavar="ADDRESS",
        help="The address of the Ray cluster for --engine ray, as HOST:PORT. Default: auto, the"
        " cluster to which this machine belongs.",
    ),
    click.option(
        "--label",
        "labels",
        multiple=True,
        metavar="KEY=VALUE",
        help="With --engine ray, measure only on nodes of the cluster that have this label, such"
        " as ray.io/accelerator-type=H100. Repeatable.",
    ),
)


def out(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--out",
        "folder",
        type=PATH,
        metavar="FOLDER",
        help="The folder for the run's records and report. The folder must not contain a run yet."
        f" Default: results/{default}.",
    )


def use(default: str) -> Callable[[Any], Any]:
    return click.option(
        "--use",
        default=default,
        metavar="NAMES",
        help="What to do with the model after the load, comma-separated: names that `weighin list"
        " uses` lists, files of your own (./mine.py) with a function use(model), or none. Every"
        " strategy gets separate results for each use.",
    )


def timeout(seconds: float) -> Callable[[Any], Any]:
    return click.option(
        "--timeout",
        "timeout_s",
        type=SECONDS,
        default=seconds,
        metavar="SECONDS",
        help="Seconds after which weighin kills a measured process that has not ended.",
    )
