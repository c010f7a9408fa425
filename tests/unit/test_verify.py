"""Each way in which a loaded model can be wrong has its own complaint."""

from typing import Any

import pytest
import torch
from torch import nn
from worker_jobs import Model, manifest_of

from weighin.worker.loading import Inputs
from weighin.worker.verify import (
    WrongWeights,
    check_forward,
    check_parameters,
    check_structure,
    check_values,
    named_tensors,
    touch,
)


class Codes(nn.Linear):
    """A matrix of codes whose scales are no buffer: the module writes them into its state dict."""

    def __init__(self) -> None:
        super().__init__(4, 8, bias=False)
        self.scales = torch.arange(8.0)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scales"] = self.scales


CPU = torch.device("cpu")
MANIFEST = manifest_of(Model())


def verify(model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Verify as the worker does."""
    tensors = named_tensors(model)
    check_structure(tensors, MANIFEST, CPU, dtype)
    check_values(touch(tensors), MANIFEST, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_right_model_in_half_precision_passes(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    assert model.step.dtype == torch.int64
    verify(model, dtype)


def test_a_tensor_on_another_device() -> None:
    tensors = named_tensors(Model())
    with pytest.raises(WrongWeights) as caught:
        check_structure(tensors, MANIFEST, torch.device("cuda:1"), torch.float32)
    assert str(caught.value) == (
        "4 tensors not on cuda:1: embedding.weight, head.weight, mask, ..."
    )


class Gives(nn.Module):
    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def forward(self) -> object:
        assert not self.training
        assert torch.is_inference_mode_enabled()
        return self._output


GOOD, BAD = torch.ones(2), torch.tensor([1.0, float("nan")])
FINITE = {
    "a tensor": GOOD, "integers": torch.ones(2, dtype=torch.int64), "a tuple": (GOOD, None),
    "a dict": {"logits": GOOD}, "nothing": None, "a text": "text",
}  # fmt: skip
NOT_FINITE = {
    "NaN": BAD, "infinity": torch.tensor(float("inf")), "NaN in a tuple": (GOOD, BAD), "NaN in a list": [BAD],
    "NaN in a dict": {"loss": None, "logits": BAD}, "NaN in tuples": ((BAD,),),
}  # fmt: skip


@pytest.mark.parametrize("what", FINITE)
def test_an_output_may_be_anything_finite(what: str) -> None:
    check_forward(Gives(FINITE[what]), Inputs())


@pytest.mark.parametrize("what", NOT_FINITE)
def test_an_output_that_is_not_finite_is_wrong(what: str) -> None:
    with pytest.raises(
        WrongWeights, match=r"^the forward pass returns values that are not finite$"
    ):
        check_forward(Gives(NOT_FINITE[what]), Inputs())


def test_the_model_is_run_on_its_inputs() -> None:
    check_forward(Model(), Inputs((torch.tensor([[1, 2, 3]]),)))


def test_scales_that_only_the_state_dict_has_are_compared_if_they_are_expected() -> None:
    model = nn.Sequential(codes := Codes())
    manifest = manifest_of(model, ["0.scales"])
    names = [entry.name for entry in manifest.tensors]
    assert names == ["0.weight", "0.scales"]
    tensors = named_tensors(model, names)
    check_structure(tensors, manifest, CPU, torch.float32)
    check_values(touch(tensors), manifest, torch.float32)
    codes.scales[3] = 5
    with pytest.raises(WrongWeights, match="with other values than in the checkpoint"):
        check_values(touch(named_tensors(model, names)), manifest, torch.float32)


def test_a_model_of_another_release_has_the_parameters_of_the_checkpoint_under_any_names() -> None:
    torch.manual_seed(0)
    experts, out = nn.Linear(8, 4, bias=False), nn.Linear(4, 2)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    for part, one in zip(experts.weight.data.chunk(2, 1), (first, second), strict=True):
        one.weight.data.copy_(part)
    own = nn.ModuleDict({"experts": experts, "out": out})
    manifests = [manifest_of(own), manifest_of(nn.Sequential(first, second))]

    def verify_parameters(**named: nn.Module) -> None:
        model = nn.ModuleDict(named)
        check_parameters(model, touch(named_tensors(model)), manifests, torch.float32)

    verify_parameters(first=first, second=second, head=out)
    with pytest.raises(
        WrongWeights, match=r"parameters have 104 bytes, the checkpoint's have 168$"
    ):
        verify_parameters(first=first, head=out)
    second.weight.data[0, 0] += 1
    with pytest.raises(WrongWeights, match=r"values that the checkpoint lacks: second.weight$"):
        verify_parameters(first=first, second=second, head=out)
