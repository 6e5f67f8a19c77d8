"""Words and segments with their times, and subtitles of them."""

import re
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from subtitle_cases import read_cues

from finetune.evaluation.long_audio import Token
from finetune.tools.transcription.subtitles import LINE_CHARACTERS, LINES, cues_of, srt, vtt
from finetune.tools.transcription.words import SEGMENT_SECONDS, segments_of, words_of

PIECES = [
    "\u2581so",
    "\u2581it",
    "\u2581is",
    ".",
    ",",
    "\u2581go",
    "ing",
    "\u2581\u00bf",
    "que",
    "\u2581",
    "?",
    "\u2581-",
]


class Spelling:
    """What `words_of` asks of a model, for a tokenizer with punctuation: NeMo's way of joining pieces."""

    def __init__(self) -> None:
        self.decoding = self

    def decode_tokens_to_str_with_strip_punctuation(self, ids: list[int]) -> str:
        text = "".join(PIECES[i] for i in ids).replace("\u2581", " ")
        return re.sub(r" ([.,?])", r"\1", text).strip()


def spelled(*tokens: tuple[str, int, int]) -> list[Token]:
    punctuation = {".", ",", "?", "\u2581-", "\u2581\u00bf"}
    return [
        Token(PIECES.index(piece), start, duration, piece.startswith("\u2581"), piece in punctuation, 0.5)
        for piece, start, duration in tokens
    ]


def test_punctuation_does_not_draw_out_the_end_of_its_word() -> None:
    tokens = spelled(
        ("\u2581so", 1, 2), ("\u2581it", 4, 1), (".", 9, 4), ("\u2581go", 20, 3), ("ing", 23, 2), ("?", 25, 4)
    )
    words = words_of(Spelling(), tokens, 0.08, 10.0)
    assert [(w["word"], w["start"], w["end"]) for w in words] == [
        ("so", 0.08, 0.24),
        ("it.", 0.32, 0.4),  # and not until 13 x 0.08 = 1.04 s
        ("going?", 1.6, 2.0),
    ]
    assert [(s["text"], s["start"], s["end"]) for s in segments_of(words)] == [
        ("so it.", 0.08, 0.4),
        ("going?", 1.6, 2.0),
    ]


def test_words_that_share_a_frame_or_end_behind_the_recording() -> None:
    tokens = spelled(
        ("\u2581so", 5, 0),
        ("\u2581it", 5, 0),
        ("\u2581is", 5, 4),
        ("\u2581-", 9, 1),
        ("\u2581\u00bf", 10, 1),
        ("que", 10, 4),
    )
    words = words_of(Spelling(), tokens, 0.08, 1.0)
    assert [w["word"] for w in words] == ["so", "it", "is", "-", "\u00bfque"]
    assert [w["start"] for w in words] == sorted(w["start"] for w in words)
    assert all(one["end"] <= other["start"] for one, other in pairwise(words))
    assert words[-1]["end"] == 1.0
    assert words_of(Spelling(), [], 0.08, 1.0) == []
    assert segments_of([]) == []


def test_segments_end_at_pauses_where_there_is_no_punctuation() -> None:
    words = [{"word": "a", "start": 0.0, "end": 0.2}, {"word": "b", "start": 0.4, "end": 0.6}]
    words += [{"word": "\u00abc!\u00bb", "start": 1.7, "end": 2.0}, {"word": "d", "start": 2.0, "end": 2.1}]
    assert [s["text"] for s in segments_of(words)] == ["a b", "\u00abc!\u00bb", "d"]
    assert [s["text"] for s in segments_of(words, pause=0.1)] == ["a", "b", "\u00abc!\u00bb", "d"]


def test_long_segments_are_split_at_their_longest_pauses() -> None:
    """Five minutes without punctuation and without a pause of a second: no word is lost, and no segment is long."""
    words, clock = [], 0.0
    for i in range(700):
        words.append({"word": f"w{i}", "start": round(clock, 3), "end": round(clock + 0.3, 3)})
        clock += 0.3 + (0.6 if i % 30 == 29 else 0.1)
    segments = segments_of(words)
    assert " ".join(s["text"] for s in segments).split() == [w["word"] for w in words]
    assert all(0 < s["end"] - s["start"] <= SEGMENT_SECONDS for s in segments)
    assert len(segments) < 2.5 * clock / SEGMENT_SECONDS
    assert all(int(s["text"].split()[-1][1:]) % 30 == 29 for s in segments[:-1])
    endless = {"word": "w", "start": 0.0, "end": 100.0}
    assert [s["text"] for s in segments_of([endless, {**words[0], "start": 100.1, "end": 100.2}])] == ["w", "w0"]


@st.composite
def timed_words(draw: Any) -> list[dict[str, Any]]:
    words, clock = [], draw(st.integers(0, 40_000_000))  # ms: up to eleven hours
    for _ in range(draw(st.integers(0, 60))):
        start = clock + draw(st.sampled_from([0, 0, 80, 300, 2500]))
        clock = start + draw(st.sampled_from([0, 80, 400, 9000]))
        text = draw(
            st.sampled_from(
                ["a", "word", "R&D", "<b>", "-->", "sentence.", "x" * 30, "\u5b57" * 100, "\u00e9t\u00e9?"]
            )
        )
        words.append({"word": text, "start": start / 1000, "end": clock / 1000})
    return words


@given(timed_words())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_subtitles_keep_to_the_rules_and_to_the_text(words: list[dict[str, Any]]) -> None:
    cues = cues_of(words)
    numbered = srt(cues)
    numbers = re.findall(r"(?:^|\n\n)(\d+)\n(?=\d\d+:)", numbered)
    assert numbers == [str(i) for i in range(1, len(cues) + 1)]
    in_srt = read_cues(re.sub(r"(^|\n\n)\d+\n(?=\d\d+:)", r"\1", numbered), ",")
    web = vtt(cues)
    assert web.startswith("WEBVTT\n\n")
    in_vtt = read_cues(web.removeprefix("WEBVTT\n\n"), r"\.")
    assert [c[:2] for c in in_srt] == [c[:2] for c in in_vtt]
    said = "".join(w["word"] for w in words)
    assert "".join("".join(lines) for *_, lines in in_srt).replace(" ", "") == said.replace("-->", "->")
    plain = [
        [re.sub("&(amp|lt|gt);", lambda m: {"amp": "&", "lt": "<", "gt": ">"}[m[1]], line) for line in c[2]]
        for c in in_vtt
    ]
    assert "".join("".join(lines) for lines in plain).replace(" ", "") == said
    assert not any(set("<>") & set("".join(lines)) or "-->" in "".join(lines) for *_, lines in in_vtt)
    for (start, end, lines), spelled_out in zip(in_vtt, plain, strict=True):
        assert start < end
        assert 1 <= len(lines) <= LINES
        assert all(0 < len(line) <= LINE_CHARACTERS for line in spelled_out)
    assert all(one[1] <= other[0] for one, other in pairwise(in_vtt))


def test_a_cue_has_lines_of_like_length_and_stays_a_second_where_it_can() -> None:
    words = [
        "here",
        "are",
        "so",
        "many",
        "words",
        "that",
        "one",
        "line",
        "of",
        "forty",
        "two",
        "characters",
        "is",
        "too",
        "short",
        "for",
        "it",
    ]
    timed = [{"word": w, "start": i * 0.1, "end": i * 0.1 + 0.1} for i, w in enumerate(words)]
    timed += [{"word": "yes.", "start": 1.8, "end": 1.9}, {"word": "no.", "start": 2.2, "end": 2.3}]
    assert srt(cues_of(timed)) == (
        "1\n00:00:00,000 --> 00:00:01,700\nhere are so many words that one line of\nforty two characters is too short "
        "for it\n\n"
        "2\n00:00:01,800 --> 00:00:02,200\nyes.\n\n"
        "3\n00:00:02,200 --> 00:00:03,200\nno.\n\n"
    )


def test_the_last_cue_stays_until_its_words_end() -> None:
    (cue,) = cues_of([{"word": "slowly", "start": 0.0, "end": 3.0}])
    assert (cue.start, cue.end) == (0, 3000)
