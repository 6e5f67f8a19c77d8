"""Every family of Parakeet models through the commands, as scripts/models/check_models.py runs them."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import ROOT, slow
from hostile_files import members_of
from nemo.core.connectors.save_restore_connector import SaveRestoreConnector
from omegaconf import OmegaConf

from finetune.models.loading import load_model
from finetune.models.nemo import import_nemo
from finetune.models.nemo_archive import CONFIG, WEIGHTS, save_nemo
from finetune.models.protocols import AsrModel
from finetune.security.documents import leaves

sys.path.insert(0, str(ROOT / "scripts" / "models"))

import check_models
from families import FAMILIES


# The others train in tests of their own, and all in the slow ones.
@pytest.mark.parametrize("name", ["tdt", "conformer-rnnt", "unified"])
def test_it_trains_and_recognises(name: str, tmp_path: Path) -> None:
    check = check_models.Check(name, tmp_path / "family", check_models.sample(tmp_path))
    check.train()
    check.transcribe()


@pytest.mark.parametrize("name", [n if n in ("tdt", "hybrid-tdt", "ctc", "streaming") else slow(n) for n in FAMILIES])
def test_it_is_loaded_as_nemo_loads_it(name: str, archive_of: Callable[..., Path]) -> None:
    """With every weight, the buffers that no file brings, and the whole configuration."""
    path = archive_of(name)
    ours, theirs = load_model(str(path)), import_nemo().ASRModel.restore_from(str(path), map_location="cpu")
    for tensors in ("named_parameters", "named_buffers"):
        mine, other = (dict(getattr(model, tensors)()) for model in (ours, theirs))
        assert mine.keys() == other.keys()
        assert [n for n in mine if not torch.equal(mine[n], other[n])] == []
    differing = set(settings_of(ours).items()) ^ set(settings_of(theirs).items())
    assert {key for key, _ in differing if not key.startswith("tokenizer.")} == set()


@pytest.mark.parametrize("name", ["hybrid-tdt", slow("prompt")])
def test_it_is_saved_as_nemo_saves_it(name: str, archive_of: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(str(archive_of(name)))
    model.cfg.labels[:6] = ["1e5", "no", "1_0", "", "'", "\u2028"]  # tokens are texts, whatever they look like
    save_nemo(model, tmp_path / "ours.nemo")
    SaveRestoreConnector().save_to(model, str(tmp_path / "theirs.nemo"))
    ours, theirs = members_of(tmp_path / "ours.nemo"), members_of(tmp_path / "theirs.nemo")
    assert [Path(file).name for file in sorted(ours)] == [Path(file).name for file in sorted(theirs)]
    mine, other = (next(text for file, text in files.items() if file.endswith(CONFIG)) for files in (ours, theirs))
    assert OmegaConf.create(mine.decode()) == OmegaConf.create(other.decode())
    mine, other = (next(text for file, text in files.items() if file.endswith(WEIGHTS)) for files in (ours, theirs))
    mine, other = (torch.load(io.BytesIO(content), weights_only=True) for content in (mine, other))
    assert list(mine) == list(other)
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_loading_draws_no_random_numbers(archive_of: Callable[..., Path]) -> None:
    path = str(archive_of("hybrid-tdt"))
    import_nemo()
    state = torch.get_rng_state()
    load_model(path)
    assert torch.equal(torch.get_rng_state(), state)


def settings_of(model: AsrModel) -> dict[str, str]:
    config = OmegaConf.to_container(model.cfg)
    return {key: repr(value) for key, value in leaves(config)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_command(name: str, tmp_path: Path) -> None:
    results = check_models.check_family(name, tmp_path / "family", check_models.sample(tmp_path))
    assert {cell: result for cell, result in results.items() if not result.startswith(check_models.PASSED)} == {}
