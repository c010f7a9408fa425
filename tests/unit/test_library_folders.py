"""Folders of diffusers and timm: ``load_pretrained`` gives what the library gives, or says why not."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from model_differences import differences
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.checkpoint.truth import index
from weighin.errors import ConfigError
from weighin.models import pretrained_timm
from weighin.recommend.snippet import pretrained_snippet
from weighin.stream.hugging_face import own
from weighin.stream.pretrained_folder import own_dtype
from weighin.stream.pretrained_library import DIFFUSERS, LIBRARIES, TIMM, library_in
from weighin.suite import registry

needs_diffusers = pytest.mark.skipif(
    find_spec("diffusers") is None, reason="needs diffusers, from weighin[diffusers]"
)
ONE_FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(autouse=True)
def _makers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "checkpoints"))


def saved(module: str, name: str, folder: Path) -> Path:
    """Return the folder that a maker of ``tests/checkpoints`` writes."""
    torch.manual_seed(0)
    path: Path = import_module(module)._RIGHT[name](folder).path
    return path


def of_library(folder: Path, dtype: torch.dtype | None) -> torch.nn.Module:
    """Return the model that the folder's own library loads."""
    config = json.loads((folder / "config.json").read_text())
    model: torch.nn.Module
    if "architecture" in config:
        model = pytest.importorskip("timm").create_model(f"local-dir:{folder}", pretrained=True)
        return model.to(dtype) if dtype else model
    kind = getattr(pytest.importorskip("diffusers"), config["_class_name"])
    model = kind.from_pretrained(folder, torch_dtype=dtype)
    return model


@needs_diffusers
def test_a_variant_of_a_part_is_loaded_beside_the_usual_file(tmp_path: Path) -> None:
    folder = saved("pipelines", "the unet of a pipeline", tmp_path)
    state = {name: tensor + 1 for name, tensor in load_file(folder / ONE_FILE).items()}
    save_file(state, folder / ONE_FILE.replace(".safetensors", ".fp16.safetensors"))
    own = load_pretrained(folder, variant="fp16").state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())


@needs_diffusers
def test_the_manifest_of_a_part_has_the_values_that_diffusers_loads(tmp_path: Path) -> None:
    name = "weights that stay in float32, and computed buffers"
    folder = saved("pipelines", name, tmp_path / "wan")
    spec, checkpoint = registry.model_and_checkpoint(str(folder))
    assert checkpoint == folder / ONE_FILE and own_dtype(spec) == "float32"
    (tmp_path / "out").mkdir()
    manifest = index(
        spec, checkpoint=checkpoint, fmt="safetensors", folder=tmp_path / "out", dtype="bfloat16"
    )
    reference = of_library(folder, torch.bfloat16)
    tensors = {**dict(reference.named_buffers()), **reference.state_dict()}
    assert {one.name for one in manifest.tensors} == tensors.keys()
    for entry in manifest.tensors:
        dtype = str(tensors[entry.name].dtype).removeprefix("torch.")
        assert dtype in entry.checksums, entry.name
        assert ("bfloat16" in entry.checksums) == (dtype == "bfloat16"), entry.name


def test_only_tensors_in_mapped_files_are_copied_to_memory(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(16))
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("shared", torch.ones(3).share_memory_())
    model.register_buffer("mapped", torch.from_file(f"{tmp_path}/blob", shared=False, size=4))
    places = {name: model.get_buffer(name).data_ptr() for name in ("shared", "mapped")}
    own(model)
    assert model.get_buffer("shared").data_ptr() == places["shared"]
    assert model.get_buffer("mapped").data_ptr() != places["mapped"]


@pytest.mark.parametrize(
    ("config", "library"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "transformers"),
        ({"architectures": ["TimmWrapperModel"], "architecture": "resnet18"}, "transformers"),
        ({"_class_name": "UNet2DConditionModel"}, "diffusers"),
        ({"architecture": "resnet18", "num_classes": 10}, "timm"),
        ({"_class_name": 3, "architecture": None}, "transformers"),
    ],
)
def test_the_library_of_a_folder_is_told_by_its_config(
    config: dict[str, Any], library: str
) -> None:
    assert library_in(config).name == library


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_folder_without_its_library_names_the_extra(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library.name, None)
    (tmp_path / "config.json").write_text(json.dumps({library.class_key: "Some"}))
    save_file({"w": torch.ones(2)}, tmp_path / library.weights[1 if library is DIFFUSERS else 0])
    message, repair = refused(load_pretrained, tmp_path).split("\n")
    assert f"the package {library.name}, which this model needs" in message
    assert library.extra in repair


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_an_argument_for_models_of_transformers_is_refused(tmp_path: Path, library: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({library.class_key: "Some"}))
    save_file({"w": torch.ones(2)}, tmp_path / library.weights[1 if library is DIFFUSERS else 0])
    with pytest.raises(ConfigError, match=f"a folder of {library.name}, for which .* model_class"):
        load_pretrained(tmp_path, model_class="BertModel")


def test_the_recommended_code_calls_the_folders_library() -> None:
    where: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "folder": "F"}
    code = pretrained_snippet(registry.strategy("diffusers"), "AutoencoderKL", **where)
    assert "from diffusers import AutoencoderKL" in code
    assert "AutoencoderKL.from_pretrained('F', torch_dtype=torch.bfloat16).to('cpu')" in code
    code = pretrained_snippet(registry.strategy("timm"), "resnet18", **where)
    assert "create_model('local-dir:F', pretrained=True).to('cpu', torch.bfloat16)" in code


def test_timm_stays_as_it_was_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm", reason="needs timm, from weighin[timm]", exc_type=ImportError)
    builder = import_module("timm.models._builder")
    before, dtypes = builder.load_pretrained, iter([KeyboardInterrupt])

    def set_default_dtype(_dtype: torch.dtype) -> None:
        if error := next(dtypes, None):
            raise error

    monkeypatch.setattr(torch, "set_default_dtype", set_default_dtype)
    with pytest.raises(KeyboardInterrupt):
        pretrained_timm.from_config("resnet18", {})
    assert builder.load_pretrained is before


def test_another_thread_may_load_a_model_of_timm_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("timm", reason="needs timm, from weighin[timm]", exc_type=ImportError)
    builder = import_module("timm.models._builder")
    calls = []
    monkeypatch.setattr(
        builder, "load_pretrained", lambda *given, **named: calls.append((given, named))
    )

    def created(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(builder.load_pretrained, "model", {}, 10, in_chans=3).result()

    monkeypatch.setattr(pretrained_timm, "_created", created)
    with pytest.raises(ConfigError, match="feature extractor"):
        pretrained_timm.from_config("resnet18", {})
    assert calls == [(("model", {}, 10), {"in_chans": 3})]


TIMM_NAMES = [
    "a residual network", "a residual network in .bin", "a vision transformer of small images",
    "four channels", "rotary positions", "config.json of timm before pretrained_cfg",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", TIMM_NAMES)
def test_a_folder_of_timm_is_what_timm_loads(
    tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    pytest.importorskip("timm", reason="needs timm, from weighin[timm]", exc_type=ImportError)
    folder = saved("timm_folders", name, tmp_path)
    assert registry.model(str(folder)).builder == TIMM.builder
    own = load_pretrained(folder, dtype=dtype or "auto")
    assert differences(own, of_library(folder, dtype)) == []
