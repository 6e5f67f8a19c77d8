"""SentencePiece models as fast tokenizers and back: the same ids and texts on real transcripts."""

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import sentencepiece
from conftest import TOKENIZER, VOICE_PROMPTS, slow
from tokenizers import normalizers
from turkish import TURKISH

from finetune.data.normalization import normalize_text
from finetune.errors import UserError
from finetune.models.huggingface.tokenizer import (
    decoding_differs,
    differing_as_written,
    encoding_differs,
    fast_tokenizer,
    processor_tokenizer,
    sample_texts,
    sentencepiece_of,
)
from finetune.models.huggingface.writing import check_texts
from finetune.models.nemo_archive import NemoFile
from finetune.models.sentencepiece_model import ModelProto, train_tokenizer
from finetune.models.tokenizer_growth import grow_on_texts

KINDS = {
    "plain": {},
    "byte_fallback": {"byte_fallback": True, "vocab_size": 450},
    "user_defined": {"user_defined_symbols": ["<pad>", "<|endoftext|>"]},
    "digits": {"user_defined_symbols": ["<pad>", "<|endoftext|>", *"0123456789"]},  # as in parakeet-tdt-0.6b-v3
    "control": {"control_symbols": ["<pad>", "<|x|>"]},
    "keeps_white_space": {"remove_extra_whitespaces": False},
    "no_dummy_prefix": {"add_dummy_prefix": False},
    "identity": {"normalization_rule_name": "identity"},
    "lower_case": {"normalization_rule_name": "nmt_nfkc_cf"},
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All 1,036 transcripts of the sample data."""
    return [
        " ".join(text.split())
        for path in sorted(VOICE_PROMPTS.glob("*.parquet"))
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist()
    ]


@pytest.fixture(scope="module")
def trained(texts: list[str]) -> Any:
    """Trains a SentencePiece model; returns its ModelProto."""

    def train(**options: Any) -> Any:
        out = io.BytesIO()
        settings = {"vocab_size": 200, "bos_id": -1, "eos_id": -1, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=out, num_threads=1, **{**settings, **options}
        )
        return ModelProto.FromString(out.getvalue())

    return train


def processor(proto: Any) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "kind",
    [slow(kind) if kind in ("no_dummy_prefix", "identity", "lower_case") else kind for kind in KINDS],
)
def test_there_and_back(model_type, kind, trained, texts, tmp_path):
    from transformers import AutoTokenizer

    proto = trained(model_type=model_type, **KINDS[kind])
    tokens = len(proto.pieces)
    fast = fast_tokenizer(proto)
    assert encoding_differs(proto, fast) == ""
    assert encoding_differs(proto, fast, texts) == ""
    assert decoding_differs(proto, fast, 500) == ""

    processor_tokenizer(proto).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    original = processor(proto)
    assert type(loaded).__name__ == "ParakeetTokenizer"
    assert loaded.convert_tokens_to_ids("<blank>") == tokens == len(loaded) - 1
    assert loaded.pad_token == ("<pad>" if kind in ("user_defined", "digits", "control") else "<blank>")
    some = [*texts[::25], "press 1, then 20"]
    assert [loaded(text)["input_ids"] for text in some] == [original.encode(text) for text in some]
    for text in some:
        ids = original.encode(text)
        wanted = " ".join(
            original.decode(ids).replace("⁇", "").split()
        )  # the unknown piece, which transformers leaves out
        assert " ".join(loaded.decode(ids, skip_special_tokens=True, group_tokens=False).split()) == wanted

    content, source = sentencepiece_of(tmp_path, tokens)
    assert source == "tokenizer.json, without tokenizer.model"
    rebuilt = sentencepiece.SentencePieceProcessor(model_proto=content)
    assert [rebuilt.id_to_piece(i) for i in range(tokens)] == [original.id_to_piece(i) for i in range(tokens)]
    for text in texts:
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))


def test_white_space_at_the_beginning_is_left_out_as_sentencepiece_does():
    proto = ModelProto.FromString((TOKENIZER / "tokenizer.model").read_bytes())
    lone = next(i for i, p in enumerate(proto.pieces) if p.piece == "▁")
    ids = [lone, lone, 1, 2]
    assert fast_tokenizer(proto).decode(ids) == processor(proto).decode(ids) == "tre"
    from transformers.convert_slow_tokenizer import ParakeetConverter

    # Why the project makes the tokenizer itself.
    assert ParakeetConverter(str(TOKENIZER / "tokenizer.model")).converted().decode(ids).startswith(" ")


@pytest.mark.parametrize("kind", ["plain", "control", "user_defined", "digits"])
def test_directories_converted_elsewhere(kind, trained, texts, tmp_path):
    """As transformers' own converter makes a tokenizer.json, without the SentencePiece file."""
    from transformers import ParakeetTokenizer
    from transformers.convert_slow_tokenizer import ParakeetConverter

    proto = trained(model_type="bpe", **KINDS[kind])
    (tmp_path / "spm.model").write_bytes(proto.SerializeToString())
    fast = ParakeetTokenizer(tokenizer_object=ParakeetConverter(str(tmp_path / "spm.model")).converted())
    fast.add_tokens(["<blank>"], special_tokens=True)
    fast.pad_token, fast.unk_token = "<pad>" if kind != "plain" else "<blank>", "<unk>"
    fast.save_pretrained(tmp_path)
    content, _ = sentencepiece_of(tmp_path, len(proto.pieces))
    rebuilt = sentencepiece.SentencePieceProcessor(model_proto=content)
    some = [*texts[::5], "press 1, then 20"]
    assert all(rebuilt.encode(text) == processor(proto).encode(text) for text in some)


def test_texts_of_byte_pieces(trained):
    proto = trained(model_type="bpe", **KINDS["byte_fallback"])
    ids = processor(proto).encode("日本語 ok")
    assert any(proto.pieces[i].type == 6 for i in ids)
    assert fast_tokenizer(proto).decode(ids) == "日本語 ok"


def test_a_difference_is_found(trained, texts):
    one, other = trained(model_type="bpe"), trained(model_type="bpe", vocab_size=150)
    said = encoding_differs(one, fast_tokenizer(other), texts)
    assert "is encoded as [" in said
    assert "by SentencePiece and as [" in said
    assert "SentencePiece decodes" in decoding_differs(one, fast_tokenizer(other))


def test_pieces_that_are_taken_and_kinds_that_do_not_convert(trained):
    with pytest.raises(UserError, match="has a piece <blank> of its own"):
        processor_tokenizer(trained(model_type="bpe", user_defined_symbols=["<blank>"]))
    with pytest.raises(UserError, match="words or characters"):
        fast_tokenizer(trained(model_type="char"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The shipped tokenizer in Hugging Face's format, with the kept file."""
    content = (TOKENIZER / "tokenizer.model").read_bytes()
    processor_tokenizer(ModelProto.FromString(content)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(content)
    return tmp_path


def test_the_kept_file_is_taken_while_it_is_the_same_tokenizer(saved, trained):
    original = (saved / "tokenizer.model").read_bytes()
    assert sentencepiece_of(saved, 128) == (original, "tokenizer.model")
    (saved / "tokenizer.model").write_bytes(trained(model_type="bpe").SerializeToString())
    content, source = sentencepiece_of(saved, 128)
    assert source == "tokenizer.json, other than tokenizer.model"
    ours, theirs = processor(ModelProto.FromString(original)), processor(ModelProto.FromString(content))
    assert [p.piece for p in ModelProto.FromString(content).pieces] == [
        p.piece for p in ModelProto.FromString(original).pieces
    ]
    assert ours.encode("press star for help") == theirs.encode("press star for help")


def test_a_tokenizer_json_that_sentencepiece_cannot_be(saved):
    (saved / "tokenizer.model").unlink()
    file = saved / "tokenizer.json"
    whole = json.loads(file.read_text())
    with pytest.raises(UserError, match="has no piece with id 129"):
        sentencepiece_of(saved, 140)
    whole["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "Lowercase"}]}
    whole["pre_tokenizer"] = {"type": "Whitespace"}
    file.write_text(json.dumps(whole))
    with pytest.raises(UserError, match="cannot be turned into SentencePiece"):
        sentencepiece_of(saved, 128)
    whole["model"] = {
        "type": "WordPiece",
        "unk_token": "<unk>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {"<unk>": 0, "a": 1},
    }
    whole["added_tokens"] = []
    file.write_text(json.dumps(whole))
    with pytest.raises(UserError, match="WordPiece"):
        sentencepiece_of(saved, 2)


@pytest.mark.parametrize("pieces", ["new_characters", "all"])
@pytest.mark.parametrize("byte_fallback", [False, True])
@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_grown_tokenizers(model_type, byte_fallback, pieces, texts):
    """A unigram piece that gained as much as every other would leave two ways to write a word equally good."""
    old = train_tokenizer(texts, 450, kind=model_type, byte_fallback=byte_fallback, coverage=1.0, key="k")
    new = [normalize_text(line, "basic") for line in TURKISH.splitlines()] * 3
    for size in (20, 64):
        growth = grow_on_texts(old, new + texts if pieces == "all" else new, size, pieces=pieces, key="k")
        assert len(growth.characters) + 4 < len(growth.added) <= size
        fast = fast_tokenizer(growth.model)
        assert encoding_differs(growth.model, fast) == ""
        assert encoding_differs(growth.model, fast, new + texts) == ""
        assert decoding_differs(growth.model, fast, 500) == ""


HINDI = "यह क़लम उसकी ज़िंदगी का फ़ैसला है और सड़क पर भीड़ खड़ी थी"


@pytest.mark.parametrize(("model_type", "size"), [("bpe", 40), ("unigram", 28)])
def test_letters_with_combining_marks(model_type, size):
    """Random rows of them are no reason to refuse: they are compared as SentencePiece normalises them."""
    proto = train_tokenizer(HINDI.split() * 5, size, kind=model_type, coverage=1.0, key="k")
    fast = fast_tokenizer(proto)
    assert differing_as_written(proto, fast, sample_texts(proto)), "else this test tries nothing"
    assert encoding_differs(proto, fast) == ""
    assert decoding_differs(proto, fast, 500) == ""


def test_texts_that_are_not_nfc_are_said_and_not_refused(messages):
    proto = ModelProto.FromString((TOKENIZER / "tokenizer.model").read_bytes())
    nemo = NemoFile(Path("m.nemo"), {}, {}, proto.SerializeToString())
    composed = ["où est l'été", "ça va"]
    check_texts(nemo, composed)
    assert messages == []
    written = unicodedata.normalize("NFD", "où ế é")
    assert differing_as_written(proto, fast_tokenizer(proto), [written]) == [written]
    check_texts(nemo, [*composed, written])
    assert [m for m in messages if "not NFC: 1 of 3 texts, such as" in m and repr(written) in m]


def test_a_normaliser_that_is_not_there_is_found(trained):
    proto = trained(model_type="bpe", normalization_rule_name="nmt_nfkc_cf")
    fast = fast_tokenizer(proto)
    assert encoding_differs(proto, fast) == ""
    fast.normalizer = normalizers.Sequence([])
    assert "'Please press" in encoding_differs(proto, fast)
