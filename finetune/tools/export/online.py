"""How a recording is cut for sherpa-onnx's online recogniser, so that each window is a chunk of NeMo's cache-aware
inference.

NeMo's first chunk is shorter than the others: a mel frame, and one more encoder frame's worth for each frame of
look-ahead. sherpa-onnx has windows of one size. So `skipped` frames of silence go before the recording, which the
graph leaves out of the first window, and every later window ends where NeMo's chunk does.

S samples, F mel bins, T mel or encoder frames, H width of the encoder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import UserError
from finetune.tools.export.sherpa_features import SHIFT, WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from finetune.models.look_ahead import Context
    from finetune.models.protocols import AsrModel

CENTRE = SHIFT // 2
"""Samples by which sherpa-onnx's frames lie behind NeMo's."""


@dataclass(frozen=True)
class Cut:
    """The windows of one look-ahead.

    Attributes:
        look_ahead: in encoder frames.
        window: mel frames of a window, from one to the next as well.
        skipped: of the first window, that are before the recording.
        carried: mel frames before a window that the subsampling needs.
        dropped: encoder frames that come of them, and that are not kept.
        channel: layers, encoder frames and width of the attention's cache.
        time: rows, width and frames of the convolutions' cache. A row is a layer's; those above the layers hold the
            carried mel frames.
    """

    look_ahead: int
    window: int
    skipped: int
    carried: int
    dropped: int
    channel: tuple[int, int, int]
    time: tuple[int, int, int]

    @property
    def lead(self) -> int:
        """Samples of silence to put before a recording."""
        return self.skipped * SHIFT + CENTRE

    def with_tail(self, audio_S: np.ndarray) -> np.ndarray:
        """Return a recording with as much silence behind it as the last chunk takes: at least 12.5 ms, so that
        sherpa-onnx, which mirrors a recording at its end, hears nothing there."""
        return np.pad(audio_S, (0, self.tail(len(audio_S))))

    def tail(self, samples: int) -> int:
        """Samples of silence to put behind a recording of `samples`."""
        window, skipped = self.window * SHIFT, self.skipped * SHIFT
        return window - 1 - (samples + WINDOW // 2 + skipped - 1) % window + WINDOW // 2

    def metadata(self) -> dict[str, int]:
        """Return what the encoder's file says of it: the keys that sherpa-onnx reads, and some of this project."""
        values = {"window_size": self.window, "chunk_shift": self.window}
        for name, shape in (("channel", self.channel), ("time", self.time)):
            values |= {f"cache_last_{name}_dim{i}": size for i, size in enumerate(shape, 1)}
        own = {key: value for key, value in asdict(self).items() if isinstance(value, int) and key != "window"}
        return values | own


def cut_of(model: AsrModel, context: Context) -> Cut:
    """Return how recordings are cut for a model with one of its contexts, and set the model's streaming to it.

    Raises:
        UserError: the subsampling's chunks are not those that a window can be.
    """
    encoder: Any = model.encoder
    encoder.setup_streaming_params(att_context_size=list(context))
    s, width = encoder.streaming_cfg, encoder.d_model
    sizes = (s.chunk_size, s.shift_size, s.pre_encode_cache_size)
    if not all(isinstance(size, list) for size in sizes) or s.chunk_size != s.shift_size or context[0] < 1:
        raise UserError(
            f"--look-ahead: chunks of {s.chunk_size} mel frames every {s.shift_size} frames, context {list(context)}: "
            "only subsampling by convolutions, and a left context of a fixed size, can be carried from one window to "
            "the next.",
            exit_code=1,
        )
    first, later = s.chunk_size
    carried, frames = s.pre_encode_cache_size[1], encoder.conv_context_size[0]
    rows = -(-int(model.cfg.preprocessor.features) * carried // (width * frames))
    layers = len(encoder.layers)
    channel, time = (layers, s.last_channel_cache_size, width), (layers + rows, width, frames)
    return Cut(context[1], later, later - first, carried, s.drop_extra_pre_encoded, channel, time)


def cut_of_metadata(said: Mapping[str, Any]) -> Cut | None:
    """Return the cut that an encoder's file says it is made for; None of a file for whole recordings.

    What the files of others do not say is as if nothing had to go before a recording.
    """
    if "window_size" not in said:
        return None
    channel, time = (
        (int(said[f"{name}_dim1"]), int(said[f"{name}_dim2"]), int(said[f"{name}_dim3"]))
        for name in ("cache_last_channel", "cache_last_time")
    )
    skipped, carried, dropped = (int(said.get(key, 0)) for key in ("skipped", "carried", "dropped"))
    return Cut(int(said.get("look_ahead", -1)), int(said["chunk_shift"]), skipped, carried, dropped, channel, time)


def encode_windows(session: Any, mel_FT: np.ndarray, cut: Cut) -> np.ndarray:
    """Return the (1, H, T) outputs of an encoder that hears chunks, window by window as sherpa-onnx runs it.

    Args:
        session: of onnxruntime.
        mel_FT: (F, T) features of a recording with its tail, without the frames before it.
    """
    return np.concatenate([out_1HT for _, out_1HT in run_windows(session, mel_FT, cut)], axis=2)


def run_windows(session: Any, mel_FT: np.ndarray, cut: Cut) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Yield the inputs of each window, states included, and its (1, H, T) outputs; arguments as `encode_windows`'."""
    names = [i.name for i in session.get_inputs()]
    shapes = (1, *cut.channel), (1, *cut.time)
    states = [*(np.zeros(shape, dtype=np.float32) for shape in shapes), np.zeros(1, dtype=np.int64)]
    mel_FT = np.pad(mel_FT, ((0, 0), (cut.skipped, 0)))
    for end in range(cut.window, mel_FT.shape[1] + 1, cut.window):
        window_1FT = np.ascontiguousarray(mel_FT[None, :, end - cut.window : end], dtype=np.float32)
        values = [window_1FT, np.array([cut.window]), *states]
        inputs = dict(zip(names, values, strict=True))
        out_1HT, _, *states = session.run(None, inputs)
        yield inputs, out_1HT
