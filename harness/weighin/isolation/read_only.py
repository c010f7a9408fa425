"""Let a worker see its checkpoint through read-only bind mounts, where this user may mount."""

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
    """Tell whether this process may mount, which needs root and, in a container, --privileged."""
    command = (*_MOUNTING, sys.executable, "--", "true")
    if os.geteuid():
        return False
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # util-linux is not installed
        return False


def wrapped(command: tuple[str, ...], checkpoint: str, manifest: str = "") -> tuple[str, ...]:
    """Return a command that runs ``command`` with the checkpoint mounted read-only.

    A checkpoint in the folder of its manifest is one that weighin made: the whole folder is then
    read-only. The mounts are in a mount namespace of the command's own, and end with it. Without
    the permission to mount, the result is ``command``.
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
