"""Folders of diffusers and timm: their library loads them, or it is said why not.

Which folders load equally is shown by the layouts of ``tests/checkpoints``.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.checkpoint.truth import index
from weighin.errors import ConfigError
from weighin.models import pretrained_timm
from weighin.recommend.snippet import pretrained_snippet
from weighin.stream.hugging_face import own
from weighin.stream.pretrained_folder import own_dtype
from weighin.stream.pretrained_library import DIFFUSERS, LIBRARIES, library_in
from weighin.suite import registry


def test_a_manifest_has_what_diffusers_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers, from weighin[diffusers]")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "checkpoints"))
    folder, out = tmp_path / "wan", tmp_path / "out"
    import_module("pipelines").wan().save_pretrained(folder)
    spec, checkpoint = registry.model_and_checkpoint(str(folder))
    assert checkpoint == folder / "diffusion_pytorch_model.safetensors"
    assert own_dtype(spec) == "float32"
    out.mkdir()
    manifest = index(spec, checkpoint=checkpoint, fmt="safetensors", folder=out, dtype="bfloat16")
    kind = diffusers.WanTransformer3DModel
    reference = kind.from_pretrained(folder, torch_dtype=torch.bfloat16)
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


def test_the_library_of_a_folder_is_told_by_its_config() -> None:
    wrapped = {"architectures": ["TimmWrapperModel"], "architecture": "resnet18"}
    for config, library in (
        ({"architectures": ["LlamaForCausalLM"]}, "transformers"),
        (wrapped, "transformers"),
        ({"_class_name": "UNet2DConditionModel"}, "diffusers"),
        ({"architecture": "resnet18", "num_classes": 10}, "timm"),
        ({"_class_name": 3, "architecture": None}, "transformers"),
    ):
        assert library_in(config).name == library


@pytest.mark.parametrize("library", LIBRARIES[1:])
def test_a_folder_names_the_extra_that_is_missing_and_refuses_arguments_of_transformers(
    tmp_path: Path, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({library.class_key: "Some"}))
    save_file({"w": torch.ones(2)}, tmp_path / library.weights[1 if library is DIFFUSERS else 0])
    said = refused(load_pretrained, tmp_path, model_class="BertModel")
    assert f"a folder of {library.name}, for which load_pretrained has no model_class" in said
    monkeypatch.setitem(sys.modules, library.name, None)
    message, repair = refused(load_pretrained, tmp_path).split("\n")
    assert f"the package {library.name}, which this model needs" in message
    assert library.extra in repair


def test_the_recommended_code_calls_the_folders_library() -> None:
    where: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "folder": "F"}
    code = pretrained_snippet(registry.strategy("diffusers"), "AutoencoderKL", **where)
    assert "from diffusers import AutoencoderKL" in code
    assert "AutoencoderKL.from_pretrained('F', torch_dtype=torch.bfloat16).to('cpu')" in code
    code = pretrained_snippet(registry.strategy("timm"), "resnet18", **where)
    assert "create_model('local-dir:F', pretrained=True).to('cpu', torch.bfloat16)" in code


@pytest.fixture
def builder() -> Any:
    pytest.importorskip("timm", reason="needs timm, from weighin[timm]", exc_type=ImportError)
    return import_module("timm.models._builder")


def test_timm_is_as_before_after_an_interrupt(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, dtypes = builder.load_pretrained, iter([KeyboardInterrupt])

    def set_default_dtype(_dtype: torch.dtype) -> None:
        if error := next(dtypes, None):
            raise error

    monkeypatch.setattr(torch, "set_default_dtype", set_default_dtype)
    with pytest.raises(KeyboardInterrupt):
        pretrained_timm.from_config("resnet18", {})
    assert builder.load_pretrained is before


def test_another_thread_may_load_of_timm_meanwhile(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
