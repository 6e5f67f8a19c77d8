"""The sample data: examples/voice_prompts as committed, and the generator of the synthetic corpus."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "corpus"))

import build_synthetic_speech as bss  # noqa: E402
import build_voice_prompts as bvp  # noqa: E402
import sample_data as sd  # noqa: E402
import synthetic_text as st  # noqa: E402

DATA = ROOT / "examples" / "voice_prompts" / "data"
SPLITS = ("train", "validation", "test")
WORDS = {
    "en": ["apple", "bridge", "candle", "dollar", "engine"],
    "fr": ["pomme", "église", "chandelle", "école", "moteur"],
}


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, Any]]]:
    """All rows of voice_prompts a split."""
    return {
        split: [row for path in sorted(DATA.glob(f"{split}-*.parquet")) for row in pq.read_table(path).to_pylist()]
        for split in SPLITS
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, st.TextSource]:
    """Text sources with a few words in place of the system's dictionaries."""
    held_out = st.HeldOut.of(text for text, _ in sd.read_texts(DATA, ["validation", "test"]))
    train = sd.read_texts(DATA, ["train"])
    return {
        language: st.TextSource(language, [t for t, own in train if own == language], held_out, WORDS[language])
        for language in st.LANGUAGES
    }


def test_voice_prompts_splits_share_no_text(rows: dict[str, list[dict[str, Any]]]) -> None:
    for form in (sd.normalise_text, sd.split_key):
        texts = {split: {form(row["text"]) for row in items} for split, items in rows.items()}
        assert not texts["train"] & texts["test"]
        assert not texts["train"] & texts["validation"]
        assert not texts["validation"] & texts["test"]
    ids = [row["id"] for items in rows.values() for row in items]
    assert len(ids) == len(set(ids))
    assert all(bvp.split_of(row["text"]) == split for split, items in rows.items() for row in items)


def test_voice_prompts_sizes(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert len(rows["test"]) >= 100
    assert sum(len(sd.normalise_text(row["text"]).split()) for row in rows["test"]) >= 400
    assert len(rows["validation"]) >= 60
    assert len(rows["train"]) >= 700
    assert len(list(DATA.glob("train-*.parquet"))) >= 2
    for split, items in rows.items():
        assert {row["language"] for row in items} == {"en", "fr"}, split
    assert sum(path.stat().st_size for path in (ROOT / "examples" / "voice_prompts").rglob("*")) <= 15e6


@pytest.mark.slow
def test_voice_prompts_clips_decode(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in (row for items in rows.values() for row in items):
        samples, rate = sd.decode_audio(row["audio"]["bytes"])
        assert (rate, samples.ndim) == (16_000, 1), row["id"]
        assert abs(len(samples) / rate - row["duration"]) < 1e-3, row["id"]
        assert 0.2 <= row["duration"] <= 20.0, row["id"]
        assert np.abs(samples).max() > 0.01, row["id"]


def test_voice_prompts_texts_are_as_spoken(rows: dict[str, list[dict[str, Any]]]) -> None:
    for row in (row for items in rows.values() for row in items):
        assert sd.normalise_text(row["text"]), row["id"]
        assert not set(row["text"]) & set('0123456789#*@[]()<>"“”'), row


def test_voice_prompts_schema(rows: dict[str, list[dict[str, Any]]]) -> None:
    schema = pq.read_schema(next(DATA.glob("test-*.parquet")))
    assert schema.names == ["id", "audio", "text", "language", "duration"]
    assert b'"sampling_rate": 16000' in schema.metadata[b"huggingface"]


@pytest.mark.parametrize(
    ("name", "text", "language", "expected"),
    [
        ("beep", "[this is a simple beep tone]", "en", None),
        ("silence/3", "(3 seconds of silence)", "en", None),
        ("x", "press * to toggle, press # or 7.", "en", "press star to toggle, press pound or seven."),
        ("x", "at [@]", "en", "at"),
        ("x", "Pour (emphase)", "fr", "Pour"),
        ("x", "pour l'aide, appuyez sur 0.", "fr", "pour l'aide, appuyez sur zéro."),
        ("x", "dial 8500 now", "en", None),
        ("x", "... letters of your name.", "en", "letters of your name."),
        ("x", "dièse.vm-review-nonurgent: Pour enlever", "fr", "dièse."),
    ],
)
def test_clean_text(name: str, text: str, language: str, expected: str | None) -> None:
    assert bvp.clean_text(name, text, language) == expected


def test_normalise_text() -> None:
    assert sd.normalise_text("  Dix-Sept, l’APPEL 'ok'…  ") == "dix sept l'appel ok"
    assert sd.normalise_text("e\u0301te\u0301") == "été"
    assert sd.split_key("De-activated.") == sd.split_key("deactivated")


def test_numbers_in_words() -> None:
    assert st.number(1942, "en") == "one thousand nine hundred forty-two"
    assert [st.number(n, "fr") for n in (21, 71, 80, 91, 300)] == [
        "vingt et un", "soixante et onze", "quatre-vingts", "quatre-vingt-onze", "trois cent",
    ]  # fmt: skip
    assert [st.ordinal(n, "en") for n in (1, 12, 20, 33)] == ["first", "twelfth", "twentieth", "thirty-third"]
    assert [st.ordinal(n, "fr") for n in (1, 4, 5, 9, 80)] == [
        "premier", "quatrième", "cinquième", "neuvième", "quatre-vingtième",
    ]  # fmt: skip


def test_elision() -> None:
    assert st.elide("le livre de anne et de onze amis") == "le livre d'anne et de onze amis"
    assert st.elide("de le bureau à le parc") == "du bureau au parc"


def test_synthetic_texts_avoid_held_out_prompts(
    sources: dict[str, st.TextSource], rows: dict[str, list[dict[str, Any]]]
) -> None:
    held_out = {sd.normalise_text(row["text"]) for split in ("validation", "test") for row in rows[split]}
    phrases = [f" {text} " for text in held_out if len(text.split()) >= 3]
    seen: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split, count in (("train", 3000), ("validation", 60), ("test", 60)):
        for language, source in sources.items():
            rng = random.Random(f"{split} {language}")
            for _ in range(count):
                text = sd.normalise_text(source.text(rng, split))
                assert text not in held_out
                assert not any(phrase in f" {text} " for phrase in phrases), text
                assert source.pattern.fullmatch(text), text
                seen[split].add(text)
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]
    assert len(seen["train"]) > 4000


def test_held_out_text_is_refused(sources: dict[str, st.TextSource]) -> None:
    held_out = st.HeldOut.of(["The modem is up.", "Désolé"])
    assert held_out.forbids("desole")
    assert held_out.forbids("now the modem is up again")
    assert not held_out.forbids("the modem is down")


def test_synthetic_texts_are_deterministic(sources: dict[str, st.TextSource]) -> None:
    for source in sources.values():
        first, second = ([source.text(random.Random(seed), "train") for seed in range(50)] for _ in range(2))
        assert first == second


def test_test_voices_are_held_out() -> None:
    names: dict[str, set[str]] = {}
    for split in SPLITS:
        rng = random.Random(split)
        drawn = [
            bss.ss.draw_voice(rng, language, split, False, ["espeak-ng", "flite", "festival"])
            for language in st.LANGUAGES
            for _ in range(1000)
        ]
        names[split] = {voice.name for voice in drawn}
    assert not names["test"] & (names["train"] | names["validation"])


@pytest.mark.skipif(
    shutil.which("espeak-ng") is None or shutil.which("flite") is None, reason="espeak-ng and flite are not installed"
)
def test_synthetic_chunk_is_deterministic(
    sources: dict[str, st.TextSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bss, "_sources", sources)
    monkeypatch.setattr(bss, "_engines", ["espeak-ng", "flite"])
    for name in ("a", "b"):
        bss.build_chunk("train", 0, 12, 3, tmp_path / name)
    first, second = (pq.read_table(tmp_path / name).to_pylist() for name in ("a", "b"))
    assert first == second
    assert len(first) >= 8
    for row in first:
        samples, rate = sd.decode_audio(row["audio"]["bytes"])
        assert rate == 16_000
        assert len(samples) == round(row["duration"] * rate)
        assert 0.4 <= row["duration"] <= 8.0
        assert 0.005 < np.abs(samples).max() < 0.999
        assert row["text"] == sd.normalise_text(row["text"]) != ""
