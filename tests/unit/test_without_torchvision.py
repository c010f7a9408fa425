"""A torchvision that does not fit torch: the user is told what to mend."""

from pathlib import Path

from fork_server import ForkServer
from quantised_folders import plain_model

USERS_OWN = """
import sys
sys.modules.pop("torchvision", None)
sys.path.insert(0, "packages")
import transformers
try:
    import weighin
    weighin.load_pretrained("model")
except weighin.errors.HarnessError as error:
    print(error)
assert sys.modules["transformers"] is transformers
assert transformers.utils.ModelOutput is sys.modules["transformers.utils"].ModelOutput
open("packages/torchvision/__init__.py", "w").close()  # the user mends it
import torchvision
"""


def test_a_users_process_keeps_its_modules_and_is_told_what_to_mend(
    tmp_path: Path, torch_fork_server: ForkServer
) -> None:
    """The torchvision beside the model fails as one that was built for another torch does."""
    package, info = (
        tmp_path / "packages/torchvision",
        tmp_path / "packages/torchvision-0.28.0.dist-info",
    )
    package.mkdir(parents=True)
    info.mkdir()
    fails = 'raise RuntimeError("operator torchvision::nms does not exist")'
    (package / "__init__.py").write_text(fails)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    plain_model("fp8").save_pretrained(tmp_path / "model")
    ended = torch_fork_server.run(USERS_OWN, folder=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == (
        "the package transformers, which this model needs, cannot be imported: RuntimeError: operator"
        " torchvision::nms does not exist\ninstall the torchvision that was built for this torch, or"
        " remove it: pip uninstall torchvision\n"
    )
