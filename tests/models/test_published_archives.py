"""Archives as NVIDIA and its users publish them: what older versions of NeMo wrote, names of files, other parts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from hostile_files import members_of, write_archive

from finetune.errors import UserError
from finetune.models.loading import load_model, read_tokenizer
from finetune.models.loss_module import LossModule
from finetune.models.nemo_archive import read_config
from finetune.tools.planning.layout import read_layout

Change = Callable[[dict[str, Any]], object]
# As NeMo 2.5 and 2.6 write it: without key_phrase_items_list.
BOOSTING_TREE = {
    "model_path": None,
    "key_phrases_file": None,
    "key_phrases_list": None,
    "context_score": 1.0,
    "depth_scaling": 2.0,
    "unk_score": 0.0,
    "final_eos_score": 1.0,
    "score_per_phrase": 0.0,
    "source_lang": "en",
    "use_triton": True,
    "uniform_weights": False,
    "use_bpe_dropout": False,
    "num_of_transcriptions": 5,
    "bpe_alpha": 0.3,
}


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path) -> Callable[[Change], str]:
    """`changed(change)` writes the tiny model with another configuration and returns its path."""

    def write(change: Change) -> str:
        files = members_of(tiny_model)
        name = next(n for n in files if n.endswith("model_config.yaml"))
        config = yaml.safe_load(files[name])
        change(config)
        return str(write_archive(tmp_path / "changed.nemo", {**files, name: yaml.safe_dump(config).encode()}))

    return write


def test_an_empty_boosting_tree_of_an_older_nemo_is_dropped(changed):
    def add(config: dict[str, Any]) -> None:
        config["decoding"]["greedy"]["boosting_tree"] = dict(BOOSTING_TREE)
        config["decoding"]["greedy"]["boosting_tree_alpha"] = 0.0

    model = load_model(changed(add))
    assert "boosting_tree" not in model.cfg.decoding.greedy


def test_an_empty_boosting_tree_of_a_ctc_head_is_dropped_too(changed):
    def add(config: dict[str, Any]) -> None:
        config["aux_ctc"] = {"decoding": {"strategy": "greedy", "greedy": {"boosting_tree": dict(BOOSTING_TREE)}}}

    assert read_config(Path(changed(add)))["aux_ctc"]["decoding"]["greedy"] == {}


@pytest.mark.parametrize("section", ["preprocessor", "spec_augment", "encoder", "decoder", "joint"])
def test_settings_that_only_another_nemo_knows(changed, section, caplog):
    def add(config: dict[str, Any], value: Any) -> None:
        config[section].update(of_the_future=value, of_the_past=value)
        config["nemo_version"] = "9.1.0"

    with pytest.raises(UserError) as found:
        load_model(changed(lambda config: add(config, 3)))
    message = str(found.value)
    assert "was written by NeMo 9.1.0, and NeMo 3.0.0 does not know " in message
    assert f"{section}.of_the_future: 3, {section}.of_the_past: 3. Install the NeMo that wrote it, or take" in message
    caplog.clear()
    assert load_model(changed(lambda config: add(config, None))).tokenizer.vocab_size > 0
    assert f"does not know {section}.of_the_future, {section}.of_the_past, which are null" in caplog.text


def test_a_decoding_of_another_nemo(changed):
    """Unknown settings of the search change nothing; an unknown search is named with the version."""
    assert load_model(changed(lambda config: config["decoding"]["greedy"].update(of_the_future=3)))

    def change(config: dict[str, Any]) -> None:
        config["decoding"]["strategy"] = "of_the_future"
        config["nemo_version"] = "9.1.0"

    with pytest.raises(UserError, match=r"of_the_future is not a valid .*written by NeMo 9\.1\.0.* NeMo 3\.0\.0"):
        load_model(changed(change))


def test_a_layout_that_nemo_cannot_build_is_named(changed):
    with pytest.raises(UserError, match="cannot be read as a NeMo model") as found:
        load_model(changed(lambda config: config["encoder"].update(n_heads=3)))
    assert "abstract" not in str(found.value)


def test_a_tokenizer_of_another_kind_is_refused_by_name(changed):
    with pytest.raises(UserError, match=r"tokenizer\.type: 'wpe' is not supported; .* SentencePiece"):
        load_model(changed(lambda config: config["tokenizer"].update(type="wpe")))


def test_a_tokenizer_that_is_no_sentencepiece_model(tiny_model, tmp_path):
    files = members_of(tiny_model)
    name = next(n for n in files if n.endswith("tokenizer.model"))
    path = write_archive(tmp_path / "other.nemo", {**files, name: b'{"version": "1.0", "truncation": null}'})
    for read in (load_model, lambda path: read_tokenizer(path, "--model")):
        with pytest.raises(UserError, match=r"other\.nemo.* SentencePiece"):
            read(str(path))


@pytest.mark.parametrize(
    "target",
    [
        "aed_multitask_models.EncDecMultiTaskModel",
        "multitalker_asr_models.EncDecMultiTalkerRNNTBPEModel",
        "label_models.EncDecSpeakerLabelModel",
        "classification_models.EncDecClassificationModel",
        "rnnt_models.EncDecRNNTModel",
        "hybrid_rnnt_ctc_bpe_models_prompt.EncDecHybridRNNTCTCBPEModelWithPrompt",
        "EncDecDenoiseMaskedTokenPredModel",
    ],
)
def test_models_of_other_kinds_are_unsupported_and_not_called_hostile(changed, target):
    """Canary, multitalker, speakers, classification; whatever else stands in their configurations."""

    def change(config: dict[str, Any]) -> None:
        config["target"] = f"nemo.collections.asr.models.{target}"
        config["transf_decoder"] = {"_target_": "nemo.collections.asr.modules.transformer.get_nemo_transformer"}
        config["model"] = "something of its own"

    for read in (load_model, read_layout):
        with pytest.raises(UserError) as found:
            read(changed(change))
        message = str(found.value)
        assert f"is a {target.rpartition('.')[2]}, which is not supported. This project trains Parakeet" in message
        assert "EncDecRNNTBPEModelWithPrompt" in message
        assert "Nothing was run" not in message


@pytest.mark.parametrize(
    ("part", "target", "known"),
    [
        ("encoder", "conv_asr.ConvASREncoder", "ConformerEncoder or ConformerEncoderAdapter"),
        ("joint", "hybrid_autoregressive_transducer.HATJoint", "RNNTJoint or SampledRNNTJoint"),
    ],
)
def test_parts_of_other_families_are_unsupported_and_not_called_hostile(changed, part, target, known):
    """ContextNet and HAT."""
    name = target.rpartition(".")[2]
    with pytest.raises(UserError, match=rf"{part}\._target_: a {name} is not supported; .* a {known} stands") as found:
        load_model(changed(lambda config: config[part].update(_target_=f"nemo.collections.asr.modules.{target}")))
    assert "Nothing was run" not in str(found.value)


def test_files_that_are_called_like_settings_do_no_harm(tiny_model, tmp_path, monkeypatch):
    for name in ("bpe", "hann", "greedy_batch", "tdt"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert load_model(str(tiny_model)).tokenizer.vocab_size > 0


def test_a_folder_with_one_archive_of_any_name(tiny_model, tmp_path):
    folder = tmp_path / "downloaded"
    folder.mkdir()
    shutil.copy(tiny_model, folder / "parakeet-tdt-0.6b-v3.nemo")
    (folder / "config.json").write_text('{"model_type": "whisper"}')
    tokens = load_model(str(folder)).tokenizer.vocab_size
    assert len(read_tokenizer(str(folder), "--model").pieces) == tokens == read_layout(str(folder)).tokens
    shutil.copy(tiny_model, folder / "another.nemo")
    with pytest.raises(UserError, match=r"several \.nemo files, such as another\.nemo and parakeet-tdt"):
        load_model(str(folder))


@pytest.mark.parametrize("file", ["parakeet-small.nemo", "best.nemo"])
def test_the_plan_takes_a_hub_name_whose_archive_is_in_the_cache(tiny_model, tmp_path, monkeypatch, file):
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--someone--parakeet-small" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    shutil.copy(tiny_model, snapshot / file)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert read_layout("someone/parakeet-small").layers == 2


@pytest.mark.slow
def test_the_plan_follows_local_attention(changed, tmp_path):
    """As `change_attention_model("rel_pos_local_attn", [128, 128])` leaves it."""
    from finetune import plan

    local = {"self_attention_model": "rel_pos_local_attn", "att_context_size": [128, 128]}
    name = changed(lambda config: config["encoder"].update(local))
    values = {"model": {"name": name}, "data": {"train": str(ROOT / "examples" / "voice_prompts")}}
    values["training"] = {"output_dir": str(tmp_path / "run")}
    (tmp_path / "RUN.yaml").write_text(yaml.safe_dump(values))
    shown = ["--gpu", "a100-80gb", "--strategies", "adamw", "--json", str(tmp_path / "plan.json")]
    assert plan.main(["--config", str(tmp_path / "RUN.yaml"), *shown]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["strategies"][0]["fits"]


def test_fastemit_is_the_models_own_unless_it_is_set(changed, archive_of):
    rnnt = LossModule(load_model(str(archive_of("streaming-eou"))))
    assert (rnnt.durations, rnnt.loss.keywords["fastemit_lambda"]) == ((), 0.03)
    model = load_model(changed(lambda config: config["loss"]["tdt_kwargs"].update(fastemit_lambda=0.03)))
    assert LossModule(model).loss.keywords["fastemit_lambda"] == 0.03
    assert LossModule(model, fastemit_lambda=0.0).loss.keywords["fastemit_lambda"] == 0.0


def test_a_stateless_tdt_has_timestamps(archive_of, clips, capsys):
    from finetune import transcribe

    path = archive_of("stateless-tdt")
    files = sorted(clips.glob("*.flac"))[:3]
    assert transcribe.main(["--model", str(path), *map(str, files), "--timestamps"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 3
    for row in rows:
        assert row["text"].split() == [part for word in row["words"] for part in word["word"].split()]
        assert all(0 <= word["start"] <= word["end"] <= row["duration"] for word in row["words"])
    assert any(row["words"] for row in rows)


def test_the_plan_says_that_global_attention_cannot_be_followed(archive_of):
    path = archive_of("long-rnnt")
    with pytest.raises(UserError, match=r"encoder\.global_tokens.*Measure one: finetune/train\.py --dry-run"):
        read_layout(str(path))
