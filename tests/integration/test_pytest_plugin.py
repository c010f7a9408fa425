"""The pytest plugin in a pytest of its own, as a user has it: real workers, whole messages."""

import re
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent

import pytest
from typed import ROOT

pytest_plugins = ["pytester"]


@pytest.fixture(name="user")
def _user(
    pytester: pytest.Pytester, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> pytest.Pytester:
    monkeypatch.setenv("WEIGHIN_CACHE", str(disk / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "harness"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--strict-markers -W error")
    return pytester


HEAD = """
import os, pytest, signal, subprocess, sys, torch, unittest

limit = pytest.mark.limit_peak

def ones(mib): return torch.ones(mib * 2**20 // 4)

def child(mib):
    code = f"import time; held = bytearray(b'1') * ({mib} << 20); time.sleep(2)"
    return subprocess.run([sys.executable, "-c", code]).returncode
"""


def run(
    user: pytest.Pytester, text: str, isolation: str = "process", head: str = HEAD
) -> pytest.RunResult:
    user.makepyfile(head + dedent(text))
    return user.runpytest_subprocess("--weighin-isolation", isolation)


def test_the_plugin_is_found_and_imports_nothing_of_weighin(user: pytest.Pytester) -> None:
    light = """
    import sys
    def test_light():
        ours = sorted(name for name in sys.modules if name.partition(".")[0] == "weighin")
        assert ours == ["weighin", "weighin.testing", "weighin.testing.plugin"], ours
        assert not {"torch", "pandas", "pydantic"} & set(sys.modules)
    """
    result = run(user, light, head="")
    result.assert_outcomes(passed=1)
    assert f"weighin-{version('weighin')}" in result.stdout.str()


BODIES = """
before = ones(200)  # held before the body: not a part of it

@pytest.fixture
def outside(): return os.environ["PARENT_PID"]

@limit("60MiB", metric="anon")
def test_fits(tmp_path, outside):
    assert tmp_path.exists() and outside == "none"
    kept = ones(50)

@limit("60MiB")
def test_too_much(weighin):
    with weighin.phase("read"):
        first = ones(40)
    with weighin.phase("apply"):
        second = ones(40)

@limit("1GiB")
@pytest.mark.parametrize("number", [1, 2])
def test_asserts(number): assert number == 1

@limit("1GiB")
def test_skips(): pytest.skip("not today")

@pytest.mark.xfail(strict=True)
@limit("1GiB")
def test_xfails(): raise ValueError

@limit("1GiB")
def test_dies(): os._exit(3)

def test_usual(): ones(300)

@limit("100MiB")
def test_too_much_in_a_child(): assert child(200) == 0

@limit("100MiB", metric="anon")
def test_too_much_anonymous_in_a_child(): assert child(200) == 0

@limit("100MiB")
def test_fits_in_a_child(): assert child(20) == 0

@limit("60MB")
def test_a_limit_that_says_two_things(): ...

@limit("60MiB", metric="rs")
def test_a_metric_that_is_none(): ...

@limit("60MiB", metric="cgroup")
def test_a_metric_that_was_not_measured(): ...
"""
TOLD_OF_BODIES = (
    "weighin: test_too_much ok under process",
    "assert 2 == 1",
    "strategy_failed: the test failed in its call stage",
    "the process of the test ended before pytest could report: strategy_failed: the measured"
    " process ended with exit code 3 in phase 'body'",
    "'60MB' is ambiguous: MB is 1000-based for some tools and 1024-based for others",
    "no metric is called 'rs'\ndid you mean 'rss'? known: anon, cgroup, cuda, rss",
    "cgroup was not measured under the isolation process: needs the isolation cgroup",
)


def grew_mib(text: str, pattern: str) -> float:
    """Return the MiB that a line tells."""
    found = re.search(rf"^{pattern}$", text, re.MULTILINE)
    assert found, pattern
    return float(found[1])


def test_bodies_whose_peaks_are_limited(
    user: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARENT_PID", "none")
    result = run(user, BODIES)
    result.assert_outcomes(passed=4, failed=8, skipped=1, xfailed=1)
    text = result.stdout.str()
    assert [told for told in TOLD_OF_BODIES if told not in text] == []
    during, mib = "during the test's body", r"(\d+\.\d+) MiB"
    too_much = rf"rss \(exact\) grew by {mib} {during}, more than its limit of 60\.000 MiB"
    assert 80 <= grew_mib(text, too_much) < 90
    for metric in (r"rss \(exact\)", r"anon \(sampled\)"):
        in_children = (
            rf"{metric} grew by \d.* {during}, and its child processes had {mib} of private memory"
            r" \(sampled\), more than its limit of 100\.000 MiB"
        )
        assert 200 <= grew_mib(text, in_children) < 220
    head = r"^phase +time +peak RSS +anonymous at end +cgroup peak +CUDA peak$"
    assert re.search(head, text, re.MULTILINE)
    assert re.search(r"^apply +\d.* MiB +\d+\.\d+ MiB +- +-$", text, re.MULTILINE)


def test_loads_and_functions_are_measured(user: pytest.Pytester) -> None:
    user.makepyfile(halve="def use(model):\n    return model.half()\n")
    result = run(
        user,
        """
        from weighin.errors import HarnessError

        def load(mib, *, keep): tensor = ones(mib)

        def fail(): raise KeyError("gone")

        def test_a_function(weighin):
            run = weighin.measure(load, 50, keep=True)
            assert run.outcome == "ok"
            assert 50 <= (run.peaks.rss_bytes - run.baseline.rss_bytes) / 2**20 < 60
            assert weighin.measure(fail).message.startswith("KeyError: 'gone' (")

        def test_the_peak_of_a_function_that_fails(weighin):
            run = weighin.measure(fail)
            assert run.above_import_bytes < 2**40

        def test_a_strategy(weighin):
            run = weighin.measure("mmap_assign", model="gpt2-tiny")
            assert run.outcome == "ok" and run.model_bytes == 1891840
            assert [phase.name for phase in run.phases if phase.name != "other"][-2:] == ["touch", "forward"]
            assert run.peaks.rss_bytes <= 1.2 * run.model_bytes

        def test_a_use(weighin):
            run = weighin.measure("baseline", model="gpt2-tiny", use="./halve.py")
            assert run.outcome == "ok", run.message
            assert [phase.name for phase in run.use_phases] == ["use: halve"]
            assert run.use_phases[-1].peak_rss_bytes > run.model_bytes

        def test_what_cannot_be_measured(weighin):
            with pytest.raises(HarnessError, match="no strategy is called 'mmap_asign'"):
                weighin.measure("mmap_asign")
            with pytest.raises(HarnessError, match="cannot be called in another process"):
                weighin.measure(lambda: None)
            with pytest.raises(HarnessError, match="cannot enforce a RAM limit"):
                weighin.measure(load, 1, keep=True, ram="2g")
        """,
    )
    result.assert_outcomes(passed=3, failed=2)
    text = result.stdout.str()
    assert (
        "AssertionError: above_import_bytes cannot be read, because fail did not end ok: strategy_failed: KeyError: 'gone' ("
    ) in text
    assert "weighin: mmap_assign ok" in text  # the phases, behind the assertion on the model's size
    assert re.search(r"^touch +\d.* MiB +\d+\.\d+ MiB +- +-$", text, re.MULTILINE)


def test_a_setting_limits_all_tests_of_a_session_whose_workers_get_this_pythons_path(
    user: pytest.Pytester,
) -> None:
    (user.path / "lib").mkdir()
    (user.path / "lib" / "mine.py").write_text("def load(): return 1\n")
    user.makeini("[pytest]\nlimit_peak = 60MiB\npythonpath = lib\naddopts = --option-of-mine\n")
    user.makeconftest(
        "def pytest_addoption(parser): parser.addoption('--option-of-mine', action='store_true')"
    )
    result = run(
        user,
        """
        import mine

        def test_fits():
            kept = ones(40)
            assert mine.load() == 1

        def test_too_much(): kept = ones(80)

        class Case(unittest.TestCase):
            def test_too_much_in_a_case(self): kept = ones(80)

        @limit("1GiB")
        def test_with_a_limit_of_its_own(): kept = ones(80)
        """,
    )
    result.assert_outcomes(passed=2, failed=2)
    too_much = "rss * MiB during the test's body, more than its limit of 60.000 MiB"
    result.stdout.fnmatch_lines(too_much)


@pytest.mark.cgroup
def test_what_the_kernel_kills_is_the_tests_failure(user: pytest.Pytester) -> None:
    result = run(
        user,
        """
        @limit("1GiB", ram="500m")
        def test_killed(): ones(1024)

        @limit("120MiB", metric="cgroup")
        def test_fits(): ones(100)

        @limit("1GiB", ram="600m")
        def test_goes_on(): assert child(700) == -9

        @limit("1GiB", ram="600m")
        def test_fails_without_it(): assert child(700) == 0

        def test_a_function(weighin):
            run = weighin.measure(child, 700, ram="600m")
            assert run.outcome == "child_killed"
            assert run.peaks
        """,
        isolation="cgroup",
    )
    result.assert_outcomes(passed=1, failed=4)
    text = result.stdout.str()
    assert (
        "the process of the test ended before pytest could report: oom_killed: killed by the kernel"
        " for lack of memory in phase 'body'"
    ) in text
    killed = (
        r"; the kernel killed python\S* \(process \d+\) with \d+\.\d+ MiB of anonymous memory;"
        r" the peak of the cgroup was 600\.000 MiB$"
    )
    child_killed = (
        "child_killed: the kernel killed 1 process of this measurement for lack of memory"
    )
    assert re.search(rf"^{child_killed}{killed}", text, re.MULTILINE)
    assert re.search(rf"^E +AssertionError: peaks cannot be read, .*{killed}", text, re.MULTILINE)


def test_a_body_in_docker_is_refused_with_its_repair(user: pytest.Pytester) -> None:
    user.makeini("[pytest]\nweighin_isolation = docker\nlimit_peak = 1GiB\n")
    user.makepyfile("def test_body(): ...")
    result = user.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    assert (
        "a test's body cannot run in Docker: a container cannot write the test's report\n"
        "use --weighin-isolation cgroup or process, or measure a strategy: weighin.measure(...)"
    ) in result.stdout.str()


def test_a_test_that_breaks_pytest_off_fails(user: pytest.Pytester) -> None:
    result = run(
        user,
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        limited = limit("1GiB")

        @limited
        def test_raises(): raise KeyboardInterrupt
        @limited
        def test_is_interrupted(): signal.raise_signal(signal.SIGINT)
        @limited
        def test_exits(): pytest.exit("stop", 0)
        def test_after(): pass
        """,
    )
    result.assert_outcomes(passed=1, failed=3)
    said = r"pytest in the test's process ended with exit code (\d)"
    ends = re.findall(said, result.stdout.str())
    assert sorted(ends)[-2:] == ["2", "2"] and "0" in ends
