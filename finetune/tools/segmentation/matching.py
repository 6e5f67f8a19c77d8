"""Find which word of a text each recognised word is, for sequences of any length.

Rare n-grams that both have are anchors; their longest chain in order splits the sequences, again and again with
shorter n-grams, until what lies between two anchors is small enough for a table of all pairs (Gotoh, "An improved
algorithm for matching biological sequences", J. Mol. Biol. 1982), in which a pair of words scores by its characters.

H heard words, T words of the text.
"""

from bisect import bisect_left
from itertools import pairwise

import numpy as np
from rapidfuzz.distance import Levenshtein
from rapidfuzz.process import cdist

NGRAMS = (4, 3, 2, 1)
MOST_PLACES = 4
"""An n-gram that is found more often on either side is no anchor."""
CELLS = 2_000_000
"""Of a table of all pairs: 16 MB."""
GAP_OPEN, GAP_MORE = 1.0, 0.1
FAR_SECONDS = 30.0
"""A heard word is not one that its subtitle shows so much earlier or later."""
BAND_WORDS = 100

Pairs = list[tuple[int, int]]


def match(
    heard: list[str],
    text: list[str],
    heard_times_H: np.ndarray | None = None,
    text_times_T: np.ndarray | None = None,
) -> np.ndarray:
    """Return the (H,) index of the text's word for each heard word, -1 for none; those that are not -1 increase.

    Words may be paired that are unlike each other, where their neighbours say so.

    Args:
        heard, text: normalised words.
        heard_times_H, text_times_T: seconds, of the text NaN where unknown; None: times do not count.
    """
    times = None
    if heard_times_H is not None and text_times_T is not None:
        times = heard_times_H, text_times_T
    heard_ids_H, text_ids_T = _numbered(heard, text)
    found_H = np.full(len(heard), -1)
    waiting = [(0, len(heard), 0, len(text))]
    while waiting:
        h0, h1, t0, t1 = waiting.pop()
        if (h1 - h0) * (t1 - t0) == 0:
            continue
        if (h1 - h0) * (t1 - t0) <= CELLS:
            part = None if times is None else (times[0][h0:h1], times[1][t0:t1])
            for h, t in _table(heard[h0:h1], text[t0:t1], part):
                found_H[h0 + h] = t0 + t
            continue
        pairs = _split(heard_ids_H[h0:h1], text_ids_T[t0:t1], times, h0, t0)
        for h, t in pairs:
            found_H[h] = t
        if pairs:
            ends = [(h0 - 1, t0 - 1), *pairs, (h1, t1)]
            waiting += [(a + 1, c, b + 1, d) for (a, b), (c, d) in pairwise(ends) if c > a + 1 and d > b + 1]
    return found_H


def anchored_share(heard: list[str], text: list[str]) -> float:
    """Return how much of a few hundred heard words the text has in one place: the share of their 3-grams that lie in
    order on a diagonal of at most 200 words."""
    heard_ids_H, text_ids_T = _numbered(heard, text)
    pairs_P2 = np.array(_common(heard_ids_H, text_ids_T, 3, 4 * MOST_PLACES)).reshape(-1, 2)
    if not len(pairs_P2):
        return 0.0
    band_P = np.floor_divide(pairs_P2[:, 1] - pairs_P2[:, 0], BAND_WORDS)
    best = 0
    for band in np.unique(band_P):
        inside = pairs_P2[(band_P == band) | (band_P == band + 1)]
        if len(inside) > best:
            best = max(best, len(_chain([(int(h), int(t)) for h, t in inside])))
    return best / max(len(heard) - 2, 1)


def _numbered(heard: list[str], text: list[str]) -> tuple[np.ndarray, np.ndarray]:
    ids: dict[str, int] = {}
    numbers = np.array([ids.setdefault(word, len(ids)) for word in (*text, *heard)], dtype=np.int64)
    return numbers[len(text) :], numbers[: len(text)]


def _split(
    heard_H: np.ndarray, text_T: np.ndarray, times: tuple[np.ndarray, np.ndarray] | None, h0: int, t0: int
) -> Pairs:
    """Return the words of the longest chain of anchors, by the longest n-grams that have one; none without any."""
    for n in NGRAMS:
        candidates = [(h0 + h, t0 + t) for h, t in _common(heard_H, text_T, n, MOST_PLACES)]
        if times is not None:
            candidates = [(h, t) for h, t in candidates if not abs(times[0][h] - times[1][t]) > FAR_SECONDS]
        pairs: Pairs = []
        for h, t in _chain(candidates):
            for i in range(n):
                if not pairs or (h + i > pairs[-1][0] and t + i > pairs[-1][1]):
                    pairs.append((h + i, t + i))
        if pairs:
            return pairs
    return []


def _common(heard_H: np.ndarray, text_T: np.ndarray, n: int, most: int) -> Pairs:
    """Return the pairs of places of all n-grams that both have, at most `most` times each; in order of the heard, and
    backwards in the text."""
    if min(len(heard_H), len(text_T)) < n:
        return []
    heard_keys_H, text_keys_T = _keys(heard_H, n), _keys(text_T, n)
    places: dict[int, list[int]] = {}
    frequent = {int(k) for k, count in zip(*np.unique(heard_keys_H, return_counts=True)) if count > most}
    wanted = np.isin(text_keys_T, heard_keys_H)
    for t in np.flatnonzero(wanted).tolist():
        places.setdefault(int(text_keys_T[t]), []).append(t)
    return [
        (h, t)
        for h, key in enumerate(heard_keys_H.tolist())
        if key not in frequent and len(found := places.get(key, ())) <= most
        for t in reversed(found)
    ]


def _keys(ids_N: np.ndarray, n: int) -> np.ndarray:
    """Number n-grams; different ones share a number only where the 64 bits of a hash do."""
    keys_N = np.zeros(len(ids_N) - n + 1, dtype=np.uint64)
    for i in range(n):
        keys_N = keys_N * np.uint64(6364136223846793005) + ids_N[i : len(ids_N) - n + 1 + i].astype(np.uint64) + 1
    return keys_N


def _chain(pairs: Pairs) -> Pairs:
    """Return the longest chain that increases in both (Fredman, "On computing the length of longest increasing
    subsequences", Discrete Mathematics 1975); pairs of one heard place come backwards, so that it takes one."""
    tails: list[int] = []
    last: list[int] = []
    before = [-1] * len(pairs)
    for i, (_, t) in enumerate(pairs):
        place = bisect_left(tails, t)
        before[i] = last[place - 1] if place else -1
        if place == len(tails):
            tails.append(t)
            last.append(i)
        else:
            tails[place], last[place] = t, i
    chain: Pairs = []
    i = last[-1] if last else -1
    while i >= 0:
        chain.append(pairs[i])
        i = before[i]
    return chain[::-1]


def similarity(heard: list[str], text: list[str]) -> np.ndarray:
    """Return the (H, T) likeness of words by their characters, 0 to 1."""
    rows, row_H = np.unique(np.array(heard, dtype=object), return_inverse=True)
    columns, column_T = np.unique(np.array(text, dtype=object), return_inverse=True)
    like = cdist(rows.tolist(), columns.tolist(), scorer=Levenshtein.normalized_similarity, dtype=np.float32)
    return like[row_H][:, column_T]


def ratio(one: str, other: str) -> float:
    """Return the likeness of two words, as `similarity`."""
    return Levenshtein.normalized_similarity(one, other)


def _table(heard: list[str], text: list[str], times: tuple[np.ndarray, np.ndarray] | None) -> Pairs:
    """Return the pairs of words on the best path through the table of all pairs, with gaps of any length."""
    score_HT = 2 * similarity(heard, text) - 1
    if times is not None:
        score_HT[np.abs(times[0][:, None] - times[1][None, :]) > FAR_SECONDS] = -10
    H, T = score_HT.shape
    low = np.float32(-1e9)
    slope_T = GAP_MORE * np.arange(T + 1, dtype=np.float32)
    # What the best path to a cell ends with: a pair, a heard word alone, or a word of the text alone.
    pair_T, alone_T = np.full(T + 1, low), np.full(T + 1, low)
    text_T = -(GAP_OPEN + slope_T - GAP_MORE)
    pair_T[0], text_T[0] = 0, low
    came_pair = np.zeros((H + 1, T + 1), dtype=np.int8)
    came_alone, came_text = came_pair.copy(), came_pair.copy()
    came_text[0, 2:] = 2
    for h in range(1, H + 1):
        states_3T = np.stack([pair_T, alone_T, text_T])
        came_pair[h, 1:] = states_3T[:, :-1].argmax(0)
        new_pair_T = np.full(T + 1, low)
        new_pair_T[1:] = states_3T[:, :-1].max(0) + score_HT[h - 1]
        gaps_3T = states_3T - np.array([[GAP_OPEN], [GAP_MORE], [GAP_OPEN]], dtype=np.float32)
        came_alone[h] = gaps_3T.argmax(0)
        alone_T = gaps_3T.max(0)
        pair_T = new_pair_T
        both_2T = np.stack([pair_T, alone_T])
        best_T = both_2T.max(0)
        reach_T = np.maximum.accumulate(best_T + slope_T)
        text_T = np.full(T + 1, low)
        text_T[1:] = reach_T[:-1] - GAP_OPEN - slope_T[:-1]
        came_text[h, 1:] = both_2T[:, :-1].argmax(0)
        longer = np.zeros(T + 1, dtype=bool)
        longer[2:] = text_T[1:-1] - GAP_MORE > best_T[1:-1] - GAP_OPEN
        came_text[h, longer] = 2
    pairs: Pairs = []
    h, t = H, T
    state = int(np.argmax([pair_T[-1], alone_T[-1], text_T[-1]]))
    while h or t:
        if state == 0:
            state, h, t = int(came_pair[h, t]), h - 1, t - 1
            pairs.append((h, t))
        elif state == 1:
            state, h = int(came_alone[h, t]), h - 1
        else:
            state, t = int(came_text[h, t]), t - 1
    return pairs[::-1]
