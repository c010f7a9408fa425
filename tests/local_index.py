"""A folder of wheels from which pip installs without network: releases of a package that nobody else has."""

import base64
import hashlib
import zipfile
from pathlib import Path

LOADER = """
import torch

COPIES = {copies}

def read(path):
    return [torch.load(path) for _ in range(COPIES)]
"""
BROKEN = "raise ImportError('needs a library that is not here')\n"


def release(index: Path, version: str, code: str, name: str = "tinyloader") -> None:
    """Write the wheel of one release of a package with one module into the folder ``index``."""
    index.mkdir(exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": code,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        rows.append(f"{path},sha256={digest.decode()},{len(text)}\n")
    files[f"{about}/RECORD"] = "".join(rows) + f"{about}/RECORD,,\n"
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


def of_copies(index: Path, version: str, copies: int) -> None:
    """Write a release that reads a checkpoint ``copies`` times, and keeps all."""
    release(index, version, LOADER.format(copies=copies))


def variables(index: Path) -> dict[str, str]:
    """Return the environment variables with which pip looks into the folder ``index`` alone."""
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": "/dev/null"}
