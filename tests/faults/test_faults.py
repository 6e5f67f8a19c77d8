"""Faults that are really done to trainings (scripts/faults/matrix.py), a few of each kind; and what judges them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(ROOT / "scripts" / "faults"))

from disks import DAMAGES, damage
from power import LOSSES, SyncedState, cut_power

MATRIX = [sys.executable, str(ROOT / "scripts" / "faults" / "matrix.py")]


def run_matrix(folder: Path, *arguments: str) -> dict[str, Any]:
    """The result of the matrix as a process of its own."""
    result = folder / "faults.json"
    done = subprocess.run(
        [*MATRIX, *arguments, "--json", str(result)], capture_output=True, text=True, timeout=3600, check=False
    )
    assert result.is_file(), done.stderr[-3000:]
    return {"code": done.returncode, "said": done.stdout, **json.loads(result.read_text(encoding="utf-8"))}


QUICK = {
    "kill": "SIGKILL: naming a checkpoint, removing old ones",
    "signals": "SIGTERM: evaluation",
    "power": f"power cut: {LOSSES[0]}",
    "power, zeros": f"power cut: {LOSSES[2]}",
    "full": "disk full: writing a checkpoint",
    "damage": f"a file of the newest checkpoint: {DAMAGES[0]}",
    "second": "second process",
}


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_after_a_fault_a_run_ends_as_if_there_had_been_none(tmp_path, subtests):
    matrix = run_matrix(tmp_path, "--quick", "--kills", "4")
    said = {"full": "No space left", "damage": "optimizer.bin", "second": "in use by another process"}
    for kind, fault in QUICK.items():
        with subtests.test(kind):
            if kind in matrix["skipped"]:
                pytest.skip(matrix["skipped"][kind])
            rows = [row for row in matrix["tries"] if row["fault"] == fault]
            assert rows, matrix["said"]
            for row in rows:
                assert row["problems"] == []
                assert row["lost"] == row["corrupt"] == 0
                assert row["attempts"] >= 2
            assert said.get(kind, "") in rows[0]["said"]


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_killed_anywhere(tmp_path):
    done = run_matrix(tmp_path, "--groups", "kill", "--kills", "20", "--seed", "1")
    assert [row for row in done["tries"] if row["problems"]] == []
    assert len(done["tries"]) >= 20
    assert done["code"] == 0


# What judges has to find what is wrong.

POWER = """
import os, sys
from pathlib import Path
from power import SyncedState

root, store = Path(sys.argv[1]), Path(sys.argv[2])
(root / "old.txt").write_text("before")
SyncedState(root, store).watch()

def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)

(root / "old.txt").write_text("after")
(root / "kept.txt").write_text("kept")
sync(root / "kept.txt")
(root / "named").mkdir()
(root / "named" / "inside.txt").write_text("inside")
sync(root / "named" / "inside.txt")
sync(root / "named")
(root / "half.txt").write_text("half")
sync(root / "half.txt")
with (root / "half.txt").open("a") as file:
    file.write("-way")
sync(root)
(root / "kept.txt").rename(root / "renamed.txt")
(root / "late.txt").write_text("late")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LOSSES[0], {"old.txt": "before", "kept.txt": "kept", "named/inside.txt": "inside", "half.txt": "half"}),
        (
            LOSSES[1],
            {
                "old.txt": "before",
                "renamed.txt": "kept",
                "named/inside.txt": "inside",
                "half.txt": "half",
                "late.txt": "",
            },
        ),
        (
            LOSSES[2],
            {
                "old.txt": "before",
                "renamed.txt": "kept",
                "named/inside.txt": "inside",
                "half.txt": "half" + 4 * "\0",
                "late.txt": 4 * "\0",
            },
        ),
    ],
)
def test_a_power_cut_leaves_what_was_synced(tmp_path, loss, expected):
    root, store = tmp_path / "root", tmp_path / "store"
    root.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "faults")}
    subprocess.run([sys.executable, "-c", POWER, str(root), str(store)], check=True, env=environment)
    changed = cut_power(root, store, loss)
    left = {str(p.relative_to(root)): p.read_text() for p in root.rglob("*") if p.is_file()}
    assert left == expected
    assert "late.txt" in changed
    assert "named/inside.txt" not in changed


def test_the_store_holds_what_was_there_before(tmp_path):
    root = tmp_path / "root"
    (root / "inside").mkdir(parents=True)
    (root / "inside" / "a.txt").write_text("a")
    SyncedState(root, tmp_path / "store")
    (root / "inside" / "a.txt").unlink()
    cut_power(root, tmp_path / "store", LOSSES[0])
    assert (root / "inside" / "a.txt").read_text() == "a"


def test_one_changed_weight_is_found(run_train, tiny_run, tmp_path):
    from runs import differences

    one, other = tmp_path / "run", tmp_path / "other"
    assert run_train(*tiny_run(training={"log_clips": True, "ema_decay": 0.9})) == 0
    shutil.copytree(one, other)
    assert differences(one, other, steps=2) == []
    file = other / "checkpoints" / "step-00000002" / "model.safetensors"
    weights = load_file(file)
    name = max(weights, key=lambda n: weights[n].numel() * weights[n].is_floating_point())
    weights[name].view(-1)[0] = torch.nextafter(weights[name].view(-1)[0], torch.tensor(9.0))
    save_file(weights, file)
    damage(other / "model.nemo", "cut to half", 0)
    (other / "clips.jsonl").write_text((other / "clips.jsonl").read_text().replace('"step": 2', '"step": 3'))
    found = differences(one, other, steps=2)
    assert [what.split(" cannot")[0] for what in found] == ["final weights", "model.nemo", "clips"]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_as_it_is_called(tmp_path, kind):
    file = tmp_path / "file"
    before = bytes(range(100))
    file.write_bytes(before)
    damage(file, kind, 3)
    if kind == "missing":
        assert not file.exists()
    elif kind == "cut to half":
        assert file.read_bytes() == before[:50]
    else:
        after = file.read_bytes()
        assert len(after) == 100
        assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1


def test_full_and_read_only_disks(tmp_path):
    """In a process of its own, whose mounts end with it."""
    code = """
import sys
from pathlib import Path
from disks import fill, free_bytes, make_read_only, own_mounts, small_disk, unmount
problem = own_mounts()
if problem:
    sys.exit(problem)
folder = Path(sys.argv[1])
with small_disk(folder / "small", 1) as disk:
    fill(disk / "filler")
    assert free_bytes(disk) == 0
    try:
        (disk / "more").write_bytes(bytes(10_000))
    except OSError as error:
        print(error.errno)
(folder / "other").mkdir()
make_read_only(folder / "other")
try:
    (folder / "other" / "file").touch()
except OSError as error:
    print(error.errno)
unmount(folder / "other")
(folder / "other" / "file").touch()
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts" / "faults")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    if "mounts need root" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout.split() == ["28", "30"], done.stderr
    assert (tmp_path / "other" / "file").exists()
