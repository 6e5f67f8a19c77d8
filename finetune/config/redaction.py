"""The configuration as a run writes it down: without secrets."""

import logging
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finetune.config.schema import RunConfig
from finetune.durable_files import write_text
from finetune.security.documents import leaves
from finetune.security.secrets import clean, known_secrets

log = logging.getLogger(__name__)

HEAD = (
    "# {keys}: a secret was taken out and stands here as <removed>.\n"
    "# To resume, start with the run file that the run was started with.\n"
)


def without_secrets(config: RunConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the settings as nested mappings without secrets, and the keys that held one."""
    settings = config.as_dict()
    cleaned = clean(settings, known_secrets(settings), personal=False)
    changed = [key for (key, a), (_, b) in zip(leaves(settings), leaves(cleaned), strict=False) if a != b]
    return cleaned, changed if cleaned != settings else []


def write_config(path: Path, config: RunConfig) -> None:
    """Write config.yaml; its head and the log name the keys from which a secret was taken out."""
    settings, changed = without_secrets(config)
    if changed:
        log.warning(
            "%s: a secret in %s was taken out; to resume, use the run file that you started with",
            path.name,
            ", ".join(changed),
        )
    head = HEAD.format(keys=", ".join(changed)) if changed else ""
    write_text(path, head + OmegaConf.to_yaml(OmegaConf.create(settings)))
