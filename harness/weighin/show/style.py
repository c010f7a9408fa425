"""The style that all pictures share. No information is shown by colour alone."""

import hashlib
import re
import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from weighin.records.series import Row, varying
from weighin.show import words
from weighin.text import printable

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN: Final = 9.0  # 1800 pixels, twice the width of a README on a page
MAX_PANELS: Final = 12
LABEL_LENGTH: Final = 60  # characters
INK: Final = "#333333"
GREY: Final = "#7F7F7F"
EDGE: Final[dict[str, Any]] = {"edgecolor": INK, "linewidth": 0.6}
SMALL: Final[dict[str, Any]] = {"fontsize": 7.5, "color": INK}

# The colours of Okabe and Ito, then of Tol, which colour-blind readers can tell apart.
_COLOURS: Final = {
    "baseline": GREY, "sequential": "#E69F00", "meta_copy": "#D55E00", "mmap_assign": "#0072B2",
    "per_param": "#009E73", "streaming": "#CC79A7", "transformers": "#B8860B",
    "diffusers": "#B8860B", "timm": "#B8860B", "load_assign": "#56B4E9",
    "per_param_mmap": "#117733", "per_module": "#999933", "dcp": "#332288",
    "safetensors_mmap": "#44AA99", "safetensors_copy": "#882255", "sharded": "#DDCC77",
    "eager": "#661100", "prefetch_mmap": "#88CCEE", "safetensors_pread": "#AA4499",
    "safetensors_load_model": "#CC6677", "runai": "#6699CC", "fastsafetensors": "#F0E442",
    "instanttensor": "#000000", "tensorizer": "#BBBBBB", "accelerate": "#7A7A00",
    "rank0_broadcast": "#D55E00", "staggered": "#E69F00", "shared_memory": "#009E73",
    "dcp_fsdp": "#332288", "transformers_fsdp": "#B8860B", "torch_save": "#E69F00",
    "safetensors": "#882255",
}  # fmt: skip
_FALLBACK: Final = ("#88CCEE", "#CC6677", "#AA4499", "#661100", "#6699CC", "#888888")
_TITLE_IN, _LEGEND_ROW_IN, _LINE_IN = 0.34, 0.24, 0.16


def colour(strategy: str) -> str:
    """Return the colour of a strategy, which is the same in every picture of every run."""
    digest = hashlib.sha256(strategy.encode()).digest()
    return _COLOURS.get(strategy, _FALLBACK[digest[0] % len(_FALLBACK)])


def tint(shade: str) -> tuple[float, float, float]:
    """Return a lighter version of a strategy's colour, in which file-backed memory is drawn."""
    from matplotlib.colors import to_rgb

    red, green, blue = (1 - 0.38 * (1 - part) for part in to_rgb(shade))
    return red, green, blue


def verbatim(text: str) -> str:
    """Return the text printable, with dollar signs escaped, so that matplotlib parses no mathematics."""
    return printable(text, "\n").replace("$", r"\$")


def tip(artist: "Artist", text: str) -> None:
    """Give an artist a text, which report.html shows while the mouse is over it."""
    artist.set_gid(f"tip:{words.plain(text.replace(chr(10), ' · '))}")


def png(figure: "Figure") -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=200, facecolor="white")
    return file.getvalue()


def svg(figure: "Figure", inside: str = "") -> str:
    """Return a picture as SVG, with its text as text; in the page, ids begin with its name ``inside``."""
    from matplotlib import rc_context

    file = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "weighin"}):
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})
    text = re.sub(
        r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), file.getvalue().decode()
    )
    tips = re.compile(r'<g id="tip:([^"]*)">')
    if not inside:
        return tips.sub(r"<g><title>\1</title>", text)
    text = tips.sub(r'<g data-tip="\1">', text[text.index("<svg") :])
    return re.sub(r'((?<= id=")|(?<=href="#)|(?<=url\(#))', f"{inside}-", text)


def new_figure(
    heights_in: Sequence[float], columns: int = 1, **options: Any
) -> tuple["Figure", Sequence["Axes"]]:
    """Return a figure (no part of pyplot's global state), and its panels, row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, sum(heights_in)), layout="constrained")
    options |= {"squeeze": False, "height_ratios": heights_in}
    return figure, [*figure.subplots(len(heights_in), columns, **options).flat]


def tidy(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)


def dress(figure: "Figure", title: str, handles: Sequence[Any], lines: Sequence[str]) -> None:
    """Write the title and the legend above the panels, and the caption below the panels."""
    wrapped = [part for line in lines for part in textwrap.wrap(verbatim(line), 145)]
    columns = len(handles) if len(handles) <= 4 else 3
    legend_rows = -(-len(handles) // columns) if handles else 0
    above = _TITLE_IN + _LEGEND_ROW_IN * legend_rows
    below = _LINE_IN * len(wrapped) + 0.1
    height = figure.get_figheight() + above + below
    figure.set_figheight(height)
    if engine := figure.get_layout_engine():
        engine.set(rect=(0, below / height, 1, 1 - (above + below) / height))  # type: ignore[call-arg]
    title_y, legend_y = 1 - 0.08 / height, 1 - _TITLE_IN / height
    figure.text(0.008, title_y, verbatim(title), va="top", fontsize=11, fontweight="bold")
    figure.text(0.008, 0.06 / height, "\n".join(wrapped), va="bottom", **SMALL)
    if handles:
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.0, legend_y), ncols=columns,
            fontsize=8, frameon=False, columnspacing=1.4, handlelength=1.8, borderaxespad=0.2,
        )  # fmt: skip


def legend(*keys: tuple[object, str, dict[str, Any]]) -> list[Any]:
    """Return a handle for each key whose first item is true: its label, and the style of a patch or line."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    return [
        Patch(label=label, **EDGE, **style)
        if "facecolor" in style
        else Line2D([], [], label=label, **({"color": INK} | style))
        for is_drawn, label, style in keys
        if is_drawn
    ]


def headline(rows: Sequence[Row], subject: str) -> str:
    """Return the title of a picture: ``subject``, then model and RAM limit, each if all rows share it."""
    changing, first = varying(rows), rows[0]
    if "model" not in changing and "model" not in words.kind_of(rows).lacks:
        subject += " " + words.dimension("model", first["model"], words.model_size(rows))
    if "ram_limit_bytes" not in changing:
        subject += ", " + words.dimension("ram_limit_bytes", first["ram_limit_bytes"])
    return subject
