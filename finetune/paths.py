"""Where this project's files lie."""

import sys
from pathlib import Path

from finetune.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
# In a clone accelerate_configs/ and ds_configs/ stand beside the package; a wheel installs them below share/.
SHARE = ROOT if (ROOT / "accelerate_configs").is_dir() else Path(sys.prefix) / "share" / "parakeet-finetune"
ACCELERATE_CONFIGS = SHARE / "accelerate_configs"
OVERLAYS = ROOT / "finetune" / "strategies"


def strategy_names() -> list[str]:
    """Return the names of all strategies that ship.

    Raises:
        UserError: the package is installed without its accelerate_configs/.
    """
    if not ACCELERATE_CONFIGS.is_dir():
        raise UserError(
            f"there is no folder {ACCELERATE_CONFIGS}: strategies need accelerate_configs/ and ds_configs/. "
            "Clone the repository and install it with pip install -e ."
        )
    return sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml"))
