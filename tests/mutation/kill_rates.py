"""The kill rates of a fixed draw over all packages, beside those that are kept in ``kill-rates.json``."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from copies import ROOT, Trial
from operators import Mutant, mutants

KEPT: Final = Path(__file__).with_name("kill-rates.json")
TOP: Final = "(top)"
MANY: Final = ("isolation", "gate", "predict")
"""The packages whose faults cost most: a wrong limit, a wrong verdict, a wrong promise."""
_EACH_OF_MANY: Final = 80
_ALL_OTHERS: Final = 60
_LEAST: Final = 3


def package(module: str) -> str:
    """Return the package of a module: its folder below weighin."""
    return module.partition("/")[0] if "/" in module else TOP


def found(names: Sequence[str], root: Path = ROOT / "harness" / "weighin") -> Iterator[Mutant]:
    """Yield all mutants of these files and folders of weighin, in the order of their lines."""
    for name in names:
        given = root / name
        for file in sorted(given.rglob("*.py")) if given.is_dir() else [given]:
            yield from mutants(str(file.relative_to(root)), file.read_text())


def shares(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return how many mutants to draw from each package, of so many that it has.

    Of ``MANY`` 80 each. Of all others 60: first 3 each, and then each further one from the package that
    has most mutants for each one drawn.
    """
    others = {name: min(_LEAST, size) for name, size in sizes.items() if name not in MANY}
    while sum(others.values()) < _ALL_OTHERS and (
        left := [name for name, drawn in others.items() if drawn < sizes[name]]
    ):
        others[max(left, key=lambda name: sizes[name] / others[name])] += 1
    return {name: min(_EACH_OF_MANY, sizes[name]) for name in MANY} | others


def fixed_draw(found: Sequence[Mutant], seed: int) -> list[Mutant]:
    """Draw from all packages, in an order whose every beginning has the same share of each.

    The draw of a package depends on its own code and the seed alone.
    """
    packages: dict[str, list[Mutant]] = {}
    for mutant in dict.fromkeys(found):  # two changes may give the same text
        packages.setdefault(package(mutant.module), []).append(mutant)
    placed: list[tuple[float, str, Mutant]] = []
    for name, drawn in shares({name: len(own) for name, own in packages.items()}).items():
        random.Random(f"{seed} {name}").shuffle(own := packages[name])
        placed += [((index + 0.5) / drawn, name, one) for index, one in enumerate(own[:drawn])]
    return [mutant for *_, mutant in sorted(placed, key=lambda one: one[:2])]


class Log:
    """What was found out about each mutant, in a file to which each line is added as it is known.

    A run that was stopped goes on where it was. Lines about other code, or other tests, do not count.
    """

    def __init__(self, path: Path | None, root: Path = ROOT) -> None:
        self._path = path
        folders = ("harness", "tests/unit", "tests/contract")
        files = chain(*((root / folder).rglob("*.py") for folder in folders))
        self._code = hashlib.sha256(
            b"".join(file.read_bytes() for file in sorted(files))
        ).hexdigest()
        self.trials: dict[Mutant, Trial] = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for read in map(json.loads, lines):
            if read["code"] == self._code:
                trial = Trial(read["killed_by"], tuple(read["left_out"]))
                self.trials[Mutant(**read["mutant"])] = trial

    def add(self, mutant: Mutant, trial: Trial) -> None:
        self.trials[mutant] = trial
        if self._path:
            line = {"code": self._code, "mutant": asdict(mutant)} | asdict(trial)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of the mutants of a package were killed."""

    drawn: int
    killed: int

    def __add__(self, other: "Rate") -> "Rate":
        return Rate(self.drawn + other.drawn, self.killed + other.killed)

    @property
    def percent(self) -> float:
        return 100 * self.killed / self.drawn if self.drawn else 0.0


def rates(trials: Mapping[Mutant, Trial]) -> dict[str, Rate]:
    result: dict[str, Rate] = {}
    for mutant, trial in trials.items():
        name = package(mutant.module)
        result[name] = result.get(name, Rate(0, 0)) + Rate(1, int(bool(trial.killed_by)))
    return result


def kept_rates(kept: Mapping[str, Any]) -> dict[str, Rate]:
    return {name: Rate(one["drawn"], one["killed"]) for name, one in kept["packages"].items()}


def table(now: Mapping[str, Rate], before: Mapping[str, Rate]) -> str:
    """Return rates beside earlier ones, in Markdown: those of ``MANY``, then the others, and sums."""
    others = sorted({*now, *before} - {*MANY})
    lines = ["| package | drawn | killed | % | before: drawn | killed | % |", "|---|" + "--:|" * 6]
    groups = {name: [name] for name in (*MANY, *others)}
    for title, names in (groups | {"all others": others, "all": [*MANY, *others]}).items():
        cells = [title]
        for each in (now, before):
            rate = sum((each.get(name, Rate(0, 0)) for name in names), Rate(0, 0))
            cells += [str(rate.drawn), str(rate.killed), f"{rate.percent:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def to_keep(
    trials: Mapping[Mutant, Trial],
    commit: str,
    seed: int,
    root: Path = ROOT / "harness" / "weighin",
) -> dict[str, object]:
    """Return a measurement as it is kept: with the survivors, and the tests that were left out."""
    packages: dict[str, dict[str, object]] = {}
    for name, rate in sorted(rates(trials).items()):
        own = {mutant: one for mutant, one in trials.items() if package(mutant.module) == name}
        alive = sorted((m for m, one in own.items() if not one.killed_by), key=str)
        shown = [m.shown((root / m.module).read_text()).splitlines() for m in alive]
        endless = sum(one.killed_by.endswith("does not end") for one in own.values())
        left_out = sorted({test for one in own.values() for test in one.left_out})
        packages[name] = asdict(rate) | {
            "of_these_endless": endless, "left_out_tests": left_out, "survivors": shown,
        }  # fmt: skip
    return {"commit": commit, "seed": seed, "packages": packages}
