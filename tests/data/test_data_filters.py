"""Filters and augmentation: what leaves a clip out, what changes it, and that both are the same again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from conftest import write_manifest
from stream_cases import RATE, make_stream, read_epoch

from finetune.data.augment import augment, parse_augmentation
from finetune.data.decode import as_float
from finetune.data.filters import FilteredUtterance, Filters, in_words, parse_filters
from finetune.errors import UserError


def tone(seconds: float, hertz: float = 440.0, level: float = 0.3) -> np.ndarray:
    return (level * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: filter, what the clip is like, name of the filter
    "short": ({"min_duration": 0.5}, {"seconds": 0.4}, "shorter_than_min_duration"),
    "long": ({"max_duration": 0.5}, {"seconds": 0.6}, "longer_than_max_duration"),
    "slow": ({"min_characters_per_second": 2}, {"text": "a", "seconds": 1.0}, "fewer_than_min_characters_per_second"),
    "fast": (
        {"max_characters_per_second": 20},
        {"text": "a" * 21, "seconds": 1.0},
        "more_than_max_characters_per_second",
    ),
    "many": ({"max_tokens": 5}, {"text": "abcdef"}, "more_than_max_tokens"),
    "alphabet": ({"alphabet": "abc"}, {"text": "a bäc"}, "outside_alphabet"),
    "as written": (
        {"alphabet_before_normalization": "abc"},
        {"text": "a bac?"},
        "outside_alphabet_before_normalization",
    ),
    "silent": ({"min_level": -60}, {"level": 0.0005}, "below_min_level"),
    "clipped": ({"max_clipped": 0.01}, {"level": 3.0}, "more_than_max_clipped"),
    "telephone": ({"min_sample_rate": 16_000}, {"rate": 8_000}, "below_min_sample_rate"),
    "stereo": ({"max_channels": 1}, {"channels": 2}, "more_than_max_channels"),
}


def write_clip(folder: Path, name: str, like: dict[str, Any]) -> dict[str, Any]:
    rate = like.get("rate", RATE)
    seconds = like.get("seconds", 0.5)
    samples_S = like.get("level", 0.3) * np.sin(2 * np.pi * 300 * np.arange(int(seconds * rate)) / rate)
    samples = np.stack([samples_S] * like["channels"], axis=1) if "channels" in like else samples_S
    soundfile.write(folder / f"{name}.wav", np.clip(samples, -1, 1), rate)
    return {"audio_filepath": f"{name}.wav", "id": name, "text": like.get("text", "abc")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("with_duration", [False, True])
def test_each_filter_leaves_out_its_clip_and_counts_it(tmp_path: Path, name: str, with_duration: bool) -> None:
    bounds, like, reason = CASES[name]
    rows = [write_clip(tmp_path, name, like), write_clip(tmp_path, "plain", {})]
    if with_duration:
        rows = [{**row, "duration": soundfile.info(tmp_path / row["audio_filepath"]).duration} for row in rows]
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    batches = read_epoch(make_stream({"path": str(manifest), "filters": bounds}))
    assert [i for b in batches for i in b.ids] == ["plain"]
    assert {r: n for b in batches for r, n in b.filtered.items()} == {reason: 1}
    unfiltered = read_epoch(make_stream(str(manifest)))
    assert sorted(i for b in unfiltered for i in b.ids) == sorted(["plain", name])


def test_bounds_of_a_source_go_before_the_common_ones() -> None:
    common = parse_filters(
        {"max_tokens": 5, "min_level": -50}, "data.filters", Filters(min_duration=0.1, max_duration=30.0)
    )
    own = parse_filters({"max_tokens": None, "max_duration": 10}, "filters", common)
    assert own == Filters(min_duration=0.1, max_duration=10, min_level=-50)
    own.check_text("abcdefgh", 8)
    with pytest.raises(FilteredUtterance, match="longer_than_max_duration"):
        own.check_duration(11.0)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("longer_than_max_duration", "longer than data.max_duration 40 s"),
        ("shorter_than_min_duration", "shorter than data.min_duration of their source"),
        ("more_than_max_tokens", "with more than data.filters.max_tokens 200"),
        ("fewer_than_min_characters_per_second", "with fewer than data.filters.min_characters_per_second 2"),
        ("below_min_level", "below data.filters.min_level -60"),
        ("empty_text", "without a text"),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    common = {"max_duration": 40.0, "max_tokens": 200, "min_characters_per_second": 2, "min_level": -60}
    assert in_words(reason, [Filters(min_duration=0.1, **common), Filters(min_duration=0.2, **common)]) == words


def test_a_lost_accent_is_seen_before_normalisation(tmp_path: Path) -> None:
    rows = [{**write_clip(tmp_path, name, {}), "text": text} for name, text in (("lost", "sar?"), ("kept", "Sara"))]
    manifest = str(write_manifest(tmp_path / "m.jsonl", rows))
    for key, left in (("alphabet", ["kept", "lost"]), ("alphabet_before_normalization", ["kept"])):
        source = {"path": manifest, "filters": {key: "arsS"}}
        batches = read_epoch(make_stream(source, text_normalization="basic"))
        assert sorted(i for b in batches for i in b.ids) == left


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"max_token": 3}, ("max_token", "max_tokens")),
        ({"max_tokens": "3"}, ("max_tokens: expected float", "'3'")),
        ({"alphabet": 3}, ("alphabet: expected str", "3")),
        (["a"], ("mapping",)),
    ],
)
def test_filters_that_are_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_filters(value, "data.filters")
    assert all(word in str(caught.value) for word in ("data.filters", *words))


# ---- augmentation --------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for name, samples_S in (
        ("noise", np.random.default_rng(0).standard_normal(3 * RATE) * 0.1),
        ("room", np.r_[np.zeros(50), 1.0, np.zeros(799), 0.5]),
    ):
        (tmp_path / name).mkdir()
        soundfile.write(tmp_path / name / "a.wav", samples_S, RATE, subtype="FLOAT")
    return {"noise_folder": str(tmp_path / "noise"), "room_folder": str(tmp_path / "room")}


def test_speed() -> None:
    settings = parse_augmentation({"speed": 1.0, "speed_factors": [1.25]})
    changed_S = augment(tone(1.0), RATE, settings, (1,))
    assert len(changed_S) == pytest.approx(0.8 * RATE, abs=2)
    assert np.argmax(np.abs(np.fft.rfft(changed_S))) * RATE / len(changed_S) == pytest.approx(550, abs=2)


@pytest.mark.parametrize("content", [b"no audio", None], ids=["broken", "silent"])
def test_files_that_add_nothing_leave_the_clip_as_it_is(
    tmp_path: Path, messages: list[str], content: bytes | None
) -> None:
    file = tmp_path / "a.wav"
    soundfile.write(file, np.zeros(RATE), RATE)
    if content:
        file.write_bytes(content)
    names = ("noise", "room") if content else ("noise",)
    settings = parse_augmentation(
        {n: v for name in names for n, v in ((name, 1.0), (f"{name}_folder", str(tmp_path)))}
    )
    assert np.array_equal(augment(tone(1.0), RATE, settings, (1,)), tone(1.0))
    assert any(str(file) in said for said in messages) == bool(content)


def test_gain_stays_within_full_scale() -> None:
    settings = parse_augmentation({"gain": 1.0, "gain_db": [-12, 40]})
    levels = [np.abs(augment(tone(0.2), RATE, settings, (i,))).max() for i in range(60)]
    assert max(levels) <= 1.0 + 1e-6
    assert min(levels) < 0.2
    assert len({round(float(x), 4) for x in levels}) > 20


def test_noise_at_its_ratio(folders: dict[str, str]) -> None:
    settings = parse_augmentation({"noise": 1.0, "noise_snr_db": [10, 10], **folders})
    clean_S = tone(5.0)  # longer than the noise, which begins again
    noise_S = augment(clean_S, RATE, settings, (1,)) - clean_S
    assert 10 * np.log10(np.mean(clean_S**2) / np.mean(noise_S**2)) == pytest.approx(10, abs=0.1)
    assert np.abs(augment(clean_S, RATE, settings, (2,)) - clean_S - noise_S).max() > 0.01


def test_room(folders: dict[str, str]) -> None:
    settings = parse_augmentation({"room": 1.0, **folders})
    click_S = np.zeros(RATE // 2, dtype=np.float32)
    click_S[100] = 0.8
    heard_S = augment(click_S, RATE, settings, (1,))
    assert len(heard_S) == len(click_S)
    assert np.flatnonzero(np.abs(heard_S) > 0.1).tolist() == [100, 900]
    assert heard_S[900] / heard_S[100] == pytest.approx(0.5, abs=1e-3)


def test_a_clip_is_changed_alike_again_and_otherwise_in_another_epoch(folders: dict[str, str]) -> None:
    settings = parse_augmentation({"speed": 0.5, "noise": 0.5, "room": 0.3, "gain": 0.5, **folders})
    draws = [augment(tone(0.3), RATE, settings, (7, epoch, 3)) for epoch in range(12)]
    again = [augment(tone(0.3), RATE, settings, (7, epoch, 3)) for epoch in range(12)]
    assert all(np.array_equal(a, b) for a, b in zip(draws, again, strict=True))
    assert len({draw.tobytes() for draw in draws}) > 5


def test_augmented_streams_resume_and_share_out_alike(corpus: Path) -> None:
    settings = parse_augmentation({"speed": 0.5, "gain": 0.7})

    def clips(**options: Any) -> dict[str, bytes]:
        batches = read_epoch(make_stream(str(corpus / "shards"), augmentation=settings, **options))
        return {
            i: as_float(b.audio_BS)[n, : b.audio_lengths_B[n]].numpy().tobytes()
            for b in batches
            for n, i in enumerate(b.ids)
        }

    alone = clips()
    assert alone == clips(workers=2)
    assert alone == {**clips(rank=0, ranks=2), **clips(rank=1, ranks=2)}
    plain = read_epoch(make_stream(str(corpus / "shards")))
    original = {
        i: as_float(b.audio_BS)[n, : b.audio_lengths_B[n]].numpy().tobytes()
        for b in plain
        for n, i in enumerate(b.ids)
    }
    changed = sum(alone[i] != original[i] for i in alone)
    assert 0.5 * len(alone) < changed < len(alone)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"speeed": 1}, ("speeed", "speed_factors")),
        ({"speed": 2}, ("speed: has to be", "1 or less", "2")),
        ({"speed": 1, "speed_factors": [5.0]}, ("speed_factors.0: has to be", "2 or less", "5")),
        ({"gain": 1, "gain_db": [6, -6]}, ("lower one first",)),
        ({"noise": 0.5}, ("noise_folder",)),
        ({"room": 0.5, "room_folder": "nowhere"}, ("no audio file", "nowhere")),
    ],
)
def test_augmentation_that_is_refused(value: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        parse_augmentation(value)
    assert all(word in str(caught.value) for word in ("data.augment", *words))


def test_wrong_settings_end_the_run_before_the_model_is_loaded(refused: Any, tiny_run: Any) -> None:
    message = refused(*tiny_run("model.name=gone.nemo", data={"filters": {"max_token": 1}, "augment": {"noise": 1.0}}))
    assert "data.filters: unknown key max_token;" in message
    assert "data.augment.noise needs data.augment.noise_folder" in message


def test_what_filters_left_out_stands_in_the_summary(failed: Any, tiny_run: Any, tmp_path: Path) -> None:
    data = {"filters": {"max_tokens": 4}, "allow_large_losses": True, "validation": None, "test": None}
    assert "13 with more than data.filters.max_tokens 4" in failed(0, *tiny_run("training.max_steps=2", data=data))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["filtered"]["more_than_max_tokens"] > 0
