"""Define the style that all pictures share: size, colours, title above, caption below.

A strategy has the same colour in all pictures. No information is shown by colour alone.
"""

import hashlib
import re
import textwrap
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from weighin.report import captions, operations
from weighin.report.rows import DIMENSIONS, Row, values, varying
from weighin.units import GIB

if TYPE_CHECKING:  # the import of matplotlib takes half a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN: Final = 9.0  # 1800 pixels, twice the width of a README on a page
DPI: Final = 200
MAX_PANELS: Final = 12
INK: Final = "#333333"
GREY: Final = "#7F7F7F"
EDGE: Final[dict[str, Any]] = {"edgecolor": INK, "linewidth": 0.6}
# Each combination of these properties has a panel; formats and options are in the labels of rows.
SCENE: Final = tuple(name for name in DIMENSIONS if name not in ("format", "options"))

# The colours of Okabe and Ito, then of Tol, which colour-blind readers can tell apart.
_COLOURS: Final = {
    "baseline": GREY,
    "sequential": "#E69F00",
    "meta_copy": "#D55E00",
    "mmap_assign": "#0072B2",
    "per_param": "#009E73",
    "streaming": "#CC79A7",
    "transformers": "#B8860B",
    "diffusers": "#B8860B",
    "timm": "#B8860B",
    "load_assign": "#56B4E9",
    "per_param_mmap": "#117733",
    "per_module": "#999933",
    "dcp": "#332288",
    "safetensors_mmap": "#44AA99",
    "safetensors_copy": "#882255",
    "sharded": "#DDCC77",
    "eager": "#661100",
    "prefetch_mmap": "#88CCEE",
    "safetensors_pread": "#AA4499",
    "safetensors_load_model": "#CC6677",
    "runai": "#6699CC",
    "fastsafetensors": "#F0E442",
    "instanttensor": "#000000",
    "tensorizer": "#BBBBBB",
    "accelerate": "#7A7A00",
    "rank0_broadcast": "#D55E00",
    "staggered": "#E69F00",
    "shared_memory": "#009E73",
    "dcp_fsdp": "#332288",
    "transformers_fsdp": "#B8860B",
    "torch_save": "#E69F00",
    "safetensors": "#882255",
}
_FALLBACK: Final = (
    "#88CCEE", "#CC6677", "#AA4499", "#661100", "#6699CC", "#888888",
)  # fmt: skip
_PATH: Final = re.compile(rb' d="[^"]*"')
_DECIMALS: Final = re.compile(rb"(\.\d\d)\d+")
_LINE_IN: Final = 0.16
_TITLE_IN: Final = 0.34
_LEGEND_ROW_IN: Final = 0.24


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
    """Return the text with dollar signs escaped, so that matplotlib does not parse mathematics."""
    return text.replace("$", r"\$")


def save(figure: "Figure", file: BinaryIO, kind: str) -> None:
    """Write a picture as ``kind``, "png" or "svg"; an SVG contains its text as text, and no date."""
    from matplotlib import rc_context

    about = {"Date": None} if kind == "svg" else None
    drawn = BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "weighin"}):
        figure.savefig(drawn, format=kind, dpi=DPI, facecolor="white", metadata=about)
    file.write(_rounded(drawn.getvalue()) if kind == "svg" else drawn.getvalue())


def _rounded(svg: bytes) -> bytes:
    """Return an SVG whose path coordinates are cut to two decimals, which makes the file smaller."""
    return _PATH.sub(lambda path: _DECIMALS.sub(rb"\1", path[0]), svg)


def new_figure(height_in: float, rows: int, columns: int, **options: Any) -> tuple["Figure", Any]:
    """Return a matplotlib figure of width ``WIDTH_IN``, and the axes of its panels as an array.

    The figure is not part of pyplot's global state. ``height_in`` is the height of all panels in
    inches; ``dress`` adds room for the texts around the panels.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def tidy(axes: "Axes") -> None:
    """Remove the upper and the right border of a panel."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, colors=INK)


def frame_curves(axes: "Axes", across: str, up: str, *, log_seconds: bool = False) -> None:
    """Label the axes of a panel and draw a grid; with ``log_seconds``, the y axis is logarithmic."""
    from matplotlib.ticker import FixedLocator

    if log_seconds:
        axes.set_yscale("log")
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    tidy(axes)


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
    figure.text(0.008, 0.06 / height, "\n".join(wrapped), va="bottom", fontsize=7.5, color=INK)
    if handles:
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.0, legend_y), ncols=columns,
            fontsize=8, frameon=False, columnspacing=1.4, handlelength=1.8, borderaxespad=0.2,
        )  # fmt: skip


def headline(rows: Sequence[Row], subject: str) -> str:
    """Return the title of a picture: ``subject``, then model and RAM limit, each if all rows share it."""
    changing, first = varying(rows), rows[0]
    size = captions.model_size(rows)
    changing += [name for name in operations.first_of(rows).lacks if name == "model"]
    model = "" if "model" in changing else " " + captions.dimension("model", first["model"], size)
    limit = captions.dimension("ram_limit_bytes", first["ram_limit_bytes"])
    return f"{subject}{model}" + ("" if "ram_limit_bytes" in changing else f", {limit}")


def scenes(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Group rows that are equal in all ``SCENE`` settings; yield the title and rows of each group."""
    changing = varying(rows)
    yield from captions.apart(rows, [name for name in SCENE if name in changing])


def extent_gib(group: Sequence[Row]) -> float:
    """Return the largest memory in GiB that the axis of a panel must show."""
    kind = operations.first_of(group)
    marks = (f"{kind.peak[0]}_max", "peak_cuda_allocated_bytes", "model_bytes")
    bars = ((row[kind.held[0]] or 0) + (row["file_sampled_bytes"] or 0) for row in group)
    data: int = max(*bars, *(row[name] or 0 for row in group for name in marks))
    limit: int = group[0]["ram_limit_bytes"] or 0
    # A limit above twice the data is only named at the edge, because its line would shorten the bars.
    return max(data, limit if limit <= 2 * data else 0) / GIB or 1.0


def empty_figure(title: str) -> "Figure":
    """Return a picture with the words "no cells were measured"."""
    figure, grid = new_figure(0.8, 1, 1)
    grid[0][0].axis("off")
    grid[0][0].text(0.5, 0.5, "no cells were measured", ha="center", va="center", color=INK)
    dress(figure, title, [], [])
    return figure


def row_labels(group: Sequence[Row]) -> list[str]:
    """Return a label for each row: the strategy, with format or options if its rows differ in them."""
    labels = []
    for row in group:
        same = [other for other in group if other["strategy"] == row["strategy"]]
        extra = [row[name] for name in ("format", "options") if len(values(same, name)) > 1]
        labels.append(" ".join(filter(None, [row["strategy"], *extra])))
    return labels
