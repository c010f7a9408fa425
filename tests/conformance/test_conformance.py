"""Test with random modules and checkpoints that load_streaming gives the same model as torch.

WEIGHIN_DRAWS is the number of cases, 300 by default (`make conformance DRAWS=20000`).
test_known_hard.py has the difficult cases by name.
"""

import os
from pathlib import Path

from cases import Case, cases, check
from hypothesis import HealthCheck, example, given, settings
from known import KNOWN

DRAWS = int(os.environ.get("WEIGHIN_DRAWS") or 300)


@settings(
    max_examples=DRAWS,
    deadline=None,
    print_blob=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,  # each draw writes its checkpoint anew
    ],
)
@given(case=cases())
@example(case=KNOWN["views at offsets of a flat tensor"])
@example(case=KNOWN["tied names with different values: the last one wins"])
def test_loads_leave_the_model_that_torch_leaves(case: Case, disk: Path) -> None:
    check(case, disk)
