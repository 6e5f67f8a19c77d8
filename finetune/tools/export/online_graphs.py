"""A cache-aware model's networks as the graphs that sherpa-onnx's online recogniser runs, chunk by chunk.

sherpa-onnx hands the encoder one window after the other, with three states that begin as zeros and whose shapes the
file says. NeMo's own export lets each window hold the mel frames before the chunk as well, and drops what the
subsampling makes of them, from the first window too: the first 160 ms of a recording are lost, and all chunks lie
elsewhere than in NeMo's inference. Here the states carry those frames, so that a window is a chunk.

B batch, F mel bins, T mel or encoder frames, H width, L layers, R rows of the convolutions' cache, C encoder frames of
the attention's cache, K frames of the convolutions' cache.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from finetune.tools.export.graphs import Encoder, Graphs, described, quiet, trace, trace_transducer, untyped
from finetune.tools.export.online import Cut, cut_of
from finetune.tools.export.sherpa_features import ABOVE, BELOW, FLOOR, GUARD

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.models.look_ahead import Context
    from finetune.models.protocols import AsrModel

STATES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")


class OnlineEncoder(torch.nn.Module):
    """A (B, F, T) window, (B,) lengths and the states -> (B, H, T) encoder outputs, (B,) lengths and the states.

    The states: (B, L, C, H) what the attention sees of before, (B, R, H, K) what the convolutions do, above it the mel
    frames that are carried, and (B,) encoder frames that were heard so far, up to C.
    """

    def __init__(self, model: AsrModel, cut: Cut, context: Context) -> None:
        super().__init__()
        self.encoder: Any = Encoder(model).encoder
        self.encoder.att_context_size = list(context)
        self.encoder.att_context_size_all = [list(context)]
        self.cut, self.features = cut, int(model.cfg.preprocessor.features)

    def forward(
        self,
        mel_BFT: torch.Tensor,
        lengths_B: torch.Tensor,
        channel_BLCH: torch.Tensor,
        time_BRHK: torch.Tensor,
        heard_B: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        cut, encoder, layers = self.cut, self.encoder, self.cut.channel[0]
        first_B11 = (heard_B == 0).view(-1, 1, 1)
        mel_BFT = _with_nemos_guard(mel_BFT)
        # Nothing is before a recording: not silence either, which has features of its own.
        mel_BFT = torch.where(first_B11 & (torch.arange(cut.window) < cut.skipped), torch.zeros(()), mel_BFT)
        carried_BN = time_BRHK[:, layers:].flatten(1)[:, : self.features * cut.carried]
        whole_BFT = torch.cat([carried_BN.view(-1, self.features, cut.carried), mel_BFT], dim=2)
        begin_BTH, _ = encoder.pre_encode(
            x=mel_BFT[:, :, cut.skipped :].transpose(1, 2), lengths=lengths_B - cut.skipped
        )
        later_BTH, _ = encoder.pre_encode(x=whole_BFT.transpose(1, 2), lengths=lengths_B + cut.carried)
        enc_BHT, frames_B, channel_LBCH, time_LBHK, heard_B = encoder.streaming_post_process(
            encoder.forward_internal(
                torch.where(first_B11, begin_BTH, later_BTH[:, cut.dropped :]),
                lengths_B // encoder.subsampling_factor,
                cache_last_channel=channel_BLCH.transpose(0, 1),
                cache_last_time=time_BRHK[:, :layers].transpose(0, 1),
                cache_last_channel_len=heard_B,
                bypass_pre_encode=True,
            )
        )
        kept_BN = whole_BFT[:, :, -cut.carried :].flatten(1)
        rows, width, frames = cut.time[0] - layers, cut.time[1], cut.time[2]
        kept_BN = torch.nn.functional.pad(kept_BN, (0, rows * width * frames - self.features * cut.carried))
        time_BRHK = torch.cat([time_LBHK.transpose(0, 1), kept_BN.view(-1, rows, width, frames)], dim=1)
        return enc_BHT, frames_B, channel_LBCH.transpose(0, 1), time_BRHK, heard_B


def _with_nemos_guard(mel_BFT: torch.Tensor) -> torch.Tensor:
    """What `finetune.tools.export.sherpa_features.with_nemos_guard` does."""
    heard_BFT = torch.where(mel_BFT > math.log(FLOOR * ABOVE), mel_BFT, torch.full((), math.log(BELOW)))
    return heard_BFT + (math.log(GUARD) - heard_BFT).exp().add(1).log()


def write_online_graphs(model: AsrModel, folder: Path, context: Context) -> Graphs:
    """Trace the networks of a cache-aware model with an RNN-T head into `folder`, for one of its contexts.

    The model is changed: keep no other use of it. What cannot be expressed is refused before, by
    `finetune.tools.export.refusals.check_expressible`.
    """
    model.eval().requires_grad_(False)
    cut, files = cut_of(model, context), dict[str, Any]()
    with torch.no_grad(), quiet(), untyped():
        layers, width = trace_transducer(model, files, folder, "sherpa")
        files["encoder"] = folder / "encoder.onnx"
        _trace_encoder(OnlineEncoder(model, cut, context), files["encoder"], cut)
    return described(model, files, layers, width, cut)


def _trace_encoder(module: OnlineEncoder, path: Path, cut: Cut) -> None:
    batch, generator = 2, torch.Generator().manual_seed(0)
    inputs = (
        torch.randn(batch, module.features, cut.window, generator=generator),
        torch.full((batch,), cut.window),
        torch.randn(batch, *cut.channel, generator=generator),
        torch.randn(batch, *cut.time, generator=generator),
        torch.tensor([0, 1]),
    )
    names = ["audio_signal", "length", *STATES]
    outputs = ["outputs", "encoded_lengths", *(f"{name}_next" for name in STATES)]
    trace(module, inputs, path, names, outputs, {name: {0: "batch"} for name in [*names, *outputs]})
