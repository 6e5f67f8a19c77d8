"""Streaming models in sherpa-onnx's online recogniser: NeMo's cache-aware inference, chunk by chunk.

S samples, F mel bins, T frames, H width of the encoder.
"""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from conftest import read_lines
from export_cases import heard_by_the_server, write_export, write_release

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode
from finetune.evaluation.streaming import stream_texts
from finetune.models.loading import load_model
from finetune.models.look_ahead import attending, one_context
from finetune.models.nemo_archive import save_nemo
from finetune.tools.export.gate.graph_parts import Graphs
from finetune.tools.export.gate.one_parts import encode_features, text_of_encoded
from finetune.tools.export.layouts import write_layout
from finetune.tools.export.online import Cut, cut_of
from finetune.tools.export.onnx import graphs_of
from finetune.tools.export.runtimes import SherpaOnnxOnline, load_exported
from finetune.tools.export.sherpa_features import SHIFT


def archive(archive_of: Callable[..., Path], folder: Path) -> Path:
    """A model with random weights that writes a token every few frames."""
    path = folder / "streaming.nemo"
    if not path.is_file():
        model: Any = load_model(str(archive_of("streaming", "plain", speaking=True)))
        with torch.no_grad():
            model.joint.joint_net[-1].bias[-1] += 0.5
        save_nemo(model, path)
    return path


@pytest.fixture(scope="module")
def audios(clips: Path) -> list[np.ndarray]:
    rows = read_lines(clips / "manifest.jsonl")[::4]
    return [soundfile.read(clips / row["audio_filepath"], dtype="float32")[0] for row in rows]


@pytest.fixture(scope="module")
def case(archive_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An export with a look-ahead of one frame, with what is written beside it and a report with its files."""
    folder = tmp_path_factory.mktemp("online")
    model, directory = archive(archive_of, folder), folder / "export"
    graphs = write_release(model, directory, "sherpa", look_ahead="1")
    return SimpleNamespace(model=model, directory=directory, graphs=graphs, loaded=load_exported(directory))


# ---- the cut -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead", [0, 1, 13])
def test_a_tail_fills_the_last_of_nemos_chunks(look_ahead: int) -> None:
    """NeMo's first chunk is 8 k + 1 mel frames, each other one 8 (k + 1), and one frame more starts sherpa-onnx."""
    window = 8 * (look_ahead + 1)
    cut = Cut(look_ahead, window, 7, 9, 2, (1, 1, 1), (1, 1, 1))
    for samples in range(0, 3 * window * SHIFT, 997):
        whole = len(cut.with_tail(np.zeros(samples, dtype=np.float32)))
        assert samples + 200 <= whole < samples + 200 + window * SHIFT
        frames, rest = divmod(whole, SHIFT)
        assert rest == 0
        assert (frames - (8 * look_ahead + 1)) % window == 0
        ready = (cut.lead + whole + SHIFT // 2) // SHIFT
        assert ready % window == 1


# ---- the recogniser ------------------------------------------------------------------------------------------------


def letters(text: str) -> str:
    """A text without blanks and without the mark of the unknown piece, which the online recogniser leaves out."""
    return "".join(text.replace("\u2047", " ").split())


def check_against_nemo(exported: Any, model: Any, look_ahead: str, audios: list[np.ndarray]) -> None:
    """NeMo's encoder outputs and texts on sherpa-onnx's features; streams alone, in a batch, and in pieces."""
    assert isinstance(exported, SherpaOnnxOnline)
    context, graphs = one_context(model, look_ahead), Graphs(exported.directory, 1)
    assert exported.cut == cut_of(model, context)
    texts = []
    with evaluation_mode(model), attending(model.encoder, context):
        for audio_S in audios:
            enc_TH = encode_features(model, exported.features(audio_S), context)
            np.testing.assert_allclose(graphs.encode(exported.raw_features(audio_S)), enc_TH, atol=2e-5)
            texts.append(letters(text_of_encoded(model, enc_TH)))
    assert len(set(texts)) > len(texts) / 2
    assert list(map(letters, exported.texts(audios))) == texts
    assert list(map(letters, exported.texts(audios, batch_size=4))) == texts
    pieces = [np.array_split(audio_S, 11) for audio_S in audios]
    assert [letters(exported.text_of_blocks(blocks)) for blocks in pieces] == texts


def test_it_is_nemos_cache_aware_inference(case: SimpleNamespace, audios: list[np.ndarray]) -> None:
    check_against_nemo(case.loaded, load_model(str(case.model)), "1", audios)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "look_ahead"), [
    ("streaming", "0"), ("streaming", "6"), ("streaming", "13"), ("streaming-eou", "1"), ("streaming-hybrid", "13"),
])  # fmt: skip
def test_each_look_ahead(
    family: str, look_ahead: str, archive_of: Callable[..., Path], audios: list[np.ndarray], tmp_path: Path
) -> None:
    model = archive_of(family, speaking=True) if family != "streaming" else archive(archive_of, tmp_path)
    write_export(model, tmp_path / "out", "sherpa", look_ahead=look_ahead)
    check_against_nemo(load_exported(tmp_path / "out"), load_model(str(model)), look_ahead, audios)


def test_features_are_nearly_nemos(case: SimpleNamespace, audios: list[np.ndarray]) -> None:
    """With the silence before it a recording's frames are NeMo's; one frame beside them is far from it."""
    from finetune.evaluation.streaming import chunk_features

    model, [context] = load_model(str(case.model)), [(70, 1)]
    cut = cut_of(model, context)
    with evaluation_mode(model):
        for audio_S in audios[:3]:
            audio_1S = torch.from_numpy(cut.with_tail(audio_S))[None]
            mel_FT = chunk_features(model, audio_1S, torch.tensor([audio_1S.size(1)]))[0][0].numpy()
            found_FT = case.loaded.features(audio_S)
            heard = mel_FT[:, : found_FT.shape[1] - 1] > -12  # far above the floor
            near = np.abs(found_FT[:, :-1] - mel_FT[:, : found_FT.shape[1] - 1])[heard]
            apart = np.abs(found_FT[:, 1:-1] - mel_FT[:, : found_FT.shape[1] - 2])[heard[:, :-1]]
            assert near.mean() < 0.02 < 0.3 < apart.mean()


@pytest.mark.parametrize(("family", "look_ahead", "named"), [
    ("streaming", "5", "was not trained with 5; it was with the following (frames, look-ahead): 13, 6, 1, 0"),
    ("streaming", "13,6", "names several. Give one of 13, 6, 1, 0"),
    ("tdt-english", "1", "no streaming model"),
    ("unified", "7+7", "it has no caches"),
])  # fmt: skip
def test_look_aheads_that_are_refused(
    family: str, look_ahead: str, named: str, archive_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        graphs_of(str(archive_of(family)), tmp_path, "sherpa", look_ahead=look_ahead)
    assert named in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_heads_and_features_that_are_refused(archive_of: Callable[..., Path], tiny_model: Path) -> None:
    from finetune.models.nemo import set_head
    from finetune.tools.export.refusals import check_expressible

    model: Any = load_model(str(archive_of("streaming-hybrid")))
    check_expressible(model, "sherpa", "it", online=True)
    set_head(model, "ctc")
    model.cfg.preprocessor.normalize = "per_feature"
    with pytest.raises(UserError) as refused:
        check_expressible(model, "sherpa", "it", online=True)
    for reason in ("CTC head with --look-ahead", "preprocessor.normalize: 'per_feature'"):
        assert reason in str(refused.value)
    with pytest.raises(UserError, match="a TDT head with --look-ahead"):
        check_expressible(load_model(str(tiny_model)), "sherpa", "it", online=True)


# ---- in use --------------------------------------------------------------------------------------------------------


def test_transcribe_and_evaluate_take_it(
    case: SimpleNamespace, clips: Path, audios: list[np.ndarray], tmp_path: Path, capsys: Any
) -> None:
    from finetune.evaluate import main as evaluate
    from finetune.transcribe import main as transcribe

    audio_S = np.concatenate(audios[:3])
    soundfile.write(tmp_path / "long.wav", audio_S, 16000, subtype="FLOAT")
    capsys.readouterr()
    assert transcribe(["--model", str(case.directory), str(tmp_path / "long.wav"), "--chunk", "1"]) == 0
    [row] = map(json.loads, capsys.readouterr().out.splitlines())
    assert row["text"] == case.loaded.texts([audio_S])[0].strip() != ""
    file = tmp_path / "result.json"
    data = ["--data", str(clips / "manifest.jsonl"), "--max-samples", "4", "--workers", "0", "--json", str(file)]
    assert evaluate(["--model", str(case.directory), *data]) == 0
    result = json.loads(file.read_text())
    assert result["runtime"].startswith("sherpa-onnx ")
    assert result["clips"] == 4


def test_the_gate_compares_with_cache_aware_inference(case: SimpleNamespace, clips: Path, tmp_path: Path) -> None:
    """NeMo's side streams, and what differs is looked for part by part."""
    from finetune.tools.export.gate.gate import gather_clips
    from finetune.tools.export.gate.one_parts import compare_all
    from finetune.tools.export.gate.one_side import measure

    gathered = gather_clips([str(clips / "manifest.jsonl")], "validation", 16000, tmp_path / "clips", max_samples=4)
    request = {"clips": gathered.folder, "threads": 1, "batch": 2, "head": None, "tokenizer": None, "look_ahead": "1"}
    side = measure({**request, "kind": "nemo", "model": str(case.model)})
    model = load_model(str(case.model))
    context = one_context(model, "1")
    with evaluation_mode(model):
        for i, text in enumerate(side["texts"]):
            audio_1S = torch.from_numpy(cut_of(model, context).with_tail(gathered.audio(i)))[None]
            assert [text] == stream_texts(model, audio_1S, torch.tensor([audio_1S.size(1)]), context)
    request |= {"model": str(case.model), "chosen": [0, 1], "directory": str(case.directory)}
    states = {row["part"]: row["state"] for row in compare_all(request)}
    for part in ("token table", "settings", "encoder outputs", "decoder and joint"):
        assert states[part] == "equal", states
    assert "features" in states


def test_a_server_hears_a_recording_whole(case: SimpleNamespace, audios: list[np.ndarray], tmp_path: Path) -> None:
    """As the online recogniser does: its states go on beyond the 30 s that others hear at once."""
    from finetune.tools.serving.batcher import Batcher
    from finetune.tools.serving.models import ServedExport

    whole_S = np.tile(np.concatenate(audios), 8)[: 40 * 16000]
    assert len(whole_S) == 40 * 16000
    soundfile.write(tmp_path / "long.wav", whole_S, 16000, subtype="FLOAT")
    with Batcher({"online": ServedExport(case.loaded)}, 4) as batcher:
        row = batcher.transcribe("online", str(tmp_path / "long.wav"), None, 60.0, threading.Event())
    assert row["duration"] == 40
    assert row["text"] == case.loaded.texts([whole_S])[0] != ""


@pytest.mark.slow
def test_a_cut_that_is_not_the_models_is_named(case: SimpleNamespace, clips: Path, tmp_path: Path) -> None:
    import onnx

    from finetune.tools.export.gate.gate import gather_clips
    from finetune.tools.export.gate.one_parts import compare_all

    gathered = gather_clips([str(clips / "manifest.jsonl")], "validation", 16000, tmp_path / "clips", max_samples=1)
    request = {"clips": gathered.folder, "threads": 1, "head": None, "tokenizer": None, "look_ahead": "1"}
    request |= {"model": str(case.model), "chosen": [0]}
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in case.directory.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    encoder = onnx.load(str(broken / "encoder.onnx"))
    [entry] = [entry for entry in encoder.metadata_props if entry.key == "window_size"]
    entry.value = "24"
    onnx.save(encoder, str(broken / "encoder.onnx"))
    parts = {row["part"]: row for row in compare_all({**request, "directory": str(broken)})}
    assert "window_size is '24' in place of 16" in parts["settings"]["note"]


@pytest.mark.slow
def test_int8_ranks_its_layers_window_by_window(case: SimpleNamespace, clips: Path, tmp_path: Path) -> None:
    from finetune.tools.export.gate.gate import gather_clips
    from finetune.tools.export.gate.one_calibration import inputs_of
    from finetune.tools.export.gate.one_ranking import features_of, nodes_of, rank
    from finetune.tools.export.online import cut_of_metadata
    from finetune.tools.export.precision import calibrate

    gathered = gather_clips([str(clips / "manifest.jsonl")], "validation", 16000, tmp_path / "clips", max_samples=1)
    source = case.graphs.files["encoder"]
    request = {"model": str(case.model), "tokenizer": None, "clips": gathered.folder, "threads": 1, "chosen": [0]}
    request |= {"graph": str(source), "work": str(tmp_path), "online": case.graphs.online.metadata()}
    found = rank(request)
    assert {row["name"] for row in found} == set(nodes_of(source))
    assert all(row["harm"] > 0 for row in found)
    mels = features_of(request, cut_of_metadata(request["online"]))
    calibrate(source, tmp_path / "ranges.json", inputs_of(source, mels, 1, cut_of_metadata(request["online"])))
    for name, ranges in (("dynamic", None), ("static", tmp_path / "ranges.json")):
        (tmp_path / name).mkdir()
        write_layout(case.graphs, tmp_path / name, "sherpa", "int8", ranges=ranges)
        assert load_exported(tmp_path / name).texts([gathered.audio(0)])[0]
    assert rank({**request, "ranges": str(tmp_path / "ranges.json")}) != found


def wav_of(audio_S: np.ndarray, folder: Path) -> Path:
    soundfile.write(folder / "clip.wav", audio_S, 16000, subtype="PCM_16")
    return folder / "clip.wav"


@pytest.mark.slow
def test_the_example_prints_a_growing_text(case: SimpleNamespace, audios: list[np.ndarray], tmp_path: Path) -> None:
    wav = wav_of(np.concatenate(audios[:2]), tmp_path)
    program = case.directory / "example.py"
    done = subprocess.run(
        [sys.executable, "-I", program, wav], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert len(lines) > 3
    assert all(later.startswith(line) for line, later in itertools.pairwise(lines))
    assert lines[-1] == case.loaded.texts([soundfile.read(wav, dtype="float32")[0]])[0].strip()
    assert "finetune" not in program.read_text(encoding="utf-8")


def test_the_server_of_the_readme_answers_its_client(
    case: SimpleNamespace, audios: list[np.ndarray], tmp_path: Path
) -> None:
    wav = wav_of(audios[0], tmp_path)
    lines = heard_by_the_server(case.directory, wav, tmp_path).splitlines()
    heard = [json.loads(line)["text"].strip() for line in lines]
    # The server's tail of silence is longer, and a model with random weights says something of it.
    assert heard[-1].startswith(case.loaded.texts([soundfile.read(wav, dtype="float32")[0]])[0].strip())
