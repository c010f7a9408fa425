"""Try the faults, and print what came of each: ``make faults``.

Example:
  python tests/faults --only "its checkpoint"
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "harness")]

from campaign import Campaign, Tried, missing  # noqa: E402
from faults import every  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults with this text in their name or group")
    only = parser.parse_args().only
    chosen = [one for one in every() if only in f"{one.group}: {one.name}"]
    tried: list[Tried] = []
    left_out: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weighin-faults-") as name:
        campaign = Campaign(Path(name))
        (campaign.folder / "tmp").mkdir()
        campaign.start()
        for number, fault in enumerate(chosen, 1):
            if lacks := missing(fault):
                left_out[lacks] += 1
                continue
            one = campaign.tried(fault)
            tried.append(one)
            print(f"[{number}/{len(chosen)}] {row(one)}", flush=True)
    wrong = sum(bool(one.wrong) for one in tried)
    lost, left = sum(one.lost for one in tried), sum(len(one.left) for one in tried)
    print(
        f"{len(tried)} faults: {wrong} wrong outcomes, {lost} lost records, {left} left behind,"
        f" {sum(one.traceback for one in tried)} tracebacks"
    )
    for reason, count in left_out.items():
        print(f"left out: {count} faults: {reason}")
    return int(not all(one.right for one in tried))


def row(one: Tried) -> str:
    fault = one.fault
    ends = (f"{name} {outcome}" for name, (outcome, _) in fault.outcomes.items())
    expected = [f"exit {fault.code}", *ends]
    faults = [*one.wrong, *(f"left: {each}" for each in one.left)]
    faults += [f"{one.lost} lost records"] * bool(one.lost) + ["a traceback"] * one.traceback
    judged = "right" if one.right else "WRONG"
    columns = [fault.group, fault.name, ", ".join(expected), one.came, judged]
    return " | ".join(columns) + "".join(f"\n      {each}" for each in faults)


if __name__ == "__main__":
    sys.exit(main())
