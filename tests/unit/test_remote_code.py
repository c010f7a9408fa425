"""Code that comes with a Hugging Face folder: refused, run if trusted, and asked about again later."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_folder import CONFIG, write_folder
from safetensors.torch import load_file

from weighin import load_pretrained
from weighin.cli.app import main
from weighin.errors import ConfigError
from weighin.models.pretrained import from_config
from weighin.plan.start import resume, start
from weighin.recommend.snippet import pretrained_snippet
from weighin.settings.definition import check_suite
from weighin.stream.pretrained_folder import auto_class, digest, read_folder
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
    with pytest.raises(ConfigError) as caught:
        registry.model(str(folder))
    assert caught.value.message == (
        f"the model of {folder} needs the Python code in this folder (auto_map in config.json)"
    )
    assert "add --trust-remote-code to run it" in caught.value.repair
    assert not (tmp_path / "modules").exists()


def test_a_trusted_folder_loads_as_from_pretrained_loads_it(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    wanted = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    model = load_pretrained(folder, trust_remote_code=True)
    left, right = model.state_dict(), wanted.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in right)
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
    with pytest.raises(ConfigError) as caught:
        resume(run)
    line = f"code of the Hugging Face folder {folder}"
    assert caught.value.message.endswith(f"and would run here: {line}; mount {folder}")
    restored = resume(run, trusted=True)
    assert restored.planned[0].cell.model.kwargs == kwargs


def test_code_that_changed_after_the_plan_is_not_run(folder: Path) -> None:
    kwargs = registry.model(str(folder), choice=TRUSTED).kwargs
    with (folder / "modeling_tiny.py").open("a") as file:
        file.write("raise SystemExit\n")
    with pytest.raises(
        ConfigError, match="the model's code was changed after this run was planned"
    ):
        from_config(**kwargs)


def refused(folder: Path, **config: Any) -> ConfigError:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(ConfigError) as caught:
        from_config(**registry.model(str(folder), choice=TRUSTED).kwargs)
    return caught.value


def test_code_in_another_repository_is_not_fetched(folder: Path) -> None:
    error = refused(folder, auto_map={"AutoModel": "owner/name--other.TinyForCausalLM"})
    code = "owner/name--other.TinyForCausalLM"
    assert error.message.startswith(f"{folder}: the code {code!r} of the model")
    assert error.message.endswith("is not in this folder")


def test_another_repositorys_code_that_is_in_the_folder_is_run(folder: Path) -> None:
    auto_map = {"AutoModel": "owner/name--modeling_tiny.TinyForCausalLM"}
    (folder / "config.json").write_text(json.dumps(CONFIG | {"auto_map": auto_map}))
    kwargs = registry.model(str(folder), choice=TRUSTED).kwargs
    assert type(from_config(**kwargs)).__name__ == "TinyForCausalLM"


@pytest.mark.parametrize("place", ["../../evil", "a.b", ""])
def test_code_is_a_module_of_the_folder_itself(folder: Path, place: str) -> None:
    error = refused(folder, auto_map={"AutoModel": f"{place}.TinyForCausalLM"})
    assert "which 'auto_map' in config.json names as module.class, is not in" in error.message


@pytest.mark.parametrize("code", [5, "x", {"folder": 1, "sha256": "a"}, {"folder": "a"}])
def test_a_plan_with_damaged_code_is_refused(folder: Path, tmp_path: Path, code: object) -> None:
    run = planned(folder, tmp_path / "run")
    plan = json.loads((run / "plan.json").read_text())
    plan["cells"][0]["model"]["kwargs"]["code"] = code
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(ConfigError, match="lacks folder, sha256, or has another type"):
        resume(run)


def test_a_class_without_code_is_named(folder: Path) -> None:
    error = refused(folder, architectures=["OtherForCausalLM"])
    assert (
        error.message == "config.json names no code of the class 'OtherForCausalLM' in 'auto_map'"
    )


def test_code_that_needs_a_missing_package_says_so(folder: Path) -> None:
    text = (folder / "modeling_tiny.py").read_text()
    (folder / "modeling_tiny.py").write_text(f"import not_on_any_index\n{text}")
    error = refused(folder)
    assert error.message.startswith(f"{folder}: the model's code cannot be imported: ")
    assert "not_on_any_index" in error.message


def test_the_code_to_paste_trusts_the_folder_too(folder: Path) -> None:
    found = read_folder(folder, TRUSTED)
    auto = auto_class(found.config, found.wanted)
    where: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "folder": str(folder),
        "auto": auto,
    }
    for strategy in ("transformers", "streaming"):
        code = pretrained_snippet(registry.strategy(strategy), found.wanted, **where)
        scope: dict[str, Any] = {}
        exec(code, scope)
        assert type(scope["model"]).__name__ == "TinyForCausalLM", strategy


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *typed: str) -> str:
    monkeypatch.setattr(sys, "argv", ["weighin", *typed])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err


def test_a_resumed_run_takes_no_new_flag_and_no_file_sets_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = planned(folder, tmp_path / "run")
    text = said(monkeypatch, capsys, "bench", "--resume", str(run), "--trust-remote-code")
    assert "a resumed run keeps its settings: --trust-remote-code would be ignored" in text
    Path("pyproject.toml").write_text("[tool.weighin]\ntrust-remote-code = true\n")
    text = said(monkeypatch, capsys, "predict", str(folder))
    assert "pyproject.toml: tool.weighin.trust-remote-code: unknown key" in text


def test_a_conversion_to_the_models_keys_runs_code_only_if_it_is_trusted(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "model.safetensors"
    command = ("convert", str(folder), str(target), "--keys", "model")
    assert "add --trust-remote-code to run it" in said(monkeypatch, capsys, *command)
    assert not target.exists()
    said(monkeypatch, capsys, *command, "--trust-remote-code")
    written, source = load_file(target), load_file(folder / "model.safetensors")
    assert written.keys() == source.keys()
    assert all(torch.equal(written[name], source[name]) for name in source)
