"""The code that ``recommend`` prints loads what was asked for: it is run, and its model compared."""

import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import quantised_folders
import remote_folder
import torch
from click.testing import CliRunner
from model_differences import state_differences
from nightly import nightly
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.cli import _options
from weighin.cli import choose as verb
from weighin.cli.app import app
from weighin.plan.task import Planned
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.recommend.answer import Advice, advise, gather
from weighin.suite import registry
from weighin.units import GIB, MIB

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries that the code calls

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
         "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
DTYPES = ["bfloat16", *nightly("float32")]


class Net(torch.nn.Module):
    """Has tied weights, persistent buffers, one of them of integers, and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.last = torch.nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Untied(Net):
    """A file of safetensors has one name of a shared tensor, which not every strategy accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight = torch.nn.Parameter(torch.ones(3, 3))


@pytest.fixture(autouse=True)
def _predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every strategy that can load the model need the same memory and time."""
    monkeypatch.setattr(answer, "predict", lambda planned, **_: [_of(one) for one in planned])
    monkeypatch.chdir(tmp_path)


def _of(one: Planned) -> Prediction:
    if one.skip:
        return Prediction(one.cell, cannot=one.skip)
    work = Work(read_bytes=MIB)
    return Prediction(one.cell, model_bytes=MIB, floor_bytes=GIB, tensor_peak_bytes=MIB, work=work)


def advices(*words: str) -> Iterator[tuple[str, Advice]]:
    """Yield the answer to ``weighin recommend WORDS`` in which each strategy in turn is the best."""
    context = verb.recommend.make_context("recommend", [*words], **app.context_settings)
    question = verb.question_of(context, _options.read(context, {"uses": ["none"]}))
    known = gather(question, lambda _: None)
    for planned, prediction in zip(known.planned, known.predictions, strict=True):
        one = replace(known, planned=(planned,), predictions=(prediction,))
        if (advice := advise(question, one)).best:
            yield planned.cell.strategy, advice


def loaded(advice: Advice, build_model: Any = None) -> torch.nn.Module:
    """Do what the answer says: convert the checkpoint if needed, then run the code."""
    for note in advice.notes:
        if found := re.search(r"weighin (convert .*)", note):
            target = Path(found[1].split()[2])
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            done = CliRunner().invoke(app, found[1].split(), catch_exceptions=False)
            assert done.exit_code == 0, done.output
    code = re.sub(r"(?m)^# (model = |from peft )", r"\1", advice.code)
    names: dict[str, Any] = {"build_model": build_model}
    exec(code, names)
    model: torch.nn.Module = names["model"]
    return model


def assert_equal(model: torch.nn.Module, wanted: torch.nn.Module) -> None:
    found, right = ({**one.state_dict(), **dict(one.named_buffers())} for one in (model, wanted))
    assert state_differences(found, right) == []


# -- files, with the user's own model

State = dict[str, torch.Tensor]


def _state(kind: type[Net] = Net) -> State:
    torch.manual_seed(7)
    net = kind()
    for tensor in [*net.parameters(), *(b for b in net.buffers() if b.is_floating_point())]:
        tensor.data = torch.randn_like(tensor)
    return {name: tensor.detach() for name, tensor in net.state_dict().items()}


def _prefixed(prefix: str, kind: type[Net] = Net) -> State:
    return {f"{prefix}{name}": tensor for name, tensor in _state(kind).items()}


FILES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "weights.pt": (_state, ()),
    "wrapped.pt": (lambda: _prefixed("module."), ("--set", "strip_prefix=module.")),
    "prefixed.pt": (lambda: _prefixed("model."), ("--key", "model")),
    "train.pt": (lambda: {"model": _state(), "epoch": 3}, ("--key", "model")),
    "nested.pt": (lambda: {"state": {"model": _state()}}, ("--key", "state.model")),
    "dotted.pt": (lambda: {"state.model": _state()}, ("--key", "state.model")),
    "both.pt": (lambda: {"model": _prefixed("module."), "epoch": 3}, ("--key", "model", "--set", "strip_prefix=module.")),
    "class.pt": (lambda: {"model": _state(), "args": Namespace(lr=0.1)}, ("--key", "model")),
    "weights.safetensors": (lambda: _state(Untied), ()),
    "wrapped.safetensors": (lambda: _prefixed("module.", Untied), ("--set", "strip_prefix=module.")),
    "prefixed.safetensors": (lambda: _prefixed("model.", Untied), ("--key", "model")),
}  # fmt: skip
OWN = {"streaming"}


def save(name: str) -> tuple[str, ...]:
    """Write a file of ``FILES`` into the current folder, and return the words that select its weights."""
    make, words = FILES[name]
    save_file(make(), name) if name.endswith("safetensors") else torch.save(make(), name)
    return words


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FILES)
def test_the_code_for_a_file_loads_the_selected_weights(name: str, dtype: str) -> None:
    words = save(name)
    kind = Untied if name.endswith("safetensors") else Net
    wanted = kind()
    wanted.load_state_dict(_state(kind))
    wanted.to(getattr(torch, dtype))
    tried = set()
    for strategy, advice in advices(name, *words, "--dtype", dtype):
        model: Any = loaded(advice, kind)
        assert_equal(model, wanted)
        assert (model.first.weight is model.last.weight) == (kind is Net)
        tried.add((strategy, advice.saves_again))
    assert len(tried) > 10
    itself = {strategy for strategy, saves_again in tried if not saves_again}
    assert itself == OWN if words else itself > OWN


@pytest.mark.parametrize("name", ["train.pt", "weights.safetensors"])
def test_the_code_for_a_gpu_differs_by_the_name_of_the_device(name: str) -> None:
    words = save(name)
    on_cpu = {strategy: one.code for strategy, one in advices(name, *words)}
    on_gpu = {strategy: one.code for strategy, one in advices(name, *words, "--device", "cuda")}
    assert on_cpu.keys() <= on_gpu.keys()
    for strategy, code in on_cpu.items():
        assert code.replace('device="cpu"', 'device="cuda"') == on_gpu[strategy]
        assert 'device="cuda"' in on_gpu[strategy]


# -- folders of transformers


def _llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``base``, which has two variants of weights, an ``adapter``, and other weights."""
    root = tmp_path_factory.mktemp("made")
    _llama(1).save_pretrained(root / "base")
    _llama(2).save_pretrained(root / "base", variant="fp16")
    _llama(3).save_pretrained(root / "other")
    torch.save(_llama(3).state_dict(), root / "other.pt")
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    tuned = peft.get_peft_model(_llama(1), adapter)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) / 10)
    tuned.save_pretrained(root / "adapter")
    return root


def _built(kind: Any, config: Any, dtype: str) -> torch.nn.Module:
    model: torch.nn.Module = kind._from_config(config, dtype=getattr(torch, dtype))
    return model.eval()


CHOSEN = ["", "variant", "model_class", "variant model_class", "adapter", "variant adapter",
          "checkpoint", "checkpoint adapter"]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOSEN)
def test_the_code_for_a_folder_loads_what_was_chosen(made: Path, choice: str, dtype: str) -> None:
    values = {
        "variant": ["--set", "variant=fp16"], "model_class": ["--set", "model_class=LlamaModel"],
        "adapter": ["--adapter", str(made / "adapter")],
        "checkpoint": ["--checkpoint", str(made / "other.pt")],
    }  # fmt: skip
    words = [word for one in choice.split() for word in values[one]]
    kind = transformers.LlamaModel if "class" in choice else transformers.LlamaForCausalLM
    variant = {"variant": "fp16"} if "variant" in choice else {}
    source = made / ("other" if "checkpoint" in choice else "base")
    wanted = kind.from_pretrained(source, dtype=getattr(torch, dtype), **variant)
    if "adapter" in choice:
        wanted = peft.PeftModel.from_pretrained(wanted, made / "adapter").merge_and_unload()

    by_library = {"peft_merge"} if "adapter" in choice else {"transformers"}
    tried = set()
    for strategy, advice in advices(str(made / "base"), *words, "--dtype", dtype):
        # What the real prediction says cannot load the names of another class, or another file.
        if "class" in choice and not registry.strategy(strategy).maps_keys:
            continue
        if "checkpoint" in choice and strategy in ("transformers", "peft_merge"):
            continue
        build = partial(_built, type(wanted), wanted.config, dtype)
        assert_equal(loaded(advice, build), wanted)
        tried.add(strategy)
    assert tried >= OWN | (set() if "checkpoint" in choice else by_library)
    assert choice not in ("", "variant") or len(tried) > 10


def _of_revision(folder: Path) -> tuple[tuple[str, ...], Any]:
    entry = folder / "models--Some--Model"
    (entry / "refs").mkdir(parents=True)
    for revision, commit, seed in (("main", "0123", 1), ("old", "4567", 5)):
        _llama(seed).save_pretrained(entry / "snapshots" / commit)
        (entry / "refs" / revision).write_text(commit)
    return ("Some/Model", "--set", "revision=old"), _llama(5)


def _of_own_code(folder: Path) -> tuple[tuple[str, ...], Any]:
    path = str(remote_folder.write_folder(folder / "tiny"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)
    return (path, "--trust-remote-code"), model


def _of_codes(folder: Path) -> tuple[tuple[str, ...], Any]:
    path = quantised_folders.write_folder(folder / "codes", "fp8")
    return (str(path),), load_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("make", [_of_revision, _of_own_code, _of_codes])
def test_the_code_for_a_folder_loads_its_revision_with_its_code_dequantised(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    words, wanted = make(tmp_path)
    tried = dict(advices(*words, "--dtype", "float32"))
    asks = "'dequantize': True" in tried["transformers"].code  # without it, a GPU keeps the codes
    assert asks == (make is _of_codes)
    for strategy in ("streaming", "transformers"):
        assert_equal(loaded(tried[strategy]), wanted)


def test_the_code_for_a_gguf_file_beside_another_loads_this_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "checkpoints"))
    import gguf_files

    layout = next(one for one in gguf_files.LAYOUTS if one.name == "GGUF in Q8_0")
    path = layout.make(tmp_path).path
    file = path if path.is_file() else next(path.glob("*.gguf"))
    shutil.copy(file, file.with_name("another.gguf"))
    kind = transformers.AutoModelForCausalLM
    wanted = kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tried = {strategy: loaded(advice) for strategy, advice in advices(str(file))}
    assert tried.keys() == {"streaming", "transformers"}
    for model in tried.values():
        assert_equal(model, wanted)


def test_every_choice_of_recommend_is_one_of_these_tests() -> None:
    """A new option that chooses what is loaded needs a case here, or a layout of tests/checkpoints."""
    names = {one.name for one in verb.recommend.params}
    limits = {"ram", "vram", "ranks", "disk", "disk_latency", "uses", "allow", "results", "all"}
    limits |= {"json", "help"}
    assert names - limits == {
        "model", "models", "assigned", "checkpoint", "key", "adapter", "trust_remote_code", "device",
        "dtype",
    }  # fmt: skip
