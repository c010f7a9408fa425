"""Load a small model of each type of transformers with every strategy: ``make model-types``.

The page says what is saved and compared. Folders and runs stay in --work, and are not made again. The
exit code is 1 if a load is wrong or fails, or if a RAM limit of the predicted floor would have killed
a load. --all compares all other types (``drawn_types.py``) in the order of --seed, and --types N only
N of them. Each of the two commands writes its own part of the page.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import drawn_types
import predicted_runs
import torch

from weighin import load_pretrained
from weighin.errors import HarnessError
from weighin.models.pretrained import example_inputs, pretrained_class
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.show.table import Table
from weighin.show.words import by_reason
from weighin.stream.pretrained_folder import read_folder

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

_TEXT: Final = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_SMALL: Final = _TEXT | {
    "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
    "d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4, "ffn_dim": 64,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "word_embed_proj_dim": 32,
    "n_embd": 32, "n_layer": 2, "n_layers": 2, "n_head": 4, "n_heads": 4, "n_positions": 64,
    "max_position_embeddings": 64, "dim": 32, "hidden_dim": 64, "embedding_size": 32, "embed_dim": 16,
    "image_size": 32, "patch_size": 8, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1],
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "state_size": 8, "rotary_dim": 4,
    "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32, "projection_dim": 32,
    "conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_TOWER: Final = _TEXT | {"intermediate_size": 64}
_OWN: Final[dict[str, dict[str, Any]]] = {
    "clip": {"text_config": _TOWER | {"vocab_size": 128}, "vision_config": _TOWER | {"image_size": 32}},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
    "falcon_mamba": {"intermediate_size": None, "conv_kernel": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"intermediate_size": None, "conv_kernel": None, "num_heads": 8, "n_groups": 1},
}  # fmt: skip
"""Settings of single types that differ from ``_SMALL``; None leaves the type's own."""
_HALF: Final = ("decoder", "mixture of experts")
"""Kinds whose models are saved in bfloat16."""

_SAYS_PREDICTED: Final = (
    "weighin predicted the peak of anonymous memory of every load that was ok, and compared it with the measured peak."
    " Loads by packages that `predict` cannot follow were left out. Imports need most of this memory, because the models are small. "
)
HEADINGS: Final = ("types", "load_pretrained", "strategies ok", "skipped", "not ok")


@dataclass(frozen=True, slots=True)
class Tried:
    """One type, and what came of its loads."""

    name: str
    compared: str
    results: tuple[Result, ...]

    @property
    def is_right(self) -> bool:
        """Whether every load is verified, or skipped with its reason."""
        ended = all(one.outcome in (Outcome.OK, Outcome.SKIPPED) for one in self.results)
        return ended and self.compared == "equal"

    def row(self) -> list[str]:
        """Return the name, and what came of the loads."""
        count = Counter(one.outcome for one in self.results)
        wrong = [
            f"{one.cell.strategy}: {one.outcome}"
            for one in self.results
            if one.outcome not in (Outcome.OK, Outcome.SKIPPED)
        ]
        return [
            self.name, self.compared, str(count[Outcome.OK]), str(count[Outcome.SKIPPED]), ", ".join(wrong) or "0",
        ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--types", help="only these, separated by commas; with --all also a number of types to draw"
    )
    parser.add_argument(
        "--all", action="store_true", help="compare all other types, drawn at random"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw and of the weights")
    parser.add_argument(
        "--seconds", type=float, default=60, help="processor time for each type of --all"
    )
    parser.add_argument("--strategies", default="all", help="of types that have no run in --work")
    parser.add_argument("--work", type=Path, default=Path("results/model-types"))
    parser.add_argument(
        "--predict", action="store_true", help="predict every load: two seconds of a processor each"
    )
    parser.add_argument("--out", type=Path, help="write the page to this file")
    options = parser.parse_args()
    kinds = {name: kind for kind, names in KINDS.items() for name in names.split()}
    if options.all:
        return _try_drawn(options, list(kinds))
    chosen = options.types.split(",") if options.types else sorted(kinds)
    tried = []
    for number, name in enumerate(chosen, 1):
        tried.append(_try(name, kinds.get(name, ""), options.work / name, options.strategies))
        print(f"[{number}/{len(chosen)}] " + " | ".join(tried[-1].row()), flush=True)
    predicted = _predicted(options.work, chosen) if options.predict else None
    if options.out:
        _, drawn = _parts(options.out)
        options.out.write_text(page(tried, predicted) + drawn)
    is_killed = predicted is not None and predicted.killed > 0
    return int(is_killed or not all(one.is_right for one in tried))


def _try_drawn(options: argparse.Namespace, known: list[str]) -> int:
    types = options.types or ""
    drawn = drawn_types.drawn(options.seed, known)
    chosen = drawn[: int(types)] if types.isdigit() else types.split(",") if types else drawn
    tried: list[drawn_types.Tried] = []
    kept = options.work / f"drawn-{options.seed}.jsonl"
    try:
        for one in drawn_types.run(chosen, options.seed, options.seconds, kept):
            tried.append(one)
            print(f"[{len(tried)}/{len(chosen)}] " + " | ".join(one.row()), flush=True)
    except KeyboardInterrupt:
        print(
            f"stopped; the same command goes on after {len(tried)} types: {kept}", file=sys.stderr
        )
        return 130
    if options.out:
        types_known, _ = _parts(options.out)
        options.out.write_text(types_known + drawn_types.section(tried, options.seed, len(drawn)))
    return int(any(one.unequal for one in tried))


def _parts(page: Path) -> tuple[str, str]:
    """Return a page's parts about the known types, and about types drawn at random."""
    text = page.read_text() if page.exists() else ""
    known, heading, drawn = text.partition(drawn_types.HEADING)
    return known, heading + drawn


def rows(types: Iterable[Sequence[str]]) -> list[list[str]]:
    """Return one row for all types whose other cells are equal."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in types:
        alike.setdefault(tuple(cells), []).append(name)
    return [[", ".join(names), *cells] for cells, names in alike.items()]


def page(tried: list[Tried], predicted: predicted_runs.Summary | None = None) -> str:
    """Return the page's part about the known types."""
    import transformers

    cells = [result for one in tried for result in one.results]
    count = Counter(result.outcome for result in cells)
    reasons: dict[str, set[str]] = {}
    for result in cells:
        if result.outcome is Outcome.SKIPPED:
            reasons.setdefault(result.cell.strategy, set()).add(result.message)
    strategies = {result.cell.strategy for result in cells}
    lines = [
        "# Model types of transformers",
        "",
        f"`make model-types` wrote this page with torch {torch.__version__} and transformers {transformers.__version__}."
        " It saved a small model of each type with random weights, in bfloat16 (decoders and mixtures of experts) or float32, and"
        f" ran `weighin bench FOLDER` with {len(strategies)} strategies (ways to load). weighin compares every loaded model with that of `from_pretrained`."
        ' `load_pretrained` is "equal" if its model has the parameters, buffers, dtypes, tied weights and outputs of that of `from_pretrained`, bit by bit.',
        "",
        f"The outcomes of the {len(cells)} loads of {len(tried)} types are: "
        + ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
        + f". `load_pretrained` is equal for {sum(one.compared == 'equal' for one in tried)} types.",
        "",
        Table.of(HEADINGS, rows(one.row() for one in tried), names=2).markdown(),
        "",
        *(
            ["## Predictions", "", _SAYS_PREDICTED + predicted_runs.summary_line(predicted), ""]
            if predicted
            else []
        ),
        "## Skipped loads",
        "",
        *by_reason(
            (
                strategy,
                min(messages)
                + (f" (and {len(messages) - 1} like it)" if len(messages) > 1 else ""),
            )
            for strategy, messages in sorted(reasons.items())
        ),
        "",
    ]
    return "\n".join(lines)


def _predicted(work: Path, types: list[str]) -> predicted_runs.Summary | None:
    """Compare the loads with predictions, several types at a time."""
    checked: list[predicted_runs.Checked] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = [work / name / "run" for name in types]
        for number, (name, some) in enumerate(
            zip(types, pool.map(predicted_runs.check, runs), strict=True), 1
        ):
            checked += some
            told = predicted_runs.summarised(some)
            print(
                f"[{number}/{len(types)}] {name}: {predicted_runs.summary_line(told) if told else ''}",
                flush=True,
            )
    return predicted_runs.summarised(checked)


def _try(name: str, kind: str, folder: Path, strategies: str) -> Tried:
    model, run = folder / "model", folder / "run"
    if not (model / "config.json").exists():
        _save(name, kind, model)
    if not (run / run_folder.RECORDS).exists():
        command = [sys.executable, "-m", "weighin", "bench", str(model), "--strategies", strategies]
        command += ["--isolation", "process", "--out", str(run)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if not (run / run_folder.RECORDS).exists():
            sys.exit(f"{name}: {done.stderr}")
    found = read_folder(model)
    reference = pretrained_class(found.wanted).from_pretrained(model, dtype="auto")
    return Tried(
        name=name,
        compared=_compared(model, reference),
        results=tuple(run_folder.read(run).results),
    )


def _save(name: str, kind: str, folder: Path) -> None:
    from transformers.models.auto import modeling_auto as auto

    heads: dict[str, Any] = {
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES | auto.MODEL_FOR_CTC_MAPPING_NAMES,
        "text and vision": auto.MODEL_MAPPING_NAMES,
        "vision": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    others = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES)
    architecture = next(names[name] for names in (heads.get(kind, {}), *others) if name in names)
    model_class = pretrained_class(
        architecture if isinstance(architecture, str) else next(iter(architecture))
    )
    known = model_class.config_class()
    wanted = {key: value for key, value in _SMALL.items() if hasattr(known, key)} | _OWN.get(
        name, {}
    )
    settings = {key: value for key, value in wanted.items() if value is not None}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**settings)).eval()
    if kind in _HALF:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder)


def _compared(folder: Path, reference: torch.nn.Module) -> str:
    """Return "equal", or how the model of ``load_pretrained`` differs from ``reference``."""
    try:
        model = load_pretrained(folder)
    except HarnessError as error:
        return f"refused: {error.message}"
    return next(_differences(folder, model, reference), "equal")


def _differences(folder: Path, model: torch.nn.Module, reference: torch.nn.Module) -> Iterator[str]:
    ours, theirs = _tensors(model), _tensors(reference)
    if ours.keys() != theirs.keys():
        yield f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:2]}"
        return
    for name, tensor in theirs.items():
        if (ours[name].dtype, ours[name].requires_grad) != (tensor.dtype, tensor.requires_grad):
            yield f"{name} has another dtype, or requires_grad"
        if not _same(ours[name], tensor):
            yield f"{name} has other values"
    if _ties(ours) != _ties(theirs):
        yield "other ties"
    if model.training != reference.training:
        yield "another mode"
    settings = json.loads((folder / "config.json").read_text())
    inputs = example_inputs(type(reference).__name__, settings)
    if inputs is None:
        return
    dtype = next(reference.parameters()).dtype
    inputs = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in inputs.items()
    }
    results = []
    # A copy: tensors of mapped files have addresses for which kernels round differently.
    for one in (model, deepcopy(reference)):
        torch.manual_seed(0)
        with torch.no_grad():
            results.append(one(**inputs))
    first, second = (next(_outputs(one)) for one in results)
    if not _same(first, second):
        yield "other outputs"


def _outputs(result: Any) -> Iterator[torch.Tensor]:
    values = result.values() if isinstance(result, Mapping) else result
    yield from (value for value in values if isinstance(value, torch.Tensor))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_same = torch.equal(one, other)
    return is_same or bool(
        one.is_floating_point() and torch.allclose(one, other, 0, 0, equal_nan=True)
    )


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _ties(tensors: Mapping[str, torch.Tensor]) -> set[frozenset[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return set(map(frozenset, names.values()))


if __name__ == "__main__":
    sys.exit(main())
