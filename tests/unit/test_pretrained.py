"""Hugging Face folders: ``load_pretrained`` gives what ``from_pretrained`` gives, or says why not.

More folders, and what is to be chosen in some, are layouts of ``tests/checkpoints``.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import transformers
from factories import planned, refused
from model_differences import differences, state_differences
from nightly import nightly
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file

from weighin import load_pretrained, load_streaming
from weighin.checkpoint import cache
from weighin.checkpoint.checksum import checksum
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.generate import index
from weighin.errors import CheckpointError, ConfigError
from weighin.models import pretrained_timm
from weighin.models.pretrained import from_config, pretrained_class, written_after_load
from weighin.predict import client
from weighin.recommend.snippet import pretrained_snippet
from weighin.stream import load_pretrained as loading
from weighin.stream.hugging_face_folder import (
    BUILDER,
    cached_snapshot,
    from_pretrained_arguments,
    own_dtype,
    path_of,
    read_folder,
)
from weighin.stream.load_pretrained import own
from weighin.stream.pretrained_library import DIFFUSERS, LIBRARIES, FolderChoice, library_in
from weighin.suite import registry
from weighin.worker.verify import WrongWeights, check_values

MOE = "Qwen3MoeForCausalLM"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CLVP = SMALL | {"hidden_size": 128, "intermediate_size": 64, "projection_dim": 128}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MARIAN = {
    "d_model": 32, "vocab_size": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}, {}),
    "shards": ("LlamaForCausalLM", DECODER, {"max_shard_size": "20KB"}),
    "experts": (MOE, DECODER | EXPERTS, {}),
    "kept in float32": ("DeepseekV3ForCausalLM", DECODER | DEEPSEEK, {}),
    "computed weights": ("MarianMTModel", MARIAN, {}),
    "one of several part configurations": ("ClvpEncoder", CLVP, {}),
}
Make = Callable[[str], Path]


def save(folder: Path, name: str, seed: int = 0) -> Path:
    architecture, settings, options = FOLDERS[name]
    kind = pretrained_class(architecture)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**settings))
    if name == "shards":
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that saves a folder of ``FOLDERS``, once."""
    root = tmp_path_factory.mktemp("pretrained")
    return lambda name: root / name if (root / name).exists() else save(root / name, name)


def of_library(folder: Path, **options: Any) -> Any:
    return pretrained_class(read_folder(folder).wanted).from_pretrained(folder, **options)


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, torch.float16, *nightly(torch.float32)])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_loads_as_its_library_loads_it(
    make: Make, name: str, dtype: torch.dtype | str
) -> None:
    model = load_pretrained(make(name), dtype=dtype)
    assert not model.training
    assert differences(model, of_library(make(name), dtype=dtype)) == []


CLASSES = {
    "": "LlamaForCausalLM", "LlamaModel": "LlamaModel", "AutoModel": "LlamaModel",
    "transformers.AutoModelForSequenceClassification": "LlamaForSequenceClassification",
    "AutoformerModel": "AutoformerModel",  # its own name, of no auto class
}  # fmt: skip


def test_a_folder_is_a_model_of_its_class_or_of_the_one_that_is_asked_for(make: Make) -> None:
    for asked, kind in CLASSES.items():
        spec = registry.model(str(make("tied")), choice=FolderChoice(model_class=asked))
        assert (spec.name, spec.builder, spec.title) == ("tied", BUILDER, "tied")
        assert spec.kwargs["architecture"] == kind
    assert own_dtype(registry.model(str(make("shards")))) == "bfloat16"
    assert own_dtype(registry.model("gpt2-tiny")) == "float32"


def test_a_file_elsewhere_is_indexed_by_the_models_own_keys(make: Make, tmp_path: Path) -> None:
    spec = registry.model(str(make("tied")))
    state = from_config(**spec.kwargs).state_dict()
    torch.save(state, tmp_path / "weights.pt")
    (tmp_path / "entry").mkdir()
    made = index(spec, checkpoint=tmp_path / "weights.pt", fmt="pt", folder=tmp_path / "entry")
    assert {one.name for one in made.tensors if one.kind != "non_persistent_buffer"} == set(state)


def predicted(folder: Path) -> list[Any]:
    spec = registry.model(str(folder))
    pairs = [(registry.strategy(name), dict[str, Any]()) for name in ("baseline", "dcp")]
    cells = planned((spec,), pairs, own_formats={spec.title: "safetensors"})
    return list(client.predict(cells, checkpoint=read_folder(folder).checkpoint))


def test_formats_that_weighin_writes_from_converted_keys_are_predicted(make: Make) -> None:
    found = predicted(make("experts"))
    assert [(one.cannot, one.host_anon_peak_bytes > 0) for one in found] == 2 * [("", True)]


def test_a_folder_that_its_library_refuses_is_not_predicted(make: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make("experts"), tmp_path / "folder")
    state = load_file(file := folder / "model.safetensors")
    name = "model.norm.weight"
    save_file(state | {name: torch.zeros(5)}, file, metadata={"format": "pt"})
    assert f": 1 key of another shape ({name})" in refused(predicted, folder)
    del state[name]
    save_file(state, file, metadata={"format": "pt"})
    said = refused(predicted, folder)
    assert "lacks weights of this " in said and said.partition("\n")[0].endswith(f": {name}")


def test_a_file_that_its_library_does_not_read_is_no_reference(make: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make("tied"), tmp_path / "model")
    other = shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
    assert "from_pretrained would read model.safetensors in this folder, not this file" in refused(
        from_pretrained_arguments, Path(other)
    )
    torch.save(load_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    conversion = Conversion(folder / "pytorch_model.bin", tmp_path / "out.pt", model_keys=True)
    assert "from_pretrained" in refused(conversion.write)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/a.safetensors", "a.bin", 5, "a\0.safetensors"]
)
def test_weights_of_an_odd_name_are_refused(make: Make, tmp_path: Path, name: object) -> None:
    folder = shutil.copytree(make("tied"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"transformers_weights": name}
    (folder / "config.json").write_text(json.dumps(config))
    assert "which is not a safetensors file or index in this folder" in refused(
        load_pretrained, folder
    )
    with pytest.raises((ValueError, OSError, AttributeError)):
        pretrained_class("LlamaForCausalLM").from_pretrained(folder)


# What else of the model equals from_pretrained: its name, and what it saves


@pytest.mark.parametrize("keys", ["of the file", "of the model"])
def test_a_model_is_saved_with_the_keys_of_its_file(make: Make, tmp_path: Path, keys: str) -> None:
    def saved_keys(model: Any, folder: Path) -> set[str]:
        model.save_pretrained(folder)
        return set(load_file(folder / "model.safetensors"))

    folder = shutil.copytree(make("experts"), tmp_path / "experts")
    if keys == "of the model":
        state = of_library(folder).state_dict()
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    wanted = saved_keys(of_library(folder), tmp_path / "wanted")
    assert saved_keys(load_pretrained(folder), tmp_path / "found") == wanted


def test_a_model_has_the_names_and_attributes_that_its_library_gives(make: Make) -> None:
    def names(model: Any) -> dict[str, str]:
        modules = {path: getattr(one, "name_or_path", "") for path, one in model.named_modules()}
        return modules | {"config": model.config.name_or_path}

    model, reference = load_pretrained(make("experts")), of_library(make("experts"))
    assert names(model) == names(reference)
    assert names(model)["config"] == str(make("experts"))
    assert vars(model).keys() <= vars(reference).keys()


# What from_pretrained changes after reading: both values are named, and neither is wrong

TEXT = SMALL | {"intermediate_size": 64}
TOWER = {key: one for key, one in TEXT.items() if key != "vocab_size"}
KINDS: Mapping[str, tuple[dict[str, Any], str]] = {
    "ChineseCLIPModel": ({
        "text_config": TEXT | {"max_position_embeddings": 64},
        "vision_config": TOWER | {"image_size": 32, "patch_size": 8}, "projection_dim": 16,
    }, "text_model.embeddings.word_embeddings.weight"),
    "FunnelModel": ({
        "vocab_size": 128, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "block_sizes": [1, 1], "num_decoder_layers": 1, "pad_token_id": 2,
    }, "embeddings.word_embeddings.weight"),
    "YoutuForCausalLM": (TEXT | {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 3, "tie_word_embeddings": False,
    }, "model.embed_tokens.weight"),
    "LlamaForCausalLM": (TEXT | {"num_key_value_heads": 2, "pad_token_id": 3}, ""),
}  # fmt: skip
"""The settings of a class, and the tensor whose padding row ``from_pretrained`` sets to zero."""


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Return the folder of a small model whose weights are all random, also padding rows."""
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    if not hasattr(transformers, request.param):
        pytest.skip(f"transformers {transformers.__version__} has no {request.param}")
    kind = pretrained_class(request.param)
    torch.manual_seed(0)
    model = kind(kind.config_class(**KINDS[request.param][0]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder := tmp_path / str(request.param))
    return folder


@pytest.mark.parametrize("folder", KINDS, indirect=True)
def test_the_same_tensors_are_changed_and_found_without_changing_them(folder: Path) -> None:
    before = torch.get_rng_state()
    model = load_pretrained(folder, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before)
    wanted = pretrained_class(folder.name).from_pretrained(folder, dtype=torch.bfloat16)
    assert differences(model, wanted) == []
    assert written_after_load(model) == ({KINDS[folder.name][1]} - {""})


@pytest.mark.parametrize("folder", ["FunnelModel", "YoutuForCausalLM"], indirect=True)
def test_the_values_of_the_file_and_of_from_pretrained_are_both_right(folder: Path) -> None:
    """A checkpoint that weighin writes has the second."""

    def sums(model: torch.nn.Module) -> dict[str, str]:
        tensors = {**model.state_dict(), **dict(model.named_buffers())}
        return {one.name: checksum(tensors[one.name]) for one in manifest.tensors}

    tensor, spec = KINDS[folder.name][1], registry.model(str(folder))
    prepared = cache.ensure(spec, "safetensors", checkpoint=read_folder(folder).checkpoint)
    manifest = prepared.manifest()
    assert [one.name for one in manifest.tensors if one.file_checksums] == [tensor]
    of_file = load_streaming(lambda: from_config(**spec.kwargs), folder)
    theirs = pretrained_class(folder.name).from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert any(torch.equal(of_file.state_dict()[tensor], one) for one in stored.values())
    assert not torch.equal(of_file.state_dict()[tensor], theirs.state_dict()[tensor])
    for model in (of_file, theirs):
        check_values(sums(model), manifest, torch.float32)
    with torch.no_grad():
        of_file.state_dict()[tensor][5] += 1
    with pytest.raises(WrongWeights, match=f"1 tensor with other values .* checkpoint: {tensor}"):
        check_values(sums(of_file), manifest, torch.float32)

    prepared = cache.ensure(spec, "pt", checkpoint=read_folder(folder).checkpoint)
    assert "file_checksums" in json.loads(prepared.manifest_path.read_text())["tensors"][0]
    assert not any(one.file_checksums for one in prepared.manifest().tensors)
    written = torch.load(prepared.path, weights_only=True)
    assert state_differences(written, load_pretrained(folder).state_dict()) == []


# Folders of diffusers and timm


def test_a_manifest_has_what_diffusers_loads(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
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
    tmp_path: Path, library: Any, monkeypatch: MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({library.class_key: "Some"}))
    save_file({"w": torch.ones(2)}, tmp_path / library.weights[1 if library is DIFFUSERS else 0])
    said = refused(load_pretrained, tmp_path, model_class="BertModel")
    assert f"a folder of {library.name}, for which load_pretrained has no model_class" in said
    monkeypatch.setitem(sys.modules, library.name, None)
    message, repair = refused(load_pretrained, tmp_path).split("\n")
    assert f"this model needs the package {library.name}, which cannot be imported" in message
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


def test_timm_is_as_before_after_an_interrupt(builder: Any, monkeypatch: MonkeyPatch) -> None:
    before = builder.load_pretrained
    monkeypatch.setattr(torch, "set_default_dtype", Mock(side_effect=[KeyboardInterrupt, None]))
    with pytest.raises(KeyboardInterrupt):
        pretrained_timm.from_config("resnet18", {})
    assert builder.load_pretrained is before


def test_another_thread_may_load_of_timm_meanwhile(builder: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "load_pretrained", own := Mock())

    def created(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(builder.load_pretrained, "model", {}, 10, in_chans=3).result()

    monkeypatch.setattr(pretrained_timm, "_created", created)
    with pytest.raises(ConfigError, match="feature extractor"):
        pretrained_timm.from_config("resnet18", {})
    assert own.call_args_list == [call("model", {}, 10, in_chans=3)]


# Models in the Hub's cache

REVISIONS = {"main": "b", "v1.0": "a", "refs/pr/1": "a"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """Return the folder of the model Some/Model in a cache: two commits, a branch, a tag and a request."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    entry = tmp_path / "hub" / "models--Some--Model"
    (entry / "blobs").mkdir(parents=True)
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        snapshot = save(entry / "snapshots" / commit, "tied", seed)
        for file in [*snapshot.iterdir()]:  # the Hub's client writes links
            file.rename(entry / "blobs" / f"{commit}{file.name}")
            file.symlink_to(f"../../blobs/{commit}{file.name}")
    for name, commit in REVISIONS.items():
        (entry / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (entry / "refs" / name).write_text(commit * 40)
    return entry


@pytest.mark.parametrize("revision", ["", "v1.0", *nightly("refs/pr/1", "a" * 40)])
def test_a_revision_of_a_model_in_the_cache(hub: Path, revision: str) -> None:
    commit = REVISIONS[revision or "main"] if revision in {"", *REVISIONS} else "a"
    snapshot = hub / "snapshots" / (commit * 40)
    wanted = load_file(snapshot / "model.safetensors")
    for source in ("Some/Model/", "Some/Model", hub):
        found = load_pretrained(source, revision=revision).state_dict()
        assert [key for key, one in wanted.items() if not torch.equal(found[key], one)] == []
    for source in ("Some/Model", hub):
        choice = FolderChoice(revision=revision)
        spec, checkpoint = registry.model_and_checkpoint(str(source), choice=choice)
        assert (spec.name, checkpoint) == ("Some/Model", snapshot / "model.safetensors")
        prepared = cache.ensure(spec, "safetensors", checkpoint=checkpoint)
        assert prepared.path == checkpoint
    if not revision:
        assert cached_snapshot("Some/Model") == path_of(Path("Some/Model")) == snapshot


def test_a_revision_of_a_gguf_file_in_the_cache(hub: Path, monkeypatch: MonkeyPatch) -> None:
    snapshot = hub / "snapshots" / ("a" * 40)
    for file in snapshot.iterdir():
        file.unlink()
    (snapshot / "model.gguf").write_bytes(b"GGUF")
    described = Mock(side_effect=CheckpointError("no file of GGUF", ""))
    monkeypatch.setattr(loading, "described_gguf", described)
    for source in ("Some/Model", hub):
        assert "no file of GGUF" in refused(load_pretrained, source, revision="v1.0")
    assert described.call_args_list == 2 * [call(snapshot / "model.gguf")]


@pytest.mark.parametrize("revision", ["../../other", "nothing", "\0", "x" * 300])
def test_a_revision_that_is_not_there_is_refused(hub: Path, make: Make, revision: str) -> None:
    for source in ("Some/Model", hub):
        said = refused(load_pretrained, source, revision=revision)
        assert "the Hub's cache lacks the revision" in said
    said = refused(load_pretrained, make("tied"), revision=revision)
    assert "not a model in the cache of the Hub, so the revision " in said


def test_a_model_without_an_owner_is_found_in_the_cache(hub: Path) -> None:
    hub.rename(hub.parent / "models--bert")
    assert load_pretrained("bert").config.architectures == ["LlamaForCausalLM"]
    assert registry.model("bert").name == "bert"
    choice = FolderChoice(revision="v3")
    assert "lacks the revision v3" in refused(registry.model, "bert", choice=choice)
    assert "no model is called 'bertha'" in refused(registry.model, "bertha")
