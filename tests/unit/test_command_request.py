"""The plan of a run of a command."""

import pytest

from weighin.run.command_request import label_of


@pytest.mark.parametrize(
    ("command", "label"),
    [
        ("train.py", "train.py"),
        ("./bin/vllm serve model", "vllm"),
        ("python train.py --epochs 3", "train.py"),
        ("/usr/bin/python3.11 -u scripts/train.py", "train.py"),
        ("python -W ignore -X dev train.py", "train.py"),
        ("python -Wignore train.py", "train.py"),
        ("python -m pytest tests", "pytest"),
        ("python -um pytest tests", "pytest"),
        ("python -mpytest tests", "pytest"),
        ("python -c CODE", "python"),
        ("python -uc CODE", "python"),
        ("python -IcCODE argument", "python"),
        ("python -m", "python"),
        ("python - argument", "python"),
        ("python", "python"),
        ("bash -euo pipefail script.sh", "script.sh"),
        ("bash -lc LINE", "bash"),
        ("sh -ec LINE", "sh"),
        ("perl -ne CODE file", "perl"),
        ("ruby -r json script.rb", "script.rb"),
        ("node --no-warnings script.js", "script.js"),
        ("node -p CODE", "node"),
        ("node --eval CODE", "node"),
    ],
)
def test_the_label_is_the_script_or_the_program_and_never_code(command: str, label: str) -> None:
    assert label_of(command.split()) == label
