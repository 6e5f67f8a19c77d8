"""data.guard_limit as it is written: two forms, what it needs, what it excludes; and the halves of a guard."""

import random
from pathlib import Path
from typing import Any

import pytest
from conftest import problem, write_manifest

from finetune.config.guard_limit import FORMS, parse_guard_limit
from finetune.data.batching import BatchLimits
from finetune.data.guard_halves import GUARDS, few_words, half_of, halve, measure_halves
from finetune.data.options import StreamOptions
from finetune.data.reader import group_sources, make_readers
from finetune.data.sources import OpenSource, open_source, parse_sources
from finetune.errors import UserError


@pytest.mark.parametrize(
    ("written", "highest", "said"),
    [
        ("+5 %", 0.42, "+5 %"),
        ("5%", 0.42, "+5 %"),
        ("+0.5 %", 0.402, "+0.5 %"),
        ("0 %", 0.4, "+0 %"),
        ("+0.01", 0.41, "+0.01"),
        ("0.01", 0.41, "+0.01"),
        ("1e-3", 0.401, "+0.001"),
    ],
)
def test_both_forms(written, highest, said):
    limit = parse_guard_limit(written)
    assert limit.highest(0.4) == pytest.approx(highest)
    assert limit.keeps(limit.highest(0.4), 0.4)
    assert not limit.keeps(highest + 1e-6, 0.4)
    assert str(limit) == said
    assert parse_guard_limit(said) == limit


@pytest.mark.parametrize("written", ["-1 %", "-0.01", "5 points", "0,01", "%", "", "nan", "inf", "5 % or so", "1e9 %"])
def test_other_forms_are_refused_with_the_two(run_file, written):
    said = problem(run_file(data__guard="g.jsonl", data__validation="v.jsonl", data__guard_limit=written))
    assert f"data.guard_limit: has to be {FORMS}" in said
    assert repr(written) in said
    assert ("A limit is not below 0." in said) == written.startswith("-")


def test_numbers_are_shares_of_wer(run_file):
    from finetune.config.load import load_config

    data = {"data__guard": "g.jsonl", "data__validation": "v.jsonl"}
    config, _ = load_config(run_file(**data, data__guard_limit=0.01), [], [])
    assert config.data.guard_limit == "0.01"
    config, _ = load_config(run_file(**data), [], ["data.guard_limit=+5%"])
    assert config.data.guard_limit == "+5%"
    assert 'Write "+5 %"' in problem(run_file(**data, data__guard_limit=5))
    assert "data.guard_limit" in problem(run_file(**data, data__guard_limit=True))


def test_what_a_limit_needs(run_file):
    said = problem(run_file(data__guard_limit="+5 %", training__guard_steps=0))
    assert "data.guard_limit: has no effect without data.guard" in said
    assert "data.guard_limit: needs data.validation" in said
    assert "training.guard_steps: 0 and data.guard_limit exclude each other" in said


# ---- the halves ----------------------------------------------------------------------------------------------------


def opened(path: Path, texts: list[Any]) -> list[OpenSource]:
    rows = [{"audio_filepath": f"{i}.wav", "id": f"clip{i}", "text": text} for i, text in enumerate(texts)]
    return [open_source(s, "data.guard") for s in parse_sources(str(write_manifest(path, rows)), "data.guard", "test")]


def rows_of(sources: list[OpenSource]) -> list[tuple[str, str]]:
    """Ids and texts as two worker shards read them."""
    options = StreamOptions(BatchLimits(clips=4), 16_000, shuffle=False)
    found = []
    for number in range(2):
        for reader in make_readers(group_sources(sources, -1), options, 0, number, 2):
            while (row := reader.next_row()) is not None:
                found.append((row[2]["id"], row[2]["text"]))
    return sorted(found)


def test_each_clip_is_in_one_half_and_no_text_in_both(tmp_path):
    texts = [f"Text {i % 40}{'!' * (i % 3)}" for i in range(120)]
    halves = halve(opened(tmp_path / "guard.jsonl", texts))
    both = {half: rows_of(sources) for half, sources in halves.items()}
    assert sorted(both["guard"] + both["guard_choice"]) == sorted((f"clip{i}", text) for i, text in enumerate(texts))
    own = {half: {text.strip("!").lower() for _, text in rows} for half, rows in both.items()}
    assert not own["guard"] & own["guard_choice"]
    assert min(map(len, own.values())) > 10


def test_a_half_depends_on_nothing_but_the_text(tmp_path):
    texts = [f"text {i}" for i in range(60)]
    shuffled = random.Random(0).sample(texts, 50)
    first, second = (halve(opened(tmp_path / f"{i}.jsonl", some)) for i, some in enumerate((texts, shuffled)))
    for half in GUARDS:
        assert {t for _, t in rows_of(second[half])} == {t for _, t in rows_of(first[half])} & set(shuffled)
    # On every machine and in every version: a run resumes elsewhere.
    assert [half_of(f"text {i}") for i in range(6)] == [half_of(f"TEXT, {i}.") for i in range(6)]
    assert [half_of(f"text {i}") for i in range(6)] == HALVES_OF_SIX


HALVES_OF_SIX = ["guard", "guard", "guard_choice", "guard", "guard", "guard"]


def test_what_is_counted_and_said_of_the_halves(tmp_path):
    texts = ["a b c"] * 3 + [f"text {i}" for i in range(20)]
    guard = opened(tmp_path / "guard.jsonl", texts)
    found = measure_halves(guard, -1, 10.0)
    assert found.whole
    assert found.texts == 21
    halves = halve(guard)
    for half in GUARDS:
        rows = rows_of(halves[half])
        assert found.clips[half] == [len(rows)]
        assert found.words[half] == sum(len(text.split()) for _, text in rows)
    assert len(few_words(found)) == 2
    assert f"guard has {found.words['guard']} words only" in few_words(found)[0]
    part = measure_halves(guard, 10, 10.0)
    assert sum(sum(clips) for clips in part.clips.values()) == 10


@pytest.mark.parametrize(
    ("texts", "why"),
    [(["Same text", "same text."] * 3, "holds one text only"), (["", None], "holds no text")],
)
def test_a_guard_that_cannot_be_halved(tmp_path, texts, why):
    with pytest.raises(UserError, match=why):
        measure_halves(opened(tmp_path / "guard.jsonl", texts), -1, 10.0)
