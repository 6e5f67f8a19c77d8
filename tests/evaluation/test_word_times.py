"""Places of words: edges beside pauses, and voices laid at known places."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from conftest import ROOT, slow

from finetune.data.batch import Batch, collate
from finetune.data.filters import FilteredUtterance
from finetune.data.position import FINISHED
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import DecodedUtterance
from finetune.evaluation.word_edges import MOVED_SECONDS, longest_quiet, quiet_frames, word_edges

RATE = 16_000
BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"


def tones(*seconds: float, noise: float = 1e-3) -> np.ndarray:
    """A pause and a tone in turns, of these lengths, in noise."""
    rng = np.random.default_rng(0)
    parts = [
        (i % 2) * 0.3 * np.sin(np.arange(round(s * RATE)) * 2 * math.pi * 300 / RATE) for i, s in enumerate(seconds)
    ]
    audio_S = np.concatenate(parts)
    return (audio_S + noise * rng.standard_normal(len(audio_S))).astype(np.float32)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.02])
def test_words_end_and_begin_with_the_pause_between_them(noise):
    quiet_F = quiet_frames(tones(0.3, 0.5, 0.25, 0.4, 0.35, noise=noise), RATE)
    starts_W, ends_W, behind_pause_W = word_edges(np.array([0.35, 1.0]), np.array([0.5, 1.2]), quiet_F, 1.8)
    assert starts_W == pytest.approx([0.3, 1.05], abs=0.021)
    assert ends_W == pytest.approx([0.8, 1.45], abs=0.021)
    assert behind_pause_W.all()


def test_short_quiet_inside_speech_is_no_pause():
    quiet_F = quiet_frames(tones(0.3, 0.5, 0.05, 0.5, 0.3), RATE)
    starts_W, ends_W, behind_pause_W = word_edges(np.array([0.3, 0.95]), np.array([0.5, 1.2]), quiet_F, 1.65)
    assert ends_W[0] == starts_W[1] == 0.95
    assert behind_pause_W.tolist() == [True, False]


def test_a_pause_far_from_the_word_moves_only_the_end_before_it():
    quiet_F = quiet_frames(tones(0.3, 0.5, 0.3, 0.6, 0.3), RATE)
    late = 1.1 + 2 * MOVED_SECONDS
    starts_W, ends_W, _ = word_edges(np.array([0.3, late]), np.array([0.5, late]), quiet_F, 2.0)
    assert ends_W[0] == pytest.approx(0.8, abs=0.021)
    assert starts_W[1] == late


@pytest.mark.parametrize("audio_S", [np.zeros(0, np.float32), np.zeros(RATE, np.float32), np.ones(100, np.float32)])
def test_audio_without_speech_or_without_quiet_has_edges_in_order(audio_S):
    quiet_F, duration = quiet_frames(audio_S, RATE), len(audio_S) / RATE
    starts_W, ends_W, _ = word_edges(np.array([0.0, 0.4]), np.array([0.1, 0.5]), quiet_F, duration)
    edges = np.stack([starts_W, ends_W], 1).ravel()
    assert (np.diff(edges) >= 0).all()
    assert edges[-1] <= duration


def test_the_longest_quiet_stretch_counts():
    quiet_F = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)
    assert longest_quiet(quiet_F, 0.0, 0.09) == pytest.approx((0.04, 0.07))
    assert longest_quiet(quiet_F, 0.05, 0.09) == pytest.approx((0.05, 0.07))
    assert longest_quiet(quiet_F, 0.03, 0.03) is None


# ---- models ---------------------------------------------------------------------------------------------------------


def batch_of(aligner, clips: list[tuple[str, np.ndarray]]) -> Batch:
    decoded = [
        DecodedUtterance(str(i), text, "en", audio_S, aligner.tokens_of(text) if text else [])
        for i, (text, audio_S) in enumerate(clips)
    ]
    return collate(decoded, 0, FINISHED)


@pytest.fixture(scope="module")
def base():
    from finetune.evaluation.alignment import Aligner
    from finetune.models.loading import load_model

    return Aligner(load_model(str(BASE)))


@pytest.fixture(scope="module")
def laid(clips):
    """Three prompts with pauses of 0.3 s, and their starts and ends."""
    parts, edges, texts, length = [np.zeros(RATE // 5)], [], [], RATE // 5
    rows = [json.loads(line) for line in (clips / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows[:3]:
        samples_S = soundfile.read(clips / row["audio_filepath"])[0]
        loud_S = np.flatnonzero(abs(samples_S) > 0.02 * abs(samples_S).max())
        samples_S = samples_S[loud_S[0] : loud_S[-1] + 1]
        edges.append((length / RATE, (length + len(samples_S)) / RATE))
        texts.append(row["text"])
        parts += [samples_S, np.zeros(3 * RATE // 10)]
        length += len(samples_S) + 3 * RATE // 10
    return texts, np.concatenate(parts).astype(np.float32), edges


def test_prompts_are_found_where_they_were_laid(base, laid):
    texts, audio_S, edges = laid
    [clip] = base.align(batch_of(base, [(" ".join(texts), audio_S)]))
    first = np.cumsum([0, *(len(text.split()) for text in texts)])
    assert [word.text for word in clip.words] == " ".join(texts).split()
    for (start, end), a, b in zip(edges, first[:-1], first[1:], strict=True):
        assert clip.words[a].start_seconds == pytest.approx(start, abs=0.1)
        assert clip.words[b - 1].end_seconds == pytest.approx(end, abs=0.1)
    for word in clip.words:
        own = clip.tokens[slice(*word.tokens)]
        edges = [word.start_seconds, *(t.end_seconds for t in own)]
        assert own[0].start_seconds == word.start_seconds
        assert own[-1].end_seconds == word.end_seconds
        assert all(a <= b for a, b in pairwise(edges))
    assert len(clip.gaps(0.2)) >= len(texts)


def test_a_word_that_is_not_said_and_one_that_is_left_out_show(base, laid):
    texts, audio_S, _ = laid
    whole = " ".join(texts)
    wrong = " ".join([texts[0], "elephant", *texts[1:]])
    shorter = " ".join(texts[:1] + texts[2:])
    right, more, less = base.align(batch_of(base, [(text, audio_S) for text in (whole, wrong, shorter)]))
    assert min(more.words, key=lambda word: word.confidence).text == "elephant"
    assert more.loss > right.loss + 3
    assert less.loss > right.loss + 3
    blanks = [t.blank_log_probability for t in right.tokens] + [right.last_blank_log_probability]
    silent = [t.blank_log_probability for t in less.tokens] + [less.last_blank_log_probability]
    assert min(silent) < min(blanks) - 1


def test_clips_align_alike_alone_and_in_a_batch(base, laid):
    texts, audio_S, edges = laid
    clips = [(" ".join(texts), audio_S), (texts[0], audio_S[: round((edges[0][1] + 0.1) * RATE)])]
    together = base.align(batch_of(base, clips))
    for clip, own in zip(together, clips, strict=True):
        [alone] = base.align(batch_of(base, [own]))
        assert clip.loss == pytest.approx(alone.loss, rel=1e-3)
        assert [w.start_seconds for w in clip.words] == pytest.approx([w.start_seconds for w in alone.words], abs=2e-3)


def test_words_stay_as_they_are_written(base, laid):
    _, audio_S, _ = laid
    text = "\u2014 Press-one, and \u2013 again \u2026"
    [clip] = base.align(batch_of(base, [(text, audio_S)]))
    assert [word.text for word in clip.words] == ["\u2014 Press-one,", "and \u2013", "again \u2026"]


def test_what_cannot_be_aligned_is_told(base, laid):
    _, audio_S, _ = laid
    with pytest.raises(FilteredUtterance, match="empty_text"):
        base.tokens_of(" \u2026 ")
    with pytest.raises(BadUtterance, match="no piece for"):
        base.tokens_of("привет")
    [empty] = base.align(batch_of(base, [("", audio_S)]))
    assert empty.aligned
    assert not empty.words
    assert empty.gaps() == [(0.0, empty.duration_seconds)]


@pytest.mark.parametrize("head", ["transducer", slow("ctc")])
def test_each_head_of_a_hybrid_model_aligns(archive_of, head, laid):
    from finetune.evaluation.alignment import Aligner
    from finetune.losses import ctc_losses
    from finetune.models.loading import load_model
    from finetune.models.nemo import ctc_log_probs, set_head

    texts, audio_S, _ = laid
    model = load_model(str(archive_of("hybrid-rnnt")))
    set_head(model, head)
    aligner = Aligner(model)
    batch = batch_of(aligner, [(texts[0].lower(), audio_S), (" ".join(["of"] * 300), audio_S[: RATE // 2])])
    clip, crowded = aligner.align(batch)
    assert clip.aligned
    assert len(clip.words) == len(texts[0].split())
    assert all(0 <= w.start_seconds <= w.end_seconds <= clip.duration_seconds for w in clip.words)
    if head == "ctc":
        assert not crowded.aligned
        assert crowded.words == []
        encoded = aligner.encode(batch)
        with torch.no_grad():
            log_probs_BTV = ctc_log_probs(model.ctc_decoder.eval(), encoded.enc_BHT)
        losses_B = ctc_losses(log_probs_BTV, batch.tokens_BU, encoded.enc_lengths_B, batch.token_lengths_B)
        assert clip.loss == pytest.approx(float(losses_B[0]), rel=1e-4)
