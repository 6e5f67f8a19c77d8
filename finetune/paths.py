"""Where this project's files lie."""

from pathlib import Path

from finetune.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
ACCELERATE_CONFIGS = ROOT / "accelerate_configs"
OVERLAYS = ROOT / "finetune" / "strategies"


def strategy_names() -> list[str]:
    """Names of all strategies that ship.

    Raises:
        UserError: the package was installed without the folders that lie beside it.
    """
    if not ACCELERATE_CONFIGS.is_dir():
        raise UserError(
            f"there is no folder {ACCELERATE_CONFIGS}: strategies need accelerate_configs/ and ds_configs/ beside the package. "
            "Clone the repository and install it with pip install -e ."
        )
    return sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml"))
