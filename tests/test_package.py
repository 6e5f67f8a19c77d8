"""What `pip install .` installs."""

import shutil
import subprocess
import sys
import zipfile

from conftest import ROOT

FOLDERS = ("finetune", "accelerate_configs", "ds_configs")


def test_the_wheel_holds_every_file_that_the_package_reads(tmp_path):
    copy = tmp_path / "copy"
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, copy]
    subprocess.run([sys.executable, *command], check=True, timeout=1500)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        installed = archive.namelist()
        scripts = next(name for name in installed if name.endswith("entry_points.txt"))
        assert "parakeet-finetune = finetune.cli:main" in archive.read(scripts).decode()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and "__pycache__" not in name:
                assert any(i == name or i.endswith(f"/share/parakeet-finetune/{name}") for i in installed), name
