"""Pack the doctor's report and a run's records for a bug report, without secrets, audio or transcripts."""

from __future__ import annotations

import json
import os
import zipfile
from typing import TYPE_CHECKING, Any

import yaml

from finetune.config.load import read_yaml
from finetune.errors import UserError
from finetune.security.secrets import clean, clean_text, known_secrets, without_texts
from finetune.tools.doctor.packages import installed_versions

if TYPE_CHECKING:
    from pathlib import Path

LINES = 200
"""Last lines of metrics.jsonl and evaluations.jsonl that are packed."""
VARIABLES = (
    *("ACCELERATE_MIXED_PRECISION", "CC", "CUDA_HOME", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "CXX"),
    *("GLOO_SOCKET_IFNAME", "HF_DATASETS_OFFLINE", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH", "LOCAL_RANK"),
    *("MASTER_PORT", "MKL_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME"),
    *("NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "TMPDIR"),
    *("TOKENIZERS_PARALLELISM", "TORCH_EXTENSIONS_DIR", "TRANSFORMERS_OFFLINE", "WORLD_SIZE"),
)
"""Environment variables that are packed; of all others not even the name."""
RECORDS = ("config.yaml", "environment.json", "summary.json", "metrics.jsonl", "evaluations.jsonl")


def write_bundle(
    path: Path, report: dict[str, Any], text: str, config_file: Path | None, output_dir: Path | None
) -> list[str]:
    """Write the archive; return the names of its files.

    Args:
        report: the doctor's report, as for --json.
        text: the report as printed.
        config_file: the run file.
        output_dir: of the run; its records are packed.

    Raises:
        UserError: the archive cannot be written.
    """
    files: dict[str, Any] = {}
    if config_file is not None:
        files["run_file.yaml"] = read_yaml(config_file, "--config")
    for record in [output_dir / name for name in RECORDS] if output_dir else []:
        if record.is_file():
            try:
                files[f"run/{record.name}"] = _read_record(record)
            except (ValueError, OSError, UserError):
                files[f"run/{record.name}"] = {"left out": "it cannot be read"}
    secrets = known_secrets(report.get("overrides", []), *files.values())
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    contents = {
        "doctor.txt": clean_text(text, secrets),
        "doctor.json": _json(clean(report, secrets)),
        "packages.txt": "".join(f"{name}=={version}\n" for name, version in installed_versions().items()),
        "environment_variables.json": _json(clean(variables, secrets)),
    }
    for name, value in files.items():
        value = clean(without_texts(value), secrets)
        if name.endswith(".jsonl"):
            contents[name] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in value)
        elif name.endswith(".yaml"):
            contents[name] = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        else:
            contents[name] = _json(value)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in contents.items():
                archive.writestr(name, content)
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"--bundle: {path} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)
    return list(contents)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"


def _read_record(path: Path) -> Any:
    """Read a record of a run; of JSON lines the last ones, without one that was cut off when the run died."""
    if path.suffix == ".yaml":
        return read_yaml(path, "training.output_dir")
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
