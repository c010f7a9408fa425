"""Start a worker that sees its checkpoint through read-only bind mounts, if this user may mount."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from weighin import formats

_SCRIPT = (
    'while [ "$1" != -- ]; do mount -o bind,ro "$1" "$1" || exit; shift; done; shift; exec "$@"'
)
_MOUNTING = ("unshare", "--mount", "/bin/sh", "-c", _SCRIPT, "weighin")


@cache
def is_possible() -> bool:
    """Tell whether this process may mount, as root may; in a container, only with --privileged."""
    command = (*_MOUNTING, sys.executable, "--", "true")
    if os.geteuid():
        return False
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # util-linux is not installed
        return False


def wrapped(command: tuple[str, ...], checkpoint: str, manifest: str = "") -> tuple[str, ...]:
    """Return a command that runs ``command`` with the checkpoint mounted read-only.

    If the checkpoint lies in its manifest's folder, weighin made it, and the whole folder is
    mounted read-only. The command has a mount namespace of its own, so the mounts end with the
    command. If this user may not mount, or no checkpoint exists, the result is ``command`` itself.
    """
    path = Path(checkpoint)
    if not (is_possible() and checkpoint and path.exists()):
        return command
    folder = Path(manifest).parent
    if manifest and path.is_relative_to(folder):
        paths = [folder]
    else:
        paths = formats.files(path) if path.suffix == ".json" else [path]
    return (*_MOUNTING, *(str(each.resolve()) for each in paths), "--", *command)
