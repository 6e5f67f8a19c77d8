"""A NeMo model's networks as ONNX graphs in float32: encoder, prediction network, joint, CTC head.

The graphs are traced by torch's TorchScript exporter, as NeMo's own `model.export` does. torch's newer one (dynamo)
gives the same numbers, takes 25 times as long, and its shape guards promise nothing for clips of less than 9 mel
frames; NeMo's path through it calls functions that torch has removed.

B batch, F mel bins, T mel or encoder frames, U tokens, H width, L layers of the prediction network, V outputs.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from finetune.models.nemo import chosen_head, ctc_head, pieces_of, tdt_durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from finetune.models.protocols import AsrModel
    from finetune.tools.export.online import Cut

OPSET = 17
"""LayerNormalization as one node, and nothing newer than what the runtimes' own models use."""
TRACED_FRAMES = 233
"""Mel frames of the clip that is traced; no multiple of a subsampling factor."""


@dataclass(frozen=True)
class Graphs:
    """The float32 graphs of a model, and what a runtime has to be told of it.

    Attributes:
        files: by part: `encoder` and `decoder_joint` (onnx-asr), or `encoder`, `decoder` and `joiner` (sherpa-onnx),
            or `model` of a CTC head.
        kind: tdt, rnnt or ctc.
        pieces: tokens in the order of their ids, without the blank, which is the last.
        features: mel bins.
        normalize: as NeMo's preprocessor has it, such as `per_feature`.
        max_symbols: most tokens on one frame in NeMo's greedy decoding; None: no limit.
        layers, width: of the prediction network; 0 for a CTC head.
        online: how recordings are cut for an encoder that hears chunks; None: it hears whole recordings.
    """

    files: dict[str, Path]
    kind: str
    pieces: list[str]
    features: int
    sample_rate: int
    normalize: str
    subsampling_factor: int
    max_symbols: int | None
    layers: int = 0
    width: int = 0
    online: Cut | None = None


def write_graphs(model: AsrModel, folder: Path, to: str) -> Graphs:
    """Trace the networks of the model's chosen head (`finetune.models.nemo.set_head`) into `folder`.

    Args:
        to: onnx or sherpa, which call different parts.

    The model is changed: keep no other use of it. What has no ONNX form is refused before, by
    `finetune.tools.export.refusals.check_expressible`.
    """
    model.eval().requires_grad_(False)
    head, features = chosen_head(model), int(model.cfg.preprocessor.features)
    files: dict[str, Path] = {}
    with torch.no_grad(), quiet(), untyped():
        encoder = Encoder(model)
        if head == "ctc":
            files["model"] = folder / "model.onnx"
            _trace_encoder(_CtcModel(encoder, model, to), files["model"], features, ctc=True)
            layers = width = 0
        else:
            layers, width = trace_transducer(model, files, folder, to)
            files["encoder"] = folder / "encoder.onnx"
            _trace_encoder(encoder, files["encoder"], features, ctc=False)
    return described(model, files, layers, width)


def described(model: AsrModel, files: dict[str, Path], layers: int, width: int, online: Cut | None = None) -> Graphs:
    """Return graphs that are written, with what the model's configuration says of them.

    Args:
        layers, width: of the prediction network.
    """
    head, section = chosen_head(model), model.cfg.preprocessor
    greedy = model.cfg.decoding.get("greedy") or {} if head == "transducer" else {}
    return Graphs(
        files,
        "ctc" if head == "ctc" else "tdt" if tdt_durations(model) else "rnnt",
        pieces_of(model),
        int(section.features),
        int(section.sample_rate),
        str(section.normalize),
        model.encoder.subsampling_factor,
        greedy.get("max_symbols", greedy.get("max_symbols_per_step")),
        layers,
        width,
        online,
    )


class Encoder(torch.nn.Module):
    """(B, F, T) features and (B,) lengths -> (B, H, T) encoder outputs and (B,) lengths."""

    def __init__(self, model: AsrModel) -> None:
        super().__init__()
        encoder: Any = model.encoder
        encoder.use_pytorch_sdpa = False
        for layer in encoder.layers:
            layer.self_attn.use_pytorch_sdpa = False
            # A product of matrices is what runtimes quantise well, and what they compute fastest.
            layer.conv.pointwise_conv1 = _Pointwise(layer.conv.pointwise_conv1)
            layer.conv.pointwise_conv2 = _Pointwise(layer.conv.pointwise_conv2)
        encoder.pos_enc = _Positions(encoder)
        self.encoder = encoder

    def forward(self, mel_BFT: torch.Tensor, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        enc_BHT, enc_lengths_B = self.encoder.forward_internal(mel_BFT, lengths_B)[:2]
        return enc_BHT, enc_lengths_B


class _Positions(torch.nn.Module):
    """Relative positions, computed in the graph: NeMo's table would be half the bytes of a small model, and end a
    recording at its last row."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.xscale = encoder.pos_enc.xscale
        self.rate_H: torch.Tensor
        width = encoder.d_model
        exponent_H = torch.arange(0, width, 2, dtype=torch.float32)
        self.register_buffer("rate_H", torch.exp(exponent_H * -(torch.log(torch.tensor(10000.0)).item() / width)))

    def forward(self, x: torch.Tensor, cache_len: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        if self.xscale:
            x = x * self.xscale
        frames = x.size(1) + cache_len
        distance_T = torch.arange(frames - 1, -frames, -1, dtype=torch.float32, device=x.device)
        angle_TH = distance_T.unsqueeze(1) * self.rate_H
        return x, torch.stack((angle_TH.sin(), angle_TH.cos()), dim=2).flatten(1).unsqueeze(0)


class _Pointwise(torch.nn.Module):
    """A convolution of width 1 as a product of matrices."""

    def __init__(self, conv: torch.nn.Conv1d) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(conv.in_channels, conv.out_channels, bias=conv.bias is not None)
        self.linear.weight = torch.nn.Parameter(conv.weight.squeeze(2), requires_grad=False)
        if conv.bias is not None:
            self.linear.bias = torch.nn.Parameter(conv.bias, requires_grad=False)

    def forward(self, x_BHT: torch.Tensor) -> torch.Tensor:
        return self.linear(x_BHT.transpose(1, 2)).transpose(1, 2)


class _CtcModel(torch.nn.Module):
    """(B, F, T) features and (B,) lengths -> (B, T, V) log-probabilities."""

    def __init__(self, encoder: Encoder, model: AsrModel, to: str) -> None:
        super().__init__()
        self.encoder = encoder
        head: Any = ctc_head(model)
        self.head, self.temperature = _Pointwise(head.decoder_layers[0]), head.temperature
        self.factor = model.encoder.subsampling_factor if to == "sherpa" else 0

    def forward(self, mel_BFT: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        enc_BHT, enc_lengths_B = self.encoder(mel_BFT, lengths_B)
        log_probs_BTV = (self.head(enc_BHT).transpose(1, 2) / self.temperature).log_softmax(-1)
        if not self.factor:
            return log_probs_BTV
        return without_one_frame(log_probs_BTV, enc_lengths_B, lengths_B // self.factor)


def without_one_frame(log_probs_BTV: torch.Tensor, lengths_B: torch.Tensor, read_B: torch.Tensor) -> torch.Tensor:
    """Move the frames of a clip so that its text is in the first `read_B` of them.

    sherpa-onnx rounds the number of frames down and NeMo up, so that the last word would lose its end. In its place
    goes the last frame that adds nothing to the best path, mostly one of the silence behind: the label of the frame
    before it once more, or a blank between two labels that differ.
    """
    frames, blank = log_probs_BTV.size(1), log_probs_BTV.size(2) - 1
    frame_T = torch.arange(frames)
    inside_BT = frame_T < lengths_B.unsqueeze(1)
    labels_BT = log_probs_BTV.argmax(-1).masked_fill(~inside_BT, -1)
    before_BT = torch.nn.functional.pad(labels_BT, (1, 0), value=-1)[:, :-1]
    after_BT = torch.nn.functional.pad(labels_BT, (0, 1), value=-1)[:, 1:]
    idle_BT = (labels_BT == before_BT) | ((labels_BT == blank) & (before_BT != after_BT))
    idle_BT = idle_BT & inside_BT & (read_B < lengths_B).unsqueeze(1)
    gone_B1 = torch.where(idle_BT, frame_T, -1).amax(1, keepdim=True)
    gone_B1 = torch.where(gone_B1 >= 0, gone_B1, frames)
    source_BT = (frame_T + (frame_T >= gone_B1)).clamp(max=frames - 1)
    return log_probs_BTV.gather(1, source_BT.unsqueeze(2).expand_as(log_probs_BTV))


class _PredictionNetwork(torch.nn.Module):
    """(B, U) tokens and (L, B, H) states -> (B, H, U) outputs and states."""

    def __init__(self, model: AsrModel) -> None:
        super().__init__()
        prediction: Any = model.decoder.prediction
        self.embed, self.lstm = prediction["embed"], prediction["dec_rnn"].lstm

    def forward(
        self, targets_BU: torch.Tensor, target_length_B: torch.Tensor, h_LBH: torch.Tensor, c_LBH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        out_UBH, (h_LBH, c_LBH) = self.lstm(self.embed(targets_BU).transpose(0, 1), (h_LBH, c_LBH))
        return out_UBH.permute(1, 2, 0), target_length_B, h_LBH, c_LBH


class _Joint(torch.nn.Module):
    """(B, H, T) encoder and (B, H, U) prediction outputs -> (B, T, U, V): tokens, blank, durations; not normalised."""

    def __init__(self, model: AsrModel) -> None:
        super().__init__()
        self.enc, self.pred, self.joint_net = model.joint.enc, model.joint.pred, model.joint.joint_net

    def forward(self, enc_BHT: torch.Tensor, pred_BHU: torch.Tensor) -> torch.Tensor:
        enc_BT1H = self.enc(enc_BHT.transpose(1, 2)).unsqueeze(2)
        pred_B1UH = self.pred(pred_BHU.transpose(1, 2)).unsqueeze(1)
        return self.joint_net(enc_BT1H + pred_B1UH)


class _PredictionAndJoint(torch.nn.Module):
    """One step of greedy decoding, as onnx-asr calls it."""

    def __init__(self, prediction: _PredictionNetwork, joint: _Joint) -> None:
        super().__init__()
        self.prediction, self.joint = prediction, joint

    def forward(
        self,
        enc_BHT: torch.Tensor,
        targets_BU: torch.Tensor,
        target_length_B: torch.Tensor,
        h_LBH: torch.Tensor,
        c_LBH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        pred_BHU, lengths_B, h_LBH, c_LBH = self.prediction(targets_BU, target_length_B, h_LBH, c_LBH)
        return self.joint(enc_BHT, pred_BHU), lengths_B, h_LBH, c_LBH


def _trace_encoder(module: torch.nn.Module, path: Path, features: int, ctc: bool) -> None:
    mel_BFT = torch.randn(2, features, TRACED_FRAMES, generator=torch.Generator().manual_seed(0))
    lengths_B = torch.tensor([TRACED_FRAMES, TRACED_FRAMES // 2])
    axes: dict[str, dict[int, str]] = {"audio_signal": {0: "batch", 2: "time"}, "length": {0: "batch"}}
    if ctc:
        outputs, axes["logprobs"] = ["logprobs"], {0: "batch", 1: "frames"}
    else:
        outputs = ["outputs", "encoded_lengths"]
        axes |= {"outputs": {0: "batch", 2: "frames"}, "encoded_lengths": {0: "batch"}}
    trace(module, (mel_BFT, lengths_B), path, ["audio_signal", "length"], outputs, axes)


def trace_transducer(model: AsrModel, files: dict[str, Path], folder: Path, to: str) -> tuple[int, int]:
    """Trace prediction network and joint, apart (sherpa-onnx) or as one step (onnx-asr); return the network's layers
    and width."""
    prediction, joint = _PredictionNetwork(model), _Joint(model)
    layers, width = prediction.lstm.num_layers, prediction.lstm.hidden_size
    for name in ("decoder_joint",) if to == "onnx" else ("decoder", "joiner"):
        files[name] = folder / f"{name}.onnx"
    batch = 2
    enc_BHT = torch.randn(batch, joint.enc.in_features, 3)
    targets_BU = torch.zeros(batch, 4, dtype=torch.int32)
    target_length_B = torch.full((batch,), 4, dtype=torch.int32)
    states = (torch.zeros(layers, batch, width), torch.zeros(layers, batch, width))
    in_states, out_states = ["input_states_1", "input_states_2"], ["output_states_1", "output_states_2"]
    of_batch = {"targets": {0: "batch", 1: "tokens"}, "target_length": {0: "batch"}, "prednet_lengths": {0: "batch"}}
    of_batch |= {name: {1: "batch"} for name in in_states + out_states}
    of_joint = {"encoder_outputs": {0: "batch", 2: "frames"}, "outputs": {0: "batch", 1: "frames", 2: "tokens"}}
    if to == "onnx":
        trace(
            _PredictionAndJoint(prediction, joint),
            (enc_BHT, targets_BU, target_length_B, *states),
            files["decoder_joint"],
            ["encoder_outputs", "targets", "target_length", *in_states],
            ["outputs", "prednet_lengths", *out_states],
            of_batch | of_joint,
        )
        return layers, width
    trace(
        prediction,
        (targets_BU, target_length_B, *states),
        files["decoder"],
        ["targets", "target_length", *in_states],
        ["outputs", "prednet_lengths", *out_states],
        of_batch | {"outputs": {0: "batch", 2: "tokens"}},
    )
    pred_BHU = torch.randn(batch, joint.pred.in_features, 4)
    trace(
        joint,
        (enc_BHT, pred_BHU),
        files["joiner"],
        ["encoder_outputs", "decoder_outputs"],
        ["outputs"],
        of_joint | {"decoder_outputs": {0: "batch", 2: "tokens"}},
    )
    return layers, width


def trace(
    module: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    path: Path,
    input_names: Sequence[str],
    output_names: Sequence[str],
    axes: dict[str, dict[int, str]],
) -> None:
    torch.onnx.export(
        module.eval(),
        inputs,
        str(path),
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=axes,
        opset_version=OPSET,
        dynamo=False,
    )


@contextlib.contextmanager
def untyped() -> Iterator[None]:
    """NeMo's checks of neural types are no part of a graph."""
    from nemo.core.classes.common import typecheck

    typecheck.set_typecheck_enabled(enabled=False)
    try:
        yield
    finally:
        typecheck.set_typecheck_enabled(enabled=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A trace warns of each size that it reads, and its exporter of its own age."""
    with warnings.catch_warnings():
        for category in (torch.jit.TracerWarning, UserWarning, DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        logger = logging.getLogger("torch.onnx")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
