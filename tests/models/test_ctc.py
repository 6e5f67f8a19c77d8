"""CTC: models of it alone, the CTC head of hybrids, and one that is added to a transducer."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import yaml
from conftest import DETERMINISTIC, ONLY_TRAIN, ROOT, read_lines, write_manifest
from ctc_layouts import ctc_layout, hybrid_layout
from engine_cases import assert_two_ranks_train_like_one
from loss_equality import assert_equal_gradients, batch_of, gradients, prepared
from omegaconf import OmegaConf

from finetune import evaluate, transcribe
from finetune.errors import UserError
from finetune.evaluation.recognise import best_paths, evaluation_mode, recognise_batch, recognise_long
from finetune.models.add_ctc import add_ctc_head
from finetune.models.loading import load_model
from finetune.models.loss_module import LossModule
from finetune.models.nemo import chosen_head, import_nemo, set_head
from finetune.models.nemo_archive import read_config, save_nemo

Layout = Callable[[], dict[str, Any]]


@pytest.fixture(scope="module")
def published(archive_of: Callable[..., Path]) -> str:
    """A small parakeet-ctc."""
    return str(archive_of("ctc"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], str]:
    """`built(ctc_layout)` makes a .nemo of the layout, without dither and with random weights, once."""
    folder, paths = tmp_path_factory.mktemp("layouts"), {}

    def build(layout: Layout) -> str:
        if layout not in paths:
            path = folder / f"{layout.__name__}.yaml"
            path.write_text(yaml.safe_dump(layout()))
            torch.manual_seed(0)
            save_nemo(load_model(str(path)), path.with_suffix(".nemo"))
            paths[layout] = str(path.with_suffix(".nemo"))
        return paths[layout]

    return build


@pytest.fixture
def spoken(clips: Path, tmp_path: Path) -> Path:
    """The 12 English clips in a row, half a second apart."""
    parts = [soundfile.read(file, dtype="float32")[0] for file in sorted(clips.glob("*.flac"))[:12]]
    samples = [torch.cat([torch.from_numpy(part), torch.zeros(8000)]) for part in parts]
    soundfile.write(tmp_path / "spoken.wav", torch.cat(samples).numpy(), 16000)
    return tmp_path / "spoken.wav"


# ---- the loss -------------------------------------------------------------------------------------------------------


def test_loss_and_gradients_of_a_ctc_model_are_nemos(built):
    model = prepared(built(ctc_layout))
    assert type(model).__name__ == "EncDecCTCModelBPE"
    audio_BS, audio_lengths_B, tokens_BU, token_lengths_B = batch_of(model)
    module = LossModule(model)
    module.train()
    ours = module(audio_BS, audio_lengths_B, tokens_BU, token_lengths_B).mean()
    ours.backward()
    of_ours = gradients(model)
    model.zero_grad()
    log_probs, lengths, _ = model.forward(input_signal=audio_BS, input_signal_length=audio_lengths_B)
    theirs = model.loss(log_probs=log_probs, targets=tokens_BU, input_lengths=lengths, target_lengths=token_lengths_B)
    theirs.backward()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert_equal_gradients(of_ours, gradients(model))
    assert of_ours["decoder.decoder_layers.0.weight"].abs().max() > 0


def test_a_clip_without_an_alignment_is_left_out(built):
    model = prepared(built(ctc_layout))
    module = LossModule(model).train()
    audio_BS, lengths_B = (
        0.1 * torch.randn(1, 4_000, generator=torch.Generator().manual_seed(0)),
        torch.tensor([4_000]),
    )
    losses_B = module(audio_BS, lengths_B, torch.tensor([[5, 5, 5]]), torch.tensor([3]))  # 4 frames, 5 are needed
    assert losses_B.tolist() == [float("inf")]
    assert module(audio_BS, lengths_B, torch.tensor([[5, 6, 7]]), torch.tensor([3])).isfinite().all()


@pytest.mark.parametrize("layout", [ctc_layout, hybrid_layout])
def test_the_loss_of_an_utterance_depends_on_nothing_else_in_its_batch(built, layout):
    model = prepared(built(layout))
    module = LossModule(model, omega=0.0).train()
    audio_BS, audio_lengths_B, tokens_BU, token_lengths_B = batch_of(model)
    together_B = module(audio_BS, audio_lengths_B, tokens_BU, token_lengths_B)
    together_B.sum().backward()
    of_all = gradients(model)
    model.zero_grad()
    alone = []
    for i, (samples, tokens) in enumerate(zip(audio_lengths_B, token_lengths_B, strict=True)):
        one = slice(i, i + 1)
        loss_B = module(audio_BS[one, :samples], audio_lengths_B[one], tokens_BU[one, :tokens], token_lengths_B[one])
        loss_B.sum().backward()
        alone.append(loss_B.item())
    assert together_B.tolist() == pytest.approx(alone, rel=1e-5)
    assert_equal_gradients(gradients(model), of_all)


def with_a_fast_speaker(clips: Path, folder: Path) -> str:
    """The manifest of the clips; the first has more tokens than encoder frames."""
    rows = read_lines(clips / "manifest.jsonl")
    for row in rows:
        row["audio_filepath"] = str(clips / row["audio_filepath"])
    rows[0]["text"] = " ".join([rows[0]["text"]] * 8)
    return str(write_manifest(folder / "fast.jsonl", rows))


CUTS = {"whole": ["training.per_device_train_batch_size=8"], "cut": ["training.gradient_accumulation_steps=2"]}
PARTS = ("loss", "transducer_loss", "ctc_loss", "grad_norm")


@pytest.mark.parametrize("reduction", ["mean_batch", "mean_volume"])
def test_both_parts_of_a_hybrids_loss_are_logged_and_stay_however_a_step_is_cut(
    built, run_train, tiny_run, clips, tmp_path, capsys, reduction
):
    """NVIDIA-NeMo/NeMo issue 14710: there CTC's share depends on how many tokens a batch has."""
    data = {**ONLY_TRAIN, "train": with_a_fast_speaker(clips, tmp_path)}
    model = {**DETERMINISTIC, "name": built(hybrid_layout), "omega": 0.0}
    rows = {}
    for name, cut in CUTS.items():
        training = {"output_dir": str(tmp_path / name), "max_steps": 3, "loss_reduction": reduction}
        assert run_train(*tiny_run(*cut, model=model, data=data, training=training)) == 0
        rows[name] = read_lines(tmp_path / name / "metrics.jsonl")
        for row in rows[name]:
            assert row["loss"] == pytest.approx(0.7 * row["transducer_loss"] + 0.3 * row["ctc_loss"], rel=1e-6)
        assert json.loads((tmp_path / name / "summary.json").read_text())["infeasible_ctc"] == 1
        assert rows[name][-1]["infeasible_ctc"] == 1
    for whole, cut in zip(*rows.values(), strict=True):
        assert [cut[part] for part in PARTS] == pytest.approx([whole[part] for part in PARTS], rel=1e-4)
    assert capsys.readouterr().err.count("more tokens than encoder frames for CTC") == len(CUTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "engine"),
    [(ctc_layout, "ddp"), (hybrid_layout, "ddp"), (hybrid_layout, "fsdp2"), (ctc_layout, "zero2")],
)
def test_two_ranks_train_like_one_process(built, trainings, tmp_path, layout, engine):
    name = [f"model.name={built(layout)}", "model.omega=0", "training.max_steps=8"]
    parts = PARTS if layout is hybrid_layout else ("loss", "grad_norm")
    assert_two_ranks_train_like_one(trainings, tmp_path, engine, parts, *name)


# ---- decoding -------------------------------------------------------------------------------------------------------


def test_the_best_path_is_nemos_text_with_the_frames_of_its_tokens(built):
    model = load_model(built(ctc_layout))
    draw = torch.Generator().manual_seed(0)
    V = model.tokenizer.vocab_size
    labels_BT = torch.randint(V - 3, V + 1, (4, 30), generator=draw)  # few labels, so that some repeat
    frames_B = torch.tensor([30, 17, 1, 0])
    log_probs_BTV = torch.nn.functional.one_hot(labels_BT, V + 1).float().mul(3).log_softmax(-1)
    found = best_paths(model, log_probs_BTV, frames_B)
    theirs = model.decoding.ctc_decoder_predictions_tensor(log_probs_BTV[:3], frames_B[:3], return_hypotheses=True)
    assert [h.text for h in found] == [*(h.text for h in theirs), ""]
    for hypothesis, labels_T, frames in zip(found, labels_BT.tolist(), frames_B.tolist(), strict=True):
        runs = [(label, len(list(run))) for label, run in itertools.groupby(labels_T[:frames])]
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        expected = [(label, start, length) for (label, length), start in zip(runs, starts) if label != V]
        tokens = hypothesis.y_sequence, hypothesis.timestamp, hypothesis.token_duration
        assert list(zip(*(x.tolist() for x in tokens), strict=True)) == expected
        share = float(log_probs_BTV.max().exp())
        confidence = ((V + 1) * share - 1) / V
        assert hypothesis.token_confidence == pytest.approx([confidence] * len(expected), rel=1e-4)


def test_each_head_of_a_hybrid_decodes_as_in_nemo(built, clips):
    model = load_model(built(hybrid_layout)).eval()
    files = [str(file) for file in sorted(clips.glob("*.flac"))[:3]]
    audio = [torch.from_numpy(soundfile.read(file, dtype="float32")[0]) for file in files]
    audio_BS = torch.nn.utils.rnn.pad_sequence(audio, batch_first=True)
    lengths_B = torch.tensor([len(a) for a in audio])
    texts = {}
    for head, theirs in (("transducer", "rnnt"), ("ctc", "ctc")):
        set_head(model, head)
        with evaluation_mode(model):
            texts[head] = [h.text for h in recognise_batch(model, audio_BS, lengths_B)]
        model.change_decoding_strategy(decoder_type=theirs, verbose=False)
        with torch.no_grad():
            assert texts[head] == [h.text for h in model.transcribe(files, batch_size=3, verbose=False)]
    assert texts["transducer"] != texts["ctc"]


def test_a_head_that_is_not_there(built, tiny_model, capsys):
    transducer, ctc = load_model(str(tiny_model)), load_model(built(ctc_layout))
    with pytest.raises(UserError, match=r"--head ctc: m\.nemo has no CTC head\. .* model\.add_ctc"):
        set_head(transducer, "ctc", "m.nemo")
    with pytest.raises(UserError, match=r"--head transducer: m\.nemo is a CTC model"):
        set_head(ctc, "transducer", "m.nemo")
    assert chosen_head(transducer) == "transducer"
    assert chosen_head(ctc) == "ctc"
    assert transcribe.main(["--model", str(tiny_model), "--head", "ctc", "x.wav"]) == 2
    assert "has no CTC head" in capsys.readouterr().err


def test_a_search_that_is_not_used_is_said(built, spoken, capsys):
    from nemo.collections.asr.parts.submodules.ctc_decoding import CTCBPEDecodingConfig

    model = load_model(built(ctc_layout))
    model.cfg.decoding = OmegaConf.structured(CTCBPEDecodingConfig(strategy="pyctcdecode"))
    save_nemo(model, spoken.with_name("search.nemo"))
    assert transcribe.main(["--model", str(spoken.with_name("search.nemo")), str(spoken)]) == 0
    assert "pyctcdecode has no effect: CTC decodes greedily here" in capsys.readouterr().err


# ---- a CTC model from end to end ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(published, run_train_for_module, tmp_path_factory, clips) -> Iterator[Path]:
    """A run of a published CTC model: six steps, of which the last three were resumed."""
    folder = tmp_path_factory.mktemp("ctc_run")
    manifest = str(clips / "manifest.jsonl")
    values = {
        "model": {"name": published, **DETERMINISTIC},
        "data": {"train": manifest, "test": manifest, "allow_overlap": True, "text_normalization": "basic"},
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 6,
            "per_device_train_batch_size": 24,  # the same clips in each step
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 3,
            "dataloader_num_workers": 0,
            "num_threads": 1,
            "report_to": "none",
        },
    }
    (folder / "RUN.yaml").write_text(yaml.safe_dump(values))
    arguments = ["--config", str(folder / "RUN.yaml")]
    assert run_train_for_module(*arguments) == 0
    whole = read_lines(folder / "run" / "metrics.jsonl")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000006")
    assert run_train_for_module(*arguments, "training.resume_from_checkpoint=true") == 0
    resumed = read_lines(folder / "run" / "metrics.jsonl")
    assert [r["loss"] for r in resumed] == pytest.approx([r["loss"] for r in whole], rel=1e-5)
    assert whole[-1]["loss"] < whole[0]["loss"]
    assert "ctc_loss" not in whole[0]
    return folder / "run"


@pytest.mark.slow
def test_plain_nemo_restores_a_trained_ctc_model_with_its_settings(run, published):
    before, after = read_config(Path(published)), read_config(run / "model.nemo")
    for section in ("preprocessor", "encoder", "decoder", "decoding", "spec_augment", "ctc_reduction", "target"):
        assert after[section] == before[section]
    restored = import_nemo().EncDecCTCModelBPE.restore_from(str(run / "model.nemo"), map_location="cpu")
    own = load_model(str(run)).state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in restored.state_dict().items())
    first = import_nemo().EncDecCTCModelBPE.restore_from(published, map_location="cpu").state_dict()
    assert not torch.equal(own["decoder.decoder_layers.0.weight"], first["decoder.decoder_layers.0.weight"])


def test_evaluate_and_transcribe_a_ctc_model(run, published, clips, spoken, tmp_path, capsys):
    result = tmp_path / "result.json"
    arguments = ["--data", str(clips / "manifest.jsonl"), "--bootstrap", "0", "--json", str(result)]
    assert evaluate.main(["--model", str(run), *arguments]) == 0
    told = json.loads(result.read_text())
    assert told["head"] == "ctc"
    assert told["clips"] == 24
    assert "decoded with the CTC head" in capsys.readouterr().out
    # Random weights write something; after a few steps CTC writes blanks alone.
    assert transcribe.main(["--model", published, str(spoken), "--timestamps", "--chunk", "6"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert " ".join(w["word"] for w in row["words"]) == row["text"]
    ends = [t for w in row["words"] for t in (w["start"], w["end"])]
    assert ends == sorted(ends)
    assert all(0 <= w["confidence"] <= 1 for w in row["words"])
    assert ends[-1] <= row["duration"]


def test_long_audio_is_the_text_of_its_chunks(built, spoken):
    """Random weights give a token here and there all along the recording."""
    model = load_model(built(ctc_layout))
    audio_S = torch.from_numpy(soundfile.read(spoken, dtype="float32")[0])
    with evaluation_mode(model):
        whole = recognise_batch(model, audio_S[None], torch.tensor([len(audio_S)]))[0].text
        assert recognise_long(model, audio_S, 60.0, 4) == whole
        assert recognise_long(model, audio_S, 6.0, 4)


STRATEGIES = {
    "plain": {},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "sdpa": {"scaled_dot_product_attention": True},
    "activation_offload": {"activation_offload": True},
    "partial_unfreeze": {"freeze_encoder": True, "unfreeze_encoder_layers": 1},
    "freeze_encoder": {"freeze_encoder": True},
    "lora": {"lora_rank": 4},
}


@pytest.mark.slow
def test_strategies_on_a_ctc_model(built, run_train, tiny_run, tmp_path, monkeypatch):
    """All begin at the same loss; what changes no mathematics also goes on alike, and what is frozen stays."""
    monkeypatch.setattr("finetune.strategies.activation_offload.THRESHOLD", 1024)
    path = built(ctc_layout)
    before, losses = load_model(path).state_dict(), {}
    for name, options in STRATEGIES.items():
        model = {**DETERMINISTIC, "name": path, **options}
        training = {"output_dir": str(tmp_path / name), "learning_rate": 3e-3}
        assert run_train(*tiny_run(model=model, data=ONLY_TRAIN, training=training)) == 0
        losses[name] = [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]
        assert losses[name][0] == pytest.approx(losses["plain"][0], rel=1e-5)
        after = load_model(str(tmp_path / name)).state_dict()
        head = "decoder.decoder_layers.0.weight"
        assert not torch.equal(after[head], before[head])
        frozen = "encoder.layers.0.feed_forward1.linear1.weight"
        assert torch.equal(after[frozen], before[frozen]) is (name in ("partial_unfreeze", "freeze_encoder"))
    for name in ("gradient_checkpointing", "sdpa", "activation_offload"):
        assert losses[name] == pytest.approx(losses["plain"], rel=1e-4)
    merged = load_model(str(tmp_path / "lora" / "adapter")).state_dict()
    for name, tensor in load_model(str(tmp_path / "lora")).state_dict().items():
        torch.testing.assert_close(merged[name], tensor, msg=name)


@pytest.mark.slow
def test_the_adapter_of_a_hybrid_has_its_ctc_head(built, run_train, tiny_run, tmp_path):
    model = {**DETERMINISTIC, "name": built(hybrid_layout), "lora_rank": 4}
    assert run_train(*tiny_run(model=model, data=ONLY_TRAIN)) == 0
    trained = load_model(str(tmp_path / "run")).state_dict()
    merged = load_model(str(tmp_path / "run" / "adapter")).state_dict()
    assert torch.equal(merged["ctc_decoder.decoder_layers.0.weight"], trained["ctc_decoder.decoder_layers.0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ctc_layout, hybrid_layout])
def test_the_plan_follows_the_heads(built, layout, tmp_path):
    from finetune import plan
    from finetune.tools.planning.layout import Skeleton, read_layout

    names = {name.partition(".")[0] for name, _ in load_model(built(layout)).named_parameters()}
    skeleton = Skeleton(read_layout(built(layout)))
    assert {name.partition(".")[0] for name, _ in skeleton.named_parameters()} == names
    values = {
        "model": {"name": built(layout)},
        "data": {"train": str(ROOT / "examples" / "voice_prompts")},
        "training": {"output_dir": str(tmp_path / "run")},
    }
    (tmp_path / "RUN.yaml").write_text(yaml.safe_dump(values))
    shown = ["--gpu", "a100-80gb", "--strategies", "adamw", "--json", str(tmp_path / "plan.json")]
    assert plan.main(["--config", str(tmp_path / "RUN.yaml"), *shown]) == 0
    row = json.loads((tmp_path / "plan.json").read_text())["strategies"][0]
    assert row["fits"]
    assert row["seconds_per_step"] > 0


# ---- a head that is added -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_head_added_to_a_tdt_model_makes_nemos_hybrid(tiny_model, run_train, tiny_run, tmp_path, capsys):
    model = {**DETERMINISTIC, "name": str(tiny_model), "add_ctc": True}
    assert run_train(*tiny_run(model=model, data=ONLY_TRAIN)) == 0
    assert "the loss is 0.7 x transducer + 0.3 x CTC" in capsys.readouterr().err
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(row["ctc_loss"] > 0 for row in rows)
    saved = tmp_path / "run" / "model.nemo"
    restored = import_nemo().EncDecHybridRNNTCTCBPEModel.restore_from(str(saved), map_location="cpu")
    assert type(restored.loss._loss).__name__ == "TDTLossNumba"
    assert restored.ctc_loss_weight == 0.3
    own, before = load_model(str(saved)), read_config(tiny_model)
    for section in ("preprocessor", "encoder", "decoder", "loss", "decoding"):
        assert read_config(saved)[section] == before[section]
    assert all(torch.equal(own.state_dict()[name], tensor) for name, tensor in restored.state_dict().items())
    # Once more: the head is there, and goes on from what it learned.
    again = {**model, "name": str(saved)}
    training = {"output_dir": str(tmp_path / "again"), "max_steps": 1}
    assert run_train(*tiny_run(model=again, data=ONLY_TRAIN, training=training)) == 0
    assert "has a CTC head already" in capsys.readouterr().err
    assert read_lines(tmp_path / "again" / "metrics.jsonl")[0]["ctc_loss"] < rows[0]["ctc_loss"]


def test_the_head_alone_leaves_the_transducer_and_decodes(tiny_model, run_train, tiny_run, tmp_path, capsys):
    model = {**DETERMINISTIC, "name": str(tiny_model), "add_ctc": True, "ctc_loss_weight": 1, "freeze_encoder": True}
    assert run_train(*tiny_run(model=model, training={"save_steps": 1})) == 0
    before, run = load_model(str(tiny_model)).state_dict(), tmp_path / "run"
    after = load_model(str(run))
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in before.items())
    assert chosen_head(after) == "ctc"
    shutil.rmtree(run / "checkpoints" / "step-00000002")
    losses = [row["loss"] for row in read_lines(run / "metrics.jsonl")]
    assert run_train("--config", tmp_path / "RUN.yaml", "training.resume_from_checkpoint=true") == 0
    assert [row["loss"] for row in read_lines(run / "metrics.jsonl")] == pytest.approx(losses, rel=1e-5)
    data = yaml.safe_load((tmp_path / "RUN.yaml").read_text())["data"]["test"]
    wer = {}
    for head in ("ctc", "transducer"):
        arguments = ["--data", data, "--bootstrap", "0", "--json", str(tmp_path / "result.json"), "--head", head]
        assert evaluate.main(["--model", str(run), *arguments]) == 0
        wer[head] = json.loads((tmp_path / "result.json").read_text())["wer"]
    assert wer["ctc"] == json.loads((run / "summary.json").read_text())["wer_after"]
    assert evaluate.main(["--model", str(tiny_model), *arguments]) == 0
    assert wer["transducer"] == json.loads((tmp_path / "result.json").read_text())["wer"]


@pytest.mark.slow
def test_a_head_for_a_changed_vocabulary(tiny_model, run_train, tiny_run, tmp_path):
    """Later or at once (NVIDIA-NeMo/NeMo issue 14140); either resumes."""
    (tmp_path / "texts.txt").write_text("çığ şöğüş\n" * 20)
    model = {**DETERMINISTIC, "name": str(tiny_model), "tokenizer": {"extend_from": str(tmp_path / "texts.txt")}}
    assert run_train(*tiny_run(model=model, data=ONLY_TRAIN, training={"output_dir": str(tmp_path / "grown")})) == 0
    for name, then in (("later", {"name": str(tmp_path / "grown")}), ("at_once", {})):
        options = {**model, **then, "add_ctc": True}
        training = {"output_dir": str(tmp_path / name), "save_steps": 1}
        assert run_train(*tiny_run(model=options, data=ONLY_TRAIN, training=training)) == 0
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-00000002")
        losses = [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")]
        assert run_train("--config", tmp_path / "RUN.yaml", "training.resume_from_checkpoint=true") == 0
        assert [row["loss"] for row in read_lines(tmp_path / name / "metrics.jsonl")] == pytest.approx(
            losses, rel=1e-5
        )
        trained = import_nemo().EncDecHybridRNNTCTCBPEModel.restore_from(
            str(tmp_path / name / "model.nemo"), map_location="cpu"
        )
        assert trained.ctc_decoder.num_classes_with_blank == trained.tokenizer.vocab_size + 1 > 129
        assert type(trained.loss._loss).__name__ == "TDTLossNumba"


def test_the_plan_has_the_head_that_will_be_added(tiny_model, tiny_run):
    from finetune.config.load import load_config
    from finetune.tools.planning.layout import Skeleton, layout_of

    model = {"name": str(tiny_model), "add_ctc": True}
    config, _ = load_config(Path(tiny_run(model=model)[1]), [], [])
    added = load_model(str(tiny_model))
    assert add_ctc_head(added, "m")
    shapes = {name: tuple(p.shape) for name, p in added.ctc_decoder.named_parameters()}
    assert shapes == {name: tuple(p.shape) for name, p in Skeleton(layout_of(config)).ctc_decoder.named_parameters()}
