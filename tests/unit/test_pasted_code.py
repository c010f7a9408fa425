"""The code that ``recommend`` prints loads what was asked for: it is run, and its model compared."""

import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import quantised_folders
import remote_folder
import torch
from click.testing import CliRunner
from nightly import nightly
from safetensors.torch import save_file

from weighin.cli import _options
from weighin.cli import recommend as verb
from weighin.cli.app import app
from weighin.plan.task import Planned
from weighin.predict.prediction import Prediction, Work
from weighin.recommend import answer
from weighin.recommend.answer import Advice, advise, gather
from weighin.stream.pretrained_folder import CONFIG
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
    left, right = ({**one.state_dict(), **dict(one.named_buffers())} for one in (model, wanted))
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


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


def _reference(made: Path, chosen: dict[str, str], dtype: str) -> torch.nn.Module:
    kind = getattr(transformers, chosen.get("model_class", "LlamaForCausalLM"))
    more = {"variant": chosen["variant"]} if "variant" in chosen else {}
    model: torch.nn.Module = kind.from_pretrained(
        made / "base", dtype=getattr(torch, dtype), **more
    )
    if "adapter" in chosen:
        model = peft.PeftModel.from_pretrained(model, chosen["adapter"]).merge_and_unload()
    return model


CHOICES = [
    dict(pair for pair in pairs if pair)
    for pairs in product(
        (None, ("variant", "fp16")), (None, ("model_class", "LlamaModel")), (None, ("adapter", ""))
    )
]
CHOSEN = [one for one in CHOICES if not {"model_class", "adapter"} <= one.keys()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", CHOSEN, ids=lambda one: " ".join(one) or "as saved")
def test_the_code_for_a_folder_loads_what_was_chosen(
    made: Path, choice: dict[str, str], dtype: str
) -> None:
    chosen = {key: value or str(made / "adapter") for key, value in choice.items()}
    wanted = _reference(made, chosen, dtype)
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]

    build = partial(_built, type(wanted), wanted.config, dtype)
    tried = set()
    for strategy, advice in advices(str(made / "base"), *words, "--dtype", dtype):
        if "model_class" in chosen and not registry.strategy(strategy).maps_keys:
            continue  # cannot load the names of another class, which the real prediction says
        assert_equal(loaded(advice, build), wanted)
        tried.add(strategy)
    by_library = {"peft_merge"} if "adapter" in chosen else {"transformers"}
    assert tried >= OWN | by_library
    assert "adapter" in chosen or "model_class" in chosen or len(tried) > 10


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_code_for_a_folders_class_loads_the_weights_of_another_file(
    made: Path, has_adapter: bool, dtype: str
) -> None:
    wanted: Any = _llama(3)
    wanted.save_pretrained("other")
    wanted = type(wanted).from_pretrained("other", dtype=getattr(torch, dtype))
    words = ["--checkpoint", str(made / "other.pt"), "--dtype", dtype]
    if has_adapter:
        words += ["--adapter", str(made / "adapter")]
        wanted = peft.PeftModel.from_pretrained(wanted, made / "adapter").merge_and_unload()

    kind, config = transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL)
    build = partial(_built, kind, config, dtype)
    tried = set()
    for strategy, advice in advices(str(made / "base"), *words):
        if strategy in ("transformers", "peft_merge"):
            continue  # cannot load another file, which the real prediction says
        assert_equal(loaded(advice, build), wanted)
        tried.add(strategy)
    assert tried >= OWN


def test_the_code_for_a_folder_with_code_of_its_own_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = remote_folder.write_folder(tmp_path / "tiny")
    wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tried = dict(advices(str(folder), "--trust-remote-code"))
    for strategy in ("streaming", "transformers"):
        assert "trust_remote_code=True" in tried[strategy].code
        assert_equal(loaded(tried[strategy]), wanted)


def test_the_code_for_a_revision_loads_that_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    entry = tmp_path / "models--Some--Model"
    (entry / "refs").mkdir(parents=True)
    for revision, commit, seed in (("main", "0123", 1), ("old", "4567", 5)):
        _llama(seed).save_pretrained(entry / "snapshots" / commit)
        (entry / "refs" / revision).write_text(commit)
    tried = dict(advices("Some/Model", "--set", "revision=old"))
    for strategy in ("streaming", "transformers"):
        assert_equal(loaded(tried[strategy]), _llama(5))


@pytest.mark.parametrize("method", ["fp8", *nightly("compressed-tensors")])
def test_the_code_for_quantised_weights_dequantises_them(method: str, tmp_path: Path) -> None:
    quantised_folders.write_folder(tmp_path / "quantised", method)
    assert "quantization_config" in (tmp_path / "quantised" / CONFIG).read_text()
    tried = {strategy: loaded(advice) for strategy, advice in advices("quantised")}
    assert {"streaming", "transformers"} <= tried.keys()
    assert_equal(tried["streaming"], tried["transformers"])


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
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tried = set()
    for strategy, advice in advices(str(file)):
        assert_equal(loaded(advice), wanted)
        tried.add(strategy)
    assert tried == {"streaming", "transformers"}


def test_every_choice_of_recommend_is_one_of_these_tests() -> None:
    """A new option that chooses what is loaded needs a case here."""
    names = {one.name for one in verb.recommend.params}
    limits = {"ram", "vram", "ranks", "disk", "disk_latency", "uses", "allow", "results", "all"}
    limits |= {"json", "help"}
    assert names - limits == {
        "model", "models", "assigned", "checkpoint", "key", "adapter", "trust_remote_code", "device",
        "dtype",
    }  # fmt: skip
    assert registry.strategies()
