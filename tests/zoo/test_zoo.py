"""Test a sample of the zoo: the loader equals torch, and strategies are verified correctly.

``make zoo`` tests all models, and installs torchvision for them into .venv-zoo. The sample runs in a
process of its own, because torch's test code and torchvision change settings of the process that
imports them.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from nightly import by_day
from running import Tried, kept
from table import BAD

MODULES = (
    "nn.AdaptiveAvgPool1d[0]", "nn.BatchNorm1d[0]", "nn.BatchNorm2d[3]", "nn.BatchNorm3d[6]",
    "nn.Conv1d[0]", "nn.Conv2d[1]", "nn.Conv3d[0]", "nn.ConvTranspose2d[0]", "nn.CosineEmbeddingLoss[0]",
    "nn.FractionalMaxPool2d[0]", "nn.LazyConv1d[0]", "nn.LazyConvTranspose3d[0]", "nn.Linear[0]",
    "nn.Linear[1]", "nn.Bilinear[0]", "nn.NLLLoss[4]", "nn.BCEWithLogitsLoss[4]",
    "nn.LinearCrossEntropyLoss[2]", "nn.GELU[0]", "nn.GroupNorm[0]", "nn.InstanceNorm2d[0]",
    "nn.LayerNorm[0]", "nn.RMSNorm[0]", "nn.TransformerEncoder[0]", "nn.TransformerEncoderLayer[0]",
    "nn.TransformerDecoderLayer[0]", "nn.Transformer[0]", "nn.MultiheadAttention[0]",
    "nn.MultiheadAttention[2]", "nn.Embedding[0]", "nn.PReLU[0]", "nn.RNNCell[0]",
    "nn.GRUCell[0]", "nn.LSTMCell[0]", "nn.RNN[0]", "nn.GRU[0]", "nn.LSTM[0]", "nn.LSTM[5]",
    "pair of nn.BatchNorm1d", "pair of nn.Linear", "pair of nn.MultiheadAttention", "pair of nn.LSTM",
)  # fmt: skip
VISION = (
    "small_vit", "resnet18", "googlenet", "shufflenet_v2_x0_5", "squeezenet1_1", "raft_small",
    "ssdlite320_mobilenet_v3_large",
)  # fmt: skip
BY_DAY = (
    "nn.BatchNorm1d[0]", "nn.Conv2d[1]", "nn.LazyConv1d[0]", "nn.Linear[0]", "nn.Embedding[0]",
    "nn.LinearCrossEntropyLoss[2]", "nn.TransformerDecoderLayer[0]", "nn.LSTM[5]",
    "pair of nn.BatchNorm1d", "pair of nn.Linear", "small_vit", "googlenet",
)  # fmt: skip
ZOO = Path(__file__).parent
PYTHON = ZOO.parents[1] / ".venv-zoo" / "bin" / "python"
HAS_VISION = PYTHON.exists()
LABELS = by_day((*MODULES, *VISION), *BY_DAY)


@pytest.fixture(scope="module")
def sample(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tried]:
    """What was tried of the models whose tests are selected."""
    file = tmp_path_factory.mktemp("zoo") / "kept"
    selected = [item for item in request.session.items if item.path == request.path]
    chosen = {item.callspec.params["label"] for item in selected if hasattr(item, "callspec")}
    known = (*MODULES, *(VISION if HAS_VISION else ()))
    labels = ",".join(label for label in known if label in (chosen or BY_DAY))
    command = [str(PYTHON if HAS_VISION else sys.executable), "-W", "ignore", str(ZOO)]
    command += ["--exactly", labels, "--quick", "--keep", str(file)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode in (0, 1), ended.stderr
    return kept(file)


@pytest.mark.parametrize("label", LABELS)
def test_loads_equal_torchs_own_or_are_refused_and_planted_faults_are_found(
    label: str, sample: dict[str, Tried]
) -> None:
    if label in VISION and not HAS_VISION:
        pytest.skip("needs torchvision: make .venv-zoo/ready")
    tried = sample[label]
    assert tried.loads
    assert tried.judged
    assert [one for one in (*tried.loads, *tried.judged) if one.kind in BAD] == []


def test_every_kind_of_fault_was_planted(sample: dict[str, Tried]) -> None:
    tries = {one.what.rpartition(", ")[2] for each in sample.values() for one in each.judged}
    assert {"wrong byte", "lost buffer", "broken tie"} <= tries
