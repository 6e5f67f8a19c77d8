"""`finetune.export --to hotwords`: phrases as sherpa-onnx takes them."""

from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TOKENIZER, read_lines
from export_cases import write_export

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


@pytest.mark.slow
def test_sherpa_onnx_finds_phrases_by_weights_and_score(clips, tmp_path):
    """Both the score that is chosen and the weights beside the phrases move what sherpa-onnx writes."""
    import sherpa_onnx
    import soundfile

    model = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
    write_export(model, tmp_path / "export", "sherpa")
    parts = {part: str(tmp_path / "export" / f"{part}.onnx") for part in ("encoder", "decoder", "joiner")}
    rows = read_lines(clips / "manifest.jsonl")[:12]
    audios = [soundfile.read(clips / row["audio_filepath"], dtype="float32")[0] for row in rows]
    words = sorted({word for row in rows for word in row["text"].split() if len(word) > 4})

    def decoded(weight: str, score: float) -> list[list[str]]:
        (tmp_path / "names.txt").write_text("".join(f"{word}{weight}\n" for word in words), encoding="utf-8")
        options = ["--boost", tmp_path / "names.txt", "--hotwords-score", score, "--output", tmp_path / "hot"]
        assert export("--model", model, "--to", "hotwords", *options) == 0
        recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
            **parts,
            tokens=str(tmp_path / "export" / "tokens.txt"),
            model_type="nemo_transducer",
            feature_dim=80,
            decoding_method="modified_beam_search",
            modeling_unit="bpe",
            bpe_vocab=str(tmp_path / "hot" / VOCABULARY),
            hotwords_file=str(tmp_path / "hot" / HOTWORDS),
            hotwords_score=score,
        )
        texts = []
        for audio_S in audios:
            stream = recognizer.create_stream()
            stream.accept_waveform(16000, audio_S)
            recognizer.decode_stream(stream)
            texts.append(stream.result.text.split())
        return texts

    def found(texts: list[list[str]]) -> int:
        return sum(word in text for text in texts for word in words)

    little, some, much = (decoded("", score) for score in (0.01, 0.5, 1.5))
    assert found(little) < found(some) < found(much)
    weighted = decoded(" :3", 0.5)
    assert weighted != some
    assert found(some) <= found(weighted) <= found(much)


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
    (tmp_path / "good.txt").write_text("welcome\n")
    (tmp_path / "file").write_text("")
    common[-1] = tmp_path / "file"
    assert export(*common, "--to", "hotwords", "--boost", tmp_path / "good.txt") == 1
    assert "cannot be written" in capsys.readouterr().err
    for options in (["--to", "hotwords"], ["--to", "nemo", "--boost", tmp_path / "names.txt"]):
        with pytest.raises(SystemExit):
            export(*common, *options)
        assert "--to hotwords and --boost FILE go together" in capsys.readouterr().err
