"""Prompt models (EncDecRNNTBPEModelWithPrompt): trained, evaluated and used with the language of each utterance."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ONLY_TRAIN, read_lines, write_manifest
from engine_cases import assert_two_ranks_train_like_one
from hostile_files import members_of, write_archive
from loss_equality import assert_equal_gradients, batch_of, gradients, prepared
from safetensors.torch import load_file

from finetune.errors import UserError
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.models.loading import load_model
from finetune.models.look_ahead import attending
from finetune.models.loss_module import LossModule
from finetune.models.nemo import cast_parameters
from finetune.models.nemo_archive import save_nemo
from finetune.models.prompts import auto_ratio, encode, slots_of


@pytest.fixture(scope="module")
def prompt_model(archive_of: Callable[..., Path]) -> Path:
    """A small archive in the layout of nvidia/nemotron-3.5-asr-streaming-0.6b, with fewer pieces."""
    return archive_of("prompt", tokenizer="plain")


@pytest.fixture(scope="module")
def without_auto(prompt_model: Path) -> Path:
    """The same without a prompt `auto`."""
    return changed(prompt_model, "without_auto", lambda c: c["model_defaults"]["prompt_dictionary"].pop("auto"))


def changed(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> Path:
    files = members_of(path)
    file = next(n for n in files if n.endswith("model_config.yaml"))
    config = yaml.safe_load(files[file])
    change(config)
    return write_archive(path.with_name(f"{name}.nemo"), {**files, file: yaml.safe_dump(config).encode()})


@pytest.fixture
def bare_clips(clips: Path, tmp_path: Path) -> Callable[..., str]:
    """`bare_clips(lang="xx")` writes a manifest of the clips with another language, or with none for None."""

    def write(lang: str | None, name: str = "other.jsonl") -> str:
        rows = read_lines(clips / "manifest.jsonl")
        for row in rows:
            row.update(audio_filepath=str(clips / row["audio_filepath"]), lang=lang)
        return str(write_manifest(tmp_path / name, rows))

    return write


def audio_of(clips: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return 0.1 * torch.randn(clips, 24_000, generator=draw), torch.tensor([24_000, 20_000, 9_000][:clips])


def test_loss_and_gradients_are_nemos(prompt_model):
    model = prepared(prompt_model)
    audio_BS, lengths_B, tokens_BU, token_lengths_B = batch_of(model)
    slots_B = slots_of(model, ["de", "en-GB", ""])
    assert slots_B is not None
    assert slots_B.tolist() == [9, 1, 101]
    module = LossModule(model)
    module.train()
    ours = module(audio_BS, lengths_B, tokens_BU, token_lengths_B, slots_B).mean()
    ours.backward()
    of_ours = gradients(model)
    assert of_ours["prompt_kernel.0.weight"].abs().max() > 0
    model.zero_grad()

    with attending(model.encoder, None):  # else NeMo's encoder draws its look-ahead
        encoded, frames = model.forward(input_signal=audio_BS, input_signal_length=lengths_B, prompt_indices=slots_B)
    decoded, target_lengths, _ = model.decoder(targets=tokens_BU, target_length=token_lengths_B)
    model.joint.set_fuse_loss_wer(False)
    theirs = model.loss(
        log_probs=model.joint(encoder_outputs=encoded, decoder_outputs=decoded),
        targets=tokens_BU,
        input_lengths=frames,
        target_lengths=target_lengths,
    )
    assert model.cfg.rnnt_reduction == "mean_volume"
    theirs = theirs * token_lengths_B.sum() / len(token_lengths_B)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_equal_gradients(of_ours, gradients(model))


def test_utterances_are_recognised_with_their_languages(prompt_model):
    model = load_model(str(prompt_model))
    audio_BS, lengths_B = audio_of()
    with evaluation_mode(model):
        mel_BFT, mel_lengths_B = model.preprocessor(input_signal=audio_BS, length=lengths_B)
        outputs = {}
        for language in ("de", "en-GB", "auto", None):
            slots_B = None if language is None else slots_of(model, [language] * 3)
            outputs[language], _ = encode(model, mel_BFT, mel_lengths_B, slots_B)
        index_B = torch.tensor([9, 1, 101])
        theirs, frames_B = model.forward(
            processed_signal=mel_BFT, processed_signal_length=mel_lengths_B, prompt_indices=index_B
        )
        mixed = [h.y_sequence.tolist() for h in recognise_batch(model, audio_BS, lengths_B, ["de", "en-GB", ""])]
        nemos = model.decoding.rnnt_decoder_predictions_tensor(
            encoder_output=theirs, encoded_lengths=frames_B, return_hypotheses=True
        )
    assert torch.equal(outputs["auto"], outputs[None])
    assert not torch.allclose(outputs["de"], outputs["en-GB"])
    for i, language in enumerate(("de", "en-GB", "auto")):
        torch.testing.assert_close(theirs[i], outputs[language][i])
    assert mixed == [h.y_sequence.tolist() for h in nemos]


@pytest.mark.slow
def test_training_goes_by_the_rows_languages_and_resumes_bit_by_bit(
    prompt_model, run_train, tiny_run, tmp_path, capfd
):
    from nemo.collections.asr.models import ASRModel

    arguments = tiny_run(
        "training.max_steps=4",
        "training.save_steps=2",
        "training.save_total_limit=5",
        model={"name": str(prompt_model)},
        data={"validation": None, "test": None},
    )
    assert run_train(*arguments) == 0
    assert (
        "prompts of 24 rows: en -> en 12x, fr -> fr 12x; in training 50% of the clips get auto"
        in capfd.readouterr().err
    )
    run = tmp_path / "run"
    losses = [row["loss"] for row in read_lines(run / "metrics.jsonl")]
    weights = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    restored = ASRModel.restore_from(str(run / "model.nemo"), map_location="cpu")
    published = load_model(str(prompt_model))
    assert type(restored).__name__ == "EncDecRNNTBPEModelWithPrompt"
    assert restored.cfg.encoder == published.cfg.encoder
    assert restored.cfg.model_defaults == published.cfg.model_defaults
    assert restored.cfg.train_ds == published.cfg.train_ds
    before, after = published.state_dict(), restored.state_dict()
    assert not torch.equal(before["prompt_kernel.0.weight"], after["prompt_kernel.0.weight"])

    shutil.rmtree(run / "checkpoints" / "step-00000004")
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert json.loads((run / "summary.json").read_text())["resumed_from"] == 2
    assert [row["loss"] for row in read_lines(run / "metrics.jsonl")] == losses
    again = load_file(run / "checkpoints" / "step-00000004" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2"])
def test_two_ranks_train_like_one_process(prompt_model, trainings, tmp_path, engine):
    quiet = load_model(str(prompt_model))
    quiet.cfg.preprocessor.dither = 0.0  # each rank would draw its own
    save_nemo(quiet, tmp_path / "quiet.nemo")
    name = [f"model.name={tmp_path / 'quiet.nemo'}", "model.unified_auto_ratio=0", "training.max_steps=6"]
    assert_two_ranks_train_like_one(trainings, tmp_path, engine, ("loss", "grad_norm"), *name)


def test_the_share_of_auto_is_the_models_own_unless_it_is_set(prompt_model, without_auto):
    model = load_model(str(prompt_model))
    assert auto_ratio(model, None) == 0.5
    assert auto_ratio(model, 0.1) == 0.1
    model.cfg.train_ds.unified_auto_ratio = 0.2
    assert auto_ratio(model, None) == 0.2
    model.cfg.train_ds.default_prompt_mode = "langID"
    assert auto_ratio(model, None) == 0.0
    bare = load_model(str(without_auto))
    assert auto_ratio(bare, None) == 0.0
    with pytest.raises(UserError, match=r"model\.unified_auto_ratio: 0\.3 is set, but the model has no prompt `auto`"):
        auto_ratio(bare, 0.3)


def test_the_share_of_auto_reaches_the_batches(prompt_model, run_train, tiny_run):
    slots: list[int] = []

    def observe(trainer: Any) -> None:
        for batch in trainer.stream.batches():
            slots.extend(batch.slots)
        trainer.stream.go_back(({}, 0))

    arguments = tiny_run("training.max_steps=1", model={"name": str(prompt_model)}, data=ONLY_TRAIN)
    assert run_train(*arguments, "model.unified_auto_ratio=0", observe=observe) == 0
    assert sorted(slots) == [0] * 12 + [8] * 12


@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_rows_in_an_unknown_language_end_the_run_at_its_beginning(
    prompt_model, run_train, tiny_run, bare_clips, tmp_path, capfd, arguments
):
    data = {"train": bare_clips("xx"), "validation": None, "test": None}
    assert run_train(*tiny_run(model={"name": str(prompt_model)}, data=data), *arguments) in (1, 2)
    said = " ".join(capfd.readouterr().err.split())
    assert "data.train: 24 of 24 rows have no prompt of the model. 24 rows: the model has no prompt for the" in said
    assert "language 'xx': it has en-US, en, en-GB" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_lines(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.slow
def test_rows_without_a_language_need_a_model_with_auto(
    prompt_model, without_auto, run_train, tiny_run, bare_clips, tmp_path, capfd
):
    data = {"train": bare_clips(None), "validation": None, "test": None}
    assert run_train(*tiny_run("training.max_steps=1", model={"name": str(prompt_model)}, data=data)) == 0
    assert "(no language) -> auto 24x" in capfd.readouterr().err
    arguments = tiny_run("training.overwrite_output_dir=true", model={"name": str(without_auto)}, data=data)
    assert run_train(*arguments) != 0
    said = " ".join(capfd.readouterr().err.split())
    assert "24 rows: the row names no language and the model has no prompt `auto`: add a column `language`" in said


def test_evaluate_and_transcribe_take_a_language(prompt_model, without_auto, clips, bare_clips, capsys):
    from finetune import evaluate, transcribe

    def run(program: Any, *arguments: str) -> tuple[int, str, str]:
        code = program.main([str(a) for a in arguments])
        printed = capsys.readouterr()
        return code, printed.out, " ".join(printed.err.split())

    rows = ["--data", str(clips / "manifest.jsonl"), "--max-samples", "4", "--bootstrap", "0"]
    assert run(evaluate, "--model", prompt_model, *rows)[0] == 0
    assert run(evaluate, "--model", prompt_model, *rows, "--language", "auto")[0] == 0
    other = ["--data", bare_clips("xx"), "--max-samples", "4", "--bootstrap", "0"]
    code, _, said = run(evaluate, "--model", prompt_model, *other)
    assert code == 1
    assert "(4 in quarantine" in said
    assert "no prompt for the language 'xx'" in said
    assert run(evaluate, "--model", prompt_model, *other, "--language", "de")[0] == 0
    code, _, said = run(evaluate, "--model", prompt_model, *rows, "--language", "deu")
    assert code == 2
    assert "--language: the model has no prompt for the language 'deu': did you mean de-DE" in said

    clip = str(next(clips.glob("*.flac")))
    assert run(transcribe, "--model", prompt_model, clip, "--timestamps")[0] == 0
    assert run(transcribe, "--model", prompt_model, clip, "--language", "de-DE")[0] == 0
    code, _, said = run(transcribe, "--model", without_auto, clip)
    assert code == 2
    assert "--language: the model has no prompt for the language 'auto'" in said


def test_a_model_without_prompts_takes_no_language(tiny_model, clips, capsys):
    from finetune import transcribe

    assert transcribe.main(["--model", str(tiny_model), str(next(clips.glob("*.flac"))), "--language", "de"]) == 2
    assert "--language: the model takes no language" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda slots: slots.clear(), "its model_defaults.prompt_dictionary is empty"),
        (lambda slots: slots.update(en=128), r"prompt_dictionary\.en: a slot from 0 to 127 is expected, found 128"),
        (lambda slots: slots.update(en="0"), r"prompt_dictionary\.en: a slot from 0 to 127 is expected, found '0'"),
    ],
)
def test_a_dictionary_that_does_not_fit_the_prompt_kernel(prompt_model, change, message):
    path = changed(prompt_model, "bad", lambda config: change(config["model_defaults"]["prompt_dictionary"]))
    with pytest.raises(UserError, match=message):
        load_model(str(path))


def test_the_prompt_kernel_takes_part_in_all_that_goes_over_parts(prompt_model):
    from finetune.strategies.lora import add_lora
    from finetune.strategies.optimizers import parameter_groups
    from finetune.tools.planning.layout import Skeleton, read_layout

    published = load_model(str(prompt_model))
    names = {name for name, _ in published.named_parameters() if name.startswith("prompt_kernel.")}
    assert names == {n for n, _ in Skeleton(read_layout(str(prompt_model))).named_parameters() if "prompt" in n}
    groups = parameter_groups(published, {}, 1e-3, 0.1)
    assert {"prompt_kernel", "prompt_kernel_no_decay"} <= {group["name"] for group in groups}
    add_lora(published, rank=2, targets=["linear_q"], train_decoder=False)
    assert not any(p.requires_grad for p in published.prompt_kernel.parameters())
    cast_parameters(published, torch.bfloat16)
    assert {p.dtype for p in published.prompt_kernel.parameters()} == {torch.bfloat16}


@pytest.mark.slow
def test_an_adapter_holds_the_prompt_kernel(prompt_model, run_train, tiny_run, tmp_path):
    arguments = tiny_run(
        "training.max_steps=1",
        model={"name": str(prompt_model), "lora_rank": 2, "lora_targets": ["linear_q"]},
        data=ONLY_TRAIN,
    )
    assert run_train(*arguments) == 0
    whole = load_model(str(tmp_path / "run")).state_dict()
    merged = load_model(str(tmp_path / "run" / "adapter")).state_dict()
    assert all(torch.equal(whole[name], merged[name]) for name in whole)
    base = load_model(str(prompt_model)).state_dict()
    assert not torch.equal(base["prompt_kernel.0.weight"], merged["prompt_kernel.0.weight"])
