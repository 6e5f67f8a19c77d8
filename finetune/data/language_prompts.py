"""Which prompt of a prompt model an utterance gets: its language's, or the language-less `auto` for a drawn share.

Prompts are the keys of the model's `prompt_dictionary` (`en-US`, `en`, `de-DE`, `auto`), slots its values.
"""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from finetune.data.quarantine import BadUtterance

AUTO = "auto"


def prompt_of(language: str, slots: Mapping[str, int]) -> str:
    """Return the name of a language's prompt: exactly this one, else one that differs in case or `_` only, else the
    bare language's (`en` for `en-AU`), else that of its regions if they all have one slot (`de-DE` for `de`).

    Args:
        language: as a row names it; empty means `auto`.

    Raises:
        BadUtterance: the model has no prompt for it, or several.
    """
    if not language:
        if AUTO in slots:
            return AUTO
        raise BadUtterance(
            "the row names no language and the model has no prompt `auto`: add a column `language`, or write "
            f"`language` for the source, such as {next(iter(slots))}"
        )
    if language in slots:
        return language
    code = _plain(language)
    plain = {_plain(name): name for name in reversed(list(slots))}
    bare = code.split("-")[0]
    for wanted in (code, bare):
        if wanted in plain:
            return plain[wanted]
    regions = [name for name in slots if _plain(name).split("-")[0] == bare]
    if len({slots[name] for name in regions}) == 1:
        return regions[0]
    if regions:
        raise BadUtterance(
            f"the language {language!r} may be one of several prompts of the model: write {', '.join(regions[:4])}"
        )
    close = difflib.get_close_matches(bare, {_plain(name).split("-")[0] for name in slots}, n=1)
    names = [name for name in slots if _plain(name).split("-")[0] in close]
    hint = f"did you mean {' or '.join(names[:4])}?" if names else f"it has {', '.join(list(slots)[:12])}, ..."
    raise BadUtterance(f"the model has no prompt for the language {language!r}: {hint}")


def _plain(name: str) -> str:
    return name.replace("_", "-").lower()


def draw_slot(language: str, slots: Mapping[str, int], auto_ratio: float, seed: Sequence[int]) -> int:
    """Return the slot of an utterance: with probability `auto_ratio` that of `auto`, else its language's.

    Raises:
        BadUtterance: as `prompt_of`.
    """
    own = slots[prompt_of(language, slots)]
    if auto_ratio <= 0:
        return own
    return slots[AUTO] if np.random.default_rng(seed).random() < auto_ratio else own
