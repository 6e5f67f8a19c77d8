"""SentencePiece models as protobuf messages: reading, training, and writing the three files that NeMo wants."""

import io
import itertools
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from pathlib import Path
from typing import Any, Protocol, Self

import sentencepiece.sentencepiece_model_pb2 as messages
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from finetune.errors import UserError
from finetune.models.protocols import AsrModel

FILE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # ModelProto.SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
KINDS = {UNIGRAM: "unigram", BPE: "bpe"}
SPACE = "\u2581"
NOT_IN_VOCAB_TXT = ("<s>", "</s>", "<pad>", "<unk>")
LONGEST_TEXT_BYTES = 2**16
TEXTS_AT_ONCE = 4096


class Piece(Protocol):
    piece: str
    score: float
    type: int


class Pieces(MutableSequence[Piece]):
    def add(self, **fields: Any) -> Piece: ...


class SentencePieceModel(Protocol):
    """A `ModelProto`: pieces by id, and the rules of training and normalising."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def trainer_spec(self) -> Any: ...
    @property
    def normalizer_spec(self) -> Any: ...
    @classmethod
    def FromString(cls, content: bytes, /) -> Self: ...
    def SerializeToString(self) -> bytes: ...


# protobuf makes the class at run time.
ModelProto: type[SentencePieceModel] = vars(messages)["ModelProto"]


def parse(content: bytes, name: str) -> SentencePieceModel:
    """Read a tokenizer's message; raise UserError if it is no SentencePiece model of type BPE or unigram."""
    try:
        model = ModelProto.FromString(content)
        kind = model.trainer_spec.model_type
    except Exception as error:  # DecodeError; its class differs between protobuf's implementations
        raise UserError(f"{name} is no SentencePiece model: {str(error) or type(error).__name__}.") from error
    if not model.pieces or kind not in KINDS:
        raise UserError(f"{name}: a SentencePiece model of type bpe or unigram is expected.")
    return model


def copy_of(model: SentencePieceModel) -> SentencePieceModel:
    return ModelProto.FromString(model.SerializeToString())


def kind_of(model: SentencePieceModel) -> str:
    """Return "bpe" or "unigram"."""
    return KINDS[model.trainer_spec.model_type]


def tokenizer_of(model: AsrModel, key: str) -> SentencePieceModel:
    """Return the tokenizer of a loaded NeMo model; raise UserError if it is not one of SentencePiece alone."""
    inner = getattr(model.tokenizer, "tokenizer", None)
    if inner is None or not hasattr(inner, "serialized_model_proto"):
        what = "an aggregate of tokenizers" if model.tokenizer_type == "agg" else f"a {type(model.tokenizer).__name__}"
        raise UserError(
            f"{key}: the model has {what}; only the vocabulary of a single SentencePiece tokenizer can be changed."
        )
    return parse(inner.serialized_model_proto(), key)


def processor(model: SentencePieceModel, **changes: Any) -> SentencePieceProcessor:
    """Return what encodes and decodes, with other settings of the normaliser, such as add_dummy_prefix=False."""
    if changes:
        model = copy_of(model)
        for name, value in changes.items():
            setattr(model.normalizer_spec, name, value)
    return SentencePieceProcessor(model_proto=model.SerializeToString())


def encode_all(encoder: SentencePieceProcessor, texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the pieces of each text; a few thousand texts are encoded at a time, so that memory does not grow."""
    waiting = iter(texts)
    while some := list(itertools.islice(waiting, TEXTS_AT_ONCE)):
        yield from encoder.encode(some, out_type=str)


def piece_encoder(model: SentencePieceModel) -> Callable[[str], list[str]]:
    """Return a function that encodes the text of a single piece, with the space that it may begin with."""
    encoder = processor(model, add_dummy_prefix=False, remove_extra_whitespaces=False)
    return lambda piece: encoder.encode(piece.replace(SPACE, " "), out_type=str)


def without_bytes(model: SentencePieceModel) -> SentencePieceModel:
    """Return a copy that leaves characters without a piece as they are instead of spelling their bytes."""
    model = copy_of(model)
    model.trainer_spec.byte_fallback = False
    for piece in model.pieces:
        if piece.type == BYTE:
            piece.type = UNUSED
    return model


def alphabet(model: SentencePieceModel) -> set[str]:
    """Return the characters of the pieces that texts are encoded with."""
    return {c for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED) for c in piece.piece}


def train_tokenizer(
    texts: Iterable[str],
    size: int,
    *,
    kind: str = "bpe",
    byte_fallback: bool = False,
    coverage: float = 0.9995,
    key: str,
) -> SentencePieceModel:
    """Train a tokenizer as NeMo's script does: <unk> first, neither begin nor end of a sentence.

    Args:
        texts: normalised.
        size: pieces, <unk> and the 256 of `byte_fallback` included.
        kind: "bpe" (arXiv 1508.07909) or "unigram" (arXiv 1804.10959).
        byte_fallback: spell characters without a piece as UTF-8 bytes.
        coverage: share of the texts' characters that get a piece; the rarest go without.
        key: the option that asks for it, for messages.

    Raises:
        UserError: the texts do not give so many pieces, or their characters do not fit into so few.
    """
    written = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=written,
            vocab_size=size,
            model_type=kind,
            byte_fallback=byte_fallback,
            character_coverage=coverage,
            max_sentence_length=LONGEST_TEXT_BYTES,
            bos_id=-1,
            eos_id=-1,
            unk_id=0,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        reason = str(error).split("] ")[-1].strip() or type(error).__name__
        reason = reason.replace("vocab_size", "the size")
        reason = reason.replace("character_coverage with --character_coverage option", "the coverage")
        raise UserError(f"{key}: SentencePiece cannot train {size} pieces on these texts: {reason}") from error
    return parse(written.getvalue(), key)


def write_tokenizer(model: SentencePieceModel, directory: Path) -> None:
    """Write tokenizer.model, tokenizer.vocab and vocab.txt, which NeMo wants beside each other.

    vocab.txt, which nothing reads, has WordPiece's spelling as NeMo's `create_spt_model` writes it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_bytes(model.SerializeToString())
    lines = (f"{p.piece}\t{p.score:.6g}\n" for p in model.pieces)
    (directory / "tokenizer.vocab").write_text("".join(lines), encoding="utf-8")
    pieces = [p.piece for p in model.pieces if p.piece not in NOT_IN_VOCAB_TXT]
    words = (piece.removeprefix(SPACE) or SPACE if piece.startswith(SPACE) else f"##{piece}" for piece in pieces)
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
