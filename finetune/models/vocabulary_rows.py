"""Give a NeMo transducer another vocabulary without losing what it learned, or its TDT loss.

NeMo's `change_vocabulary` makes prediction network, joint and loss anew: all weights of both are lost, and a TDT model
is trained with the plain RNN-T loss from then on (NeMo issue 14140). Here the rows of old pieces, of the blank and of
the durations move to their new places unchanged, and everything else of the two networks is kept.

V pieces of the vocabulary, D durations, H hidden units.
"""

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf, open_dict

from finetune.models.nemo import check_heads, has_transducer, head_modules, pieces_of
from finetune.models.protocols import AsrModel
from finetune.models.sentencepiece_model import (
    FILE,
    NORMAL,
    SPACE,
    USER_DEFINED,
    SentencePieceModel,
    parse,
    piece_encoder,
    processor,
    tokenizer_of,
)

# Probability that all new pieces together can take from the old ones before training, at most.
SHARE_OF_NEW_PIECES = 0.1
TIE = 0.1
"""Nats that a new piece lies below an old one from whose row it begins, so that rounding does not choose it."""
HISTORY = "vocabulary_changes"

Sources = list[list[int]]
"""For each new piece the ids of the old ones whose rows it starts from."""


def change_vocabulary(model: AsrModel, directory: Path, note: Mapping[str, Any] | None = None) -> Sources:
    """Give a model another tokenizer, in place.

    A piece that the old tokenizer has too keeps its rows in the prediction network's embedding and in the joint's head
    (and in the CTC head). Any other starts as the mean of the rows of the old pieces that encoded it
    before; a new character as its base letter (é as e), or as the mean of all pieces where it has none.

    Where the vocabulary grows, the logit of a new piece lies log(n / s) below that mean, n new pieces, s
    SHARE_OF_NEW_PIECES. A mean is never above the largest of the old logits, so greedy decoding gives the same
    transcripts as before, and all new pieces together take at most s / (1 + s) of the probability, whatever the audio.

    Args:
        model: a NeMo transducer with one SentencePiece tokenizer.
        directory: files of the new tokenizer; they have to stay there as long as the model may be saved.
        note: a record of the change for the model's configuration, under `vocabulary_changes`.

    Returns:
        The old rows that each piece starts from.

    Raises:
        UserError: the model has an aggregate tokenizer.
    """
    old = tokenizer_of(model, "model.tokenizer")
    new = parse((Path(directory) / FILE).read_bytes(), f"model.tokenizer: {directory}")
    sources = rows_to_start_from(old, new)
    before = [p.piece for p in old.pieces]
    grows = [p.piece for p in new.pieces[: len(before)]] == before
    known = set(before)
    fresh = [p.piece not in known for p in new.pieces]
    margin = math.log(sum(fresh) / SHARE_OF_NEW_PIECES) if grows and any(fresh) else 0.0
    drop_V = margin * torch.tensor(fresh, dtype=torch.float32)

    weights = {name: part.state_dict() for name, part in head_modules(model).items()}
    training, order = model.training, list(model._modules)
    _change_tokens(model, directory)
    for name, part in head_modules(model).items():
        now = part.state_dict()
        for key, tensor in weights[name].items():
            if tensor.shape != now[key].shape or _has_rows(part, key):
                tensor = _moved(tensor, sources, len(old.pieces), drop_V if key.endswith("bias") else None)
            now[key] = tensor
        part.load_state_dict(now)
    # NeMo puts what it makes anew last; an optimizer's saved state goes by the order of the parameters.
    order += [name for name in model._modules if name not in order]
    model._modules = {name: model._modules[name] for name in order if name in model._modules}
    model.train(training)
    with open_dict(model.cfg):
        if has_transducer(model):  # NeMo gives a CTC model no such key
            model.cfg.labels = [p.piece for p in new.pieces]
        model.cfg[HISTORY] = [*changes_of(model), dict(note or {})]
    check_heads(model, str(directory))
    return sources


def _change_tokens(model: AsrModel, directory: Path) -> None:
    """Let NeMo make the heads anew for another tokenizer, with the loss that the transducer had."""
    from nemo.collections.asr.losses.rnnt import RNNTLoss

    if not has_transducer(model):
        model.change_vocabulary(str(directory), "bpe")
        return
    durations = model.joint.num_extra_outputs
    reduction = model.loss.reduction
    loss_name, loss_kwargs = model.extract_rnnt_loss_cfg(model.cfg.get("loss", None))
    model.change_vocabulary(str(directory), "bpe")
    model.loss = RNNTLoss(
        num_classes=model.joint.num_classes_with_blank - 1 - (durations if loss_name == "tdt" else 0),
        loss_name=loss_name,
        loss_kwargs=loss_kwargs,
        reduction=reduction,
    )
    if model.joint.fuse_loss_wer or (model.decoding.joint_fused_batch_size or 0) > 0:
        model.joint.set_loss(model.loss)
        model.joint.set_wer(model.wer)


def changes_of(model: AsrModel) -> list[dict[str, Any]]:
    """Return the records of the changes of the model's vocabulary."""
    records = model.cfg.get(HISTORY)
    return cast(list[dict[str, Any]], OmegaConf.to_container(records, resolve=True)) if records else []


def letters_without_relative(old: SentencePieceModel, new: SentencePieceModel) -> set[str]:
    """Return the letters and marks of the new pieces that are neither old, nor another case or form of old letters, as
    small letters."""
    ids = {p.piece: i for i, p in enumerate(old.pieces)}
    characters = {c for p in new.pieces if p.piece not in ids for c in p.piece if unicodedata.category(c)[0] in "LM"}
    return {c.lower() for c in characters if not _known_relative(c, ids, {})}


def start_as_heard(model: AsrModel, old: SentencePieceModel, heard: Mapping[str, str], texts: Iterable[str]) -> None:
    """Let the new pieces with letters that have no relative begin as the old letters that are heard in their place.

    A head's row is that of the first of the old pieces that write these letters, which is when the model hears it; the
    embedding's that of the last, behind which the model goes on. Without such letters both are the mean of all.
    Biases share the old rows by use: with c the counts, L_j = c_j + the sum of c_k over the new pieces k from row j,
    piece i from row j lies log(L_j / c_i) below it, and TIE. Where rows are means, k counts in each of its n rows with
    c_k / n, and the largest L_j counts. So greedy decoding gives the same transcripts as before, and all these pieces
    together take at most as much of the probability as the old ones, whatever the audio: a mean of logits is at most
    the largest of them, and its exponential at most the mean of theirs.

    Args:
        model: grown by `change_vocabulary`, in place.
        old: its tokenizer before.
        heard: old letters by new ones, small letters.
        texts: of clips of the run, of all languages, normalised.
    """
    grown = tokenizer_of(model, "model.tokenizer")
    use = Counter(i for ids in processor(grown).encode(list(texts)) for i in ids)
    lacking, size = letters_without_relative(old, grown), len(old.pieces)
    spell, ordinary = _speller(old, heard), _ordinary(old)
    pieces = {i: p.piece for i, p in enumerate(grown.pieces) if i >= size and not lacking.isdisjoint(p.piece.lower())}
    spelled = {i: spell(piece) for i, piece in pieces.items()}
    first = {i: parts[:1] or ordinary for i, parts in spelled.items()}
    last = {i: parts[-1:] or ordinary for i, parts in spelled.items()}
    counts = {i: max(use[i], 1) for i in pieces}
    load = [float(use[j]) for j in range(size)]
    for i, ids in first.items():
        for j in ids:
            load[j] += counts[i] / len(ids)
    with torch.no_grad():
        for part in head_modules(model).values():
            for key, rows in part.state_dict().items():
                if not _has_rows(part, key):
                    continue
                embeds = isinstance(part.get_submodule(key.rpartition(".")[0]), torch.nn.Embedding)
                for i, ids in (last if embeds else first).items():
                    rows[i] = rows[ids].float().mean(0)
                    if key.endswith("bias"):
                        rows[i] -= math.log(max(1, max(load[j] for j in ids) / counts[i])) + TIE


def grown_like(base: AsrModel, tuned: AsrModel) -> tuple[dict[str, torch.Tensor], list[str]] | None:
    """Return a base model's weights with the vocabulary of a model that was trained from it and grew it.

    A piece of the base has the base's rows; a new one, of whose rows the base knows nothing, those of the tuned model,
    as what they began as is not known afterwards.

    Returns:
        The weights and the new pieces; None where the tuned model has not all pieces of the base, and more.
    """
    ours, theirs = pieces_of(base), pieces_of(tuned)
    places = {piece: i for i, piece in enumerate(ours)}
    if len(theirs) <= len(ours) or len(places) < len(ours) or not places.keys() <= set(theirs):
        return None
    old_V = torch.tensor([i for i, piece in enumerate(theirs) if piece in places])
    from_V = torch.tensor([places[piece] for piece in theirs if piece in places])
    state = dict(base.state_dict())
    parts, grown = head_modules(base), head_modules(tuned)
    for name, part in parts.items():
        wanted = grown[name].state_dict() if name in grown else {}
        for key, rows in part.state_dict().items():
            if key not in wanted or not _has_rows(part, key):
                continue
            merged, behind = wanted[key].clone(), len(rows) - len(ours)  # blank and durations are the last ones
            if len(merged) != len(theirs) + behind or merged.shape[1:] != rows.shape[1:]:
                return None
            merged[old_V] = rows[from_V].to(merged.dtype)
            merged[len(theirs) :] = rows[len(ours) :].to(merged.dtype)
            state[f"{name}.{key}"] = merged
    return state, [piece for piece in theirs if piece not in places]


def _has_rows(part: torch.nn.Module, key: str) -> bool:
    """Return whether a weight has a row for each piece: those of the embedding, and of the last layer of a head."""
    owner = part.get_submodule(key.rpartition(".")[0])
    layers: list[torch.nn.Module] = list(getattr(part, "joint_net", ()))
    heads = layers[-1:] or list(getattr(part, "decoder_layers", ()))
    return isinstance(owner, torch.nn.Embedding) or owner in heads


def _moved(rows: torch.Tensor, sources: Sources, old_size: int, drop_V: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of the new pieces, followed by those behind the old pieces: blank, and durations.

    Args:
        rows: (old V, or with blank and durations behind them, ...).
        sources: for each new piece the old ones whose mean it is.
        old_size: old V.
        drop_V: what is taken off each new piece's row.
    """
    moved = torch.stack(
        [rows[ids[0]] if len(ids) == 1 else rows[ids].float().mean(0).to(rows.dtype) for ids in sources]
    )
    if drop_V is not None:
        moved = torch.where(drop_V > 0, moved - drop_V.to(moved.dtype), moved)
    return torch.cat([moved, rows[old_size:]])


def rows_to_start_from(old: SentencePieceModel, new: SentencePieceModel) -> Sources:
    """Return for each new piece the old ones that it starts from: itself, or the pieces that encoded it before."""
    spell, ordinary = _speller(old, {}), _ordinary(old)
    return [spell(p.piece) or ordinary for p in new.pieces]


def _ordinary(model: SentencePieceModel) -> list[int]:
    """Return the ids of the pieces that texts are written with."""
    return [i for i, p in enumerate(model.pieces) if p.type in (NORMAL, USER_DEFINED)]


def _speller(old: SentencePieceModel, heard: Mapping[str, str]) -> Callable[[str], list[int]]:
    """Return a function from a piece to the ids of the old ones that write it, itself or with related letters."""
    ids = {p.piece: i for i, p in enumerate(old.pieces)}
    encode = piece_encoder(old)

    def spell(piece: str) -> list[int]:
        if piece in ids:
            return [ids[piece]]
        parts = encode(piece)
        if not parts or any(part not in ids for part in parts):  # it could not be written
            relative = "".join(_known_relative(c, ids, heard) for c in piece)
            parts = [part for part in encode(relative) if part in ids] if relative.strip(SPACE) else []
        return [ids[part] for part in parts]

    return spell


def _known_relative(character: str, ids: Mapping[str, int], heard: Mapping[str, str]) -> str:
    """Return the character where the tokenizer has it, else its other case or its letters without marks, else what is
    heard for it, else ""."""
    if character == SPACE or character in ids:
        return character
    for form in (character, character.lower(), character.upper()):
        bare = "".join(c for c in unicodedata.normalize("NFKD", form) if not unicodedata.combining(c))
        if form in ids or (bare and all(c in ids for c in bare)):
            return form if form in ids else bare
    letter = heard.get(character.lower(), "")
    return letter.upper() if character.isupper() and letter.upper() in ids else letter
