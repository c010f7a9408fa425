"""Signals at moments of five verbs: the right exit code, and nothing left; a run is then resumed."""

import os
import random
from functools import partial
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Final

from faults import Fault

TIMES: Final = int(os.environ.get("WEIGHIN_SIGNALS", "1"))
"""How often each signal is sent to each verb: ``make faults SIGNALS=20``."""
_SLOW: Final = '''"""Load slowly."""
import time
import torch

FORMATS = ("pt",)
DEVICES = ("cpu",)


def load(job):
    with job.phase("read"):
        time.sleep(2)
        model = job.build_model()
        model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model
'''


def _slow(folder: Path) -> None:
    (folder / "slow.py").write_text(_SLOW)


def _large(folder: Path) -> None:
    import torch

    torch.save({f"{n}.weight": torch.rand(256, 4096) for n in range(30)}, folder / "model.pt")


_RECOMMEND: Final = ("recommend", "gpt2-tiny", "--ram", "8g")
_STOPPED: Final = {
    "bench": (("bench", "gpt2-tiny", "--isolation", "process", "-s", "./slow.py,streaming", "--repeats", "2", "--out", "run"), _slow),
    "floor": (("floor", "gpt2-tiny", "--isolation", "cgroup", "-s", "streaming", "--out", "run"), _slow),
    "convert": (("convert", "model.pt", "out.safetensors"), _large),
    "report": (("report", "base"), _slow),
    "recommend": (_RECOMMEND, _slow),
}  # fmt: skip


def _again(verb: str, folder: Path) -> tuple[str, ...]:
    """Return a command that goes on, or that removes what SIGKILL leaves; it must work."""
    if verb in ("bench", "floor"):
        begun = (folder / "run" / "plan.json").exists()
        return (verb, "--resume", "run") if begun else _STOPPED[verb][0]
    words = "bench gpt2-tiny --isolation process -s streaming --out again"
    return _RECOMMEND if verb == "recommend" else tuple(words.split())


_SIGNALS: Final = {SIGINT: "130", SIGTERM: "130", SIGHUP: "130", SIGKILL: "-9"}
_moments: Final = random.Random(35)
FAULTS: Final = [
    Fault(
        f"{number.name} to {verb}" + f", time {time}" * (time > 0),
        "A signal",
        words,
        f"{code}|0",
        prepare=prepare,
        stop=number,
        stop_s=round(_moments.uniform(0.3, 6 if verb in ("bench", "floor") else 2), 2),
        then=partial(_again, verb),
        needs="cgroup" if verb == "floor" else "",
    )
    for verb, (words, prepare) in _STOPPED.items()
    for number, code in _SIGNALS.items()
    for time in range(TIMES)
]
