"""Read the features that sherpa-onnx computes out of it, which it gives no access to: by a recogniser without any
weights whose tokens are the features, two digits to the base of BASE each.

F mel bins, T frames.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import sherpa_onnx
from onnx import TensorProto, helper, numpy_helper

BINS, BASE = 80, 2048
LOW, HIGH = -16.0, 16.0  # that a feature lies between
FLOAT, INT32, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def read(audio_S: np.ndarray, kind: str, folder: Path) -> np.ndarray:
    """Return the (F, T) features that sherpa-onnx computes for a tdt model, for an online one, or, in some
    of the bins, for a ctc model; nan in the others."""
    if kind == "online":
        return _of_online(audio_S, folder)
    return _of_transducer(audio_S, folder) if kind == "tdt" else _of_ctc(audio_S, folder)


def _value(digits_xx2: np.ndarray) -> np.ndarray:
    return LOW + (digits_xx2[..., 0] + (digits_xx2[..., 1] + 0.5) / BASE) * (HIGH - LOW) / BASE


def _digits(source: str, target: str) -> list[Any]:
    """Nodes that append two digits to values, along a new last axis."""
    return [
        helper.make_node("Sub", [source, "low"], ["above"]),
        helper.make_node("Mul", ["above", "steps"], ["scaled"]),
        helper.make_node("Floor", ["scaled"], ["first"]),
        helper.make_node("Sub", ["scaled", "first"], ["rest"]),
        helper.make_node("Mul", ["rest", "base"], ["rest_scaled"]),
        helper.make_node("Floor", ["rest_scaled"], ["second"]),
        helper.make_node("Unsqueeze", ["first", "last_axis"], ["first_1"]),
        helper.make_node("Unsqueeze", ["second", "last_axis"], ["second_1"]),
        helper.make_node("Concat", ["first_1", "second_1"], [target], axis=-1),
    ]


def _constants(**others: Any) -> list[Any]:
    values = {
        "low": np.float32(LOW),
        "steps": np.float32(BASE / (HIGH - LOW)),
        "base": np.float32(BASE),
        "last_axis": np.array([-1]),
        **others,
    }
    return [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]


def _write(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], constants: list[Any], **metadata: Any):
    graph = helper.make_graph(nodes, "probe", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, str(value)
    onnx.save(model, str(path))


def _write_decoder(folder: Path) -> None:
    """A prediction network whose output is its input."""
    value = helper.make_tensor_value_info
    states = [value(f"state_{i}", FLOAT, [1, "b", 1]) for i in range(4)]
    _write(
        folder / "decoder.onnx",
        [
            helper.make_node("Cast", ["targets"], ["cast"], to=FLOAT),
            helper.make_node("Unsqueeze", ["cast", "axis"], ["outputs"]),
            helper.make_node("Identity", ["target_length"], ["prednet_lengths"]),
            helper.make_node("Identity", ["state_0"], ["state_2"]),
            helper.make_node("Identity", ["state_1"], ["state_3"]),
        ],
        [value("targets", INT32, ["b", "u"]), value("target_length", INT32, ["b"]), *states[:2]],
        [value("outputs", FLOAT, ["b", 1, "u"]), value("prednet_lengths", INT32, ["b"]), *states[2:]],
        _constants(axis=np.array([1])),
    )


def _of_transducer(audio_S: np.ndarray, folder: Path) -> np.ndarray:
    """A TDT model with an encoder frame for each digit, each of them a token of duration 1."""
    value = helper.make_tensor_value_info
    _write(
        folder / "encoder.onnx",
        [
            helper.make_node("Transpose", ["audio_signal"], ["mel"], perm=[0, 2, 1]),
            *_digits("mel", "digits"),
            helper.make_node("Reshape", ["digits", "flat"], ["outputs"]),
            helper.make_node("Mul", ["length", "digits_a_frame"], ["encoded_lengths"]),
        ],
        [value("audio_signal", FLOAT, ["b", BINS, "t"]), value("length", INT64, ["b"])],
        [value("outputs", FLOAT, ["b", 1, "n"]), value("encoded_lengths", INT64, ["b"])],
        _constants(flat=np.array([1, 1, -1]), digits_a_frame=np.array(2 * BINS)),
        vocab_size=BASE,
        normalize_type="per_feature",
        subsampling_factor=1,
        model_type="EncDecRNNTBPEModel",
        url="tdt",
        feat_dim=BINS,
        pred_rnn_layers=1,
        pred_hidden=1,
    )
    _write_decoder(folder)
    _write(
        folder / "joiner.onnx",
        [
            helper.make_node("Unsqueeze", ["encoder_outputs", "last_axis"], ["digit"]),
            helper.make_node("Sub", ["digit", "numbers"], ["apart"]),
            helper.make_node("Mul", ["apart", "apart"], ["square"]),
            helper.make_node("Neg", ["square"], ["near"]),
            helper.make_node("Concat", ["near", "blank_and_durations"], ["logits"], axis=3),
            helper.make_node("Mul", ["decoder_outputs", "zero"], ["nothing"]),
            helper.make_node("Add", ["logits", "nothing"], ["outputs"]),
        ],
        [value("encoder_outputs", FLOAT, ["b", 1, 1]), value("decoder_outputs", FLOAT, ["b", 1, 1])],
        [value("outputs", FLOAT, ["b", 1, 1, BASE + 3])],
        _constants(
            numbers=np.arange(BASE, dtype=np.float32).reshape(1, 1, 1, -1),
            blank_and_durations=np.array([-1e9, 0, 1], dtype=np.float32).reshape(1, 1, 1, -1),
            zero=np.float32(0),
        ),
    )
    (folder / "tokens.txt").write_text("".join(f"t{i} {i}\n" for i in range(BASE)) + f"<blk> {BASE}\n")
    parts = {part: str(folder / f"{part}.onnx") for part in ("encoder", "decoder", "joiner")}
    recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
        **parts, tokens=str(folder / "tokens.txt"), model_type="nemo_transducer", feature_dim=BINS
    )
    return _value(_tokens(recognizer, audio_S).reshape(-1, BINS, 2)).T


def _of_online(audio_S: np.ndarray, folder: Path) -> np.ndarray:
    """An RNN-T model that hears windows of one mel frame, with an encoder frame for each digit. Digits at odd places
    have tokens of their own, so that the blank can follow a token as soon as it is written."""
    value, window, tokens = helper.make_tensor_value_info, 1, 2 * BASE
    caches = [value(f"cache_{i}", FLOAT, ["b", 1, 1, 1]) for i in range(2)]
    _write(
        folder / "encoder.onnx",
        [
            helper.make_node("Transpose", ["audio_signal"], ["mel"], perm=[0, 2, 1]),
            *_digits("mel", "digits"),
            helper.make_node("Reshape", ["digits", "flat"], ["flat_digits"]),
            helper.make_node("Add", ["flat_digits", "offsets"], ["outputs"]),
            helper.make_node("Mul", ["length", "digits_a_frame"], ["encoded_lengths"]),
            *(helper.make_node("Identity", [f"cache_{i}"], [f"next_{i}"]) for i in range(3)),
        ],
        [
            value("audio_signal", FLOAT, ["b", BINS, "t"]),
            value("length", INT64, ["b"]),
            *caches,
            value("cache_2", INT64, ["b"]),
        ],
        [
            value("outputs", FLOAT, ["b", 1, "n"]),
            value("encoded_lengths", INT64, ["b"]),
            *(value(f"next_{i}", FLOAT, ["b", 1, 1, 1]) for i in range(2)),
            value("next_2", INT64, ["b"]),
        ],
        _constants(
            flat=np.array([1, 1, -1]),
            digits_a_frame=np.array(2 * BINS),
            offsets=np.tile(np.array([0, BASE], dtype=np.float32), BINS * window).reshape(1, 1, -1),
        ),
        vocab_size=tokens,
        window_size=window,
        chunk_shift=window,
        normalize_type="",
        subsampling_factor=1,
        pred_rnn_layers=1,
        pred_hidden=1,
        **{f"cache_last_{name}_dim{i}": 1 for name in ("channel", "time") for i in (1, 2, 3)},
    )
    _write_decoder(folder)
    _write(
        folder / "joiner.onnx",
        [
            helper.make_node("Unsqueeze", ["encoder_outputs", "last_axis"], ["digit"]),
            helper.make_node("Sub", ["digit", "numbers"], ["apart"]),
            helper.make_node("Mul", ["apart", "apart"], ["square"]),
            helper.make_node("Neg", ["square"], ["near"]),
            helper.make_node("Sub", ["encoder_outputs", "decoder_outputs"], ["new"]),
            helper.make_node("Mul", ["new", "new"], ["new_square"]),
            helper.make_node("Sub", ["half", "new_square"], ["blank"]),
            helper.make_node("Unsqueeze", ["blank", "last_axis"], ["blank_1"]),
            helper.make_node("Concat", ["near", "blank_1"], ["outputs"], axis=3),
        ],
        [value("encoder_outputs", FLOAT, ["b", 1, 1]), value("decoder_outputs", FLOAT, ["b", 1, 1])],
        [value("outputs", FLOAT, ["b", 1, 1, tokens + 1])],
        _constants(numbers=np.arange(tokens, dtype=np.float32).reshape(1, 1, 1, -1), half=np.float32(0.5)),
    )
    (folder / "tokens.txt").write_text("".join(f"t{i} {i}\n" for i in range(tokens)) + f"<blk> {tokens}\n")
    parts = {part: str(folder / f"{part}.onnx") for part in ("encoder", "decoder", "joiner")}
    recognizer = sherpa_onnx.OnlineRecognizer.from_transducer(
        **parts, tokens=str(folder / "tokens.txt"), feature_dim=BINS, num_threads=1
    )
    stream = recognizer.create_stream()
    stream.accept_waveform(16000, audio_S)
    stream.input_finished()
    while recognizer.is_ready(stream):
        recognizer.decode_stream(stream)
    digits = np.array([int(token[1:]) for token in recognizer.tokens(stream)], dtype=np.float64) % BASE
    return _value(digits.reshape(-1, BINS, 2)).T


def _of_ctc(audio_S: np.ndarray, folder: Path) -> np.ndarray:
    """CTC models with one digit of one bin a frame; frames of odd numbers have tokens of their own, so that none
    repeats."""
    value = helper.make_tensor_value_info
    (folder / "tokens.txt").write_text("".join(f"t{i} {i}\n" for i in range(2 * BASE)) + f"<blk> {2 * BASE}\n")
    found = np.full((BINS, (len(audio_S) + 80) // 160), np.nan)
    for mel_bin in (0, 1, 30, 79):
        digits = []
        for digit in (0, 1):
            _write(
                folder / "model.onnx",
                [
                    helper.make_node("Gather", ["audio_signal", "bin"], ["mel"], axis=1),
                    *_digits("mel", "digits"),
                    helper.make_node("Gather", ["digits", "digit"], ["one"], axis=2),
                    helper.make_node("Shape", ["one"], ["frames"], start=1, end=2),
                    helper.make_node("Squeeze", ["frames"], ["count"]),
                    helper.make_node("Range", ["zero", "count", "one_more"], ["numbers_of_frames"]),
                    helper.make_node("Mod", ["numbers_of_frames", "two"], ["odd"]),
                    helper.make_node("Cast", ["odd"], ["odd_float"], to=FLOAT),
                    helper.make_node("Mul", ["odd_float", "base"], ["offset"]),
                    helper.make_node("Add", ["one", "offset"], ["token"]),
                    helper.make_node("Unsqueeze", ["token", "last_axis"], ["token_1"]),
                    helper.make_node("Sub", ["token_1", "numbers"], ["apart"]),
                    helper.make_node("Mul", ["apart", "apart"], ["square"]),
                    helper.make_node("Neg", ["square"], ["near"]),
                    helper.make_node("Cast", ["length"], ["length_float"], to=FLOAT),
                    helper.make_node("ReduceSum", ["length_float"], ["sum"], keepdims=0),
                    helper.make_node("Mul", ["sum", "nothing"], ["no_length"]),
                    helper.make_node("Add", ["near", "no_length"], ["logprobs"]),
                ],
                [value("audio_signal", FLOAT, ["b", BINS, "t"]), value("length", INT64, ["b"])],
                [value("logprobs", FLOAT, ["b", "t", 2 * BASE + 1])],
                _constants(
                    bin=np.array(mel_bin),
                    digit=np.array(digit),
                    zero=np.array(0),
                    one_more=np.array(1),
                    two=np.array(2),
                    nothing=np.float32(0),
                    numbers=np.append(np.arange(2 * BASE), 1e6).astype(np.float32),
                ),
                vocab_size=2 * BASE,
                normalize_type="per_feature",
                subsampling_factor=1,
                model_type="EncDecCTCModelBPE",
            )
            recognizer = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(
                model=str(folder / "model.onnx"), tokens=str(folder / "tokens.txt"), feature_dim=BINS
            )
            digits.append(_tokens(recognizer, audio_S) % BASE)
        found[mel_bin] = _value(np.stack(digits, axis=-1))
    return found


def _tokens(recognizer: Any, audio_S: np.ndarray) -> np.ndarray:
    stream = recognizer.create_stream()
    stream.accept_waveform(16000, audio_S)
    recognizer.decode_stream(stream)
    return np.array([int(token[1:]) for token in stream.result.tokens], dtype=np.float64)
