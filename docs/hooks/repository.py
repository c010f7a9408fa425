"""Pages of the site that lie elsewhere in the repository, and the links between all of them.

A page is written once, where a reader of the repository looks for it: the README at the top is the
site's start. Links follow the repository; here they become links of the site. A picture that a page
shows is copied, and any other file that it links to becomes a page below source/.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = {
    "README.md": "index.md",
    "strategies/README.md": "strategies.md",
    "results/README.md": "records.md",
    "benchmarks/README.md": "benchmarks.md",
    "docker/README.md": "docker.md",
    "harness/README.md": "code.md",
    "tests/README.md": "tests.md",
    "tests/checkpoints/layouts.md": "layouts.md",
    "tests/zoo/zoo.md": "zoo.md",
    "CHANGELOG.md": "changelog.md",
}
"""Where a page of the repository is on the site, for those outside of docs/."""
REPORT: Final = "results/published/gpt2-xl-8GiB/records.jsonl"
"""A link to this run's records leads to its report.html, which ``example.py`` makes."""
REPORT_ON_SITE: Final = "example/report.html"

_LINKS: Final = re.compile(
    r"^```.*?^```|(?P<text>!?\[(?:[^\]\[`]|`[^`]*`)*\])\((?P<target>[^)\s]+)\)|`[^`\n]+`",
    re.DOTALL | re.MULTILINE,
)
"""Links, and code, in which nothing is a link."""
_GENERATED: Final = re.compile(r"^<!--.*?-->\n", re.MULTILINE)  # around the tables that we fill
_PICTURES: Final = (".png", ".svg")
_OTHERS: Final = "source/"
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/, and all pictures and source files that pages name."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    unread = [*files.documentation_pages()]
    while unread:
        for path in _linked(unread.pop()):
            if files.get_file_from_path(_on_site(path)) is None:
                files.append(file := _file(path, config))
                if path.endswith(".md"):
                    unread.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into links of the site."""
    del config, files
    here, site_folder = _in_repository(page.file), posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path, anchor = _resolve(here, match["target"] or "")
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return match["text"].strip("[]")  # a folder has no page
        target = posixpath.relpath(_on_site(path), site_folder or ".")
        return f"{match['text']}({target}{anchor})"

    return _LINKS.sub(link, _GENERATED.sub("", markdown))


def _linked(page: File) -> Iterator[str]:
    """Yield the repository's files outside of docs/ that a page links to, but for the report."""
    for match in _LINKS.finditer(page.content_string):
        path, _ = _resolve(_in_repository(page), match["target"] or "")
        if path and path != REPORT and not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def _file(path: str, config: MkDocsConfig) -> File:
    """Return a file of the repository as one of the site: as it is, or as a page that lists it."""
    if path.endswith((".md", *_PICTURES)):
        return File.generated(config, _on_site(path), abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    listing = f"# {path}\n\n````{_LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n````\n"
    return File.generated(config, _on_site(path), content=listing)


def _resolve(here: str, target: str) -> tuple[str | None, str]:
    """Return the repository's path that a link leads to, and its anchor; None where it leads out."""
    path, mark, anchor = target.partition("#")
    if not path or ":" in path:
        return None, ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(here), path)), mark + anchor


def _in_repository(file: File) -> str:
    """Return where a page of the site is in the repository."""
    sources = {page: path for path, page in PAGES.items()}
    if file.src_uri in sources:
        return sources[file.src_uri]
    if file.src_uri.startswith(_OTHERS):
        return file.src_uri.removeprefix(_OTHERS)
    return f"docs/{file.src_uri}"


def _on_site(path: str) -> str:
    """Return where a file of the repository is on the site."""
    if path == REPORT:
        return REPORT_ON_SITE
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(_PICTURES):
        return path
    return f"{_OTHERS}{path}" if path.endswith(".md") else f"{_OTHERS}{path}.md"
