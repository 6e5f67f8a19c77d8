"""What onnx-asr and sherpa-onnx cannot decode as NeMo does, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.models.huggingface.layout import FIXED_PREPROCESSOR, feature_settings, preprocessor_settings
from finetune.models.look_ahead import CACHE_AWARE, is_unified, streaming_contexts
from finetune.models.nemo import chosen_head, pieces_of, tdt_durations
from finetune.tools.export import RUNTIMES

if TYPE_CHECKING:
    from finetune.models.protocols import AsrModel

BLANK = "<blk>"
FEATURES = (80, 128)
"""Mel bins that onnx-asr has filters for."""
MOST_FEATURES = 180
"""Mel bins up to which each of sherpa-onnx's filters holds a frequency; it ends the process above."""
SAMPLE_RATE = 16000


def check_expressible(model: AsrModel, to: str, name: str, *, online: bool = False) -> None:
    """Raise UserError with every reason why a runtime cannot decode the model's chosen head as NeMo does.

    Args:
        to: onnx or sherpa.
        name: of the model, for the message.
        online: chunk by chunk, with a look-ahead, in place of whole recordings.
    """
    reasons = [
        *_against_encoder(model, to, online=online),
        *_against_features(model, to, online=online),
        *_against_pieces(model, to),
    ]
    if chosen_head(model) == "transducer":
        reasons += _against_transducer(model)
    if online:
        reasons += _against_streaming(model)
    if reasons:
        raise UserError(
            f"--to {to}: {RUNTIMES[to]} cannot decode {name} as NeMo does:\n  "
            + "\n  ".join(reasons)
            + "\n--to nemo and --to hf are the other formats."
        )


def _against_streaming(model: AsrModel) -> list[str]:
    """sherpa-onnx has one online recogniser of NeMo models with NeMo's features, that of RNN-T with caches."""
    reasons = []
    if chosen_head(model) == "ctc":
        reasons.append(
            "a CTC head with --look-ahead: the online recogniser of CTC models has other features than NeMo"
        )
    elif tdt_durations(model):
        reasons.append("a TDT head with --look-ahead: the online recogniser reads each frame and knows no durations")
    if is_unified(model):
        reasons.append(
            "a unified model with --look-ahead: it has no caches, and encodes a window anew for each chunk. Without "
            "--look-ahead it is written for whole recordings"
        )
    return reasons


def _against_encoder(model: AsrModel, to: str, *, online: bool) -> list[str]:
    reasons = []
    if hasattr(model, "prompt_kernel"):
        reasons.append("it takes a language prompt with each recording, which the runtime has no input for")
    encoder = model.encoder
    if type(encoder).__name__ != "ConformerEncoder":
        return [*reasons, f"its encoder is a {type(encoder).__name__}, not a ConformerEncoder"]
    if encoder.self_attention_model != "rel_pos":
        reasons.append(
            f"encoder.self_attention_model: {encoder.self_attention_model}; only rel_pos, attention over the whole "
            "recording, is written as a graph"
        )
    seen = list(encoder.att_context_size)
    if online:
        pass  # its contexts are those that it streams with
    elif to == "sherpa" and encoder.att_context_style == CACHE_AWARE:
        known = ", ".join(streaming_contexts(model))
        reasons.append(
            f"encoder.att_context_size: it is a streaming model, and is written for one look-ahead: --look-ahead with "
            f"one of {known} (frames)"
        )
    elif (encoder.att_context_style != "regular" and not is_unified(model)) or any(side != -1 for side in seen):
        reasons.append(
            f"encoder.att_context_size: {seen}: it is a streaming model, and a graph here sees whole recordings"
        )
    if getattr(encoder, "reduction_position", None) is not None:
        reasons.append("encoder.reduction: frames are dropped between the layers")
    return reasons


def _against_features(model: AsrModel, to: str, *, online: bool) -> list[str]:
    """The runtimes compute the features themselves, with settings that a model cannot change. Online, nobody knows the
    whole recording that they would be normalised over."""
    config: Any = OmegaConf.to_container(model.cfg, resolve=True)
    settings, found = {"normalize": "per_feature", **preprocessor_settings(config)}, feature_settings(config)
    fixed = {
        **FIXED_PREPROCESSOR,
        "normalize": ("NA", None, "") if online else ("per_feature",),
        "highfreq": (None, settings["sample_rate"] / 2),
    }
    wanted = {"sampling_rate": SAMPLE_RATE, "win_length": 400, "hop_length": 160, "n_fft": 512, "preemphasis": 0.97}
    reasons = [
        f"preprocessor.{key}: {settings[key]!r}; the runtime's features have {values[0]!r}"
        for key, values in fixed.items()
        if settings.get(key, values[0]) not in values
    ]
    reasons += [
        f"preprocessor: {key.replace('_', ' ')} {found[key]}; the runtime's features have {value}"
        for key, value in wanted.items()
        if found[key] != value
    ]
    bins = found["feature_size"]
    if to == "onnx" and bins not in FEATURES:
        reasons.append(f"preprocessor.features: {bins}; onnx-asr has filters for {' and '.join(map(str, FEATURES))}")
    if to == "sherpa" and bins > MOST_FEATURES:
        reasons.append(f"preprocessor.features: {bins}; sherpa-onnx has at most {MOST_FEATURES}")
    return reasons


def _against_pieces(model: AsrModel, to: str) -> list[str]:
    pieces, processor = pieces_of(model), model.tokenizer.tokenizer
    reasons = []
    if wrong := [piece for piece in pieces if not piece or any(space in piece for space in " \t\n\v\f\r")]:
        reasons.append(f"tokens with white space, such as {wrong[0]!r}; a line of the token table has none")
    if BLANK in pieces:
        reasons.append(f"a token is named {BLANK}, as the blank is")
    if wrong := [piece for piece in pieces if "▁" in piece[1:] and piece.strip("▁")]:
        reasons.append(f"tokens of several words, such as {wrong[0]!r}")
    of_bytes = [i for i in range(len(pieces)) if processor.is_byte(i)]
    if of_bytes and to == "onnx":
        reasons.append(f"tokens of single bytes, such as {pieces[of_bytes[0]]!r}, which onnx-asr writes as they stand")
    return reasons


def _against_transducer(model: AsrModel) -> list[str]:
    reasons = []
    decoder: Any = model.decoder
    if type(decoder).__name__ != "RNNTDecoder":
        return [f"its prediction network is a {type(decoder).__name__}; the runtime carries the states of an LSTM"]
    if not decoder.blank_as_pad:
        reasons.append("decoder.blank_as_pad: false; the runtime starts with the blank as a token")
    lstm: Any = getattr(decoder.prediction["dec_rnn"], "lstm", None)
    if type(lstm).__name__ != "LSTM":
        reasons.append("decoder.normalization_mode: the prediction network is no plain LSTM")
    elif lstm.proj_size:
        reasons.append("decoder.prednet.rnn_hidden_size: the states of the LSTM differ in width")
    durations = tdt_durations(model)
    if durations and durations != tuple(range(len(durations))):
        reasons.append(
            f"durations {list(durations)}; the runtime takes the number of an output for its duration, so that only "
            f"{list(range(len(durations)))} can be"
        )
    decoding = model.cfg.decoding.get("model_type")
    if decoding == "multiblank":
        reasons.append("decoding.model_type: multiblank; the runtime has one blank")
    return reasons
