"""Strategies that misbehave, each followed by an honest one, which must be ``ok``."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from command_trees import GROUPS
from faults import ISOLATIONS, Fault

HEAD: Final = '''"""Misbehave."""
import ctypes, mmap, os, signal, subprocess, sys, threading, time
import torch

FORMATS = ("pt",)
DEVICES = ("cpu",)


def rightly(job):
    with job.phase("read"):
        model = job.build_model()
        model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def events():
    """Return the descriptor of the worker's events."""
    import fcntl
    pipes = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
    kinds = ("pipe:", "socket:")
    pipes = [fd for fd in pipes if os.readlink(f"/proc/self/fd/{fd}").startswith(kinds)]
    return [fd for fd in pipes if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY]


def fill(size):
    held = bytearray(size)
    held[::4096] = bytes(len(held[::4096]))
    return held


HOG = "held = bytearray(3 << 30); held[::4096] = bytes(len(held[::4096]))"
'''
_OK: Final = ("ok", "")


def _write(text: str, folder: Path) -> None:
    (folder / "mine.py").write_text(f"{HEAD}{GROUPS}\n\n{text}")


def _indented(body: str) -> str:
    return "def load(job):\n" + "".join(f"    {line}\n" for line in body.strip().splitlines())


def does(
    name: str,
    body: str,
    outcome: str,
    message: str = "",
    *,
    ram: str = "",
    under: Sequence[str] = ("process",),
    timeout: int = 0,
    code: str = "",
    whole: bool = False,
    says: str = "",
    remakes: str = "",
    present: tuple[str, ...] = (),
) -> list[Fault]:
    """Return the faults of a strategy under isolations; an empty ``outcome`` stands for no run at all.

    ``body`` is that of ``load``, or the ``whole`` file.
    """
    right = "0" if outcome in ("ok", "oom_killed", "timeout", "child_killed") else "5"
    faults = []
    for isolation in under:
        limit = ("--ram", ram) if ram else ()
        faults.append(
            Fault(
                f"{name} ({isolation})",
                "A strategy",
                (
                    *("bench", "gpt2-tiny", "--isolation", isolation, "--out", "run"),
                    *("-s", "./mine.py,streaming", *limit),
                    *(("--timeout", str(timeout)) if timeout else ()),
                ),
                code or right,
                says,
                {"mine": (outcome, message), "streaming": _OK} if outcome else {},
                partial(_write, body if whole else _indented(body)),
                needs="" if isolation == "process" else isolation,
                remakes=remakes,
                present=present,
            )
        )
    return faults


IN_GROUPS: Final = ("cgroup", "docker")
REMADE: Final = r"models/[^/]+/pt\.json"
"""The mark of a checkpoint that weighin made again, with the new file's time; the file is as before."""
FAULTS: Final = [
    # It dies.
    *does("aborts", "os.abort()", "strategy_failed", "SIGABRT", under=ISOLATIONS),
    *does("ends with status 0", "os._exit(0)", "strategy_failed", "exit code 0", under=ISOLATIONS),
    *does("reads address 0", "ctypes.string_at(0)", "strategy_failed", "SIGSEGV", under=ISOLATIONS),
    *does("calls sys.exit", "sys.exit(0)", "strategy_failed", "SystemExit"),
    *does("recurses without end", "def again(): again()\nagain()", "strategy_failed", "RecursionError"),
    *does("raises a BaseException", "class E(BaseException): pass\nraise E('base')", "strategy_failed", "base"),
    *does(
        "raises an error whose text raises",
        "class E(Exception):\n    def __str__(self): raise ValueError('no text')\nraise E()", "strategy_failed",
    ),
    *does(
        "raises an error with control characters",
        "raise RuntimeError('\\x1b[31mred\\x1b]0;t\\x07 \\x00 ::error::x\\n' + 'z' * 100000)",
        "strategy_failed", r"^RuntimeError: [^\x00-\x1f]*$",
    ),
    *does("ends in a thread after the load", "model = rightly(job)\nthreading.Timer(0, os._exit, (0,)).start()\ntime.sleep(1)\nreturn model", "strategy_failed", "exit code 0"),
    *does("has no load", "X = 1\n", "", code="2", whole=True, says="load"),
    *does("has a syntax error", "def load(job:\n", "", code="2", whole=True, says="mine.py"),
    *does("ends while it is imported", "sys.exit(3)\ndef load(job): pass\n", "strategy_failed", "SystemExit: 3", whole=True),
    *does("kills its parent's child", "os.kill(os.getpid(), 9)", "strategy_failed", "SIGKILL", under=ISOLATIONS),
    # It hangs.
    *does("stops itself", "with job.phase('read'): os.kill(os.getpid(), signal.SIGSTOP)\nreturn rightly(job)", "timeout", "still running", timeout=12, under=ISOLATIONS),
    *does("stops its process group", "os.killpg(0, signal.SIGSTOP)\nreturn rightly(job)", "timeout", timeout=12),
    *does("ignores SIGTERM and sleeps", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(999)", "timeout", timeout=12),
    *does("holds the GIL", "ctypes.PyDLL(None).sleep(999)", "timeout", timeout=12),
    *does("prints without end", "while True: print('y' * 1000)", "timeout", timeout=12),
    # It returns what is wrong.
    *does("returns a dict", "rightly(job)\nreturn {'a': 1}", "strategy_failed", "returned a dict"),
    *does("returns zeros", "model = rightly(job)\nfor p in model.parameters(): p.data.zero_()\nreturn model", "wrong_weights", "other values"),
    *does("returns a model on meta", "with torch.device('meta'): return job.build_model()", "wrong_weights", "meta device"),
    *does("leaves a tensor on meta", "model = rightly(job)\nname, p = next(iter(model.named_parameters()))\nowner, _, leaf = name.rpartition('.')\nsetattr(model.get_submodule(owner), leaf, torch.nn.Parameter(torch.empty_like(p, device='meta')))\nreturn model", "wrong_weights", "meta device"),
    *does("freezes the clock", "model = rightly(job)\ntime.monotonic_ns = lambda: 0\nreturn model", "ok|measurement_failed", code="0|4"),
    # Phases.
    *does("nests phases", "with job.phase('a'):\n    with job.phase('b'): pass", "strategy_failed", "phases cannot be nested"),
    *does("drops a phase that it began", "job.phase('open').__enter__()\nreturn rightly(job)", "ok"),
    *does("leaves a phase open", "open_phase = job.phase('open')\nopen_phase.__enter__()\nmodel = job.build_model()\nmodel.load_state_dict(torch.load(job.checkpoint, weights_only=True))\nmodel.open_phase = open_phase\nreturn model", "strategy_failed", "phase 'open' began and never ended"),
    *does("names a phase by a number", "with job.phase(7): pass\nreturn rightly(job)", "strategy_failed", "(?i)phase"),
    *does("names a phase None", "with job.phase(None): pass\nreturn rightly(job)", "strategy_failed", "(?i)phase"),
    *does("names a phase with control characters", "with job.phase('\\x1bc\\x00read'): pass\nreturn rightly(job)", "strategy_failed", "(?i)phase"),
    *(
        fault
        for name in ("touch", "sync", "forward")
        for fault in does(f"names a phase {name}", f"with job.phase({name!r}): pass\nreturn rightly(job)", "strategy_failed", "(?i)phase")
    ),
    *does("begins 3,000 phases", "for i in range(3000):\n    with job.phase(f'p{i}'): pass\nreturn rightly(job)", "ok"),
    # Events.
    *does("writes an event 200,000 deep", "for fd in events(): os.write(fd, b'[' * 200000 + b'\\n')\nreturn rightly(job)", "ok"),
    *does("writes an event without its fields", "for fd in events(): os.write(fd, b'{\"event\":\"phase\"}\\n')\nreturn rightly(job)", "ok"),
    *does("writes an event with wrong types", "for fd in events(): os.write(fd, b'{\"event\":\"ready\",\"t_ns\":\"x\",\"touch_ns\":{}}\\n')\nreturn rightly(job)", "ok"),
    *does("writes an integer of 6,000 digits", "for fd in events(): os.write(fd, b'{\"event\":' + b'9' * 6000 + b'}\\n')\nreturn rightly(job)", "ok"),
    *does("writes events of unknown kinds", "for fd in events(): os.write(fd, b'{\"event\":\"zzz\"}\\n{\"event\":5}\\n{\"event\":null}\\n[]\\n')\nreturn rightly(job)", "ok"),
    *does("writes bytes that are no text", "for fd in events(): os.write(fd, bytes(range(128, 256)) + b'\\n')\nreturn rightly(job)", "ok"),
    *does("closes its descriptors", "os.closerange(3, 256)\nreturn rightly(job)", "ok", under=ISOLATIONS),
    # The checkpoint.
    *does("writes into its checkpoint", "with open(job.checkpoint, 'r+b') as file:\n    file.seek(100000)\n    file.write(b'\\1' * 4096)\nreturn rightly(job)", "strategy_failed|wrong_weights", "(?i)checkpoint|read-only|not permitted|denied", under=ISOLATIONS, remakes=REMADE),
    *does("writes into its checkpoint after the load", "model = rightly(job)\nwith open(job.checkpoint, 'r+b') as file:\n    file.seek(100000)\n    file.write(b'\\1' * 64)\nreturn model", "strategy_failed", "(?i)checkpoint|read-only|not permitted|denied", under=ISOLATIONS, remakes=REMADE),
    *does("truncates its checkpoint", "os.truncate(job.checkpoint, 4096)\nreturn rightly(job)", "strategy_failed", "(?i)checkpoint|read-only|not permitted|denied", under=ISOLATIONS, remakes=REMADE),
    *does("deletes its checkpoint", "os.unlink(job.checkpoint)\nreturn rightly(job)", "strategy_failed", under=ISOLATIONS, remakes=REMADE),
    *does("replaces its checkpoint", "whole = open(job.checkpoint, 'rb').read()\nwith open(str(job.checkpoint) + '.n', 'wb') as file: file.write(whole)\nos.replace(str(job.checkpoint) + '.n', job.checkpoint)\nreturn rightly(job)", "strategy_failed", "(?i)checkpoint|read-only|not permitted|denied", under=ISOLATIONS, remakes=REMADE),
    # Children.
    *does("leaves a child", "model = rightly(job)\nif os.fork() == 0: time.sleep(300)\nreturn model", "ok", under=ISOLATIONS),
    *does("leaves a daemon", "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(300)\n    os._exit(0)\nos.wait()\nreturn rightly(job)", "ok", under=ISOLATIONS),
    *does("leaves a daemon without its environment", "subprocess.Popen([__file__, '291'], executable='/bin/sleep', env={}, start_new_session=True, stdin=-3, stdout=-3, stderr=-3)\nreturn rightly(job)", "ok", under=ISOLATIONS),
    *does("leaves 60 children", "for _ in range(60):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(200)\nreturn rightly(job)", "ok", under=ISOLATIONS),
    *does("keeps 200 MiB in a child", "subprocess.run([sys.executable, '-c', 'held = bytearray(200 << 20); held[::4096] = bytes(len(held[::4096]))'], check=True)\nreturn rightly(job)", "ok", r"(?i)process|child"),
    *does("has a child that is killed for its memory", "subprocess.run([sys.executable, '-c', HOG], check=False)\nreturn rightly(job)", "child_killed", "the kernel killed 1 process", ram="1g", under=IN_GROUPS),
    *does("becomes another program that is killed for its memory", "os.execv(sys.executable, [sys.executable, '-c', HOG])", "oom_killed", ram="1g", under=IN_GROUPS),
    # Memory and limits.
    *does("takes more than its limit", "fill(3 << 30)\nreturn rightly(job)", "oom_killed", ram="1g", under=IN_GROUPS),
    *does("fills /dev/shm", "with open('/dev/shm/' + str(os.getpid()), 'wb') as file:\n    os.unlink(file.name)\n    for _ in range(1500): file.write(bytes(1 << 20))\nreturn rightly(job)", "oom_killed|strategy_failed", ram="1g", under=("cgroup",), code="0|5"),
    *does("leaves its group", "open('/sys/fs/cgroup/memory/cgroup.procs', 'w').write(str(os.getpid()))\nfill(1500 << 20)\nreturn rightly(job)", "strategy_failed|measurement_failed", "(?i)group", ram="1g", under=("cgroup",), code="4|5"),
    *does("raises its limit", "group, _ = own_group()\nfor name in ('memory.memsw.limit_in_bytes', 'memory.limit_in_bytes'):\n    try: open(f'{group}/{name}', 'w').write('-1')\n    except OSError: pass\nfill(1500 << 20)\nreturn rightly(job)", "strategy_failed|measurement_failed", "(?i)limit", ram="1g", under=("cgroup",), code="4|5"),
    *does("makes a group below its own", "group = own_group()[0] + '/below'\nos.mkdir(group)\nopen(group + '/cgroup.procs', 'w').write(str(os.getpid()))\nopen(__file__ + '.moved', 'w').close()\nreturn rightly(job)", "ok|strategy_failed|measurement_failed", ram="1g", under=("cgroup",), code="0|4|5", present=("mine.py.moved",)),
    *does("limits its own addresses", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nreturn rightly(job)", "strategy_failed", under=("process",)),
    *does("changes folder, umask and environment", "os.chdir('/proc/self')\nos.umask(0o777)\nos.environ.clear()\nfor number in range(1, 32):\n    try: signal.signal(number, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nreturn rightly(job)", "ok", under=ISOLATIONS),
    *does("prints 200 MiB", "for _ in range(200): os.write(1, bytes(1 << 20))\nreturn rightly(job)", "ok", under=ISOLATIONS),
    *does("raises in a thread", "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\nreturn rightly(job)", "ok"),
]  # fmt: skip
