"""Audio of any length: reading in blocks, cutting, seams, and the commands that use them."""

import io
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from conftest import ROOT, VOICE_PROMPTS, read_lines, write_manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from subtitle_cases import read_cues

from finetune.data.audio_blocks import read_blocks
from finetune.data.decode import decode_audio
from finetune.data.quarantine import BadUtterance
from finetune.evaluation.long_audio import Chunk, Cutting, Stitcher, Token, agreeing, chunks_of, splice

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
RATE = 16_000

# ---- reading in blocks ---------------------------------------------------------------------------------------------

FORMATS = [
    ("wav", "WAV", "PCM_16", (8000, 16_000, 22_050, 22_254, 44_100, 48_000)),
    ("wav", "WAV", "FLOAT", (16_000, 96_000)),
    ("flac", "FLAC", "PCM_16", (16_000, 44_100)),
    ("ogg", "OGG", "VORBIS", (16_000, 22_050, 44_100)),
    ("opus", "OGG", "OPUS", (48_000,)),
    ("mp3", "MP3", "MPEG_LAYER_III", (16_000, 44_100)),
]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("extension", "kind", "subtype", "rate"), [(e, k, s, rate) for e, k, s, rates in FORMATS for rate in rates]
)
def test_blocks_equal_whole_decoding(
    tmp_path: Path, extension: str, kind: str, subtype: str, rate: int, channels: int
) -> None:
    rng = np.random.default_rng(rate)
    time_S = np.arange(int(3.21 * rate)) / rate
    tone_S = 0.3 * np.sin(2 * np.pi * (200 + 300 * time_S) * time_S) + 0.05 * rng.standard_normal(len(time_S))
    samples = tone_S if channels == 1 else np.stack([tone_S, 0.5 * tone_S[::-1]], axis=1)
    path = tmp_path / f"a.{extension}"
    soundfile.write(path, samples, rate, format=kind, subtype=subtype)
    whole_S = decode_audio(str(path), RATE)
    whole_S = whole_S / 32768 if whole_S.dtype == np.int16 else whole_S
    for seconds in (0.013, 0.37, 60.0):
        blocks = list(read_blocks(str(path), RATE, seconds))
        assert all(b.dtype == np.float32 and b.ndim == 1 for b in blocks)
        assert max(map(len, blocks)) < (seconds + 0.2) * RATE or seconds > 3
        streamed_S = np.concatenate(blocks)
        assert streamed_S.shape == whole_S.shape
        np.testing.assert_allclose(streamed_S, whole_S, atol=2e-6)


@given(st.integers(1, 700), st.integers(1, 700), st.lists(st.integers(0, 3000), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_ratio_and_any_blocks_resample_as_at_once(rate: int, sample_rate: int, sizes: list[int]) -> None:
    import torchaudio

    from finetune.data.audio_blocks import resample_blocks

    samples_S = np.random.default_rng(0).standard_normal(sum(sizes)).astype(np.float32)
    parts = list(resample_blocks(np.split(samples_S, np.cumsum(sizes)[:-1]), rate, sample_rate))
    if len(samples_S):
        streamed_S = np.concatenate(parts)
        whole_S = torchaudio.functional.resample(torch.from_numpy(samples_S), rate, sample_rate).numpy()
        assert streamed_S.shape == whole_S.shape
        np.testing.assert_allclose(streamed_S, whole_S, atol=1e-4)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    (tmp_path / "text.wav").write_text("no audio")
    broken_S = np.zeros(3 * RATE, dtype=np.float32)
    broken_S[2 * RATE + 5] = np.nan
    soundfile.write(tmp_path / "nan.wav", broken_S, RATE, subtype="FLOAT")
    for name, reason in (
        ("gone", "no file"),
        ("empty", "empty"),
        ("text", "cannot be decoded"),
        ("nan", "not finite"),
    ):
        with pytest.raises(BadUtterance, match=reason):
            list(read_blocks(str(tmp_path / f"{name}.wav"), RATE, 1.0))


# ---- cutting -------------------------------------------------------------------------------------------------------


@given(
    samples=st.integers(0, 40_000),
    chunk=st.floats(1.0, 12.0),
    share=st.floats(0.0, 0.49),
    search=st.floats(0.0, 8.0),
    block=st.integers(1, 5000),
    silent=st.booleans(),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_chunks_cover_everything(
    samples: int, chunk: float, share: float, search: float, block: int, silent: bool
) -> None:
    rate, frame = 1000, 80
    audio_S = np.arange(samples, dtype=np.float32)  # every sample is its own place
    heard_S = np.zeros_like(audio_S) if silent else audio_S
    cutting = Cutting.of_seconds(rate, frame / rate, chunk, share * chunk, search)
    blocks = [heard_S[i : i + block] for i in range(0, samples, block)]
    chunks = list(chunks_of(iter(blocks), cutting))
    places = [audio_S[c.start * frame : c.start * frame + len(c.audio_S)] for c in chunks]
    assert all(np.array_equal(heard_S[p.astype(int)], c.audio_S) for p, c in zip(places, chunks, strict=True))
    assert np.array_equal(np.unique(np.concatenate(places)), audio_S)
    assert all(len(c.audio_S) <= cutting.limit * frame for c in chunks)
    assert (chunks[0].start, chunks[0].seam) == (0, 0)
    assert chunks[-1].start * frame + len(chunks[-1].audio_S) == samples
    for one, other in pairwise(chunks):
        assert other.start > one.start
        assert other.start == other.seam - cutting.margin
        assert one.start * frame + len(one.audio_S) == (other.seam + cutting.margin) * frame
        # No shorter than needed: the limit less what is searched.
        assert len(one.audio_S) >= (cutting.limit - cutting.search - 2) * frame
    assert len(chunks) == 1 or samples > cutting.limit * frame


def test_a_recording_within_the_limit_is_one_chunk() -> None:
    audio_S = np.random.default_rng(0).standard_normal(30 * RATE).astype(np.float32)
    for chunk, expected in ((30.0, 1), (None, 1), (29.9, 2)):
        chunks = list(chunks_of(iter([audio_S]), Cutting.of_seconds(RATE, 0.08, chunk)))
        assert len(chunks) == expected
        assert expected == 2 or np.array_equal(chunks[0].audio_S, audio_S)


@pytest.mark.parametrize("overlap", [0.0, 2.0])
def test_seams_lie_in_silence(overlap: float) -> None:
    rng = np.random.default_rng(0)
    audio_S = 0.3 * rng.standard_normal(40 * RATE).astype(np.float32)
    gaps = [(4.0, 4.4), (7.5, 7.75), (15.5, 15.8), (23.2, 23.6), (31.4, 31.9)]
    for start, end in gaps:
        audio_S[int(start * RATE) : int(end * RATE)] *= 0.01
    chunks = list(chunks_of(iter([audio_S]), Cutting.of_seconds(RATE, 0.08, 10.0, overlap, 4.0)))
    seams = [0.08 * chunk.seam for chunk in chunks[1:]]
    assert len(seams) == 4
    # 4.0 lies before the seconds that are searched, so it is left alone.
    for seam, (start, end) in zip(seams, gaps[1:], strict=True):
        assert start < seam < end, seams


# ---- seams ---------------------------------------------------------------------------------------------------------


def tokens_of(words: list[list[tuple[int, int]]]) -> list[Token]:
    """Words of (id, frame) as tokens."""
    return [Token(i, frame, 1, k == 0, False) for word in words for k, (i, frame) in enumerate(word)]


@st.composite
def streams(draw: Any) -> tuple[list[Token], int, int, list[tuple[int, int]]]:
    """What is said, and the chunks that hear it: tokens, chunk frames, margin, (start, end) of each chunk."""
    margin, core = draw(st.integers(8, 30)), draw(st.integers(40, 120))
    frame, words = draw(st.integers(0, 20)), []
    for _ in range(draw(st.integers(0, 40))):
        # Few ids, so that words repeat; equal tokens are four frames apart or more, which is further than chunks
        # differ.
        ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
        words.append([(token, frame + 2 * k) for k, token in enumerate(ids)])
        frame += 2 * len(ids) + draw(st.integers(2, 40))
    seams = list(range(core, frame + 1, core))
    bounds = [0, *seams, frame + 1]
    chunks = [(max(0, a - margin), b + margin) for a, b in pairwise(bounds)]
    return tokens_of(words), margin, core, chunks


@given(streams(), st.integers(0, 3), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_word_is_lost_or_doubled(drawn: Any, garbled: int, rng: random.Random) -> None:
    """Chunks hear the same words a frame earlier or later; what lies at their edges not at all or as other words."""
    said, margin, core, chunks = drawn
    cutting = Cutting(frame=1, limit=core + 2 * margin, margin=margin, search=0, quiet=2, tolerance=2)
    stitcher = Stitcher(cutting)
    for k, (start, end) in enumerate(chunks):
        heard = []
        for token in said:
            if not start <= token.start < end:
                continue
            first, last = k == 0, k == len(chunks) - 1
            at_edge = (not first and token.start < start + garbled) or (not last and token.start >= end - garbled)
            shifted = token._replace(start=token.start + (rng.choice((0, 1)) if not at_edge else 0))
            heard.append(shifted._replace(id=99) if at_edge else shifted)
        if garbled:
            heard = [t for t in heard if t.id != 99 or rng.random() < 0.5]
        seam = 0 if k == 0 else start + margin
        stitcher.add(Chunk(start, np.zeros(end - start, dtype=np.float32), seam), heard)
    assert [t.id for t in stitcher.tokens] == [t.id for t in said]
    assert all(abs(a.start - b.start) <= 1 for a, b in zip(stitcher.tokens, said, strict=True))


@pytest.mark.parametrize(("left", "right"), [((98, 104), (103, 109)), ((103, 107), (97, 101)), ((95, 99), (95, 99))])
def test_one_word_that_is_read_in_two_ways_comes_once(left: tuple[int, int], right: tuple[int, int]) -> None:
    """`hello` and `yellow` at one place, on whatever side of the seam each chunk puts them."""
    ours = tokens_of([[(1, 80), (2, 82)], [(3, left[0]), (4, left[1])]])
    theirs = tokens_of([[(5, right[0]), (6, right[1])], [(7, 120), (8, 122)]])
    i, j = splice(ours, theirs, 100, 6)
    assert [t.id for t in ours[:i] + theirs[j:]] in ([1, 2, 3, 4, 7, 8], [1, 2, 5, 6, 7, 8])


def test_text_without_blanks_is_parted_between_its_tokens() -> None:
    ours = [Token(i, 10 * i, 1, i == 0, False) for i in range(20)]
    theirs = [Token(100 + i, 10 * i, 1, False, False) for i in range(20)]  # nothing in common
    i, j = splice(ours, theirs, 100, 3)
    assert (i, j) == (10, 10)
    assert splice([], theirs, 100, 3) == (0, 10)
    assert splice(ours, [], 100, 3) == (10, 0)
    assert splice([], [], 100, 3) == (0, 0)


def test_a_seam_is_put_at_the_beginning_of_a_word_where_one_agrees() -> None:
    ours = tokens_of([[(1, 80), (2, 84), (3, 99)], [(4, 120), (5, 124)]])
    theirs = tokens_of([[(9, 80), (2, 84), (3, 99)], [(4, 121), (5, 125)]])
    assert agreeing(ours, theirs, 3) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert splice(ours, theirs, 100, 3) == (3, 3)


def test_punctuation_in_the_silence_behind_its_word_goes_with_it() -> None:
    """Both chunks read the last word before the seam in their own way, and put its point behind the seam."""
    ours = [Token(1, 80, 2, True, False), Token(2, 105, 4, False, True)]
    theirs = [Token(3, 81, 2, True, False), Token(4, 104, 4, False, True), Token(5, 130, 2, True, False)]
    i, j = splice(ours, theirs, 100, 3)
    assert [t.id for t in ours[:i] + theirs[j:]] == [1, 2, 5]


# ---- the commands --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[tuple[np.ndarray, str]]:
    """Real prompts of three to eight seconds, English, with their texts."""
    rows = pq.read_table(VOICE_PROMPTS / "test-00000-of-00001.parquet").to_pylist()
    rows = [row for row in rows if row["language"] == "en" and 2 < row["duration"] < 8]
    return [(soundfile.read(io.BytesIO(r["audio"]["bytes"]), dtype="float32")[0], r["text"]) for r in rows]


@pytest.fixture(scope="module")
def long_file(prompts: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    """A recording of real prompts with 1.2 s of silence between them, and where each lies, in seconds."""
    parts, spans, length = [], [], 0
    for samples_S, _ in prompts[:12]:
        gap_S = np.zeros(int(1.2 * RATE), dtype=np.float32)
        spans.append(((length + len(gap_S)) / RATE, (length + len(gap_S) + len(samples_S)) / RATE))
        parts += [gap_S, samples_S]
        length += len(gap_S) + len(samples_S)
    path = tmp_path_factory.mktemp("long") / "long.flac"
    soundfile.write(path, np.concatenate(parts), RATE)
    return path, spans


def transcribe(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> list[dict[str, Any]]:
    from finetune.transcribe import main

    capsys.readouterr()
    assert main([str(a) for a in arguments]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture(scope="module")
def base() -> Any:
    """The small real model, with timestamps."""
    from finetune.models.loading import load_model
    from finetune.tools.transcription.words import enable_timestamps

    model = load_model(str(BASE))
    enable_timestamps(model)
    return model


def rows_of(model: Any, files: list[Path], chunk: float | None, batch_size: int = 4) -> list[dict[str, Any]]:
    from finetune.evaluation.recognise import evaluation_mode, frame_seconds
    from finetune.tools.transcription.files import transcribe_files

    cutting = Cutting.of_seconds(RATE, frame_seconds(model), chunk)
    with evaluation_mode(model):
        return list(transcribe_files(model, [str(f) for f in files], cutting, batch_size=batch_size, timestamps=True))


def test_words_lie_within_the_prompts_that_say_them(base: Any, long_file: Any) -> None:
    path, spans = long_file
    (row,) = rows_of(base, [path], 15.0)
    words, segments = row["words"], row["segments"]
    assert len(words) > 60
    assert " ".join(w["word"] for w in words) == row["text"] == " ".join(s["text"] for s in segments)
    assert all(any(start - 0.1 <= w["start"] <= end for start, end in spans) for w in words)
    assert all(any(start - 0.1 <= w["start"] <= end for w in words) for start, end in spans)
    assert all(0 <= w["start"] <= w["end"] <= row["duration"] and 0 < w["confidence"] <= 1 for w in words)
    assert all(one["end"] <= other["start"] for one, other in pairwise(words))
    assert all(one["end"] <= other["start"] for one, other in pairwise(segments))
    # At once: other context, so other words here and there, but those that are the same are at the same place.
    (whole,) = rows_of(base, [path], 600.0)
    aligned = jiwer.process_words(whole["text"], row["text"]).alignments[0]
    apart = [
        abs(whole["words"][part.ref_start_idx + k]["start"] - words[part.hyp_start_idx + k]["start"])
        for part in aligned
        if part.type == "equal"
        for k in range(part.ref_end_idx - part.ref_start_idx)
    ]
    assert len(apart) > 30
    assert max(apart) < 0.081


def test_a_file_within_one_chunk_has_nemos_text_and_timestamps(base: Any, prompts: list[Any], tmp_path: Path) -> None:
    from nemo.collections.asr.models import ASRModel

    files = []
    for i, (samples_S, _) in enumerate(prompts[:5]):
        files.append(tmp_path / f"{i}.wav")
        soundfile.write(files[-1], samples_S, RATE, subtype="FLOAT")
    ours = rows_of(base, files, 30.0, batch_size=3)
    plain = ASRModel.restore_from(str(BASE), map_location="cpu")
    theirs = plain.transcribe([str(f) for f in files], batch_size=3, timestamps=True, verbose=False)
    assert [r["text"] for r in ours] == [" ".join(h.text.split()) for h in theirs]
    for row, hypothesis in zip(ours, theirs, strict=True):
        words = hypothesis.timestamp["word"]
        assert [w["word"] for w in row["words"]] == [w["word"] for w in words]
        assert [w["start"] for w in row["words"]] == pytest.approx([w["start"] for w in words], abs=1e-3)
        # Where NeMo gives a word no length, it has one frame here.
        longer = [a["end"] - min(b["end"], row["duration"]) for a, b in zip(row["words"], words, strict=True)]
        assert all(-0.001 <= seconds <= 0.081 for seconds in longer)
        assert longer.count(0.0) > len(longer) / 2


def test_confidence_is_the_probability_of_the_token(base: Any, prompts: list[Any]) -> None:
    """The first token's, computed by hand: nothing was said before it, and its frame is its time."""
    from finetune.evaluation.long_audio import Pieces
    from finetune.evaluation.recognise import evaluation_mode, recognise_chunks
    from finetune.models.nemo import tdt_durations

    samples_S = prompts[1][0]
    with evaluation_mode(base):
        (tokens,) = recognise_chunks(base, [Chunk(0, samples_S, 0)], Pieces(base.tokenizer))
        mel_BFT, lengths_B = base.preprocessor(
            input_signal=torch.from_numpy(samples_S)[None], length=torch.tensor([len(samples_S)])
        )
        enc_BHT, _ = base.encoder(audio_signal=mel_BFT, length=lengths_B)
        said_BUH, _ = base.decoder.predict(None, add_sos=False, batch_size=1)
        frame_B1H = enc_BHT.transpose(1, 2)[:, tokens[0].start : tokens[0].start + 1]
        logits_V = base.joint.joint(frame_B1H, said_BUH).flatten()[: -len(tdt_durations(base))]
    probability = torch.softmax(logits_V, dim=0)[tokens[0].id].item()
    assert 0.05 < probability < 0.999
    assert tokens[0].confidence == pytest.approx(probability, abs=2 / len(logits_V))


@pytest.mark.slow
def test_files_are_decoded_together_and_come_in_their_order(base: Any, long_file: Any, clips: Path) -> None:
    short = sorted(clips.glob("*.flac"))[:5]
    files = [*short[:3], Path("no/such/file.wav"), long_file[0], *short[3:]]
    alone = [row for file in files for row in rows_of(base, [file], 20.0, batch_size=1)]
    together = rows_of(base, files, 20.0, batch_size=4)
    assert [r["file"] for r in together] == [str(f) for f in files]
    assert [r.get("text") for r in together] == [r.get("text") for r in alone]
    assert "no file" in together[3]["error"]


def test_what_was_heard_before_a_fault_is_kept(base: Any, long_file: Any, tmp_path: Path) -> None:
    audio_S, _ = soundfile.read(long_file[0], dtype="float32")
    audio_S[-5 * RATE] = np.inf
    soundfile.write(tmp_path / "fault.wav", audio_S, RATE, subtype="FLOAT")
    (row,) = rows_of(base, [tmp_path / "fault.wav"], 15.0)
    (whole,) = rows_of(base, long_file[:1], 15.0)
    assert "not finite" in row["error"]
    assert 20 < row["duration"] < whole["duration"]
    assert len(row["text"].split()) > 20
    assert whole["text"].startswith(" ".join(row["text"].split()[:20]))


def test_local_attention_that_sees_everything_is_full_attention(base: Any, prompts: list[Any]) -> None:
    from finetune.evaluation.recognise import evaluation_mode
    from finetune.models.loading import load_model
    from finetune.strategies.attention import use_local_attention

    local = load_model(str(BASE))
    audio_BS = torch.from_numpy(np.concatenate([samples_S for samples_S, _ in prompts[:3]]))[None]
    found = []
    with evaluation_mode(base), evaluation_mode(local):
        mel_BFT, lengths_B = base.preprocessor(input_signal=audio_BS, length=torch.tensor([audio_BS.shape[1]]))
        full_BHT, _ = base.encoder(audio_signal=mel_BFT, length=lengths_B)
        for context in (200, 20):
            use_local_attention(local, context)
            local.eval()
            found.append(local.encoder(audio_signal=mel_BFT, length=lengths_B)[0])
    assert full_BHT.shape[-1] < 200
    torch.testing.assert_close(found[0], full_BHT, atol=1e-4, rtol=1e-3)
    assert (found[1] - full_BHT).abs().max() > 0.01  # it does not see everything


def test_local_attention_and_files_of_all_formats(
    tiny_model: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.transcribe import main

    files, folder = sorted(clips.glob("*.flac"))[:3], tmp_path / "new" / "subtitles"
    arguments = ["--model", tiny_model, *files, "--attention", "local", "--context", "16"]
    rows = transcribe(capsys, *arguments)
    assert main([str(a) for a in (*arguments, "--format", "srt,vtt,txt,json", "--output", folder)]) == 0
    assert capsys.readouterr().out == ""
    assert [r["file"] for r in rows] == [str(f) for f in files]
    assert all("words" not in r and r["text"] for r in rows)  # --timestamps was not asked for
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        f"{f.stem}.{kind}" for f in files for kind in ("srt", "vtt", "txt", "json")
    )
    for row, file in zip(rows, files, strict=True):
        assert json.loads((folder / f"{file.stem}.json").read_text()) == row
        assert (folder / f"{file.stem}.txt").read_text().split() == row["text"].split()
        web = read_cues((folder / f"{file.stem}.vtt").read_text().removeprefix("WEBVTT\n\n"), r"\.")
        assert "".join("".join(lines) for *_, lines in web).replace(" ", "") == row["text"].replace(" ", "")
        assert (folder / f"{file.stem}.srt").read_text().startswith("1\n00:00:0")


def test_wrong_arguments_are_said(
    tiny_model: Path, clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.transcribe import main

    file = sorted(clips.glob("*.flac"))[0]
    other = tmp_path / file.name
    other.write_bytes(file.read_bytes())
    for arguments, said in (
        (["--format", "srt"], "--output"),
        (["--format", "doc", "--output", "x"], "there is no 'doc'"),
        (["--chunk", "4", "--overlap", "2"], "more than twice --overlap"),
        (["--chunk", "nan"], "--chunk has to be"),
        (["--overlap", "-1"], "--overlap has to be"),
    ):
        with pytest.raises(SystemExit):
            main(["--model", str(tiny_model), str(file), *arguments])
        assert said in capsys.readouterr().err
    assert main(["--model", str(tiny_model), str(file), str(other), "--output", str(tmp_path / "out")]) == 2
    assert "would both be written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_evaluate_takes_long_clips_in_chunks(
    tiny_model: Path, clips: Path, long_file: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from finetune import evaluate
    from finetune.evaluation import recognise

    right, seconds = recognise.recognise_batch, []

    def watched(model: Any, audio_BS: torch.Tensor, *arguments: Any) -> list[Any]:
        seconds.append(audio_BS.shape[1] / RATE)
        return right(model, audio_BS, *arguments)

    monkeypatch.setattr(recognise, "recognise_batch", watched)
    short = [{**r, "audio_filepath": str(clips / r["audio_filepath"])} for r in read_lines(clips / "manifest.jsonl")]
    long = {"audio_filepath": str(long_file[0]), "text": "a long one", "lang": "en"}

    def judge(name: str, rows: list[Any], *arguments: str) -> list[dict[str, Any]]:
        manifest, out = write_manifest(tmp_path / f"{name}.jsonl", rows), tmp_path / f"{name}-utterances.jsonl"
        seconds.clear()
        call = ["--model", tiny_model, "--data", manifest, "--utterances", out, "--batch-size", "8", *arguments]
        assert evaluate.main([str(a) for a in call]) == 0
        return read_lines(out)

    plain = judge("short", short)
    assert len(seconds) == 3
    mixed = judge("mixed", [*short[:11], long, *short[11:]], "--chunk", "10")
    assert max(seconds) <= 10
    assert [r["hypothesis"] for r in mixed[:11] + mixed[12:]] == [r["hypothesis"] for r in plain]
    # The same as `transcribe` says of the file.
    (row,) = transcribe(capsys, "--model", tiny_model, long_file[0], "--chunk", "10")
    assert mixed[11]["hypothesis"] == row["text"]


def peak_mib(work: Any) -> float:
    """What the peak of this process' resident memory was above its memory at the beginning."""
    status = Path("/proc/self/status")

    def read(key: str) -> float:
        return int(re.search(rf"{key}:\s+(\d+) kB", status.read_text())[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    work()
    return read("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells and resets the peak")
def test_memory_does_not_grow_with_the_recording(tiny_model: Path, long_file: Any, tmp_path: Path) -> None:
    from finetune.models.loading import load_model

    model = load_model(str(tiny_model))
    audio_S, _ = soundfile.read(long_file[0], dtype="float32")
    peaks = []
    for minutes in (1, 2, 12):
        path = tmp_path / f"{minutes}.wav"
        with soundfile.SoundFile(path, "w", RATE, 1, subtype="PCM_16") as file:
            for _ in range(-(-60 * minutes * RATE // len(audio_S))):
                file.write(audio_S)
        # What the allocator holds of earlier work varies by 20 MiB: the least of three.
        peaks.append(min(peak_mib(lambda path=path: rows_of(model, [path], 30.0, batch_size=2)) for _ in range(3)))
    # The samples of ten minutes more would be 37 MiB, and their mel frames half of that.
    assert peaks[2] < peaks[1] + 20, peaks
