"""What scripts/faults/fuzz.py feeds: each reader through its public function, with whole inputs to begin from."""

import io
import json
import pickle
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.distributed.checkpoint
import yaml

from finetune.config.load import load_config, parse_overrides
from finetune.data.batching import BatchLimits
from finetune.data.decode import decode_audio
from finetune.data.filters import FilteredUtterance, Filters
from finetune.data.leave_out import LeaveOut
from finetune.data.options import StreamOptions
from finetune.data.quarantine import BadUtterance
from finetune.data.reader import rows_from
from finetune.data.retry import UnreadableShard
from finetune.data.shards import manifest_shards, parquet_shards, parse_line
from finetune.data.sources import OpenSource, Source, parse_sources
from finetune.data.tarred import tarred_shards
from finetune.data.utterances import examine
from finetune.errors import UserError
from finetune.evaluation.comparison import read_utterances
from finetune.evaluation.utterance_counts import UtteranceCounts
from finetune.models.adapters import read_adapter
from finetune.models.nemo_archive import check_model_config, read_config
from finetune.models.sentencepiece_model import parse as parse_tokenizer
from finetune.paths import ROOT
from finetune.security.archives import reading
from finetune.security.documents import parse_settings, parse_yaml, resolved
from finetune.security.pickles import check_checkpoint, load_tensors
from finetune.strategies.strategy import resolve_strategy
from finetune.tools.nemo_import.source import read_source
from finetune.tools.report.read import read_run
from finetune.training.checkpoints import read_checkpoint_state

REFUSALS = (UserError, BadUtterance, FilteredUtterance, UnreadableShard)
COLUMNS = {"audio": "audio_filepath", "text": "text", "language": "lang", "id": "id"}


@dataclass(frozen=True)
class Reader:
    """One way into the product.

    Attributes:
        name: in the table.
        read: takes the bytes, and a folder of its own that it may write into. Whatever it raises but `refusals` is a
            failure.
        seeds: makes the whole inputs that mutation begins from.
        share: how many inputs it gets beside the others'; slow readers get few.
        refusals: what it says no with: the product's own errors, and the ValueError of functions that document it.
    """

    name: str
    read: Callable[[bytes, Path], Any]
    seeds: Callable[[], list[bytes]]
    share: int
    refusals: tuple[type[Exception], ...] = REFUSALS


def put(folder: Path, name: str, data: bytes) -> Path:
    """Writes the input to a file, in place: a folder in memory is asked for."""
    path = folder / name
    path.write_bytes(data)
    return path


# ---- data -----------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"audio_filepath": "a.wav", "text": "un deux", "duration": 1.25, "lang": "fr", "id": "a/1"},
    {"audio_filepath": "../b.wav", "text": "One.", "duration": 3, "offset": 0.5, "shard_id": 0, "weight": None},
    {
        "audio_filepath": "s3://user:secret@bucket/c.flac?x=1",
        "text": "\u202eabc\x1b[31m",
        "duration": "1",
        "lang": ["x"],
    },
    {
        "audio_filepath": {"path": "/etc/passwd", "bytes": None},
        "text": "x" * 50,
        "duration": 1e308,
        "offset": -1,
        "id": 7,
    },
]
OPTIONS = StreamOptions(limits=BatchLimits(clips=4), sample_rate=16_000, text_normalization="basic")


@cache
def _source(root: str | None) -> OpenSource:
    filters = Filters(min_duration=0.1, max_duration=40.0)
    return OpenSource(Source(path="m.jsonl"), [], "/nowhere", 1, COLUMNS, is_manifest=True, filters=filters, root=root)


def examine_line(data: bytes, folder: Path) -> None:
    row = parse_line(data)
    root = "/nowhere" if len(data) % 2 else None
    entry = examine(_source(root), "m.jsonl line 1", (0, 0, 0, 0), row, OPTIONS, lambda text: [1] * len(text.split()))
    json.dumps([entry.id, entry.language, entry.text]).encode()
    entry.id.encode()
    entry.language.encode()


def read_manifest(data: bytes, folder: Path) -> None:
    shards, _ = manifest_shards(str(put(folder, "m.jsonl", data)))
    for shard in shards:
        for _ in rows_from(shard, 0, 0):
            pass


def manifest_seeds() -> list[bytes]:
    lines = [json.dumps(row).encode() for row in ROWS]
    return [b"\n".join(lines) + b"\n", b"\r\n".join(lines), b"\n\n" + lines[0] + b"\n  \n" + lines[1]]


def tar_of(files: Iterable[tuple[str, bytes]], mode: str = "w:") -> bytes:
    """A tar archive of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def read_tar_shard(data: bytes, folder: Path) -> None:
    rows = [{"audio_filepath": n, "text": "x", "shard_id": 0} for n in ("a.wav", "b.wav")]
    manifest = put(folder, "tarred.jsonl", b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    shards, _ = tarred_shards(str(manifest), str(put(folder, "a.tar", data)), "data.train")
    for shard in shards:
        for _ in rows_from(shard, 0, 0):
            pass


def parquet_seeds() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    rows = [{"audio": {"bytes": b"RIFF" * 9, "path": "a"}, "text": f"x{i}", "duration": 1.0} for i in range(20)]
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=7)
    return [out.getvalue()]


def read_parquet(data: bytes, folder: Path) -> None:
    try:
        shards = parquet_shards([str(put(folder, "a.parquet", data))], ["audio", "text", "duration"], "audio")
    except (OSError, ValueError):  # what it documents
        return
    for shard in shards:
        for _, _ in zip(range(100), rows_from(shard, 0, 0)):
            pass


def audio_seeds() -> list[bytes]:
    found = []
    wave_S = np.sin(np.arange(800) / 9).astype(np.float32)
    for kind, subtype in (
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("MP3", "MPEG_LAYER_III"),
    ):
        out = io.BytesIO()
        soundfile.write(out, wave_S, 16_000, format=kind, subtype=subtype)
        found.append(out.getvalue())
    return found


def sources_seeds() -> list[bytes]:
    values = [
        "a.jsonl",
        [{"path": "a", "weight": 1, "filters": {"min_words": 1}}, {"path": "b", "weight": 2.5}],
        {"path": 3},
    ]
    return [json.dumps(value).encode() for value in values]


def read_sources(data: bytes, folder: Path) -> None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    parse_sources(value, "data.train", "train")


# ---- configuration --------------------------------------------------------------------------------------------------

RUN = b"""model:
  name: m.nemo
  lora_rank: 4
data:
  train: [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1e-1}]
  validation: &v v.jsonl
  test: *v
  batch_bounds: [[5, 8], [10, 4]]
training:
  output_dir: out
  max_steps: 10
  learning_rate: 1e-4
  report_to: [tensorboard]
  optimizer_args: {betas: [0.9, 0.95], eps: 1e-8}
"""
BOMB = b"a: &a [x, x]\n" + b"".join(b"%c: &%c [*%c, *%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(12))
YAML_SEEDS = [
    RUN,
    BOMB,
    b"a: !!python/object/apply:os.system [id]\nb: !!binary aGFsbG8=\n",
    b"a: ${b}\nb: ${oc.env:HOME}\nc: [${a}, 0x1F, 1_000, .inf, ~, yes, 2001-01-01, 12:30:45]\n? [k]\n: v\n"
    b"<<: {d: 1}\n",
    b"model:\n  sample_rate: 16000\n  pre: {rate: '${model.sample_rate}', x: '${.rate}${..sample_rate}'}\n",
]


def read_any_yaml(data: bytes, folder: Path) -> None:
    parse_yaml(data.decode("utf-8"))


def read_run_file(data: bytes, folder: Path) -> None:
    load_config(put(folder, "run.yaml", data), [], [])


def read_overrides(data: bytes, folder: Path) -> None:
    parse_overrides(data.decode("utf-8", "surrogateescape").split("\n"))


def read_strategy(data: bytes, folder: Path) -> None:
    resolve_strategy([], str(put(folder, "ds.json", data)))


def import_nemo_yaml(data: bytes, folder: Path) -> None:
    read_source(put(folder, "nemo.yaml", data), [])


def nemo_yaml_seeds() -> list[bytes]:
    layout = (ROOT / "finetune/configs/models/fastconformer_tdt_3m.yaml").read_bytes()
    return [
        layout,
        b"model: {train_ds: {manifest_filepath: ???, batch_size: 4}, optim: {name: adamw, lr: 1e-4}}\ntrainer: "
        b"{devices: -1}",
    ]


# ---- models ---------------------------------------------------------------------------------------------------------


@cache
def small_config() -> bytes:
    """A small configuration as a .nemo has it."""
    layout = yaml.safe_load((ROOT / "finetune/configs/models/fastconformer_tdt_3m.yaml").read_text(encoding="utf-8"))
    model = resolved(layout, "layout")["model"]
    model["tokenizer"] = {"dir": "/x", "type": "bpe", "model_path": "nemo:0_tokenizer.model"}
    model["encoder"].update(d_model=8, n_layers=1)
    model["joint"].update(vocabulary=["a", "b", "/"], num_classes=3)
    model["decoder"]["vocab_size"] = 3
    return yaml.safe_dump(model).encode()


@cache
def small_weights() -> bytes:
    """A torch file of two tensors."""
    out = io.BytesIO()
    torch.save({"encoder.a": torch.zeros(3), "joint.b": torch.ones(2, 2, dtype=torch.bfloat16)}, out)
    return out.getvalue()


@cache
def nemo_seeds() -> list[bytes]:
    files = [
        ("./model_config.yaml", small_config()),
        ("./0_tokenizer.model", b"\x0a\x05\x0a\x01a"),
        ("./model_weights.ckpt", small_weights()),
    ]
    link = tarfile.TarInfo("../evil")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        long = tarfile.TarInfo("x" * 300)
        long.pax_headers = {"comment": "y" * 40}
        archive.addfile(long)
        archive.addfile(link)
    return [tar_of(files), tar_of(files, "w:gz"), out.getvalue(), tar_of(files[:1])]


def read_nemo_archive(data: bytes, folder: Path) -> None:
    read_config(put(folder, "m.nemo", data))


def read_nemo_weights(data: bytes, folder: Path) -> None:
    from finetune.models.nemo_archive import weights_in

    with reading(put(folder, "m.nemo", data), "model.name") as (archive, members):
        weights_in(archive, members, "m.nemo")


def read_model_config(data: bytes, folder: Path) -> None:
    values = resolved(parse_settings(data.decode("utf-8", "replace"), "m"), "m")
    check_model_config(values, "m", {"0_tokenizer.model"})


def pickle_seeds() -> list[bytes]:
    values = [{"a": [1, 2.5, "x", b"y", None, (1,)]}, [torch.Size([1]), {1, 2}], print, complex(1, 2)]
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.checkpoint.save({"a": torch.ones(2), "b": 0.5}, checkpoint_id=folder, no_dist=True)
        table = Path(folder, ".metadata").read_bytes()
    return [table] + [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4)]


def read_weights(data: bytes, folder: Path) -> None:
    load_tensors(put(folder, "w.ckpt", data), "weights")


def torch_seeds() -> list[bytes]:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"a": 1}, 2))
        archive.writestr("a/version", b"3\n")
        archive.writestr("a/data/0", b"\0" * 4000)
    return [small_weights(), out.getvalue()]


def read_checkpoint(data: bytes, folder: Path) -> None:
    put(folder, "random_states_0.pkl", data)
    check_checkpoint(folder)


def tokenizer_seeds() -> list[bytes]:
    return [(ROOT / "examples/base/tokenizer/tokenizer.model").read_bytes()[:900], b"\x0a\x05\x0a\x01a", b""]


def adapter_seeds() -> list[bytes]:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ".*(a|b)", "lora_dropout": 0.1}
    return [json.dumps(config).encode(), b"[]", b'{"target_modules": "("}']


@cache
def _adapter_weights() -> bytes:
    from safetensors.torch import save

    return save({"base_model.model.a": torch.zeros(2)})


def read_lora(data: bytes, folder: Path) -> None:
    put(folder, "adapter_config.json", data)
    put(folder, "base_model.json", b'{"name": "x", "sha256": "y"}' if len(data) % 2 else data)
    put(folder, "adapter_model.safetensors", _adapter_weights())
    read_adapter(folder)


def safetensors_seeds() -> list[bytes]:
    return [_adapter_weights()]


def read_lora_weights(data: bytes, folder: Path) -> None:
    put(folder, "adapter_config.json", adapter_seeds()[0])
    put(folder, "base_model.json", b'{"name": "x", "sha256": "y"}')
    put(folder, "adapter_model.safetensors", data)
    read_adapter(folder)


def hugging_face_seeds() -> list[bytes]:
    config = {
        "model_type": "parakeet_tdt", "vocab_size": 129, "blank_token_id": 128, "durations": [0, 1, 2],
        "decoder_hidden_size": 16,
        "num_decoder_layers": 1, "hidden_act": "relu", "max_symbols_per_step": 10,
        "encoder_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "num_mel_bins": 80},
        "auto_map": {"AutoModel": "evil.Model"},
    }  # fmt: skip
    return [json.dumps(config).encode()]


def read_hugging_face(data: bytes, folder: Path) -> None:
    from finetune.models.huggingface.reading import nemo_config

    put(folder, "config.json", data)
    put(folder, "processor_config.json", b'{"feature_extractor": {"feature_size": 80}}')
    nemo_config(folder)


def leave_out_seeds() -> list[bytes]:
    return [b'{"source": "m.jsonl line 3", "reason": "duplicate_id"}\n{"source": "m.jsonl line 5", "reason": "x"}\n']


def read_leave_out(data: bytes, folder: Path) -> None:
    LeaveOut(str(put(folder, "problems.jsonl", data)), "data.leave_out").reason("m.jsonl line 3")


def counts_seeds() -> list[bytes]:
    out = io.BytesIO()
    np.savez(
        out,
        keys=np.arange(3, dtype=np.uint64),
        counts=np.ones(9, np.uint32),
        languages=np.zeros(3, np.uint16),
        names=np.array(["en"]),
    )
    objects = io.BytesIO()
    np.savez(objects, keys=np.array([print], dtype=object), counts=np.ones(1), languages=np.ones(1), names=np.ones(1))
    return [out.getvalue(), objects.getvalue()]


def read_counts(data: bytes, folder: Path) -> None:
    UtteranceCounts.load(put(folder, "base-test.npz", data))


RECORDS = (
    "config.yaml",
    "metrics.jsonl",
    "evaluations.jsonl",
    "quarantine.jsonl",
    "summary.json",
    "environment.json",
    "errors-test.json",
)


def run_seeds() -> list[bytes]:
    return [
        b"training: {output_dir: x, max_grad_norm: 1}\ndata: {train: a}\n",
        b'{"step": 1, "loss": 2.5, "split": "test", "wer": 0.5, "language": "en"}\n{"step": 2, "split": "validation", '
        b'"language": null}\n',
        b'{"id": "a", "source": "m line 1", "reason": "there is no file /a/b"}\n',
        b'{"steps": 2, "best_step": 1, "wer_by_language": {"en": {"before": 1, "after": null}}}',
    ]


def read_records(data: bytes, folder: Path) -> None:
    for name in RECORDS:
        (folder / name).unlink(missing_ok=True)
    put(folder, RECORDS[len(data) % len(RECORDS)], data)
    put(folder, RECORDS[(len(data) + 1) % len(RECORDS)], data)
    run = read_run(folder)
    run.best("test"), run.judged_on, run.step


def utterances_seeds() -> list[bytes]:
    return [b'{"id": "a", "language": "en", "reference": "x", "hypothesis": "y", "normalization": "basic"}\n']


def read_clips(data: bytes, folder: Path) -> None:
    read_utterances(put(folder, "u.jsonl", data))


def state_seeds() -> list[bytes]:
    return [b'{"world_size": 1, "progress": {}, "kind": {}}', b'{"world_size": 99999999}']


def read_state(data: bytes, folder: Path) -> None:
    put(folder, "trainer_state.json", data)
    put(folder, "stream-0.json", b"{}")
    read_checkpoint_state(folder)


def read_distributed_metadata(data: bytes, folder: Path) -> None:
    put(folder, ".metadata", data)
    check_checkpoint(folder)


VALUE = (*REFUSALS, ValueError)
READERS = [
    Reader("manifest line", examine_line, lambda: [json.dumps(row).encode() for row in ROWS], 5000),
    Reader("manifest file", read_manifest, manifest_seeds, 250),
    Reader("tarred audio", read_tar_shard, lambda: [tar_of([("a.wav", b"RIFF"), ("b.wav", b"x" * 600)]),
                                                    *nemo_seeds()[:2]], 100),
    Reader("parquet shard", read_parquet, parquet_seeds, 30),
    Reader("audio", lambda data, folder: decode_audio({"bytes": data}, 16_000), audio_seeds, 200),
    Reader("sources of a run file", read_sources, sources_seeds, 700),
    Reader("YAML", read_any_yaml, lambda: YAML_SEEDS, 350, VALUE),
    Reader("run file", read_run_file, lambda: YAML_SEEDS[:2], 4),
    Reader("key=value", read_overrides, lambda: [b"training.max_steps=10\ndata.train=[a, {b: c}]", b"a.b=1\na=2"],
    250),
    Reader("DeepSpeed JSON", read_strategy, lambda: [b'{"zero_optimization": {"stage": 2, "offload_optimizer": '
                                                     b'{"device": "cpu"}}}'], 250),
    Reader("NeMo configuration to import", import_nemo_yaml, nemo_yaml_seeds, 8),
    Reader("configuration of a .nemo", read_model_config, lambda: [small_config(), *YAML_SEEDS[3:]], 40),
    Reader(".nemo archive", read_nemo_archive, nemo_seeds, 90),
    Reader("weights in a .nemo", read_nemo_weights, nemo_seeds, 100),
    Reader("torch file", read_weights, torch_seeds, 250),
    Reader("table of contents of a checkpoint", read_distributed_metadata, pickle_seeds, 1100),
    Reader("checkpoint folder", read_checkpoint, torch_seeds, 150),
    Reader("state of a checkpoint", read_state, state_seeds, 200),
    Reader("SentencePiece model", lambda data, folder: parse_tokenizer(data, "t"), tokenizer_seeds, 600),
    Reader("adapter", read_lora, adapter_seeds, 150),
    Reader("weights of an adapter", read_lora_weights, safetensors_seeds, 150),
    Reader("Hugging Face config.json", read_hugging_face, hugging_face_seeds, 3),
    Reader("problems.jsonl", read_leave_out, leave_out_seeds, 200),
    Reader("counts (.npz)", read_counts, counts_seeds, 100, (*VALUE, OSError)),
    Reader("records of a run", read_records, run_seeds, 30),
    Reader("utterances", read_clips, utterances_seeds, 150),
]  # fmt: skip

EXTREMES = [
    b"0", b"-1", b"9" * 40, b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"{}", b"[]", b'""', b"[" * 200,
    b"{" * 200, b'{"a":' * 80,
    b"\\ud800", b"\\u0000", b"\xff\xfe", b"\x00", b"\xe2\x80\xae", b"\x1b[2J", b"../" * 8, b"/etc/passwd",
    b"file:///etc/passwd", b"${a}",
    b"${oc.env:HOME}", b"${${a}}", b"!!python/name:os.system", b"&a ", b"*a", b"<<: ", b"---\n", b"...", b"\t", b"\r",
    b"\n", b": ", b"- ",
    b"? ", b"0x" + b"f" * 30, b"_target_: os.system\n", b"nemo:../x", b"cos\nsystem\n", b"\x93", b"\x81", b"R.",
    b"PK\x01\x02", b"PK\x05\x06",
    b"\x80\x04", struct.pack("<Q", 2**63), struct.pack("<I", 2**32 - 1), struct.pack(">i", -2), b"0000000",
    b"7777777777\0", b"\x80" + b"\xff" * 11,
    b"ustar\x00", b"x\0" * 3, b"GNU.sparse.size=1", b"30 size=-1000\n", b"path=", "é".encode(), "日本".encode(), b"/",
]  # fmt: skip
