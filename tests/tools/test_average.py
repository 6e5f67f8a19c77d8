"""The command that makes one model out of several, and looks at points between a base model and a tuned one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import slow, tiny_layout

from finetune.models.interpolation import (
    lora_start,
    on_the_way,
    weighted_mean,
    with_task_vectors,
    with_ties,
)

# ---- the arithmetic ------------------------------------------------------------------------------------------------


def state(weights: list[float], variance: float = 1.0, count: int = 3) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.tensor(weights[:3], dtype=torch.float32),
        "b.weight": torch.tensor(weights[3:], dtype=torch.float32).view(1, 2),
        "b.running_var": torch.tensor([variance]),
        "b.num_batches_tracked": torch.tensor(count),
    }


def weights_of(merged: dict[str, torch.Tensor]) -> list[float]:
    return [*merged["a.weight"].tolist(), *merged["b.weight"].flatten().tolist()]


def test_a_weighted_mean():
    merged = weighted_mean(iter([state([1, 2, 3, 4, 5], 1.0), state([5, 6, 7, 8, 9], 3.0, 8)]), [1.0, 3.0])
    assert weights_of(merged) == pytest.approx([4, 5, 6, 7, 8])
    assert float(merged["b.running_var"]) == pytest.approx(2.5)
    assert merged["b.num_batches_tracked"] == 3  # a count is no weight


def test_task_vectors():
    base = state([1, 1, 1, 1, 1], 2.0)
    tuned = [state([2, 1, 0, 1, 1], 0.5), state([1, 3, 0, 1, 5], 1.0)]
    merged = with_task_vectors(base, iter(tuned), [1.0, 0.5])
    assert weights_of(merged) == pytest.approx([2, 2, -0.5, 1, 3])
    assert float(merged["b.running_var"]) == pytest.approx(0.5)  # not 2 - 1.5 - 0.5 = 0
    assert weights_of(base) == [1, 1, 1, 1, 1]


def test_ties_as_the_paper_has_it():
    """Of five values over both tensors two stay (0.4), so that one tensor may lose all: trimming goes by the whole."""
    base = state([1, 1, 1, 1, 1])
    steps = [[4, -3, 0.5, 0.1, 0.2], [-1, -5, 0.3, 0.2, 2], [3, 6, 0.1, 0, 0]]
    tuned = [state([1 + x for x in step]) for step in steps]
    # Trimmed: [4 -3 0 0 0], [0 -5 0 0 2], [3 6 0 0 0]. Signs of the sums: +7, -2, 0, 0, +2.
    merged = with_ties(base, iter(tuned), [1.0, 1.0, 1.0], 0.4)
    assert weights_of(merged) == pytest.approx([1 + 7 / 2, 1 - 8 / 2, 1, 1, 1 + 2])
    merged = with_ties(base, iter(tuned), [0.5, 0.5, 1.0], 0.4)
    assert weights_of(merged) == pytest.approx([1 + (2 + 3) / 2, 1 - (1.5 + 2.5) / 2, 1, 1, 1 + 1])
    whole = with_ties(base, iter(tuned[:1]), [1.0], 1.0)
    assert weights_of(whole) == pytest.approx(weights_of(tuned[0]))


def test_a_point_on_the_way():
    base, tuned = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    assert torch.equal(on_the_way(base, tuned, 0.25), torch.tensor([0.25, 1.5], dtype=torch.bfloat16))
    assert torch.equal(on_the_way(base, tuned, 0.0), base.bfloat16())
    assert torch.equal(on_the_way(base, tuned, 1.0), tuned)
    counts = torch.tensor(3), torch.tensor(9)
    assert on_the_way(*counts, 0.5) == 9


def test_a_lora_update_goes_the_way_once():
    base = {"x.lora_A.default.weight": torch.ones(1, 2), "x.lora_B.default.weight": torch.zeros(2, 1)}
    assert [lora_start(name, base) for name in base] == [True, False]
    begun = {**base, "x.lora_B.default.weight": torch.ones(2, 1)}  # with model.adapter
    assert not any(lora_start(name, begun) for name in begun)


# ---- files ---------------------------------------------------------------------------------------------------------


def run(*arguments: Any) -> int:
    from finetune import average

    return average.main([str(a) for a in arguments])


def state_of(path: Path) -> dict[str, torch.Tensor]:
    from finetune.models.loading import load_model

    return load_model(str(path)).state_dict()


@pytest.fixture(scope="module")
def tuned(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other weights and statistics."""
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo

    path, model = tmp_path_factory.mktemp("tuned") / "tuned.nemo", load_model(str(tiny_model))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
        model.encoder.layers[0].conv.batch_norm.running_var.mul_(3)
        model.encoder.layers[0].conv.batch_norm.num_batches_tracked.add_(7)
    save_nemo(model, path)
    return path


def test_the_mean_of_files(tiny_model, tuned, clips, tmp_path, capsys):
    out, told = tmp_path / "mean", tmp_path / "mean.json"
    manifest = clips / "manifest.jsonl"
    data = ["--data", manifest, "--guard", manifest, "--max-samples", "4", "--json", told]
    assert run(tiny_model, tuned, "--output", out, "--weights", "1", "2", *data) == 0
    a, b, mean = (state_of(p) for p in (tiny_model, tuned, out))
    for name, tensor in mean.items():
        if tensor.is_floating_point():
            expected = (a[name].double() + 2 * b[name].double()) / 3
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(tensor, a[name])
    found = json.loads(told.read_text())
    assert [row["model"] for row in found["models"]] == [str(tiny_model), str(tuned), "mean"]
    assert all(row["clips"] == 4 and row["wer"] == row["guard_wer"] > 0 for row in found["models"])
    assert found["weights"] == [1, 2]
    assert "the mean of 2 models" in capsys.readouterr().out
    assert run("--models", out, tuned, "--output", out) == 2
    assert "is one of the models" in capsys.readouterr().err


@pytest.fixture
def rated(monkeypatch, tiny_model, tuned) -> None:
    """WERs that go by how far the weights are on the way from the tiny model to the tuned one."""
    from finetune.tools.averaging import Judge

    key = "joint.pred.weight"
    start, end = (state_of(path)[key] for path in (tiny_model, tuned))

    def rates(self: Judge, model: Any) -> dict[str, Any]:
        way = float((model.state_dict()[key] - start).norm() / (end - start).norm())
        found = {"wer": 0.9 - 0.5 * way + 0.2 * way**4, "cer": 0.5, "clips": 9}
        return found | ({"guard_wer": 0.4 + 0.1 * way, "guard_cer": 0.2, "guard_clips": 8} if self.guard else {})

    monkeypatch.setattr(Judge, "rates", rates)


@pytest.mark.usefixtures("rated")
@pytest.mark.parametrize(
    ("options", "points", "way"),
    [
        (["--limit", "+11 %", "--sweep"], [i / 10 for i in range(11)], 0.4),
        (["--limit", "+0.06", "--sweep", "1,0.5,0.75"], [0, 0.5, 0.75, 1], 0.5),
        slow(["--limit", "0 %", "--sweep", "0.5"], [0, 0.5], 0),
        slow(["--sweep", "0,0.75,1"], [0, 0.75, 1], 0.75),
    ],
)
def test_a_sweep_takes_the_best_that_keeps_the_limit(tiny_model, tuned, clips, tmp_path, capsys, options, points, way):
    manifest, out, told = clips / "manifest.jsonl", tmp_path / "out", tmp_path / "sweep.json"
    common = ["--base", tiny_model, "--output", out, "--data", manifest, "--guard", manifest, "--json", told]
    assert run(tuned, *common, *options) == 0
    found = json.loads(told.read_text())
    assert [row["way"] for row in found["points"]] == points
    assert found["taken"] == ("base" if way == 0 else f"way {way:g}")
    kept = {row["way"]: row.get("kept") for row in found["points"]}
    if "--limit" in options:
        assert found["limit_wer"] == pytest.approx({"+11 %": 0.444, "+0.06": 0.46, "0 %": 0.4}[options[1]])
        assert kept == {p: 0.4 + 0.1 * p <= found["limit_wer"] + 1e-6 for p in points}
    said, picture = capsys.readouterr().out, (out / "sweep.svg").read_text()
    assert said.count("above the limit") == list(kept.values()).count(False)
    assert said.count("<- taken") == 1
    assert "<svg" in picture
    base, end, written = (state_of(p) for p in (tiny_model, tuned, out))
    for name, tensor in written.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, torch.lerp(base[name], end[name], way), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.usefixtures("rated")
def test_a_base_whose_vocabulary_was_grown(tiny_model, clips, tmp_path, capsys):
    from finetune.models.loading import load_model
    from finetune.models.nemo_archive import save_nemo
    from finetune.models.sentencepiece_model import tokenizer_of, write_tokenizer
    from finetune.models.tokenizer_growth import grow_on_texts
    from finetune.models.vocabulary_rows import change_vocabulary

    model, grown = load_model(str(tiny_model)), tmp_path / "grown.nemo"
    growth = grow_on_texts(tokenizer_of(model, "k"), ["ş ğ ı şı"] * 9, 60, key="k")
    write_tokenizer(growth.model, tmp_path / "tokenizer")
    change_vocabulary(model, tmp_path / "tokenizer")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    save_nemo(model, grown)
    manifest, told = clips / "manifest.jsonl", tmp_path / "sweep.json"
    common = ["--base", tiny_model, "--data", manifest, "--guard", manifest, "--json", told, "--output"]
    assert run(grown, *common, tmp_path / "out", "--limit", "0 %", "--sweep", "0,0.5") == 0
    base, written = state_of(tiny_model), state_of(tmp_path / "out")
    assert json.loads(told.read_text())["new_pieces"] == growth.added
    assert f"{len(growth.added)} pieces of the tuned model are new" in capsys.readouterr().out
    old, new, end = growth.before, len(growth.added), model.state_dict()
    assert new > 2
    for name, tensor in written.items():
        if tensor.shape == base[name].shape:
            assert torch.equal(tensor, base[name])
            continue
        assert len(tensor) == len(base[name]) + new
        assert torch.equal(tensor[:old], base[name][:old])
        assert torch.equal(tensor[old : old + new], end[name][old : old + new])  # of which the base knows nothing
        assert torch.equal(tensor[old + new :], base[name][old:])  # blank and durations
    assert run(grown, tiny_model, "--output", tmp_path / "mean") == 2
    assert f"{tiny_model} has {old} tokens, {grown} has {old + new}" in capsys.readouterr().err


@pytest.fixture
def kept(tiny_model, tuned, tmp_path) -> list[Path]:
    """Two states of a run with a frozen encoder, as far from the tiny model as the tuned one and twice that."""
    from safetensors.torch import save_file

    run, (start, end) = tmp_path / "run", (state_of(path) for path in (tiny_model, tuned))
    (run / "checkpoints" / "average").mkdir(parents=True)
    shutil.copyfile(tiny_model, run / "model.nemo")
    trained = [name for name in start if name.startswith(("decoder.", "joint."))]
    for way in (1, 2):
        state = {name: torch.lerp(start[name], end[name], way).contiguous() for name in trained}
        file = run / "checkpoints" / "average" / f"step-{way:08d}.safetensors"
        save_file(state, file, metadata={"kept": json.dumps({"step": way, "validation_wer": 0.5})})
    return sorted((run / "checkpoints" / "average").glob("*.safetensors"))


@pytest.mark.usefixtures("rated")
@pytest.mark.parametrize(
    ("options", "way"),
    [
        (["--weights", "3", "1"], 1.25),
        slow(["--method", "task", "--weights", "0.25"], 0.75),
        slow(["--method", "ties", "--density", "1"], 1.5),
        slow(["--limit", "+0.06", "--sweep", "0,0.4,0.6"], 0.4),
    ],
)
def test_states_that_a_run_keeps(tiny_model, tuned, clips, kept, tmp_path, options, way):
    base = ["--base", tiny_model] if options[0] != "--weights" else []
    data = ["--data", clips / "manifest.jsonl", "--guard", clips / "manifest.jsonl"] if "--sweep" in options else []
    assert run(*kept, *base, *data, "--output", tmp_path / "out", *options) == 0
    start, end, written = (state_of(p) for p in (tiny_model, tuned, tmp_path / "out"))
    if "--sweep" in options:
        way *= 1.5  # of the two states' mean
    for name, tensor in written.items():
        expected = torch.lerp(start[name], end[name], way) if name.startswith(("decoder.", "joint.")) else start[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


def test_states_of_other_shapes_and_without_their_run(kept, tmp_path, capsys):
    from safetensors.torch import load_file, save_file

    out, run_folder = tmp_path / "out", kept[0].parents[2]
    state = load_file(kept[1])
    name = "joint.pred.weight"
    save_file(state | {name: state[name][:-1].contiguous()}, kept[1])
    assert run(*kept, "--output", out) == 2
    before, after = tuple(state[name].shape), (len(state[name]) - 1, *state[name].shape[1:])
    said = capsys.readouterr().err
    assert f"{kept[1]} and {run_folder}/model.nemo have other layouts: 1 of {len(state)} tensors differ: " in said
    assert f"{name} is {after} and {before}. " in said
    save_file({**state, "encoder.x.lora_A.default.weight": torch.ones(1)}, kept[1])
    assert run(*kept, "--output", out) == 2
    assert f"{kept[1]} holds the factors of LoRA" in capsys.readouterr().err
    kept[1].write_bytes(b"damaged")
    assert run(*kept, "--output", out) == 2
    assert f"--models: {kept[1]} cannot be read: " in capsys.readouterr().err
    assert run(*kept, "--output", run_folder) == 2
    assert "is one of the models" in capsys.readouterr().err
    (run_folder / "model.nemo").unlink()
    assert run(*kept, "--output", out) == 2
    assert f"the rest comes from {run_folder}/model.nemo, which is not there" in capsys.readouterr().err


@pytest.mark.slow
def test_statistics_estimated_anew(tiny_model, tuned, clips, tmp_path):
    """They are the means over the batches of each batch's own, measured here at the module's input."""
    from finetune.evaluation.batchnorm import estimate_batchnorm
    from finetune.evaluation.dataset import EvaluationSettings, open_sources
    from finetune.models.loading import load_model

    settings = EvaluationSettings(data=[str(clips / "manifest.jsonl")], batch_size=8, workers=0)
    model = load_model(str(tuned))
    norm, seen = model.encoder.layers[1].conv.batch_norm, []

    def look(module: Any, inputs: tuple[torch.Tensor]) -> None:
        x_CN = inputs[0].transpose(0, 1).flatten(1).double()
        seen.append((x_CN.mean(1), x_CN.var(1)))

    norm.register_forward_pre_hook(look)
    momentum, training = norm.momentum, model.training
    assert estimate_batchnorm(model, open_sources(settings.data, "test"), settings) == len(seen) == 3
    for i, statistic in enumerate((norm.running_mean, norm.running_var)):
        expected = sum(pair[i] for pair in seen) / len(seen)
        torch.testing.assert_close(statistic.double(), expected, rtol=1e-4, atol=1e-6)
    assert (norm.momentum, norm.training, model.training) == (momentum, training, training)
    out = tmp_path / "out"
    data = ["--data", *settings.data, "--batch-size", "8"]
    assert run(tuned, tuned, "--batchnorm", "estimate", *data, "--output", out) == 0
    before, written, ours = state_of(tuned), state_of(out), model.state_dict()
    changed = [name for name in written if not torch.equal(written[name], before[name])]
    assert changed
    assert all("batch_norm.running_" in name for name in changed)
    for name in changed:
        torch.testing.assert_close(written[name], ours[name], rtol=1e-4, atol=1e-6)


# ---- what cannot be merged -----------------------------------------------------------------------------------------


def test_files_that_cannot_be_merged(tiny_model, tmp_path, capsys, monkeypatch):
    import yaml

    from finetune.tools import averaging

    layout = tiny_layout()
    layout["model"]["encoder"]["n_layers"] = 3
    three = tmp_path / "three.yaml"
    three.write_text(yaml.safe_dump(layout), encoding="utf-8")

    def swap(model: Any) -> None:
        from omegaconf import open_dict

        tokens = list(model.joint.vocabulary)
        tokens[5], tokens[6] = tokens[6], tokens[5]
        with open_dict(model.cfg):
            model.cfg.joint.vocabulary = tokens
            model.cfg.labels = tokens
        model.joint.vocabulary = tokens

    loaded = averaging.load_model

    def load(name: str) -> Any:
        model = loaded(str(tiny_model) if name == "swapped" else name)
        if name == "swapped":
            swap(model)
        return model

    monkeypatch.setattr(averaging, "load_model", load)
    assert run(tiny_model, "swapped", "--output", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"--models: swapped and {tiny_model} have other tokenizers: 2 of " in said
    assert "tokens differ, such as token 5, " in said
    assert run(tiny_model, three, "--output", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"{three} and {tiny_model} have other layouts: " in said
    assert " tensors differ: encoder.layers.2." in said
    assert "(32,) and missing; " in said
    assert " more. Only models of one layout" in said
    assert run(tiny_model, "--base", three, "--method", "task", "--output", tmp_path / "out") == 2
    assert f"--base: {three} and {tiny_model} have other layouts" in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.nemo").exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["a"], "give two models or more"),
        (["a", "--method", "ties"], "--method ties needs --base"),
        (["--base", "b", "--method", "task"], "give a model"),
        (["a", "--sweep"], "--sweep needs --base"),
        (["a", "--base", "b", "--sweep"], "--sweep needs --data"),
        (["a", "b", "--base", "c"], "--base is for"),
        (["a", "b", "--limit", "5 %", "--guard", "g"], "--limit needs --sweep and --guard"),
        (["a", "b", "--batchnorm", "estimate"], "--batchnorm estimate needs --data"),
        (["a", "b", "--weights", "1", "2", "3"], "--weights: 3 weights for 2 models"),
        (["a", "b", "--weights", "-1", "2"], "are 0 or more"),
        (["a", "b", "--weights", "nan"], "--weights: the weights are finite numbers"),
        (["a", "--base", "b", "--method", "task", "--weights", "inf"], "--weights: the weights are finite numbers"),
        (["a", "b", "--density", "0"], "--density has to be above 0"),
        (["a", "b", "--split", "test"], "--split is of --data"),
        (["a", "b", "--guard-split", "test"], "--guard-split is of --guard"),
    ],
)
def test_options_that_do_not_go_together(options, expected, capsys):
    with pytest.raises(SystemExit):
        run(*options, "--output", "nowhere")
    assert expected in capsys.readouterr().err


def test_what_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "out" / "model.nemo").mkdir(parents=True)
    for output, options, said in (
        (file, (), f"--output: {file} is a file"),
        (file / "deep" / "er", (), f"--output: {file} is a file"),
        (tmp_path / "out", (), "model.nemo is a directory"),
        (tmp_path / "new", ("--json", tmp_path), f"--json: {tmp_path} is a directory"),
        (tmp_path / "new", ("--json", file / "r.json"), f"--json: {file} is a file"),
    ):
        assert run("no-model", "neither", "--output", output, *options) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_model_that_cannot_be_written_is_one_message(tiny_model, tuned, tmp_path, capsys, monkeypatch):
    from finetune.tools.export import nemo

    def full(model: Any, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nemo, "save_nemo", full)
    assert run(tiny_model, tuned, "--output", tmp_path / "out") == 1
    assert (
        "model.nemo cannot be written: [Errno 28] No space left on device. Nothing was kept."
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("points", ["runs/one", "0,2", "0,,1"])
def test_points_that_are_none(points, capsys):
    assert run("a", "--base", "b", "--data", "d", "--output", "nowhere", "--sweep", points) == 2
    assert f"--sweep: {points!r} is no list of numbers from 0 to 1" in capsys.readouterr().err
