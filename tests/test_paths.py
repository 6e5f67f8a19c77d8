"""Names of files that are not there."""

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_manifest

from finetune.config.load import read_yaml
from finetune.data.sources import open_source, parse_sources
from finetune.errors import UserError
from finetune.models.loading import load_model
from finetune.paths import looks_local, near_path
from finetune.tools.export.hugging_face import nemo_file
from finetune.tools.planning.layout import read_layout
from finetune.tools.report.read import read_run

TOO_LONG = 300 * "a"
"""A name that the system refuses to look for, as it refuses one in a folder without permission."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with my_data/train.jsonl and my_data/clips/."""
    (tmp_path / "my_data" / "clips").mkdir(parents=True)
    write_manifest(tmp_path / "my_data" / "train.jsonl", [{"audio_filepath": "a.wav", "text": "a"}])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def open_data(path: str) -> object:
    return [open_source(source, "data.train") for source in parse_sources(path, "data.train", "train")]


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("my_data/train.jsonl", None),
        ("my_data/trian.jsonl", "my_data/train.jsonl"),
        ("my_dta/train.jsonl", "my_data/train.jsonl"),
        ("my_data/train.jsnl", "my_data/train.jsonl"),
        ("my_dta/clips", "my_data/clips"),
        ("my_dta/other.jsonl", "my_data"),
        ("my_data/train.jsonl/clips", None),
        (f"my_data/{TOO_LONG}", None),
        (f"{TOO_LONG}/{TOO_LONG}", None),
    ],
)
def test_a_near_path(data: Path, typed: str, near: str | None) -> None:
    assert near_path(typed) == (f" Did you mean {near}?" if near else "")


@pytest.mark.parametrize("typed", ["my_dta/clips", "my_data/clisp", "my_data/train.jsnl", "my_dat"])
def test_a_mistyped_data_path_asks_no_hub(data: Path, typed: str) -> None:
    assert looks_local(typed)
    with pytest.raises(UserError, match=r"^data.train: there is no .* Did you mean my_data") as said:
        open_data(typed)
    assert said.value.__cause__ is None  # no attempt failed


@pytest.mark.parametrize("name", ["nvidia/parakeet-tdt-0.6b-v3", "google/fleurs", "my_org/clips", TOO_LONG])
def test_a_name_of_a_hub(data: Path, name: str) -> None:
    assert not looks_local(name)


@pytest.mark.parametrize(
    "read",
    [open_data, load_model, read_layout, lambda name: nemo_file(name, Path()), lambda name: read_yaml(Path(name), "")],
    ids=["data", "model", "plan", "export", "run file"],
)
@pytest.mark.parametrize("name", [TOO_LONG, f"{TOO_LONG}.nemo", f"{TOO_LONG}.yaml", f"{TOO_LONG}.jsonl"], ids=len)
def test_a_path_that_may_not_be_looked_up(data: Path, read: Callable[[str], object], name: str) -> None:
    with pytest.raises(UserError, match=f" {name} cannot be read: File name too long.$"):
        read(name)


def test_a_run_that_may_not_be_looked_up() -> None:
    with pytest.raises(UserError, match="is no run's folder"):
        read_run(Path(TOO_LONG))
