"""A model's vocabulary that is grown or replaced: what was learned stays, the TDT loss too, and runs, resumes and
files go on with it.

V pieces, D durations, H hidden units.
"""

import io
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soundfile
import torch
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT, TOKENIZER, problem, read_lines, write_manifest
from ctc_layouts import hybrid_layout
from turkish import TURKISH

from finetune.config.load import load_config
from finetune.config.tokenizer_setting import parse_tokenizer, tokenizer_setting
from finetune.data.normalization import normalize_text
from finetune.errors import UserError
from finetune.models.loading import read_tokenizer
from finetune.models.sentencepiece_model import processor, tokenizer_of, train_tokenizer, write_tokenizer
from finetune.models.tokenizer_growth import grow_on_texts
from finetune.models.vocabulary_rows import (
    SHARE_OF_NEW_PIECES,
    TIE,
    change_vocabulary,
    changes_of,
    letters_without_relative,
    rows_to_start_from,
    start_as_heard,
)

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
PROMPTS = ROOT / "examples" / "voice_prompts"


def load(name: Any) -> Any:
    from finetune.models.loading import load_model

    return load_model(str(name)).eval()


def rows(model: Any) -> dict[str, torch.Tensor]:
    head = model.joint.joint_net[-1]
    found = {"embedding": model.decoder.prediction.embed.weight, "weight": head.weight, "bias": head.bias}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def clips_of(model: Any, count: int) -> list[torch.Tensor]:
    """Real prompts, (S,) each."""
    import pyarrow.parquet as pq

    table = pq.read_table(PROMPTS / "data" / "test-00000-of-00001.parquet").to_pylist()
    short = sorted((row for row in table if row["duration"] < 6), key=lambda row: row["id"])
    step = max(len(short) // count, 1)
    return [
        torch.from_numpy(soundfile.read(io.BytesIO(r["audio"]["bytes"]), dtype="float32")[0]) for r in short[::step]
    ]


def transcripts(model: Any, clips: list[torch.Tensor]) -> list[str]:
    from finetune.evaluation.recognise import evaluation_mode, recognise_batch

    audio_BS = torch.nn.utils.rnn.pad_sequence(clips, batch_first=True)
    with evaluation_mode(model):
        return [h.text for h in recognise_batch(model, audio_BS, torch.tensor([len(c) for c in clips]))]


def grow(model: Any, folder: Path, texts: list[str], size: int, pieces: str = "new_characters") -> Any:
    growth = grow_on_texts(tokenizer_of(model, "k"), texts, size, pieces=pieces, key="k")
    write_tokenizer(growth.model, folder)
    return growth


# ---- the model -----------------------------------------------------------------------------------------------------


def test_a_grown_model_says_the_same_before_any_training(tmp_path: Path) -> None:
    """Old rows are bit-equal, blank and durations move behind, new rows are means and do not win: real prompts come
    out as before."""
    from finetune.data.text_corpus import read_texts

    model = load(BASE)
    clips, before, old = clips_of(model, 16), rows(model), tokenizer_of(model, "k")
    order = [name for name, _ in model.named_parameters()]  # what an optimizer's saved state goes by
    said = transcripts(model, clips)
    assert len(set(said)) > 8
    texts = [t.text for t in read_texts(str(PROMPTS), "k", "none")] + TURKISH.splitlines() * 4
    growth = grow(model, tmp_path / "tokenizer", texts, 400, "all")
    n, V, D = len(growth.added), len(old.pieces), len(model.cfg.loss.tdt_kwargs.durations)
    assert n > 200
    change_vocabulary(model, tmp_path / "tokenizer", {"why": "test"})
    after = rows(model)
    for name, tensor in before.items():
        assert torch.equal(after[name][:V], tensor[:V])
        assert torch.equal(after[name][V + n :], tensor[V:])
        assert len(after[name]) == len(tensor) + n
    assert not after["embedding"][-1].any()
    assert model.decoder.prediction.embed.padding_idx == V + n == model.decoder.blank_idx
    ids = {p.piece: i for i, p in enumerate(growth.model.pieces)}
    e, margin = ids["e"], torch.log(torch.tensor(n / SHARE_OF_NEW_PIECES))
    new = ids["E"]
    assert torch.equal(after["embedding"][new], before["embedding"][e])
    torch.testing.assert_close(after["bias"][new], before["bias"][e] - margin)
    joined = next(p for p in growth.added if len(p) > 2 and p.isascii() and p.islower())
    parts = processor(old, add_dummy_prefix=False, remove_extra_whitespaces=False).encode(joined)
    assert len(parts) >= 2
    torch.testing.assert_close(after["weight"][ids[joined]], before["weight"][parts].mean(0))
    assert transcripts(model, clips) == said
    assert changes_of(model) == [{"why": "test"}]
    assert [name for name, _ in model.named_parameters()] == order
    # What the whole of the new pieces takes, for any input of the head.
    hidden_NH = torch.randn(512, after["weight"].size(1)).relu() * 3
    logits_NV = hidden_NH @ after["weight"][: V + n + 1].T + after["bias"][: V + n + 1]
    taken_N = logits_NV.softmax(-1)[:, V : V + n].sum(-1)
    assert taken_N.max() <= SHARE_OF_NEW_PIECES / (1 + SHARE_OF_NEW_PIECES)
    assert D == 5


def test_loss_and_decoding_stay_those_of_tdt(tiny: Any, tmp_path: Path) -> None:
    """What NeMo's change_vocabulary loses: the durations get gradient, and NeMo's own loss object is TDT with its
    settings."""
    from finetune.models.loss_module import LossModule

    model = tiny()
    kwargs = dict(model.cfg.loss.tdt_kwargs)
    growth = grow(model, tmp_path / "tokenizer", TURKISH.splitlines(), 30)
    change_vocabulary(model, tmp_path / "tokenizer")
    V, head = model.tokenizer.vocab_size, model.joint.joint_net[-1]
    assert len(growth.added) == V - 128
    assert head.out_features == V + 1 + 5
    assert dict(model.cfg.loss.tdt_kwargs) == kwargs
    assert model.cfg.loss.loss_name == "tdt"
    theirs = model.loss._loss
    assert "TDT" in type(theirs).__name__
    assert list(theirs.durations) == list(kwargs["durations"])
    assert theirs.sigma == kwargs["sigma"]
    assert theirs.blank == V
    assert list(model.cfg.decoding.durations) == list(kwargs["durations"])
    assert model.cfg.decoding.model_type == "tdt"
    assert model.decoding.blank_id == V
    assert model.decoding.decoding._blank_index == V
    assert model.wer.decoding is model.decoding
    assert list(model.cfg.labels) == list(model.cfg.joint.vocabulary) == [p.piece for p in growth.model.pieces]
    assert model.cfg.decoder.vocab_size == model.cfg.joint.num_classes == V
    ids = model.tokenizer.text_to_ids("ğ ş")
    tokens_BU = torch.tensor([ids, ids])
    audio_BS, lengths_B = 0.1 * torch.randn(2, 24_000), torch.tensor([24_000, 20_000])
    module = LossModule(model)
    losses_B = module(audio_BS, lengths_B, tokens_BU, torch.tensor([len(ids)] * 2))
    losses_B.sum().backward()
    assert losses_B.isfinite().all()
    assert (head.weight.grad[V + 1 :].abs().sum(1) > 0).all()
    assert (head.weight.grad[ids].abs().sum(1) > 0).all()
    assert model.decoder.prediction.embed.weight.grad[ids].abs().sum() > 0


def test_a_replaced_vocabulary_keeps_what_both_have(tiny: Any, tmp_path: Path) -> None:
    """Shared pieces keep their rows wherever they are now, others are the mean of their parts, blank and durations
    stay."""
    model = tiny()
    old, before = tokenizer_of(model, "k"), rows(model)
    new = train_tokenizer(TURKISH.lower().splitlines() * 5, 90, kind="unigram", coverage=1.0, key="k")
    write_tokenizer(new, tmp_path / "tokenizer")
    sources = change_vocabulary(model, tmp_path / "tokenizer")
    after = rows(model)
    ids = {p.piece: i for i, p in enumerate(old.pieces)}
    shared = [p.piece for p in new.pieces if p.piece in ids]
    assert 10 < len(shared) < 90
    for i, piece in enumerate(p.piece for p in new.pieces):
        for name in before:
            torch.testing.assert_close(after[name][i], before[name][sources[i]].mean(0))
            assert piece not in ids or torch.equal(after[name][i], before[name][ids[piece]])
    assert torch.equal(after["weight"][90:], before["weight"][128:])
    assert torch.equal(after["embedding"][90:], before["embedding"][128:])
    assert model.joint.joint_net[-1].out_features == 90 + 1 + 5


def test_what_new_pieces_start_from() -> None:
    """Their parts; a new letter as its base letter or other case; what has no relative as the mean of all pieces."""
    old = read_tokenizer(str(TOKENIZER), "k")
    ids = {p.piece: i for i, p in enumerate(old.pieces)}
    growth = grow_on_texts(old, ["Ş şe tion漢 ré漢 ting"] * 9, 60, pieces="all", key="k")
    start = dict(zip([p.piece for p in growth.model.pieces], rows_to_start_from(old, growth.model), strict=True))
    assert all(start[piece] == [i] for piece, i in ids.items())
    assert start["Ş"] == start["ş"] == [ids["s"]]
    assert start["▁şe"] == [ids["▁se"]]  # as the old tokenizer writes it with the base letter
    assert len(start["漢"]) == 127  # all but <unk>
    assert start["▁ting"] == [ids["▁t"], ids["ing"]]


def test_new_letters_begin_as_what_is_heard_for_them(tmp_path: Path) -> None:
    """Rows of the old letters, biases that share them by use; real prompts come out as before, and the new pieces take
    at most as much as the old ones. New forms of old letters stay as they were."""
    model = load(BASE)
    clips, old = clips_of(model, 12), tokenizer_of(model, "k")
    said = transcripts(model, clips)
    growth = grow(model, tmp_path / "tokenizer", ["ა ბა ა ბა აბ É"] * 9, 40)
    change_vocabulary(model, tmp_path / "tokenizer")
    means, V, n = rows(model), len(old.pieces), len(growth.added)
    ids = {p.piece: i for i, p in enumerate(growth.model.pieces)}
    assert {"ა", "ბ", "▁ა", "▁ბა"} <= set(growth.added)
    assert letters_without_relative(old, growth.model) == {"ა", "ბ"}
    heard, texts = {"ა": "e", "ბ": "t"}, ["ბბა", "ბბ e", "ბბა"]
    use = Counter(i for text in texts for i in model.tokenizer.text_to_ids(text))
    start_as_heard(model, old, heard, texts)
    after = rows(model)
    for piece, first, last in (("ა", "e", "e"), ("ბ", "t", "t"), ("▁ბა", "▁t", "e")):
        assert torch.equal(after["weight"][ids[piece]], means["weight"][ids[first]])
        assert torch.equal(after["embedding"][ids[piece]], means["embedding"][ids[last]])
    from_t = sum(max(use[ids[p]], 1) for p in growth.added if p[0] == "ბ" and p != "ბა")  # `te` is an old piece
    assert use[ids["ბ"]] > 1
    lower = math.log((use[ids["t"]] + from_t) / use[ids["ბ"]]) + TIE
    torch.testing.assert_close(after["bias"][ids["ბ"]], means["bias"][ids["t"]] - lower)
    for name, tensor in means.items():
        assert torch.equal(after[name][ids["É"]], tensor[ids["É"]])
        assert torch.equal(after[name][:V], tensor[:V])
        assert torch.equal(after[name][V + n :], tensor[V + n :])
    assert transcripts(model, clips) == said
    hidden_NH = torch.randn(512, after["weight"].size(1)).relu() * 3
    logits_NV = hidden_NH @ after["weight"][: V + n].T + after["bias"][: V + n]
    begun = [ids[p] for p in growth.added if "É" not in p]
    assert (logits_NV[:, begun].logsumexp(-1) < logits_NV[:, :V].logsumexp(-1)).all()
    # Letters that nobody hears: the mean of all, as before, but no longer far below it.
    unheard = load(BASE)
    change_vocabulary(unheard, tmp_path / "tokenizer")
    start_as_heard(unheard, old, {}, texts)
    torch.testing.assert_close(rows(unheard)["weight"], means["weight"])
    assert (rows(unheard)["bias"][begun] > means["bias"][begun]).all()
    assert transcripts(unheard, clips) == said


def test_a_hybrid_models_ctc_head_moves_too(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.yaml"
    path.write_text(yaml.safe_dump(hybrid_layout()))
    model = load(path)
    before = model.ctc_decoder.decoder_layers[0].weight.detach().clone()
    growth = grow(model, tmp_path / "tokenizer", TURKISH.splitlines(), 30)
    change_vocabulary(model, tmp_path / "tokenizer")
    after, n = model.ctc_decoder.decoder_layers[0].weight, len(growth.added)
    assert torch.equal(after[:128], before[:128])
    assert torch.equal(after[128 + n :], before[128:])
    assert model.joint.joint_net[-1].out_features == 128 + n + 1 + 5
    assert "TDT" in type(model.loss._loss).__name__


def test_aggregate_tokenizers_are_refused() -> None:
    model = SimpleNamespace(tokenizer=SimpleNamespace(tokenizers_dict={}), tokenizer_type="agg")
    with pytest.raises(UserError, match="an aggregate of tokenizers; only the vocabulary of a single"):
        tokenizer_of(model, "model.tokenizer.extend_from")


# ---- the run file --------------------------------------------------------------------------------------------------


def test_the_key_in_run_file_and_command_line(run_file: Callable[..., Path]) -> None:
    """A directory as ever, or a mapping that grows key by key; a directory of the run file stays beside it."""

    def setting(path: Path, *overrides: str) -> Any:
        return tokenizer_setting(load_config(path, [], list(overrides))[0])

    plain = setting(run_file(model__tokenizer="some/dir"))
    assert (plain.dir, plain.changes, plain.most_pieces(128)) == ("some/dir", False, 128)
    both = setting(run_file(model__tokenizer="some/dir"), "model.tokenizer.extend_from=data/tr")
    assert (both.dir, both.extend_from, both.most_pieces(8192), both.most_pieces(128)) == (
        "some/dir",
        "data/tr",
        16384,
        256,
    )
    path = run_file(model__tokenizer={"extend_from": [{"path": "a", "language": "tr"}], "pieces": "all"})
    more = setting(path, "model.tokenizer.size=40")
    assert (more.pieces, more.size, more.most_pieces(128)) == ("all", 40, 168)
    assert more.origin == [{"path": "a", "language": "tr"}]
    assert setting(run_file(), "model.tokenizer.replace_with=b", "model.tokenizer.size=99").most_pieces(128) == 99
    assert setting(run_file()).changes is False
    path = run_file(model__tokenizer={"extend_from": "a", "size": 9})
    other = setting(path, "model.tokenizer.extend_from=null", "model.tokenizer.replace_with=b")
    assert (other.extend_from, other.replace_with, other.size) == (None, "b", 9)


def test_wrong_values_are_refused_before_anything_is_loaded(run_file: Callable[..., Path]) -> None:
    path = run_file()
    for override, part in (
        ("model.tokenizer.extend=x", "unknown key extend"),
        ("model.tokenizer.size=3", "Set extend_from or replace_with"),
        ("model.tokenizer={extend_from: a, replace_with: b}", "Set one of them"),
        ("model.tokenizer={extend_from: a, size: 0}", "model.tokenizer.size: has to be 1 or more, found 0"),
        ("model.tokenizer={extend_from: a, size: many}", "model.tokenizer.size"),
        (
            "model.tokenizer={extend_from: a, pieces: some}",
            "model.tokenizer.pieces: 'some' is not one of new_characters, all",
        ),
        ("model.tokenizer={replace_with: a, pieces: all}", "Leave it out"),
        ("model.tokenizer={extend_from: a, coverage: 2}", "model.tokenizer.coverage: has to be 1 or less, found 2"),
        ("model.tokenizer=5", "expected a directory, or a mapping"),
    ):
        assert part in problem(path, override), override
    with pytest.raises(UserError, match="expected a data set, a tokenizer or a text file, found"):
        parse_tokenizer({"extend_from": ""})


# ---- runs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def new_texts(clips: Path, tmp_path: Path) -> Path:
    """The 24 clips with letters in their texts that the old tokenizer lacks."""
    rows = read_lines(clips / "manifest.jsonl")
    for row in rows:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
        row["text"] = row["text"].lower().replace("a", "ä").replace("o", "ø")
    return write_manifest(tmp_path / "new.jsonl", rows)


@pytest.fixture
def grown_run(tiny_run: Any, new_texts: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a run on them, from which nothing random is left."""

    def arguments(name: str, *overrides: str, **training: Any) -> list[str]:
        data = {**ONLY_TRAIN, "train": str(new_texts), "validation": str(new_texts)}
        tokenizer = {"extend_from": str(new_texts), "size": 30}
        settings = {"output_dir": str(tmp_path / name), "eval_on_start": False, "save_steps": 2, "warmup_ratio": 0.0}
        settings |= {"lr_scheduler_type": "constant", **training}
        return tiny_run(*overrides, model={**DETERMINISTIC, "tokenizer": tokenizer}, data=data, training=settings)

    return arguments


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_lines(run / "metrics.jsonl")]


def test_a_run_grows_once_resumes_and_leaves_a_whole_model(
    run_train: Any, failed: Any, grown_run: Any, tmp_path: Path
) -> None:
    """Resumed it takes the tokenizer of its directory and goes on as if unbroken; another run from its model does not
    grow again."""
    run, unbroken = tmp_path / "run", tmp_path / "unbroken"
    assert run_train(*grown_run("unbroken", max_steps=4)) == 0
    assert run_train(*grown_run("run", max_steps=2)) == 0
    assert sorted(p.name for p in (run / "tokenizer").iterdir()) == [
        "report.json",
        "tokenizer.model",
        "tokenizer.vocab",
        "vocab.txt",
    ]
    assert not (run / ".tokenizer.new").exists()
    report = json.loads((run / "tokenizer" / "report.json").read_text(encoding="utf-8"))
    assert {"ä", "ø"} <= set(report["growth"]["new_characters"])
    assert report["by_language"]["all"]["new"]["texts_written"] == 1
    quarantined = (run / "quarantine.jsonl").read_text(encoding="utf-8")
    assert quarantined == ""
    # The texts that it grew on are gone: a resume does not read them again.
    file = run / "tokenizer" / "tokenizer.model"
    content = file.read_bytes()
    more = grown_run("run", "training.resume_from_checkpoint=true", max_steps=4)
    path = Path(more[1])
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["model"]["tokenizer"]["extend_from"] = str(tmp_path / "gone.jsonl")
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert f"the vocabulary of {run / 'tokenizer'} counts" in failed(0, *more)
    assert file.read_bytes() == content
    assert losses(run) == losses(unbroken)
    model = load(run)
    assert model.tokenizer.vocab_size == 128 + report["growth"]["pieces_added"]
    assert changes_of(model)[0]["setting"]["size"] == 30
    assert "has this vocabulary already" in failed(0, *grown_run("second", f"model.name={run}", max_steps=2))
    assert not (tmp_path / "second" / "tokenizer").exists()
    assert load(tmp_path / "second").tokenizer.vocab_size == model.tokenizer.vocab_size
    again = grown_run("second", f"model.name={run}", "model.tokenizer.size=2", "training.resume_from_checkpoint=true")
    assert "its vocabulary cannot change on the way" in failed(2, *again)


@pytest.mark.slow
def test_an_overwritten_run_keeps_no_old_tokenizer(run_train: Any, grown_run: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_train(*grown_run("run")) == 0
    first = (run / "tokenizer" / "tokenizer.model").read_bytes()
    assert run_train(*grown_run("run", "training.overwrite_output_dir=true", "model.tokenizer.size=2")) == 0
    assert (run / "tokenizer" / "tokenizer.model").read_bytes() != first
    assert load(run).tokenizer.vocab_size == 130
    old = ("training.overwrite_output_dir=true", "model.tokenizer=null", "data.allow_large_losses=true")
    assert run_train(*grown_run("run", *old)) == 0
    assert not (run / "tokenizer").exists()


@pytest.mark.slow
def test_nemo_alone_restores_and_uses_the_model(run_train: Any, grown_run: Any, tmp_path: Path, clips: Path) -> None:
    """In a process of its own, without this project, the run's directory moved away: the tokenizer is inside."""
    assert run_train(*grown_run("run", "--strategy", "lora", max_steps=2)) == 0
    moved = tmp_path / "elsewhere.nemo"
    shutil.copy(tmp_path / "run" / "model.nemo", moved)
    size = len(read_tokenizer(str(tmp_path / "run"), "k").pieces)
    shutil.rmtree(tmp_path / "run")
    wav = next(clips.glob("*.flac"))
    code = f"""
import json, logging
from nemo.collections.asr.models import ASRModel
model = ASRModel.restore_from({str(moved)!r}, map_location="cpu")
ids = model.tokenizer.text_to_ids("bän ø")
text = model.transcribe([{str(wav)!r}], verbose=False)[0].text
loss = type(model.loss._loss).__name__
print("@" + json.dumps([model.tokenizer.vocab_size, model.tokenizer.ids_to_text(ids), loss, isinstance(text, str)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1500, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line[1:] for line in done.stdout.splitlines() if line.startswith("@")))
    assert told[:2] == [size, "bän ø"]
    assert "TDT" in told[2]
    assert told[3]


@pytest.mark.slow
def test_other_sources_of_pieces(run_train: Any, failed: Any, grown_run: Any, tmp_path: Path, clips: Path) -> None:
    """A text file, a tokenizer's directory, and a vocabulary that takes the place of the model's."""
    texts = tmp_path / "tr.txt"
    texts.write_text(TURKISH.lower() + "\näø ä ø", encoding="utf-8")
    assert run_train(*grown_run("a", f"model.tokenizer.extend_from={texts}")) == 0
    other = train_tokenizer(TURKISH.lower().splitlines() + ["äø ä ø"] * 3, 80, coverage=1.0, key="k")
    write_tokenizer(other, tmp_path / "other")
    changed = ["model.tokenizer.size=null", f"model.tokenizer.extend_from={tmp_path / 'other'}"]
    assert run_train(*grown_run("b", *changed)) == 0
    assert {"ä", "ø", "ğ"} <= {p.piece for p in read_tokenizer(str(tmp_path / "b"), "k").pieces}
    new = grown_run("c")
    values = yaml.safe_load(Path(new[1]).read_text(encoding="utf-8"))
    values["model"]["tokenizer"] = {"replace_with": values["data"]["train"], "size": 60}
    Path(new[1]).write_text(yaml.safe_dump(values), encoding="utf-8")
    assert run_train(*new) == 0
    assert load(tmp_path / "c").tokenizer.vocab_size == 60
    assert (tmp_path / "c" / "summary.json").is_file()
    old_letters = f"data.train={clips / 'manifest.jsonl'}"
    nothing = grown_run("d", f"model.tokenizer.extend_from={TOKENIZER}", old_letters)
    assert "0 pieces added" in failed(0, *nothing)
    assert "resumed from" in failed(0, *nothing, "training.resume_from_checkpoint=true", "training.max_steps=3")


def test_what_cannot_be_grown_ends_the_run_with_one_line(failed: Any, grown_run: Any, tmp_path: Path) -> None:
    assert "model.tokenizer.extend_from" in failed(2, *grown_run("run", "model.tokenizer.extend_from=/nowhere"))
    assert "more than size=1" in failed(2, *grown_run("run", "model.tokenizer.size=1"))


def test_plan_counts_the_grown_vocabulary(run_file: Callable[..., Path]) -> None:
    from finetune.tools.planning.layout import layout_of, read_layout

    path = run_file(model__name=str(BASE), model__tokenizer={"extend_from": "data/tr", "size": 40})
    config, _ = load_config(path, [], [])
    before = read_layout(str(BASE)).tokens
    assert layout_of(config).tokens == before + 40
    config, _ = load_config(path, [], [f"model.tokenizer.extend_from={TOKENIZER}", "model.tokenizer.size=null"])
    assert layout_of(config).tokens == 2 * before


def test_the_data_check_reads_texts_with_the_grown_tokenizer(grown_run: Any, capsys: Any, tmp_path: Path) -> None:
    from finetune import check

    arguments = grown_run("run")
    assert check.main([*arguments[:2], "--output-dir", str(tmp_path / "check")]) == 0
    assert not (tmp_path / "run").exists()


@pytest.fixture
def georgian_prompts(tmp_path: Path) -> Path:
    """100 short English prompts whose texts are in Georgian letters, a to z by their place in the alphabet."""
    import pyarrow.parquet as pq

    georgian, found = {ord("a") + i: chr(0x10D0 + i) for i in range(26)}, []
    for row in pq.read_table(PROMPTS / "data" / "train-00000-of-00003.parquet").to_pylist():
        if row["language"] == "en" and 0.8 < row["duration"] < 3 and len(found) < 100:
            file = tmp_path / f"{row['id'].replace('/', '-')}.ogg"
            file.write_bytes(row["audio"]["bytes"])
            text = normalize_text(row["text"], "basic").translate(georgian)
            found.append({"audio_filepath": file.name, "text": text, "duration": row["duration"], "lang": "en"})
    return write_manifest(tmp_path / "georgian.jsonl", found)


@pytest.mark.slow
def test_a_run_listens_to_letters_of_a_new_script(
    run_train: Any, tiny_run: Any, georgian_prompts: Path, capsys: Any, tmp_path: Path
) -> None:
    """Most of the frequent letters begin as the letter that they stand for; the log and the report say which."""
    prompts = str(georgian_prompts)
    data = {**ONLY_TRAIN, "train": prompts}
    model = {"name": str(BASE), "tokenizer": {"extend_from": prompts}}
    said = []

    def observe(trainer: Any) -> None:
        said.extend(transcripts(trainer.model, clips_of(trainer.model, 8)))

    before = load(BASE)
    assert run_train(*tiny_run(model=model, data=data, training={"max_steps": 1}), observe=observe) == 0
    assert said == transcripts(before, clips_of(before, 8))
    logged = r"(\d+) of \1 clips of data.train have letters that the vocabulary lacks in every form.* ე=e "
    assert re.search(logged, capsys.readouterr().err)
    report = json.loads((tmp_path / "run" / "tokenizer" / "report.json").read_text(encoding="utf-8"))
    heard = report["new_letters"]["heard"]
    assert report["pieces"] > 192  # more than the merges of a known script
    use = Counter(c for row in read_lines(georgian_prompts) for c in row["text"] if c.isalpha())
    frequent = [c for c, _ in use.most_common(12)]
    assert sum(heard[c] == chr(ord(c) - 0x10D0 + ord("a")) for c in frequent) >= 8


def launched(launcher: list[str], arguments: list[str]) -> None:
    """A training in processes of its own that has to end well."""
    command = [*launcher, str(ROOT / "finetune" / "train.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_two_processes_have_the_same_vocabulary(grown_run: Any, tmp_path: Path) -> None:
    """Under DDP with gloo the main process makes the tokenizer; the curve is that of one process with both ranks'
    clips."""
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node", "2"]
    two = grown_run("ddp", per_device_train_batch_size=2, max_steps=2)
    launched(torchrun, [*two, "--strategy", "ddp"])
    launched([sys.executable], grown_run("one", per_device_train_batch_size=4, max_steps=2))
    assert losses(tmp_path / "ddp") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    sizes = {load(tmp_path / name).tokenizer.vocab_size for name in ("ddp", "one")}
    assert len(sizes) == 1
    more = grown_run("ddp", "training.resume_from_checkpoint=true", per_device_train_batch_size=2, max_steps=3)
    launched(torchrun, [*more, "--strategy", "ddp"])
    assert len(losses(tmp_path / "ddp")) == 3


def phonetic_prompts(folder: Path) -> Path:
    """French prompts of up to 4 s, spelled as they sound: letters new to the base model stand for ou, ch and on."""
    import pyarrow.parquet as pq

    rows = []
    for shard in sorted((PROMPTS / "data").glob("train-*.parquet")):
        for row in pq.read_table(shard).to_pylist():
            if row["language"] != "fr" or not 0.5 < row["duration"] < 4:
                continue
            file = folder / f"{row['id'].replace('/', '-')}.flac"
            file.write_bytes(row["audio"]["bytes"])
            text = normalize_text(row["text"], "basic").replace("ou", "ȣ").replace("ch", "š").replace("on", "õ")
            rows.append({"audio_filepath": file.name, "text": text, "duration": row["duration"], "lang": "fr"})
    return write_manifest(folder / "fr.jsonl", rows)


@pytest.mark.slow
def test_a_real_model_learns_to_write_what_it_could_not(run_train: Any, tmp_path: Path) -> None:
    """Letters that it never had: WER falls, the new pieces come out, the run goes on, and the file has them."""
    manifest = str(phonetic_prompts(tmp_path))
    run = {
        "model": {"name": str(BASE), "tokenizer": {"extend_from": manifest}, **DETERMINISTIC},
        "data": {"train": manifest, "validation": manifest, "max_eval_samples": 60, "allow_overlap": True},
        "training": {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 120,
            "per_device_train_batch_size": 8,
            "learning_rate": 1e-3,
            "warmup_steps": 10,
            "dataloader_num_workers": 0,
            "num_threads": 1,
            "report_to": "none",
            "save_steps": 120,
            "eval_steps": 120,
        },
    }
    path = tmp_path / "RUN.yaml"
    path.write_text(yaml.safe_dump(run), encoding="utf-8")
    assert run_train("--config", path) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert summary["wer_after"] < 0.6 * summary["wer_before"]
    model = load(tmp_path / "run")
    added = {p.piece for p in tokenizer_of(model, "k").pieces[128:]}
    assert {"ȣ", "š", "õ"} <= added
    rows = read_lines(Path(manifest))[:60]
    clips = [torch.from_numpy(soundfile.read(tmp_path / r["audio_filepath"], dtype="float32")[0]) for r in rows]
    said, meant = ("".join(texts) for texts in (transcripts(model, clips), [r["text"] for r in rows]))
    for letter in "ȣõ":
        assert said.count(letter) > 0.25 * meant.count(letter) > 4
    # A whole piece and not only its letter.
    ids = [i for text in transcripts(model, clips) for i in model.tokenizer.text_to_ids(text)]
    assert any(len(model.tokenizer.ids_to_tokens([i])[0]) > 2 for i in ids if i >= 128)
    assert run_train("--config", path, "training.max_steps=122", "training.resume_from_checkpoint=true") == 0
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 122
