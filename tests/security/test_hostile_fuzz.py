"""scripts/faults/fuzz.py: a few thousand inputs of every reader, and that it finds, keeps and tells what fails."""

import json
import sys
import time

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "scripts" / "faults"))
import fuzz
from fuzz_readers import READERS, Reader

from finetune.errors import UserError

SLOW = (
    "run file",
    "Hugging Face config.json",
    "NeMo configuration to import",
    ".nemo archive",
    "configuration of a .nemo",
)


def test_no_reader_ends_without_a_message(tmp_path):
    """Each reader gets some; the slow ones few. Another seed than that of docs/benchmarks/fuzz_cpu.json."""
    quick = [reader for reader in READERS if reader.name not in SLOW]
    slow = [Reader(r.name, r.read, r.seeds, 1, r.refusals) for r in READERS if r.name in SLOW]
    found = fuzz.run(quick, 3000, tmp_path / "quick", seed=8)
    found["readers"] |= fuzz.run(slow, 60, tmp_path / "slow", seed=8)["readers"]
    rows = found["readers"]
    assert set(rows) == {reader.name for reader in READERS}
    assert not {name: row["failed"] for name, row in rows.items() if row["failed"]}, fuzz.kinds_of_failure(
        tmp_path / "quick"
    )
    assert sum(row["inputs"] for row in rows.values()) == 3060
    assert sum(row["accepted"] for row in rows.values()) > 300
    assert sum(row["refused"] for row in rows.values()) > 1000


def read_badly(data, folder):
    if b"1e999" in data:
        raise KeyError("nobody thought of it")
    if b"NaN" in data:
        while True:
            time.process_time()
    if b"null" in data:
        raise UserError("")
    raise UserError("refused")


@pytest.fixture
def bad_reader(monkeypatch):
    reader = Reader("bad reader", read_badly, lambda: [b'{"a": 1}'], 1)
    monkeypatch.setattr(fuzz.fuzz_readers, "READERS", [reader])
    return reader


def test_failures_are_kept_and_said(bad_reader, tmp_path, capsys):
    output = tmp_path / "out"
    arguments = ["--inputs", "600", "--output", str(output), "--seconds", "0.05", "--json", str(tmp_path / "t.json")]
    assert fuzz.main(arguments) == 1
    said = capsys.readouterr().out
    told = json.loads((tmp_path / "t.json").read_text())
    row = told["readers"]["bad reader"]
    assert row["inputs"] == told["inputs"] == 600
    assert row["failed"] == told["failed"] == len(list((output / "failures").glob("*.bin"))) > 3
    traces = {file.read_text().splitlines()[-1] for file in (output / "failures").glob("*.txt")}
    assert traces == {"KeyError: 'nobody thought of it'", "fuzz.Hang: more than 0.05 s", "a refusal without a message"}
    assert "KeyError: 'nobody thought of it'" in said
    file = next(f for f in (output / "failures").glob("*.txt") if "KeyError" in f.read_text())
    assert fuzz.main(["--one", "bad reader", file.stem.rsplit("-", 1)[1]]) == 1
    assert repr(file.with_suffix(".bin").read_bytes()) in capsys.readouterr().out


def test_it_goes_on_where_it_was_stopped_with_the_same_inputs(tmp_path):
    seen: list[bytes] = []
    reader = Reader("kept", lambda data, folder: seen.append(data), lambda: [b"abc: [1, 2]"], 1)
    fuzz.run([reader], 500, tmp_path / "a", seed=5)
    whole = seen[:]
    seen.clear()
    for inputs in (123, 400, 500):
        rows = fuzz.run([reader], inputs, tmp_path / "b", seed=5)["readers"]
    again = [data for data in seen if data != b"abc: [1, 2]"]
    assert again == [data for data in whole if data != b"abc: [1, 2]"]
    assert rows["kept"]["inputs"] == rows["kept"]["accepted"] == 500
    with pytest.raises(SystemExit, match="is of seed 5"):
        fuzz.run([reader], 600, tmp_path / "b", seed=6)
