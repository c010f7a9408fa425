"""Create .venv-zoo, an environment that has the packages of the one that runs this file, and room for others."""

import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".venv-zoo"


def main() -> None:
    """Create the environment, which imports ``on_start/torchvision_operators.py`` at its start."""
    venv.create(FOLDER, clear=True)
    beneath = sysconfig.get_path("purelib")
    own = sysconfig.get_path("purelib", "venv", {"base": str(FOLDER)})
    lines = [
        str(HERE / "on_start"),
        "import torchvision_operators",
        f"import site; site.addsitedir({beneath!r})",
    ]
    Path(own, "beneath.pth").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
