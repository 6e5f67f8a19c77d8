"""Import contracts of pyproject.toml, and who may import whom among the tests."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "finetune", tmp_path / "finetune", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1500)


def append(path: Path, line: str) -> None:
    path.write_text(path.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")


def test_contracts_hold(copy):
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


def test_a_circle_is_found(copy):
    append(copy / "finetune" / "data" / "decode.py", "import finetune.data.stream")
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "No cycles are allowed in finetune.data" in done.stdout


def test_an_import_against_the_layers_is_found(copy):
    append(copy / "finetune" / "errors.py", "def late():\n    import finetune.tools.planning.gpus")
    done = lint_imports(copy)
    assert done.returncode == 1
    assert "finetune.errors is not allowed to import finetune.tools" in done.stdout


def test_no_test_imports_another():
    for path in ROOT.glob("tests/**/*.py"):
        found = re.findall(r"^\s*(?:from|import) test_\w+", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert not found, path
