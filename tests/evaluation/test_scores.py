"""Error rates, normalisation, and learning-rate schedules."""

import random

import jiwer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import OneCycleLR
from transformers import get_scheduler

from finetune.config.schema import SCHEDULES
from finetune.data.normalization import normalize_text
from finetune.evaluation.open_asr import is_english, normalize_open_asr
from finetune.evaluation.scores import WerAccumulator, score_pair
from finetune.training.schedule import Schedule

# ---- error rates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "hypothesis", "words", "substitutions", "deletions", "insertions", "characters", "character_errors"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 6, 0, 0, 0, 22, 0),
        ("the cat sat on the mat", "the cat sit on mat", 6, 1, 1, 0, 22, 5),  # sat/sit, "the " gone
        ("one two", "one and two", 2, 0, 0, 1, 7, 4),
        ("one two", "", 2, 0, 2, 0, 7, 7),
        ("", "one two", 0, 0, 0, 2, 0, 7),
        ("", "", 0, 0, 0, 0, 0, 0),
        ("...", "!", 0, 0, 0, 0, 0, 0),
        ("Été", "ete", 1, 1, 0, 0, 3, 2),
        ("a", "b c d", 1, 1, 0, 2, 1, 5),
    ],
)
def test_hand_counted(
    reference: str,
    hypothesis: str,
    words: int,
    substitutions: int,
    deletions: int,
    insertions: int,
    characters: int,
    character_errors: int,
) -> None:
    counts = score_pair(reference, hypothesis, "basic")
    assert (counts.clips, counts.words, counts.characters) == (1, words, characters)
    assert (counts.substitutions, counts.deletions, counts.insertions) == (substitutions, deletions, insertions)
    assert counts.word_errors == substitutions + deletions + insertions
    assert counts.character_errors == character_errors
    rates = counts.rates()
    assert rates["wer"] == (pytest.approx(counts.word_errors / words) if words else None)
    assert rates["cer"] == (pytest.approx(character_errors / characters) if characters else None)


def spoil(rng: random.Random, text: str) -> str:
    """A hypothesis with words left out, changed and added."""
    words = []
    for word in text.split():
        change = rng.random()
        if change < 0.1:
            continue
        words.append(word[::-1] if change < 0.2 else word)
        if change > 0.9:
            words.append(rng.choice(["uh", "été"]))
    return " ".join(words)


def pairs(n: int = 60) -> list[tuple[str, str, str]]:
    """(language, reference, hypothesis), two empty hypotheses among them."""
    rng = random.Random(0)
    vocabulary = ["press", "one", "to", "hear", "l'appel", "été", "Désolé,", "peut-être", "ok!"]
    made = []
    for i in range(n):
        reference = " ".join(rng.choices(vocabulary, k=rng.randint(1, 12)))
        made.append((("en", "fr", "")[i % 3], reference, "" if i in (7, 30) else spoil(rng, reference)))
    return made


def test_equals_jiwer_over_the_whole_list() -> None:
    made = pairs()
    for mode in ("none", "lower", "basic"):
        wer = WerAccumulator(mode)
        for i, (language, reference, hypothesis) in enumerate(made):
            wer.add(str(i), language, reference, hypothesis)
        references, hypotheses = ([normalize_text(pair[side], mode) for pair in made] for side in (1, 2))
        result = wer.result()
        assert result["wer"] == pytest.approx(jiwer.wer(references, hypotheses), abs=1e-12)
        assert result["cer"] == pytest.approx(jiwer.cer(references, hypotheses), abs=1e-12)
        output = jiwer.process_words(references, hypotheses)
        assert (result["substitutions"], result["deletions"], result["insertions"]) == (
            output.substitutions,
            output.deletions,
            output.insertions,
        )
        assert (result["clips"], result["words"]) == (len(made), sum(len(r.split()) for r in references))
        assert 0.1 < result["wer"] < 0.5


def test_by_language() -> None:
    made = pairs()
    wer = WerAccumulator("basic", keep_pairs=3)
    for i, (language, reference, hypothesis) in enumerate(made):
        wer.add(str(i), language, reference, hypothesis)
    by_language = wer.result()["by_language"]
    assert list(by_language) == ["en", "fr", "unknown"]
    for name, result in by_language.items():
        own = [(r, h) for language, r, h in made if (language or "unknown") == name]
        references, hypotheses = ([normalize_text(pair[side], "basic") for pair in own] for side in (0, 1))
        assert result["clips"] == len(own)
        assert result["wer"] == pytest.approx(jiwer.wer(references, hypotheses))
        assert result["cer"] == pytest.approx(jiwer.cer(references, hypotheses))
    assert len({result["wer"] for result in by_language.values()}) == 3
    kept = [int(pair["id"]) for pair in wer.pairs]
    assert len(set(kept)) == 3
    for i, pair in zip(kept, wer.pairs, strict=True):
        assert pair == {"id": str(i), "language": made[i][0], "reference": made[i][1], "hypothesis": made[i][2]}


def test_parts_of_several_ranks_merge_to_the_whole() -> None:
    made = pairs()
    whole, parts = WerAccumulator("basic", keep_pairs=4), [WerAccumulator("basic", keep_pairs=4) for _ in range(3)]
    for i, (language, reference, hypothesis) in enumerate(made):
        whole.add(str(i), language, reference, hypothesis)
        parts[i % 2].add(str(i), language, reference, hypothesis)  # the third rank had no clip
    for i, part in enumerate(parts):
        part.quarantined.append({"id": f"bad{i}"})
        part.filtered["empty_text"] = i
    merged = WerAccumulator("basic", keep_pairs=4)
    for part in parts:
        merged.merge(part)
    assert merged.result() == whole.result()
    assert len(merged.pairs) == 4
    assert merged.pairs == whole.pairs, "the same clips are shown however they were spread over the ranks"
    assert [q["id"] for q in merged.quarantined] == ["bad0", "bad1", "bad2"]
    assert merged.filtered == {"empty_text": 3}


# ---- normalisation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "none", "lower", "basic"),
    [
        ("  Press\t1,\n now! ", "Press 1, now!", "press 1, now!", "press 1 now"),
        ("L’été, c’est “BEAU”…", "L’été, c’est “BEAU”…", "l’été, c’est “beau”…", "l'été c'est beau"),
        ("E\u0301te\u0301 fini", "Été fini", "été fini", "été fini"),
        (
            "rock 'n' roll, 'tis it's Jess'",
            "rock 'n' roll, 'tis it's Jess'",
            "rock 'n' roll, 'tis it's jess'",
            "rock n roll tis it's jess",
        ),
        (
            "Peut-être_là : À ŒUVRE ÇA",
            "Peut-être_là : À ŒUVRE ÇA",
            "peut-être_là : à œuvre ça",
            "peut être là à œuvre ça",
        ),
        (
            "‘aujourd’hui’ aujourd\u02bchui",
            "‘aujourd’hui’ aujourd\u02bchui",
            "‘aujourd’hui’ aujourd\u02bchui",
            "aujourd'hui aujourd'hui",
        ),
        ("हिन्दी, भाषा।", "हिन्दी, भाषा।", "हिन्दी, भाषा।", "हिन्दी भाषा"),
        ("ภาษาไทยที่ดี!", "ภาษาไทยที่ดี!", "ภาษาไทยที่ดี!", "ภาษาไทยที่ดี"),
        ("--- ' '' ---", "--- ' '' ---", "--- ' '' ---", ""),
    ],
)  # fmt: skip
def test_normalize_text(text: str, none: str, lower: str, basic: str) -> None:
    assert normalize_text(text, "none") == none
    assert normalize_text(text, "lower") == lower
    assert normalize_text(text, "basic") == basic


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=60), st.sampled_from(["none", "lower", "basic"]))
def test_normalizing_again_changes_nothing(text: str, mode: str) -> None:
    once = normalize_text(text, mode)
    assert normalize_text(once, mode) == once
    assert once == " ".join(once.split())


# ---- schedules -----------------------------------------------------------------------------------------------------

PEAKS = (1e-3, 2e-4)


def optimizer_with(peaks: tuple[float, ...] = PEAKS) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": peak} for peak in peaks])


def curve(schedule: Schedule, steps: int) -> list[list[float]]:
    """The rates of the coming steps."""
    found = []
    for _ in range(steps):
        found.append(schedule.rates())
        schedule.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "onecycle"])
def test_schedule_equals_transformers(name: str, warmup: int) -> None:
    steps = 30
    optimizer = optimizer_with()
    specific = {"min_lr_rate": 0.1} if name == "cosine_with_min_lr" else None
    expected = get_scheduler(name, optimizer, warmup, steps, specific)
    schedule = Schedule(name, optimizer_with().param_groups, warmup, steps)
    for step in range(steps):
        assert schedule.rates() == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12), step
        optimizer.step()
        expected.step()
        schedule.step()


@pytest.mark.parametrize("warmup", [1, 10])
def test_onecycle_equals_torch(warmup: int) -> None:
    # N steps walk from the first to the last of N + 1 points, as transformers' schedules do.
    steps = 100
    optimizer = optimizer_with()
    expected = OneCycleLR(
        optimizer, list(PEAKS), total_steps=steps + 1, pct_start=warmup / steps, anneal_strategy="cos"
    )
    schedule = Schedule("onecycle", optimizer_with().param_groups, warmup, steps)
    rates = []
    for step in range(steps):
        assert schedule.rates() == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12), step
        rates.append(schedule.rates()[0])
        optimizer.step()
        expected.step()
        schedule.step()
    assert rates[0] == pytest.approx(PEAKS[0] / 25)
    assert abs(int(np.argmax(rates)) - warmup) <= 1
    assert max(rates) == pytest.approx(PEAKS[0], rel=0.01)
    assert schedule.rates()[0] == pytest.approx(PEAKS[0] / 25 / 1e4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_resumes(name: str) -> None:
    steps, warmup = 40, 6
    whole = curve(Schedule(name, optimizer_with().param_groups, warmup, steps), steps + 3)
    for cut in (0, 3, 6, 25, steps):
        stopped = Schedule(name, optimizer_with().param_groups, warmup, steps)
        head = curve(stopped, cut)
        resumed = Schedule(name, optimizer_with().param_groups, warmup, steps)
        resumed.load_state_dict(stopped.state_dict())
        assert head + curve(resumed, steps + 3 - cut) == whole
    assert whole[steps] == whole[steps + 1] == whole[steps + 2], "beyond the end the last rate stays"
    assert name == "constant" or len({rates[0] for rates in whole}) > 5


def test_apply_writes_into_the_groups() -> None:
    optimizer = optimizer_with()
    tensor = torch.tensor(5.0)
    optimizer.param_groups[1]["lr"] = tensor
    schedule = Schedule("linear", optimizer_with().param_groups, 4, 10)
    schedule.step()
    schedule.step()
    schedule.apply(optimizer)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(PEAKS[0] / 2)
    assert optimizer.param_groups[1]["lr"] is tensor  # a rate in a tensor keeps its identity
    assert float(tensor) == pytest.approx(PEAKS[1] / 2)


# ---- the Open ASR Leaderboard's normalisation -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # One line for each rule of Radford et al. 2022, appendix C, "English"
        ("I heard [crosstalk] the bell (laughs) <unk> twice", "i heard the bell twice"),
        ("Um, uh, hmm: we mm agree", "we agree"),
        ("She 's here", "she is here"),
        (
            "Won't you? They can't; let's, we're gonna, I'd've",
            "will not you they can not let us we are going to i would have",
        ),
        (
            "Mr. and Mrs. Kim saw Dr. Park Jr. on St. James",
            "mister and missus kim saw doctor park junior on saint james",
        ),
        ("He's been there, she's got it", "he has been there she has got it"),
        ("1,234,567 or 3.5", "1234567 or 3.5"),
        ("Café, naïve, Ærø", "cafe naive aero"),
        ("two hundred and twenty-one", "221"),
        ("ten thousand dollars and fifty cents", "$10000.50"),
        ("twenty million euros, five percent", "€20000000 5%"),
        ("the nineteen sixties, the twenty first", "the 1960s the 21st"),
        ("double oh seven", "007"),
        ("one of the ones", "one of the ones"),
        ("10km at 5G", "10 km at 5 g"),
        ("the colour of the theatre, organised", "the color of the theater organized"),
        ("$ 5 & more % #", "5 more"),
    ],
)
def test_english_as_whispers_paper_describes_it(text: str, expected: str) -> None:
    assert normalize_open_asr(text, "en") == expected
    assert normalize_open_asr(text, "") == expected, "no language named: English"
    assert normalize_open_asr(text, "en-GB") == expected


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("fr", "L’été, c’est [bruit] l'Œuvre n°3 (rires) !", "l été c est l œuvre n 3"),
        ("de", "Die Straße, „Größe“ – 50 %", "die straße größe 50"),
        ("es", "¿Qué? ¡Mañana! <eh>", "qué mañana"),
        ("hi", "हिन्दी में।", "हिन्दी में"),
        ("fr", "E\u0301te\u0301 ﬁn\u200b ici", "été fin ici"),
        ("fr", "a\n b\tc", "a b c"),
        ("fr", "Mr. won't", "mr won t"),
    ],
)
def test_other_languages_keep_their_accents_and_vowel_signs(language: str, text: str, expected: str) -> None:
    assert normalize_open_asr(text, language) == expected


def test_english_is_told_from_other_languages() -> None:
    assert all(is_english(name) for name in ("", "en", "EN-us", "en_GB", "eng", "English"))
    assert not any(is_english(name) for name in ("fr", "enm", "es-EN", "de"))


# fmt: off
ODD_WORDS = [
    "one", "twenty", "two", "point", "five", "hundred", "and", "a", "half", "oh", "zero", "double", "triple", "minus",
    "dollars", "cents", "per", "cent", "percent", "7", "3.14", "$5", "¢9", "£", "1st", "nineteen", "thousand",
    "million", "٣", "²", "'", "'s", "n't", "St.", "[", ")", "(", "%", ".", ",", "um",
]
# fmt: on


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(ODD_WORDS)))
def test_no_text_is_too_odd_for_it(words: list[str]) -> None:
    for language in ("en", "fr"):
        once = normalize_open_asr(" ".join(words), language)
        assert once == " ".join(once.split())


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["C"]) | st.sampled_from("([<>])' .,-éüßकि")))
def test_it_equals_other_programs_with_the_same_rules(text: str) -> None:
    """whisper_normalizer's basic rules with marks; for English its rules, which are those of transformers but for four
    words."""
    from whisper_normalizer.basic import BasicTextNormalizer
    from whisper_normalizer.english import EnglishTextNormalizer

    assert normalize_open_asr(text, "fr") == BasicTextNormalizer(preserve_marks=True)(text).strip()
    assert normalize_open_asr(text, "en") == EnglishTextNormalizer()(text).strip()


def test_clips_without_a_reference_are_left_out_as_on_the_leaderboard(messages: list[str]) -> None:
    from finetune.training.evaluation import log_evaluation

    wer, kept = WerAccumulator("open_asr"), WerAccumulator("basic")
    made = [
        ("a", "en", "It's colour, um", "it is color"),
        ("b", "en", "[noise]", "something"),
        ("c", "en", "ignore time segment in scoring", "something"),
        ("d", "fr", "(rires)", ""),
        ("e", "fr", "C’est l’été", "c est l ete"),
    ]
    for row in made:
        for scores in (wer, kept):
            scores.add(*row)
    assert (wer.left_out, wer.total.clips, len(wer.utterance_counts)) == (3, 2, 2)
    assert (wer.total.words, wer.total.word_errors) == (3 + 4, 1)
    assert (kept.left_out, kept.total.clips) == (0, 5)
    wer.add("f", "", "okay", "okay")
    log_evaluation(3, "test", wer)
    assert any("3 clips of test have no reference" in m for m in messages)
    assert any("1 clips of test name no language" in m for m in messages)
    merged = WerAccumulator("open_asr")
    merged.merge(wer)
    merged.merge(wer)
    assert merged.left_out == 6
    assert score_pair("[noise]", "something", "open_asr", "en").clips == 0
    assert score_pair("colour", "color", "open_asr", "fr").word_errors == 1
    example = "it's 20 colours", "it is twenty colors"  # of docs/evaluation.md
    assert [score_pair(*example, mode).word_errors for mode in ("basic", "open_asr")] == [4, 0]
