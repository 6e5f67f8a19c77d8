"""The model card, the licences in it, and what is taken out of files before they are shared."""

import json
import shutil
import socket
import tarfile
from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, read_lines
from sharing_cases import EVIL_FILE, PRIVATE_FOLDER, REPO, card_in, copied, members
from upload_server import TOKEN, Repository

from finetune.report import main as report

pytest_plugins = ["sharing_fixtures"]


# ---- what is taken out ----------------------------------------------------------------------------------------------


def test_nothing_private_arrives_and_the_model_is_the_same(finished_run, hub, push, tmp_path):
    assert push("--model", finished_run, "--repo", REPO, "--base-licence", "cc-by-4.0", "--yes")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    arrived = tmp_path / "arrived.nemo"
    arrived.write_bytes(files["tiny-model.nemo"])
    ours, theirs = members(finished_run / "model.nemo"), members(arrived)
    texts = {name: content for name, content in files.items() if not name.endswith(".nemo")}
    texts |= {name: content for name, content in theirs.items() if not name.endswith(".ckpt")}
    spoken = [row["text"] for row in read_lines(finished_run.parent / "all.jsonl") if len(row["text"].split()) > 2]
    assert spoken
    for name, content in texts.items():
        for private in (
            PRIVATE_FOLDER,
            str(ROOT),
            str(Path.home()),
            socket.gethostname(),
            "/tmp/",
            "examples/base",
            TOKEN,
        ):
            assert private.encode() not in content, (name, private)
        for sentence in spoken:
            assert sentence.encode() not in content, (name, sentence)
    with tarfile.open(arrived) as archive:
        assert {(m.uname, m.gname, m.uid, m.gid) for m in archive} == {("", "", 0, 0)}
    # Weights byte for byte, and a model that NeMo reads as before.
    assert set(ours) == set(theirs)
    changed = {name.partition("_")[2] or name for name in ours if ours[name] != theirs[name]}
    assert changed == {"config.yaml", "tokenizer.model"}
    from finetune.models.loading import load_model

    before, after = load_model(str(finished_run)), load_model(str(arrived))
    for key, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[key]), key
    text = read_lines(finished_run.parent / "all.jsonl")[0]["text"].lower()
    assert after.tokenizer.text_to_ids(text) == before.tokenizer.text_to_ids(text) != []
    assert after.tokenizer.vocab == before.tokenizer.vocab
    config = yaml.safe_load(files["training/config.yaml"])
    assert config["model"]["name"] == "base-of-alice.nemo"
    assert config["data"]["train"] == EVIL_FILE
    assert config["training"]["output_dir"] == "run"
    assert config["training"]["learning_rate"] == 1e-3
    evaluations = [json.loads(line) for line in files["training/evaluations.jsonl"].decode().splitlines()]
    assert [row["wer"] for row in evaluations] == [
        row["wer"] for row in read_lines(finished_run / "evaluations.jsonl")
    ]


def test_a_clean_nemo_is_uploaded_as_it_is(finished_run, hub, push, tmp_path):
    from finetune.tools.publishing.private import private_parts, write_cleaned_nemo

    clean = tmp_path / "clean.nemo"
    write_cleaned_nemo(finished_run / "model.nemo", clean)
    assert private_parts(finished_run / "model.nemo")
    assert private_parts(clean) == []
    assert push("--model", clean, "--repo", REPO, "--base-licence", "cc-by-4.0", "--yes")[0] == 0
    assert hub.repositories[REPO].branches["main"].files["tiny-model.nemo"] == clean.read_bytes()
    # So does the copy of a copy.
    write_cleaned_nemo(clean, tmp_path / "again.nemo")
    assert members(tmp_path / "again.nemo") == members(clean)


def test_paths_secrets_and_names_go_and_hub_names_stay(monkeypatch):
    from finetune.tools.publishing.private import REMOVED, publishable

    monkeypatch.setenv("USER", "alice")
    secret = "correct-horse-battery"
    config = {
        "model": {"name": "nvidia/parakeet-tdt-0.6b-v3", "tokenizer": "/data/alice/tok"},
        "data": {
            "train": [
                {"path": "s3://bucket-of-acme/calls/train-{000..127}.tar", "weight": 0.5},
                {"path": "owner/data", "name": "fr"},
                "C:\\Users\\alice\\data\\b.jsonl",
                "https://user:pw@host.example/a/c.parquet?signature=123",
                "my data/with spaces.jsonl",
            ],
            "filters": {"alphabet": "abc /-'", "max_tokens": 200},
        },
        "training": {
            "output_dir": "~/runs/x",
            "learning_rate": 1e-4,
            "api_key": secret,
            "note": f"see /mnt/alice/notes.txt and {secret}",
        },
    }
    found = publishable(config, keep={"nvidia/parakeet-tdt-0.6b-v3", "owner/data"}, secrets={secret})
    assert found["model"] == {"name": "nvidia/parakeet-tdt-0.6b-v3", "tokenizer": "tok"}
    paths = [entry["path"] if isinstance(entry, dict) else entry for entry in found["data"]["train"]]
    assert paths == ["train-{000..127}.tar", "owner/data", "b.jsonl", "c.parquet", "with spaces.jsonl"]
    assert found["data"]["filters"] == {"alphabet": "abc /-'", "max_tokens": 200}
    assert found["training"]["output_dir"] == "x"
    assert found["training"]["learning_rate"] == 1e-4
    text = json.dumps(found)
    for private in ("alice", "acme", "/mnt", "host.example", "pw", secret):
        assert private not in text, private
    assert REMOVED in text


def test_a_password_in_a_run_file_is_taken_out_of_the_records(finished_run, push, hub, tmp_path):
    run, password = copied(finished_run, tmp_path / "run"), "correct-horse-battery"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = {"path": config["data"]["train"], "storage_password": password}
    config["data"]["leave_out"] = f"before-{password}-after.jsonl"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--model", run, "--repo", REPO, "--base-licence", "mit")
    code, shown, error = push(*arguments)
    assert code == 0, error
    assert push(*arguments, "--yes")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    arrived = yaml.safe_load(files["training/config.yaml"])
    assert arrived["data"]["train"]["storage_password"] == "<removed>"
    assert arrived["data"]["leave_out"] == "before-<removed>-after.jsonl"
    assert password not in shown
    assert not [name for name, content in files.items() if password.encode() in content]


def test_a_nemo_configuration_keeps_what_nemo_needs(tiny_model, tmp_path):
    """Whatever a user's or NVIDIA's configuration holds of paths goes; tokens with slashes, interpolations and numbers
    stay."""
    import io

    from omegaconf import OmegaConf

    from finetune.tools.publishing.private import private_parts, read_nemo_config, write_cleaned_nemo

    files = members(tiny_model)
    config = OmegaConf.to_container(OmegaConf.create(files["model_config.yaml"].decode()), resolve=False)
    config["labels"] = [*config["labels"][:-2], "/", "and/or"]
    config["train_ds"] = {
        "manifest_filepath": ["/data/alice/a.json", "rel/ative/b.json"],
        "tarred_audio_filepaths": "/data/alice/audio__OP_0..127_CL_.tar",
        "batch_size": 16,
        "min_duration": 1e-5,
        "bucketing": "${model_defaults.enc_hidden}",
        "note": "made from /data/alice/raw for a/b tests",
        "token": TOKEN,
    }
    config["init_from"] = "nvidia/some-model"
    source = tmp_path / "source.nemo"
    with tarfile.open(source, "w") as archive:
        for name, content in {
            **files,
            "model_config.yaml": OmegaConf.to_yaml(OmegaConf.create(config)).encode(),
        }.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size, member.uname, member.uid = len(content), "alice", 1000
            archive.addfile(member, io.BytesIO(content))
    told = private_parts(source)
    assert any("train_ds.manifest_filepath" in text for text in told)
    assert "owner of the files in the archive" in told
    write_cleaned_nemo(source, tmp_path / "clean.nemo")
    found = read_nemo_config(tmp_path / "clean.nemo")
    assert found["labels"] == config["labels"]
    assert found["joint"] == config["joint"]
    assert found["encoder"] == config["encoder"]
    assert found["init_from"] == "nvidia/some-model"
    expected = {"manifest_filepath": ["a.json", "b.json"], "tarred_audio_filepaths": "audio__OP_0..127_CL_.tar"}
    expected |= {"note": "made from raw for a/b tests", "token": "<removed>"}
    assert found["train_ds"] == {**config["train_ds"], **expected}
    assert b"alice" not in (tmp_path / "clean.nemo").read_bytes()


# ---- the card -------------------------------------------------------------------------------------------------------


def test_the_card_is_read_by_the_hubs_own_loader_and_says_what_the_run_measured(finished_run, push):
    from huggingface_hub import ModelCard

    _, shown, _ = push(
        *("--model", finished_run, "--repo", REPO, "--base-model", "nvidia/parakeet-tdt-0.6b-v3"),
        *("--base-licence", "cc-by-4.0", "--language", "en", "fr", "de", "--data-name", "owner/calls"),
    )
    text = card_in(shown)
    card = ModelCard(text)
    data = card.data
    assert (data.license, data.base_model, data.base_model_relation) == (
        "cc-by-4.0",
        "nvidia/parakeet-tdt-0.6b-v3",
        "finetune",
    )
    assert (data.library_name, data.pipeline_tag) == ("nemo", "automatic-speech-recognition")
    assert data.language == ["en", "fr", "de"]
    assert data.datasets == ["owner/calls"]
    assert {"FastConformer", "Transducer", "TDT"} <= set(data.tags)
    summary = json.loads((finished_run / "summary.json").read_text())
    results = {(r.dataset_args or {}).get("language", "all"): r for r in data.eval_results if r.metric_type == "wer"}
    assert results["all"].metric_value == round(100 * summary["wer_after"], 2)
    assert results["en"].metric_value == round(100 * summary["wer_by_language"]["en"]["after"], 2)
    assert results["en"].dataset_split == "test"
    rows = {
        row["language"]: row
        for row in read_lines(finished_run / "evaluations.jsonl")
        if row["split"] == "test" and row.get("model")
    }
    line = next(line for line in text.splitlines() if line.startswith("| en |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    before = summary["wer_by_language"]["en"]["before"]
    tested = summary["significance"]

    def rate(value: float, interval: list[float]) -> str:
        return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"

    english = tested["test"]["by_language"]["en"]
    assert cells[1:5] == [
        str(rows["en"]["clips"]),
        str(rows["en"]["words"]),
        rate(before, english["interval_a"]),
        rate(rows["en"]["wer"], english["interval_b"]),
    ]
    guard = [
        rate(summary[f"guard_wer_{w}"], tested["guard"][f"interval_{x}"]) for w, x in (("before", "a"), ("after", "b"))
    ]
    assert f"| {guard[0]} | {guard[1]} |" in text
    assert "| fr |" in text.partition("On the guard set")[2]
    assert "Languages without an evaluation: de.\n" in text, "fr is measured, on the guard set alone"
    assert "measured on 16 clips only" in text
    assert "[nvidia/parakeet-tdt-0.6b-v3](https://huggingface.co/nvidia/parakeet-tdt-0.6b-v3) by nvidia" in text
    assert "https://creativecommons.org/licenses/by/4.0/" in text
    assert "modified version" in text
    assert "from transformers" not in text
    for private in (PRIVATE_FOLDER, "acme", "/tmp", "base-of-alice", str(ROOT)):
        assert private not in text


@pytest.mark.slow
def test_names_of_files_can_be_kept_back(finished_run, push, hub, tmp_path):
    arguments = ("--model", finished_run, "--repo", REPO, "--base-licence", "mit", "--yes")
    assert push(*arguments, "--data-name", "telephone calls")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    assert not [name for name, content in files.items() if b"acme" in content]
    assert "fine-tuned on telephone calls" in files["README.md"].decode()
    data = yaml.safe_load(files["training/config.yaml"])["data"]
    assert (data["train"], data["test"], data["validation"]) == ("telephone calls", "telephone calls", "all.jsonl")
    # Of a mixture each source has its name, or all of them get new ones.
    run = copied(finished_run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = [{"path": "/x/acme-a.jsonl", "weight": 0.5}, {"path": "/x/acme-b.jsonl", "weight": 1.5}]
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--model", run, *arguments[2:])
    assert push(*arguments, "--data-name", "calls", "owner/talks")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    found = yaml.safe_load(files["training/config.yaml"])["data"]["train"]
    assert found == [{"path": "calls", "weight": 0.5}, {"path": "owner/talks", "weight": 1.5}]
    assert "* train: calls, weight 0.5" in files["README.md"].decode()
    assert push(*arguments, "--data-name", "one", "two", "three")[0] == 0
    files = hub.repositories[REPO].branches["main"].files
    assert yaml.safe_load(files["training/config.yaml"])["data"]["train"] == ["one", "two", "three"]
    assert b"acme-" not in files["README.md"] + files["training/config.yaml"]


def test_markup_in_names_stays_text(finished_run, push):
    from finetune.tools.publishing.card import plain

    _, shown, _ = push("--model", finished_run, "--repo", REPO, "--base-licence", "mit")
    body = card_in(shown).split("\n---\n", 1)[1]
    assert "<img" not in body
    assert "<b>" not in body
    assert "[a](" not in body
    assert "http://b" not in body
    assert "acme \\| &lt;b&gt;calls \\`x\\`.jsonl" in body
    rows = [line for line in body.splitlines() if line.startswith("|")]
    assert any("alert" in line for line in rows)
    for line in rows:
        bars = line.replace("\\|", "").count("|")
        assert bars in (3, 8), line
    assert plain("a\n\n# b\x00\u202e") == "a \\# b"
    assert len(plain("x" * 5000)) <= 120
    assert "|" not in plain("a|b").replace("\\|", "")


def test_what_is_not_known_is_said_and_not_made_up(finished_run, hub, push, tmp_path):
    code, shown, _ = push("--model", finished_run / "model.nemo", "--repo", REPO, "--base-licence", "mit")
    assert code == 0
    assert "WER % before" in shown, "a run's model.nemo is that run's model"
    alone = tmp_path / "alone.nemo"
    shutil.copy(finished_run / "model.nemo", alone)
    code, shown, _ = push("--model", alone, "--repo", REPO)
    card = card_in(shown)
    assert "What it was trained from and on is not known" in card
    assert "No error rate of this model is known" in card
    assert "model-index" not in card
    assert "license:" not in card
    assert "missing: the base model and its licence" in shown
    assert shown.strip().endswith("--base-licence ID --yes")
    code, _, error = push("--model", alone, "--repo", REPO, "--yes")
    assert code == 2
    assert "--base-licence" in error
    assert hub.asked == []


def test_intervals_and_tests_of_significance_are_shown_where_a_run_has_them(finished_run, push, tmp_path):
    test = {"significant": False, "p_value": 0.25, "interval_a": [0.9, 0.95], "interval_b": [0.8, 0.85]}
    run = copied(
        finished_run,
        tmp_path / "run",
        wer_before_interval=[2.5, 4.125],
        wer_after_interval=[0.75, 1.25],
        significance={
            "test": {**test, "by_language": {"en": test}},
            "guard": {**test, "significant": True, "p_value": 1e-12},
        },
    )
    text = card_in(push("--model", run, "--repo", REPO, "--base-licence", "mit")[1])
    assert "(250.00 to 412.50)" in text
    assert "(75.00 to 125.00)" in text
    assert "(80.00 to 85.00)" in text
    assert "WER on the test set is not significantly different from before (p = 0.25)." in text
    assert "WER on the guard set is significantly better than before (p < 1e-12)." in text


def test_a_change_for_the_worse_is_called_so():
    from finetune.tools.publishing.card import change_of
    from finetune.tools.report.read import Rates

    rates = Rates(None, 58, 262, 0.1, 0.2, None, None, None, None, {"significant": True, "p_value": 0.003})
    assert change_of(rates) == "significantly worse than before (p = 0.003)"


def test_an_unfinished_run_and_one_that_kept_the_base_say_so(finished_run, push, tmp_path):
    kept = copied(finished_run, tmp_path / "kept", best_step=0)
    assert "these are the base model's weights" in card_in(
        push("--model", kept, "--repo", REPO, "--base-licence", "mit")[1]
    )
    (kept / "summary.json").unlink()
    text = card_in(push("--model", kept, "--repo", REPO, "--base-licence", "mit")[1])
    assert "was not finished" in text
    assert "| all | 16 |" in text


def test_evaluation_sets_that_share_clips_with_the_training_are_no_secret(finished_run, push, tmp_path):
    run = copied(finished_run, tmp_path / "run")
    arguments = ("--model", run, "--repo", REPO, "--base-licence", "mit")
    settings = (run / "config.yaml").read_text(encoding="utf-8")
    for allowed in (True, False):
        was = "allow_overlap: true" in settings
        settings = settings.replace(f"allow_overlap: {str(was).lower()}", f"allow_overlap: {str(allowed).lower()}")
        (run / "config.yaml").write_text(settings, encoding="utf-8")
        flattered = "(data.allow_overlap): the error rates above may flatter it"
        assert (flattered in card_in(push(*arguments)[1])) is allowed
        assert report([str(run)]) == 0
        page = (run / "report.html").read_text(encoding="utf-8")
        assert ("were allowed in the evaluation sets (data.allow_overlap)" in page) is allowed


# ---- licences -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_licence_comes_from_the_card_beside_the_base_or_from_the_hub(finished_run, hub, push, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    shutil.copy(finished_run.parent / "base-of-alice.nemo", folder / "b.nemo")
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme-open\nlicense_link: https://acme.example/l\n---\n"
    )
    run = copied(finished_run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["name"] = str(folder / "b.nemo")
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    text = card_in(push("--model", run, "--repo", REPO)[1])
    front = yaml.safe_load(text.split("---")[1])
    assert (front["license"], front["license_name"], front["license_link"]) == (
        "other",
        "acme-open",
        "https://acme.example/l",
    )
    assert "[acme-open](https://acme.example/l)" in text
    # A run that continues that run has the same base, and says so.
    config["model"]["name"] = str(run)
    further = copied(finished_run, tmp_path / "further")
    (further / "config.yaml").write_text(yaml.safe_dump(config))
    text = card_in(push("--model", further, "--repo", REPO)[1])
    assert "license_name: acme-open" in text
    assert "continued an earlier run (run)" in text
    # Of a base on the hub: not in a dry run, and refused where its card names none.
    config["model"]["name"] = "owner/base"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    code, shown, _ = push("--model", run, "--repo", REPO)
    assert code == 0
    assert "missing: the licence of owner/base" in shown
    assert "look at this: the base model owner/base is taken for a name on the hub" in shown
    assert hub.asked == []
    code, _, error = push("--model", run, "--repo", REPO, "--yes")
    assert code == 1
    assert "404" in error
    assert "--base-model" in error

    hub.repositories["owner/base"] = Repository(private=False)
    code, _, error = push("--model", run, "--repo", REPO, "--yes")
    assert code == 2
    assert "names no licence" in error
    assert REPO not in hub.repositories
    hub.repositories["owner/base"].card = {"license": "cc-by-nd-4.0"}
    code, _, error = push("--model", run, "--repo", REPO, "--yes")
    assert code == 0
    assert "does not allow to share changed versions" in error
    from huggingface_hub import ModelCard

    data = ModelCard(hub.repositories[REPO].branches["main"].files["README.md"].decode()).data
    assert (data.license, data.base_model) == ("cc-by-nd-4.0", "owner/base")


def test_a_model_from_random_weights_needs_no_licence_of_a_base(finished_run, push, tmp_path):
    run = copied(finished_run, tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["name"] = "layouts/small.yaml"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    code, shown, _ = push("--model", run, "--repo", REPO)
    assert code == 0
    assert "from random weights" in shown
    assert "missing:" not in shown
    assert "No licence was chosen" in shown
    text = card_in(push("--model", run, "--repo", REPO, "--licence", "MIT")[1])
    assert "license: mit" in text
    assert "base_model" not in text


def test_words_that_only_look_like_tokens_stop_nothing():
    from finetune.tools.publishing.uploads import holds_token

    assert not holds_token("risk-assessment-of-large-models and a task-oriented-dialogues set")
    assert holds_token("sk-abcdefghijklmnopqrstuvw7")
    assert holds_token(f"see {TOKEN}")
