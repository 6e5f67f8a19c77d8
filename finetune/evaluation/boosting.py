"""Evaluate a model with and without phrases and a language model, and choose their weights.

B batch, N utterances, K decodings.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from finetune.errors import UserError
from finetune.evaluation.comparison import by_occurrence
from finetune.evaluation.dataset import count_errors, describe, load_evaluated, open_sources, utterances_to
from finetune.evaluation.phrases import PhraseFinder, compare_phrases, count_phrases
from finetune.evaluation.recognise import CHUNKS_AT_ONCE, decode_encoded, encode_audio, recognise_long
from finetune.evaluation.scores import Utterance, WerAccumulator, score_pair
from finetune.evaluation.significance import block_names, compare_counts
from finetune.models.boosting import Boosting, boost
from finetune.models.nemo import chosen_head

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from finetune.data.batch import Batch
    from finetune.evaluation.dataset import EvaluationSettings
    from finetune.models.fusion import Fusion
    from finetune.models.protocols import AsrModel

BOOST_WEIGHTS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
LM_WEIGHTS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
"""What `choose_weights` tries."""


class Decodings:
    """The texts of several decodings of the same clips, which the encoder hears once.

    Args:
        weights: of the fusion, by decoding.
    """

    def __init__(self, model: AsrModel, fusion: Fusion, weights: Sequence[Sequence[float]], s: EvaluationSettings):
        self.model, self.fusion, self.settings = model, fusion, s
        self.weights = [list(own) for own in weights]
        self.utterances: list[list[Utterance]] = [[] for _ in weights]
        self.seconds = [0.0 for _ in weights]
        """Of each decoding, with the encoder's."""

    def recognise(self, batch: Batch) -> list[str]:
        """Decode a batch in each way, and return the texts of the first; call inside `evaluation_mode`."""
        s, lengths_B = self.settings, batch.audio_lengths_B
        languages = batch.languages if s.language is None else [s.language] * len(batch.ids)
        limit = int(s.chunk * self.model.preprocessor._sample_rate)
        short = torch.nonzero(lengths_B <= limit)[:, 0].tolist()
        encoded, shared = None, 0.0
        if short:
            whole, started = len(short) == len(lengths_B), time.perf_counter()
            audio_BS = batch.audio_BS if whole else batch.audio_BS[short, : int(lengths_B[short].max())]
            encoded = encode_audio(self.model, audio_BS, lengths_B[short], [languages[i] for i in short])
            if encoded[0].is_cuda:
                torch.cuda.synchronize(encoded[0].device)
            shared = time.perf_counter() - started
        texts: list[list[str]] = []
        for k, weights in enumerate(self.weights):
            started = time.perf_counter()
            self.fusion.weights[:] = weights
            found = dict(zip(short, decode_encoded(self.model, *encoded), strict=True)) if encoded is not None else {}
            own = []
            for i, length in enumerate(lengths_B.tolist()):
                if i in found:
                    own.append(found[i].text)
                else:
                    audio_S = batch.audio_BS[i, :length]
                    own.append(recognise_long(self.model, audio_S, s.chunk, CHUNKS_AT_ONCE, languages[i]))
            texts.append(own)
            self.seconds[k] += time.perf_counter() - started + shared
            self.utterances[k] += [
                Utterance(*of_clip) for of_clip in zip(batch.ids, batch.languages, batch.texts, own, strict=True)
            ]
        return texts[0]


def evaluate_boosted(
    name: str,
    s: EvaluationSettings,
    boosting: Boosting,
    file: Path | None = None,
    keep: list[Utterance] | None = None,
    *,
    plain: bool = False,
) -> dict[str, Any]:
    """Evaluate one model with phrases or a language model, and without.

    Args:
        name, s, file, keep: as of `finetune.evaluation.dataset.evaluate_model`.
        plain: whether the result, `file` and `keep` have the decoding without.

    Returns:
        As `evaluate_model` of one decoding, and `boosting`: what was fused, and with, without, and their comparison:
            wer, and of phrases missed and rest (`compare_phrases`).

    Raises:
        UserError: as `evaluate_model` and `finetune.models.boosting.boost`.
    """
    sources = open_sources(s.data, s.split)
    model = load_evaluated(name, s)
    fusion = boost(model, boosting)
    weights = [boosting.weights(), [0.0] * len(fusion.models)]
    each = Decodings(model, fusion, weights[::-1] if plain else weights, s)
    blocks: list[str] = []
    with utterances_to(file, s, blocks, keep) as on_utterance:
        started = time.perf_counter()
        wer = count_errors(model, sources, s, on_utterance, each.recognise)
        seconds = time.perf_counter() - started
    wer.decoding_seconds = each.seconds[0]
    result = describe(name, chosen_head(model), s, wer, blocks, wer.audio_seconds / seconds) | {"seconds": seconds}
    decodings = list(zip(each.utterances, each.seconds, strict=True))
    return result | {"boosting": _described(boosting, s, decodings[::-1] if plain else decodings, wer, blocks)}


def _described(
    boosting: Boosting,
    s: EvaluationSettings,
    decodings: list[tuple[list[Utterance], float]],
    wer: WerAccumulator,
    blocks: list[str],
) -> dict[str, Any]:
    """Return what `evaluate_boosted` tells of the decodings with and without.

    Args:
        decodings: utterances and seconds of the one with and the one without.
        wer: of either, for the seconds of audio.
        blocks: of the utterances, for the intervals.
    """
    drawn = None if s.block_pattern is None else blocks
    found: dict[str, Any] = fused_as_json(boosting)
    sides = [_scored(utterances, s.normalization) for utterances, _ in decodings]
    for key, (own, _), (_, took) in zip(("with", "without"), sides, decodings, strict=True):
        found[key] = {**own.total.rates(), "rtfx": wer.audio_seconds / took}
        if s.resamples:
            intervals = own.utterance_counts.intervals(s.resamples, drawn)
            found[key] |= {name: intervals[name] for name in ("wer_interval", "cer_interval")}
    (boosted, boosted_utterances), (without, without_utterances) = sides
    found["wer"] = _compare_wer(without, boosted, drawn, s.resamples)
    if boosting.phrases:
        finder = PhraseFinder((phrase.text for phrase in boosting.phrases), s.normalization)
        counts = [count_phrases(utterances, finder) for utterances in (boosted_utterances, without_utterances)]
        for key, own in zip(("with", "without"), counts, strict=True):
            found[key] |= own.result(drawn, s.resamples)
        found |= compare_phrases(counts[1], counts[0], drawn, s.resamples)
    return found


def compare_with_tuned(
    boosted: list[Utterance], tuned: list[Utterance], boosting: Boosting, s: EvaluationSettings
) -> dict[str, Any]:
    """Compare a model with phrases to another one without, as `compare_phrases`, on the clips that are in both."""
    by_id = by_occurrence(tuned)
    pairs = [(u, by_id[key]) for key, u in by_occurrence(boosted).items() if key in by_id]
    pairs = [pair for pair in pairs if _is_scored(pair[0], s.normalization) and pair[0].reference == pair[1].reference]
    finder = PhraseFinder((phrase.text for phrase in boosting.phrases), s.normalization)
    first, second = (count_phrases((pair[side] for pair in pairs), finder) for side in (0, 1))
    names = None if s.block_pattern is None else block_names([u.id for u, _ in pairs], s.block_pattern)
    return compare_phrases(first, second, names, s.resamples)


def fused_as_json(boosting: Boosting) -> dict[str, Any]:
    """Return what is fused, for a result."""
    found: dict[str, Any] = {}
    if boosting.phrases:
        found |= {"file": str(boosting.file), "phrases": len(boosting.phrases), "boost_weight": boosting.weight}
    if boosting.lm is not None:
        found |= {"lm": str(boosting.lm), "lm_weight": boosting.lm_weight}
    return found | {"beam": boosting.beam}


def _is_scored(u: Utterance, normalization: str) -> bool:
    return bool(score_pair(u.reference, u.hypothesis, normalization, u.language).clips)


def _scored(utterances: list[Utterance], normalization: str) -> tuple[WerAccumulator, list[Utterance]]:
    """Return the errors of utterances, and those that the normalisation does not leave out."""
    wer, scored = WerAccumulator(normalization), []
    for u in utterances:
        if wer.add(u.id, u.language, u.reference, u.hypothesis).clips:
            scored.append(u)
    return wer, scored


def _compare_wer(a: WerAccumulator, b: WerAccumulator, names: list[str] | None, resamples: int) -> dict[str, Any]:
    table_a, table_b = a.utterance_counts.table(), b.utterance_counts.table()
    languages = a.utterance_counts.language_names()
    return compare_counts(table_a[:, 0], table_b[:, 0], table_a[:, 1], languages, names_N=names, resamples=resamples)


# ---- weights --------------------------------------------------------------------------------------------------------


def choose_weights(
    name: str,
    s: EvaluationSettings,
    boosting: Boosting,
    *,
    boost_weight: float | None,
    lm_weight: float | None,
) -> dict[str, Any]:
    """Choose the weights of phrases and of a language model on data that is not tested on.

    The language model's weight is the one with the lowest WER, without phrases. The phrases' is chosen then, by
    `best_boost`.

    Args:
        boost_weight, lm_weight: those that are fixed; None: to be chosen.

    Returns:
        boost_weight and lm_weight, and `tried`: by weights the rates of the decoding.

    Raises:
        UserError: as `evaluate_boosted`; no phrase is said in the data.
    """
    sources = open_sources(s.data, s.split)
    model = load_evaluated(name, s)
    fusion = boost(model, boosting)
    tried: list[dict[str, Any]] = []

    def decode(weights: list[tuple[float, float]]) -> list[list[Utterance]]:
        each = Decodings(model, fusion, [boosting.weights(*own) for own in weights], s)
        count_errors(model, sources, s, None, each.recognise)
        return each.utterances

    if boosting.lm is not None and lm_weight is None:
        rows = []
        for weight, utterances in zip(LM_WEIGHTS, decode([(0.0, lm) for lm in LM_WEIGHTS]), strict=True):
            rows.append({"lm_weight": weight, **_rates(utterances, s)})
        lm_weight = min(rows, key=lambda row: (row["wer"], row["lm_weight"]))["lm_weight"]
        tried += rows
    lm_weight = lm_weight or 0.0
    if boosting.phrases and boost_weight is None:
        rows = _try_boosts(decode([(weight, lm_weight) for weight in BOOST_WEIGHTS]), boosting, s)
        boost_weight = best_boost(rows)
        tried += [{"lm_weight": lm_weight, **row} if boosting.lm is not None else row for row in rows]
    chosen: dict[str, Any] = {"model": name, "data": s.data, "split": s.split, **fused_as_json(boosting)}
    if boosting.phrases:
        chosen["boost_weight"] = boost_weight
    if boosting.lm is not None:
        chosen["lm_weight"] = lm_weight
    return chosen | {"tried": tried}


def _rates(utterances: list[Utterance], s: EvaluationSettings) -> dict[str, Any]:
    wer, _ = _scored(utterances, s.normalization)
    if not wer.total.words:
        raise UserError(f"--data: {' '.join(s.data)} holds no clip with words to choose weights on.", 1)
    return {key: wer.total.rates()[key] for key in ("wer", "cer", "clips", "words")}


def _try_boosts(decoded: list[list[Utterance]], boosting: Boosting, s: EvaluationSettings) -> list[dict[str, Any]]:
    """Return by weight the rates, and the comparison of the rest with that of the first, without phrases."""
    finder = PhraseFinder((phrase.text for phrase in boosting.phrases), s.normalization)
    counts = [count_phrases(_scored(utterances, s.normalization)[1], finder) for utterances in decoded]
    if not sum(counts[0].said_N):
        raise UserError(
            f"--tune-boost: none of the phrases of {boosting.file} is said in {' '.join(s.data)}: no weight can be "
            "chosen there. Name data with the phrases, or give --boost-weight.",
            1,
        )
    rows = []
    for weight, utterances, own in zip(BOOST_WEIGHTS, decoded, counts, strict=True):
        rest = compare_phrases(counts[0], own, None, s.resamples)["rest"]
        found = own.result(None, s.resamples)
        rows.append({"boost_weight": weight, **_rates(utterances, s), **found, "rest": rest})
    return rows


def best_boost(rows: list[dict[str, Any]]) -> float:
    """Return the weight at which found phrases less wrong other words are most, of those at which the WER of the other
    words is not significantly worse than without; of equal ones the smallest.

    The weight that finds most phrases would not do: on a few hundred words a loss of several points is not significant
    yet.

    Args:
        rows: boost_weight, said, missed, rest_errors, and rest, the comparison with the decoding without phrases.
    """

    def is_harmless(row: dict[str, Any]) -> bool:
        rest = row["rest"]
        return rest is None or not rest["significant"] or rest["difference"] <= 0

    def order(row: dict[str, Any]) -> tuple[int, float]:
        return row["missed"] + row["rest_errors"], row["boost_weight"]

    return min(filter(is_harmless, rows), key=order)["boost_weight"]
