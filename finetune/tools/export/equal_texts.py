"""Check that a Hugging Face directory is the same recogniser as its NeMo model: numbers and texts, on real clips.

B batch, S samples, T encoder frames, U tokens, V outputs of the head.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from finetune.data.batching import BatchLimits
from finetune.data.decode import as_float
from finetune.data.language_prompts import AUTO, prompt_of
from finetune.data.quarantine import BadUtterance
from finetune.errors import UserError
from finetune.evaluation.dataset import open_sources, stream_in_order
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.models.huggingface.layout import attention_contexts
from finetune.models.look_ahead import attending
from finetune.models.nemo import ctc_head
from finetune.models.prompts import slots_of, with_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from finetune.models.huggingface.layout import Kind
    from finetune.models.protocols import AsrModel

UNKNOWN_MARK = "⁇"  # with a space on both sides SentencePiece's text of the unknown piece; transformers has none
TOKENS_TRIED = 24  # random tokens a clip for the prediction network


@dataclass
class Samples:
    """Clips to compare two models on."""

    ids: list[str]
    audio: list[torch.Tensor]
    """(S,) float32 each."""
    texts: list[str]
    """References; empty for synthetic signals."""
    languages: list[str]
    """As the rows name them; for a prompt model the names of prompts."""
    source: str
    """Where they come from, for messages."""
    passed_over: int = 0
    """Clips that were skipped because they are too long."""


@dataclass
class Recognised:
    """Outputs of a model for the clips."""

    texts: list[str]
    encoder_TH: list[torch.Tensor] = field(default_factory=list)
    logits_TV: list[torch.Tensor] = field(default_factory=list)
    """Raw outputs of the CTC head, or of the joint along the straight line through the lattice of the clip's frames
    and some tokens."""
    stuck: list[int] = field(default_factory=list)
    """Most tokens in a row that were emitted for a clip without moving on to the next frame."""


class Clip(NamedTuple):
    """A clip of a data set."""

    id: str
    audio_S: torch.Tensor
    """float32."""
    text: str
    language: str
    source: str
    """Where it comes from, for messages."""


def each_clip(data: Any, split: str, rate: int, key: str = "--data", most: int = -1) -> Iterator[Clip]:
    """Read the usable clips of a data set in their order.

    Args:
        data: as data.validation of a run file.
        split: of a folder or hub data set.
        rate: sample rate in Hz.
        key: name of the setting, for messages.
        most: how many; -1: all.

    Raises:
        UserError: it cannot be opened or read.
    """
    sources = open_sources(data, split, key)
    limits = BatchLimits(clips=1)  # so that a long clip pads no other
    stream = stream_in_order(sources, rate, limits, max_samples=most, workers=0)
    source = sources[0].source.path + (" and others" if len(sources) > 1 else "")
    source = f"{source} ({sources[0].source.split or split})"
    for batch in stream.batches():
        if batch.error:
            raise UserError(f"{key}: {batch.error}", exit_code=1)
        if batch.ids:
            audio_S = as_float(batch.audio_BS[0, : int(batch.audio_lengths_B[0])]).clone()
            yield Clip(batch.ids[0], audio_S, batch.texts[0], batch.languages[0], source)


def read_samples(
    data: Any, split: str, rate: int, clips: int, key: str = "--data", longest: float | None = None
) -> Samples:
    """Read the first clips of a data set.

    Args:
        data: as data.validation of a run file.
        split: of a folder or hub data set.
        rate: sample rate in Hz.
        clips: how many; -1: all.
        key: name of the setting, for messages.
        longest: seconds; longer clips are skipped and counted.

    Raises:
        UserError: it cannot be opened, or has no usable clip.
    """
    samples = Samples([], [], [], [], "")
    for clip in each_clip(data, split, rate, key, most=clips if longest is None else -1):
        samples.source = clip.source
        if longest is not None and len(clip.audio_S) > longest * rate:
            samples.passed_over += 1
            continue
        samples.ids.append(clip.id)
        samples.audio.append(clip.audio_S)
        samples.texts.append(clip.text)
        samples.languages.append(clip.language)
        if len(samples.ids) == clips:
            break
    if not samples.ids:
        longer = samples.passed_over
        usable = f"of up to {longest:g} s ({longer} are longer). Give shorter ones." if longer else "that can be used."
        raise UserError(f"{key}: {data} holds no clip {usable}", exit_code=1)
    return samples


def synthetic_samples(rate: int, clips: int = 4) -> Samples:
    """Tones and noise of 1 to 4 s, always the same: they exercise the numbers, but give hardly any text."""
    generator = torch.Generator().manual_seed(0)
    audio = []
    for i in range(clips):
        time_S = torch.arange((i + 1) * rate) / rate
        tones = [torch.sin(2 * torch.pi * f * time_S) for f in (150.0 + 40 * i, 700.0, 1800.0 + 200 * i)]
        swell_S = 0.5 + 0.5 * torch.sin(2 * torch.pi * 3 * time_S)
        audio.append(
            0.1 * swell_S * sum(tones, torch.zeros(())) + 0.02 * torch.randn(len(time_S), generator=generator)
        )
    return Samples([f"synthetic-{i + 1}" for i in range(clips)], audio, [], [""] * clips, "synthetic signals")


def known_languages(languages: list[str], slots: Mapping[str, int]) -> list[str]:
    """Return the names of the prompts of languages; `auto`, or the first, where the model has none for one."""
    names = []
    for language in languages:
        try:
            names.append(prompt_of(language, slots))
        except BadUtterance:
            names.append(AUTO if AUTO in slots else next(iter(slots)))
    return names


def through_nemo(
    model: AsrModel, samples: Samples, batch: int, kind: Kind, context: list[int] | None = None
) -> Recognised:
    """Run NeMo's own modules on the clips, `batch` at a time.

    Args:
        context: [left, right] of a streaming encoder's attention; None: its default.
    """
    result = Recognised([])
    with evaluation_mode(model), attending(model.encoder, context):
        for first in range(0, len(samples.ids), batch):
            clips = samples.audio[first : first + batch]
            lengths_B = torch.tensor([len(a) for a in clips])
            audio_BS = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
            languages = samples.languages[first : first + batch]
            result.texts += [h.text for h in recognise_batch(model, audio_BS, lengths_B, languages)]
            mel_BFT, mel_lengths_B = model.preprocessor(input_signal=audio_BS, length=lengths_B)
            enc_BHT, enc_lengths_B = model.encoder(audio_signal=mel_BFT, length=mel_lengths_B)
            frames_B = enc_lengths_B.tolist()
            result.encoder_TH += [enc_BHT[i, :, :frames].T for i, frames in enumerate(frames_B)]
            enc_BHT = with_prompt(model, enc_BHT, slots_of(model, languages))
            if kind.head == "ctc":
                head = ctc_head(model)
                assert head is not None
                logits_BVT = head.decoder_layers(enc_BHT)
                result.logits_TV += [logits_BVT[i, :, :frames].T for i, frames in enumerate(frames_B)]
                continue
            tokens_BU = _tokens(model.tokenizer.vocab_size, range(first, first + len(clips)))
            pred_BHU, _, _ = model.decoder(
                targets=tokens_BU, target_length=torch.full((len(clips),), tokens_BU.size(1))
            )
            enc_BTH = model.joint.project_encoder(enc_BHT.transpose(1, 2))
            pred_BUH = model.joint.project_prednet(pred_BHU.transpose(1, 2))
            # The joint's own forward may return log probabilities on the CPU.
            result.logits_TV += [
                model.joint.joint_net(_line(enc_BTH[i, :frames], pred_BUH[i])) for i, frames in enumerate(frames_B)
            ]
    return result


def through_transformers(
    model: Any, processor: Any, samples: Samples, batch: int, kind: Kind, look_ahead: int | None = None
) -> Recognised:
    """Run a model of transformers and its processor on the clips, by `generate` with the saved generation settings.

    Args:
        look_ahead: frames of a streaming encoder; None: the processor's default.
    """
    result = Recognised([])
    rate = processor.feature_extractor.sampling_rate
    with torch.no_grad():
        for first in range(0, len(samples.ids), batch):
            clips = samples.audio[first : first + batch]
            prompt = {"language": samples.languages[first : first + batch]} if kind.prompt else {}
            inputs = processor([a.numpy() for a in clips], sampling_rate=rate, **prompt).to(model.dtype)
            if look_ahead is not None:
                inputs["num_lookahead_tokens"] = look_ahead
            if kind.head == "ctc":
                _through_ctc(model, processor, inputs, result)
            else:
                _through_transducer(model, processor, inputs, result, range(first, first + len(clips)))
    return result


def _through_ctc(model: Any, processor: Any, inputs: Any, result: Recognised) -> None:
    result.texts += processor.batch_decode(model.generate(**inputs), skip_special_tokens=True)
    encoded = model.encoder(**inputs)
    for hidden_TH, frames in zip(encoded.last_hidden_state, encoded.attention_mask.sum(-1).tolist(), strict=True):
        result.encoder_TH.append(hidden_TH[:frames])
        result.logits_TV.append(model.ctc_head(hidden_TH[None, :frames])[0])


def _through_transducer(model: Any, processor: Any, inputs: Any, result: Recognised, clips: range) -> None:
    output = model.generate(**inputs)
    result.texts += processor.batch_decode(output.sequences, skip_special_tokens=True)
    result.stuck += [_most_on_one_frame(*row) for row in zip(output.sequences, output.durations)]
    encoded, blank = model.get_audio_features(**inputs), model.config.blank_token_id
    start_B1 = torch.full((len(clips), 1), blank)
    pred_BUH = model.decoder(torch.cat([start_B1, _tokens(blank, clips)], dim=1))
    for i, frames in enumerate(encoded.attention_mask.sum(-1).tolist()):
        result.encoder_TH.append(encoded.last_hidden_state[i, :frames])
        sum_TH = _line(encoded.pooler_output[i, :frames], pred_BUH[i])
        result.logits_TV.append(model.joint.head(model.joint.activation(sum_TH)))


def _tokens(vocabulary: int, clips: range) -> torch.Tensor:
    """(B, U) random token ids for the clips with these numbers, the same in any batch."""
    rows = [np.random.default_rng(clip).integers(0, vocabulary, TOKENS_TRIED) for clip in clips]
    return torch.from_numpy(np.stack(rows))


def _line(enc_TH: torch.Tensor, pred_UH: torch.Tensor) -> torch.Tensor:
    """(T, H) sums at the cells on the diagonal of the lattice."""
    u_T = torch.linspace(0, len(pred_UH) - 1, len(enc_TH)).round().long()
    return enc_TH + pred_UH[u_T]


def _most_on_one_frame(tokens_U: torch.Tensor, durations_U: torch.Tensor) -> int:
    most = now = 0
    for duration in durations_U.tolist()[1 : len(tokens_U)]:
        now = now + 1 if duration == 0 else 0
        most = max(most, now)
    return most


def relative_difference(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Largest difference over all elements, in parts of the largest value; infinite if shapes differ."""
    largest, difference = 0.0, 0.0
    for one, other in zip(ones, others, strict=True):
        if one.shape != other.shape:
            return float("inf")
        difference = max(difference, float((one.float() - other.float()).abs().max()))
        largest = max(largest, float(one.float().abs().max()))
    return difference / largest if largest else difference


def same_text(one: str, other: str, with_tags: bool = False) -> bool:
    """Whether two texts are equal, apart from unknown pieces, and from white space around language tags that both
    left out."""
    if with_tags or UNKNOWN_MARK in one or UNKNOWN_MARK in other:
        one, other = (" ".join(f" {text} ".replace(f" {UNKNOWN_MARK} ", "").split()) for text in (one, other))
    return one == other


def load_written(directory: Path, dtype: torch.dtype, kind: Kind) -> tuple[Any, Any]:
    """Load model and processor of a directory, as a user does.

    Raises:
        UserError: transformers finds tensors missing, left over or of other shapes.
    """
    import transformers
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    auto_class = getattr(transformers, kind.auto_class)
    model, info = auto_class.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    wrong = {k: v for k, v in info.items() if v}
    if wrong:
        raise UserError(f"{directory}: transformers does not take all weights: {wrong}.", exit_code=1)
    return model.eval(), transformers.AutoProcessor.from_pretrained(directory)


@dataclass
class Agreement:
    """How closely two models agree."""

    encoder: float
    """Largest relative difference of encoder outputs."""
    logits: float
    """Largest relative difference of the outputs of joint or CTC head."""
    clips: int
    ways: list[str]
    """The ways of decoding that were compared."""
    said: int
    """Clips with a text."""
    unknown: int
    """Texts with the unknown piece's mark."""
    changed_by_rounding: list[tuple[str, str, str]] = field(default_factory=list)
    """Clips whose text differs in the written type: id, float32, written type."""


def compare(reference: AsrModel | None, directory: Path, samples: Samples, tolerance: float, kind: Kind) -> Agreement:
    """Compare a written directory with its NeMo model, single and batched, computed in float32.

    Args:
        reference: NeMo model with the written weights, or None if NeMo is not installed: transformers is then only
            compared with itself, single against batched.
        tolerance: largest relative difference of encoder outputs, and of the joint's or the CTC head's.

    Raises:
        UserError: they differ, with the clip's id and both texts.
    """
    model, processor = load_written(directory, torch.float32, kind)
    limit, many = getattr(model.config, "max_symbols_per_step", 0), len(samples.ids)
    groups: list[dict[str, Recognised]] = [{}]
    for way, batch in (("single", 1), ("batched", many)):
        if reference is not None:
            groups[0][f"NeMo {way}"] = through_nemo(reference, samples, batch, kind)
        groups[0][f"transformers {way}"] = through_transformers(model, processor, samples, batch, kind)
    if reference is not None and kind.streaming:
        for context in attention_contexts(reference.cfg)[1:]:
            way = f"with look-ahead {context[1]}"
            groups.append(
                {
                    f"NeMo {way}": through_nemo(reference, samples, many, kind, context),
                    f"transformers {way}": through_transformers(model, processor, samples, many, kind, context[1]),
                }
            )
    first = next(iter(groups[0].values()))
    said = sum(bool(text) for text in first.texts)
    unknown = sum(UNKNOWN_MARK in text for text in first.texts)
    agreement = Agreement(0.0, 0.0, many, [name for group in groups for name in group], said, unknown)
    problems = []
    for group in groups:
        (first_name, first), *others = group.items()
        for name, other in others:
            encoder = relative_difference(first.encoder_TH, other.encoder_TH)
            logits = relative_difference(first.logits_TV, other.logits_TV)
            agreement.encoder, agreement.logits = max(agreement.encoder, encoder), max(agreement.logits, logits)
            for what, found in (("encoder", encoder), (kind.head_name, logits)):
                if not found <= tolerance:
                    problems.append(
                        f"{what} outputs of {first_name} and {name} differ by {found:.2g} of the largest (allowed "
                        f"{tolerance:g})"
                    )
            for i, (text, other_text) in enumerate(zip(first.texts, other.texts, strict=True)):
                if same_text(text, other_text, kind.prompt):
                    continue
                problem = f"clip {samples.ids[i]}: {first_name} gives {text!r}, {name} gives {other_text!r}"
                if kind.head == "tdt" and other.stuck and other.stuck[i] > limit:
                    problem += (
                        f" (transformers emitted {other.stuck[i]} tokens on one frame; NeMo goes on after {limit}, "
                        "transformers never: the model is hardly trained)"
                    )
                problems.append(problem)
    if problems:
        more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
        listed = "\n  ".join([*problems[:6], *more])
        raise UserError(
            f"the written model is not the same on {samples.source}; nothing was kept:\n  {listed}", exit_code=1
        )
    return agreement
