"""Random conversions give the model that the reference gives, bit by bit, or are refused by both.

WEIGHIN_DRAWS is the number of cases of all kinds together.
"""

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from conversions import COMPARED, MAKERS, check
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model_differences import seed

DRAWS = int(os.environ.get("WEIGHIN_DRAWS") or 40)


@pytest.mark.filterwarnings("ignore")  # of from_pretrained and peft, about what was drawn
@pytest.mark.parametrize("kind", MAKERS)
def test_a_conversion_gives_what_the_reference_gives(kind: str) -> None:
    make, package = MAKERS[kind]
    if package:
        pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")

    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=-(-DRAWS // len(MAKERS)),
        deadline=None,
        print_blob=True,
        phases=[
            Phase.explicit,
            Phase.reuse,
            Phase.generate,
        ],  # a case prints its draws; shrinking takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(data=st.data(), number=st.integers(0, 2**16))
    def run(data: st.DataObject, number: int) -> None:
        seed(number)
        with tempfile.TemporaryDirectory() as folder:
            outcomes[check(make(data.draw, Path(folder)))] += 1

    run()
    print(*(f"{count} {what}" for what, count in outcomes.most_common()), sep="\n")
    assert 2 * outcomes[COMPARED] > outcomes.total()
