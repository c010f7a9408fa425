"""A command of weighin typed within this process, for tests of what it says."""

import re
import shlex

from click.testing import CliRunner

from weighin.cli import app
from weighin.errors import HarnessError


def typed(*words: object, columns: int = 80, **variables: str) -> tuple[int, str]:
    """Type a command, as one text or word by word; return its exit code, and what is shown without colours.

    An error of ours ends that text, and has its own exit code. Any other exception is raised.
    """
    line = words[0] if len(words) == 1 else shlex.join(map(str, words))
    environment = {"COLUMNS": str(columns), "NO_COLOR": "1"} | variables
    done = CliRunner().invoke(app.app, shlex.split(str(line)), env=environment)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
    if isinstance(done.exception, HarnessError):
        return done.exception.exit_code, shown + str(done.exception)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, shown
