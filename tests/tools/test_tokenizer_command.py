"""Training tokenizers and giving old ones more pieces: python -m finetune.tokenizer and what it calls."""

import io
import json
import tarfile
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TOKENIZER, write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from turkish import TURKISH

from finetune import tokenizer as command
from finetune.data.normalization import normalize_text
from finetune.data.text_corpus import Text, read_texts
from finetune.models.loading import read_tokenizer
from finetune.models.sentencepiece_model import alphabet, piece_encoder, processor, train_tokenizer, write_tokenizer
from finetune.models.tokenizer_coverage import compare, table
from finetune.models.tokenizer_growth import LEAST_COUNT, grow_as_heard, grow_from_tokenizer, grow_on_texts

PROMPTS = ROOT / "examples" / "voice_prompts"


def call(*arguments: Any) -> int:
    return command.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def texts() -> list[Any]:
    return read_texts(str(PROMPTS), "--data", "basic")


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def old(request: pytest.FixtureRequest, texts: list[Any]) -> Any:
    """A tokenizer of the prompts, which writes all of them."""
    if request.param == "bpe":
        return read_tokenizer(str(TOKENIZER), "--against")
    return train_tokenizer((t.text for t in texts), 200, kind="unigram", coverage=1.0, key="--size")


@pytest.fixture(scope="module")
def turkish() -> list[str]:
    return [normalize_text(line, "basic") for line in TURKISH.splitlines()] * 3


@pytest.fixture(scope="module", params=["new_characters", "all"])
def grown(request: pytest.FixtureRequest, old: Any, turkish: list[str]) -> Any:
    return request.param, grow_on_texts(old, turkish, 60, pieces=request.param, key="--size")


# ---- growing -------------------------------------------------------------------------------------------------------


def test_old_pieces_keep_their_ids_and_scores(old: Any, grown: Any) -> None:
    """New pieces come behind, characters first, and every new character of the texts is there."""
    _, growth = grown
    before, after = list(old.pieces), list(growth.model.pieces)
    assert [(p.piece, p.score, p.type) for p in after[: len(before)]] == [(p.piece, p.score, p.type) for p in before]
    # Lower case of İ is i with a dot above as a character of its own.
    assert set(growth.characters) == set("ğışöü\u0307")
    assert growth.added[: len(growth.characters)] == growth.characters
    assert len(growth.characters) < len(growth.added) <= 60
    assert len({p.piece for p in after}) == len(after)


def test_texts_that_could_be_written_before_keep_their_pieces(old: Any, grown: Any, texts: list[Any]) -> None:
    """With new_characters none of the prompts changes; with all the new pieces are used in some of them."""
    pieces, growth = grown
    before, after = processor(old), processor(growth.model)
    changed = [t for t in texts if before.encode(t.text) != after.encode(t.text)]
    assert bool(changed) == (pieces == "all")
    for t in changed:  # what changes is only that neighbours are joined
        assert after.encode(t.text, out_type=str) != before.encode(t.text, out_type=str)
        assert len(after.encode(t.text)) < len(before.encode(t.text))


def test_new_texts_are_written_and_take_fewer_pieces(old: Any, grown: Any, turkish: list[str]) -> None:
    """Without <unk>; with all pieces each merged one is made somewhere, or a part of one that is."""
    pieces, growth = grown
    encoder = processor(growth.model)
    assert all(encoder.unk_id() not in encoder.encode(text) for text in turkish)
    only = grow_on_texts(old, turkish, len(growth.characters), pieces=pieces, key="--size")
    assert only.added == growth.characters
    spelled = sum(len(processor(only.model).encode(text)) for text in turkish)
    tokens = Counter(piece for text in turkish for piece in encoder.encode(text, out_type=str))
    assert sum(tokens.values()) < (0.8 if pieces == "all" else 0.95) * spelled
    merged = growth.added[len(growth.characters) :]
    new = set(growth.characters) - alphabet(old)
    assert pieces == "all" or all(new & set(piece) for piece in merged)
    for piece in merged:
        assert tokens[piece] >= 1 or any(piece in longer and longer != piece for longer in merged), piece
    encode = piece_encoder(growth.model)
    assert [p for p in merged if encode(p) != [p]] == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("abeégiklmnorstuyzğış"), min_size=1, max_size=12), min_size=1, max_size=5))
def test_any_text_comes_back_from_its_pieces(grown: Any, old: Any, words: list[str]) -> None:
    """Over the grown alphabet; what has no new letter is written as before."""
    pieces, growth = grown
    text, encoder = unicodedata.normalize("NFC", " ".join(words)), processor(growth.model)
    ids = encoder.encode(text)
    assert encoder.unk_id() not in ids
    assert encoder.decode(ids) == text
    if pieces == "new_characters" and not set(text) & set(growth.characters):
        assert ids == processor(old).encode(text)


def test_merges_are_those_of_bpe_training() -> None:
    """On a corpus small enough to do it by hand: the most frequent neighbours first, ties in alphabetical order."""
    base = train_tokenizer(["a b c d e"] * 9, 7, coverage=1.0, key="--size")  # <unk>, the space, five letters
    assert {p.piece for p in base.pieces} == {"<unk>", "▁", *"abcde"}
    corpus = ["abab"] * 10 + ["abc"] * 6 + ["dc"] * 5 + ["e"] * 4
    growth = grow_on_texts(base, corpus, 9, pieces="all", key="--size")
    # ab 26; then ▁ab 16 joins ▁ with the ab behind it; ▁ab+ab 10; ▁ab+c 6; dc and ▁d 5: "dc" comes first, then ▁dc.
    assert growth.added == ["ab", "▁ab", "▁abab", "▁abc", "dc", "▁dc"]
    assert processor(growth.model).encode("abab abc dc e", out_type=str) == ["▁abab", "▁abc", "▁dc", "▁", "e"]
    rare = grow_on_texts(base, ["ab"] * (LEAST_COUNT - 1), 9, pieces="all", key="--size")
    assert rare.added == []


def test_digits_punctuation_and_other_words_are_not_joined(old: Any) -> None:
    """Letters and marks become longer pieces; a Hindi vowel sign is a mark of its own."""
    growth = grow_on_texts(old, ["नमस्ते 2023! ağ-ağ"] * 20, 40, key="--size")
    merged = [piece for piece in growth.added if len(piece) > 1]
    assert "▁नमस्ते" in merged
    assert not any(c in piece for piece in merged for c in "0123456789!-")
    assert not any("▁" in piece[1:] for piece in merged)


def test_growing_from_another_tokenizer(old: Any, turkish: list[str]) -> None:
    """Its best pieces that the old merges can make; the others are counted, none of them takes a row."""
    other = train_tokenizer(turkish, 120, coverage=1.0, key="--size")
    growth = grow_from_tokenizer(old, other, 60, pieces="all", key="--size")
    theirs = {p.piece for p in other.pieces}
    assert set(growth.added) <= theirs
    assert "ğ" in growth.characters
    encode = piece_encoder(growth.model)
    assert all(encode(piece) == [piece] for piece in growth.added)
    assert len(growth.added) + growth.unreachable == 60
    text = turkish[0]
    assert processor(growth.model).decode(processor(growth.model).encode(text)) == text


def test_growing_as_heard_cuts_texts_as_the_old_tokenizer_cuts_what_is_heard(old: Any, texts: list[Any]) -> None:
    """English in other letters, of which two sound alike: the pieces are those of English, letter by letter, and the
    old texts keep theirs. With a smaller size the most frequent ones are taken."""
    english = [t.text.lower() for t in texts if t.language == "en"]
    heard = {chr(0x10D0 + i): chr(ord("a") + i) for i in range(26)}
    to_new = str.maketrans({letter: new for new, letter in heard.items()})
    written = [text.translate(to_new) for text in english]
    characters = grow_on_texts(old, written, 26, key="--size")
    growth = grow_as_heard(old, written, heard, characters, 1000)
    assert growth.characters == characters.characters
    assert growth.added[:26] == growth.characters
    encode, encode_old, back = processor(growth.model), processor(old), str.maketrans(heard)
    alike = sum(
        [p.translate(back) for p in encode.encode(new, out_type=str)] == encode_old.encode(plain, out_type=str)
        for new, plain in zip(written, english, strict=True)
    )
    assert alike > 0.8 * len(english)  # but for pieces that the texts have fewer than five times
    assert all(encode.encode(text) == encode_old.encode(text) for text in english)
    small = grow_as_heard(old, written, heard, characters, 40)
    assert 26 < len(small.added) <= 40
    assert set(small.added) < set(growth.added)
    same = {**heard, "ჩ": "s"}  # the letter of z
    assert {p.translate(str.maketrans(same)) for p in grow_as_heard(old, written, same, characters, 1000).added} <= {
        p.piece for p in old.pieces
    }


def test_too_many_new_characters_are_refused(old: Any, turkish: list[str]) -> None:
    from finetune.errors import UserError

    with pytest.raises(UserError, match=r"size=2\. Set size to \d or more, or coverage below 1"):
        grow_on_texts(old, turkish, 2, key="--size")
    fewer = grow_on_texts(old, [*turkish, "☃"], 60, coverage=0.999, key="--size")
    assert "☃" in fewer.left_out
    assert "☃" not in fewer.added


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_new_tokenizer_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: list[Any]) -> None:
    """Files as NeMo wants them, and figures that a count by hand gives too."""
    out, file = tmp_path / "tokenizer", tmp_path / "report.json"
    arguments = ("--data", PROMPTS, "--normalization", "basic", "--size", 200, "--output", out)
    assert call(*arguments, "--against", TOKENIZER, "--json", file) == 0
    report = json.loads(file.read_text(encoding="utf-8"))
    assert (report["pieces"], report["type"], report["against"]["pieces"]) == (200, "bpe", 128)
    from nemo.collections.common.tokenizers import SentencePieceTokenizer

    theirs = SentencePieceTokenizer(str(out / "tokenizer.model"))
    assert theirs.vocab_size == 200
    assert len((out / "vocab.txt").read_text(encoding="utf-8").splitlines()) == 199
    assert len((out / "tokenizer.vocab").read_text(encoding="utf-8").splitlines()) == 200
    unk = theirs.tokenizer.unk_id()
    for language in ("en", "fr"):
        own = [t for t in texts if t.language == language]
        for name, encoder in (
            ("new", theirs.tokenizer),
            ("old", SentencePieceProcessor(model_file=str(TOKENIZER / "tokenizer.model"))),
        ):
            ids = [encoder.encode(t.text) for t in own]
            rates = report["by_language"][language][name]
            characters = sum(len(t.text.replace(" ", "")) for t in own)
            assert rates["texts_written"] == pytest.approx(sum(unk not in i for i in ids) / len(own))
            assert rates["tokens_per_character"] == pytest.approx(sum(map(len, ids)) / characters)
            assert rates["tokens_per_second"] == pytest.approx(sum(map(len, ids)) / sum(t.seconds for t in own))
    assert report["by_language"]["fr"]["new"]["texts_written"] < 1  # the default coverage leaves out rare letters ...
    assert "ç" in [c for c, _ in report["not_written"]]  # ... and says which
    said = capsys.readouterr().out
    assert "tokens/s old > new" in said
    assert "'ç'" in said


def test_bytes_spell_what_has_no_piece(tmp_path: Path) -> None:
    """Nothing is <unk> then, but the report does not call it written."""
    file = tmp_path / "texts.txt"
    file.write_text(TURKISH + "\n\n", encoding="utf-8")
    out = tmp_path / "out"
    options = ("--type", "unigram", "--byte-fallback", "--coverage", 0.99, "--size", 330)
    assert call("--data", file, *options, "--output", out, "--json", tmp_path / "r.json") == 0
    encoder = SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    assert encoder.decode(encoder.encode("漢字 z")) == "漢字 z"
    report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    row = report["by_language"]["all"]
    assert row["texts"] == 10
    assert row["new"]["tokens_per_second"] is None  # a text file tells no lengths
    assert 0.98 < row["new"]["characters_written"] < 1
    assert report["not_written"]
    grown = grow_on_texts(read_tokenizer(str(out), "--extend"), ["漢字"] * 9, 5, key="--size")
    assert grown.characters == ["字", "漢"]
    assert processor(grown.model).encode("漢字", out_type=str) == ["▁漢字"]


def test_extending_a_models_tokenizer(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The old tokenizer is read out of the .nemo; the report shows what becomes of the model's languages."""
    file, report = tmp_path / "tr.txt", tmp_path / "r.json"
    file.write_text(TURKISH, encoding="utf-8")
    arguments = ("--data", file, "--normalization", "basic", "--size", 40, "--output", tmp_path / "out")
    assert call(*arguments, "--extend", tiny_model, "--report-on", PROMPTS, "--json", report) == 0
    told = json.loads(report.read_text(encoding="utf-8"))
    assert told["growth"]["pieces_before"] == 128
    assert told["pieces"] == 128 + told["growth"]["pieces_added"]
    rows = told["by_language"]
    assert rows["en"]["same_segmentation"] == rows["fr"]["same_segmentation"] == 1.0
    assert (rows[""]["old"]["texts_written"], rows[""]["new"]["texts_written"]) == (0.0, 1.0)
    assert "128" in capsys.readouterr().out
    assert call(*arguments, "--extend", tiny_model, "--pieces", "all", "--report-on", PROMPTS, "--json", report) == 0
    assert json.loads(report.read_text(encoding="utf-8"))["by_language"]["en"]["same_segmentation"] < 1


def test_the_table_counts_new_pieces_and_sums_up_several_languages(old: Any, grown: Any, turkish: list[str]) -> None:
    _, growth = grown
    texts = [Text(text, "tr", None) for text in turkish]
    head, row = table(compare(texts, growth.model, old)).splitlines()
    assert head.split("  ")[-1] == "new pieces"
    assert row.startswith("tr ")
    encoded = [piece for text in turkish for piece in processor(growth.model).encode(text, out_type=str)]
    new = [piece for piece in encoded if piece in set(growth.added)]
    assert row.endswith(f"{len(set(new))} ({100 * len(new) / len(encoded):.2f} % of the tokens)")
    lines = table(compare([*texts, Text("yes", "en", None)], growth.model, old)).splitlines()
    assert [line.split()[0] for line in lines] == ["language", "en", "tr", "all"]


def test_texts_are_read_without_their_audio(tmp_path: Path) -> None:
    """The audio of a manifest need not even be there; rows without a text are left out."""
    rows = [{"audio_filepath": "gone.wav", "text": f"Words {i}", "duration": 2.0, "lang": "en"} for i in range(5)]
    manifest = write_manifest(tmp_path / "m.jsonl", [*rows, {"audio_filepath": "x.wav", "duration": 1.0}])
    found = read_texts([str(manifest), {"path": str(PROMPTS), "language": "xx"}], "--data", "lower")
    assert [t.text for t in found if t.text.startswith("words")] == [f"words {i}" for i in range(5)]
    assert sum(t.seconds == 2.0 for t in found) >= 5
    assert len(found) == 5 + 827
    own = read_texts({"path": str(manifest), "text_normalization": "none"}, "--data", "lower")
    assert own[0].text == "Words 0"


def test_compare_counts_texts_whose_pieces_stay(old: Any, texts: list[Any]) -> None:
    report = compare(texts[:50], old, old)
    assert report["by_language"]["all"]["same_segmentation"] == 1.0
    assert report["by_language"]["all"]["old"] == report["by_language"]["all"]["new"]
    assert "same_segmentation" not in compare(texts[:50], old, None)["by_language"]["all"]


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], old: Any) -> None:
    """One clear line each, exit code 2, and nothing is written."""
    out = tmp_path / "out"

    def refused(*arguments: Any) -> str:
        try:
            code = call(*arguments, "--output", out)
        except SystemExit as stop:
            code = int(stop.code or 0)
        assert code == 2
        assert not out.exists()
        return capsys.readouterr().err.strip().splitlines()[-1]

    said = refused("--data", PROMPTS, "--size", 10_000)
    assert "--size: SentencePiece cannot train 10000 pieces on these texts" in said
    assert "<=" in said
    assert "the coverage" in refused("--data", PROMPTS, "--size", 10)
    assert "there is no file or directory /nowhere" in refused("--data", "/nowhere", "--size", 10)
    assert "there is no file none.txt" in refused("--data", "none.txt", "--size", 10)
    assert "--extend" in refused("--data", PROMPTS, "--size", 9, "--pieces", "all")
    assert "--extend keeps" in refused("--data", PROMPTS, "--size", 9, "--extend", TOKENIZER, "--type", "bpe")
    assert "0.9 to 1" in refused("--data", PROMPTS, "--size", 9, "--coverage", 0.5)
    bad = tmp_path / "bad.model"
    bad.write_bytes(b"\x00 no model")
    assert "is no SentencePiece model" in refused("--data", PROMPTS, "--size", 9, "--extend", bad)
    assert "--against: there is no file or directory" in refused("--data", PROMPTS, "--size", 200, "--against", "/no")
    write_tokenizer(old, tmp_path / "part")
    with tarfile.open(tmp_path / "two.nemo", "w") as archive:
        for name in ("a_tokenizer.model", "b_tokenizer.model"):
            content = (tmp_path / "part" / "tokenizer.model").read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert "an aggregate of 2 tokenizers" in refused("--data", PROMPTS, "--size", 9, "--extend", tmp_path / "two.nemo")
