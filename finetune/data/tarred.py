"""NeMo's tarred data sets: audio in tar files, and their rows in manifests, one for each tar or one for all.

Paths may hold ranges, as NeMo writes them (`audio__OP_0..127_CL_.tar`) or in braces (`audio_{0..127}.tar`).
"""

import re
import tarfile
from array import array
from functools import partial
from pathlib import PurePosixPath

import fsspec
import numpy as np

from finetune.data.shards import BAD_LINE, NumberedRows, Row, Shard, expand, lines_of, parse_line
from finetune.errors import UserError
from finetune.security.archives import CheckedHeader

LARGEST_MEMBER = 2**30
REPEATED = re.compile(r"-sub\d+(?=\.[^.]*$|$)")
"""What NeMo adds to the name of a file of which several parts are used."""


def expand_ranges(path: str) -> list[str]:
    """The paths that ranges and wildcards stand for, in their order."""
    path = path.replace("_OP_", "{").replace("_CL_", "}")
    found = re.search(r"\{(\d+)\.\.(\d+)\}", path)
    if not found:
        return expand(path) if any(c in path for c in "*?[") else [path]
    low, high = found[1], found[2]
    width = len(low) if low.startswith("0") else 0
    return [
        name
        for number in range(int(low), int(high) + 1)
        for name in expand_ranges(path[: found.start()] + str(number).zfill(width) + path[found.end() :])
    ]


def tarred_shards(manifest: str, tars: str, key: str) -> tuple[list[Shard], int]:
    """One shard a tar file, and the number of rows.

    Args:
        manifest: path of one manifest with `shard_id` in its rows, or of one a tar file, with ranges.
        tars: path of the tar files, with ranges.
        key: for messages.

    Raises:
        UserError: numbers of files that do not fit, files that are not there, or rows without `shard_id`.
    """
    manifests, files = expand_ranges(manifest), expand_ranges(tars)
    if len(manifests) not in (1, len(files)):
        raise UserError(
            f"{key}: {len(manifests)} manifests do not fit {len(files)} tar files; one for all, or one each."
        )
    try:
        if len(manifests) == len(files):
            lines = [manifest_lines(name) for name in manifests]
        else:
            lines = by_shard(manifests[0], len(files), key)
    except OSError as error:
        raise UserError(f"{key}: a manifest cannot be read: {type(error).__name__}: {error}") from error
    shards = [
        Shard(file, "row", 0, len(own), partial(read_tar, file, manifests[min(i, len(manifests) - 1)], own))
        for i, (file, own) in enumerate(zip(files, lines, strict=True))
    ]
    return shards, sum(map(len, lines))


def manifest_lines(path: str) -> np.ndarray:
    """(n, 2) offset and length of each line that is not blank."""
    found, offset = array("q"), 0
    for line in lines_of(path):
        if line.strip():
            found.extend((offset, len(line)))
        offset += len(line)
    return np.array(found).reshape(-1, 2)


def by_shard(path: str, count: int, key: str) -> list[np.ndarray]:
    """Lines of a common manifest by their `shard_id`, as `manifest_lines`; those that cannot be read go with the first shard."""
    lines = [array("q") for _ in range(count)]
    offset = 0
    for number, line in enumerate(lines_of(path), 1):
        if line.strip():
            row = parse_line(line)
            shard = 0 if BAD_LINE in row else row.get("shard_id")
            if not isinstance(shard, int) or not 0 <= shard < count:
                raise UserError(
                    f"{key}: {path} line {number} has shard_id {shard!r}; there are tar files 0 to {count - 1}."
                )
            lines[shard].extend((offset, len(line)))
        offset += len(line)
    return [np.array(own).reshape(-1, 2) for own in lines]


def read_tar(tar: str, manifest: str, lines: np.ndarray, first: int = 0) -> NumberedRows:
    """Rows with their audio in the order of the tar file, then the rows whose audio it does not hold.

    Audio takes the place of `audio_filepath`, as {"bytes", "path"}.
    """
    waiting: dict[str, list[Row]] = {}
    strays: list[Row] = []
    with fsspec.open(manifest, "rb") as file:
        for offset, length in lines.tolist():
            file.seek(offset)
            row = parse_line(file.read(length))
            name = row.get("audio_filepath")
            if BAD_LINE in row or not isinstance(name, str):
                strays.append(row)
            else:
                waiting.setdefault(_member(name), []).append(row)
    number = 0
    with fsspec.open(tar, "rb") as opened:
        seekable = "://" not in tar
        mode = "r:*" if seekable else "r|*"
        with tarfile.open(fileobj=opened, mode=mode, tarinfo=CheckedHeader) as archive:
            for member in archive:
                rows = waiting.pop(_member(member.name), []) if member.isfile() else []
                if not rows or number + len(rows) <= first:
                    number += len(rows)
                    continue
                if member.size > LARGEST_MEMBER:
                    why = f"{member.name} in {tar} has {member.size:,} bytes; {LARGEST_MEMBER:,} at most are expected"
                    strays += [{**row, BAD_LINE: why} for row in rows]
                    continue
                content = archive.extractfile(member).read()
                for row in rows:
                    if number >= first:
                        yield number, {**row, "audio_filepath": {"bytes": content, "path": row["audio_filepath"]}}
                    number += 1
    lost = [row for rows in waiting.values() for row in rows]
    strays += [{**row, BAD_LINE: f"{tar} holds no {row['audio_filepath']}"} for row in lost]
    for row in strays:
        if number >= first:
            yield number, row
        number += 1


def _member(name: str) -> str:
    """Names of tar members and of rows alike: without folders, and without the mark of a repeated file."""
    return REPEATED.sub("", PurePosixPath(name).name)
