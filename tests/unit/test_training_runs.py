"""The files of all ranks of a training run are read as one checkpoint.

tests/checkpoints/runs_of_ranks.py has the parallelisms, and a step without optimizer states.
"""

import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from harms import complaint
from hypothesis import given
from hypothesis import strategies as st
from state_files import assert_same, read_state
from training_runs import Model, classes, small_model, write_universal, write_zero

from weighin.errors import CheckpointError, HarnessError
from weighin.stream import formats
from weighin.stream.pretrained_library import Selection
from weighin.stream.slices import Slice
from weighin.stream.zero import boxes, laid_out

FIRST = "mp_rank_00_model_states.pt"


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return small_model()


def refusal(path: Path) -> str:
    return str(complaint(formats.read, path))


@given(
    st.lists(st.integers(1, 5), max_size=4).map(tuple), st.lists(st.integers(0, 700), max_size=4)
)
def test_boxes_of_all_ranges_are_the_whole_tensor_in_order(
    shape: tuple[int, ...], cuts: list[int]
) -> None:
    numbers = torch.arange(prod(shape)).reshape(shape)
    ends = sorted({0, prod(shape), *(cut for cut in cuts if cut < prod(shape))})
    found = []
    for first, last in pairwise(ends):
        of_range = list(boxes(shape, first, last))
        assert len(of_range) <= max(1, 2 * len(shape) - 1)
        for start, size in of_range:
            place = tuple(slice(at, at + count) for at, count in zip(start, size, strict=True))
            found.append(numbers[place].flatten())
    assert torch.equal(torch.cat(found), numbers.flatten())


def test_flat_tensors_that_are_too_short_are_refused(tmp_path: Path) -> None:
    torch.randn(60).numpy().tofile(tmp_path / "flat")
    flat = Slice("flat", (60,), (1,), "float32", tmp_path / "flat", 0, 0, 240)
    error = complaint(laid_out, tmp_path / "states", {"more": (61,)}, [[flat]])
    assert "have 60 of the 61 elements of 'more'" in error.message


@pytest.mark.parametrize("ranks", [1, 2, 64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_read_as_one_model(tmp_path: Path, model: Model, stage: int, ranks: int) -> None:
    step = write_zero(tmp_path / "run", model, stage, ranks, alignment=4)
    assert_same(read_state(step), model.truth)
    assert_same(read_state(tmp_path / "run"), model.truth)
    assert formats.detect(tmp_path / "run") == "deepspeed"
    assert {one.file for one in formats.read(step)} <= set(formats.files(step))


def test_a_group_of_many_parameters_is_read(tmp_path: Path) -> None:
    many = {f"layers.{number}.weight": torch.randn(3) for number in range(70)}
    step = write_zero(tmp_path / "run", Model([many]), 2, 2, alignment=4)
    assert_same(read_state(step), many)


def test_files_that_hold_none_of_the_values_are_not_needed(tmp_path: Path, model: Model) -> None:
    """Model states of other ranks without frozen weights, and optimizer states without shapes."""
    model = replace(model, frozen={})
    step = write_zero(tmp_path / "run", model, 3, 3)
    (step / f"zero_pp_rank_2_{FIRST}").unlink()
    assert_same(read_state(step), model.truth)
    step = write_zero(tmp_path / "another", model, 1, 2)
    torch.save({"module": model.trained}, step / FIRST)
    (step / share(0)).unlink()
    assert read_state(step).keys() == model.trained.keys()


def share(rank: int) -> str:
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def copied(step: Path, name: str) -> None:
    shutil.copy(step / share(1), step / name)


def change_share(step: Path, rank: int, change: Callable[[Any], object], key: str = "") -> None:
    with classes():
        states = torch.load(step / share(rank), weights_only=False)
        state = states["optimizer_state_dict"]
        if key:
            state[key] = change(state[key])
        else:
            flats = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
            flats[0] = change(flats[0])
        torch.save(states, step / share(rank))


def empty(step: Path, *names: str) -> None:
    for name in names:
        torch.save({"weight": torch.ones(2)}, step / name)


def larger_model() -> Model:
    model = small_model()
    return replace(model, groups=[{**model.groups[0], "cube": torch.zeros(500)}, model.groups[1]])


def from_another(step: Path, model: Model, *, is_other_stage: bool = False) -> None:
    """Put the optimizer states of another run there: of one rank if its stage differs, else of all."""
    stage = 2 if (step / FIRST).exists() != is_other_stage else 3
    other = write_zero(step.parent.with_name("other"), model, stage, 2)
    for file in [other / share(1)] if is_other_stage else other.glob("*_optim_states.pt"):
        shutil.copy(file, step)


TWO_RUNS = "two runs wrote their files into this folder:"
NOT_FLAT = ".0' is not flat, or has another dtype than the others"
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another run's rank": (lambda step: copied(step, share(2)), f"{TWO_RUNS} {share(2)}\n"),
    "two runs in a folder": (lambda step: copied(step, share(1)[5:]), f"{TWO_RUNS} {share(1)}, {share(1)[5:]}\n"),
    "model states of two runs": (lambda step: empty(step, FIRST, f"zero_pp_rank_0_{FIRST}"), f"{TWO_RUNS} {FIRST}, zero_pp_rank_0_{FIRST}\n"),
    "no model states": (lambda step: list(map(Path.unlink, step.glob("*_model_states.pt"))), "files of some ranks are missing: "),
    "tensor parallelism of ZeRO 3": (lambda step: empty(step, "zero_pp_rank_0_mp_rank_01_optim_states.pt"), "(tensor parallelism), and the files do not say along which dimension: zero_pp_rank_0"),
    "experts' optimizer": (lambda step: empty(step, "expp_rank_0_mp_rank_00_optim_states.pt"), "(expert parallelism): expp_rank_0"),
    "an impossible number of ranks": (lambda step: change_share(step, 0, lambda _: 0, "partition_count"), f"{share(0)}: names an impossible number of ranks"),
    "a partition of two dimensions": (lambda step: change_share(step, 1, lambda flat: flat.view(1, -1)), NOT_FLAT),
    "a partition of another dtype": (lambda step: change_share(step, 1, lambda flat: flat.double()), NOT_FLAT),
    "other optimizer states": (lambda step: empty(step, share(1)), f"{share(1)}: holds no optimizer states of DeepSpeed"),
    "a rank of another stage": (lambda step: from_another(step, small_model(), is_other_stage=True), "the ranks' files have different stages or parameter groups of ZeRO"),
    "partitions of another model": (lambda step: from_another(step, larger_model()), "elements, but the shapes in "),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_cannot_be_read_is_named(tmp_path: Path, model: Model, harm: str, stage: int) -> None:
    step = write_zero(tmp_path / "run", model, stage, 2)
    spoil, words = HARMS[harm]
    spoil(step)
    said = refusal(step)
    assert words in said
    if harm == "partitions of another model":
        assert f" need {127 if stage == 3 else 243}\n" in said


def test_a_weight_without_values_is_refused(tmp_path: Path, model: Model) -> None:
    step = write_zero(tmp_path / "run", model, 3, 2)
    file = step / f"zero_pp_rank_0_{FIRST}"
    states = torch.load(file, weights_only=False)
    states["module"]["outside.weight"] = torch.empty(0)
    torch.save(states, file)
    said = refusal(step)
    assert "no file has values for the weight 'outside.weight'" in said
    assert "engine.save_16bit_model(FOLDER)" in said


@pytest.mark.parametrize(("stage", "shapes_alone"), [(1, True), (3, True), (3, False)])
def test_a_universal_checkpoint_needs_every_weight_and_its_shape(
    tmp_path: Path, model: Model, stage: int, shapes_alone: bool
) -> None:
    step = write_universal(tmp_path / "run", model, stage, 1 if shapes_alone else 2)
    if shapes_alone:
        file = step / (f"zero_pp_rank_0_{FIRST}" if stage == 3 else FIRST)
        torch.save(torch.load(file, weights_only=False) | {"module": None}, file)
    shutil.move(step / "zero" / "cube", tmp_path)
    assert "no file has values for the weight 'cube'\ncopy the whole folder again" in refusal(step)
    shutil.move(tmp_path / "cube", step / "zero")
    for file in step.glob("*_model_states.pt"):
        file.unlink()
    if stage == 3:
        needs = "a flat tensor of 105 elements, but no *_model_states.pt has its shape"
        assert needs in refusal(step)
    else:
        found, wanted = read_state(step), model.trained
        assert_same(dict(sorted(found.items())), dict(sorted(wanted.items())))


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", ".", "", "a\0b"])
def test_a_tag_cannot_lead_out_of_the_run(tmp_path: Path, model: Model, tag: str) -> None:
    write_zero(tmp_path / "elsewhere", model, 3, 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest").write_text(tag)
    (run / "elsewhere").write_text("")
    assert refusal(run)


def test_a_part_is_loaded_in_a_format_that_weighin_writes(tmp_path: Path, model: Model) -> None:
    step = write_zero(tmp_path / "run", model, 3, 2)
    assert formats.loaded_as(step) == "deepspeed"
    assert formats.loaded_as(step, Selection("layers")) is None
    assert list(read_state(step.parent, Selection("layers.0"))) == ["weight", "bias"]
    assert formats.loaded_as(tmp_path / "none") is None
    assert formats.known("deepspeed") == "deepspeed"
    with pytest.raises(HarnessError, match="no checkpoint format is called 'deepsped'"):
        formats.known("deepsped")


def endless() -> object:
    """Return a pair of pairs of pairs ...: 2**100 of them."""
    nested: object = "a"
    for _ in range(100):
        nested = (nested, nested)
    return nested


def test_values_that_take_for_ever_to_compare_are_passed_over(tmp_path: Path, model: Model) -> None:
    step = write_zero(tmp_path / "run", model, 2, 2)
    states = torch.load(step / FIRST, weights_only=False)
    torch.save(states | {"buffer_names": [endless()]}, step / FIRST)
    assert read_state(step)
    change_share(step, 0, lambda _: [endless(), endless()], "partition_count")
    assert "holds no optimizer states of DeepSpeed" in refusal(step)


WRITERS: dict[str, Callable[[Path, Model], Path]] = {
    "zero 2": lambda run, model: write_zero(run, model, 2, 2, 4),
    "zero 3": lambda run, model: write_zero(run, model, 3, 2),
    "universal": lambda run, model: write_universal(run, model, 3, 2),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_an_error_of_the_checkpoint(tmp_path: Path, model: Model, kind: str) -> None:
    step, draw = WRITERS[kind](tmp_path / "run", model), random.Random(7)
    for file in formats.files(step)[:4]:
        sound = file.read_bytes()
        for _ in range(25):
            harmed = bytearray(sound)
            for _ in range(draw.randint(1, 4)):
                harmed[draw.randrange(len(harmed))] = draw.randrange(256)
            file.write_bytes(harmed[: draw.choice([None, draw.randrange(len(harmed))])])
            with suppress(CheckpointError):
                read_state(step)
        file.write_bytes(sound)


ODD: dict[str, list[Any]] = {
    "module": [[1]], "buffer_names": [1], "shared_params": [["a"]], "frozen_param_fragments": [[1]],
    "param_shapes": ["none", [7], *([{"embed.weight": shape}] for shape in [(-1, 2), "wide", (2**40, 2**20)])],
    "frozen_param_shapes": [[1], {"other": (2,)}],
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("stage", [2, 3])
def test_odd_model_states_are_an_error_of_the_checkpoint(
    tmp_path: Path, model: Model, odd: str, stage: int
) -> None:
    step = write_zero(tmp_path / "run", model, stage, 2)
    file = step / (FIRST if stage == 2 else f"zero_pp_rank_0_{FIRST}")
    sound = torch.load(file, weights_only=False)
    for value in ODD[odd]:
        torch.save(sound | {odd: value}, file)
        if value == {"other": (2,)} and stage == 2:  # a frozen weight has no share there
            assert read_state(step)
        else:
            assert str(step) in refusal(step), value
