"""Make a Docker image of this machine's own programs, as no registry can be reached everywhere."""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from weighin.isolation.docker import connect


def make(name: str, programs: tuple[str, ...], **settings: str) -> None:
    """Import an image with these programs in /bin, and the libraries that they need.

    ``settings`` are instructions of a Dockerfile, such as ENV="MODE=slow".
    """
    with tarfile.open(fileobj=(content := io.BytesIO()), mode="w", dereference=True) as file:
        (folder := tarfile.TarInfo("tmp")).type = tarfile.DIRTYPE
        folder.mode = 0o1777
        file.addfile(folder)
        libraries = set[str]()
        for program in programs:
            path = Path(shutil.which(program) or program).resolve()
            file.add(path, f"bin/{program}")
            listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
            libraries |= {*re.findall(r"(/\S+) \(0x", listed.stdout)}
        for library in libraries:
            file.add(library, library.lstrip("/"))
    client = connect()
    changes = [f"{instruction} {value}" for instruction, value in settings.items()]
    repository, tag = name.split(":")
    client.import_image_from_data(content.getvalue(), repository, tag, changes)
    client.close()


def remove(name: str) -> None:
    client = connect()
    client.remove_image(name)
    client.close()
