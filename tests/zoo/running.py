"""Test one model in a process of its own, so that a crash or a global setting affects no other model."""

import multiprocessing
import pickle
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from entries import Case, bytes_of
from judged import strategies, try_strategies
from loads import Outcome, convert, failed, save, try_loader

_EVERY_FORMAT = 8  # every eighth small model is loaded from every format
_STRATEGIES_TRY = 8  # the most cases of one module that strategies load; one module has 440
_LIMIT_S = 600.0
_FORMATS_BYTES = 20 * 1024**2


@dataclass(slots=True)
class Tried:
    """The outcomes for one model: those of the loader, and those of the strategies and the manifest."""

    case: Case
    loads: list[Outcome] = field(default_factory=list)
    judged: list[Outcome] = field(default_factory=list)
    model_bytes: int = 0
    seconds: float = 0.0


def kept(path: Path) -> dict[str, Tried]:
    """Return the results in a file to which they were pickled one after the other, by label."""
    found: dict[str, Tried] = {}
    if path.exists():
        with path.open("rb") as file:
            while file.peek(1):
                one: Tried = pickle.load(file)
                found[one.case.label] = one
    return found


def run(case: Case, turn: int, *, quick: bool = False) -> Tried:
    """Test a model in this process, and leave no files. ``quick`` tests three formats instead of all."""
    started = time.monotonic()
    tried = Tried(case)
    with tempfile.TemporaryDirectory(prefix="weighin-zoo-") as name:
        folder = Path(name)
        try:
            donor = case.donor()
            tried.model_bytes = bytes_of(donor)
            files = save(case, donor, folder)
        except Exception as error:
            tried.loads.append(Outcome("to be saved", "not applicable", failed("", error).detail))
            return tried
        del donor
        loaded = dict(files)
        if tried.model_bytes <= _FORMATS_BYTES and turn % _EVERY_FORMAT == 0:
            others, outcomes = convert(files, folder)
            loaded |= others
            tried.loads += outcomes
        tried.loads += try_loader(case, loaded)
        if case.kwargs.get("number", 0) < _STRATEGIES_TRY:
            tried.judged += try_strategies(
                case, tried.model_bytes, files["pt"], folder, turn, quick=quick
            )
    tried.seconds = time.monotonic() - started
    return tried


def run_apart(cases: list[Case], *, quick: bool = False) -> Iterator[Tried]:
    """Test each model in a process of its own, one after the other."""
    fork = multiprocessing.get_context("fork")  # torch and both collections are imported once
    strategies()
    for turn, case in enumerate(cases):
        receiving, sending = fork.Pipe(duplex=False)
        process = fork.Process(target=_run_child, args=(case, turn, quick, sending))
        process.start()
        sending.close()
        try:
            found = (
                receiving.recv() if receiving.poll(_LIMIT_S) else f"not done after {_LIMIT_S:g} s"
            )
        except EOFError:
            process.join()
            found = f"its process ended with exit code {process.exitcode}"
        process.kill()
        process.join()
        yield found if isinstance(found, Tried) else Tried(case, [Outcome("all", "CRASHED", found)])


def _run_child(case: Case, turn: int, quick: bool, sending: Connection) -> None:
    torch.set_num_threads(1)
    try:
        tried = run(case, turn, quick=quick)
    except BaseException as error:
        tried = Tried(case, [Outcome("the zoo", "CRASHED", f"{type(error).__name__}: {error}")])
    sending.send(tried)
