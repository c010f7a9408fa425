"""Answer ``weighin recommend``: judge every strategy, and print the code of the best one."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import FORK, FORWARD, SYNTHESISED, Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.files import object_in
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned
from weighin.predict.client import FORK_ALONE, predict
from weighin.predict.prediction import Prediction
from weighin.recommend import candidates
from weighin.recommend.candidates import OWN_CODE, SAVED_AS, USUAL, Candidate, FitVerdict, Limits
from weighin.recommend.prior_runs import Evidence, find
from weighin.recommend.snippet import CannotWriteOut, pretrained_snippet, snippet
from weighin.show.table import Column, Entry, Table
from weighin.slow_disk import Pace
from weighin.stream import formats, hugging_face_folder, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.pretrained_library import TRANSFORMERS, WHOLE, Selection, library_in, library_of
from weighin.suite import registry
from weighin.units import format_bytes

ALLOWED: Final = ("resave", "packages", "weighin")
"""The words of --allow: each names a requirement that the recommended strategy may have."""

_KINDS: Final = {
    FitVerdict.FITS: "survives",
    FitVerdict.TOO_LARGE: "killed",
    FitVerdict.UNKNOWN: "dim",
}
SHOWN: Final = 5
"""The number of strategies that ``weighin recommend`` shows without --all."""
_AS_IT_IS: Final = Pace()
_USABLE: Final = (FitVerdict.FITS, FitVerdict.THRASHES, FitVerdict.BARELY)


@dataclass(frozen=True, slots=True)
class Question:
    """The model to load, the limits, and what a recommended strategy may require (``allow``).

    ``checkpoint`` is None for weights that weighin generates. What this machine measured in the runs
    below ``results`` replaces predictions. ``use`` is what follows the load and must fit, too, such as
    "adamw", with ``use_path`` of a user's own; it is empty for a load alone.
    """

    model: ModelSpec
    limits: Limits
    checkpoint: Path | None = None
    selection: Selection = WHOLE
    device: str = "cpu"
    dtype: str = "float32"
    allow: tuple[str, ...] = ALLOWED
    results: Path = Path("results")
    python_path: tuple[str, ...] = ()
    ranks: int = 1
    disk: Pace = _AS_IT_IS
    use: str = ""
    use_path: str = ""


@dataclass(frozen=True, slots=True)
class PriorKnowledge:
    """What is known whatever the limits: predictions, earlier runs, and texts on unreadable ones."""

    planned: tuple[Planned, ...]
    predictions: tuple[Prediction, ...]
    evidence: dict[tuple[str, str], Evidence]
    checkpoint_format: str
    left_out: tuple[str, ...] = ()
    holds_more: bool = False  # than tensors: the file, beside a module of the user's own


@dataclass(frozen=True, slots=True)
class Advice:
    """The answer of ``weighin recommend``: all allowed strategies, best first, and the best's code."""

    question: Question
    prior: PriorKnowledge
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The recommended strategy; None if no strategy is sure to work."""
        first = self.candidates[0] if self.candidates else None
        return first if first and first.verdict in _USABLE else None

    @property
    def code(self) -> str:
        """The code of the recommended strategy; empty if none is recommended."""
        return _code(self, self.best) if self.best else ""

    @property
    def saves_again(self) -> bool:
        """Whether the recommended strategy reads another format than the user's checkpoint has."""
        return self.best is not None and any(one.startswith(SAVED_AS) for one in self.best.asks)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on what the table does not show, such as how to convert the checkpoint first."""
        asked, prior = self.question, self.prior
        notes = [f"weighin left out a run that it cannot read: {one}." for one in prior.left_out]
        if asked.model.builder == SYNTHESISED:
            notes.append(
                f"{asked.model.name} is a checkpoint without the code of its model, so the answer"
                " ignores the cost of the constructor, buffers that are not in the checkpoint, and"
                " earlier measurements with the model's code. To include these: weighin recommend"
                f" --model package:builder --checkpoint {asked.checkpoint}"
            )
        if self.best and asked.checkpoint and self.saves_again:
            options = ["--format", self.best.format, *asked.selection.options]
            if _folder(asked):
                options += ["--keys", "model"]
                if _is_chosen(model := asked.model.kwargs):
                    options += ["--set", f"model_class={model['architecture']}"]
                options += ["--trust-remote-code"] * ("code" in model)
                if adapter := hugging_face_folder.adapter_of(asked.model):
                    options += ["--adapter", str(adapter)]
            notes.append(
                f"{self.best.strategy} reads a {self.best.format} checkpoint with the model's weights"
                f" alone. Write it once: weighin convert {quote(str(asked.checkpoint))}"
                f" weights{formats.suffix_of(self.best.format)} {' '.join(map(quote, options))}"
            )
        if found := quantised.of_model(asked.model):
            notes.append(f"The weights are {found.summary}.")
        if asked.ranks > 1 and self.best and registry.strategy(self.best.strategy).shares_load:
            notes.append(
                f"{self.best.strategy} needs the default process group: run the code with torchrun"
                f" --nproc-per-node {asked.ranks}, and call torch.distributed.init_process_group() first"
            )
        return tuple(notes)

    def as_json(self) -> dict[str, Any]:
        asked = self.question
        return {
            "model": asked.model.title,
            "device": asked.device,
            "dtype": asked.dtype,
            "ram_limit_bytes": asked.limits.ram_bytes,
            "vram_limit_bytes": asked.limits.vram_bytes,
            "ranks": asked.ranks,
            "disk_bytes_per_s": asked.disk.bytes_per_s,
            "disk_latency_ns": asked.disk.latency_ns,
            "use": asked.use or None,
            "recommended": self.best.strategy if self.best else None,
            "candidates": [asdict(one) for one in self.candidates],
            "code": self.code,
            "notes": list(self.notes),
        }


def gather(question: Question, say: Callable[[str], None]) -> PriorKnowledge:
    """Predict every strategy, and read earlier records.

    Raises:
        HarnessError: the checkpoint, the model or the records of a run cannot be read, or weighin
            cannot dequantise the weights, and no run has measured how a library loads them.
    """
    fmt = formats.detect(question.checkpoint) if question.checkpoint else "pt"
    planned = [*_planned(question, fmt)]
    left_out: list[str] = []
    whole = [replace(one, cell=replace(one.cell, options={})) for one in planned]
    evidence = find(question.results, whole[0].cell, left_out.append) if whole else {}
    found = quantised.of_model(question.model)
    if found and question.checkpoint and not (evidence or found.dequantises):
        raise found.error(question.checkpoint)
    if question.use == FORK and not any(one.anon_bytes for one in evidence.values()):
        raise ConfigError(*FORK_ALONE)
    say(f"predicting the memory and time of {len(planned)} strategies")
    predictions = predict(
        whole,  # a part of a file loads as a file that holds only this part
        checkpoint=question.checkpoint,
        selection=question.selection,
        python_path=question.python_path,
        report=lambda number, name: say(f"predicting {name} ({number + 1} of {len(planned)})"),
        forward=question.use == FORWARD,
        use_paths={question.use: question.use_path},
    )
    known = tuple(planned), tuple(predictions), evidence, fmt, tuple(left_out)
    return PriorKnowledge(*known, holds_more=_holds_more(question))


def _holds_more(question: Question) -> bool:
    """Tell whether the file has more than tensors, beside a module of the user's own."""
    if not question.checkpoint or question.selection or library_of(question.model.builder):
        return False
    return not formats.read(question.checkpoint).only_tensors


def advise(question: Question, prior: PriorKnowledge) -> Advice:
    """Judge every strategy under the question's limits; leave out those that need more than ``question.allow``."""
    known = [
        (one, prediction, prior.evidence.get((one.cell.strategy, one.cell.format)))
        for one, prediction in zip(prior.planned, prior.predictions, strict=True)
    ]
    speeds = candidates.behind(USUAL, question.disk)
    times_slower = candidates.slowness([(one, found) for _, one, found in known if found], speeds)
    judged = []
    for one, prediction, evidence in known:
        # A strategy that does not read the selected part itself, or unpickles values that torch.load may
        # refuse, needs the tensors as a checkpoint of their own.
        reads_more = "key" in one.strategy.options and not one.strategy.weights_only
        is_apart = prior.holds_more and not reads_more
        if question.selection:
            is_apart = not one.cell.options
        fmt = "" if is_apart else prior.checkpoint_format
        predicted_s = times_slower * candidates.predicted_ready_s(prediction, speeds)
        judged.append(
            candidates.assess(one.strategy, prediction, evidence, predicted_s, question.limits, fmt)
        )

    def is_allowed(candidate: Candidate) -> bool:
        asks = {"resave" if one.startswith(SAVED_AS) else one for one in candidate.asks}
        kinds = {one if one in ALLOWED else "packages" for one in asks - {OWN_CODE}}
        return kinds <= {*question.allow}

    return Advice(question, prior, tuple(candidates.ranked([*filter(is_allowed, judged)])))


def _code(advice: Advice, best: Candidate) -> str:
    question, prior, checkpoint = advice.question, advice.prior, advice.question.checkpoint
    pairs = zip(prior.planned, prior.predictions, strict=True)
    planned, predicted = next(one for one in pairs if one[0].cell.strategy == best.strategy)
    # Of a checkpoint alone, nobody knows what the constructor of its model does.
    knows_model = question.model.builder != SYNTHESISED
    info = registry.strategy(best.strategy)
    adapter = str(hugging_face_folder.adapter_of(question.model) or "")
    if checkpoint and (folder := _folder(question)) and info.maps_keys and not info.shares_load:
        model, is_gguf = question.model.kwargs, prior.checkpoint_format == gguf.NAME
        return pretrained_snippet(
            info, model["architecture"], device=question.device, dtype=question.dtype,
            folder=folder, gguf_file=checkpoint.name if is_gguf else "",
            auto=hugging_face_folder.auto_class(model["config"], model["architecture"]) if "code" in model else "",
            variant=hugging_face_folder.variant_of(checkpoint), is_chosen=_is_chosen(model),
            extra=library_in(model["config"]).extra, adapter=adapter,
            quantisation=None if is_gguf else quantised.dequantising(Path(folder)),
        )  # fmt: skip
    try:
        return snippet(
            info, device=question.device, dtype=question.dtype, adapter=adapter,
            # What the command of ``notes`` writes.
            checkpoint=f"weights{formats.suffix_of(best.format)}" if advice.saves_again else str(checkpoint or "model.pt"),
            options={} if advice.saves_again else planned.cell.options,
            keeps_dtypes=bool(hugging_face_folder.folder_library(question.model)),
            is_mixed=predicted.is_mixed or not knows_model,
            computes_buffers=predicted.computes_buffers or not knows_model,
        )  # fmt: skip
    except CannotWriteOut as why:
        text = f"# {info.name} cannot be written as one function: {why}."
        return f"{text} Its code is in {info.path}\n"


def _folder(question: Question) -> str | None:
    """Return the Hugging Face folder of both model and checkpoint; None if they are apart."""
    checkpoint = question.checkpoint
    if checkpoint is None or not hugging_face_folder.folder_library(question.model):
        return None
    folder, config = hugging_face_folder.folder_of(checkpoint), question.model.kwargs["config"]
    of_checkpoint = object_in(folder / hugging_face_folder.CONFIG)
    has_model = all(config.get(key) == value for key, value in of_checkpoint.items())
    variant = hugging_face_folder.variant_of(checkpoint)
    has_weights = hugging_face_folder.find_weights(folder, variant) == checkpoint
    is_gguf = gguf.is_file(checkpoint)
    return str(folder) if is_gguf or (of_checkpoint and has_model and has_weights) else None


def _is_chosen(model: Mapping[str, Any]) -> bool:
    """Return whether the user chose another class than config.json names."""
    named = (model["config"].get("architectures") or [""])[:1]
    return library_in(model["config"]) is TRANSFORMERS and model["architecture"] not in named


def parts(advice: Advice, most: int | None = None) -> Iterator[Table | str]:
    """Yield what ``weighin recommend`` prints: a table of ``most`` strategies, notes, and code."""
    asked = advice.question
    sources = {
        one.strategy: ", ".join(dict.fromkeys(filter(None, (one.memory_from, one.time_from))))
        for one in advice.candidates
    }
    known = [*dict.fromkeys(filter(None, sources.values()))]
    of_ranks = f" in {asked.ranks} ranks" if asked.ranks > 1 else ""
    of_ranks += f" from a disk of {asked.disk}" if asked.disk else ""
    of_ranks += f" for the use {asked.use}" if asked.use else ""
    load = f"{asked.model.title} as {asked.dtype} on {asked.device}{of_ranks}"
    notes = [f"Memory and time are {known[0]}."] if len(known) == 1 else []
    imports = (one.baseline_anon_bytes or 0 for one in advice.prior.predictions)
    if import_bytes := max(imports, default=0):
        notes.append(f"Memory includes {format_bytes(import_bytes, digits=1)} of imports.")
    if asked.disk:
        notes.append("Ready: the time until every byte of the model was read once.")
    if hidden := len(advice.candidates[most:]) if most else 0:
        notes.append(f"{hidden} more: --all")
    columns = [
        *(Column(name, is_name=True) for name in ("strategy", "verdict", "why")),
        *(Column(name) for name in ("margin", "ready")),
        *([] if len(known) == 1 else [Column("memory, time", is_name=True)]),
        Column("requires", is_name=True),
    ]
    rows: list[list[Entry | str]] = [
        [
            one.strategy,
            Entry(one.verdict, kind=_KINDS.get(one.verdict, "thrashes")),
            one.why,
            "-" if one.margin_bytes is None else format_bytes(one.margin_bytes, digits=1),
            "-" if one.ready_s is None else f"{one.ready_s:.1f} s",
            *([] if len(known) == 1 else [sources[one.strategy] or "-"]),
            ", ".join(
                name if name.startswith((SAVED_AS, OWN_CODE)) else f"package {name}"
                for name in one.asks
            ),
        ]
        for one in advice.candidates[:most]
    ]
    yield Table(f"{load}, {asked.limits}", columns, rows, notes)
    yield from (f"{note}\n" for note in advice.notes)
    if advice.best is None:
        yield _no_best(advice)
        return
    if advice.best.verdict is FitVerdict.THRASHES:
        yield f"No strategy fits with the whole model in memory. This one works, but slowly. {_help(asked.dtype)}\n"
    yield f"Use {advice.best.strategy}:\n"
    yield advice.code


def _no_best(advice: Advice) -> str:
    """Say why no strategy is recommended; only where memory is the reason, advise on memory."""
    asked = advice.question
    if not advice.candidates:
        allow = ",".join(asked.allow) or "none"
        return f"--allow {allow} leaves out every strategy that loads this model on {asked.device}."
    if all(one.verdict is FitVerdict.UNKNOWN for one in advice.candidates):
        why = ", ".join(dict.fromkeys(one.why for one in advice.candidates))
        return f"weighin cannot tell whether any strategy loads this model: {why}."
    return f"No strategy certainly fits. {_help(asked.dtype)}"


def _help(dtype: str) -> str:
    smaller = "A smaller dtype (--dtype bf16) or a" if dtype == "float32" else "A"
    return f"{smaller} higher limit may help."


def _planned(question: Question, checkpoint_format: str) -> Iterator[Planned]:
    selected = {key: value for key, value in asdict(question.selection).items() if value}
    found = quantised.of_model(question.model)
    adapter = hugging_face_folder.adapter_of(question.model)
    for info in registry.strategies().values():
        fmt = checkpoint_format if checkpoint_format in info.formats else info.formats[0]
        if (
            question.device.partition(":")[0] not in info.devices
            or (info.shares_load and question.ranks == 1)
            or (found and not info.loads(found))
            or (not info.merges if adapter else info.needs_adapter)
            # A dequantised checkpoint would be up to 8 times as large.
            or (checkpoint_format == gguf.NAME and checkpoint_format not in info.formats)
        ):
            continue
        # A strategy that unpickles the whole file gets the part as a checkpoint of its own.
        reads_part = fmt == checkpoint_format and not info.weights_only
        options = selected if reads_part and selected.keys() <= set(info.options) else {}
        cell = Cell(
            question.model, info.name, "process", device=question.device, dtype=question.dtype,
            format=fmt, options=options, ranks=question.ranks, disk_bytes_per_s=question.disk.bytes_per_s,
            disk_latency_ns=question.disk.latency_ns,
            use="" if question.use == FORWARD else question.use, passes=int(question.use == FORWARD),
        )  # fmt: skip
        yield plan_cell(cell, info)
