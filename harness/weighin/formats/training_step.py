"""Find the newest step in the folder of a training run. Trainers write the newest step's name into
a file:

=====================================  ==========================================
``latest``                             DeepSpeed: the name of the step's folder
``latest_universal``                   DeepSpeed: the name of a universal checkpoint
``latest_checkpointed_iteration.txt``  Megatron-LM: the step's number, or "release"
=====================================  ==========================================
"""

from pathlib import Path
from typing import Final

_TAGS: Final = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
_MOST_BYTES: Final = 1000


def named_step(path: Path) -> tuple[Path, Path] | None:
    """Return the file that names the newest step of a run, and the step's folder; None for no such file.

    The step's folder is in ``path``, and may be missing.
    """
    for name in _TAGS:
        text = _text(path / name)
        if not text or Path(text).name != text or "\0" in text:
            continue
        is_number = name == _TAGS[2] and text.isascii() and text.isdigit()
        return path / name, path / (f"iter_{int(text):07d}" if is_number else text)
    return None


def newest(path: Path) -> Path:
    """Return the folder of a training run's newest step; ``path`` itself if there is none."""
    step = named_step(path)
    return step[1] if step and step[1].is_dir() else path


def _text(file: Path) -> str:
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return ""
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""
