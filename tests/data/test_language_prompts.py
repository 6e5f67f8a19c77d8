"""Language prompts: which one a row's language means, the drawn share of `auto`, and rows without one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_manifest
from stream_cases import flac, make_stream, read_epoch

from finetune.data.language_prompts import prompt_of
from finetune.data.quarantine import BadUtterance

SLOTS = {"en-US": 0, "en": 0, "en-GB": 1, "es-US": 3, "zh-CN": 4, "zh-TW": 5, "de-DE": 9, "ja-JP": 10, "ja-JA": 10}
SLOTS |= {"no": 27, "auto": 101}


@pytest.mark.parametrize(
    ("language", "prompt"),
    [
        ("en-GB", "en-GB"),
        ("en", "en"),
        ("en_gb", "en-GB"),
        ("EN-us", "en-US"),
        ("en-AU", "en"),
        ("de", "de-DE"),
        ("de-AT", "de-DE"),
        ("ja", "ja-JP"),
        ("no", "no"),
        ("auto", "auto"),
        ("", "auto"),
    ],
)
def test_the_prompt_of_a_language(language, prompt):
    assert prompt_of(language, SLOTS) == prompt


@pytest.mark.parametrize(
    ("language", "message"),
    [
        ("zh", r"'zh' may be one of several prompts of the model: write zh-CN, zh-TW"),
        ("zh-HK", r"write zh-CN, zh-TW"),
        ("dee", r"no prompt for the language 'dee': did you mean de-DE"),
        ("xx", r"no prompt for the language 'xx': it has en-US, en, en-GB"),
    ],
)
def test_a_language_without_a_prompt(language, message):
    with pytest.raises(BadUtterance, match=message):
        prompt_of(language, SLOTS)


def test_no_language_and_no_auto():
    with pytest.raises(BadUtterance, match=r"no language and the model has no prompt `auto`: add a column `language`"):
        prompt_of("", {"en-US": 0})


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 clips: by turns `lang: de`, `language: en-GB`, NVIDIA's `target_lang: ja-JP`, none of them; two are bad."""
    folder = tmp_path_factory.mktemp("languages")
    (folder / "clip.flac").write_bytes(flac(np.zeros(8000, dtype=np.float32)))
    kinds: list[dict[str, Any]] = [{"lang": "de"}, {"language": "en-GB"}, {"target_lang": "ja-JP"}, {}]
    rows = [
        {"audio_filepath": "clip.flac", "text": "x", "duration": 0.5, "id": f"{i:02d}", **kinds[i % 4]}
        for i in range(40)
    ]
    rows[0]["lang"], rows[1]["language"] = "xx", "zh"
    return write_manifest(folder / "m.jsonl", rows)


def slots_by_id(batches: list[Any]) -> dict[str, int]:
    return {name: slot for batch in batches for name, slot in zip(batch.ids, batch.slots, strict=True)}


def test_rows_get_their_prompts_and_others_go_into_quarantine(manifest):
    batches = read_epoch(make_stream(str(manifest), prompts=SLOTS))
    own = [9, 1, 10, 101]
    assert slots_by_id(batches) == {f"{i:02d}": own[i % 4] for i in range(2, 40)}
    reasons = {r["id"]: r["reason"] for batch in batches for r in batch.quarantined}
    assert reasons.keys() == {"00", "01"}
    assert "'xx'" in reasons["00"]
    assert "zh-CN, zh-TW" in reasons["01"]


def test_a_model_without_prompts_takes_every_language(manifest):
    batches = read_epoch(make_stream(str(manifest)))
    assert sum(len(batch.ids) for batch in batches) == 40
    assert not any(batch.slots or batch.quarantined for batch in batches)


def test_the_share_of_auto_is_drawn_for_each_clip_and_epoch_and_the_same_after_a_resume(manifest):
    options = {"prompts": SLOTS, "auto_ratio": 0.5}
    stream = make_stream(str(manifest), **options)
    first, second = slots_by_id(read_epoch(stream)), slots_by_id(read_epoch(stream))
    languages = [name for name in first if int(name) % 4 != 3]  # the others get auto in any case
    for epoch in (first, second):
        drawn = sum(epoch[name] == 101 for name in languages)
        assert 5 < drawn < len(languages) - 5
    assert first != second
    # Any number of ranks and workers.
    ranks = [make_stream(str(manifest), rank=rank, ranks=2, workers=rank, **options) for rank in range(2)]
    together = {name: slot for stream in ranks for name, slot in slots_by_id(read_epoch(stream)).items()}
    assert together == first
    # After a resume.
    stream = make_stream(str(manifest), **options)
    batches = stream.batches()
    begun = [next(batches) for _ in range(3)]
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = make_stream(str(manifest), **options)
    resumed.load_state_dict([state])
    assert slots_by_id(begun) | slots_by_id(list(resumed.batches())) == first


def test_all_or_none_get_auto(manifest):
    assert set(slots_by_id(read_epoch(make_stream(str(manifest), prompts=SLOTS, auto_ratio=1.0))).values()) == {101}
