"""Texts from data that would act on a terminal, a page or a tracker, and secrets of the environment: a real run, and
every file that it left."""

import html.parser
import json
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import read_lines, write_manifest

from finetune.callbacks.trackers import _cell, _tag
from finetune.config.redaction import write_config
from finetune.config.schema import RunConfig
from finetune.evaluation.tables import print_rates
from finetune.logs import set_up_logging
from finetune.security.safe_text import ACTS, json_line, lines, one_line
from finetune.security.secrets import clean_text
from finetune.tools.report.page import environment
from finetune.tools.report.plots import Curve, curves_plot

EVIL_TEXT = (
    "<img src=x onerror=alert(1)> \x1b[2J\x1b]0;owned\x07 \u202eredrum ![a](http://evil.example/x.png) | "
    "</script><script>alert(2)</script> \x9b31m"
)
EVIL_ID = "id\n99:99:99 WER on test: 0.000\r\x1b[31m<b>\u2028"
EVIL_LANGUAGE = "<a href='javascript:alert(3)'>fr</a>\n\u202e"
SECRETS = {
    "HF_TOKEN": "hf_PlantedTokenPlantedToken",
    "WANDB_API_KEY": "planted0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "planted/Aws+Secret/Key",
    "MY_PASSWORD": "planted-password",
}
IN_URL = "planted-in-the-url"
IN_COMMAND = "planted-in-the-command"


class Page(html.parser.HTMLParser):
    """Tags and attributes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes


@pytest.fixture
def hostile_run(run_train, tiny_run, clips, tmp_path, monkeypatch, capfd) -> tuple[Path, str]:
    """A training on such data with such an environment; its folder, and what it said."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    from finetune.security.secrets import secrets_of_the_environment

    secrets_of_the_environment.cache_clear()
    words = [
        "train.py",
        "--config",
        "RUN.yaml",
        "--api-key",
        IN_COMMAND,
        f"data.test=https://u:{IN_URL}@h/x?sig={IN_COMMAND}",
    ]
    monkeypatch.setattr("finetune.training.outputs.command_line", lambda: words)
    rows = read_lines(clips / "manifest.jsonl")
    evil_name = "<b>x\u202e\x1b[31m.flac"
    shutil.copy(clips / rows[0]["audio_filepath"], tmp_path / evil_name)
    memory, address = fsspec.filesystem("memory"), f"memory://user:{IN_URL}@bucket"
    for row in rows:
        memory.pipe(f"{address}/{row['audio_filepath']}", (clips / row["audio_filepath"]).read_bytes())
    judged = [dict(row) for row in rows[:8]]
    for i, row in enumerate(judged):
        row["audio_filepath"] = str(clips / row["audio_filepath"])
        row.update(text=f"{EVIL_TEXT} {i}", id=f"{EVIL_ID}{i}", lang=EVIL_LANGUAGE if i % 2 else "en")
    judged[0]["audio_filepath"] = str(tmp_path / evil_name)
    # A source whose address holds a password, with clips that go to quarantine, one of them with an address of its
    # own.
    bad = [
        {"audio_filepath": "none.wav", "text": "un", "id": EVIL_ID},
        {"audio_filepath": f"s3://u:{IN_URL}@b::file://x.wav?sig={IN_URL}", "text": "un"},
        {"audio_filepath": "none2.wav", "text": "un"},
    ]
    memory.pipe(f"{address}/m.jsonl", "".join(json.dumps(row) + "\n" for row in [*rows, *bad]).encode())
    manifest = str(write_manifest(tmp_path / "judged.jsonl", judged))
    data = {
        "train": f"{address}/m.jsonl", "validation": manifest, "test": manifest, "wer_normalization": "none",
        "max_bad_fraction": 0.5, "read_retries": 0,
    }  # fmt: skip
    training = {"report_to": "tensorboard", "max_steps": -1, "num_train_epochs": 1, "report_clips": 4}
    capfd.readouterr()
    assert run_train(*tiny_run(data=data, training=training)) == 0
    secrets_of_the_environment.cache_clear()
    memory.rm(f"/user:{IN_URL}@bucket", recursive=True)
    return tmp_path / "run", capfd.readouterr().err


def test_a_run_on_hostile_texts_with_secrets_around_it(hostile_run):
    run, said = hostile_run
    # Terminal and log: nothing acts on it, and each record is its line; the samples' own format has three.
    assert not re.search(
        "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", said.replace("\r", "") if "it/s" in said else said
    )
    for line in said.splitlines():
        if "|" not in line:  # progress bars
            assert re.match(r"\d\d:\d\d:\d\d |           (before|after) ", line), line
    assert "99:99:99" not in [line[:8] for line in said.splitlines()]
    assert "onerror=alert(1)" in said
    # Records: one object a line.
    quarantined = read_lines(run / "quarantine.jsonl")
    assert len(quarantined) == 3
    assert {row["language"] for row in read_lines(run / "evaluations.jsonl")} == {None, "en", EVIL_LANGUAGE}
    # The page.
    text = (run / "report.html").read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text.split("<script>")[0])
    page = Page()
    page.feed(text)
    assert not {"img", "iframe", "object", "b "} & set(page.tags)
    assert page.tags.count("script") == 3
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not [
        value
        for name, value in page.attributes
        if name in ("href", "src") and not str(value).startswith(("#", "data:"))
    ]
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    # The tracker.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    samples = 0
    for folder in {file.parent for file in (run / "logs").rglob("events*")}:
        found = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
        tags = found.Tags()
        assert all(ACTS.search(tag) is None for kind in ("scalars", "tensors", "audio") for tag in tags[kind])
        for tag in (tag for tag in tags["tensors"] if "samples" in tag):
            for event in found.Tensors(tag):
                told = event.tensor_proto.string_val[0].decode()
                samples += 1
                assert ACTS.sub("", told.replace("\n", "")) == told.replace("\n", "")
                assert "<img" not in told
                assert not re.search(r"(?<!\\)!\[", told)
                assert all(line.count("|") - line.count("\\|") == 5 for line in told.splitlines())
    assert samples
    # Secrets, in every byte that the run left, and in what it said.
    planted = [*SECRETS.values(), IN_URL, IN_COMMAND]
    files = [file for file in run.rglob("*") if file.is_file()]
    assert {"config.yaml", "environment.json", "summary.json", "report.html", "quarantine.jsonl", "model.nemo"} <= {
        f.name for f in files
    }
    for file in files:
        content = file.read_bytes()
        assert not [secret for secret in planted if secret.encode() in content], file
    assert not [secret for secret in planted if secret in said]
    assert (run / "config.yaml").read_text().startswith("# data.train: a secret was taken out")
    told = json.loads((run / "environment.json").read_text())["command"]
    assert told == [
        "train.py",
        "--config",
        "RUN.yaml",
        "--api-key",
        "<removed>",
        "data.test=https://<removed>@h/x?sig=<removed>",
    ]


def test_texts_that_act_are_written_out():
    assert one_line("a\nb\x1b[31m\u202ec\x9bd\ufeff\ud800e") == "a\\nb\\x1b[31m\\u202ec\\x9bd\\ufeff\\ud800e"
    assert lines("a\n\tb\x1b") == "a\n\tb\\x1b"
    for plain in ("क्\u200dष نص عربي नमस्ते", "日本 é ß", "a b c", "\u05e9\u05dc\u05d5\u05dd"):
        assert one_line(plain) == plain  # what joins letters, and letters of any direction, stay
    row = {"text": "\x1b[2J\x9b \u202e \u2028 é", "n": [1, "\x00"]}
    assert ACTS.search(json_line(row)) is None
    assert json.loads(json_line(row)) == row
    page = environment().from_string("{{ text }}")
    assert page.render(text="<b>'\"\u202e\x1b\n") == "&lt;b&gt;&#39;&#34;\\u202e\\x1b\n"


def test_plots_and_trackers_take_names_as_text():
    evil = "<a href='http://x'>y</a>\u202e"
    plot = curves_plot("wer", "WER", "%", [Curve(evil, [1, 2], [0.5, 0.4])])
    assert plot.traces[0]["name"] == "&lt;a href=&#x27;http://x&#x27;&gt;y&lt;/a&gt;\\u202e"
    assert _tag("x\n" * 500) == ("x\\n" * 500)[:120]
    assert _cell("![a](http://b/c.png)|<img>\nx") == "\\!\\[a\\]\\(http:/&#8203;/b/c.png\\)\\|&lt;img&gt;\\\\nx"


def test_tables_of_commands_write_them_out(capsys):
    empty = {"wer": 0.5, "cer": 0.5, "substitutions": 1, "deletions": 0, "insertions": 0, "words": 2, "clips": 1}
    bad = [{"id": EVIL_ID, "reason": "x\x1b[2J\ny"}]
    result: dict[str, Any] = {
        **empty, "by_language": {EVIL_LANGUAGE: empty, "en": empty}, "audio_seconds": 1.0,
        "rtfx": 1.0, "rtfx_whole": 1.0, "left_out": 0, "normalization": "basic", "quarantined": bad,
    }  # fmt: skip
    print_rates(result)
    said = capsys.readouterr().out
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e\u2028]", said)
    assert len(said.splitlines()) == 6


def test_messages_and_tracebacks_hold_no_secret(monkeypatch, capsys):
    from finetune.security.secrets import secrets_of_the_environment

    monkeypatch.setenv("MY_SERVICE_TOKEN", "planted-service-token")
    secrets_of_the_environment.cache_clear()
    project = logging.getLogger("finetune")
    before, hook = (project.handlers[:], project.propagate, project.level), sys.excepthook
    try:
        set_up_logging()
        log = logging.getLogger("finetune.x")
        log.warning(
            "%s cannot be read: %s",
            Path("/a\x1b/b"),
            ValueError("https://u:pw@h/x?key=v planted-service-token\nhf_abcdefgh12345678901234567890abcdef"),
        )
        try:
            raise RuntimeError("planted-service-token \x1b[2J")
        except RuntimeError:
            sys.excepthook(*sys.exc_info())
    finally:
        project.handlers[:], project.propagate = before[:2]
        project.setLevel(before[2])
        sys.excepthook = hook
        secrets_of_the_environment.cache_clear()
    said = capsys.readouterr().err
    assert "planted" not in said.replace('"planted-service-token \\x1b[2J"', "").replace('RuntimeError("planted', "")
    assert "/a\\x1b/b cannot be read: https://<removed>@h/x?key=<removed> <removed>\n<removed>" in said
    assert "Traceback" in said
    assert "RuntimeError: <removed> \\x1b[2J" in said


@pytest.mark.parametrize(
    "name",
    [
        "runs/hf_checkpoints",
        "/data/hf_cleaned/train.jsonl",
        "/models/sk-parakeet-finetuned-v3/model.nemo",
        "/models/sk-parakeet-tdt-0-6b-european-finetuned-2026-11-22/model.nemo",
        "sk-learn-conformer-large-with-rotary-embeddings",
        "api_org_settings",
    ],
)
def test_names_that_begin_as_tokens_do_are_kept(name, tmp_path):
    """A config.yaml without them could not be resumed with."""
    config = {"model": {"name": "m"}, "data": {"train": "t"}, "training": {"output_dir": name}}
    write_config(tmp_path / "config.yaml", RunConfig.model_validate(config))
    text = (tmp_path / "config.yaml").read_text()
    assert text.startswith("model:\n  name: m\n")
    assert f"training:\n  output_dir: {name}\n" in text


PIECE = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF"  # made up


@pytest.mark.parametrize(
    "token",
    [
        f"hf_{PIECE}xy",
        f"api_org_{PIECE}xy",
        f"sk-{PIECE}{PIECE[:16]}",
        f"sk-proj-{PIECE}_{PIECE}-{PIECE}",
        f"sk-ant-api03-{PIECE}-{PIECE}_{PIECE}AA",
        f"sk-or-v1-{PIECE.lower()}{PIECE.lower()}",
        "sk-lf-0a1b2c3d-0a1b-4c2d-8e3f-0a1b2c3d4e5f",
        f"sk-{''.join(c for c in PIECE * 2 if c.isalpha())}",
    ],
)
def test_tokens_of_known_forms_are_taken_out(token):
    assert clean_text(f"a {token}, b") == "a <removed>, b"
    assert clean_text(f"/data/{token}/x") == "/data/<removed>/x"


@pytest.mark.parametrize("text", ["sk-" * 50_000, "sk-" + "a-" * 70_000, "sk-" + "a" * 15 + "-a" * 70_000])
def test_a_text_of_beginnings_of_tokens_ends(text):
    """A pattern that goes back over what it has read would take hours."""
    assert clean_text(text) in (text, "<removed>")
