"""Streaming: the right model from every layout, in every dtype, with what shares memory still shared."""

import gc
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness import page_cache
from harness.checkpoint import direct, filling, layouts, streaming
from harness.checkpoint.filling import Fillable
from harness.checkpoint.layouts.base import TensorPlan
from harness.checkpoint.piecewise import pieces_of
from harness.checkpoint.streaming import Granularity, load_streaming
from harness.errors import CheckpointError
from harness.models.building import without_weights
from harness.models.tied import tied

KWARGS = {"vocab_size": 128, "emb_dim": 32, "n_layers": 2, "n_heads": 2}


def seeded() -> torch.nn.Module:
    torch.manual_seed(0)
    return tied(**KWARGS)


def blank() -> torch.nn.Module:
    with without_weights():
        return tied(**KWARGS)


def saved(folder: Path, fmt: str = "pt") -> Path:
    state = seeded().state_dict()
    firsts: dict[int, str] = {}
    plans = []
    for name, tensor in state.items():
        first = firsts.setdefault(tensor.data_ptr(), name)
        plans.append(
            TensorPlan(name, tuple(tensor.shape), tensor.dtype, first if first != name else None)
        )
    path = layouts.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    layouts.named(fmt).write(path, plans, lambda name: pieces_of(state[name]))
    return path


def assert_right(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    wanted = seeded().to(dtype)
    for found, right in (
        (dict(model.named_parameters()), dict(wanted.named_parameters())),
        (dict(model.named_buffers()), dict(wanted.named_buffers())),
    ):
        assert found.keys() == right.keys()  # tied names are one parameter in both
        for name, tensor in right.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("fmt", layouts.NAMES)
def test_every_layout_gives_the_right_model(fmt: str, tmp_path: Path) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path, fmt)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_converts_on_the_way(dtype: torch.dtype, tmp_path: Path) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path), dtype=dtype), dtype)


@pytest.mark.parametrize("fmt", layouts.NAMES)
def test_a_function_that_builds_the_model_is_called_without_weights(
    fmt: str, tmp_path: Path
) -> None:
    assert_right(load_streaming(lambda: tied(**KWARGS), saved(tmp_path, fmt)))


class Two(torch.nn.Module):
    """A weight that takes several reads, another that takes one, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Linear(2500, 3)
        self.large = torch.nn.Linear(2500, 4001, bias=False)
        self.again = self.large


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Two, Path]:
    torch.manual_seed(0)
    right, path = Two(), tmp_path_factory.mktemp("two") / "two.pt"
    torch.save(right.state_dict(), path)
    return right, path


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_a_model_is_right_whether_it_is_read_while_it_is_built_or_after(
    two: tuple[Two, Path], granularity: Granularity, dtype: torch.dtype | None, cold: bool
) -> None:
    right, path = two
    if cold:
        assert page_cache.drop([path]) == 0
    found = load_streaming(Two, path, dtype=dtype, granularity=granularity)
    for name, tensor in right.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor.to(dtype or tensor.dtype)), name
    assert found.get_submodule("again").weight is found.get_submodule("large").weight


@pytest.mark.parametrize(
    ("cold", "granularity", "early"),
    [(True, "all", True), (True, "module", False), (True, "tensor", False), (False, "all", False)],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_a_disk_holds_is_read_while_the_model_is_built(
    two: tuple[Two, Path],
    dtype: torch.dtype | None,
    cold: bool,
    granularity: Granularity,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[set[str]] = []
    being_filled = streaming.being_filled

    def noting(stretches: Sequence[Fillable], threads: int | None) -> AbstractContextManager[None]:
        found.append({name for one in stretches for name, _ in one.views()})
        return being_filled(stretches, threads)

    monkeypatch.setattr(streaming, "being_filled", noting)
    two[1].read_bytes()
    if cold:
        assert page_cache.drop([two[1]]) == 0
    load_streaming(Two, two[1], dtype=dtype, granularity=granularity)
    all_ = set(two[0].state_dict())
    assert found[0] == (all_ if early else set())
    assert set.union(*found) == all_


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_during_a_load_and_then_as_before(
    collecting: bool, tmp_path: Path
) -> None:
    path, seen = saved(tmp_path), []

    def build() -> torch.nn.Module:
        seen.append(gc.isenabled())
        return tied(**KWARGS)

    def fail() -> torch.nn.Module:
        raise RuntimeError

    try:
        (gc.enable if collecting else gc.disable)()
        load_streaming(build, path)
        assert gc.isenabled() == collecting
        with pytest.raises(RuntimeError):
            load_streaming(fail, path)
        assert gc.isenabled() == collecting
    finally:
        gc.enable()
    assert seen == [False]


def test_what_a_builder_raises_comes_through(two: tuple[Two, Path]) -> None:
    def build() -> torch.nn.Module:
        raise KeyError("n_heads")

    with pytest.raises(KeyError, match="n_heads"):
        load_streaming(build, two[1])
    assert threading.active_count() == 1


def test_a_file_that_ends_early_is_an_error_while_the_model_is_built(
    two: tuple[Two, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path = two
    _, slices = layouts.read(path)
    short = tmp_path / "short.pt"
    short.write_bytes(path.read_bytes()[: 20 * 1024**2])
    assert page_cache.drop([short]) == 0
    elsewhere = [replace(one, file=short) for one in slices]
    monkeypatch.setattr(layouts, "read", lambda _: (None, elsewhere))
    with pytest.raises(EOFError, match=r"short\.pt ends before byte"):
        load_streaming(Two, short)


def test_the_model_of_another_checkpoint_is_refused_after_it_was_built(
    two: tuple[Two, Path],
) -> None:
    with pytest.raises(CheckpointError, match=r"2 missing \(bias, weight\)"):
        load_streaming(lambda: torch.nn.Linear(2500, 4001), two[1])


@pytest.mark.parametrize(
    ("cold", "processors", "threads"),
    [(True, 2, 16), (False, 1, 1), (False, 2, 2), (False, 64, 4)],
)
def test_a_disk_is_read_by_more_threads_than_the_cache(
    two: tuple[Two, Path],
    cold: bool,
    processors: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(processors)))
    started: list[int] = []
    pool = filling.ThreadPoolExecutor
    monkeypatch.setattr(
        filling, "ThreadPoolExecutor", lambda count: started.append(count) or pool(count)
    )
    two[1].read_bytes()
    if cold:
        assert page_cache.drop([two[1]]) == 0
    with without_weights():
        load_streaming(Two(), two[1])
    assert started == [threads]


def test_small_tensors_that_are_converted_do_not_wait_for_a_disk_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.ParameterList(torch.arange(at, at + 1000.0) for at in range(300))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    assert page_cache.drop([path]) == 0
    reads = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(direct.os, "preadv", counting)
    with torch.device("meta"):
        target = torch.nn.ParameterList(torch.empty(1000) for _ in range(300))
    load_streaming(target, path, dtype=torch.bfloat16)
    assert len(reads) <= 3  # 1.2 MiB by way of buffers of 1
    for found, right in zip(target, model, strict=True):
        assert torch.equal(found, right.bfloat16())


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_tensors_larger_than_any_buffer(
    kind: torch.dtype, dtype: torch.dtype, cold: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    right = torch.nn.Linear(2500, 4001, dtype=kind)
    torch.save(right.state_dict(), tmp_path / "large.pt")
    if cold:
        assert page_cache.drop([tmp_path / "large.pt"]) == 0
    with without_weights():
        found = torch.nn.Linear(2500, 4001)
    load_streaming(found, tmp_path / "large.pt", dtype=dtype)
    assert torch.equal(found.weight, right.weight.to(dtype))
    assert torch.equal(found.bias, right.bias.to(dtype))


@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_tied_weights_stay_tied_at_every_granularity(
    granularity: Granularity, tmp_path: Path
) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path), granularity=granularity, threads=1))


def test_a_model_on_the_meta_device_gets_all_but_its_non_persistent_buffers(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = tied(**KWARGS)
    load_streaming(model, saved(tmp_path))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert any(buffer.is_meta for buffer in model.buffers())


def test_memory_that_is_there_is_filled_where_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tied(**KWARGS)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert_right(load_streaming(model, saved(tmp_path)))
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_parameters_keep_requires_grad(tmp_path: Path) -> None:
    model = blank()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    load_streaming(model, saved(tmp_path))
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Views(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("column", whole[:, 2])
        self.register_buffer("turned", whole.t())


def test_views_of_one_storage_are_read_once_and_stay_views(tmp_path: Path) -> None:
    torch.save(Views().state_dict(), tmp_path / "views.pt")
    with without_weights():
        model = Views()
    load_streaming(model, tmp_path / "views.pt")
    for name, right in Views().state_dict().items():
        found = model.get_buffer(name)
        assert torch.equal(found, right)
        assert found.stride() == right.stride()
        assert found.untyped_storage().data_ptr() == model.get_buffer("whole").data_ptr()


def test_large_tensors_own_their_memory_and_survive_saving(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1025)
    torch.save(model.state_dict(), tmp_path / "large.pt")
    with without_weights():
        loaded = torch.nn.Linear(1024, 1025)
    load_streaming(loaded, tmp_path / "large.pt")
    assert loaded.weight.untyped_storage().nbytes() == loaded.weight.nbytes
    torch.save(loaded.state_dict(), tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert torch.equal(again["weight"], model.weight)
    assert torch.equal(again["bias"], model.bias)


def test_another_models_checkpoint_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"weight": torch.ones(3, 3), "extra": torch.ones(1)}, path)
    model = torch.nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_streaming(model, path)
    assert str(caught.value) == (
        f"{path}: does not fit this model, keys: 1 missing (bias); 1 unexpected (extra); "
        "1 of another shape (weight)\nchoose the model that this checkpoint was saved from"
    )
    assert torch.equal(model.weight, before)
