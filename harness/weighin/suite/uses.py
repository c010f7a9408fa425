"""Find uses of a model (what follows a load) by name or by path, without importing their files."""

from pathlib import Path

from weighin.cell import FORK, NONE, TO_DEVICE, USES, Cell
from weighin.errors import ConfigError, UnknownName
from weighin.suite import user_code


def chosen(names: list[str]) -> dict[str, str]:
    """Return the path of each use's file, by the use's name; empty for a use of weighin.

    Raises:
        UnknownName: a name is neither a file nor one of weighin's own uses.
        ConfigError: a user's file has no function ``use``, or the same name as another use.
    """
    found: dict[str, str] = {}
    for name in names:
        if not (name.endswith(".py") or "/" in name):
            if name not in (*USES, NONE):
                raise UnknownName(
                    "use", name, [*USES, NONE], "for a file of your own: --use ./mine.py"
                )
            found[name] = ""
            continue
        path = Path(name).expanduser().resolve()
        example = "see docs/results.md for an example of 3 lines"
        user_code.parse(path, "use", "use(model)", example)
        if path.stem in (*USES, NONE) or found.get(path.stem, str(path)) != str(path):
            raise ConfigError(
                f"two uses are called {path.stem!r}, one of them {path}",
                "rename the file: a use's name is its file's name",
            )
        found[path.stem] = str(path)
    return found


def obstacle(cell: Cell) -> str:
    """Return why the cell's use cannot follow the load; empty if it can."""
    is_on_gpu = cell.device != "cpu"
    if cell.use and cell.ranks > 1:
        return f"weighin measures the use {cell.use} only in one process: --ranks 1"
    if cell.use == TO_DEVICE and is_on_gpu:
        return (
            "to-device moves a model from the CPU to the GPU, but the model is on the GPU already"
        )
    if cell.use == FORK and is_on_gpu:
        return "a forked process cannot use a model on the GPU"
    return ""
