"""Run the test of each case that a stranger's use has shown, and print what came of it.

    python tests/cases

The cases are kinds of memory and faults that weighin once told wrongly. ``make test-all`` runs the
same tests among all others. They need cgroups and a C compiler, and take about five minutes.
"""

import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).parents[2]
_KERNEL: Final = "instrument/test_kernel_memory.py"
_ESCAPES: Final = "instrument/test_command_escapes.py"
_TRANSPARENT: Final = "integration/test_transparent_commands.py"

CASES: Final = {
    "sockets: unread data in sockets is need": f"{_KERNEL}::*sockets*",
    "pipes: data in pipes is need": f"{_KERNEL}::*pipes*",
    "page tables are need": f"{_KERNEL}::*tables*",
    "lockfile: locked file pages are need": f"{_KERNEL}::*locks*",
    "lazyfree: freed pages are no need": f"{_KERNEL}::*returns*",
    "memfd: shared memory that nobody maps": f"{_KERNEL}::*writes*",
    "grow: steps of 8 MiB up to a known peak": "instrument/test_command_amounts.py::*",
    "cow2: memory of forked processes' own is no copy": (
        "instrument/test_command_claims.py::test_memory_of_forked_processes_own_is_no_copy*"
    ),
    "inner_group: a limit below is none around": f"{_ESCAPES}::test_the_limit_of_a_cgroup_b*",
    "hf2: half of every tensor is refused": (
        "cases/test_adapters_and_ties.py::test_the_shards_of_two_ranks_are_refused"
    ),
    "ties: as transformers ties": "cases/test_adapters_and_ties.py::*tied*",
    "adapters: merged or refused as by peft": "cases/test_adapters_and_ties.py::*merged*",
    "S1, S2, S4: links in a stranger's run": "unit/test_run_of_a_stranger.py::*",
    "S5: control characters in a stranger's record": "unit/test_run_of_a_stranger.py::*",
    "W0: a test that breaks pytest off fails": (
        "integration/test_pytest_plugin.py::test_a_test_that_breaks_pytest_off_fails*"
    ),
    "W1: a process leaves the cgroup, or raises its limit": f"{_ESCAPES}::test_a_*",
    "W2, W2b: two runs in one folder": f"{_TRANSPARENT}::test_of_two_runs*",
    "W8: a broken-off repeat is no result": f"{_TRANSPARENT}::test_a_repeat_that_a_signal*",
    "R: rough inputs": "unit/test_rough_inputs.py::*",
}
"""The tests of each case: a file below tests/, and a pattern of names in it."""


def main() -> int:
    """Run the tests; return 1 if a case has no test, or one that does not pass."""
    files = sorted({test.partition("::")[0] for test in CASES.values()})
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = (
            sys.executable,
            "-m",
            "pytest",
            "--require",
            "cgroup",
            "--junit-xml",
            report.name,
        )
        here = [str(ROOT / "tests" / file) for file in files]
        subprocess.run((*command, *sys.argv[1:], *here), cwd=ROOT, check=False)
        tests = [*ElementTree.parse(report.name).getroot().iter("testcase")]
    worst = 0
    for case, test in CASES.items():
        file, _, pattern = test.partition("::")
        module = f"tests.{file.removesuffix('.py').replace('/', '.')}"
        mine = [one for one in tests if one.attrib["classname"] == module]
        found = [one for one in mine if fnmatchcase(one.attrib["name"], pattern)]
        passed = sum(len(one) == 0 for one in found)
        is_right = 0 < passed == len(found)
        worst = max(worst, not is_right)
        print(f"{'right' if is_right else 'WRONG'}  {case}: {passed} of {len(found)} tests pass")
    return worst


if __name__ == "__main__":
    sys.exit(main())
