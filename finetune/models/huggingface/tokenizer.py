"""SentencePiece models as fast tokenizers of Hugging Face, and back."""

import base64
import json
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import UserError
from finetune.models.sentencepiece_model import (
    BPE,
    BYTE,
    CONTROL,
    FILE,
    NORMAL,
    SPACE,
    UNIGRAM,
    UNKNOWN,
    USER_DEFINED,
    ModelProto,
    SentencePieceModel,
    parse,
    processor,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import ParakeetTokenizer

BLANK = "<blank>"
LANGUAGE_TAG = re.compile(r"<[a-z]{2,3}-[A-Za-z]{2,4}>$")
"""What nemotron-3.5 ends a text with: special in transformers, which leaves it out, and printed by NeMo."""
ALL_OF_THEM = 1_000_000  # leading spaces
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "Please press 1, then 2; for help dial 0-800!",
    "où est-ce que l'été a été, ça va très bien",
    "straße größe übung äpfel niño mañana ¿qué?",
    "it's a 50 % share of 3.14 (more or less)",
    "日本語 и кириллица ελληνικά",
)


def fast_tokenizer(proto: SentencePieceModel) -> "Tokenizer":
    """Return a tokenizer that encodes and decodes as the SentencePiece model does; ids are the pieces' own.

    Unlike transformers' own conversion it assembles the text of byte pieces from their bytes, and strips white space
    at the beginning as SentencePiece does.

    Raises:
        UserError: a SentencePiece model of another kind.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import generate_merges

    rules, kind = proto.normalizer_spec, proto.trainer_spec.model_type
    scores = [(piece.piece, piece.score) for piece in proto.pieces]
    unknown = _unknown_id(proto)
    has_bytes = any(p.type == BYTE for p in proto.pieces)
    if kind == BPE:
        ids = {piece: i for i, (piece, _) in enumerate(scores)}
        merges = generate_merges(ids, scores)
        model = models.BPE(ids, merges, unk_token=scores[unknown][0], fuse_unk=True, byte_fallback=has_bytes)
    elif kind == UNIGRAM:
        model = models.Unigram(scores, unk_id=unknown, byte_fallback=has_bytes)
    else:
        raise UserError("the tokenizer is a SentencePiece model of words or characters; only BPE and unigram convert.")
    tokenizer = Tokenizer(model)
    # Added tokens split the text, and what follows one gets a space of its own. One character needs none: no other
    # piece contains a character that is USER_DEFINED (the digits of parakeet-tdt-0.6b-v3).
    tokenizer.add_tokens(
        [
            AddedToken(p.piece, normalized=False, special=p.type == CONTROL)
            for p in proto.pieces
            if p.type == CONTROL or (p.type == USER_DEFINED and len(p.piece) > 1)
        ]
    )
    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), SPACE)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if rules.add_dummy_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    stripped = ALL_OF_THEM if rules.remove_extra_whitespaces else int(rules.add_dummy_prefix)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", stripped, 0)])
    return tokenizer


def _unknown_id(proto: SentencePieceModel) -> int:
    for i, piece in enumerate(proto.pieces):
        if piece.type == UNKNOWN:
            return i
    raise UserError("the tokenizer has no piece for what it cannot write, which SentencePiece needs.")


def processor_tokenizer(
    proto: SentencePieceModel, blank_pads: bool = False, left_out: re.Pattern[str] | None = None
) -> "ParakeetTokenizer":
    """Return transformers' ParakeetTokenizer with the blank as the id after the last piece.

    Args:
        blank_pads: the blank is also the padding, as transformers' CTC models have it, even if there is a `<pad>`.
        left_out: what pieces look like that decoding leaves out.
    """
    from transformers import ParakeetTokenizer

    tokens = len(proto.pieces)
    names = {piece.piece for piece in proto.pieces}
    if BLANK in names:
        raise UserError(f"the tokenizer has a piece {BLANK} of its own, the name of transformers' blank.")
    tokenizer = ParakeetTokenizer(tokenizer_object=fast_tokenizer(proto), clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([BLANK], special_tokens=True)  # before any other token: its id has to be the next one
    tokenizer.pad_token = "<pad>" if "<pad>" in names and not blank_pads else BLANK
    tokenizer.unk_token = proto.pieces[_unknown_id(proto)].piece
    if left_out and (special := [name for name in names if left_out.fullmatch(name)]):
        tokenizer.add_tokens(sorted(special), special_tokens=True)
    if tokenizer.convert_tokens_to_ids(BLANK) != tokens or len(tokenizer) != tokens + 1:
        raise UserError(f"the tokenizer's blank has id {tokenizer.convert_tokens_to_ids(BLANK)}, not {tokens}.")
    return tokenizer


def sample_texts(proto: SentencePieceModel, count: int = 500) -> list[str]:
    """Return texts to test a tokenizer with: sentences, and random words of its own pieces, always the same."""
    pieces = [p.piece for p in proto.pieces if p.type == NORMAL and p.piece.strip(SPACE)]
    draw = random.Random(0)
    texts: list[str] = [*SENTENCES]
    for _ in range(count):
        text = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 16)))
        texts.append(" ".join(text.replace(SPACE, " ").split()))
    return texts


def encoding_differs(proto: SentencePieceModel, tokenizer: "Tokenizer", texts: list[str] | None = None) -> str:
    """Return the first text that fast tokenizer and SentencePiece encode differently, as a sentence; empty if none.

    Texts are compared as SentencePiece's normaliser leaves them: `tokenizers` takes a letter and its combining marks
    as one, and cannot compose every such sequence as SentencePiece does (`differing_as_written` counts what that
    changes). Without `texts`, those of `sample_texts` are compared, and ordinary sentences also as they are written,
    so that a missing normaliser is found.
    """
    reference = processor(proto)
    written: tuple[str, ...] = ()
    if texts is None:
        written, texts = SENTENCES, sample_texts(proto)
    normal = [reference.normalize(text).replace(SPACE, " ").strip() for text in texts]
    for text in (*written, *normal):
        theirs, ours = reference.encode(text), tokenizer.encode(text, add_special_tokens=False).ids
        if theirs != ours:
            return f"tokenizer: {text!r} is encoded as {theirs} by SentencePiece and as {ours} by the fast tokenizer"
    return ""


def differing_as_written(proto: SentencePieceModel, tokenizer: "Tokenizer", texts: list[str]) -> list[str]:
    """Return the texts that fast tokenizer and SentencePiece encode differently unless normalised first."""
    reference = processor(proto)
    return [t for t in texts if reference.encode(t) != tokenizer.encode(t, add_special_tokens=False).ids]


def decoding_differs(proto: SentencePieceModel, tokenizer: "Tokenizer", count: int = 2000) -> str:
    """Return the first ids that the fast tokenizer and SentencePiece decode differently, as a sentence; empty if none.

    Compared are `count` random rows of ids, and the encodings of `sample_texts`, which have byte pieces where there
    are any. Left out are the unknown piece (SentencePiece prints a mark for it, transformers nothing), the padding,
    and rows of bytes that are no UTF-8.
    """
    reference = processor(proto)
    ids = [i for i, p in enumerate(proto.pieces) if p.type in (NORMAL, USER_DEFINED) and p.piece != "<pad>"]
    draw = random.Random(1)
    rows = [[draw.choice(ids) for _ in range(draw.randint(1, 12))] for _ in range(count)]
    unknown = _unknown_id(proto)
    rows += [row for text in sample_texts(proto) if unknown not in (row := reference.encode(text))]
    for row in rows:
        theirs, ours = reference.decode(row), tokenizer.decode(row, skip_special_tokens=True)
        if theirs != ours:
            return f"tokenizer: SentencePiece decodes {theirs!r} where the fast tokenizer decodes {ours!r}"
    return ""


def sentencepiece_of(directory: Path, tokens: int) -> tuple[bytes, str]:
    """Return the SentencePiece model of a Hugging Face directory, and where it comes from, in words.

    It is the kept tokenizer.model, or one made from tokenizer.json, of so many pieces without the blank.

    Raises:
        UserError: neither gives a SentencePiece model that encodes as tokenizer.json does.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise UserError(f"model.name: {directory} has no tokenizer.json.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        split_at = [t for t in content.get("added_tokens") or [] if t["special"] or len(t["content"]) > 1]
        fast = Tokenizer.from_str(json.dumps({**content, "added_tokens": split_at}))  # as in `fast_tokenizer`
        names = _names(content, tokens, file)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises no narrower class
        raise UserError(
            f"model.name: {file} cannot be read as a tokenizer: {type(error).__name__}: {error}. Copy or download it "
            "again."
        ) from error
    kept = directory / FILE
    if kept.is_file():
        try:
            proto = parse(kept.read_bytes(), f"model.name: {kept}")
        except UserError as error:
            remedy = "Put the right file there, or remove it: tokenizer.json is then taken alone."
            raise UserError(f"{error} {remedy}") from error
        if [p.piece for p in proto.pieces] == names and not encoding_differs(proto, fast):
            return kept.read_bytes(), "tokenizer.model"
    proto = _proto_of(content, names, file)
    if reason := encoding_differs(proto, fast):
        raise UserError(
            f"model.name: {file} cannot be turned into SentencePiece: {reason}. Put the tokenizer.model that the "
            "model was trained with beside it."
        )
    source = f"tokenizer.json, {'other than' if kept.is_file() else 'without'} tokenizer.model"
    return proto.SerializeToString(), source


def _names(content: dict[str, Any], tokens: int, file: Path) -> list[str]:
    """Return the pieces by id."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # of Unigram, with scores
        by_id = dict(enumerate(piece for piece, _ in vocabulary))
    else:
        by_id = {i: piece for piece, i in vocabulary.items()}
    by_id |= {token["id"]: token["content"] for token in content.get("added_tokens") or []}
    if missing := [i for i in range(tokens) if i not in by_id]:
        raise UserError(
            f"model.name: {file} has no piece with id {missing[0]}; the model has {tokens} of them before its blank."
        )
    return [by_id[i] for i in range(tokens)]


def _proto_of(content: dict[str, Any], names: list[str], file: Path) -> SentencePieceModel:
    """Make a ModelProto from a tokenizer.json: pieces by id, scores by the rank of their merges, the normaliser."""
    model = content["model"]
    proto = ModelProto()
    if model["type"] == "Unigram":
        proto.trainer_spec.model_type = UNIGRAM
        scores = dict(map(tuple, model["vocab"]))
        unknown = model["vocab"][model["unk_id"]][0] if model.get("unk_id") is not None else "<unk>"
    elif model["type"] == "BPE":
        proto.trainer_spec.model_type = BPE
        scores = {}
        for merge in model["merges"]:
            left, right = merge.split(" ") if isinstance(merge, str) else merge
            scores.setdefault(left + right, -float(len(scores)))
        unknown = model.get("unk_token") or "<unk>"
    else:
        raise UserError(f"model.name: {file} has a {model['type']} model; BPE and Unigram are SentencePiece's.")
    if unknown not in names:
        raise UserError(
            f"model.name: {file} has no piece {unknown!r} for what it cannot write, which SentencePiece needs. Put "
            "the tokenizer.model that the model was trained with beside it."
        )
    added = {token["content"]: token["special"] for token in content.get("added_tokens") or []}
    has_bytes = set(BYTES) <= set(names)
    lowest = -float(len(scores))
    for i, name in enumerate(names):
        kind, score = NORMAL, scores.get(name, lowest - i)
        if name == unknown:
            kind, score = UNKNOWN, 0.0
        elif name in added:
            kind, score = CONTROL if added[name] and not LANGUAGE_TAG.match(name) else USER_DEFINED, 0.0
        elif has_bytes and name in BYTES:
            kind, score = BYTE, 0.0
        proto.pieces.add(piece=name, score=score, type=kind)
    trainer = proto.trainer_spec
    trainer.vocab_size, trainer.byte_fallback = len(names), has_bytes
    trainer.unk_piece, trainer.unk_id = unknown, names.index(unknown)
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    rules, normalizer = proto.normalizer_spec, content.get("normalizer") or {}
    rules.name, rules.remove_extra_whitespaces = "identity", False
    for step in normalizer.get("normalizers", [normalizer] if normalizer else []):
        if step["type"] == "Precompiled":
            rules.name = "user_defined"
            rules.precompiled_charsmap = base64.b64decode(step["precompiled_charsmap"])
        elif step["type"] == "Replace" and step["pattern"].get("Regex") == " {2,}":
            rules.remove_extra_whitespaces = True
    rules.add_dummy_prefix = (content.get("pre_tokenizer") or {}).get("prepend_scheme", "always") != "never"
    rules.escape_whitespaces = True
    return proto
