"""The fixed draw of mutants, what is kept of it, and how a later one is compared."""

from collections import Counter
from pathlib import Path

import kill_rates
from copies import Trial
from kill_rates import Log, Rate
from operators import Mutant, mutants

SIZES = {"isolation": 500, "gate": 300, "predict": 50, "run": 900, "cli": 300, "disk": 2}


def made(name: str, number: int) -> list[Mutant]:
    """Return so many mutants of a package."""
    module = "m.py" if name == kill_rates.TOP else f"{name}/deep/m.py"
    return [Mutant(module, line, line, f"x = {line}\n", "constant") for line in range(number)]


def packages(drawn: list[Mutant]) -> Counter[str]:
    return Counter(kill_rates.package(mutant.module) for mutant in drawn)


def test_isolation_gate_and_predict_get_80_and_the_others_60_by_their_size() -> None:
    assert kill_rates.shares(SIZES) == {
        "isolation": 80, "gate": 80, "predict": 50, "run": 43, "cli": 15, "disk": 2,
    }  # fmt: skip


def test_each_package_gets_3_even_if_all_others_together_then_get_more() -> None:
    many = {f"p{number}": 100 for number in range(25)}
    assert set(kill_rates.shares(SIZES | many).values()) == {80, 50, 3, 2}


def test_a_package_draws_the_same_whatever_the_others_are() -> None:
    many = [one for name in kill_rates.MANY for one in made(name, 90)]
    run, cli = made("run", 400), made("cli", 300)
    both = kill_rates.fixed_draw([*many, *run, *cli], seed=7)
    renamed = kill_rates.fixed_draw([*many, *run, *made("show", 300)], seed=7)
    assert [m for m in both if m not in cli] == [m for m in renamed if m in [*many, *run]]
    assert both != kill_rates.fixed_draw([*many, *run, *cli], seed=8)


def test_each_beginning_of_the_draw_has_the_same_share_of_each_package() -> None:
    everything = [one for name, size in SIZES.items() for one in made(name, size)]
    drawn = kill_rates.fixed_draw([*everything, *everything], seed=0)
    whole, half = packages(drawn), packages(drawn[: len(drawn) // 2])
    assert whole == kill_rates.shares(SIZES)
    assert all(abs(half[name] - whole[name] / 2) <= 1 for name in whole)


def test_modules_at_the_top_are_a_package(tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    for name in ("gate/a.py", "errors.py"):
        (tmp_path / name).write_text("x = a < b\n")
    found = kill_rates.found(["errors.py", "gate"], tmp_path)
    assert [kill_rates.package(one.module) for one in found] == [kill_rates.TOP, "gate"]


def repository(root: Path) -> Path:
    (root / "tests" / "unit").mkdir(parents=True)
    (module := root / "harness" / "m.py").parent.mkdir()
    module.write_text("x = 1\n")
    return module


def test_a_log_is_read_again_but_not_for_other_code(tmp_path: Path) -> None:
    module, path = repository(tmp_path), tmp_path / "log"
    one, other = made("gate", 2)
    log = Log(path, tmp_path)
    log.add(one, Trial("test_a", ()))
    log.add(other, Trial("", ("test_b", "test_c")))
    assert Log(path, tmp_path).trials == log.trials
    module.write_text("x = 2\n")
    assert Log(path, tmp_path).trials == {}


def test_rates_are_shown_beside_those_of_before() -> None:
    now = {"gate": Rate(80, 60), "show": Rate(3, 2), "cli": Rate(3, 3)}
    before = {"gate": Rate(80, 70), "report": Rate(4, 1)}
    assert kill_rates.table(now, before).splitlines()[2:] == [
        "| isolation | - | - | - | - | - | - |",
        "| gate | 80 | 60 | 75.0 | 80 | 70 | 87.5 |",
        "| predict | - | - | - | - | - | - |",
        "| cli | 3 | 3 | 100.0 | - | - | - |",
        "| report | - | - | - | 4 | 1 | 25.0 |",
        "| show | 3 | 2 | 66.7 | - | - | - |",
        "| all others | 6 | 5 | 83.3 | 4 | 1 | 25.0 |",
        "| all | 86 | 65 | 75.6 | 84 | 71 | 84.5 |",
    ]


def test_survivors_and_tests_that_were_left_out_are_kept(tmp_path: Path) -> None:
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "m.py").write_text("x = a < b\ny = 1\nz = 2 if a else 3\n")
    source = (tmp_path / "gate" / "m.py").read_text()
    trials = dict.fromkeys(mutants("gate/m.py", source), Trial("test_m.py::test_x", ("test_b",)))
    survivor, endless, *_ = trials
    trials |= {survivor: Trial("", ()), endless: Trial("test_m.py does not end", ("test_a",))}
    kept = kill_rates.to_keep(trials, "abc", 5, tmp_path)
    drawn = len(trials)
    assert kept == {
        "commit": "abc", "seed": 5, "packages": {"gate": {
            "drawn": drawn, "killed": drawn - 1, "of_these_endless": 1,
            "left_out_tests": ["test_a", "test_b"],
            "survivors": [["gate/m.py:1 comparison", "-x = a < b", "+x = (a <= b)"]],
        }},
    }  # fmt: skip
    assert kill_rates.kept_rates(kept) == kill_rates.rates(trials)
