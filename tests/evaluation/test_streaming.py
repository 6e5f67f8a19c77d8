"""Recognition chunk by chunk: the texts are NeMo's own, letter by letter, however recordings are batched."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import soundfile
import torch
from conftest import ROOT, read_lines, slow

from finetune.evaluation.recognise import evaluation_mode
from finetune.evaluation.streaming import normalizes_chunks, stream, stream_texts, texts_of
from finetune.models.loading import load_model
from finetune.models.nemo_archive import save_nemo

sys.path.insert(0, str(ROOT / "scripts" / "models"))

import families
import streaming_study

RATE = 16_000


@pytest.fixture(scope="module")
def recordings(clips: Path) -> list[torch.Tensor]:
    """Recordings of 0.6 s to 5 s, of real clips one after the other."""
    samples = [
        torch.from_numpy(soundfile.read(clips / row["audio_filepath"], dtype="float32")[0])
        for row in read_lines(clips / "manifest.jsonl")
    ]
    return [samples[0][:9600], torch.cat(samples[1:3]), torch.cat(samples[4:8])]


@pytest.fixture(scope="module")
def talkative(
    archive_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, recordings: list[torch.Tensor]
) -> Callable[[str], Path]:
    """`talkative("streaming")` builds a family's archive with random weights that write other letters at each sound.

    The heads hear how the encoder's outputs differ from their mean, which random layers hardly leave. A trained model
    is in the slow test.
    """
    folder, built = tmp_path_factory.mktemp("talkative"), {}

    def build(name: str, normalize: str = "NA") -> Path:
        if (name, normalize) not in built:
            built[name, normalize] = folder / f"{name}-{normalize}.nemo"
            model = load_model(str(archive_of(name)))
            if normalize != "NA":
                model.cfg.preprocessor.normalize = model.preprocessor.featurizer.normalize = normalize
            audio_BS, lengths_B = padded(recordings[2:3])
            with evaluation_mode(model):
                mel_BFT, mel_lengths_B = model.preprocessor(input_signal=audio_BS, length=lengths_B)
                enc_HT = model.encoder(audio_signal=mel_BFT, length=mel_lengths_B)[0][0]
                heads = [model.joint.enc]
                if hasattr(model, "ctc_decoder"):
                    heads.append(model.ctc_decoder.decoder_layers[0])
                for head in heads:
                    weight_OH = head.weight.view(len(head.weight), -1)
                    weight_OH *= 4 / enc_HT.std(1)
                    head.bias -= weight_OH @ enc_HT.mean(1)
                model.joint.joint_net[-1].bias[-1] += 2  # the blank
            save_nemo(model, built[name, normalize])
        return built[name, normalize]

    return build


def padded(recordings: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths_B = torch.tensor([len(samples_S) for samples_S in recordings])
    return torch.nn.utils.rnn.pad_sequence(recordings, batch_first=True), lengths_B


def nemo_texts(model: Any, recordings: list[torch.Tensor], context: list[int], online: bool = False) -> list[str]:
    """What NeMo's script for cache-aware inference does (speech_to_text_cache_aware_streaming_infer.py), by itself."""
    from nemo.collections.asr.parts.utils.streaming_utils import CacheAwareStreamingAudioBuffer

    model.encoder.set_default_att_context_size(context)
    texts = []
    for samples_S in recordings:
        buffer = CacheAwareStreamingAudioBuffer(model=model, online_normalization=online)
        buffer.append_audio(samples_S.numpy())
        caches = model.encoder.get_initial_cache_state(batch_size=1)
        hypotheses = predictions = said = None
        for step, (chunk, lengths) in enumerate(iter(buffer)):
            with torch.inference_mode():
                predictions, said, *caches, hypotheses = model.conformer_stream_step(
                    processed_signal=chunk,
                    processed_signal_length=lengths,
                    cache_last_channel=caches[0],
                    cache_last_time=caches[1],
                    cache_last_channel_len=caches[2],
                    keep_all_outputs=buffer.is_buffer_empty(),
                    previous_hypotheses=hypotheses,
                    previous_pred_out=predictions,
                    drop_extra_pre_encoded=model.encoder.streaming_cfg.drop_extra_pre_encoded if step else 0,
                    return_transcription=True,
                )
        texts.append(said[0] if isinstance(said[0], str) else said[0].text)
    return texts


@torch.inference_mode()
def nemo_buffered_texts(model: Any, recordings: list[torch.Tensor], context: list[int]) -> list[str]:
    """What NeMo's script for unified models does (speech_to_text_streaming_infer_rnnt.py)."""
    from nemo.collections.asr.parts.utils.rnnt_utils import batched_hyps_to_hypotheses
    from nemo.collections.asr.parts.utils.streaming_utils import ContextSize, StreamingBatchedAudioBuffer

    frame = 1280
    model.encoder.set_default_att_context_size(context)
    size = ContextSize(*(frames * frame for frames in context))
    texts = []
    for samples_S in recordings:
        audio_BS, rest = samples_S[None], torch.tensor([len(samples_S)])
        buffer = StreamingBatchedAudioBuffer(1, size, torch.float32, "cpu")
        hypotheses = state = None
        left, right = 0, min(size.chunk + size.right, len(samples_S))
        while left < len(samples_S):
            length = min(right, len(samples_S)) - left
            last = length >= rest
            lengths = torch.where(last, rest, torch.full_like(rest, length))
            buffer.add_audio_batch_(audio_BS[:, left:right], lengths, right >= len(samples_S), last)
            enc_BHT, enc_lengths = model(
                input_signal=buffer.samples, input_signal_length=buffer.context_size_batch.total()
            )
            enc_BTH = enc_BHT.transpose(1, 2)[:, buffer.context_size.subsample(frame).left :]
            context_frames = buffer.context_size_batch.subsample(frame)
            out = torch.where(last, enc_lengths - context_frames.left, context_frames.chunk)
            search = model.decoding.decoding.decoding_computer
            found, state = search(x=enc_BTH, out_len=out, prev_batched_state=state)
            hypotheses = found if hypotheses is None else hypotheses.merge_(found)
            rest = rest - lengths
            left, right = right, min(right + size.chunk, len(samples_S))
        [hypothesis] = batched_hyps_to_hypotheses(hypotheses, batch_size=1)
        texts.append(model.tokenizer.ids_to_text(hypothesis.y_sequence.tolist()))
    return texts


@pytest.mark.parametrize(
    ("family", "head", "contexts"),
    [
        ("streaming", "rnnt", families.LOOK_AHEADS["large"]),
        slow("streaming-hybrid", "rnnt", [[70, 6]]),
        ("streaming-hybrid", "ctc", [[70, 13], [70, 1]]),
    ],
)
def test_cache_aware_texts_are_nemos_letter_by_letter(talkative, recordings, family, head, contexts):
    """Ours in a batch, NeMo's one by one."""
    model, theirs = load_model(str(talkative(family))), load_model(str(talkative(family))).eval()
    if head == "ctc":
        for one in (model, theirs):
            one.change_decoding_strategy(decoder_type="ctc", verbose=False)
    found = []
    for context in contexts:
        with evaluation_mode(model):
            found.append(stream_texts(model, *padded(recordings), tuple(context)))
        assert found[-1] == nemo_texts(theirs, recordings, context)
        assert all(len(set(text)) > 8 for text in found[-1][1:]), "the model has to say something"
    assert len(set(map(tuple, found))) == len(contexts), "each look-ahead hears something else"


@pytest.mark.parametrize("context", [(70, 7, 7), slow((70, 2, 3))])
def test_unified_texts_are_nemos_letter_by_letter(talkative, recordings, context):
    model, theirs = load_model(str(talkative("unified"))), load_model(str(talkative("unified"))).eval()
    with evaluation_mode(model):
        together = stream_texts(model, *padded(recordings), context)
    assert together == nemo_buffered_texts(theirs, recordings, list(context))
    assert all(len(set(text)) > 8 for text in together[1:])


@pytest.mark.parametrize("context", [(70, 1, 0), (70, 2, 0)])
def test_less_than_a_mel_frame_may_be_left_of_a_recording(talkative, recordings, context):
    model, frame = load_model(str(talkative("unified"))), 1280
    whole = 12 * frame
    short = [recordings[2][: whole + 100], recordings[2][:whole], recordings[2][:100]]
    with evaluation_mode(model):
        cut, exact, nothing = stream_texts(model, *padded(short), context)
        [alone] = stream_texts(model, *padded(short[:1]), context)
        [silent] = stream_texts(model, *padded(short[2:]), context)
    assert cut == alone == exact
    assert nothing == silent == ""


@pytest.mark.slow
def test_features_that_are_normalised_are_so_chunk_by_chunk_as_nemo_does_it(talkative, recordings):
    path = str(talkative("streaming", "per_feature"))
    model, theirs = load_model(path), load_model(path).eval()
    with evaluation_mode(model):
        together = stream_texts(model, *padded(recordings), (70, 6))
    assert together == nemo_texts(theirs, recordings, [70, 6], online=True)
    assert together != nemo_texts(theirs, recordings, [70, 6], online=False)
    assert normalizes_chunks(model)
    assert model.preprocessor.featurizer.normalize == "per_feature"


def test_the_text_grows_and_int16_is_the_same_sound(talkative, recordings):
    model = load_model(str(talkative("streaming")))
    audio_BS, lengths_B = padded(recordings[2:3])
    with evaluation_mode(model):
        texts = [texts_of(model, h.hypotheses)[0] for h in stream(model, audio_BS, lengths_B, (70, 6))]
        of_int16 = stream_texts(model, (audio_BS * 32768).round().to(torch.int16), lengths_B, (70, 6))
    assert len(texts) == pytest.approx(int(lengths_B) / RATE / 0.56, abs=1), "a chunk has 7 frames of 80 ms"
    assert len(set(texts)) > 3
    assert of_int16 == texts[-1:]


@pytest.mark.slow
def test_a_trained_models_texts_are_nemos_letter_by_letter(tmp_path):
    """The model of scripts/models/streaming_study.py after some of its steps, on recordings that it did not learn."""
    streaming_study.to_cache_aware(tmp_path / "untrained.nemo")
    streaming_study.train(tmp_path / "untrained.nemo", tmp_path / "run", steps=150)
    rows = [
        row
        for shard in sorted((ROOT / "examples" / "voice_prompts" / "data").glob("test-*.parquet"))
        for row in pq.read_table(shard).to_pylist()
    ]
    sounds = [soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")[0] for row in rows[:12]]
    clips = [torch.from_numpy(sound_S) for sound_S in sounds]
    model, theirs = load_model(str(tmp_path / "run")), load_model(str(tmp_path / "run")).eval()
    for context in streaming_study.LOOK_AHEADS:
        with evaluation_mode(model):
            texts = stream_texts(model, *padded(clips), tuple(context))
        assert texts == nemo_texts(theirs, clips, context)
        assert sum(len(text) for text in texts) > 100


# ---- the commands ---------------------------------------------------------------------------------------------------


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    from finetune.evaluate import main

    assert main([str(a) for a in arguments]) == code
    return capsys.readouterr()


def test_evaluate_by_look_ahead(talkative, clips, tmp_path, capsys, recordings):
    archive, file = talkative("streaming"), tmp_path / "result.json"
    options = ("--data", clips / "manifest.jsonl", "--max-samples", 6, "--batch-size", 4, "--json", file)
    said, _ = evaluate(capsys, "--model", archive, *options, "--look-ahead", "13,0")
    result = json.loads(file.read_text())
    assert result["att_context_size"] == [70, 13]
    assert result["online_normalization"] is False
    wide, narrow = result["streaming"]
    assert (wide["look_ahead"], wide["att_context_size"], wide["latency_ms"]) == ("13", [70, 13], 1120)
    assert (narrow["look_ahead"], narrow["att_context_size"], narrow["look_ahead_ms"]) == ("0", [70, 0], 0)
    assert wide["words"] == narrow["words"] == result["words"]
    assert wide["chunk_compute_ms"] > 0
    assert wide["wer_interval"][0] <= wide["wer"] <= wide["wer_interval"][1]
    assert [line.split()[0] for line in said.splitlines()[-4:]] == ["look-ahead", "offline", "13", "0"]
    _, error = evaluate(capsys, "--model", archive, *options, "--look-ahead", "5", code=2)
    assert "--look-ahead: the model was not trained with 5;" in error


def test_transcribe_prints_as_it_goes(talkative, tmp_path, capsys, recordings):
    from finetune.transcribe import main

    archive, talk = str(talkative("streaming")), tmp_path / "talk.wav"
    soundfile.write(talk, recordings[2].numpy(), RATE, subtype="FLOAT")
    assert main(["--model", archive, "--streaming", "--look-ahead", "6", str(talk), str(tmp_path / "none.wav")]) == 1
    grown, row, failed = capsys.readouterr().out.splitlines()
    model = load_model(archive)
    with evaluation_mode(model):
        [text] = stream_texts(model, *padded(recordings[2:3]), (70, 6))
    assert grown == text
    assert json.loads(row) == {"file": str(talk), "duration": round(len(recordings[2]) / RATE, 3), "text": text}
    assert "none.wav" in json.loads(failed)["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--look-ahead", "1"], "--look-ahead belongs to --streaming"),
        (["--streaming", "--timestamps"], "leave out --timestamps, --format"),
    ],
)
def test_transcribe_refuses_what_does_not_go_together(capsys, options, message):
    from finetune.transcribe import main

    with pytest.raises(SystemExit):
        main(["--model", "m.nemo", "talk.wav", *options])
    assert message in capsys.readouterr().err


def test_a_model_that_cannot_stream_is_told(tiny_model, clips, capsys):
    _, error = evaluate(
        capsys, "--model", tiny_model, "--data", clips / "manifest.jsonl", "--look-ahead", "all", code=2
    )
    assert "the model is no streaming model" in error
