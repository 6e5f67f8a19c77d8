"""Log-mel features equal to NeMo's to the last bit, at less than NeMo's cost.

B batch, S samples, F mel bins, T frames, K frequencies.
"""

import torch

from finetune.models.protocols import Featurizer, Preprocessor

LEAST_DEVIATION = 1e-5  # that NeMo adds, so that silence is not divided by zero


def is_usual(featurizer: Featurizer) -> bool:
    """Return whether `log_mel` computes the features itself, as for all published Parakeet models."""
    f = featurizer
    plain = f.log and f.log_zero_guard_type == "add" and f.frame_splicing == 1
    return plain and not (f.exact_pad or f.use_grads or f.nb_augmentation_prob > 0)


@torch.no_grad()
def log_mel(
    preprocessor: Preprocessor,
    audio_BS: torch.Tensor,
    audio_lengths_B: torch.Tensor,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a NeMo `AudioToMelSpectrogramPreprocessor` does, which adds dither in training mode.

    NeMo sums the squares of real and imaginary part along a dimension of two, the slowest part of all on a CPU, and
    its normalization waits for a GPU. Settings that are not `is_usual` are left to NeMo. Call without autocast.

    Args:
        audio_BS: (B, S) float32 in [-1, 1], zero-padded.
        audio_lengths_B: (B,) samples.
        generator: of the dither; None: torch's own. No effect on settings that are not usual.

    Returns:
        (B, F, T) features, padded with the preprocessor's `pad_value`, and (B,) mel frames.
    """
    f = preprocessor.featurizer
    if not is_usual(f):
        return preprocessor(input_signal=audio_BS, length=audio_lengths_B)
    lengths_B = f.get_seq_len(audio_lengths_B)
    if f.training and f.dither > 0:
        noise_BS = torch.randn(audio_BS.shape, generator=generator, device=audio_BS.device)
        audio_BS = audio_BS + f.dither * noise_BS
    if f.preemph is not None:
        audio_BS = torch.cat((audio_BS[:, :1], audio_BS[:, 1:] - f.preemph * audio_BS[:, :-1]), dim=1)
        audio_BS = audio_BS.masked_fill(~_mask(audio_lengths_B, audio_BS.size(1)), 0.0)
    real_BKT, imaginary_BKT = torch.view_as_real(f.stft(audio_BS)).unbind(-1)
    power_BKT = (real_BKT * real_BKT).add_(imaginary_BKT * imaginary_BKT).sqrt_()  # NeMo takes the root as well
    if f.mag_power != 1.0:
        power_BKT = power_BKT.pow_(f.mag_power)
    mel_BFT = torch.matmul(f.fb.to(power_BKT.dtype), power_BKT)
    mel_BFT = mel_BFT.add_(f.log_zero_guard_value_fn(mel_BFT)).log_()
    mel_BFT = _normalized(mel_BFT, lengths_B, f.normalize)
    mel_BFT = mel_BFT.masked_fill_(~_mask(lengths_B, mel_BFT.size(2)).unsqueeze(1), f.pad_value)
    if f.pad_to > 0:
        mel_BFT = torch.nn.functional.pad(mel_BFT, (0, -mel_BFT.size(2) % f.pad_to), value=f.pad_value)
    return mel_BFT.to(preprocessor.dtype_sentinel_tensor.dtype), lengths_B


def _mask(lengths_B: torch.Tensor, size: int) -> torch.Tensor:
    return torch.arange(size, device=lengths_B.device) < lengths_B.unsqueeze(1)


def _normalized(mel_BFT: torch.Tensor, lengths_B: torch.Tensor, kind: str | None) -> torch.Tensor:
    """Return the features by mean and deviation over the frames of each clip, as `kind` says."""
    if kind != "per_feature":
        from nemo.collections.asr.parts.preprocessing.features import normalize_batch

        return normalize_batch(mel_BFT, lengths_B, kind)[0] if kind else mel_BFT
    mask_B1T = _mask(lengths_B, mel_BFT.size(2)).unsqueeze(1)
    frames_B1 = mask_B1T.sum(2)
    mean_BF = torch.where(mask_B1T, mel_BFT, 0.0).sum(2) / frames_B1
    mel_BFT = mel_BFT - mean_BF.unsqueeze(2)
    deviation_BF = torch.sqrt((torch.where(mask_B1T, mel_BFT, 0.0) ** 2).sum(2) / (frames_B1 - 1.0))
    deviation_BF = deviation_BF.masked_fill(deviation_BF.isnan(), 0.0) + LEAST_DEVIATION  # nan: of one frame
    return mel_BFT.div_(deviation_BF.unsqueeze(2))
