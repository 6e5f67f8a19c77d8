"""Exported directories in the runtimes that they are made for: onnx-asr and sherpa-onnx, on the CPU.

F mel bins, T mel or encoder frames, H width of the encoder or outputs of a CTC head, S samples.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import UserError
from finetune.tools.export import PRECISIONS, RUNTIMES
from finetune.tools.export.layouts import PARTS, suffix_of
from finetune.tools.export.online import cut_of_metadata
from finetune.tools.export.sherpa_features import SHIFT, online_features, sherpa_features, with_nemos_guard

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from finetune.tools.export.online import Cut

EXTRA = "pip install -c constraints.txt -e '.[export]'"
TRANSDUCER = ("encoder", "decoder", "joiner")
SAMPLE_RATE = 16000
"""Hz, of the audio that the exports take."""


class Exported(ABC):
    """An exported directory, loaded by its runtime.

    Attributes:
        directory: where it is.
        to: onnx or sherpa.
        runtime, version: the package that decodes, such as onnx-asr, and its version.
        precision: fp32, fp16 or int8, as the files' names say.
        kind: tdt, rnnt or ctc.
        sample_rate: of the audio that `texts` takes, in Hz.
        bytes_on_disk: of all files in the directory.
        load_seconds: that the runtime took to load the model, without importing its package.
    """

    to: str
    has_nemo_features = True

    def __init__(self, directory: Path, precision: str, threads: int) -> None:
        self.directory, self.precision, self.threads = directory, precision, threads
        self.runtime = RUNTIMES[self.to]
        check_installed(self.runtime)
        self.version = importlib.metadata.version(self.runtime)
        self.kind, self.sample_rate = "", SAMPLE_RATE
        self.bytes_on_disk = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        started = time.perf_counter()
        self._load()
        self.load_seconds = time.perf_counter() - started

    @abstractmethod
    def _load(self) -> None: ...

    @abstractmethod
    def texts(self, audios: Sequence[np.ndarray], batch_size: int = 1) -> list[str]:
        """Return the runtime's own text of each recording, (S,) float32 in [-1, 1] at `sample_rate`; `batch_size` of
        them are decoded together. Less than 0.1 s has no text."""

    @abstractmethod
    def features(self, audio_S: np.ndarray) -> np.ndarray:
        """Return the (F, T) features that the runtime computes for a recording, so that NeMo can decode the same."""


class OnnxAsr(Exported):
    """A directory in the layout of onnx-asr."""

    to = "onnx"

    def _load(self) -> None:
        import onnx_asr
        import onnxruntime

        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        self.kind = str(config["model_type"]).rpartition("-")[2]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        self._model: Any = onnx_asr.load_model(
            config["model_type"],
            self.directory,
            quantization=None if self.precision == "fp32" else self.precision,
            sess_options=options,
            providers=["CPUExecutionProvider"],
        )

    def texts(self, audios: Sequence[np.ndarray], batch_size: int = 1) -> list[str]:
        found: list[str] = []
        for first in range(0, len(audios), batch_size):
            found += self._model.recognize(list(audios[first : first + batch_size]), sample_rate=self.sample_rate)
        return found

    def features(self, audio_S: np.ndarray) -> np.ndarray:
        mel_1FT, lengths_1 = self._model.asr._preprocessor(audio_S[None], np.array([len(audio_S)], dtype=np.int64))
        return mel_1FT[0, :, : lengths_1[0]]


class SherpaOnnx(Exported):
    """A directory in the layout of sherpa-onnx's offline recognisers of NeMo models."""

    to = "sherpa"
    has_nemo_features = False

    def _load(self) -> None:
        import sherpa_onnx

        ctc = (self.directory / f"model{suffix_of(self.precision)}.onnx").is_file()
        self.kind = "ctc" if ctc else "tdt"
        metadata = metadata_of(self.directory / self._encoder_file())
        if not ctc and "tdt" not in metadata.get("url", ""):
            self.kind = "rnnt"
        self._bins = int(metadata.get("feat_dim", 80))
        common: dict[str, Any] = {
            "tokens": str(self.directory / "tokens.txt"),
            "num_threads": self.threads,
            "sample_rate": self.sample_rate,
            "feature_dim": self._bins,
        }
        if ctc:
            model = str(self.directory / self._encoder_file())
            self._recognizer: Any = sherpa_onnx.OfflineRecognizer.from_nemo_ctc(model=model, **common)
            return
        parts = {part: str(self.directory / f"{part}{suffix_of(self.precision)}.onnx") for part in TRANSDUCER}
        self._recognizer = sherpa_onnx.OfflineRecognizer.from_transducer(
            **parts, model_type="nemo_transducer", **common
        )

    def _encoder_file(self) -> str:
        return f"{'model' if self.kind == 'ctc' else 'encoder'}{suffix_of(self.precision)}.onnx"

    def texts(self, audios: Sequence[np.ndarray], batch_size: int = 1) -> list[str]:
        found: list[str] = []
        for first in range(0, len(audios), batch_size):
            streams = []
            for audio_S in audios[first : first + batch_size]:
                stream = self._recognizer.create_stream()
                stream.accept_waveform(self.sample_rate, audio_S)
                streams.append(stream)
            self._recognizer.decode_streams(streams)
            found += [stream.result.text for stream in streams]
        return found

    def features(self, audio_S: np.ndarray) -> np.ndarray:
        return sherpa_features(audio_S, self._bins, self.kind)


class SherpaOnnxOnline(Exported):
    """A directory in the layout of sherpa-onnx's online recogniser of NeMo transducers, for one look-ahead."""

    to = "sherpa"
    has_nemo_features = False

    def _load(self) -> None:
        import sherpa_onnx

        metadata = metadata_of(self.directory / self._encoder_file())
        cut = cut_of_metadata(metadata)
        assert cut is not None
        self.kind, self.cut, self._bins = "rnnt", cut, int(metadata.get("feat_dim", 80))
        # In the files of others a window ends behind the next one's start.
        self._beyond = (int(metadata["window_size"]) - cut.window) * SHIFT
        parts = {part: str(self.directory / f"{part}{suffix_of(self.precision)}.onnx") for part in TRANSDUCER}
        self._recognizer: Any = sherpa_onnx.OnlineRecognizer.from_transducer(
            encoder=parts["encoder"],
            decoder=parts["decoder"],
            joiner=parts["joiner"],
            tokens=str(self.directory / "tokens.txt"),
            num_threads=self.threads,
            sample_rate=self.sample_rate,
            feature_dim=self._bins,
        )

    def _encoder_file(self) -> str:
        return f"encoder{suffix_of(self.precision)}.onnx"

    def texts(self, audios: Sequence[np.ndarray], batch_size: int = 1) -> list[str]:
        found: list[str] = []
        for first in range(0, len(audios), batch_size):
            streams = [self._stream_of([audio_S]) for audio_S in audios[first : first + batch_size]]
            while ready := [stream for stream in streams if self._recognizer.is_ready(stream)]:
                self._recognizer.decode_streams(ready)
            found += [self._recognizer.get_result(stream) for stream in streams]
        return found

    def text_of_blocks(self, blocks: Iterable[np.ndarray]) -> str:
        """Return the text of a recording of any length in blocks of samples, which is recognised as it comes."""
        return self._recognizer.get_result(self._stream_of(blocks, as_it_comes=True))

    def _stream_of(self, blocks: Iterable[np.ndarray], *, as_it_comes: bool = False) -> Any:
        stream, samples = self._recognizer.create_stream(), 0
        stream.accept_waveform(self.sample_rate, np.zeros(self.cut.lead, dtype=np.float32))
        for block_S in blocks:
            stream.accept_waveform(self.sample_rate, block_S)
            samples += len(block_S)
            while as_it_comes and self._recognizer.is_ready(stream):
                self._recognizer.decode_stream(stream)
        stream.accept_waveform(self.sample_rate, np.zeros(self.cut.tail(samples) + self._beyond, dtype=np.float32))
        stream.input_finished()
        while as_it_comes and self._recognizer.is_ready(stream):
            self._recognizer.decode_stream(stream)
        return stream

    def features(self, audio_S: np.ndarray) -> np.ndarray:
        return with_nemos_guard(self.raw_features(audio_S))

    def raw_features(self, audio_S: np.ndarray) -> np.ndarray:
        """Return the (F, T) features that the encoder's file gets of a recording with its tail."""
        whole_S = np.concatenate([np.zeros(self.cut.lead, dtype=np.float32), self.cut.with_tail(audio_S)])
        return online_features(whole_S, self._bins)[:, self.cut.skipped :]


def metadata_of(file: Path) -> dict[str, str]:
    """Return what an ONNX file says of itself."""
    return _metadata_of(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _metadata_of(file: Path, _changed: int) -> dict[str, str]:
    """Read a file once, which may have gigabytes."""
    import onnx

    header = onnx.load(str(file), load_external_data=False)
    return {entry.key: entry.value for entry in header.metadata_props}


def cut_of_directory(directory: Path, precision: str) -> Cut | None:
    """Return how a directory's online recogniser cuts recordings; None of one for whole recordings."""
    encoder = directory / f"encoder{suffix_of(precision)}.onnx"
    return cut_of_metadata(metadata_of(encoder)) if encoder.is_file() else None


def check_installed(package: str) -> None:
    """Raise UserError, with what to install, if a runtime cannot be imported."""
    try:
        __import__({"onnx-asr": "onnx_asr", "sherpa-onnx": "sherpa_onnx"}[package])
        __import__("onnxruntime")
    except ImportError as error:
        raise UserError(f"{package} cannot be imported: {error}. Install the extra `export`: {EXTRA}") from error


def layout_of(directory: Path) -> tuple[str, str] | None:
    """Return (onnx or sherpa, precision) of an exported directory; None for another, such as a Hugging Face one.

    Raises:
        UserError: it holds models of several precisions.
    """
    if (directory / "tokens.txt").is_file():
        to, stems = "sherpa", ("encoder", "model")
    elif (directory / "vocab.txt").is_file() and (directory / "config.json").is_file():
        to, stems = "onnx", ("encoder-model", "model")
    else:
        return None
    found = [p for p in PRECISIONS if any((directory / f"{stem}{suffix_of(p)}.onnx").is_file() for stem in stems)]
    if len(found) > 1:
        raise UserError(f"{directory} holds a model in {' and '.join(found)}: leave the files of one in it.")
    return (to, found[0]) if found else None


def is_ctc(directory: Path) -> bool:
    """Return whether an exported directory holds a CTC model, which is one file."""
    return any((directory / f"{PARTS['onnx']['model']}{suffix_of(p)}.onnx").is_file() for p in PRECISIONS)


def is_exported(directory: Path) -> bool:
    """Return whether a directory is one that `load_exported` loads."""
    return directory.is_dir() and layout_of(directory) is not None


def load_exported(directory: Path, threads: int = 1) -> Exported:
    """Load an exported directory in the runtime that it is made for.

    Args:
        directory: written by `python -m finetune.export --to onnx|sherpa`, or by others in the same layout.
        threads: of the runtime.

    Raises:
        UserError: it is no such directory, or the runtime is not installed.
    """
    layout = layout_of(directory) if directory.is_dir() else None
    if layout is None:
        raise UserError(f"{directory} is no directory of `python -m finetune.export --to onnx` or `--to sherpa`.")
    to, precision = layout
    if to == "onnx":
        return OnnxAsr(directory, precision, threads)
    kind = SherpaOnnx if cut_of_directory(directory, precision) is None else SherpaOnnxOnline
    return kind(directory, precision, threads)
