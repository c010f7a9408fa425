"""Compare ``load_pretrained`` with ``from_pretrained`` for types of transformers drawn at random.

The types are those of ``CONFIG_MAPPING`` that ``model_types.py`` does not name, in an order that the
seed decides. ``section`` says what is compared, and counts the other types with their reasons.
"""

import contextlib
import dataclasses
import importlib
import json
import logging as log
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from small_configs import WAYS, small

from weighin import load_pretrained
from weighin.errors import HarnessError
from weighin.models.pretrained import example_inputs
from weighin.show.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the comparison, which tests share
from model_differences import differences

HEADING: Final = "## Types drawn at random"
_HEADINGS: Final = ("type", "class", "parameters", "pairs of loads", "load_pretrained", "outputs")
_DTYPES: Final[dict[torch.dtype, tuple[torch.dtype | str | None, ...]]] = {
    torch.float32: (None, torch.bfloat16),
    torch.bfloat16: ("auto", torch.float32),
}
"""The dtypes with which a folder is loaded, for each dtype in which it was saved."""

_MOST_PARAMETERS: Final = 8_000_000
_CLASSES: Final = 3  # the most classes of a type to try
_SAME_REASONS: Final = 3  # ways that fail for one reason before the next class is tried
_MEMORY_BYTES: Final = 4 * 1024**3
_WALL_FACTOR: Final = 10  # wall-clock seconds allowed for each second of the processor
_SHARDS: Final = 3
_NOISE: Final = 0.02  # added to each weight, so that no two tensors are equal
_LISTED: Final = ("stride is", "memory is shared", "the same object is shared")
_MARKS: Final = ("_use_kernels", "_weight_conversions", "_is_hf_initialized")
_TENSOR_MARKS: Final = ("_is_hf_initialized", "_is_buffer", "persistent")


@dataclass(frozen=True, slots=True)
class Tried:
    """One type: the differences between its loads, or why there are none.

    Attributes:
        loads: the number of compared pairs of loads.
        unequal: each difference, with its folder and dtype.
        storage: differences in strides and shared storage, which leave the values equal.
        outputs: "equal", or why no forward pass was compared.
        reason: why nothing was compared, or empty.
    """

    name: str
    architecture: str = ""
    parameters: int = 0
    loads: int = 0
    unequal: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()
    outputs: str = ""
    reason: str = ""

    def row(self) -> list[str]:
        """Return the type's row of the page's table."""
        compared = "; ".join(self.unequal[:2]) or self.reason or "equal"
        return [
            self.name, self.architecture, f"{self.parameters:,}", str(self.loads), _cell(compared),
            "equal" if self.outputs == "equal" else "",
        ]  # fmt: skip


def drawn(seed: int, without: Sequence[str]) -> list[str]:
    """Return all types but ``without``, in the seed's order."""
    _prepare()
    from transformers import CONFIG_MAPPING

    names = sorted(set(CONFIG_MAPPING.keys()) - set(without))
    random.Random(seed).shuffle(names)  # noqa: S311 (a sample, no secret)
    return names


def section(tried: Sequence[Tried], seed: int, known: int) -> str:
    """Return the page's part about ``tried``, which were drawn from ``known`` types."""
    import transformers

    compared = [one for one in tried if not one.reason]
    unequal = [one for one in compared if one.unequal]
    told = Counter(one.outputs == "equal" for one in compared)
    reasons = Counter(_shared(_cell(one.reason)) for one in tried if one.reason)
    return "\n".join(
        [
            HEADING,
            "",
            f'`make model-types ARGS="--all"` wrote this part on {date.today()} with torch {torch.__version__} and'
            f" transformers {transformers.__version__}. `--all` draws further types in a random order (--seed {seed}), and shrinks"
            " their default configurations. It saves a model of one class of each type, with random weights, in float32 and in bfloat16,"
            " one of them in shards. `load_pretrained` and `from_pretrained` load both in two dtypes. A type is equal if the models of both"
            " functions have the same names, values (bit by bit), dtypes, buffers, tied weights, modules and their attributes, training mode,"
            " configuration, generation configuration and gradients. The outputs of a forward pass are also compared if simple inputs suffice.",
            "",
            f"{len(tried)} of {known} types were drawn. {len(compared)} were compared in"
            f" {sum(one.loads for one in compared):,} pairs of loads: {len(compared) - len(unequal)} are equal,"
            f" {len(unequal)} are not. Outputs were compared, and are equal, for {told[True]} types."
            f" {len(tried) - len(compared)} types were not compared.",
            "",
            *_equal(compared),
            *(
                ["", Table.of(_HEADINGS, (one.row() for one in unequal), names=2).markdown()]
                if unequal
                else []
            ),
            "",
            "### Strides and shared storage",
            "",
            *(_storage(compared) or ["Strides and shared storage are equal in all loads."]),
            "",
            "### How many types were not compared, and why",
            "",
            *(
                f"* {number}: {reason}"
                for reason, number in sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
            ),
            "",
        ]
    )


def _equal(compared: Sequence[Tried]) -> list[str]:
    """Return two lists of the equal types: with and without a compared forward pass."""
    equal = [one for one in compared if not one.unequal]
    with_outputs = sorted(one.name for one in equal if one.outputs == "equal")
    without = sorted(one.name for one in equal if one.outputs != "equal")
    return [
        f"* models and outputs are equal: {', '.join(with_outputs) or 'none'}",
        f"* models are equal, outputs were not compared: {', '.join(without) or 'none'}",
    ]


def _shared(reason: str) -> str:
    """Return a reason without the class, size and exception of its type."""
    if re.fullmatch(r"\w+ has [\d,]+ parameters", reason):
        return f"the small model has more than {_MOST_PARAMETERS:,} parameters"
    if package := re.search(r"requires the (\w+) library", reason):
        return f"needs the package {package[1]}"
    reason = re.sub(r"^(no default configuration|from_pretrained fails): .*", r"\1", reason)
    return re.sub(r"^\w+: \w+: .*", "the model class fails with the small configuration", reason)


def _storage(compared: Sequence[Tried]) -> list[str]:
    return [
        f"* {one.name}, {len(one.storage)} in {one.loads} loads; the first: {_cell(one.storage[0])}"
        for one in compared
        if one.storage
    ]


def _cell(text: str) -> str:
    """Return a text in one line of a table, without paths of this machine."""
    text = re.sub(r"\S*/(site-packages|weighin-types-\w+)/", "", " ".join(text.split()))
    return text.replace("|", "\\|")


def run(names: Sequence[str], seed: int, seconds: float, kept: Path) -> Iterator[Tried]:
    """Try each type in its own process, for ``seconds`` of processor time; ``kept`` has old tries."""
    known = {one.name: one for one in _read(kept)}
    kept.parent.mkdir(parents=True, exist_ok=True)
    _prepare()
    for name in names:
        tried = known.get(name) or _apart(name, seed, seconds)
        if name not in known:
            with kept.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(tried)) + "\n")
        yield tried


def _read(kept: Path) -> Iterator[Tried]:
    for line in kept.read_text().splitlines() if kept.exists() else ():
        content = json.loads(line)
        for key in ("unequal", "storage"):
            content[key] = tuple(content[key])
        yield Tried(**content)


def _prepare() -> None:
    """Import once what every child needs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    import transformers

    package: Any = transformers
    assert package.PreTrainedModel
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()


def _apart(name: str, seed: int, seconds: float) -> Tried:
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(name, seed, seconds, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(_WALL_FACTOR * seconds):
            found: Tried = receiving.recv()
            return found
        return Tried(name, reason=f"not done after {_WALL_FACTOR * seconds:g} s")
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code == -signal.SIGXCPU:
            return Tried(name, reason=f"not done after {seconds:g} s of processor time")
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Tried(name, reason=f"the process crashed: {ended}")
    finally:
        process.kill()
        process.join()


def _child(name: str, seed: int, seconds: float, sending: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    log.getLogger("weighin").setLevel(log.ERROR)
    try:
        tried = _tried(name, seed)
    except Exception as error:
        tried = Tried(name, reason=_said(error))
    sending.send(tried)


def _tried(name: str, seed: int) -> Tried:
    torch.manual_seed(seed)
    model = _small_model(name, seed)
    if isinstance(model, str):
        return Tried(name, reason=model)
    kind, count = type(model), _count(model)
    _add_noise(model)
    found: list[str] = []
    outputs, loads = "", 0
    with tempfile.TemporaryDirectory(prefix="weighin-types-") as work:
        sharded = random.Random(f"{seed} {name}").choice(list(_DTYPES))  # noqa: S311
        for dtype, dtypes in _DTYPES.items():
            folder = Path(work) / _short(dtype)
            model = model.to(dtype)
            size = sum(one.nbytes for one in model.parameters()) // _SHARDS
            options = {"max_shard_size": max(1, size)} if dtype is sharded else {}
            model.save_pretrained(folder, **options)
            stored = f"{_short(dtype)}{' in shards' if dtype is sharded else ''}"
            for wanted in dtypes:
                lines, said = _compared(kind, folder, wanted, with_outputs=not outputs)
                found += [f"{stored}, loaded as {_short(wanted)}: {line}" for line in lines]
                outputs, loads = outputs or said, loads + 1
    storage = tuple(line for line in found if any(one in line for one in _LISTED))
    unequal = tuple(line for line in found if line not in storage)
    return Tried(name, kind.__name__, count, loads, unequal, storage, outputs)


def _compared(
    kind: Any, folder: Path, dtype: torch.dtype | str | None, *, with_outputs: bool
) -> tuple[list[str], str]:
    """Return the differences between both functions' models, and what came of a forward pass."""
    torch.manual_seed(0)
    try:
        reference = kind.from_pretrained(folder, dtype=dtype)
    except Exception as error:
        raise HarnessError(f"from_pretrained fails: {_said(error)}", "") from error
    torch.manual_seed(0)
    try:
        model = load_pretrained(folder, dtype=dtype)
    except Exception as error:
        return [f"load_pretrained fails: {_said(error)}"], ""
    lines = list(_differences(model, reference))
    outputs = _outputs(folder, kind.__name__, model, reference) if with_outputs else ""
    if outputs == "other":
        lines.append("other outputs")
    return lines, outputs


def _short(dtype: torch.dtype | str | None) -> str:
    return str(dtype).removeprefix("torch.")


def _said(error: BaseException) -> str:
    text = error.message if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:200]


def _small_model(name: str, seed: int) -> Any:
    """Return a small model of a type, or the reason why there is none."""
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[name]
    try:
        default = config_class()
    except Exception as error:
        return f"no default configuration: {_said(error)}"
    classes = _classes(config_class)
    if not classes:
        return "transformers exports no model class of this configuration"
    random.Random(f"{seed} {name}").shuffle(classes)  # noqa: S311
    reasons: list[str] = []
    for kind in classes[:_CLASSES]:
        for way in WAYS:
            try:
                content = small(default, way)
                with contextlib.suppress(Exception), torch.device("meta"):
                    count = _count(kind(config_class.from_dict(content)))
                    if count > _MOST_PARAMETERS:
                        reasons.append(f"{kind.__name__} has {count:,} parameters")
                        continue
                model = kind(config_class.from_dict(content))
                if _count(model) <= _MOST_PARAMETERS:
                    return model.eval()
            except ImportError as error:
                return _said(error)
            except Exception as error:
                reasons.append(f"{kind.__name__}: {_said(error)}")
                if reasons.count(reasons[-1]) == _SAME_REASONS:
                    break
    return reasons[0]


def _classes(config_class: type) -> list[Any]:
    """Return the model classes of a configuration that transformers exports."""
    import transformers

    name = config_class.__module__.replace("configuration_", "modeling_")
    try:
        found = vars(importlib.import_module(name))
    except ModuleNotFoundError:
        return []
    return [
        one
        for key, one in sorted(found.items())
        if isinstance(one, type)
        and issubclass(one, transformers.PreTrainedModel)
        and one.__module__ == name
        and one.config_class is config_class
        and not key.endswith("PreTrainedModel")
        and getattr(transformers, key, None) is one
    ]


def _count(model: torch.nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def _add_noise(model: torch.nn.Module) -> None:
    tensors = {id(one): one for one in model.state_dict(keep_vars=True).values()}
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor), alpha=_NOISE)


def _differences(model: Any, reference: Any) -> Iterator[str]:
    found, wanted = _conversions(model), _conversions(reference)
    if found != wanted:
        yield f"save_pretrained reverts {found}, not {wanted}"
    for one in (model, reference):
        _forget_marks(one)
    yield from differences(model, reference)
    ours, theirs = (one.config.to_dict() for one in (model, reference))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield f"config.{key} is {ours.get(key)!r}, not {theirs.get(key)!r}"
    generation = [getattr(one, "generation_config", None) for one in (model, reference)]
    first, second = (one and one.to_dict() for one in generation)
    if first != second:
        yield f"generation_config is {first}, not {second}"


def _conversions(model: Any) -> list[tuple[Any, ...]]:
    """Return the conversions of keys and values that ``save_pretrained`` reverts."""
    used = getattr(model, "_weight_conversions", ())
    return [(type(one).__name__, one.source_patterns, one.target_patterns) for one in used]


def _forget_marks(model: Any) -> None:
    """Remove the marks in which from_pretrained notes what it initialised, and how it loaded."""
    for module in model.modules():
        for attribute in _MARKS:
            vars(module).pop(attribute, None)
    for tensor in (*model.parameters(), *model.buffers()):
        for attribute in _TENSOR_MARKS:
            vars(tensor).pop(attribute, None)


def _outputs(folder: Path, architecture: str, model: Any, reference: Any) -> str:
    """Compare a forward pass: return "equal", "other", or why it was not compared."""
    try:
        inputs = example_inputs(architecture, json.loads((folder / "config.json").read_text()))
        if inputs is None:
            return "no inputs known"
        results = []
        # Copies: tensors of mapped files have addresses for which kernels round differently.
        for one in (deepcopy(reference), deepcopy(model)):
            torch.manual_seed(0)
            with torch.no_grad():
                results.append(one(**inputs))
    except Exception as error:
        return f"no forward pass: {_said(error)}"
    wanted, found = (list(_tensors(one)) for one in results)
    same = len(wanted) == len(found) and all(
        torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in zip(wanted, found, strict=True)
    )
    return "equal" if same else "other"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
