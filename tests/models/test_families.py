"""Every family of Parakeet models through the commands, as scripts/models/check_models.py runs them."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts" / "models"))

import check_models
from families import FAMILIES

# The others train in tests of their own.
ELSEWHERE = {"rnnt", "hybrid-tdt", "hybrid-rnnt", "ctc", "streaming", "streaming-hybrid", "prompt"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ELSEWHERE])
def test_it_trains_and_recognises(name: str, tmp_path: Path) -> None:
    check = check_models.Check(name, tmp_path / "family", check_models.sample(tmp_path))
    check.train()
    check.transcribe()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_command(name: str, tmp_path: Path) -> None:
    results = check_models.check_family(name, tmp_path / "family", check_models.sample(tmp_path))
    assert {cell: result for cell, result in results.items() if not result.startswith(check_models.PASSED)} == {}
