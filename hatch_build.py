"""Add project URLs and the README to the package's metadata when hatchling builds the package.

PyPI shows the README without the files beside it, so that relative links and pictures would be dead:
the hook makes the README's links absolute. GitHub Actions names the repository and the commit in environment
variables. Elsewhere, set ``WEIGHIN_REPOSITORY=https://github.com/OWNER/weighin``. Without these
variables, the README stays unchanged and the package has no URLs.

hatchling itself loads this file, so that no plugin has to be installed.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_TARGET = re.compile(r"(?<=\]\()(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")
_PICTURES = (".png", ".svg")


class RepositoryAddresses(MetadataHookInterface):
    """Sets the metadata ``readme`` and ``urls``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two keys to the ``project`` table; hatchling calls this method once in a build."""
        root = Path(self.root)
        readme = (root / "README.md").read_text(encoding="utf-8")
        repository, commit = find_repository(os.environ)
        if repository:
            readme = with_addresses(readme, root, repository, commit)
            metadata["urls"] = urls(repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def find_repository(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the repository's URL and the commit to link to; an empty URL if no variable names one."""
    if chosen := environment.get("WEIGHIN_REPOSITORY", ""):
        return chosen.rstrip("/"), "HEAD"
    if name := environment.get("GITHUB_REPOSITORY", ""):
        server = environment.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{name}", environment.get("GITHUB_SHA", "HEAD")
    return "", ""


def with_addresses(readme: str, root: Path, repository: str, commit: str) -> str:
    """Return the README with absolute links in place of links to files of the repository."""

    def absolute(match: re.Match[str]) -> str:
        path, anchor = match["path"], match["anchor"] or ""
        if not (root / path).exists():  # a URL, or Python code in a code block
            return match[0]
        view = "raw" if path.endswith(_PICTURES) else "blob"
        return f"{repository}/{view}/{commit}/{path}{anchor}"

    return _TARGET.sub(absolute, readme)


def urls(repository: str) -> dict[str, str]:
    """Return the links that PyPI shows beside the package."""
    return {
        "Source": repository,
        "Documentation": f"{repository}/tree/HEAD/docs",
        "Changelog": f"{repository}/blob/HEAD/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
