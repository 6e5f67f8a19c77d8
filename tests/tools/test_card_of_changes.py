"""Sharing a model whose vocabulary was changed, or whose training went on from an adapter."""

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import slow
from sharing_cases import REPO, card_in, copied, members

pytest_plugins = ["sharing_fixtures"]


def changed_vocabulary(source: Path, target: Path, changes: list[dict]) -> Path:
    """A copy of a .nemo with notes of changes of its vocabulary."""
    files = members(source)
    config = yaml.safe_load(files["model_config.yaml"])
    files["model_config.yaml"] = yaml.safe_dump({**config, "vocabulary_changes": changes}).encode()
    with tarfile.open(target, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return target


@pytest.mark.parametrize(
    "origin",
    [
        "clientx_voices",
        "data/clientx/calls.jsonl",
        slow([{"path": "clientx calls.jsonl", "weight": 2}, "clientx/other"]),
        slow({"path": "clientx_voices", "split": "train"}),
    ],
)
def test_what_a_vocabulary_was_made_from_is_not_told(finished_run, hub, push, tmp_path, origin):
    from finetune.tools.publishing.private import private_parts, read_nemo_config, write_cleaned_nemo

    run = copied(finished_run, tmp_path / "run")
    sizes = {"size": 64, "pieces": "new_characters", "coverage": None}
    changes = [
        {"setting": {"extend_from": origin, **sizes, "digest": "0f3a"}},
        {"setting": {"replace_with": origin, **sizes}},
    ]
    changed_vocabulary(finished_run / "model.nemo", run / "model.nemo", changes)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["train"] = origin
    config["model"]["tokenizer"] = {"extend_from": origin, "size": 64}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    hf = tmp_path / "export"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    (hf / "nemo_config.yaml").write_text(yaml.safe_dump({"vocabulary_changes": changes, "decoder": {"vocab_size": 9}}))
    names = ["calls", "talks"] if isinstance(origin, list) else ["calls"]
    arguments = ("--model", run, "--repo", REPO, "--base-licence", "mit", "--yes", "--format", "both", "--hf-dir", hf)
    for given in (names, ["a", "b", "c"]):  # one for each source, or others for all of them
        assert push(*arguments, "--data-name", *given)[0] == 0
        files = hub.repositories[REPO].branches["main"].files
        assert not [name for name, content in files.items() if b"clientx" in content]
        tokenizer = yaml.safe_load(files["training/config.yaml"])["model"]["tokenizer"]
        assert tokenizer["size"] == 64
        found = tokenizer["extend_from"] if isinstance(tokenizer["extend_from"], list) else [tokenizer["extend_from"]]
        assert [source["path"] if isinstance(source, dict) else source for source in found] == given
    (tmp_path / "arrived.nemo").write_bytes(files["tiny-model.nemo"])
    expected = [
        {"setting": {"extend_from": "<removed>", **sizes, "digest": "0f3a"}},
        {"setting": {"replace_with": "<removed>", **sizes}},
    ]
    assert read_nemo_config(tmp_path / "arrived.nemo")["vocabulary_changes"] == expected
    assert yaml.safe_load(files["nemo_config.yaml"])["vocabulary_changes"] == expected
    assert private_parts(tmp_path / "arrived.nemo") == []
    assert private_parts(run / "model.nemo")
    write_cleaned_nemo(tmp_path / "arrived.nemo", tmp_path / "again.nemo")
    assert members(tmp_path / "again.nemo") == members(tmp_path / "arrived.nemo")


def test_a_changed_vocabulary_is_in_the_introduction_and_in_the_changes(finished_run, push, tmp_path):
    run = copied(finished_run, tmp_path / "run")
    arguments = ("--repo", REPO, "--base-licence", "mit")
    assert "vocabulary" not in card_in(push("--model", run, *arguments)[1])
    grown, replaced = {"setting": {"extend_from": "a", "size": 8}}, {"setting": {"replace_with": "b", "size": None}}
    pieces = len(yaml.safe_load(members(finished_run / "model.nemo")["model_config.yaml"])["labels"])
    for changes, said in (([grown, grown], "extended"), ([replaced, grown], "replaced and extended")):
        changed_vocabulary(finished_run / "model.nemo", run / "model.nemo", changes)
        text = card_in(push("--model", run, *arguments)[1])
        assert f"Its vocabulary was {said}: {pieces:,} pieces now." in text.split("## Results")[0]
        changed = f"trained further, as described above; its vocabulary was {said}: {pieces:,} pieces now. The authors"
        assert changed in text.split("## Licence")[1]
    (run / "tokenizer").mkdir()
    growth = {"pieces_before": 1, "pieces_added": 2, "new_characters": ["ő"], "new_pieces": ["ő", "▁ő"]}
    (run / "tokenizer" / "report.json").write_text(json.dumps({"pieces": 3, "growth": growth}))
    text = card_in(push("--model", run, *arguments)[1])
    assert f"{pieces:,} pieces now. The first of the new pieces: ő ▁ő.\n" in text
    hf = tmp_path / "export"
    hf.mkdir()
    (hf / "config.json").write_text("{}")
    kept = {"vocabulary_changes": [grown], "decoder": {"vocab_size": 1088}, "sample_rate": 16000}
    (hf / "nemo_config.yaml").write_text(yaml.safe_dump(kept))
    text = card_in(push("--model", hf, *arguments)[1])
    assert "Its vocabulary was extended: 1,088 pieces now." in text


def test_a_run_that_began_from_an_adapter_or_went_on_with_one_has_the_base_of_that(finished_run, push, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    shutil.copy(finished_run.parent / "base-of-alice.nemo", folder / "b.nemo")
    (folder / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    adapter = copied(finished_run, tmp_path / "lora") / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    (adapter / "base_model.json").write_text(json.dumps({"name": str(folder / "b.nemo"), "sha256": "0"}))
    further = copied(finished_run, tmp_path / "further")
    config = yaml.safe_load((further / "config.yaml").read_text())

    def shown(model: dict, *more: str) -> str:
        (further / "config.yaml").write_text(yaml.safe_dump({**config, "model": model}))
        return card_in(push("--model", further, "--repo", REPO, *more)[1])

    for model in ({"name": str(adapter)}, {"name": str(folder / "b.nemo"), "adapter": str(adapter)}):
        text = shown(model)
        assert "license: cc-by-4.0" in text
        assert "A speech recogniser: b.nemo, fine-tuned" in text
        assert "continued an earlier run (lora)" in text
        text = shown(model, "--base-model", "owner/base", "--base-licence", "mit")
        assert "continued an earlier run (lora)" in text
        assert "base_model: owner/base" in text
    # An adapter of such a run: on that run's merged model, or on the base model that both have.
    shutil.copytree(adapter, further / "adapter")
    for model, name, base in (
        ({"name": str(adapter)}, str(adapter), "lora"),
        ({"name": "owner/base", "adapter": str(adapter)}, "owner/base", "owner/base"),
    ):
        (further / "adapter" / "base_model.json").write_text(json.dumps({"name": name, "sha256": "0"}))
        upload, facts = uploaded_adapter(further, {**config, "model": model})
        assert json.loads(upload["base_model.json"])["name"] == base
        assert (facts.base.name, facts.base.hub) == (base, None if base == "lora" else base)
    # An adapter on an adapter leads to the base as well; one that names none is a base that is not known.
    again = further / "adapter" / "base_model.json"
    again.write_text(json.dumps({"name": str(adapter), "sha256": "0"}))
    assert "license: cc-by-4.0" in (text := shown({"name": str(further / "adapter")}))
    assert "continued an earlier run (further)" in text
    again.write_text("{}")
    assert "What it was trained from and on is not known" in shown({"name": str(further / "adapter")})


def uploaded_adapter(run: Path, config: dict) -> tuple[dict, Any]:
    """The files that an upload of a run's adapter would have, and what is known of the run."""
    from finetune.push_to_hub import make_parser
    from finetune.tools.publishing.share import gather

    (run / "config.yaml").write_text(yaml.safe_dump(config))
    found = gather(make_parser().parse_args(["--model", str(run), "--repo", REPO, "--format", "adapter"]), run)
    return {n: c if isinstance(c, bytes) else c.read_bytes() for n, c in found.upload.files.items()}, found.facts
