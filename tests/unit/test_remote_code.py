"""Code that comes with a Hugging Face folder: refused, run if trusted, and asked about again later."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from model_differences import state_differences
from remote_folder import CONFIG, write_folder
from safetensors.torch import load_file
from typed_here import typed

from weighin import load_pretrained
from weighin.models.pretrained import from_config
from weighin.plan.start import resume, start
from weighin.settings.definition import check_suite
from weighin.stream.hugging_face_folder import digest
from weighin.stream.pretrained_library import FolderChoice
from weighin.suite import registry

TRUSTED = FolderChoice(trust_remote_code=True)


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the copies of the code that transformers makes inside the test's folder."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny")


def planned(folder: Path, run: Path) -> Path:
    suite = {"models": str(folder), "strategies": "transformers", "isolation": "process"}
    start(check_suite(suite | {"trust_remote_code": True}), run)
    return run


def test_code_is_refused_unless_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    message, repair = refused(registry.model, str(folder)).split("\n")
    assert message == (
        f"the model of {folder} needs Python code of this folder (auto_map in config.json)"
    )
    assert "add --trust-remote-code to run it" in repair
    assert not (tmp_path / "modules").exists()


@pytest.mark.parametrize("chosen", ["", "AutoModel"])
def test_code_beside_a_class_of_transformers_needs_no_trust(tmp_path: Path, chosen: str) -> None:
    from transformers import BertConfig, BertModel

    wanted = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    wanted.save_pretrained(path := tmp_path / "model")
    (path / "modeling_mine.py").write_text("raise SystemExit('this code must not run')\n")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_mine.BertModel"}
    (path / "config.json").write_text(json.dumps(config))
    assert type(load_pretrained(path, model_class=chosen)).__name__ == "BertModel"
    assert "code" not in registry.model(str(path)).kwargs
    part = registry.model(str(path), choice=FolderChoice(model_class="BertEncoder")).kwargs
    assert (part["architecture"], "code" in part) == ("BertEncoder", False)
    assert registry.model(str(path), choice=TRUSTED).kwargs["code"]["folder"] == str(path)


def test_a_trusted_folder_loads_as_from_pretrained_loads_it(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model = load_pretrained(folder, trust_remote_code=True)
    assert state_differences(model.state_dict(), wanted.state_dict()) == []
    assert model.scale.tolist() == [2.0, 2.0, 2.0]
    assert (tmp_path / "modules").exists()
    tokens = torch.arange(4).unsqueeze(0)
    assert torch.equal(model(tokens), wanted(tokens))


def test_the_plan_keeps_the_code_and_somebody_elses_run_asks_for_trust(
    folder: Path, tmp_path: Path
) -> None:
    run = planned(folder, tmp_path / "run")
    kwargs = json.loads((run / "plan.json").read_text())["cells"][0]["model"]["kwargs"]
    assert kwargs["code"] == {"folder": str(folder), "sha256": digest(folder)}
    assert resume(run).planned[0].cell.model.kwargs == kwargs
    (run / "plan.json").write_text((run / "plan.json").read_text() + "\n")
    shown = f"and would run here: code of the Hugging Face folder {folder}; mount {folder}\n"
    assert shown in refused(resume, run)
    restored = resume(run, trusted=True)
    assert restored.planned[0].cell.model.kwargs == kwargs


def test_code_that_changed_after_the_plan_is_not_run(folder: Path) -> None:
    kwargs = registry.model(str(folder), choice=TRUSTED).kwargs
    with (folder / "modeling_tiny.py").open("a") as file:
        file.write("raise SystemExit\n")
    changed = "the model's code changed after this run began"
    assert changed in refused(from_config, **kwargs)


def from_trusted(folder: Path, **config: Any) -> Any:
    """Build the model of a folder whose code is trusted; ``config`` replaces keys of config.json."""
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return from_config(**registry.model(str(folder), choice=TRUSTED).kwargs)


def test_another_repositorys_code_that_is_in_the_folder_is_run(folder: Path) -> None:
    auto_map = {"AutoModel": "owner/name--modeling_tiny.TinyForCausalLM"}
    assert type(from_trusted(folder, auto_map=auto_map)).__name__ == "TinyForCausalLM"


NOT_HERE = "but this folder lacks its module"
ELSEWHERE = {
    "of a folder above": ({"auto_map": {"AutoModel": "../../evil.TinyForCausalLM"}}, NOT_HERE),
    "of a folder inside": ({"auto_map": {"AutoModel": "inside/evil.TinyForCausalLM"}}, NOT_HERE),
    "of a package": ({"auto_map": {"AutoModel": "a.b.TinyForCausalLM"}}, NOT_HERE),
    "of no module": ({"auto_map": {"AutoModel": ".TinyForCausalLM"}}, NOT_HERE),
    "of a repository": ({"auto_map": {"AutoModel": "o/n--other.TinyForCausalLM"}}, "but this folder lacks its module"),
    "of another class": ({"architectures": ["OtherForCausalLM"]}, "'auto_map' in config.json has no entry for the class 'OtherForCausalLM'"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_code_is_a_module_of_the_folder_itself_that_has_the_class(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    (folder / "inside").mkdir()
    (folder / "inside/evil.py").write_text("raise SystemExit('this code must not run')\n")
    assert words in refused(from_trusted, folder, **changes)


def test_code_that_needs_a_missing_package_says_so(folder: Path) -> None:
    text = (folder / "modeling_tiny.py").read_text()
    (folder / "modeling_tiny.py").write_text(f"import not_on_any_index\n{text}")
    said = refused(from_trusted, folder)
    assert said.startswith(f"{folder}: the model's code cannot be imported: ")
    assert "not_on_any_index" in said


@pytest.mark.parametrize("code", [5, "x", {"folder": 1, "sha256": "a"}, {"folder": "a"}])
def test_a_plan_with_damaged_code_is_refused(folder: Path, tmp_path: Path, code: object) -> None:
    run = planned(folder, tmp_path / "run")
    plan = json.loads((run / "plan.json").read_text())
    plan["cells"][0]["model"]["kwargs"]["code"] = code
    (run / "plan.json").write_text(json.dumps(plan))
    assert "missing or has the wrong type; it needs folder, sha256" in refused(resume, run)


def test_a_resumed_run_takes_no_new_flag(folder: Path, tmp_path: Path) -> None:
    run = planned(folder, tmp_path / "run")
    code, text = typed("bench", "--resume", run, "--trust-remote-code", columns=200)
    assert code == 2
    assert "a resumed run keeps its settings: --trust-remote-code would be ignored" in text


def test_a_conversion_to_the_models_keys_runs_code_only_if_it_is_trusted(
    folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model.safetensors"
    command = ("convert", folder, target, "--keys", "model")
    assert "add --trust-remote-code to run it" in typed(*command, columns=200)[1]
    assert not target.exists()
    assert typed(*command, "--trust-remote-code")[0] == 0
    assert state_differences(load_file(target), load_file(folder / "model.safetensors")) == []
