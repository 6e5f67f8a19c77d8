"""`finetune.export --to hotwords`: phrases as sherpa-onnx takes them."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TOKENIZER

from finetune.models.loading import read_tokenizer
from finetune.models.sentencepiece_model import processor
from finetune.tools.export.hotwords import HOTWORDS, SCORE, VOCABULARY


def export(*arguments: Any) -> int:
    from finetune.export import main

    return main([str(a) for a in arguments])


def test_phrases_in_lower_case_with_scores_and_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    names = tmp_path / "names.txt"
    names.write_text("Pound KEY\nwelcome! :3\nWelcome\n日本\n", encoding="utf-8")
    output = tmp_path / "out"
    assert export("--model", TOKENIZER, "--to", "hotwords", "--boost", names, "--output", output) == 0
    told = capsys.readouterr()
    assert "left out: 日本" in told.err
    assert f'hotwords_file="{output / HOTWORDS}", hotwords_score={SCORE:g}' in told.out
    assert (output / HOTWORDS).read_text() == f"pound key\nwelcome :{3 * SCORE:g}\n"
    encoder = processor(read_tokenizer(str(TOKENIZER), "--model"))
    rows = [line.split("\t") for line in (output / VOCABULARY).read_text(encoding="utf-8").splitlines()]
    assert [piece for piece, _ in rows] == [encoder.id_to_piece(i) for i in range(encoder.vocab_size())]
    assert [float(score) for _, score in rows] == pytest.approx(
        [encoder.get_score(i) for i in range(encoder.vocab_size())], rel=1e-5
    )


def test_capitals_as_written_and_as_a_sentence_begins(archive_of, tmp_path):
    (tmp_path / "names.txt").write_text("pound key\nWelcome\n")
    model = archive_of("tdt", "plain", speaking=True)
    assert export("--model", model, "--to", "hotwords", "--boost", tmp_path / "names.txt", "--output", tmp_path) == 0
    assert (tmp_path / HOTWORDS).read_text() == "pound key\nPound key\nWelcome\n"


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "names.txt").write_text("日本\n", encoding="utf-8")
    common = ["--model", TOKENIZER, "--output", tmp_path / "out"]
    assert export(*common, "--to", "hotwords", "--boost", tmp_path / "names.txt") == 2
    assert "can write none of the phrases" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for options in (["--to", "hotwords"], ["--to", "nemo", "--boost", tmp_path / "names.txt"]):
        with pytest.raises(SystemExit):
            export(*common, *options)
        assert "--to hotwords and --boost FILE go together" in capsys.readouterr().err
