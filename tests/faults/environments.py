"""Machines and shells that are unusual: full disks, low limits, foreign modules, missing variables."""

from functools import partial
from pathlib import Path
from typing import Final

from faults import Fault

_BENCH: Final = ("bench", "gpt2-tiny", "--isolation", "process", "-s", "streaming", "--out", "run")
_RIGHT: Final = {"streaming": ("ok", "")}


def _shell(words: str, *outer: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs after some words of a shell."""
    return (*outer, "sh", "-c", f'{words}; exec "$@"', "sh")


def _mounting(words: str) -> tuple[str, ...]:
    return _shell(words, "unshare", "--mount")


def _module(name: str, folder: Path) -> None:
    (folder / f"{name}.py").write_text("open('RAN', 'w').close()\nraise SystemExit('executed')\n")


def _model(folder: Path) -> None:
    import torch

    torch.save({"weight": torch.ones(4, 4)}, folder / "model.pt")


def _module_and_model(name: str, folder: Path) -> None:
    _module(name, folder)
    _model(folder)


_READING: Final = {
    "convert": ("convert", "model.pt", "out.safetensors"), "inspect": ("inspect", "model.pt"),
    "predict": ("predict", "gpt2-tiny", "-s", "streaming"),
    "recommend": ("recommend", "gpt2-tiny", "--ram", "8g"), "bench": _BENCH,
}  # fmt: skip
FAULTS: Final = [
    *(
        Fault(f"{verb} beside a foreign {module}.py", "Environment", words, outcomes=_RIGHT if verb == "bench" else {}, prepare=partial(_module_and_model, module), absent=("RAN",))
        for verb, words in _READING.items()
        for module in ("torch", "random")
    ),
    Fault("HOME is missing", "Environment", _BENCH, outcomes=_RIGHT, variables={"HOME": None}),
    Fault("LANG is C", "Environment", _BENCH, outcomes=_RIGHT, variables={"LANG": "C", "LC_ALL": "C"}),
    Fault("the terminal takes ASCII alone", "Environment", _BENCH, outcomes=_RIGHT, variables={"LC_ALL": "C", "PYTHONUTF8": "0"}),
    Fault("the terminal has no width", "Environment", _BENCH, outcomes=_RIGHT, variables={"COLUMNS": "0", "TERM": None}),
    Fault("PATH is empty", "Environment", _BENCH, outcomes=_RIGHT, variables={"PATH": ""}),
    Fault("TMPDIR is no folder", "Environment", _BENCH, "0|2", variables={"TMPDIR": "/nonexistent"}),
    Fault("the cache is below a file", "Environment", _BENCH, "2", "cache", variables={"WEIGHIN_CACHE": "/etc/passwd/cache"}),
    Fault("a umask of 777", "Environment", _BENCH, "0|2", before=_shell("umask 777")),
    Fault("the current folder is deleted", "Environment", ("list",), "0|2", before=_shell("mkdir gone; cd gone; rmdir ../gone")),
    Fault("bench in a deleted folder", "Environment", ("bench", "gpt2-tiny", "--isolation", "process", "-s", "streaming"), "2", "(?m)^error: ", before=_shell("mkdir gone; cd gone; rmdir ../gone")),
    Fault("40 open files", "Environment", _BENCH, "0|2", before=_shell("ulimit -n 40")),
    Fault("12 open files", "Environment", _BENCH, "0|2", before=_shell("ulimit -n 12")),
    Fault("standard input is closed", "Environment", _BENCH, outcomes=_RIGHT, before=_shell("exec <&-")),
    Fault("standard output is closed", "Environment", ("list",), "0|2", before=_shell("exec >&-")),
    Fault("standard output is full", "Environment", ("list", "all"), "0|1|2|4", before=_shell("exec >/dev/full")),
    Fault("files of at most 4 KiB", "Environment", _BENCH, "2|4|5", before=_shell("ulimit -f 8")),
    Fault("the cache is read-only", "Environment", _BENCH, "0|2", needs="root", before=_mounting('mount --bind "$WEIGHIN_CACHE" "$WEIGHIN_CACHE" && mount -o remount,ro,bind "$WEIGHIN_CACHE"')),
    Fault("a read-only cache without the checkpoint", "Environment", ("bench", "tied-tiny", *_BENCH[2:]), "2", "cache", needs="root", before=_mounting('mount --bind "$WEIGHIN_CACHE" "$WEIGHIN_CACHE" && mount -o remount,ro,bind "$WEIGHIN_CACHE"')),
    Fault("no room in the folder of results", "Environment", (*_BENCH[:-1], "small/run"), "2", "(?m)^error: .*(No space|space left)", needs="root", before=_mounting("mkdir small && mount -t tmpfs -o size=4k none small && head -c 9999 /dev/zero >small/f 2>/dev/null")),
    Fault("no room in the cache", "Environment", _BENCH, "2", "(?m)^error: ", needs="root", variables={"WEIGHIN_CACHE": "HERE/small"}, before=_mounting("mkdir small && mount -t tmpfs -o size=1m none small")),
    Fault("no room in the temporary folder", "Environment", _BENCH, "0|2", needs="root", before=_mounting('mount -t tmpfs -o size=4k none "$TMPDIR"; head -c 9999 /dev/zero >"$TMPDIR/f" 2>/dev/null')),
    Fault("no room in /dev/shm", "Environment", _BENCH, outcomes=_RIGHT, needs="root", before=_mounting("mount -t tmpfs -o size=4k none /dev/shm")),
    Fault("no /sys/fs/cgroup", "Environment", _BENCH, outcomes=_RIGHT, needs="root", before=_mounting("mount -t tmpfs none /sys/fs/cgroup")),
    Fault("no /proc/self/oom_score_adj", "Environment", _BENCH, outcomes=_RIGHT, needs="root", before=_mounting("mount --bind /dev/null /proc/self/oom_score_adj")),
    Fault("another pid namespace", "Environment", _BENCH, outcomes=_RIGHT, needs="root", before=("unshare", "--pid", "--fork", "--mount-proc")),
    Fault("another pid namespace (cgroup)", "Environment", ("bench", "gpt2-tiny", "--isolation", "cgroup", *_BENCH[4:]), outcomes=_RIGHT, needs="cgroup", before=("unshare", "--pid", "--fork", "--mount-proc")),
    Fault("a limit above that of the parent group", "Environment", ("bench", "gpt2-tiny", "--isolation", "cgroup", "--ram", "900t", *_BENCH[4:]), "2", "more than", needs="cgroup"),
    Fault("tmpfs is called no cold cache", "Environment", _BENCH, outcomes={"streaming": ("ok", "could not be dropped from the page cache")}, needs="root", variables={"WEIGHIN_CACHE": "HERE/small"}, before=_mounting("mkdir small && mount -t tmpfs -o size=200m none small")),
    Fault("arguments of a named model", "Environment", ("bench", "gpt2-tiny", "--set", "kwargs.n_layers=2", *_BENCH[2:]), "0|2", makes="models/gpt2-tiny_n_layers_2_-.*/.*"),
]  # fmt: skip
