"""Add pieces to a tokenizer without changing how it encodes what it could encode before.

The old pieces keep their ids and scores. For texts, BPE training goes on where the old tokenizer stops (arXiv
2512.03989): its own segmentation is the beginning, and the neighbours that occur together most often become a piece,
again and again. Pieces that another tokenizer was trained to have would often never be reached by the old merges.

In a BPE model a new piece scores lower than all before it, so all old merges come first. In a unigram model it scores
as much as the parts that the old model would write instead, and a little more: it joins these parts, and no other
boundary moves.
"""

import heapq
import itertools
import math
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finetune.errors import UserError
from finetune.models.sentencepiece_model import (
    NORMAL,
    SPACE,
    USER_DEFINED,
    SentencePieceModel,
    alphabet,
    copy_of,
    kind_of,
    piece_encoder,
    processor,
    without_bytes,
)

LEAST_COUNT = 5  # a piece that is rarer is no use: its rows would not be learned
LONGEST_PIECE = 16  # characters, SentencePiece's own default
UNIGRAM_GAIN = 0.01
MOST_WORDS = 200_000  # different ones, the most frequent, that merges are counted in

Word = tuple[str, ...]


@dataclass
class Growth:
    """A grown tokenizer, and what became of the candidates."""

    model: SentencePieceModel
    before: int
    """Pieces of the old tokenizer."""
    characters: list[str] = field(default_factory=list)
    """New characters that have a piece now, the most frequent first."""
    left_out: list[str] = field(default_factory=list)
    """New characters that have none, because of the coverage."""
    unreachable: int = 0
    """Pieces of another tokenizer that this one's merges would never make."""

    @property
    def added(self) -> list[str]:
        """The new pieces, in the order of their ids."""
        return [p.piece for p in self.model.pieces[self.before :]]

    def as_json(self) -> dict[str, Any]:
        return {
            "pieces_before": self.before,
            "pieces_added": len(self.added),
            "new_characters": self.characters,
            "new_pieces": self.added,
            "characters_left_out": self.left_out,
            "unreachable": self.unreachable,
        }

    def __str__(self) -> str:
        words = f"{len(self.added)} pieces added to {self.before}, {len(self.characters)} of them characters"
        if self.left_out:
            words += f"; {len(self.left_out)} characters left out by the coverage: {''.join(self.left_out[:20])}"
        if self.unreachable:
            words += f"; {self.unreachable} pieces left out that the old merges would never make"
        if not self.added:
            words += ": it encodes every character of the texts already (pieces=all adds merges)"
        return words


def grow_on_texts(
    model: SentencePieceModel,
    texts: Iterable[str],
    size: int,
    *,
    pieces: str = "new_characters",
    coverage: float = 1.0,
    key: str,
) -> Growth:
    """Append the characters that the texts need and the tokenizer lacks, and then the most frequent merges.

    Args:
        model: the old tokenizer.
        texts: normalised.
        size: pieces that are appended at most.
        pieces: "new_characters" takes merges that hold a new character only: no text that could be written before is
            written otherwise then. "all" takes all merges.
        coverage: share of the texts' characters that can be written afterwards; the rarest new ones go without.
        key: the option that asks for it, for messages.

    Raises:
        UserError: the new characters alone are more than `size`.
    """
    words = _count_words(model, texts)
    old, own = alphabet(model), {p.piece for p in model.pieces}
    characters, left_out = _lacking(words, own, coverage)
    if len(characters) > size:
        raise UserError(
            f"{key}: the texts need {len(characters)} characters that the tokenizer lacks, more than size={size}. Set "
            f"size to {len(characters)} or more, or coverage below 1, which leaves out the rarest (now {coverage:g})."
        )
    new = None if pieces == "all" else set(characters) - old
    merges = _merges(words, own | set(characters), size - len(characters), new)
    return Growth(_appended(model, characters, merges), len(model.pieces), characters, left_out)


def _merges(words: Counter[Word], own: set[str], count: int, new: set[str] | None) -> dict[str, Word]:
    """Return the most frequent merges of words that can be written, with their parts, first ones first.

    Args:
        own: all pieces.
        new: characters of which a merge has to hold one; None takes all merges.
    """

    def allowed(piece: str) -> bool:
        wanted = new is None or any(c in new for c in piece)
        return wanted and len(piece) <= LONGEST_PIECE and _is_word_part(piece)

    usable = Counter({w: n for w, n in words.items() if all(s in own for s in w)})
    return _merge_on(dict(usable.most_common(MOST_WORDS)), own, count, allowed)


def grow_from_tokenizer(
    model: SentencePieceModel, other: SentencePieceModel, size: int, *, pieces: str = "new_characters", key: str
) -> Growth:
    """Append the pieces of another tokenizer that the old one lacks, characters first, then by score.

    Pieces that the old merges would never make are left out and counted. The rest is as in `grow_on_texts`.
    """
    own, old = {p.piece for p in model.pieces}, alphabet(model)
    usable = sorted((p for p in other.pieces if p.type in (NORMAL, USER_DEFINED)), key=lambda p: -p.score)
    letters = sorted({c for p in usable for c in p.piece} - own - {SPACE})
    if len(letters) > size:
        raise UserError(
            f"{key}: the other tokenizer has {len(letters)} new characters, more than size={size}. Set a larger size."
        )
    new = set(letters) - old
    candidates = [p.piece for p in usable if p.piece not in own and len(p.piece) > 1]
    candidates = [p for p in candidates if pieces == "all" or any(c in new for c in p)][: size - len(letters)]
    grown, kept = _with_reachable(candidates, lambda kept: _appended(model, letters, dict.fromkeys(kept, ())))
    return Growth(grown, len(model.pieces), letters, unreachable=len(candidates) - len(kept))


def grow_as_heard(
    model: SentencePieceModel,
    texts: Collection[str],
    heard: Mapping[str, str],
    growth: Growth,
    size: int,
    filled: int = 0,
) -> Growth:
    """Append the characters of a growth on texts, and for the old pieces that write what is heard the same in new
    letters: where T, H, E are heard as t, h, e, and `the` is a piece, THE becomes one.

    So the texts are cut as the model would cut what it hears, and each new piece can begin as one old piece. Those
    that the texts use most are taken.

    Args:
        model: the old tokenizer.
        texts: normalised.
        heard: old letters by new ones, small letters.
        growth: `grow_on_texts` of the same model and texts.
        size: pieces that are appended at most, more than the characters.
        filled: with fewer pieces, merges of the texts follow as in `grow_on_texts`, up to so many.
    """
    counts: Counter[str] = Counter()
    scores = {p.piece: p.score for p in model.pieces if p.type in (NORMAL, USER_DEFINED)}
    lowest = min(scores.values(), default=0.0)
    found = {c: scores.get(heard.get(c.lower(), ""), lowest) for c in growth.characters}
    encode = piece_encoder(without_bytes(model))
    for word, n in _count_spelled(model, texts).items():
        start = 0
        for piece in encode("".join(heard.get(c.lower(), c) for c in word)):
            written = word[start : start + len(piece)]
            start += len(piece)
            if len(piece) > 1 and written != piece and piece in scores:
                counts[written] += n
                found[written] = max(scores[piece], found.get(written, -math.inf))
    most = [piece for piece, n in counts.most_common(max(size - len(growth.characters), 0)) if n >= LEAST_COUNT]
    candidates = sorted(most, key=lambda piece: -found[piece])  # as the old merges come

    def grown(pieces: list[str]) -> SentencePieceModel:
        if kind_of(model) == "bpe":
            return _appended(model, growth.characters, dict.fromkeys(pieces, ()))
        return _append(model, {piece: found[piece] for piece in [*growth.characters, *pieces]})

    new, kept = _with_reachable(candidates, grown)
    left = filled - len(growth.characters) - len(kept)
    if left > 0:
        own = {p.piece for p in new.pieces}
        new = _appended(
            new, [], _merges(_count_words(new, texts), own, left, set(growth.characters) - alphabet(model))
        )
    return Growth(new, growth.before, growth.characters, growth.left_out)


def _with_reachable(
    candidates: list[str], grown: Callable[[list[str]], SentencePieceModel]
) -> tuple[SentencePieceModel, list[str]]:
    """Return the tokenizer with those candidates that it then writes as one piece, and these."""
    kept = candidates
    while True:  # without an unreachable piece others may become unreachable
        model = grown(kept)
        encode = piece_encoder(model)
        reached = [piece for piece in kept if encode(piece) == [piece]]
        if len(reached) == len(kept):
            return model, kept
        kept = reached


def _appended(model: SentencePieceModel, characters: list[str], merges: Mapping[str, Word]) -> SentencePieceModel:
    """Return the tokenizer with characters and merged pieces, by the parts that they are made of, behind the old ones.

    Without parts a piece is made of what encodes it.
    """
    scores = {p.piece: p.score for p in model.pieces if p.type in (NORMAL, USER_DEFINED)}
    lowest = min(scores.values(), default=0.0)
    names = [*characters, *merges]
    if kind_of(model) == "bpe":
        return _append(model, {name: lowest - 1 - i for i, name in enumerate(names)})
    new = dict.fromkeys(characters, lowest)
    scores |= new
    encode = piece_encoder(_append(model, new))
    for rank, (piece, parts) in enumerate(merges.items()):
        # A longer one wins against its beginning. The same gain for all would make AB+C and A+BC equally good, and
        # implementations choose differently then; so an earlier merge gains more.
        gain = (UNIGRAM_GAIN if parts else UNIGRAM_GAIN * (len(piece) - 1)) * (1 + 1 / math.sqrt(2 + rank))
        known = parts or encode(piece)
        scores[piece] = sum(scores.get(part, lowest) for part in known) + gain
    return _append(model, {name: scores[name] for name in names})


def _append(model: SentencePieceModel, scores: Mapping[str, float]) -> SentencePieceModel:
    model = copy_of(model)
    for piece, score in scores.items():
        model.pieces.add(piece=piece, score=score, type=NORMAL)
    model.trainer_spec.vocab_size = len(model.pieces)
    return model


def _count_spelled(model: SentencePieceModel, texts: Iterable[str]) -> Counter[str]:
    """Count the words, each with the space before it, as the tokenizer normalises them."""
    counts: Counter[str] = Counter()
    normalize = processor(model).normalize
    for text in texts:
        first, *others = normalize(text).split(SPACE)
        counts.update(SPACE + word for word in others)
        counts[first] += bool(first)
    return +counts


def _count_words(model: SentencePieceModel, texts: Iterable[str]) -> Counter[Word]:
    """Count the words, each as the pieces that encode it; what has no piece stands as its characters."""
    known, encode = {p.piece for p in model.pieces}, piece_encoder(without_bytes(model))
    words: Counter[Word] = Counter()
    for word, n in _count_spelled(model, texts).items():
        pieces = ((piece,) if piece in known else piece for piece in encode(word))
        words[tuple(itertools.chain.from_iterable(pieces))] += n
    return words


def _lacking(words: Counter[Word], own: set[str], coverage: float) -> tuple[list[str], list[str]]:
    """Return the characters without a piece, most frequent first: those that the coverage needs, and the others."""
    counts: Counter[str] = Counter()
    total = 0
    for word, n in words.items():
        for symbol in word:
            total += n * len(symbol)
            if symbol not in own:
                counts[symbol] += n
    ordered = sorted(counts, key=lambda c: (-counts[c], c))
    covered, bound = total - sum(counts.values()), coverage * total
    taken = 0
    while taken < len(ordered) and covered < bound:
        covered += counts[ordered[taken]]
        taken += 1
    return ordered[:taken], ordered[taken:]


def _merge_on(words: Mapping[Word, int], own: set[str], count: int, allowed: Callable[[str], bool]) -> dict[str, Word]:
    """Continue BPE training (arXiv 1508.07909).

    Args:
        words: their pieces, and how often they occur.
        own: pieces that there are.
        count: merges at most.
        allowed: whether a piece may be made.

    Returns:
        New pieces, the first merged first, each with the two parts that it was first made of.
    """
    sequences, counts = [list(w) for w in words], list(words.values())
    total: Counter[str] = Counter()
    places: dict[str, set[int]] = defaultdict(set)
    parts: dict[str, Word] = {}
    for i, symbols in enumerate(sequences):
        for a, b in itertools.pairwise(symbols):
            total[a + b] += counts[i]
            places[a + b].add(i)
            parts.setdefault(a + b, (a, b))
    heap = [(-n, piece) for piece, n in total.items()]
    heapq.heapify(heap)
    found: dict[str, Word] = {}
    ranks: dict[str, int] = {}
    while heap and len(found) < count:
        n, piece = heapq.heappop(heap)
        if -n != total[piece]:  # it has become rarer, or was put in again
            if LEAST_COUNT <= total[piece] < -n:
                heapq.heappush(heap, (-total[piece], piece))
            continue
        if -n < LEAST_COUNT:
            break
        if piece in own or piece in found or not allowed(piece):
            continue
        found[piece], ranks[piece] = parts[piece], len(ranks)
        more: set[str] = set()
        for i in sorted(places.pop(piece)):
            symbols = sequences[i]
            for a, b in itertools.pairwise(symbols):
                total[a + b] -= counts[i]
            _join(symbols, ranks)
            for a, b in itertools.pairwise(symbols):
                joined = a + b
                total[joined] += counts[i]
                if a in found or b in found:
                    places[joined].add(i)
                    parts.setdefault(joined, (a, b))
                    more.add(joined)
        for joined in more:
            if total[joined] >= LEAST_COUNT:
                heapq.heappush(heap, (-total[joined], joined))
    return found


def _join(symbols: list[str], ranks: dict[str, int]) -> None:
    """Join neighbours that make a new piece, first learned first and from the left, like SentencePiece, in place."""
    while True:
        joined = [a + b for a, b in itertools.pairwise(symbols)]
        pairs = [(ranks[piece], i) for i, piece in enumerate(joined) if piece in ranks]
        if not pairs:
            return
        _, i = min(pairs)
        symbols[i : i + 2] = [joined[i]]


def _is_word_part(piece: str) -> bool:
    """Return whether it has letters and marks only: digits and punctuation stay pieces of their own."""
    return all(unicodedata.category(c)[0] in "LM" for c in piece.removeprefix(SPACE)) and piece != SPACE
