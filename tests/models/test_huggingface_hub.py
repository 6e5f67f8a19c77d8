"""Hub names of models: a repository's .nemo comes first, else its Hugging Face files; asked of a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hub_server
import pytest
from conftest import ROOT

from finetune.models.huggingface.writing import write_hugging_face
from finetune.models.nemo_archive import read_nemo

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
NAME = "someone/small-tdt"

FETCH = """
import json, sys
from finetune.errors import UserError
from finetune.models.huggingface.reading import fetch
try:
    print(json.dumps({"path": str(fetch(sys.argv[1]))}))
except UserError as error:
    print(json.dumps({"error": str(error)}))
"""


class ModelHub(hub_server.Hub):
    """The same hub, for a model repository."""

    def answer(self, body: bool = True) -> None:
        self.path = self.path.replace("/api/models/", "/api/datasets/")
        if self.path.startswith(f"/{self.repository}/resolve/"):
            self.path = "/datasets" + self.path
        super().answer(body)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ask(folder, *command)` runs Python in a process of its own whose hub serves the folder; its output, and what
    the hub was asked."""
    monkeypatch.setattr(hub_server, "Hub", ModelHub)

    def run(folder: Path | None, *command: object) -> tuple[subprocess.CompletedProcess[str], list[str]]:
        environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
        for name in ("HF_HUB_CACHE", "HF_XET_CACHE", "HF_TOKEN"):
            environment.pop(name, None)
        served = folder if folder is not None else tmp_path
        with hub_server.serve(served, NAME, {".*": 10**9} if folder is None else None) as (endpoint, handler):
            done = subprocess.run(
                [sys.executable, *map(str, command)],
                env={**environment, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=1500,
            )
        return done, list(handler.asked)

    return run


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_hugging_face(read_nemo(BASE), folder)
    (folder / "pytorch_model.bin").write_bytes(b"never asked for")
    (folder / "modeling_parakeet.py").write_text("raise SystemExit('code of the repository was run')")
    return folder


def fetched(ask: Any, folder: Path | None) -> tuple[dict[str, str], list[str]]:
    done, asked = ask(folder, "-c", FETCH, NAME)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), asked


@pytest.mark.slow
def test_a_repository_in_hugging_face_format(ask, directory):
    answer, asked = fetched(ask, directory)
    found = Path(answer["path"])
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "nemo_config.yaml"):
        assert (found / name).read_bytes() == (directory / name).read_bytes()
    assert not (found / "pytorch_model.bin").exists()
    assert not (found / "modeling_parakeet.py").exists()
    assert not any("pytorch_model" in line or "modeling" in line for line in asked)


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_done_without(ask, directory):
    answer, _ = fetched(ask, directory)
    again, asked = fetched(ask, None)
    assert again == answer
    assert asked


@pytest.mark.slow
def test_a_nemo_of_the_repositorys_name_comes_first(ask, directory, tmp_path):
    both = shutil.copytree(directory, tmp_path / "both")
    shutil.copy(BASE, both / "small-tdt.nemo")
    shutil.copy(BASE, both / "last.nemo")
    answer, asked = fetched(ask, both)
    assert Path(answer["path"]).name == "small-tdt.nemo"
    assert not any("safetensors" in line for line in asked)


@pytest.mark.slow
def test_nemo_files_of_other_names(ask, tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(BASE, folder / "best.nemo")
    answer, _ = fetched(ask, folder)
    assert Path(answer["path"]).name == "best.nemo"
    assert Path(answer["path"]).read_bytes() == BASE.read_bytes()
    assert fetched(ask, None)[0] == answer
    shutil.copy(BASE, folder / "last.nemo")
    answer, _ = fetched(ask, folder)
    assert "several .nemo files (best.nemo, last.nemo)" in answer["error"]


@pytest.mark.slow
def test_a_repository_of_another_kind(ask, tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "lasr_ctc"}))
    (folder / "model.safetensors").write_bytes(b"large")
    answer, asked = fetched(ask, folder)
    assert f"{NAME} is a Hugging Face model of the type 'lasr_ctc'" in answer["error"]
    assert not any("safetensors" in line for line in asked), "refused before anything large is downloaded"


@pytest.mark.slow
def test_the_export_downloads_a_nemo_by_its_name(ask, tmp_path, clips):
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(BASE, folder / "small-tdt.nemo")
    output = tmp_path / "out"
    code = "import sys; sys.modules['nemo'] = None; from finetune.export import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["--model", NAME, "--to", "hf", "--output", output, "--data", clips / "manifest.jsonl"]
    done, asked = ask(folder, "-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    assert any("small-tdt.nemo" in line for line in asked)
    assert (output / "config.json").is_file()
    done, _ = ask(
        tmp_path / "repository" / "..", "-c", code, "--model", "someone/else", "--to", "hf", "--output", output / "b"
    )
    assert done.returncode == 1
    assert "downloading else.nemo from the hub failed" in done.stderr


@pytest.mark.slow
def test_the_same_name_trains(ask, directory):
    """load_model and the plan take what `fetch` gives."""
    code = (
        "import sys; from finetune.models.loading import load_model; m = load_model(sys.argv[1]); "
        "from finetune.tools.planning.layout import read_layout; layout = read_layout(sys.argv[1]); "
        "print(type(m).__name__, m.tokenizer.vocab_size, m.cfg.loss.tdt_kwargs.sigma, layout.layers)"
    )
    done, _ = ask(directory, "-c", code, NAME)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-4:] == ["EncDecRNNTBPEModel", "128", "0.02", "5"]
