"""NeMo's tarred data sets: audio in tar files, and their rows in manifests, one for each tar file or one for all.

Paths may hold ranges, as NeMo writes them (`audio__OP_0..127_CL_.tar`) or in braces (`audio_{0..127}.tar`).
"""

import io
import re
import tarfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import PurePosixPath
from typing import cast

import numpy as np

from finetune.data.shards import BAD_LINE, SCAN_BYTES, NumberedRows, Row, Shard, parse_line
from finetune.data.storage import expand, open_binary
from finetune.errors import UserError
from finetune.security.archives import CheckedHeader

LARGEST_MEMBER = 2**30
REPEATED = re.compile(r"-sub\d+(?=\.[^.]*$|$)")
"""What NeMo adds to the name of a file of which several parts are used."""


def expand_ranges(path: str) -> list[str]:
    """Return the paths that ranges and wildcards stand for, in their order."""
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
    """Make one shard a tar file; also return the number of rows.

    Args:
        manifest: path of one manifest with `shard_id` in its rows, or of one a tar file, with ranges.
        tars: path of the tar files, with ranges.
        key: for messages.
    """
    manifests, files = expand_ranges(manifest), expand_ranges(tars)
    if len(manifests) not in (1, len(files)):
        raise UserError(
            f"{key}: {len(manifests)} manifests do not fit {len(files)} tar files; one for all, or one each."
        )

    def by_shard_id(number: int, line: bytes) -> int:
        row = parse_line(line)
        shard = 0 if BAD_LINE in row else row.get("shard_id")
        if not isinstance(shard, int) or not 0 <= shard < len(files):
            raise UserError(
                f"{key}: {manifest} line {number} has shard_id {shard!r}; there are tar files 0 to {len(files) - 1}."
            )
        return shard

    try:
        if len(manifests) == len(files):
            lines = [by_shard(name, 1, lambda number, line: 0)[0] for name in manifests]
        else:
            lines = by_shard(manifests[0], len(files), by_shard_id)
    except OSError as error:
        raise UserError(f"{key}: a manifest cannot be read: {type(error).__name__}: {error}") from error
    shards = [
        Shard(file, "row", 0, len(own), partial(read_tar, file, manifests[min(i, len(manifests) - 1)], own))
        for i, (file, own) in enumerate(zip(files, lines, strict=True))
    ]
    return shards, sum(map(len, lines))


def by_shard(path: str, count: int, shard_of: Callable[[int, bytes], int]) -> list[np.ndarray]:
    """Return the (n, 2) offsets and lengths of a manifest's lines that are not blank, by shard.

    `shard_of` tells the shard of a line by its number, from 1 on, and content.
    """
    lines = [array("q") for _ in range(count)]
    offset = 0
    with open_binary(path) as file:
        # A remote file's own readline fetches and searches a block of megabytes.
        for number, line in enumerate(io.BufferedReader(cast(io.RawIOBase, file), SCAN_BYTES), 1):
            if line.strip():
                lines[shard_of(number, line)].extend((offset, len(line)))
            offset += len(line)
    return [np.array(own).reshape(-1, 2) for own in lines]


def read_tar(tar: str, manifest: str, lines: np.ndarray, first: int = 0) -> NumberedRows:
    """Read the rows with their audio in the order of the tar file, then the rows whose audio it does not hold.

    Audio takes the place of `audio_filepath`, as {"bytes", "path"}.
    """
    waiting: dict[str, list[Row]] = {}
    strays: list[Row] = []
    with open_binary(manifest) as file:
        for offset, length in lines.tolist():
            file.seek(offset)
            row = parse_line(file.read(length))
            name = row.get("audio_filepath")
            if BAD_LINE in row or not isinstance(name, str):
                strays.append(row)
            else:
                waiting.setdefault(_member(name), []).append(row)
    number = 0
    with open_binary(tar) as opened:
        open_tar = partial(tarfile.open, fileobj=opened, tarinfo=CheckedHeader)
        with open_tar(mode="r|*") if "://" in tar else open_tar(mode="r:*") as archive:  # remote files do not seek
            for member in archive:
                rows = waiting.pop(_member(member.name), []) if member.isfile() else []
                if not rows or number + len(rows) <= first:
                    number += len(rows)
                    continue
                if member.size > LARGEST_MEMBER:
                    why = f"{member.name} in {tar} has {member.size:,} bytes; {LARGEST_MEMBER:,} at most are expected"
                    strays += [{**row, BAD_LINE: why} for row in rows]
                    continue
                audio = archive.extractfile(member)
                content = audio.read() if audio is not None else b""
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
    """Return a name as tar members and rows have it in common: without folders and the mark of a repeated file."""
    return REPEATED.sub("", PurePosixPath(name).name)
