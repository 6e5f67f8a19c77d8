"""The features that sherpa-onnx computes for NeMo's models, which are not NeMo's.

They differ so that a text may differ by chance, as it does when a recording begins 5 ms later: each frame is centred
half a frame shift behind NeMo's, the window is Povey's (Hann's to the power of 0.85), a transducer's filters end at
7,600 Hz, and the deviation is divided by the number of frames. With these features in hand the networks and the
decoding of an export can be compared with NeMo's exactly. tests/tools/test_export_onnx.py reads the features of the
installed sherpa-onnx out and compares.

The online recogniser's are nearer: its window is Hann's, it normalises nothing, and with half a frame shift of
silence before the recording its frames are NeMo's. What is left is a window that lies half a sample beside NeMo's, and
energies below a floor, which it raises to it.

S samples, F mel bins, T frames, W samples of a window, K frequencies.
"""

from __future__ import annotations

import numpy as np

WINDOW, SHIFT, FOURIER = 400, 160, 512  # samples
RATE = 16000
PREEMPHASIS = 0.97
GUARD = 2.0**-24
LEAST_DEVIATION = 1e-5
HIGHEST = {"tdt": 7600.0, "rnnt": 7600.0, "ctc": 8000.0, "online": 8000.0}
"""Where the filters end, in Hz."""
FLOOR = 2.0**-23
"""Least energy of the online recogniser's features."""
ABOVE = 1.001
"""Times the floor, from which on an energy is heard."""
BELOW = FLOOR / 6
"""What an energy at the floor is taken for: the median of those below it in the sample data."""


def sherpa_features(audio_S: np.ndarray, bins: int, kind: str) -> np.ndarray:
    """Return the (F, T) float32 features of a recording, normalised by mean and deviation of each mel bin.

    Args:
        audio_S: in [-1, 1] at 16 kHz.
        bins: F.
        kind: tdt, rnnt or ctc.
    """
    mel_TF = np.log(_energies(audio_S, bins, kind) + GUARD)
    return ((mel_TF - mel_TF.mean(0)) / (mel_TF.std(0) + LEAST_DEVIATION)).T.astype(np.float32)


def online_features(audio_S: np.ndarray, bins: int) -> np.ndarray:
    """Return the (F, T) float32 features that the online recogniser hands to a model without a normalisation."""
    return np.log(np.maximum(_energies(audio_S, bins, "online"), FLOOR)).T.astype(np.float32)


def with_nemos_guard(mel_FT: np.ndarray) -> np.ndarray:
    """Return the online recogniser's features with the guard that NeMo adds to an energy; an export's graph does the
    same."""
    energy_FT = np.exp(mel_FT.astype(np.float64))
    return np.log(np.where(energy_FT > FLOOR * ABOVE, energy_FT, BELOW) + GUARD).astype(np.float32)


def _energies(audio_S: np.ndarray, bins: int, kind: str) -> np.ndarray:
    """(T, F) energies of the mel bins."""
    samples, frames = len(audio_S), (len(audio_S) + SHIFT // 2) // SHIFT
    index_TW = SHIFT * np.arange(frames)[:, None] + (SHIFT - WINDOW) // 2 + np.arange(WINDOW)
    index_TW %= 2 * samples  # beyond its ends the recording is mirrored
    windows_TW = audio_S.astype(np.float64)[np.where(index_TW < samples, index_TW, 2 * samples - 1 - index_TW)]
    windows_TW[:, 1:] -= PREEMPHASIS * windows_TW[:, :-1]
    windows_TW[:, 0] *= 1 - PREEMPHASIS
    power_TK = np.abs(np.fft.rfft(windows_TW * _window(kind), FOURIER)) ** 2
    return power_TK @ _filters(bins, HIGHEST[kind]).T


def _window(kind: str) -> np.ndarray:
    if kind in ("ctc", "online"):
        return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    return (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / (WINDOW - 1))) ** 0.85


def _filters(bins: int, highest: float) -> np.ndarray:
    """(F, K) triangles on Slaney's mel scale from 0 Hz to `highest`, of equal areas."""
    logstep = np.log(6.4) / 27
    top = 15 + np.log(highest / 1000) / logstep
    mel = np.linspace(0, top, bins + 2)
    hertz = np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * logstep))
    left, centre, right = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
    frequency_K = np.arange(FOURIER // 2 + 1) * RATE / FOURIER
    triangles_FK = np.minimum((frequency_K - left) / (centre - left), (right - frequency_K) / (right - centre))
    return np.maximum(triangles_FK, 0) * 2 / (right - left)
