"""Define the settings of a run, which plan.json stores, so that a run can be resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from weighin.cell import ModelSpec
from weighin.formats.selection import WHOLE, Selection
from weighin.records.floor import Aim
from weighin.records.shard import Shard, parse
from weighin.run.command_settings import CommandSettings


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings that all cells of a run share: the ``settings`` of plan.json.

    Attributes:
        seed: the random seed of generated weights.
        checkpoint: the user's checkpoint; None for a generated one.
        checkpoints: the user's checkpoint of each model, by the model's title, if a suite names
            several.
        selection: the part of the user's checkpoint that has the weights (key and prefix).
        timeout_s: the time after which a cell is killed, in seconds.
        steady: whether weighin writes to free memory before each load, so that load times vary less.
        trace: whether every event of PyTorch's CUDA allocator is recorded.
        base_image: the base image of the cells' containers; None for weighin's default.
        strategy_paths: the path of each strategy's file, by the strategy's name.
        use_paths: for each use (step after the load) in a user's file, the file's path, by the
            use's name.
        python_path: the folders of the user's Python modules.
        mounts: paths of this machine that a container mounts read-only at the same path.
        within: the precision of a search of ``weighin floor``, as a share of the floor; else None.
        aim: the kind of floor (smallest limit) to search for (``weighin.records.floor.Aim``).
        engine: the name and settings of the engine that distributes the cells, such as Ray; empty
            if this machine runs the cells one by one.
        shard: the part of the plan that this run measures; None for the whole plan.
        storage: the folder for generated and converted checkpoints; None for weighin's cache.
        command: the settings of a run of commands; None for a run of loads or saves.
    """

    seed: int = 0
    checkpoint: Path | None = None
    selection: Selection = WHOLE
    timeout_s: float = 600.0
    steady: bool = False
    trace: bool = False
    base_image: str | None = None
    strategy_paths: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    within: float | None = None
    aim: Aim = Aim.ENDS
    engine: Mapping[str, Any] = field(default_factory=dict)
    shard: Shard | None = None
    command: CommandSettings | None = None
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    use_paths: Mapping[str, str] = field(default_factory=dict)
    storage: Path | None = None

    def checkpoint_of(self, model: ModelSpec) -> Path | None:
        """Return the user's checkpoint of a model; None if weighin generates the checkpoint."""
        own = self.checkpoints.get(model.title)
        return Path(own) if own else self.checkpoint

    def as_json(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        selection = values.pop("selection")
        values |= {"key": selection.key, "strip_prefix": selection.strip_prefix}
        values |= {
            name: str(values[name]) for name in ("checkpoint", "shard", "storage") if values[name]
        }
        if self.within is None:
            del values["aim"]
        if self.command:
            values["command"] = self.command.as_json()
        optional = ("within", "engine", "shard", "command", "checkpoints", "storage", "use_paths")
        return {name: one for name, one in values.items() if one or name not in optional}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        known = {one.name for one in fields(cls)}
        values = {name: one for name, one in found.items() if name in known and one is not None}
        for name, read in (
            ("checkpoint", Path),
            ("storage", Path),
            ("shard", parse),
            ("aim", Aim),
            ("python_path", tuple),
            ("mounts", tuple),
            ("command", CommandSettings.from_json),
        ):
            if name in values:
                values[name] = read(values[name])
        selection = Selection(found.get("key", ""), found.get("strip_prefix", ""))
        return cls(selection=selection, **values)

    @property
    def verb(self) -> str:
        """The command of weighin that makes a run with these settings: "bench", "run" or "floor"."""
        if self.within is not None:
            return "floor"
        return "run" if self.command else "bench"
