"""Helpers shared by the scripts that build the sample corpora: text normalisation, parquet shards, audio bytes."""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import soundfile as sf

SAMPLE_RATE = 16_000  # Hz, mono

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "audio": datasets.Audio(sampling_rate=SAMPLE_RATE),
        "text": datasets.Value("string"),
        "language": datasets.Value("string"),
        "duration": datasets.Value("float32"),
    }
)


def normalise_text(text: str) -> str:
    """Lower case, Unicode NFC, no punctuation but apostrophes inside words, single spaces."""
    text = unicodedata.normalize("NFC", text).lower().replace("’", "'")
    kept = "".join(c if c.isalnum() or c == "'" else " " for c in text)
    return " ".join(word for word in (w.strip("'") for w in kept.split()) if word)


def split_key(text: str) -> str:
    """Coarsest form of a text: letters and digits only, accents dropped, so that spelling variants share a key."""
    decomposed = unicodedata.normalize("NFD", normalise_text(text))
    return "".join(c for c in decomposed if c.isalnum())


def encode_audio(samples: np.ndarray, format: str, subtype: str, **options: Any) -> bytes:
    """Compressed file bytes of mono samples (float, -1 to 1, at SAMPLE_RATE)."""
    buffer = io.BytesIO()
    sf.write(buffer, samples, SAMPLE_RATE, format=format, subtype=subtype, **options)
    return buffer.getvalue()


def decode_audio(data: bytes) -> tuple[np.ndarray, int]:
    """Samples (float32) and sampling rate (Hz) of compressed file bytes."""
    return sf.read(io.BytesIO(data), dtype="float32")


def shard_path(folder: Path, split: str, index: int, count: int) -> Path:
    """Path of one parquet shard, named as datasets.load_dataset expects it."""
    return folder / f"{split}-{index:05d}-of-{count:05d}.parquet"


def write_shard(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows (id, audio {bytes, path}, text, language, duration in s) as one parquet file."""
    import pyarrow as pa

    path.parent.mkdir(parents=True, exist_ok=True)
    schema = FEATURES.arrow_schema
    columns = {name: [row[name] for row in rows] for name in schema.names}
    # Audio is compressed already; small row groups let a reader skip through the file.
    pq.write_table(pa.table(columns, schema=schema), path, row_group_size=100, compression="snappy")


def remove_shards(folder: Path, splits: Iterable[str]) -> None:
    """Delete the parquet shards of an earlier build."""
    for split in splits:
        for path in folder.glob(f"{split}-*-of-*.parquet"):
            path.unlink()


def read_texts(folder: Path, splits: Iterable[str]) -> list[tuple[str, str]]:
    """(text, language) of every row of the named splits under folder."""
    pairs: list[tuple[str, str]] = []
    for split in splits:
        paths = sorted(folder.glob(f"{split}-*-of-*.parquet"))
        if not paths:
            raise FileNotFoundError(
                f"no {split}-*.parquet under {folder}: build it first with scripts/corpus/build_voice_prompts.py"
            )
        for path in paths:
            table = pq.read_table(path, columns=["text", "language"]).to_pydict()
            pairs += list(zip(table["text"], table["language"], strict=True))
    return pairs
