"""Letters of a new script are matched with the old letters that are heard in their place, however badly."""

import random

from finetune.models.heard_letters import LONGEST, match_letters

TEXTS = """\
the number you have dialed is not in service please check the number and try again
you have reached a number that has been disconnected or is no longer in use
to hear this message again press one to save it press two to erase it press three
please enter your password followed by the pound key
we are sorry all our agents are busy at the moment please stay on the line
the person at extension five is unavailable leave a message after the tone
your call is important to us and will be answered in the order it was received
good evening thank you for calling our office hours are from nine to five
press star to exit or zero to speak with an operator at any time
the voice mail box is full goodbye
""".splitlines()
GEORGIAN = {ord("a") + i: chr(0x10D0 + i) for i in range(26)}


def misheard(text: str, draw: random.Random) -> str:
    """A third of the letters wrong: another letter, none, or one more."""
    letters = "abcdefghijklmnopqrstuvwxyz "
    ways = (lambda c: draw.choice(letters), lambda c: "", lambda c: c + draw.choice(letters))
    return "".join(draw.choice(ways)(c) if draw.random() < 1 / 3 else c for c in text)


def test_letters_are_found_in_what_is_badly_heard() -> None:
    """All that the texts have, also as capitals, and none that they do not have."""
    draw = random.Random(1)
    texts = [text.translate(GEORGIAN) for text in TEXTS * 12]
    found = match_letters(
        [(x, misheard(y, draw)) for x, y in zip(texts, TEXTS * 12, strict=True)], set(GEORGIAN.values())
    )
    assert found == {new: chr(old) for old, new in GEORGIAN.items() if new in "".join(texts)}
    assert len(found) >= 24


def test_what_cannot_be_matched_is_left_out() -> None:
    assert match_letters([], {"ა"}) == {}
    assert match_letters([("ა", "")], {"ა"}) == {}
    assert match_letters([("ა" * (LONGEST + 1), "a")], {"ა"}) == {}
    assert match_letters([("ა ა", "1 1")], {"ა"}) == {}  # no letter
    assert match_letters([("Ша шА", "sa sa")] * 3, {"ш", "а"}) == {"ш": "s", "а": "a"}
