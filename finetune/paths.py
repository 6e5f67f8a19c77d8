"""Where this project's files lie."""

import contextlib
import difflib
import os
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
    parts, near = Path(name).parts, nearest(name)
    return (
        name.startswith((".", "/", "~", "runs/"))
        or name.endswith(".nemo")
        or name.count("/") > 1
        or (len(parts) > 1 and os.path.isdir(parts[0]))
        or (near is not None and len(near.parts) == len(parts))
    )


def nearest(name: str) -> Path | None:
    """Return what has a like name in the place of a missing path: the whole of it, or else as far as it is there."""
    path, missing, close = Path(name), [], []
    while path.name and not os.path.exists(path):
        missing.append(path.name)
        path = path.parent
    with contextlib.suppress(OSError):  # no folder, or not ours to list
        close = difflib.get_close_matches(missing.pop(), os.listdir(path), n=1) if missing else []
    whole = path.joinpath(*close, *reversed(missing))
    return (whole if os.path.exists(whole) else path / close[0]) if close else None


def near_path(name: str) -> str:
    """Return " Did you mean X?" where a missing path has something of a like name in its place, else nothing."""
    if name.startswith("~") and os.path.exists(home := os.path.expanduser(name)):
        return f" Did you mean {home}? Settings do not expand ~."
    near = nearest(name)
    return f" Did you mean {near}?" if near else ""


def check_access(name: str, key: str) -> None:
    """Raise UserError where the system does not say whether a path exists, as behind a folder without permission."""
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise UserError(f"{key}: {name} cannot be read: {error.strerror}.") from error
