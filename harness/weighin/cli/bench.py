"""``weighin bench``: measure how a model is loaded or saved."""

from typing import TYPE_CHECKING, Any

import click

from weighin.cli import _arguments, _console, _measuring, _options
from weighin.cli._verb import Verb
from weighin.cli.report import show_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weighin.plan.task import Node, Run

EXAMPLES = {
    "Load gpt2-xl with each of the six default strategies, three times, under 8 GiB of RAM": "weighin bench gpt2-xl --ram 8g --repeats 3",
    "Load a model with two strategies under each of two limits": "weighin bench gpt2-medium --ram 4g,2500m --strategies mmap_assign,streaming",
    "Save the model instead of loading it": "weighin bench gpt2-large --operation save --ram 8g",
    "Measure the load and one use of the model after it, for each of two uses": "weighin bench gpt2-medium --use write,adamw -s baseline,streaming",
    "Load from disks slowed to 50 and to 200 MB/s, with 5 ms for each request": "weighin bench gpt2-medium --disk 50MB/s,200MB/s --disk-latency 5ms",
    "Load in four parallel processes": "weighin bench gpt2-medium --ranks 4 -s baseline,mmap_assign,shared_memory",
    "Load onto a GPU under a limit of 1 GiB of GPU memory": "weighin bench gpt2-medium --device cuda --vram 1g",
    "Load your own model and checkpoint": "weighin bench --model my.nets:build --kwargs '{\"n\": 64}' --checkpoint w.pt",
    "Measure a suite, and write its records to a folder of your choice": "weighin bench --suite ci --out results/ci",
    "Measure a suite on the machines of a Ray cluster": "weighin bench --suite ci --engine ray --address head:6379 --out results/ray",
    "Measure the second eighth of a suite's cells, on one of eight machines": "weighin bench --suite ci --shard 2/8 --out results/shard-2",
    "Go on with a run that was stopped": "weighin bench --resume results/20261120T093000-gpt2-xl-8GiB",
}


@click.command(cls=Verb, examples=EXAMPLES, codes=True)
@_options.model
@_options.folder_choice
@_options.adapter
@_options.generated
@_options.selection
@click.option(
    "--ram",
    default="none",
    metavar="SIZES",
    help="RAM limits, comma-separated: 8g, 8Gi, 6500m, none (no limit). weighin measures every"
    " strategy under each limit.",
)
@click.option(
    "--ram-high",
    default="none",
    metavar="SIZE",
    help="Soft RAM limit (cgroup v2 only): while the measured process has more memory than this"
    " size, the kernel slows the process down and takes memory back from it, but does not kill it."
    " If the kernel cannot take enough memory back, the process runs slowly until --timeout.",
)
@_options.strategies
@click.option(
    "--operation",
    default="load",
    metavar="NAME",
    help="What to measure: load, or save (writing a checkpoint).",
)
@_options.isolation
@_options.device
@_options.dtype
@click.option(
    "--cache",
    default="cold",
    metavar="STATE",
    help="Whether the checkpoint is in the page cache when the load starts: cold (no, dropped) or"
    " warm (yes, read beforehand and charged to the measured cgroup).",
)
@_options.formats
@_options.use("forward")
@click.option(
    "--disk",
    default="none",
    metavar="RATES",
    help="Slow the checkpoint's disk down to these rates, comma-separated: 50MB/s, 200MB/s, none"
    " (the disk's own rate). To slow a disk down, weighin needs FUSE and the package extra"
    " weighin[disk].",
)
@click.option(
    "--disk-latency",
    default="none",
    metavar="TIMES",
    help="Delay each request to the checkpoint's disk by these times, comma-separated: 1ms, 20ms,"
    " none (no delay). To delay the requests, weighin needs FUSE and the package extra"
    " weighin[disk].",
)
@click.option(
    "--storage",
    type=_options.PATH,
    metavar="FOLDER",
    help="Put the checkpoints that weighin generates or converts into this folder, so that the"
    " run measures the folder's disk. Without --storage, generated and converted checkpoints lie"
    " in weighin's cache (environment variable WEIGHIN_CACHE). --storage does not move a"
    " checkpoint of your own.",
)
@click.option(
    "--passes",
    default=1,
    metavar="N",
    help="Number of forward passes of --use forward. More passes show the cost of a mapped model"
    " that is larger than the RAM limit: each pass reads the weights from the disk again.",
)
@click.option(
    "--repeats",
    default=1,
    metavar="N",
    help="Number of times to make each measurement. weighin makes every measurement one time before"
    " it starts the second round, so that a short disturbance of the machine does not affect all"
    " repeats of one measurement.",
)
@_options.ranks
@_options.environment
@_options.timeout(600.0)
@click.option(
    "--vram",
    default="none",
    metavar="SIZES",
    help="Limits on GPU memory, comma-separated: 8g, none (no limit). weighin measures every"
    " strategy under each limit.",
)
@click.option(
    "--steady",
    is_flag=True,
    help="Before each load, write to free memory of the machine, and then release it. Load times"
    " then vary less in virtual machines, where the first access to a page takes longer if the page"
    " has been free for some seconds.",
)
@_options.seed
@_options.suite
@_options.engine
@click.option(
    "--jobs",
    default=1,
    metavar="N",
    help="Make up to N measurements at once on this machine. Use this option if only memory"
    " matters, because times of measurements that ran at once cannot be compared with other times."
    " The sum of the N RAM limits must fit into the free RAM.",
)
@_options.shard
@_options.out("DATE-MODEL-RAM")
@_options.resume
@_options.trust
@_options.wait
@_options.json
@_options.mounts
@click.pass_context
def bench(context: click.Context, /, **_: Any) -> None:
    """Measure memory and time of loading a model with each strategy in its own limited process."""
    from weighin.cli import _progress
    from weighin.plan.start import start
    from weighin.records import run_folder
    from weighin.run.runner import resumable

    typed = _arguments.read(context)
    if typed["engine"] == "local":
        _measuring.enter_scope(typed["isolation"])

    def plan(engine: dict[str, Any], nodes: "Sequence[Node]") -> "tuple[Run, str]":
        shard = run_folder.parse_shard(typed["shard"]) if typed["shard"] else None
        model = _arguments.one_model(typed)
        settings = _arguments.settings(typed, model, shard=shard, engine=engine)
        return start(settings, typed["folder"], nodes)

    with _measuring.planned(typed, plan) as (task, perform):
        limits = [planned.cell.ram_limit_bytes for planned in task.planned]
        if not task.isolation.limits or not any(limits):
            _console.note(
                "this run has no RAM limit: weighin measures peaks, but only a run with --ram shows"
                " whether a strategy fits"
            )
        with (
            _progress.progress(_console.err(), len(task.planned)) as progress,
            resumable("bench", task),
        ):
            results = perform(task, progress)
    show_run(task.folder, run_folder.of_results(task.folder, results), json_file=typed["json_file"])
    _measuring.end(context, results)
