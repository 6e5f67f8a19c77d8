"""The clips that a run brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.models.adapters import is_adapter
from finetune.security.documents import read_settings


def own_data(model_name: str, part: str) -> Any:
    """Return a setting of data of the run that a model is from; None where it has none, or there is no run.

    Args:
        model_name: as `model.name`.
        part: validation or train.
    """
    path = Path(model_name)
    if path.is_file():
        path = path.parent
    run_file = (path.resolve().parent if is_adapter(path) else path) / "config.yaml"
    if not run_file.is_file():
        return None
    section = read_settings(run_file, "--model").get("data")
    return section.get(part) if isinstance(section, dict) else None
