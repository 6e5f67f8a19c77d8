"""`data.leave_out`: rows that a check found unfit, by their place."""

import hashlib
import shlex
from pathlib import Path

import numpy as np

from finetune.errors import UserError
from finetune.security.documents import parse_json

DUPLICATE = "duplicate_id"
REASONS = (DUPLICATE, "in_leave_out")


class LeaveOut:
    """The rows that files such as the check's problems.jsonl name: 9 bytes a row in memory.

    `lists` have JSON lines with the `source` of a row (as in quarantine.jsonl) and the `reason`; `key` is their name
    in messages.
    """

    def __init__(self, lists: str | list[str], key: str):
        self.key = key
        self.files: dict[str, set[str]] = {}
        """What each list names rows of."""
        hashes, kinds = [], []
        for file in [lists] if isinstance(lists, str) else lists:
            named, number = self.files.setdefault(file, set()), 0
            try:
                with Path(file).open(encoding="utf-8") as lines:
                    for line in lines:
                        number += 1
                        row = parse_json(line)
                        place = row["source"]
                        named.add(place.rsplit(" ", 2)[0])
                        hashes.append(hash_of(place))
                        kinds.append(REASONS.index(DUPLICATE) if row.get("reason") == DUPLICATE else 1)
            except OSError as error:
                raise UserError(f"{key}: {file} cannot be read: {error.strerror or error}.") from error
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{key}: line {number or 1} of {file} is no "
                    '{"source": "FILE line N", "reason": "..."}, as the check writes it.'
                ) from error
        order = np.argsort(np.array(hashes, dtype=np.uint64))
        self.hashes = np.array(hashes, dtype=np.uint64)[order]
        self.kinds = np.array(kinds, dtype=np.uint8)[order]

    def check_files(self, read: set[str], key: str) -> None:
        """Raise UserError where a list is of other data than those that `key` reads: it would leave out nothing."""
        for file, named in self.files.items():
            if named and read and not named & read:
                raise UserError(
                    f"{self.key}: {file} names rows of {min(named)}, but {key} reads {min(read)}. Where these were "
                    f"split from those, split them again with --leave-out {shlex.quote(file)}; else check {key}, with "
                    "its paths as they are written here."
                )

    def reason(self, place: str) -> str | None:
        """Return why a row is left out; None where it is not."""
        wanted = np.uint64(hash_of(place))
        found = int(np.searchsorted(self.hashes, wanted))
        there = found < len(self.hashes) and self.hashes[found] == wanted
        return REASONS[self.kinds[found]] if there else None


def hash_of(name: str) -> int:
    """Hash a text to 64 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
