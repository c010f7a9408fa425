"""Try every layout with every verb, and write the page "What weighin reads": ``make checkpoints``.

Examples:
  python tests/checkpoints --out docs/checkpoints.md
  python tests/checkpoints --only "ten dtypes" --verbs inspect,convert
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import page  # noqa: E402
from layouts import VERBS, every  # noqa: E402
from tried import Missing, server, tried  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="layouts with this text in their name or their group")
    parser.add_argument("--verbs", default=",".join(VERBS))
    parser.add_argument("--out", type=Path, help="write the page to this file")
    options = parser.parse_args()
    chosen = [one for one in every() if (options.only or "") in f"{one.group} {one.name}"]
    answers, missing = {}, {}
    with server() as forks:
        for number, layout in enumerate(chosen, 1):
            with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
                try:
                    found = tried(layout, Path(folder), forks, options.verbs.split(","))
                except Missing as error:
                    missing[layout.name] = str(error)
                    print(f"[{number}/{len(chosen)}] {layout.name}: needs {error}", flush=True)
                    continue
                answers[layout.name] = {
                    verb: page.masked(one, Path(folder)) for verb, one in found.items()
                }
            states = " ".join(f"{verb}:{one.state}" for verb, one in found.items())
            print(f"[{number}/{len(chosen)}] {layout.name}: {states}", flush=True)
            for verb, one in found.items():
                if one.state == "WRONG":
                    print(f"    {verb}: {one.words}", flush=True)
    wrong = sum(one.state == "WRONG" for found in answers.values() for one in found.values())
    print(f"{len(answers)} layouts, {wrong} wrong answers, {len(missing)} without their package")
    if options.out:
        options.out.write_text(page.text(chosen, answers))
    return int(bool(wrong or missing))


if __name__ == "__main__":
    sys.exit(main())
