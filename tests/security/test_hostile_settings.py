"""Settings and data from elsewhere: YAML and JSON that were made to do harm, references to secrets, and paths that
lead out of the data."""

import io
import json
import logging
import shutil
from typing import Any

import numpy as np
import pytest
from conftest import read_lines, write_manifest

from finetune.config.load import load_config, parse_overrides, read_yaml
from finetune.config.redaction import without_secrets, write_config
from finetune.config.schema import RunConfig
from finetune.data.audio_root import check_place, check_root
from finetune.data.decode import MOST_SAMPLES, decode_audio
from finetune.data.leave_out import LeaveOut
from finetune.data.quarantine import BadUtterance
from finetune.data.shards import BAD_LINE, parse_line
from finetune.data.sources import open_source, parse_sources
from finetune.data.stream import UtteranceStream
from finetune.data.utterances import examine
from finetune.errors import UserError
from finetune.evaluation.comparison import read_utterances
from finetune.models.adapters import read_adapter
from finetune.security.documents import check_references, parse_json, parse_yaml, resolved
from finetune.strategies.strategy import resolve_strategy
from finetune.tools.nemo_import.source import read_source
from finetune.training.checkpoints import read_checkpoint_state

TAG = "!!python/object/apply:os.mkdir [{mark}]"
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
)


def _counts() -> bytes:
    out = io.BytesIO()
    np.savez(out, keys=np.arange(3), counts=np.ones(9), languages=np.zeros(3), names=np.array(["en"]))
    return out.getvalue()


COUNTS = _counts()
BAD_YAML = {
    "tag": ("a: " + TAG, r"the tag .*os\.mkdir is refused"),
    "name tag": ("a: !!python/name:os.system", "is refused"),
    "binary tag": ("a: !!binary aGFsbG8=", "is refused"),
    "billion laughs": (LAUGHS, "more than 2,000,000 values"),
    "merged laughs": (
        LAUGHS.replace("[", "{<<: [").replace("]", "]}").replace("x,x,x,x,x,x,x,x,x", "{x: 1}"),
        "values|merging|mapping",
    ),
    "itself": ("a: &a [*a]", "refers to itself"),
    "deep": ("a: " + "[" * 5000, "nested more than 64 levels"),
    "long by references": (
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000)),
        "more than 2,000,000 values",
    ),
    "number": ("a: " + "9" * 5000, "more than 30 digits"),
    "hexadecimal": ("a: 0x" + "f" * 100_000, "more than 30 digits"),
    "twice": ("training: {output_dir: a, output_dir: b}", "duplicate key output_dir"),
    "twice among many": ("".join(f"k{i}: 1\n" for i in range(50_000)) + "z: 1\nz: 2\n", "duplicate key z"),
    "key": ("? [a]\n: b", "unhashable key"),
    "zero": ("a: \0", "control characters are not allowed"),
}


@pytest.mark.parametrize("kind", BAD_YAML)
def test_every_reader_of_yaml_refuses_it(kind, tmp_path):
    text, said = BAD_YAML[kind]
    mark = tmp_path / "mark"
    path = tmp_path / "bad.yaml"
    path.write_text(text.replace("{mark}", str(mark)))
    for read in (
        lambda: load_config(path, [], []),
        lambda: read_yaml(path, "--config"),
        lambda: read_source(path, []),
        lambda: parse_overrides([f"data.train={text.replace('{mark}', str(mark))}"]),
    ):
        with pytest.raises(UserError, match=said):
            read()
    assert not mark.exists()


def test_yaml_that_is_meant_is_read_as_before():
    text = "a: 1e-4\nb: &x [1, 0x1F, 1_000]\nc: *x\nd: {<<: {e: 1}, f: ~}\ng: 2026-11-22\nh: yes\ni: .inf\n"
    read = parse_yaml(text)
    assert read == {
        "a": 1e-4, "b": [1, 31, 1000], "c": [1, 31, 1000], "d": {"e": 1, "f": None}, "g": "2026-11-22", "h": True,
        "i": float("inf"),
    }  # fmt: skip
    tree = {"m": {"rate": 16000, "x": "${m.rate}", "y": "${.x}/${..n}"}, "n": ["${m.x}", {"z": "${n[0]}"}]}
    made = resolved(tree, "file")
    assert made["m"]["x"] == 16000
    assert made["n"] == [16000, {"z": 16000}]


@pytest.mark.parametrize("made", ["${a}{oc.env:HOME}", "${a}${c}", "${a}${d.e}", "x${f}{a}", "$${d}"])
def test_references_that_come_of_references_are_refused(made):
    """What is resolved is handed to OmegaConf, which would follow what is left."""
    tree = {"a": "$", "c": "{oc.env:HOME}", "d": {"e": "{c}"}, "f": "${a}", "made": made}
    with pytest.raises(UserError, match=r"file: made: .* is refused: a reference is \$\{key\}"):
        resolved(tree, "file")
    assert check_references(tree, lambda call: None)[0].startswith("made: ")
    kept = {"a": "$", "b": "${a}5 and {c}", "c": "${b}${a}"}
    assert resolved(kept, "file")["c"] == "$5 and {c}$"
    assert not check_references({"a": "${oc.env:HOME}/${oc.env:X}", "b": "${a}${a}"}, lambda call: None)


@pytest.mark.parametrize(
    "content", ['{"a":' * 50_000, "[1", "[]", "3", '"x"', '{"world_size": true}', '{"world_size": 1e9}', "\xff"]
)
def test_json_that_is_broken_or_of_another_form(content, tmp_path):
    data = content.encode("latin-1")
    for name in ("trainer_state.json", "ds.json", "adapter_config.json", "base_model.json", "u.jsonl"):
        (tmp_path / name).write_bytes(data)
    for read in (
        lambda: read_checkpoint_state(tmp_path),
        lambda: read_adapter(tmp_path),
        lambda: read_utterances(tmp_path / "u.jsonl"),
    ):
        with pytest.raises(UserError):
            read()
    if not content.startswith('{"world'):
        with pytest.raises(UserError, match=r"ds\.json"):
            resolve_strategy([], str(tmp_path / "ds.json"))


@pytest.mark.parametrize(
    "content", ['{"zero_optimization": "x"}', '{"zero_optimization": {"offload_optimizer": 1.5}}', "true"]
)
def test_a_deepspeed_file_of_another_form(content, tmp_path):
    """Found by scripts/faults/fuzz.py: what is no object ended in a traceback."""
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(UserError, match="is no DeepSpeed file"):
        resolve_strategy([], str(tmp_path / "ds.json"))


def test_other_findings_of_the_fuzzer(tmp_path):
    line = {"id": "a", "reference": "x", "hypothesis": "y", "normalization": {"a": 1}}
    (tmp_path / "u.jsonl").write_text(json.dumps(line))
    assert read_utterances(tmp_path / "u.jsonl")[1] is None
    (tmp_path / "nemo.yaml").write_text("model: {a: '${[}'}")
    with pytest.raises(UserError, match=r"nemo\.yaml"):
        read_source(tmp_path / "nemo.yaml", [])
    entry = {"audio_filepath": "a.wav", "text": "x", "duration": 1.0, "id": "\ud800", "lang": "\udfff"}
    (source,) = parse_sources(str(write_manifest(tmp_path / "m.jsonl", [json.dumps(entry)])), "data.train", "train")
    from finetune.data.batching import BatchLimits
    from finetune.data.options import StreamOptions

    opened = open_source(source, "data.train")
    options = StreamOptions(limits=BatchLimits(clips=1), sample_rate=16_000)
    found = examine(
        opened, "m.jsonl line 1", (0, 0, 0, 0), parse_line(json.dumps(entry).encode()), options, lambda text: [1]
    )
    assert (found.id.encode(), found.language.encode()) == (b"\\ud800", b"\\udfff")
    assert "bytes; " in parse_line(b" " * (2**24 + 1))[BAD_LINE]
    (tmp_path / "problems.jsonl").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"line 1 of .*problems\.jsonl is no"):
        LeaveOut(str(tmp_path / "problems.jsonl"), "data.leave_out")
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)


def test_records_of_a_run_that_were_tampered_with(tmp_path):
    """Found by scripts/faults/fuzz.py: a run's folder whose figures are texts, and counts in an archive of an unknown
    kind."""
    from finetune.evaluation.utterance_counts import UtteranceCounts
    from finetune.tools.report.page import write_run_page
    from finetune.tools.report.read import number, read_run

    (tmp_path / "config.yaml").write_text("training: {output_dir: x}")
    (tmp_path / "summary.json").write_text('{"steps": "x"}')
    (tmp_path / "environment.json").write_text("[" * 100_000)
    (tmp_path / "evaluations.jsonl").write_text("[" * 100_000)
    (tmp_path / "metrics.jsonl").write_text('{"step": %s, "loss": 1}\n{"step": 3, "loss": 2}\n' % ("9" * 400))
    assert read_run(tmp_path).step == 3
    assert [number(value) for value in (10**400, True, float("nan"), float("inf"), 3, -0.5)] == [
        None,
        None,
        None,
        None,
        3,
        -0.5,
    ]
    write_run_page(tmp_path)
    counts = bytearray(COUNTS)
    counts[counts.index(b"PK\x01\x02") + 10] = 99  # a way to compress that nobody knows
    (tmp_path / "base-test.npz").write_bytes(counts)
    with pytest.raises(ValueError, match="does not hold counts of clips"):
        UtteranceCounts.load(tmp_path / "base-test.npz")


# ---- references of a run file, and secrets --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            "https://x/${oc.env:HF_TOKEN}",
            r"data\.train: \$\{oc\.env:HF_TOKEN\} is refused: the name HF_TOKEN is that of a secret",
        ),
        ("${oc.env:AWS_SECRET_ACCESS_KEY,x}", "AWS_SECRET_ACCESS_KEY is that of a secret"),
        ("${oc.env:'WANDB_API_KEY'}", "WANDB_API_KEY is that of a secret"),
        ("${oc.env:${training.report_to}}", "is refused"),
        ("${${training.report_to}:HF_TOKEN}", "is refused"),
        ("${oc.decode:x}", r"a run file refers to its own keys, as \$\{training\.seed\}"),
        ([{"path": "x", "filters": {"a": "${oc.env:MY_PASSWORD}"}}], "MY_PASSWORD is that of a secret"),
        # Put together, these would be a reference once config.yaml, which is written resolved, is loaded again.
        (["$", "https://x/${data.train[0]}{oc.env:HF_TOKEN}"], r"data\.train\.1: .* is refused"),
        ("${oc.env:PROMPT_SIGN}{oc.env:HF_TOKEN}", r"data\.train: .* is refused"),
        (["${oc.env:PROMPT_SIGN}", "${.0}{oc.env:HF_TOKEN}"], r"data\.train\.1: .* is refused"),
        ("\\${oc.env:HF_TOKEN}", r"data\.train: .* is refused"),
        ("https://<removed>@host/x.jsonl", r"data\.train: a secret stood here and was taken out"),
    ],
)
def test_what_a_run_file_may_not_read(value, said, run_file, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "planted-secret")
    with pytest.raises(UserError, match=said) as refused:
        load_config(run_file(data__train=value), [], [])
    assert "planted-secret" not in str(refused.value)


def test_references_that_grow_are_refused(run_file):
    tree = {f"a{i}": f"${{.a{i + 1}}}${{.a{i + 1}}}" for i in range(60)} | {"a60": "x" * 10}
    with pytest.raises(UserError, match="references come to more than"):
        load_config(run_file(data__filters=tree), [], [])


def test_other_variables_and_keys_are_read(run_file, monkeypatch):
    monkeypatch.setenv("MY_DATA", "/data")
    path = run_file(
        data__train="${oc.env:MY_DATA}/a.jsonl",
        data__test="${data.train}",
        training__output_dir="${oc.env:NOT_SET,out}",
    )
    config, _ = load_config(path, [], [])
    assert (config.data.train, config.data.test, config.training.output_dir) == (
        "/data/a.jsonl",
        "/data/a.jsonl",
        "out",
    )


def test_what_a_variable_holds_is_no_reference(run_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-secret")
    monkeypatch.setenv("MY_DATA", "${oc.env:HF_TOKEN}")
    path = run_file(data__train="${oc.env:MY_DATA}", data__test="${data.train}", data__validation="${data.test}")
    config, _ = load_config(path, [], [])
    assert (config.data.train, config.data.test, config.data.validation) == ("${oc.env:HF_TOKEN}",) * 3


def test_config_yaml_holds_no_secret_and_is_else_as_it_was(run_file, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "wandb-planted-key")
    caplog.set_level(logging.WARNING, "finetune")
    logging.getLogger("finetune").propagate = True
    plain, _ = load_config(run_file(training__seed=3), [], [])
    write_config(tmp_path / "config.yaml", plain)
    again, _ = load_config(tmp_path / "config.yaml", [], [])
    assert again == plain
    assert not caplog.records
    url = "https://user:pass-planted@host/m.jsonl?sig=signature-planted"
    config, _ = load_config(run_file(data__train=[url, "b.jsonl"], data__test="x/wandb-planted-key/y"), [], [])
    write_config(tmp_path / "config.yaml", config)
    text = (tmp_path / "config.yaml").read_text()
    assert "planted" not in text
    assert text.startswith(
        "# data.train[0], data.test: a secret was taken out and stands here as <removed>.\n# To resume, start with"
    )
    assert "data.train[0], data.test" in caplog.text
    with pytest.raises(UserError, match=r"data\.train\[0\]: a secret stood here and was taken out\. Write it again"):
        load_config(tmp_path / "config.yaml", [], [])


def test_no_default_looks_like_a_secret():
    config = RunConfig.model_validate(
        {"model": {"name": "x"}, "data": {"train": "x"}, "training": {"output_dir": "x"}}
    )
    assert without_secrets(config) == (config.as_dict(), [])


# ---- where audio may lie --------------------------------------------------------------------------------------------


def test_data_root(clips, tmp_path):
    """Links are followed; audio in the row itself and files below the root are taken, whatever way the path goes."""
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    name = next(clips.glob("*.flac")).name
    shutil.copy(clips / name, root / "sub" / "in.flac")
    shutil.copy(clips / name, tmp_path / "out.flac")
    (root / "link.flac").symlink_to(tmp_path / "out.flac")
    (root / "back.flac").symlink_to(root / "sub" / "in.flac")
    (root / "away").symlink_to(tmp_path)
    (tmp_path / "root-2").mkdir()
    shutil.copy(clips / name, tmp_path / "root-2" / "x.flac")
    inside = ["sub/in.flac", "sub/../sub/in.flac", "back.flac", str(root / "sub" / "in.flac"), "away/root/sub/in.flac"]
    outside = [
        "../out.flac",
        "link.flac",
        "away/out.flac",
        str(tmp_path / "out.flac"),
        "../root-2/x.flac",
        "/etc/passwd",
        "s3://b/x.flac",
    ]
    held = {"audio": {"bytes": (clips / name).read_bytes(), "path": "/elsewhere.flac"}}
    rows = [{"audio_filepath": path, "text": "un", "id": str(i)} for i, path in enumerate(inside + outside)]
    manifest = write_manifest(root / "m.jsonl", rows)

    def read(limit: Any) -> tuple[list[str], dict[str, str]]:
        from dataclasses import replace

        from stream_cases import encode

        from finetune.data.batching import BatchLimits
        from finetune.data.options import StreamOptions

        opened = [
            replace(open_source(s, "k"), root=check_root(limit)) for s in parse_sources(str(manifest), "k", "train")
        ]
        options = StreamOptions(limits=BatchLimits(clips=4), sample_rate=16_000, shuffle=False, read_retries=0)
        batches = list(UtteranceStream(opened, options, encode).batches())
        return [i for b in batches for i in b.ids], {q["id"]: q["reason"] for b in batches for q in b.quarantined}

    ids, quarantined = read(root)
    assert sorted(ids) == [str(i) for i in range(len(inside))]
    assert len(quarantined) == len(outside)
    assert all("the audio lies outside of data.root: " in reason for reason in quarantined.values())
    check_place(held["audio"], str(root), str(root))
    for bad in (
        "../x.flac",
        "a/../../x",
        "http://elsewhere/x",
        "%2e%2e/x",
        "a/%2E./%2e%2E/x",
        "a%2f..%2f..%2fx",
        "%252e%252e/x",
        "..%5cx",
        ".\t./x",
        ".%0a./x",
    ):
        with pytest.raises(BadUtterance, match=r"outside of data\.root"):
            check_place(bad, "s3://bucket/a", "s3://bucket/a")
    for good in ("x.flac", "100%25..%20un.flac", "a/..x/%41.flac"):
        check_place(good, "s3://bucket/a", check_root("s3://bucket/a/"))
    with pytest.raises(UserError, match=r"data\.root: there is no directory"):
        check_root(str(tmp_path / "none"))


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "FILE:///etc/passwd", "ssh://h/x", "reference://x", "local://x", "github://o:r@/x"]
)
def test_addresses_of_odd_storage_are_refused_in_rows(url):
    with pytest.raises(BadUtterance, match="a row may name a path, or an address of s3"):
        check_place(url, "/data", None)
    with pytest.raises(BadUtterance, match="is a chain of storages"):
        check_place(f"simplecache::{url}", "/data", None)


def test_a_run_with_data_root_puts_the_others_into_quarantine(run_train, tiny_run, clips, tmp_path, capfd):
    rows = read_lines(clips / "manifest.jsonl")[:8]
    shutil.copy(clips / rows[0]["audio_filepath"], tmp_path / "secret.flac")
    rows[0]["audio_filepath"] = str(tmp_path / "secret.flac")
    for row in rows[1:]:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
    manifest = write_manifest(tmp_path / "m.jsonl", rows)
    data = {"train": str(manifest), "validation": None, "test": None, "root": str(clips), "max_bad_fraction": 0.5}
    training = {"max_steps": -1, "num_train_epochs": 1, "eval_on_start": False, "save_steps": 0}
    assert run_train(*tiny_run(data=data, training=training)) == 0
    (line,) = read_lines(tmp_path / "run" / "quarantine.jsonl")
    assert line["id"] == rows[0]["id"]
    assert line["reason"] == f"the audio lies outside of data.root: {tmp_path / 'secret.flac'}"
    bad = tmp_path / "no-such-root"
    assert run_train(*tiny_run(data={"root": str(bad)}, training={"output_dir": str(tmp_path / "b")})) == 2
    assert f"data.root: there is no directory {bad}" in capfd.readouterr().err


def test_compressed_silence_that_would_fill_the_memory(tmp_path, monkeypatch):
    import soundfile

    monkeypatch.setattr("finetune.data.decode.MOST_SAMPLES", 2**16)
    soundfile.write(tmp_path / "long.flac", np.zeros(2**18, np.float32), 16_000)
    for part in ({}, {"offset": 0.0}, {"offset": 1.0, "duration": 1e9}):
        with pytest.raises(BadUtterance, match=r"h long with 1 channel\(s\); that does not go into the memory"):
            decode_audio(str(tmp_path / "long.flac"), 16_000, **part)
    assert len(decode_audio(str(tmp_path / "long.flac"), 16_000, offset=1.0, duration=2.0)) == 32_000
    assert MOST_SAMPLES > 16_000 * 3600 * 8


def test_tars_of_clips_with_a_size_below_zero_end(tmp_path):
    """Python's own tarfile goes in circles on them, `datasets` with it."""
    import tarfile

    from finetune.data.reader import rows_from
    from finetune.data.retry import UnreadableShard

    head = bytearray(tarfile.TarInfo("a.wav").tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" * 11 + b"\x00"
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head[:512])
    (tmp_path / "a.tar").write_bytes(bytes(head) + bytes(2048))
    manifest = write_manifest(tmp_path / "m.jsonl", [{"audio_filepath": "a.wav", "text": "x"}])
    value = {"path": str(manifest), "tarred_audio": str(tmp_path / "a.tar")}
    opened = open_source(parse_sources(value, "data.train", "train")[0], "data.train")
    with pytest.raises(UnreadableShard, match=r"says that it has -\d+ bytes"):
        list(rows_from(opened.shards[0], 0, 0))
    (alone,) = parse_sources(str(tmp_path / "a.tar"), "data.train", "train")
    with pytest.raises(UserError, match=r"a\.tar"):
        open_source(alone, "data.train")
