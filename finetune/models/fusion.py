"""Scores of phrases and of a language model beside a head's own while it decodes (shallow fusion), by NeMo's models.

Greedily, a frame or step keeps what the head decides between blank and token: fusion chooses among the tokens. So a
phrase that is not heard at all adds nothing to a text. Weights of 0 change nothing.

The scores are those of NeMo's GPU-PB (Andrusenko et al., "TurboBias", 2025) and NGPU-LM (Bataev et al., 2025).

B batch, T encoder frames, V tokens and blank.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf, open_dict

from finetune.data.normalization import normalization_for, normalize_text
from finetune.data.quarantine import BadUtterance
from finetune.data.utterances import text_encoder
from finetune.errors import UserError
from finetune.models.nemo import chosen_head, pieces_of, tdt_durations

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from finetune.data.phrases import Phrase
    from finetune.models.protocols import AsrModel

CONTEXT_SCORE, DEPTH_SCALING = 1.0, 2.0
"""Score of a phrase's first token, and the factor of the later ones: NeMo's for CTC, RNN-T and TDT."""
LONGEST_TOKENS = 64


@dataclass
class Fusion:
    """What is fused, and how much of it. Weights may change between two batches."""

    models: list[Any] = field(default_factory=list)
    """NeMo's GPUBoostingTreeModel and NGramGPULanguageModel."""
    weights: list[float] = field(default_factory=list)
    """Of each, in nats of the head's log-probabilities."""


# ---- a boosting tree of phrases -------------------------------------------------------------------------------------


@dataclass
class Tokenised:
    """Phrases as tokens of a model."""

    tokens: list[list[int]]
    weights: list[float]
    left_out: dict[str, str]
    """Phrases that the model cannot write, with the reason."""


def forms_of(text: str, mode: str) -> list[str]:
    """Return a phrase as a vocabulary writes it: one without capitals as `basic` has it, one with them as it is
    written, and with a capital at its beginning, as at that of a sentence.

    Args:
        mode: of `finetune.data.normalization.normalization_for`.
    """
    text = normalize_text(text, mode)
    if mode != "none":
        return [text] if text else []
    return [text, *({text[:1].upper() + text[1:]} - {text})]


def tokenise(model: AsrModel, phrases: Iterable[Phrase]) -> Tokenised:
    """Return phrases as tokens, in the forms of `forms_of`.

    Raises:
        UserError: no phrase is left.
    """
    mode, encode = normalization_for(pieces_of(model)), text_encoder(model.tokenizer)
    found: dict[tuple[int, ...], float] = {}
    left_out: dict[str, str] = {}
    for phrase in phrases:
        forms = forms_of(phrase.text, mode)
        if not forms:
            left_out[phrase.text] = "nothing is left of it without punctuation, which the vocabulary lacks"
        for form in forms:
            try:
                tokens = tuple(encode(form))
            except BadUtterance as reason:
                if form == forms[0]:
                    left_out[phrase.text] = str(reason).partition(" (")[0]
                continue
            if len(tokens) > LONGEST_TOKENS:
                left_out[phrase.text] = f"it has {len(tokens)} tokens, and a phrase has at most {LONGEST_TOKENS}"
                continue
            found[tokens] = max(phrase.weight, found.get(tokens, 0.0))
    if not found:
        first, reason = next(iter(left_out.items()))
        raise UserError(f"--boost: the model can write none of the phrases, such as {first!r}: {reason}.")
    return Tokenised([list(tokens) for tokens in found], list(found.values()), left_out)


def boosting_tree(tokens: Sequence[Sequence[int]], weights: Sequence[float], vocabulary: int) -> Any:
    """Return NeMo's boosting tree of phrases.

    Args:
        tokens: of each phrase.
        weights: of each phrase, above 0.
        vocabulary: tokens of the model, without the blank.
    """
    from nemo.collections.asr.parts.context_biasing import GPUBoostingTreeModel
    from nemo.collections.asr.parts.context_biasing.context_graph_universal import ContextGraph

    # NeMo's graph does not raise what hangs below a shared beginning when a heavier phrase comes later.
    order = sorted(range(len(tokens)), key=lambda i: -weights[i])
    graph = ContextGraph(context_score=CONTEXT_SCORE, depth_scaling=DEPTH_SCALING)
    graph.build(
        token_ids=[list(tokens[i]) for i in order],
        phrases=[str(i) for i in order],
        scores=[CONTEXT_SCORE * weights[i] for i in order],
        uniform_weights=False,
    )
    return GPUBoostingTreeModel.from_context_graph(graph, vocab_size=vocabulary, uniform_weights=False)


# ---- a language model -----------------------------------------------------------------------------------------------


def read_arpa(path: Path, vocabulary: int, key: str = "--lm") -> Any:
    """Return NeMo's language model of an ARPA file whose words are tokens, as NeMo writes them: the character of the
    token's number and 100.

    Args:
        vocabulary: tokens of the model, without the blank.

    Raises:
        UserError: the file is no such file, or has tokens that the model lacks.
    """
    from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

    try:
        # NeMo draws progress bars on the error stream.
        with contextlib.redirect_stderr(io.StringIO()):
            return NGramGPULanguageModel.from_arpa(path, vocab_size=vocabulary)
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error}.") from error
    except Exception as error:  # NeMo asserts, looks up and converts as it reads
        raise UserError(
            f"{key}: {path} is no ARPA file of this model's {vocabulary} tokens ({type(error).__name__}). "
            "python -m finetune.language_model makes one."
        ) from error


def language_model_of(tensors: dict[str, torch.Tensor], order: int, vocabulary: int) -> Any:
    """Return NeMo's language model of tensors that `language_model_tensors` returned.

    Raises:
        ValueError, KeyError, RuntimeError: the tensors are of something else.
    """
    from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel
    from nemo.collections.asr.parts.submodules.ngram_lm.ngram_lm_batched import NGramLMConfig

    states, arcs = len(tensors["backoff_weights"]), len(tensors["arcs_weights"]) - vocabulary
    config = NGramLMConfig(num_states=states, num_arcs=arcs, max_order=order, vocab_size=vocabulary)
    model = NGramGPULanguageModel(OmegaConf.structured(config))
    model.load_state_dict(tensors)
    inside = {"from_states": states, "to_states": states, "backoff_to_states": states, "ilabels": vocabulary}
    inside["start_end_arcs"] = arcs + 1
    for name, end in inside.items():
        if tensors[name].min() < 0 or tensors[name].max() >= end:
            raise ValueError(f"{name} leads outside")
    return model


def language_model_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return what NeMo's language model holds."""
    return {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}


# ---- decoding -------------------------------------------------------------------------------------------------------


def fuse(model: AsrModel, fusion: Fusion, beam: int = 1) -> None:
    """Decode with a fusion from here on, in batches, with the head that is chosen; in place.

    It ends where the decoding strategy of the model is changed. CUDA graphs are off then, since they would keep the
    weights of their first batch.

    Args:
        beam: hypotheses that a transducer keeps, in NeMo's `malsd_batch`; 1: greedy. A beam has no confidences.

    Raises:
        UserError: NeMo's decoding of this model takes none.
    """
    if chosen_head(model) == "ctc":
        if beam > 1:
            raise UserError("--beam: a CTC head decodes greedily here. Leave the option out.")
        model.ctc_fusion = fusion
        return
    if not model.decoder.blank_as_pad:
        raise UserError(
            "--boost and --lm: the model's prediction network knows no blank (blank_as_pad: false), and NeMo's fusion "
            "needs it. Leave them out."
        )
    if beam > 1:
        _fuse_in_beam(model, fusion, beam)
        return
    decoding = model.cfg.decoding
    if decoding.strategy != "greedy_batch" or not (decoding.get("greedy") or {}).get("loop_labels", True):
        with open_dict(decoding):
            decoding.strategy = "greedy_batch"
            decoding.greedy = {**(decoding.get("greedy") or {}), "loop_labels": True}
        model.change_decoding_strategy(decoding, verbose=False)
    search = model.decoding.decoding
    search.disable_cuda_graphs()
    search.decoding_computer.fusion_models = fusion.models
    search.decoding_computer.fusion_models_alpha = fusion.weights


def _fuse_in_beam(model: AsrModel, fusion: Fusion, beam: int) -> None:
    from nemo.collections.asr.modules.rnnt import RNNTDecoder
    from nemo.collections.asr.parts.submodules.rnnt_beam_decoding import BeamBatchedRNNTInfer
    from nemo.collections.asr.parts.submodules.tdt_beam_decoding import BeamBatchedTDTInfer

    if not isinstance(model.decoder, RNNTDecoder):
        raise UserError(
            f"--beam: NeMo's batched beam search takes no {type(model.decoder).__name__}. Leave the option out."
        )
    decoding, greedy = model.cfg.decoding, model.cfg.decoding.get("greedy") or {}
    with open_dict(decoding):
        decoding.strategy = "malsd_batch"
        decoding.beam = {"beam_size": beam, "return_best_hypothesis": True, "allow_cuda_graphs": False}
        decoding.preserve_alignments = False
        decoding.confidence_cfg = {"preserve_frame_confidence": False}
    model.change_decoding_strategy(decoding, verbose=False)
    options = {
        "decoder_model": model.decoder,
        "joint_model": model.joint,
        "blank_index": model.tokenizer.vocab_size,
        "beam_size": beam,
        "max_symbols_per_step": greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or 10,
        "fusion_models": fusion.models,
        "fusion_models_alpha": fusion.weights,
        "blank_lm_score_mode": "lm_weighted_full",
        "pruning_mode": "late",
        "allow_cuda_graphs": False,
    }
    durations = list(tdt_durations(model))
    search = BeamBatchedTDTInfer(durations=durations, **options) if durations else BeamBatchedRNNTInfer(**options)
    model.decoding.decoding = search


def fused_labels(fusion: Fusion, log_probs_BTV: torch.Tensor) -> torch.Tensor:
    """Return the label of each frame (B, T) of a CTC head with a fusion, as NeMo's `GreedyBatchedCTCInfer` has it.

    A frame stays blank, or the token of the frame before, where the head alone says so. Only where one of a batch
    begins a token do scores have to be looked up.
    """
    blank = log_probs_BTV.size(-1) - 1
    labels_BT = log_probs_BTV.argmax(-1)
    rows_B = torch.arange(len(labels_BT), device=labels_BT.device)
    for scorer in fusion.models:
        scorer.to(labels_BT.device)
    states = [scorer.get_init_states(batch_size=len(labels_BT), bos=True) for scorer in fusion.models]
    last_B = torch.full_like(rows_B, blank)
    for t in range(labels_BT.size(1)):
        new_B = (labels_BT[:, t] != blank) & (labels_BT[:, t] != last_B)
        if new_B.any():
            scores_BV = log_probs_BTV[:, t].scatter(1, last_B[:, None], -torch.inf)[:, :blank]
            following = []
            for scorer, weight, state_B in zip(fusion.models, fusion.weights, states, strict=True):
                added_BV, next_BV = scorer.advance(states=state_B)
                scores_BV = scores_BV + weight * added_BV
                following.append(next_BV)
            best_B = scores_BV.argmax(-1)
            labels_BT[:, t] = torch.where(new_B, best_B, labels_BT[:, t])
            states = [
                torch.where(new_B, next_BV[rows_B, best_B], state_B)
                for next_BV, state_B in zip(following, states, strict=True)
            ]
        last_B = labels_BT[:, t]
    return labels_BT
