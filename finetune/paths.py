"""Where this project's files lie."""

import difflib
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


def looks_local(name: str) -> bool:
    """Return whether a name is meant as a path: no hub is asked for it where there is no such file."""
    parts = Path(name).parts
    return (
        name.startswith((".", "/", "~", "runs/"))
        or name.endswith(".nemo")
        or name.count("/") > 1
        or (len(parts) > 1 and Path(parts[0]).is_dir())
    )


def near_path(name: str) -> str:
    """Return " Did you mean X?" where a missing path has something of a like name in its place, else nothing."""
    if name.startswith("~") and (home := Path(name).expanduser()).exists():
        return f" Did you mean {home}? Settings do not expand ~."
    path, missing = Path(name), []
    while not path.exists() and path.name:
        missing.append(path.name)
        path = path.parent
    if not missing or not path.is_dir():
        return ""
    close = difflib.get_close_matches(missing.pop(), (other.name for other in path.iterdir()), n=1)
    whole = path.joinpath(*close, *reversed(missing))
    return f" Did you mean {whole if whole.exists() else path / close[0]}?" if close else ""
