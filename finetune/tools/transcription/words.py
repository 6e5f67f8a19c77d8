"""Words and segments with their times, from tokens with theirs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from finetune.evaluation.long_audio import Token

if TYPE_CHECKING:
    from finetune.models.protocols import AsrModel

SENTENCE_ENDS = ".?!\u2026\u3002\uff1f\uff01\u061f\u0964"
CLOSING = "\"'\u00bb\u201d\u2019)]}\u300d\u300f"
PAUSE_SECONDS = 1.0
"""A pause that ends a segment."""
SEGMENT_SECONDS = 15.0
"""Longest segment; a longer one is split at its pauses."""


def enable_timestamps(model: AsrModel) -> None:
    """Make NeMo's greedy decoding keep the durations and probabilities of its tokens, in place.

    Probabilities are those of the label among V labels and blank, scaled as (p V - 1) / (V - 1), so that a mere guess
    has 0. Only steps that emit a label are recorded. The best path of CTC has both in any case.
    """
    from omegaconf import open_dict

    from finetune.models.nemo import chosen_head

    if chosen_head(model) == "ctc":
        return
    decoding = model.cfg.decoding
    with open_dict(decoding):
        if decoding.strategy == "greedy" and model.decoder.blank_as_pad:
            decoding.strategy = "greedy_batch"  # NeMo's search for single clips keeps no confidences of TDT
        decoding.tdt_include_token_duration = True
        decoding.confidence_cfg = {
            "preserve_frame_confidence": True,
            "preserve_token_confidence": True,
            "exclude_blank": True,
            "tdt_include_duration": False,
            "method_cfg": {"name": "max_prob", "alpha": 1.0},  # neither sharpened nor flattened
        }
    model.change_decoding_strategy(decoding, verbose=False)


def words_of(model: AsrModel, tokens: list[Token], seconds_per_frame: float, duration: float) -> list[dict[str, Any]]:
    """Words with start and end in seconds, and their confidence.

    A word begins at the frame of its first token and ends with its last token that is not punctuation: models put the
    full stop into the silence after a sentence, and give it a duration. No word begins before the previous one has
    ended, and none reaches beyond the recording.

    Args:
        model: its tokenizer made the tokens.
        tokens: of a whole recording.
        seconds_per_frame: of the encoder.
        duration: of the recording, in seconds.

    Returns:
        word, start, end, and confidence if tokens have it: that of the least probable token.
    """
    decode = model.decoding.decode_tokens_to_str_with_strip_punctuation
    groups: list[list[Token]] = []
    for token in tokens:
        attached = token.is_punctuation and groups and len(decode([t.id for t in [*groups[-1], token]]).split()) == 1
        if groups and (not token.begins_word or attached):
            groups[-1].append(token)
        else:
            groups.append([token])
    words: list[dict[str, Any]] = []
    clock = 0.0
    for i, group in enumerate(groups):
        text = decode([t.id for t in group]).strip()
        if not text:
            continue
        spoken = [t for t in group if not t.is_punctuation]
        start = group[0].start
        # A token of duration 0 shares its frame with the next one.
        end = max([t.start + max(t.duration, 1) for t in spoken], default=start)
        if i + 1 < len(groups):
            end = max(start, min(end, groups[i + 1][0].start))
        start_s = min(max(start * seconds_per_frame, clock), duration)
        end_s = min(max(end * seconds_per_frame, start_s), duration)
        clock = end_s
        word = {"word": text, "start": round(start_s, 3), "end": round(end_s, 3)}
        confidences = [t.confidence for t in spoken or group if t.confidence is not None]
        words.append({**word, "confidence": round(min(confidences), 3)} if confidences else word)
    return words


def segments_of(words: list[dict[str, Any]], pause: float = PAUSE_SECONDS) -> list[dict[str, Any]]:
    """Group words into sentences; where there is no punctuation, by pauses.

    Args:
        words: of `words_of`.
        pause: seconds without a word that end a segment.

    Returns:
        text, start, end, and confidence if words have it: their mean. Only a single word may be longer than
            SEGMENT_SECONDS.
    """
    groups: list[list[dict[str, Any]]] = []
    for word in words:
        last = groups[-1][-1] if groups else None
        if last is None or ends_sentence(last["word"]) or word["start"] - last["end"] >= pause:
            groups.append([word])
        else:
            groups[-1].append(word)
    segments = []
    for group in itertools.chain.from_iterable(map(_split_long, groups)):
        segment = {"text": " ".join(w["word"] for w in group), "start": group[0]["start"], "end": group[-1]["end"]}
        confidences = [w["confidence"] for w in group if "confidence" in w]
        if confidences:
            segment["confidence"] = round(sum(confidences) / len(confidences), 3)
        segments.append(segment)
    return segments


def _split_long(words: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Split words at the longest pause, an eighth of their time from the ends, until no part has more than
    SEGMENT_SECONDS."""
    start, end = words[0]["start"], words[-1]["end"]
    if end - start <= SEGMENT_SECONDS or len(words) == 1:
        return [words]

    def fitness(i: int) -> tuple[bool, float, float]:
        off_centre = abs(words[i]["start"] - (start + end) / 2)
        return off_centre <= (end - start) * 3 / 8, round(words[i]["start"] - words[i - 1]["end"], 3), -off_centre

    cut = max(range(1, len(words)), key=fitness)
    return [*_split_long(words[:cut]), *_split_long(words[cut:])]


def ends_sentence(word: str) -> bool:
    """Whether a word ends with a full stop or the like, apart from quotation marks and brackets."""
    return word.rstrip(CLOSING).endswith(tuple(SENTENCE_ENDS))
