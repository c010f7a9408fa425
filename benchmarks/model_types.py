"""Load small models of the types of transformers: ``make model-types``.

Without --all, a model of each type of ``KINDS`` is loaded with every strategy. --all compares the models of
``load_pretrained`` and ``from_pretrained`` for all other types, in the order of --seed, each type in a process of
its own with a limit of processor time (--seconds) and of 4 GiB; --types N only for N of them. Each of the two
commands writes its own part of the page --out, which says what is saved and compared. Folders, runs and types
that are done stay in --work, and are not made again. The exit code is 1 if a load is wrong or fails.
"""

import argparse
import importlib
import json
import logging as log
import multiprocessing
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from page_blocks import filled
from small_configs import WAYS, small

from weighin import load_pretrained
from weighin.errors import HarnessError
from weighin.models.pretrained import example_inputs, pretrained_class
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.show.table import Table

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the comparison, which tests share
from model_differences import differences

BLOCK: Final = "benchmarks/model_types.py"
KINDS: Final = {
    "decoder": "bloom codegen cohere gemma gemma3_text gpt2 gpt_neox gptj llama mistral mpt olmo2 opt phi3"
    " qwen3",
    "mixture of experts": "deepseek_v3 gpt_oss mixtral olmoe qwen3_moe",
    "state space": "falcon_mamba jamba mamba2 rwkv",
    "encoder": "albert bert deberta-v2 distilbert electra modernbert roberta",
    "encoder-decoder": "bart led marian t5",
    "vision": "beit convnext dinov2 resnet vit",
    "speech": "hubert wav2vec2 whisper",
    "text and vision": "clip",
}
"""The types of the page; --types names any others."""
_HALF: Final = ("decoder", "mixture of experts")
"""Kinds whose models are saved in bfloat16."""
_OWN: Final = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "led": {"attention_window": 16},
}
"""Settings of single types, without which a small model cannot run."""

_DTYPES: Final[dict[torch.dtype, tuple[torch.dtype | str | None, ...]]] = {
    torch.float32: (None, torch.bfloat16),
    torch.bfloat16: ("auto", torch.float32),
}
"""The dtypes with which a folder of a drawn type is loaded, for each dtype in which it was saved."""
_MOST_PARAMETERS: Final = 8_000_000
_CLASSES: Final = 3  # the most classes of a type to try
_SAME_REASONS: Final = 3  # ways that fail for one reason before the next class is tried
_MEMORY_BYTES: Final = 4 * 1024**3
_WALL_FACTOR: Final = 10  # wall-clock seconds allowed for each second of the processor
_SHARDS: Final = 3
_NOISE: Final = 0.02  # added to each weight, so that no two tensors are equal
_OF_STORAGE: Final = ("stride is", "memory is shared", "the same object is shared")
_MARKS: Final = ("_use_kernels", "_weight_conversions", "_is_hf_initialized")
_TENSOR_MARKS: Final = ("_is_hf_initialized", "_is_buffer", "persistent")
_DRAWN: Final = ("type", "class", "parameters", "pairs of loads", "load_pretrained", "outputs")


@dataclass(frozen=True, slots=True)
class Known:
    """One type of ``KINDS``, and what came of its loads."""

    name: str
    compared: str
    results: tuple[Result, ...]

    @property
    def wrong(self) -> list[str]:
        """The loads that are neither verified, nor skipped with their reason."""
        ended = (Outcome.OK, Outcome.SKIPPED)
        return [f"{one.cell.strategy}: {one.outcome}" for one in self.results if one.outcome not in ended]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn type: the differences between its loads, or why there are none.

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
    unequal: Sequence[str] = ()
    storage: Sequence[str] = ()
    outputs: str = ""
    reason: str = ""

    def row(self) -> list[str]:
        compared = "; ".join(self.unequal[:2]) or self.reason or "equal"
        outputs = "equal" if self.outputs == "equal" else ""
        counts = (f"{self.parameters:,}", str(self.loads))
        return [self.name, self.architecture, *counts, _cell(compared), outputs]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--types", help="only these, separated by commas; with --all also a number")
    parser.add_argument("--all", action="store_true", help="compare all other types")
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the weights")
    parser.add_argument("--seconds", type=float, default=60, help="for each type of --all")
    parser.add_argument("--strategies", default="all", help="of types that have no run in --work")
    parser.add_argument("--work", type=Path, default=Path("results/model-types"))
    parser.add_argument("--out", type=Path, help="write the figures to the blocks of this page")
    options = parser.parse_args()
    _prepare()
    return (_all_others if options.all else _all_known)(options)


def _prepare() -> None:
    """Import once what every child needs."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    import transformers

    package: Any = transformers
    assert package.PreTrainedModel
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()


def _all_known(options: argparse.Namespace) -> int:
    kinds = {name: kind for kind, names in KINDS.items() for name in names.split()}
    chosen = options.types.split(",") if options.types else sorted(kinds)
    tried = []
    for number, name in enumerate(chosen, 1):
        tried.append(_known(name, kinds.get(name, ""), options.work / name, options.strategies))
        one = tried[-1]
        print(
            f"[{number}/{len(chosen)}] {name}: {one.compared}; {', '.join(one.wrong) or 'no load wrong'}",
            flush=True,
        )
    if options.out:
        _write(options.out, "known", known_part(tried))
    return int(any(one.wrong or one.compared != "equal" for one in tried))


def _all_others(options: argparse.Namespace) -> int:
    from transformers import CONFIG_MAPPING

    types = options.types or ""
    others = sorted(set(CONFIG_MAPPING.keys()) - set(" ".join(KINDS.values()).split()))
    random.Random(options.seed).shuffle(others)  # noqa: S311 (a sample, no secret)
    chosen = others[: int(types)] if types.isdigit() else types.split(",") if types else others
    tried: list[Drawn] = []
    kept = options.work / f"drawn-{options.seed}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    lines = kept.read_text().splitlines() if kept.exists() else []
    done = {one.name: one for one in (Drawn(**json.loads(line)) for line in lines)}
    try:
        for name in chosen:
            one = done.get(name) or _apart(name, options.seed, options.seconds)
            if name not in done:
                with kept.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
            tried.append(one)
            print(f"[{len(tried)}/{len(chosen)}] " + " | ".join(one.row()), flush=True)
    except KeyboardInterrupt:
        again = f"stopped; the same command goes on after {len(tried)} types: {kept}"
        print(again, file=sys.stderr)
        return 130
    if options.out:
        _write(options.out, "drawn", drawn_part(tried, options.seed, len(others)))
    return int(any(one.unequal for one in tried))


def _write(page: Path, part: str, text: str) -> None:
    page.write_text(filled(page.read_text(), {f"{BLOCK} {part}": text}))


def _versions() -> str:
    import transformers

    return f"torch {torch.__version__} and transformers {transformers.__version__}"


def known_part(tried: list[Known]) -> str:
    """Return the page's part about the types of ``KINDS``."""
    cells = [result for one in tried for result in one.results]
    count = Counter(result.outcome for result in cells)
    outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
    equal = sum(one.compared == "equal" for one in tried)
    strategies = len({one.cell.strategy for one in cells})
    wrong = [f"* {one.name}: {each}" for one in tried for each in one.wrong]
    unequal = [f"* {one.name}: {one.compared}" for one in tried if one.compared != "equal"]
    return "\n".join([
        f"{len(tried)} types with {strategies} strategies: {outcomes} loads; `load_pretrained` is equal for {equal}"
        f" types. Measured with {_versions()}.",
        *(["", *unequal, *wrong] if unequal or wrong else []),
    ])  # fmt: skip


def drawn_part(tried: Sequence[Drawn], seed: int, known: int) -> str:
    """Return the page's part about ``tried``, which were drawn from ``known`` types."""
    compared = [one for one in tried if not one.reason]
    unequal = [one for one in compared if one.unequal]
    told = sum(one.outputs == "equal" for one in compared)
    equal = f"{len(compared) - len(unequal)}" + (f" of {len(compared)}" if unequal else "")
    storage = [f"* {one.name}: {_cell(one.storage[0])}" for one in compared if one.storage]
    table = Table.of(_DRAWN, [one.row() for one in unequal], names=2).markdown()
    return "\n".join([
        f"We drew {len(tried)} of the {known} other types (--seed {seed}). {len(tried) - len(compared)} could not be"
        f" compared. In {sum(one.loads for one in compared):,} pairs of loads, the other {equal} are equal; of {told},"
        f" the outputs, too. Measured on {date.today()}.",
        *(["", table] if unequal else []),
        *(["", *storage] if storage else []),
    ])  # fmt: skip


def _cell(text: str) -> str:
    """Return a text in one line of a table, without paths of this machine."""
    text = re.sub(r"\S*/(site-packages|weighin-types-\w+)/", "", " ".join(text.split()))
    return text.replace("|", "\\|")


def _known(name: str, kind: str, folder: Path, strategies: str) -> Known:
    """Load a small model of a type with every strategy, and compare ``load_pretrained``."""
    folder, run = folder / "model", folder / "run"
    model_class = _head(name, kind)
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        model = _small_model([model_class], _OWN.get(name, {}), is_run=True)
        if isinstance(model, str):
            sys.exit(f"{name}: {model}")
        model.to(torch.bfloat16 if kind in _HALF else torch.float32).save_pretrained(folder)
    if not (run / run_folder.RECORDS).exists():
        options = ("--strategies", strategies, "--isolation", "process", "--out", str(run))
        command = [sys.executable, "-m", "weighin", "bench", str(folder), *options]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if not (run / run_folder.RECORDS).exists():
            sys.exit(f"{name}: {done.stderr}")
    lines, _ = _compared(model_class, folder, "auto")
    unequal = [line for line in lines if not _is_of_storage(line)]
    return Known(name, unequal[0] if unequal else "equal", tuple(run_folder.read(run).results))


def _head(name: str, kind: str) -> Any:
    """Return the class of a type's models that a kind is used with."""
    from transformers.models.auto import modeling_auto as auto

    heads: dict[str, Any] = {
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES | auto.MODEL_FOR_CTC_MAPPING_NAMES,
        "text and vision": auto.MODEL_MAPPING_NAMES,
        "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    others = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES)
    found = next(names[name] for names in (heads.get(kind, {}), *others) if name in names)
    return pretrained_class(found if isinstance(found, str) else next(iter(found)))


def _apart(name: str, seed: int, seconds: float) -> Drawn:
    """Try a type in its own process, for ``seconds`` of processor time."""
    fork = multiprocessing.get_context("fork")
    receiving, sending = fork.Pipe(duplex=False)
    process = fork.Process(target=_child, args=(name, seed, seconds, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(_WALL_FACTOR * seconds):
            found: Drawn = receiving.recv()
            return found
        return Drawn(name, reason=f"not done after {_WALL_FACTOR * seconds:g} s")
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code == -signal.SIGXCPU:
            return Drawn(name, reason=f"not done after {seconds:g} s of processor time")
        ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Drawn(name, reason=f"the process crashed: {ended}")
    finally:
        process.kill()
        process.join()


def _child(name: str, seed: int, seconds: float, sending: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    log.getLogger("weighin").setLevel(log.ERROR)
    try:
        tried = _drawn(name, seed)
    except Exception as error:
        tried = Drawn(name, reason=_said(error))
    sending.send(tried)


def _drawn(name: str, seed: int) -> Drawn:
    from transformers import CONFIG_MAPPING

    torch.manual_seed(seed)
    config_class = CONFIG_MAPPING[name]
    try:
        config_class()
    except Exception as error:
        return Drawn(name, reason=f"no default configuration: {_said(error)}")
    classes = _classes(config_class)
    if not classes:
        return Drawn(name, reason="transformers exports no model class of this configuration")
    random.Random(f"{seed} {name}").shuffle(classes)  # noqa: S311
    model = _small_model(classes[:_CLASSES])
    if isinstance(model, str):
        return Drawn(name, reason=model)
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
    storage = tuple(filter(_is_of_storage, found))
    unequal = tuple(line for line in found if line not in storage)
    return Drawn(name, kind.__name__, count, loads, unequal, storage, outputs)


def _is_of_storage(line: str) -> bool:
    return any(one in line for one in _OF_STORAGE)


def _short(dtype: torch.dtype | str | None) -> str:
    return str(dtype).removeprefix("torch.")


def _said(error: BaseException) -> str:
    text = error.message if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:200]


def _small_model(classes: Sequence[Any], own: Any = None, *, is_run: bool = False) -> Any:
    """Return a small model of the first class that allows it, or the reason why there is none.

    ``own`` are settings of its configuration; with ``is_run``, its forward pass succeeds, too.
    """
    reasons: list[str] = []
    for kind in classes:
        for way in WAYS:
            try:
                content = small(kind.config_class(), way) | (own or {})
                if count := _count_of(kind, content):
                    reasons.append(f"{kind.__name__} has {count:,} parameters")
                    continue
                model = kind(kind.config_class.from_dict(content)).eval()
                if is_run and (inputs := example_inputs(kind.__name__, model.config.to_dict())):
                    with torch.no_grad():
                        model(**inputs)
            except ImportError as error:
                return _said(error)
            except Exception as error:
                reasons.append(f"{kind.__name__}: {_said(error)}")
                if reasons.count(reasons[-1]) == _SAME_REASONS:
                    break
            else:
                return model
    return reasons[0]


def _count_of(kind: Any, content: dict[str, Any]) -> int:
    """Return the number of a model's parameters if there are too many of them, else 0."""
    try:
        with torch.device("meta"):
            count = _count(kind(kind.config_class.from_dict(content)))
    except Exception:  # on the meta device only
        count = _count(kind(kind.config_class.from_dict(content)))
    return count if count > _MOST_PARAMETERS else 0


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


def _compared(
    kind: Any, folder: Path, dtype: torch.dtype | str | None, *, with_outputs: bool = True
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
    return [*lines, *(["other outputs"] if outputs == "other" else [])], outputs


def _differences(model: Any, reference: Any) -> Iterator[str]:
    found, wanted = (
        [
            (type(one).__name__, one.source_patterns, one.target_patterns)
            for one in getattr(each, "_weight_conversions", ())
        ]
        for each in (model, reference)
    )
    if found != wanted:
        yield f"save_pretrained reverts {found}, not {wanted}"
    for each in (model, reference):
        _forget_marks(each)
    yield from differences(model, reference)
    ours, theirs = (each.config.to_dict() for each in (model, reference))
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            yield f"config.{key} is {ours.get(key)!r}, not {theirs.get(key)!r}"
    generation = [getattr(each, "generation_config", None) for each in (model, reference)]
    first, second = (each and each.to_dict() for each in generation)
    if first != second:
        yield f"generation_config is {first}, not {second}"


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
        dtype = next(reference.parameters()).dtype
        inputs = {key: one.to(dtype) if one.is_floating_point() else one for key, one in inputs.items()}  # fmt: skip
        results = []
        # Copies: tensors of mapped files have addresses for which kernels round differently.
        for one in (deepcopy(reference), deepcopy(model)):
            torch.manual_seed(0)
            with torch.no_grad():
                results.append(list(_tensors(one(**inputs))))
    except Exception as error:
        return f"no forward pass: {_said(error)}"
    wanted, found = results
    same = len(wanted) == len(found) and all(
        torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in zip(wanted, found, strict=True)
    )
    return "equal" if same else "other"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        inner: Iterable[Any] = value.values() if isinstance(value, dict) else value
        for one in inner:
            yield from _tensors(one)


if __name__ == "__main__":
    sys.exit(main())
