"""The export as a command: without NeMo, with the clips that a run brings, and as the documentation shows it."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, read_lines, write_manifest

from finetune.errors import UserError

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


def export(*arguments: object) -> int:
    from finetune.export import main

    return main([str(a) for a in arguments])


BLOCKED = """
import sys

class NoNemo:
    def find_spec(self, name, path=None, target=None):
        if name == "nemo" or name.startswith("nemo."):
            raise ImportError("nemo is not installed")

sys.meta_path.insert(0, NoNemo())
from finetune.export import main
code = main(sys.argv[1:])
assert not any(name == "nemo" or name.startswith("nemo.") for name in sys.modules)
sys.exit(code)
"""


@pytest.mark.slow
def test_without_nemo(tmp_path, clips):
    """The archive is written by what is in it; single is compared with batched, and that is said."""
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    data = write_manifest(tmp_path / "few.jsonl", rows[:4])
    arguments = ["--model", BASE, "--to", "hf", "--output", tmp_path / "out", "--data", data]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert "NeMo cannot be imported here" in done.stderr
    assert "transformers single, transformers batched" in done.stdout
    assert "NeMo single" not in done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_run_brings_its_own_clips_and_without_any_it_is_said(tmp_path, clips, messages, capsys):
    from finetune.tools.export.hugging_face import samples_for

    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(BASE, run / "model.nemo")
    (run / "config.yaml").write_text(f"data:\n  validation: {clips / 'manifest.jsonl'}\n")
    samples = samples_for(str(run), None, "validation", 16000)
    assert len(samples.ids) == 16
    assert samples.texts
    (run / "config.yaml").write_text("data:\n  validation: gone/manifest.jsonl\n")
    samples = samples_for(str(run), None, "validation", 16000)
    assert not samples.texts
    assert any("no speech was compared" in m and "gone/manifest.jsonl" in m and "--data" in m for m in messages)
    with pytest.raises(UserError, match="gone"):
        samples_for(str(run), ["gone/manifest.jsonl"], "validation", 16000)


def test_options_of_the_other_format(capsys):
    with pytest.raises(SystemExit) as stop:
        export("--model", BASE, "--to", "nemo", "--output", "out", "--dtype", "bfloat16")
    assert stop.value.code == 2
    assert "are for --to hf" in capsys.readouterr().err


def test_commands_of_the_documentation(capsys):
    from finetune.config.schema import schema_fields
    from finetune.export import parse_arguments

    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    lines = re.findall(r"^(?:python|accelerate) .*", text, re.MULTILINE)
    assert len(lines) > 6
    for line in lines:
        words = shlex.split(line)
        if "finetune.export" in words:
            parse_arguments(words[words.index("finetune.export") + 1 :])
        files = [word for word in words if word.endswith((".py", ".yaml", ".nemo"))]
        assert all((ROOT / file).is_file() for file in files), line
    named = set(re.findall(r"(?<![\w./])((?:model|data|training)\.(?!nemo|safetensors)[a-z]\w+)\b(?!\()", text))
    assert "data.validation" in named
    assert not named - schema_fields().keys()
