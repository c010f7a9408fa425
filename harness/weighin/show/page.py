"""Write the report of a run as one HTML file that needs no network, no other file, and no library.

Without scripts (``templates/script.js``), a browser shows the same tables and pictures.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib import resources
from string import Template
from typing import Final

from weighin import __version__
from weighin.records import run_folder
from weighin.records.series import Measured
from weighin.show import words
from weighin.show.report import FIGURES, document
from weighin.show.table import Table, escape

_FILES: Final = (run_folder.RECORDS, run_folder.PLAN, "summary.csv", "report.md")


def render(run: Measured, pictures: Mapping[str, str]) -> str:
    """Return the report of a run as HTML; ``pictures`` are SVGs by name."""
    title = escape(words.title(run.rows) if run.rows else "A run without cells")
    about = [[name, " | ".join(values)] for name, values in words.settings(run.results).items()]
    parts = document(run)
    last = [part for part in parts if part.title == FIGURES]
    last.insert(0, Table.of(("setting", "value"), about, names=2, title="Machine and software"))
    drawn = [
        f'<figure id="{name}" class="picture scroll" tabindex="0">{svg}</figure>\n'
        for name, svg in pictures.items()
    ]
    hint = '<p class="hint">Point at a mark to read its figures. Drag over a picture to zoom in; a double click shows all of it.</p>\n'
    sections = [
        (part.title, getattr(part, "kind", ""), part.html()) for part in parts if part not in last
    ]
    sections += [("Pictures", "", hint + "".join(drawn))] if drawn else []
    sections += [(part.title, "", part.html()) for part in last]
    body = ""
    for name, kind, content in sections:
        label, style_class = escape(name), f' class="{kind}"' if kind else ""
        head = f'<section aria-label="{label}"{style_class}>\n<h2>{label}</h2>\n'
        body += f"{head}{content}</section>\n"
    folder = [file for file in _FILES if (run.folder / file).exists()]
    links = ", ".join(f'<a href="{file}">{file}</a>' for file in folder)
    templates = resources.files("weighin.show") / "templates"
    page, script, css = (
        (templates / one).read_text(encoding="utf-8")
        for one in ("page.html", "script.js", "style.css")
    )
    return Template(page).substitute(
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
        title=title,
        css=css,
        shared=escape(words.shared(run)),
        body=body,
        run=escape(run.folder.resolve().name),
        links=links,
        script=script,
    )
