"""The variant, the class and the revision of a Hugging Face folder are those of ``from_pretrained``."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.cell import SYNTHESISED
from weighin.cli.app import main
from weighin.errors import CheckpointError
from weighin.models.pretrained import pretrained_class
from weighin.stream import hugging_face
from weighin.stream.pretrained_folder import cached_snapshot, from_pretrained_arguments
from weighin.stream.pretrained_library import FolderChoice
from weighin.suite import registry

BERT = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
Say = Callable[..., tuple[str, str]]


def bert(kind: str = "BertModel", seed: int = 0) -> Any:
    chosen = pretrained_class(kind)
    torch.manual_seed(seed)
    return chosen(chosen.config_class(**BERT))


def auto(name: str) -> Any:
    return getattr(import_module("transformers"), name)


def loads(folder: Path, name: str, source: Path | str | None = None, **options: Any) -> None:
    """Assert that load_pretrained gives what from_pretrained of the class ``name`` gives."""
    assert_equal(load_pretrained(source or folder, **options), auto(name).from_pretrained(folder))


def change(folder: Path, act: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    act(config)
    (folder / "config.json").write_text(json.dumps(config))


def assert_equal(model: Any, wanted: Any) -> None:
    assert type(model) is type(wanted)
    ours, theirs = model.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert model.config.architectures == wanted.config.architectures


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Say:
    """Return a function that runs a command in this process, and returns its output and notes."""
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))

    def said(*typed: object) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["weighin", *map(str, typed)])
        with pytest.raises(SystemExit):
            main()
        written = capsys.readouterr()
        return written.out, written.err

    return said


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/a.safetensors", "a.bin", 5, "a\0.safetensors"]
)
def test_weights_that_from_pretrained_refuses_are_refused(tmp_path: Path, name: object) -> None:
    bert().save_pretrained(tmp_path / "model")
    change(tmp_path / "model", lambda config: config.update(transformers_weights=name))
    said = refused(load_pretrained, tmp_path / "model")
    assert "neither a safetensors file nor an index in this folder" in said
    with pytest.raises((ValueError, OSError, AttributeError)):
        auto("BertModel").from_pretrained(tmp_path / "model")


def test_a_file_that_from_pretrained_does_not_read_is_no_reference(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    said = refused(
        from_pretrained_arguments, Path(shutil.copy(file, file.with_name("b.safetensors")))
    )
    assert (
        "from_pretrained would not read this file, but model.safetensors in the file's folder"
        in said
    )


@pytest.mark.parametrize(
    ("saved", "asked", "truth"),
    [
        ("BertForMaskedLM", "BertForMaskedLM", "BertForMaskedLM"),
        ("BertForMaskedLM", "transformers.AutoModelForCausalLM", "AutoModelForCausalLM"),
        ("BertForPreTraining", "AutoModel", "AutoModel"),
        ("BertForPreTraining", "BertModel", "BertModel"),
        ("BertForPreTraining", "AutoModelForMaskedLM", "AutoModelForMaskedLM"),
    ],
)
def test_a_class_is_loaded_as_its_from_pretrained_loads_it(
    tmp_path: Path, say: Say, saved: str, asked: str, truth: str
) -> None:
    folder = tmp_path / "model"
    bert(saved).save_pretrained(folder)
    wanted = auto(truth).from_pretrained(folder)
    assert_equal(load_pretrained(folder, model_class=asked), wanted)
    spec = registry.model(str(folder), choice=FolderChoice(model_class=asked))
    assert spec.kwargs["architecture"] == type(wanted).__name__
    target = tmp_path / "made.safetensors"
    say("convert", folder, target, "--keys", "model", "--set", f"model_class={asked}", "--verify")
    assert load_file(target).keys() <= wanted.state_dict().keys()


def test_the_text_part_of_a_composite_model_is_built_from_its_own_configuration(
    tmp_path: Path,
) -> None:
    kind = pretrained_class("Qwen3_5ForConditionalGeneration")
    text = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}  # fmt: skip
    kind(kind.config_class(text_config=text, vision_config=vision)).save_pretrained(tmp_path / "m")
    loads(tmp_path / "m", "AutoModelForCausalLM", model_class="AutoModelForCausalLM")


@pytest.mark.parametrize("kind", ["BertModel", "BertForMaskedLM"])
def test_a_folder_without_a_class_has_that_of_automodel(
    tmp_path: Path, say: Say, kind: str
) -> None:
    folder = tmp_path / "model"
    model = bert(kind)
    model.save_pretrained(folder)
    if kind == "BertForMaskedLM":  # AutoModel would draw a pooler at random
        state = load_file(folder / "model.safetensors")
        pooler = {f"bert.pooler.dense.{name}": one for name, one in
                  {"weight": torch.randn(32, 32), "bias": torch.randn(32)}.items()}  # fmt: skip
        save_file(state | pooler, folder / "model.safetensors", {"format": "pt"})
    change(folder, lambda config: config.pop("architectures"))
    loads(folder, "AutoModel")
    note = "names no class in 'architectures', so weighin takes that of AutoModel"
    assert note in say("inspect", folder)[1]
    note = "so weighin takes BertModel, which AutoModel chooses"
    assert note in say("predict", folder, "--strategies", "baseline")[1]


def test_a_folder_whose_class_nothing_names_asks_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    bert().save_pretrained(folder)
    change(folder, lambda c: (c.pop("architectures"), c.update(model_type="visual_bert_mine")))
    repair = "name the class: --set model_class=CLASS (in Python: model_class='CLASS')"
    assert repair in refused(load_pretrained, folder)
    loads(folder, "BertModel", model_class="BertModel")
    said = refused(load_pretrained, folder, model_class="AutoModelForCausalLM")
    assert "transformers has no AutoModelForCausalLM for the model type visual_bert_mine" in said


def test_code_beside_a_class_of_transformers_needs_no_trust_and_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    bert().save_pretrained(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit('this code must not run')\n")
    change(folder, lambda c: c.update(auto_map={"AutoModel": "modeling_mine.BertModel"}))
    wanted = auto("AutoModel").from_pretrained(folder, trust_remote_code=False)
    assert_equal(load_pretrained(folder), wanted)
    assert_equal(load_pretrained(folder, model_class="AutoModel"), wanted)
    assert "code" not in registry.model(str(folder)).kwargs
    trusted = FolderChoice(trust_remote_code=True)
    assert registry.model(str(folder), choice=trusted).kwargs["code"]["folder"] == str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model in a cache: two commits, a branch "main" and a tag "v1.0"."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    entry = tmp_path / "hub" / "models--owner--name"
    for seed, commit in enumerate(("a" * 40, "b" * 40)):
        snapshot = entry / "snapshots" / commit
        bert(seed=seed).save_pretrained(snapshot)
        blob = entry / "blobs" / commit
        blob.parent.mkdir(exist_ok=True)
        (snapshot / "model.safetensors").rename(blob)
        (snapshot / "model.safetensors").symlink_to(f"../../blobs/{commit}")
    (entry / "refs" / "refs" / "pr").mkdir(parents=True)
    for name, commit in (("main", "b" * 40), ("v1.0", "a" * 40), ("refs/pr/1", "a" * 40)):
        (entry / "refs" / name).write_text(commit)
    return entry


@pytest.mark.parametrize(
    ("revision", "commit"), [("", "b"), ("v1.0", "a"), ("refs/pr/1", "a"), ("a" * 40, "a")]
)
def test_a_revision_of_a_model_in_the_cache(
    hub: Path, say: Say, revision: str, commit: str
) -> None:
    wanted = auto("BertModel").from_pretrained(hub / "snapshots" / (commit * 40))
    assert_equal(load_pretrained("owner/name/", revision=revision), wanted)
    for source in ("owner/name", hub):
        assert_equal(load_pretrained(source, revision=revision), wanted)
        spec, checkpoint = registry.model_and_checkpoint(
            str(source), choice=FolderChoice(revision=revision)
        )
        assert spec.name == "owner/name"
        assert checkpoint == hub / "snapshots" / (commit * 40) / "model.safetensors"
    target = hub.parent / "made.safetensors"
    say("convert", hub, target, "--set", f"revision={revision or 'main'}")
    assert all(torch.equal(load_file(target)[key], one) for key, one in wanted.state_dict().items())


def test_a_revision_of_a_gguf_file_in_the_cache(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub / "snapshots" / ("a" * 40)
    for file in snapshot.iterdir():
        file.unlink()
    (snapshot / "model.gguf").write_bytes(b"GGUF")
    read = []

    def described(file: Path) -> dict[str, str]:
        read.append(file)
        raise CheckpointError("no file of GGUF", "")

    monkeypatch.setattr(hugging_face, "described_gguf", described)
    for source in ("owner/name", hub):
        assert "no file of GGUF" in refused(load_pretrained, source, revision="v1.0")
    assert read == 2 * [snapshot / "model.gguf"]


@pytest.mark.parametrize("revision", ["../../other", "nothing", "\0", "x" * 300])
def test_a_revision_that_the_cache_lacks_is_refused(hub: Path, revision: str) -> None:
    for source in ("owner/name", hub):
        said = refused(load_pretrained, source, revision=revision)
        assert "the Hub's cache lacks the revision" in said


def test_a_snapshot_with_only_a_tag_names_the_tag(hub: Path, say: Say) -> None:
    (hub / "refs" / "main").unlink()
    shutil.rmtree(hub / "snapshots" / ("b" * 40))
    message, repair = refused(cached_snapshot, "owner/name").split("\n")
    assert message == (
        "owner/name: the Hub's cache lacks the revision main of this model; it has: refs/pr/1,"
        f" v1.0, {'a' * 40}"
    )
    assert "hf download owner/name" in repair
    assert "--set revision=refs/pr/1" in say("inspect", "owner/name")[1]
    assert "model.safetensors" in say("inspect", "owner/name", "--set", "revision=v1.0")[0]


def test_a_broken_link_of_a_snapshot_is_named(hub: Path, say: Say) -> None:
    (hub / "blobs" / ("b" * 40)).unlink()
    file = hub / "snapshots" / ("b" * 40) / "model.safetensors"
    assert refused(load_pretrained, "owner/name") == (
        f"{file}: a broken symbolic link to ../../blobs/{'b' * 40}, which does not exist: a file of"
        " owner/name was removed from the cache of the Hub\nhf download owner/name"
    )
    assert "a broken symbolic link to" in say("inspect", file)[1]


def test_broken_links_to_a_shard_and_to_the_config_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    bert().save_pretrained(folder, max_shard_size="60KB")
    shard = sorted(folder.glob("model-*"))[0]
    shard.rename(tmp_path / "away")
    shard.symlink_to(tmp_path / "gone")
    for file in (shard, folder / "config.json"):
        assert refused(load_pretrained, folder) == (
            f"{file}: a broken symbolic link to {tmp_path / 'gone'}, which does not exist\n"
            "restore the file to which the link leads, or correct the link"
        )
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(tmp_path / "gone")


def test_a_model_without_an_owner_is_found_in_the_cache(hub: Path, say: Say) -> None:
    entry = hub.rename(hub.parent / "models--bert")
    loads(entry / "snapshots" / ("b" * 40), "BertModel", "bert")
    assert registry.model("bert").name == "bert"
    assert "lacks the revision v3" in say("inspect", "bert", "--set", "revision=v3")[1]
    assert "no model is called 'bertha'" in say("inspect", "bertha")[1]


def test_a_revision_of_a_plain_folder_is_refused(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "model")
    said = refused(load_pretrained, tmp_path / "model", revision="v1")
    assert "not a model in the cache of the Hub, so the revision v1" in said


def test_the_transformer_of_a_sentence_transformers_folder_is_loaded_and_its_other_parts_named(
    tmp_path: Path, say: Say
) -> None:
    folder = tmp_path / "model"
    bert().save_pretrained(folder)
    parts = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]
    (folder / "modules.json").write_text(json.dumps(parts))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"in_features": 32, "out_features": 8}')
    save_file({"linear.weight": torch.randn(8, 32)}, folder / "2_Dense" / "model.safetensors")
    loads(folder, "AutoModel", model_class="AutoModel")
    assert " ".join(say("inspect", folder)[1].split()).endswith(
        " is the transformer of a sentence-transformers folder; other parts that have weights are not"
        f" loaded: {folder}/2_Dense"
    )
    assert registry.model(str(folder / "2_Dense")).builder == SYNTHESISED
    said = refused(load_pretrained, folder / "2_Dense")
    assert "names neither 'architectures' nor 'model_type'" in said
