"""Load rightly, then spoil the model in the way that the option ``how`` names."""

import torch

from strategies.baseline import load as load_rightly
from weighin import Load


def load(job: Load) -> torch.nn.Module:
    model = load_rightly(job)
    with job.phase("spoil"), torch.no_grad():
        return globals()[job.options["how"]](model) or model


def one_value_of_a_parameter(model: torch.nn.Module) -> None:
    model.get_parameter("blocks.0.up.weight")[3, 5] += 1e-6


def one_sign_of_zero(model: torch.nn.Module) -> None:
    model.get_buffer("rotary.sin")[0, 0] = -0.0


def one_value_of_a_persistent_buffer(model: torch.nn.Module) -> None:
    mask = model.get_buffer("trf_blocks.0.att.mask")
    mask[0, 0] = not mask[0, 0]


def one_value_of_a_buffer_in_no_checkpoint(model: torch.nn.Module) -> None:
    model.get_buffer("rotary.cos")[1, 1] = 0.5


def not_a_number(model: torch.nn.Module) -> None:
    model.get_parameter("norm.weight").fill_(float("nan"))


def rows_swapped(model: torch.nn.Module) -> None:
    weight = model.get_parameter("embedding.weight")
    weight[[0, 1]] = weight[[1, 0]]


def left_on_meta(model: torch.nn.Module) -> None:
    model.get_submodule("blocks").to("meta")


def untied(model: torch.nn.Module) -> None:
    weight = model.get_parameter("embedding.weight")
    model.get_submodule("head").weight = torch.nn.Parameter(weight.clone())


def another_dtype(model: torch.nn.Module) -> None:
    model.get_submodule("norm").half()


def another_shape(model: torch.nn.Module) -> None:
    model.norm = torch.nn.RMSNorm(7)


def one_too_many(model: torch.nn.Module) -> None:
    model.register_buffer("extra", torch.ones(1))


def another_model(_: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Linear(1, 1)
