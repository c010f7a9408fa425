"""Every layout is loaded right, or refused with its reason; ``make checkpoints`` also tries all other verbs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from folder_choices import _several_parts
from fork_server import ForkServer
from layouts import VERBS, Layout, every
from model_differences import state_differences
from tried import IN_ZOO, Missing, Verdict, server, tried

from weighin import load_pretrained

QUICK = ("load", "inspect", "convert")
OF_EACH_KIND = (
    "fp8", "codes of modelopt", "adapter_config.json beside a model",
    "a tag of a model in the Hub's cache", "code in the folder for a class that transformers has",
    "sentence-transformers", "sentence-transformers with its transformer in a folder",
    "DeepSpeed ZeRO 3, names that begin with module.",
)  # fmt: skip
"""A layout of each kind of which more than its weights decides what may be told."""
WITH_ALL_VERBS = ("tied by the config, two matrices in the file", "GGUF in Q8_0", *OF_EACH_KIND)
LAYOUTS = every()
VERBS_BY_DAY = [
    pytest.param(
        layout,
        QUICK if number % 6 == 0 else QUICK[:2] if layout.name in OF_EACH_KIND else QUICK[:1],
        id=layout.name,
    )
    for number, layout in enumerate(LAYOUTS)
]
AT_NIGHT = [
    pytest.param(one, QUICK, id=f"{one.name}, at night", marks=pytest.mark.nightly)
    for one in LAYOUTS[3::6]
]

NOTED = [
    pytest.param(one, ("predict", "inspect"), id=f"{one.name}, noted", marks=pytest.mark.nightly)
    for one in LAYOUTS
    if "predict" in one.notes
]
"""Where a verb must say what it takes."""

Servers = Callable[[bool], ForkServer]
"""Returns the process that runs the verbs, with or without the packages of .venv-zoo."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as started:
        yield cache(lambda zoo: started.enter_context(server(zoo=zoo)))


def wrong(layout: Layout, folder: Path, servers: Servers, verbs: tuple[str, ...]) -> list[str]:
    try:
        found = tried(layout, folder, servers(IN_ZOO in layout.packages), verbs)
    except Missing as missing:
        assert str(missing) in layout.packages, (
            f"{layout.name} needs {missing}, and does not say it"
        )
        how = ": make .venv-zoo/ready" if str(missing) == IN_ZOO else ""
        pytest.skip(f"needs {missing}{how}")
    return [f"{verb}: {one.words}" for verb, one in found.items() if one.state == "WRONG"]


@pytest.mark.parametrize(("layout", "verbs"), [*VERBS_BY_DAY, *AT_NIGHT, *NOTED])
def test_a_layout_is_right_or_refused_with_its_reason(
    layout: Layout, verbs: tuple[str, ...], tmp_path: Path, servers: Servers
) -> None:
    assert wrong(layout, tmp_path, servers, verbs) == []


@pytest.mark.slow
@pytest.mark.nightly  # by day the quick verbs, for more layouts
@pytest.mark.parametrize("name", WITH_ALL_VERBS)
def test_every_verb_is_right_or_refuses_it(name: str, tmp_path: Path, servers: Servers) -> None:
    (layout,) = (one for one in LAYOUTS if one.name == name)
    assert wrong(layout, tmp_path, servers, VERBS) == []


def test_a_folder_that_sentence_transformers_saves_is_loaded_with_all_its_parts(
    tmp_path: Path,
) -> None:
    """The transformer lies in the folder itself."""
    package = pytest.importorskip("sentence_transformers")
    (tmp_path / "parts").mkdir()
    parts = str(_several_parts(tmp_path / "parts").path)
    model = package.SentenceTransformer(parts, device="cpu", local_files_only=True)
    model.save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    found = load_pretrained(tmp_path / "saved").state_dict()
    assert "2.linear.weight" in found
    assert state_differences(found, model.state_dict()) == []


def test_the_page_names_every_layout_and_no_wrong_answer() -> None:
    text = (Path(__file__).parent / "layouts.md").read_text()
    assert [one.name for one in LAYOUTS if one.name not in text] == []
    assert "WRONG" not in text


def test_values_that_differ_are_called_wrong(tmp_path: Path, servers: Servers) -> None:
    """The judge is tried with a layout that lies about its values."""
    forks = servers(False)
    (honest,) = (one for one in LAYOUTS if one.name == "a file of safetensors")
    assert tried(honest, tmp_path, forks, QUICK)["load"] == Verdict("right")
    truth = tmp_path / "truth.pt"
    lie = (
        "import torch; both = torch.load('truth.pt');"
        " next(iter(both[0].values())).add_(1); torch.save(both, 'truth.pt')"
    )
    assert forks.run(lie, folder=truth.parent).returncode == 0
    again = forks.run(
        "import compared; compared.load('a file of safetensors')", folder=tmp_path
    ).stdout
    assert "other values" in again
