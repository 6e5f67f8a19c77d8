"""How well tokenizers encode texts: what they cannot encode, and how many tokens they need."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from finetune.data.text_corpus import Text
from finetune.models.sentencepiece_model import SentencePieceModel, encode_all, processor, without_bytes

UNKNOWN_CHARACTERS = 50  # that a report lists
ALL = "all"


@dataclass
class Counts:
    """Sums over the texts of a language, for one tokenizer."""

    texts: int = 0
    characters: int = 0
    seconds: float = 0.0
    """Audio of the texts whose length is known."""
    tokens: int = 0
    tokens_timed: int = 0
    """Tokens of the texts whose length is known."""
    written_texts: int = 0
    unknown: Counter[str] = field(default_factory=Counter)

    def rates(self) -> dict[str, Any]:
        """Return fractions and rates; None where nothing could be measured."""
        return {
            "texts_written": self.written_texts / self.texts if self.texts else None,
            "characters_written": 1 - sum(self.unknown.values()) / self.characters if self.characters else None,
            "tokens_per_character": self.tokens / self.characters if self.characters else None,
            "tokens_per_second": self.tokens_timed / self.seconds if self.seconds else None,
        }


def compare(texts: list[Text], new: SentencePieceModel, old: SentencePieceModel | None) -> dict[str, Any]:
    """Measure coverage and length of the encoding by language.

    Args:
        texts: what is encoded.
        new, old: SentencePiece messages; old may be None.

    Returns:
        {"texts", "seconds", "by_language": {language: {"texts", "characters", "seconds", "new": rates, "old": rates,
        "same_segmentation", "new_pieces", "new_piece_tokens"}}, "not_written": [[character, count], ...],
        "pieces_used"}. Rates are fractions of texts and characters without <unk>, tokens a character (spaces not
        counted) and tokens a second of audio; the last two are pieces that the old tokenizer lacks and the texts use,
        and their tokens.
        `same_segmentation` is the fraction of the texts that the old one writes whose pieces are the same in both.
        Languages are by name, "" where none is known; "all" is their sum.
    """
    encodings = {"new": _encode(texts, new)} | ({} if old is None else {"old": _encode(texts, old)})
    counts: dict[str, dict[str, Counts]] = {name: defaultdict(Counts) for name in encodings}
    same: Counter[str] = Counter()
    used: set[str] = set()
    added = {p.piece for p in new.pieces} - {p.piece for p in (new if old is None else old).pieces}
    added_used: dict[str, Counter[str]] = defaultdict(Counter)
    for text, *encoded in zip(texts, *encodings.values(), strict=True):
        for name, (pieces, unknown) in zip(encodings, encoded, strict=True):
            for language in (text.language, ALL):
                _add(counts[name][language], text, len(pieces), unknown)
        used.update(encoded[0][0])
        for language in (text.language, ALL) if added else ():
            added_used[language].update(piece for piece in encoded[0][0] if piece in added)
        if old is not None and not encoded[1][1] and encoded[0][0] == encoded[1][0]:
            same.update((text.language, ALL))
    by_language = {}
    for language in sorted(counts["new"], key=lambda name: (name == ALL, name)):
        own = counts["new"][language]
        row: dict[str, Any] = {"texts": own.texts, "characters": own.characters, "seconds": own.seconds}
        row |= {name: counts[name][language].rates() for name in encodings}
        if old is not None:
            written = counts["old"][language].written_texts
            row["same_segmentation"] = same[language] / written if written else None
            pieces = added_used[language]
            row |= {"new_pieces": len(pieces), "new_piece_tokens": pieces.total()}
        by_language[language] = row
    names = {p.piece for p in new.pieces}
    return {
        "texts": len(texts),
        "seconds": counts["new"][ALL].seconds,
        "by_language": by_language,
        "not_written": [list(pair) for pair in counts["new"][ALL].unknown.most_common(UNKNOWN_CHARACTERS)],
        "pieces_used": len(used & names),
    }


def _encode(texts: list[Text], model: SentencePieceModel) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the pieces of each text, and its characters without a piece, bytes not counted."""
    known = {p.piece for p in model.pieces}
    encoded = encode_all(processor(model), (text.text for text in texts))
    if model.trainer_spec.byte_fallback:
        spelled = encode_all(processor(without_bytes(model)), (text.text for text in texts))
        pairs: Iterable[tuple[list[str], list[str]]] = zip(encoded, spelled, strict=True)
    else:
        pairs = ((pieces, pieces) for pieces in encoded)
    for pieces, spelling in pairs:
        yield pieces, [c for piece in spelling if piece not in known for c in piece]


def _add(counts: Counts, text: Text, tokens: int, unknown: list[str]) -> None:
    counts.texts += 1
    counts.characters += sum(not c.isspace() for c in text.text)
    counts.tokens += tokens
    counts.written_texts += not unknown
    counts.unknown.update(unknown)
    if text.seconds is not None:
        counts.seconds += text.seconds
        counts.tokens_timed += tokens


def table(report: dict[str, Any]) -> str:
    """Format the report as a table by language, with their sum where there are several."""
    two = "old" in report["by_language"][ALL]
    columns = [("texts written", "texts_written"), ("characters", "characters_written")]
    columns += [("tokens/char", "tokens_per_character"), ("tokens/s", "tokens_per_second")]
    head = ["language", "texts", *(name + (" old > new" if two else "") for name, _ in columns)]
    rows = [head + (["same pieces", "new pieces"] if two else [])]
    several = len(report["by_language"]) > 2
    for language, row in report["by_language"].items():
        if language == ALL and not several:
            continue
        cells = [language or "(not said)", str(row["texts"])]
        for _, key in columns:
            share = key.endswith("written")
            values = [_cell(row[name][key], share) for name in (("old", "new") if two else ("new",))]
            cells.append(" > ".join(values))
        if two:
            tokens = (row["new"]["tokens_per_character"] or 0) * row["characters"]
            share = _cell(row["new_piece_tokens"] / tokens if tokens else None, True)
            cells += [_cell(row["same_segmentation"], True), f"{row['new_pieces']} ({share} of the tokens)"]
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cell(value: float | None, share: bool) -> str:
    return "-" if value is None else f"{100 * value:.2f} %" if share else f"{value:.3f}"
