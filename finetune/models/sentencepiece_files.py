"""SentencePiece models as protobuf messages: reading them from where they are, training them, and writing NeMo's three files."""

import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from sentencepiece import sentencepiece_model_pb2 as messages

from finetune.errors import UserError
from finetune.security.archives import content_of, reading

FILE = "tokenizer.model"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = {1: "unigram", 2: "bpe"}
SPACE = "\u2581"
LONGEST_TEXT_BYTES = 2**16
TEXTS_AT_ONCE = 4096


def parse(content: bytes, name: str) -> Any:
    """A tokenizer's message.

    Raises:
        UserError: it is no SentencePiece model, or neither BPE nor unigram.
    """
    model = messages.ModelProto()
    try:
        model.ParseFromString(content)
        kind = model.trainer_spec.model_type
    except Exception as error:  # DecodeError; its class differs between protobuf's implementations
        raise UserError(f"{name} is no SentencePiece model: {str(error) or type(error).__name__}.") from error
    if not model.pieces or kind not in KINDS:
        raise UserError(f"{name}: a SentencePiece model of type bpe or unigram is expected.")
    return model


def kind_of(model: Any) -> str:
    """ "bpe" or "unigram"."""
    return KINDS[model.trainer_spec.model_type]


def is_tokenizer(value: Any) -> bool:
    """Whether it names a tokenizer's file or directory, and not a data set."""
    return isinstance(value, str) and (value.endswith(".model") or (Path(value) / FILE).is_file())


def read_tokenizer(name: str, key: str) -> Any:
    """The tokenizer of a model, of a directory, or a .model file.

    Args:
        name: directory with tokenizer.model, a .model file, a .nemo file, a run's output directory, an adapter's directory (its
            base model's tokenizer), a Hugging Face directory, a NeMo model YAML, or a hub name.
        key: the option that names it, for messages.

    Raises:
        UserError: there is none, or it is an aggregate of several.
    """
    path = Path(name)
    if is_tokenizer(name):
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{key}: there is no file {file} (looked in {Path.cwd()}).")
        return parse(file.read_bytes(), f"{key}: {file}")
    archive = path / "model.nemo" if path.is_dir() else path
    if archive.suffix == ".nemo" and archive.is_file():
        return parse(_of_archive(archive, key), f"{key}: the tokenizer of {archive}")
    from finetune.models.huggingface import is_hugging_face, nemo_config
    from finetune.models.huggingface_tokenizer import sentencepiece_of
    from finetune.models.nemo import load_model
    from finetune.strategies.lora_adapters import is_adapter, read_adapter

    try:
        if is_adapter(path):
            return read_tokenizer(str(read_adapter(path).base["name"]), key)
        if is_hugging_face(path):
            content, _ = sentencepiece_of(path, int(nemo_config(path)["decoder"]["vocab_size"]))
            return parse(content, f"{key}: the tokenizer of {path}")
        if path.exists() and path.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"{name} holds neither tokenizer.model, model.nemo nor a Hugging Face model, and is no .nemo file."
            )
        return of_model(load_model(name), key)
    except UserError as error:
        said = str(error).removeprefix("model.name: ").removeprefix(f"{key}: ")
        raise UserError(f"{key}: {said}", error.exit_code) from error


def _of_archive(archive: Path, key: str) -> bytes:
    with reading(archive, key) as (tar, found):
        members = [m for m in found if m.isreg() and m.name.endswith(FILE)]
        if len(members) > 1:
            raise UserError(f"{key}: {archive} has an aggregate of {len(members)} tokenizers; one is expected.")
        if not members:
            raise UserError(f"{key}: {archive} holds no SentencePiece tokenizer.")
        return content_of(tar, members[0])


def of_model(model: Any, key: str) -> Any:
    """The tokenizer of a loaded NeMo model.

    Raises:
        UserError: it is an aggregate, or no SentencePiece tokenizer.
    """
    inner = getattr(model.tokenizer, "tokenizer", None)
    if not hasattr(inner, "serialized_model_proto"):
        what = "an aggregate of tokenizers" if model.tokenizer_type == "agg" else f"a {type(model.tokenizer).__name__}"
        raise UserError(
            f"{key}: the model has {what}; only the vocabulary of a single SentencePiece tokenizer can be changed."
        )
    return parse(inner.serialized_model_proto(), key)


def processor(model: Any, **changes: Any) -> SentencePieceProcessor:
    """What encodes with a message.

    Args:
        model: the tokenizer.
        changes: settings of its normaliser in this processor only, such as add_dummy_prefix=False.
    """
    if changes:
        own = messages.ModelProto()
        own.CopyFrom(model)
        for name, value in changes.items():
            setattr(own.normalizer_spec, name, value)
        model = own
    return SentencePieceProcessor(model_proto=model.SerializeToString())


def encode_all(encoder: SentencePieceProcessor, texts: Iterable[str]) -> Iterator[list[str]]:
    """The pieces of each text; of a few thousand texts at a time, so that memory does not grow with their number."""
    waiting = iter(texts)
    while some := list(itertools.islice(waiting, TEXTS_AT_ONCE)):
        yield from encoder.encode(some, out_type=str)


def piece_encoder(model: Any) -> Callable[[str], list[str]]:
    """What writes the text of a single piece, with the space that it may begin with, as pieces."""
    encoder = processor(model, add_dummy_prefix=False, remove_extra_whitespaces=False)
    return lambda piece: encoder.encode(piece.replace(SPACE, " "), out_type=str)


def without_bytes(model: Any) -> Any:
    """A copy that leaves characters without a piece as they are instead of spelling their bytes."""
    own = messages.ModelProto()
    own.CopyFrom(model)
    own.trainer_spec.byte_fallback = False
    for piece in own.pieces:
        if piece.type == BYTE:
            piece.type = UNUSED
    return own


def alphabet(model: Any) -> set[str]:
    """Characters of the pieces that texts are written with."""
    return {c for piece in model.pieces if piece.type in (NORMAL, USER_DEFINED) for c in piece.piece}


def train_tokenizer(
    texts: Iterable[str],
    size: int,
    *,
    kind: str = "bpe",
    byte_fallback: bool = False,
    coverage: float = 0.9995,
    key: str,
) -> Any:
    """Trains a tokenizer as NeMo's script does: <unk> first, neither begin nor end of a sentence.

    Args:
        texts: normalised.
        size: pieces, <unk> and bytes included.
        kind: "bpe" (arXiv 1508.07909) or "unigram" (arXiv 1804.10959).
        byte_fallback: spell characters without a piece as UTF-8 bytes, which takes 256 pieces.
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
        reason = reason.replace("vocab_size", "the size").replace(
            "character_coverage with --character_coverage option", "the coverage"
        )
        raise UserError(f"{key}: SentencePiece cannot train {size} pieces on these texts: {reason}") from error
    return parse(written.getvalue(), key)


def write_tokenizer(model: Any, directory: Path) -> None:
    """Writes tokenizer.model, tokenizer.vocab and vocab.txt, which NeMo wants beside each other."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FILE).write_bytes(model.SerializeToString())
    lines = (f"{p.piece}\t{p.score:.6g}\n" for p in model.pieces)
    (directory / "tokenizer.vocab").write_text("".join(lines), encoding="utf-8")
    # WordPiece's spelling.
    pieces = [p.piece for p in model.pieces if p.type not in (UNKNOWN, CONTROL)]
    words = [piece[1:] if piece.startswith(SPACE) else f"##{piece}" for piece in pieces]
    (directory / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")


def append(model: Any, pieces: Iterable[tuple[str, float]]) -> Any:
    """A copy with more pieces behind the old ones, each with its score."""
    grown = messages.ModelProto()
    grown.CopyFrom(model)
    for piece, score in pieces:
        grown.pieces.add(piece=piece, score=score, type=NORMAL)
    grown.trainer_spec.vocab_size = len(grown.pieces)
    return grown


def lowest_score(model: Any) -> float:
    """The least score of the pieces that texts are written with."""
    scores = [p.score for p in model.pieces if p.type in (NORMAL, USER_DEFINED)]
    return min(scores) if scores and math.isfinite(min(scores)) else 0.0
