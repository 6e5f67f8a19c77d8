"""Exports for onnx-asr and sherpa-onnx, decoded by the runtimes themselves: families, batches, precisions, refusals.

S samples, F mel bins, T frames.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import probe_of_features
import pytest
import soundfile
import torch
from conftest import read_lines, slow
from export_cases import write_export
from onnx import numpy_helper

from finetune.errors import UserError
from finetune.evaluation.recognise import decode_encoded, evaluation_mode, recognise_batch
from finetune.models.loading import load_model
from finetune.models.nemo import set_head
from finetune.tools.export.gate.graph_parts import Graphs
from finetune.tools.export.layouts import whole_or_nothing, write_layout
from finetune.tools.export.onnx import graphs_of
from finetune.tools.export.precision import calibrate, quantize, rounded, save, sensitivities, size_of
from finetune.tools.export.refusals import check_expressible
from finetune.tools.export.runtimes import Exported, is_exported, load_exported
from finetune.tools.export.sherpa_features import online_features, sherpa_features
from finetune.tools.export.using import open_unchanged


@pytest.fixture(scope="module")
def audios(clips: Path) -> list[np.ndarray]:
    """Eight clips of different lengths."""
    rows = read_lines(clips / "manifest.jsonl")[::3]
    return [soundfile.read(clips / row["audio_filepath"], dtype="float32")[0] for row in rows]


def plain(text: str) -> str:
    """The text without spaces before marks, and with one name for the unknown piece."""
    text = re.sub(r"\s*(?:<unk>|⁇)\s*", "⁇", text)
    return " ".join(re.sub(r"\s+(?=[^\w\s])", "", text).split())


def texts_of_nemo(model: Any, audios: list[np.ndarray], exported: Exported | None = None) -> list[str]:
    """NeMo's texts, of its own features or of those of a runtime."""
    texts = []
    with evaluation_mode(model):
        for audio_S in audios:
            if exported is None:
                found = recognise_batch(model, torch.from_numpy(audio_S)[None], torch.tensor([len(audio_S)]))
            else:
                mel_1FT = torch.from_numpy(exported.features(audio_S))[None]
                lengths_1 = torch.tensor([mel_1FT.size(2)])
                found = decode_encoded(model, *model.encoder(audio_signal=mel_1FT, length=lengths_1))
            texts += [plain(hypothesis.text) for hypothesis in found]
    return texts


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("tdt", None),
        ("ctc", None),
        slow("rnnt", None),
        slow("tdt-english", None),
        slow("conformer-rnnt", None),
        slow("hybrid-tdt", "transducer"),
        slow("hybrid-tdt", "ctc"),
        slow("hybrid-rnnt", "transducer"),
        slow("hybrid-rnnt", "ctc"),
        slow("unified", None),
    ],
)
def test_texts_are_nemos(
    family: str, head: str | None, archive_of: Callable[..., Path], audios: list[np.ndarray], tmp_path: Path
) -> None:
    """onnx-asr gives NeMo's texts, sherpa-onnx those that NeMo has on sherpa-onnx's features; alone and in a batch."""
    archive = archive_of(family, speaking=True)
    model = load_model(str(archive))
    set_head(model, head)
    own = texts_of_nemo(model, audios)
    assert len(set(own)) > len(own) / 2  # random weights say something of each clip
    for to in ("onnx", "sherpa"):
        write_export(archive, tmp_path / to, to, head=head)
        exported = load_exported(tmp_path / to)
        assert exported.kind == ("ctc" if head == "ctc" else family.split("-")[-1].replace("english", "tdt")) or (
            family == "unified" and exported.kind == "rnnt"
        )
        found = exported.texts(audios)
        assert [plain(text) for text in found] == texts_of_nemo(model, audios, exported)
        assert exported.texts(audios, batch_size=len(audios)) == found
        if to == "onnx":
            assert [plain(text) for text in found] == own
        mel_FT = exported.features(audios[0])
        with evaluation_mode(model):
            enc_1HT, _ = model.encoder(
                audio_signal=torch.from_numpy(mel_FT)[None], length=torch.tensor([mel_FT.shape[1]])
            )
        if exported.kind != "ctc":
            np.testing.assert_allclose(Graphs(tmp_path / to, 1).encode(mel_FT), enc_1HT[0].T, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "to", "named"),
    [
        slow("prompt", "onnx", ["language prompt", "streaming"]),  # its tokenizer
        ("streaming", "sherpa", ["streaming", "--look-ahead with one of 13, 6, 1, 0"]),
        ("streaming", "onnx", ["streaming", "normalize: 'NA'"]),
        ("long-rnnt", "onnx", ["rel_pos_local_attn"]),
        ("stateless-tdt", "sherpa", ["StatelessTransducerDecoder"]),
    ],
)
def test_families_that_are_refused(
    family: str, to: str, named: list[str], archive_of: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        graphs_of(str(archive_of(family)), tmp_path, to)
    assert all(reason in str(refused.value) for reason in named)
    assert list(tmp_path.iterdir()) == []


def test_settings_that_are_refused(tiny_model: Path) -> None:
    """Features, tokens and durations that the runtime would take for others are named, all at once."""
    model: Any = load_model(str(tiny_model))
    check_expressible(model, "onnx", "it")
    model.cfg.preprocessor.update(features=64, window_size=0.032, sample_rate=8000, window="hamming")
    model.cfg.loss.tdt_kwargs.durations = [0, 1, 2, 4, 8]
    model.joint.vocabulary = ["<blk>", "a b", "▁in▁the", *model.joint.vocabulary[3:]]
    with pytest.raises(UserError) as refused:
        check_expressible(model, "onnx", "it")
    for reason in ("'hamming'", "8000", "win length 256", "features: 64", "[0, 1, 2, 4, 8]", "'a b'", "▁in▁the"):
        assert reason in str(refused.value)
    assert "<blk>, as the blank is" in str(refused.value)


def test_head_that_is_missing(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no CTC head"):
        graphs_of(str(tiny_model), tmp_path, "onnx", head="ctc")


@pytest.fixture(scope="module")
def graphs(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return graphs_of(str(tiny_model), tmp_path_factory.mktemp("graphs"), "onnx")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_precisions(precision: str, graphs: Any, tiny_model: Path, audios: list[np.ndarray], tmp_path: Path) -> None:
    """Files of fewer bytes that the runtime takes by their suffix, with encoder outputs near to float32's."""
    found = {}
    for one in ("fp32", precision):
        (tmp_path / one).mkdir()
        write_layout(graphs, tmp_path / one, "onnx", one)
        exported = load_exported(tmp_path / one)
        assert exported.precision == one
        found[one] = Graphs(tmp_path / one, 1).encode(exported.features(audios[0]))
        assert len(exported.texts(audios[:2])) == 2
    difference = float(np.abs(found[precision] - found["fp32"]).max() / np.abs(found["fp32"]).max())
    assert 0 < difference < {"fp16": 0.01, "int8": 0.2}[precision]
    files = [
        tmp_path / one / f"encoder-model{suffix}.onnx" for one, suffix in (("fp32", ""), (precision, f".{precision}"))
    ]
    whole, small = (sum(len(t.raw_data) for t in onnx.load(str(file)).graph.initializer) for file in files)
    assert small < {"fp16": 0.55, "int8": 0.45}[precision] * whole


@pytest.mark.slow
def test_sensitive_products_stay_in_float(graphs: Any, audios: list[np.ndarray], tmp_path: Path) -> None:
    """An outlier among weights makes their product the most sensitive; left out, the encoder is nearer to float32."""
    model = onnx.load(str(graphs.files["encoder"]))
    fixed = {tensor.name: tensor for tensor in model.graph.initializer}
    products = [n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in fixed]
    damaged = products[len(products) // 2]
    weight_KM = numpy_helper.to_array(fixed[damaged.input[1]]).copy()
    weight_KM[0] *= 300
    fixed[damaged.input[1]].CopyFrom(numpy_helper.from_array(weight_KM, damaged.input[1]))
    source = tmp_path / "encoder.onnx"
    onnx.save(model, str(source))
    rng = np.random.default_rng(0)
    feed = {"audio_signal": rng.standard_normal((1, 80, 200)).astype(np.float32), "length": np.array([200])}
    found = sensitivities(source, [feed])
    assert len(found) == len(products)
    assert next(iter(found)) == damaged.name
    assert list(found.values()) == sorted(found.values(), reverse=True)

    def outputs(path: Path) -> np.ndarray:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)[0]

    exact, whole = outputs(source), outputs(quantize(source, tmp_path / "whole.onnx"))
    mixed = outputs(quantize(source, tmp_path / "mixed.onnx", {damaged.name}))
    assert np.abs(mixed - exact).mean() < 0.7 * np.abs(whole - exact).mean()
    # Static: in ranges of the same signal nearly as near, in those of silence far off.
    errors = {}
    for name, factor in (("signal", 1), ("silence", 0)):
        ranges = tmp_path / f"{name}.json"
        calibrate(source, ranges, [{**feed, "audio_signal": feed["audio_signal"] * np.float32(factor)}])
        static = outputs(quantize(source, tmp_path / "static.onnx", {damaged.name}, ranges))
        errors[name] = np.abs(static - exact).mean()
    assert errors["signal"] < 2 * np.abs(mixed - exact).mean()
    assert errors["signal"] < 0.8 * errors["silence"]


def test_rounding_keeps_zero_and_extremes() -> None:
    x = np.array([[0.0, -1.0, 3.0], [0.5, 0.25, 0.0]], dtype=np.float32)
    for axis in (None, 0):
        assert (rounded(x, axis)[x == 0] == 0).all()
        assert np.abs(rounded(x, axis) - x).max() < 4 / 255


def test_weights_beyond_protobuf_lie_beside_the_graph(graphs: Any, audios: list[np.ndarray], tmp_path: Path) -> None:
    """With the limit at 10 kB the tiny model is written as one of gigabytes is, and the runtime finds the weights."""
    write_layout(graphs, tmp_path, "onnx", "fp32")
    texts = load_exported(tmp_path).texts(audios)
    file = tmp_path / "encoder-model.onnx"
    before = size_of(file)
    save(onnx.load(str(file)), file, whole=10_000)
    assert (tmp_path / "encoder-model.onnx.data").stat().st_mode == file.stat().st_mode
    assert abs(size_of(file) - before) < 0.1 * before
    written = size_of(file)
    save(onnx.load(str(file)), file, whole=10_000)
    assert size_of(file) == written, "weights are written in place of those of before"
    assert load_exported(tmp_path).texts(audios) == texts


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def fill_the_disk() -> None:
        with whole_or_nothing(output) as aside:
            (aside / "encoder.onnx").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        fill_the_disk()
    assert list(tmp_path.iterdir()) == []
    output.mkdir()
    (output / "mine").touch()
    with pytest.raises(UserError, match="not empty"), whole_or_nothing(output):
        raise AssertionError("nothing is written")
    assert [file.name for file in output.iterdir()] == ["mine"]


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "volume")
    with pytest.raises(UserError, match="is a mount point"), whole_or_nothing(tmp_path / "volume"):
        raise AssertionError("nothing is written")


@pytest.mark.parametrize("damage", [{"encoder-model.onnx": b"junk"}, {"config.json": b"{}"}])
def test_damaged_exports_are_one_message(graphs: Any, tmp_path: Path, damage: dict[str, bytes]) -> None:
    write_layout(graphs, tmp_path, "onnx", "fp32")
    for name, content in damage.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="cannot be loaded"):
        open_unchanged(tmp_path, 1)


def test_directories_that_are_no_exports(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "parakeet_tdt"}))
    assert not is_exported(tmp_path)
    assert not is_exported(tmp_path / "gone")
    with pytest.raises(UserError, match="is no directory of"):
        load_exported(tmp_path)


@pytest.mark.parametrize("kind", ["tdt", "ctc", "online"])
def test_features_are_those_of_the_installed_sherpa_onnx(kind: str, tmp_path: Path) -> None:
    """A recogniser whose tokens are the digits of its features reads them out of sherpa-onnx."""
    audio_S = np.random.default_rng(0).standard_normal(4321).astype(np.float32) * 0.1
    audio_S[1500:2500] *= 1e-4  # so that the guard of the logarithm matters
    read_FT = probe_of_features.read(audio_S, kind, tmp_path)
    read = ~np.isnan(read_FT)
    assert read.sum() >= 4 * read_FT.shape[1]
    found_FT = online_features(audio_S, 80) if kind == "online" else sherpa_features(audio_S, 80, kind)
    found_FT = found_FT[:, : read_FT.shape[1]]  # the online recogniser leaves the last frame
    np.testing.assert_allclose(found_FT[read], read_FT[read], atol=1e-4)
