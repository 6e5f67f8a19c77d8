"""`python -m finetune.plan` as its user runs it, on a tiny layout; and its parts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, TOKENIZER, read_lines, tiny_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import plan
from finetune.config.load import load_config
from finetune.paths import strategy_names
from finetune.tools.planning import cache, memory
from finetune.tools.planning.dataset import Data
from finetune.tools.planning.engines import Engine
from finetune.tools.planning.gpus import GIB, card_named, card_with_memory
from finetune.tools.planning.layout import read_layout
from finetune.tools.planning.prediction import Predictor, Row, command_for, recommend

LONGEST = 1.5  # seconds; as the clips of the fixture


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder with RUN.yaml of a tiny model, and a cache of its own for all tests here."""
    folder = tmp_path_factory.mktemp("plan")
    shared = tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    layout, run = folder / "tiny.yaml", folder / "RUN.yaml"
    layout.write_text(yaml.safe_dump(tiny_layout()), encoding="utf-8")
    sections = {
        "model": {"name": str(layout)},
        "data": {"train": "train.jsonl", "max_duration": LONGEST},
        "training": {"output_dir": str(folder / "run"), "per_device_train_batch_size": 8, "bf16": True},
    }
    run.write_text(yaml.safe_dump(sections), encoding="utf-8")
    before = os.environ.get("PARAKEET_FINETUNE_CACHE")
    os.environ["PARAKEET_FINETUNE_CACHE"] = str(shared / "plan_cache")
    yield folder
    os.environ.pop("PARAKEET_FINETUNE_CACHE")
    if before is not None:
        os.environ["PARAKEET_FINETUNE_CACHE"] = before


@pytest.fixture(scope="module")
def planned(plan_folder):
    """`planned(*arguments)`: the plan for the tiny model as JSON, with exit code 0."""

    def run(*arguments: str, code: int = 0) -> dict[str, Any]:
        file = plan_folder / "plan.json"
        given = ["--config", str(plan_folder / "RUN.yaml"), "--json", str(file), *arguments]
        assert plan.main(given) == code
        return json.loads(file.read_text(encoding="utf-8"))

    return run


def rows_of(found: dict[str, Any]) -> dict[str, Any]:
    return {row["strategy"]: row for row in found["strategies"]}


@pytest.mark.slow
def test_the_plan_has_every_strategy_and_says_what_to_type(planned, plan_folder, capsys):
    capsys.readouterr()
    picture = plan_folder / "plan.png"
    found = planned("--gpu", "a100-80gb", "--hours", "100", "--picture", str(picture))
    rows = rows_of(found)
    assert rows.keys() == {*strategy_names(), "run file alone"}
    for row in rows.values():
        assert row["fits"] is True or row["reason"], row["strategy"]
        if row["fits"]:
            assert row["peak_memory_gib"] == pytest.approx(sum(row["parts_gib"].values()), rel=1e-6)
            assert row["max_batch"] >= row["batch"]
            assert row["seconds_per_step"] > 0
            assert row["hours"] > 0
    assert rows["adamw"]["parts_gib"]["optimizer"] > rows["adamw_8bit"]["parts_gib"]["optimizer"]
    assert rows["freeze_encoder"]["parts_gib"]["optimizer"] < rows["lora"]["parts_gib"]["optimizer"]
    assert rows["adamw"]["batch"] == 8
    assert "the encoder has 2" in rows["partial_unfreeze"]["reason"]  # it wants four layers
    assert rows["zero2"]["followed"] is False
    assert found["recommended"] == "adamw"
    said = capsys.readouterr().out
    run = plan_folder / "RUN.yaml"
    assert f"  bash scripts/run_training.sh --config {run} --strategy adamw\n" in said
    assert "0.8 s on average (a guess), 5 tokens a second (a guess), 100 h (train.jsonl is not on this" in said
    assert "not measured" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.slow
def test_several_gpus_share_what_the_engine_shares(planned):
    some = "adamw,adamw_8bit,ddp,zero1,zero2,zero3,fsdp2,cpu_offload_ao"
    rows = rows_of(planned("--gpu", "a100-80gb", "--gpus", "4", "--strategies", some))
    states = {name: row["parts_gib"]["optimizer"] for name, row in rows.items() if row["fits"]}
    assert states["ddp"] == pytest.approx(states["adamw"])
    for engine in ("zero1", "zero2", "zero3", "fsdp2"):
        assert states[engine] == pytest.approx(states["adamw"] / 4, rel=0.01)
    assert rows["zero2"]["command"].startswith("NUM_PROCESSES=4 bash scripts/run_training.sh --config ")
    assert rows["zero2"]["command"].endswith("--strategy zero2")
    assert "cpu_offload_ao" in rows["cpu_offload_ao"]["reason"]


@pytest.mark.slow
def test_strategies_are_combined_as_one_more_row(planned):
    asked = ("--strategy", "adamw_8bit", "--strategy", "gradient_checkpointing")
    rows = rows_of(planned("--gpu", "l4", *asked, "--strategies", "adamw,gradient_checkpointing"))
    assert rows.keys() == {"adamw", "gradient_checkpointing", "adamw_8bit+gradient_checkpointing"}
    both = rows["adamw_8bit+gradient_checkpointing"]
    assert both["peak_memory_gib"] < rows["gradient_checkpointing"]["peak_memory_gib"]
    assert both["command"].endswith("--strategy adamw_8bit --strategy gradient_checkpointing")


@pytest.mark.slow
def test_the_frozen_base_is_a_part(planned, tiny_model):
    asked = ("--gpu", "a100-80gb", "--gpus", "2", "--strategies", "ddp,zero3", f"model.name={tiny_model}")
    rows = rows_of(planned(*asked, "model.distillation=1", "training.bf16=false"))
    for name in ("ddp", "zero3"):  # whole on each GPU
        assert rows[name]["parts_gib"]["base"] == pytest.approx(rows["ddp"]["parts_gib"]["parameters"], rel=0.01)


def test_nothing_fits(planned, capsys):
    found = planned("--gpu-memory", "0.801GiB", "--strategies", "adamw,adamw_8bit", code=1)
    assert found["recommended"] is None
    assert "no recommendation: none fits, not even with one clip" in capsys.readouterr().out


@pytest.mark.slow
def test_data_as_the_check_found_them(planned, clips, tmp_path):
    from finetune import check

    assert check.main(["--data", str(clips / "manifest.jsonl"), "--output-dir", str(tmp_path), "--workers", "1"]) == 0
    found = planned("--gpu", "h100-80gb", "--check", str(tmp_path), "--strategies", "adamw")
    checked = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"))
    assert found["data"]["hours"] == checked["hours"]
    assert found["data"]["mean"] == pytest.approx(3600 * checked["hours"] / checked["clips"])
    assert found["data"]["longest"] == LONGEST
    assert rows_of(found)["adamw"]["hours"] > 0


def test_lengths_tokens_and_hours_come_from_the_data(planned, clips, capsys):
    from finetune.models.loading import read_tokenizer
    from finetune.models.sentencepiece_model import processor

    rows = read_lines(clips / "manifest.jsonl")
    encode = processor(read_tokenizer(str(TOKENIZER), "tokenizer")).encode
    seconds = sum(row["duration"] for row in rows)
    asked = ("--gpu", "l4", "--strategies", "adamw", f"data.train={clips / 'manifest.jsonl'}")
    found = planned(*asked)
    assert found["data"]["assumed"] == []
    assert found["data"]["mean"] == pytest.approx(seconds / len(rows))
    assert found["data"]["hours"] == pytest.approx(seconds / 3600)
    assert found["data"]["tokens_a_second"] == round(sum(len(encode(row["text"])) for row in rows) / seconds, 1)
    assert rows_of(found)["adamw"]["hours"] > 0
    said = capsys.readouterr().out
    assert f"h (from {len(rows)} of {len(rows)} rows of data.train)" in said
    assert "guess" not in said
    first = said.splitlines()[3].split()
    assert first[0] == "strategy"
    assert first[-1] == "hours"


@pytest.mark.slow
def test_a_processor_has_no_times_and_nothing_is_said_of_cost(planned, monkeypatch, capfd):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned("--strategies", "adamw,adamw_8bit")
    said, errors = capfd.readouterr()
    assert errors == ""
    lines = said.splitlines()
    assert lines[0].startswith("no GPU here: this plan is for the processor.")
    assert lines[1].startswith("1 x the processor of this machine, ")
    assert "no times: nothing is known of this processor's or card's speed" in lines
    assert any(line.startswith("take adamw: it fits: ") for line in lines)
    assert not [word for word in ("speed:", "order of", "cost", "s/step", "hours") if word in said]
    assert lines[-1] == "  to try a part of the data first: training.stages (docs/full_dataset.md)"


def test_the_command_is_the_readmes():
    run = "finetune/configs/parakeet_tdt_0.6b_v3.yaml"
    command = command_for(Path(run), ["recommended"], 1)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"RUN={run}" in readme
    assert f"\n{command.replace(run, '$RUN')} " in readme


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "a1000"], "a100-80gb"),
        (["--gpu-memory", "lots"], "write it as 24GB"),
        (["--gpu", "l4", "--gpu-memory", "24GB"], "give one of them"),
        (["--gpu", "l4", "--gpus", "0"], "--gpus"),
        (["--gpu", "l4", "model.droput=0.1"], "droput"),
        (["--gpu", "l4", "model.name=nobody/knows"], "nobody/knows"),
        (["--gpu", "l4", "--strategy", "adamw_9bit"], "adamw_9bit"),
        (["--gpu", "l4", "--check", "nowhere"], "python -m finetune.check"),
    ],
)
def test_wrong_arguments(plan_folder, capsys, arguments, message):
    assert plan.main(["--config", str(plan_folder / "RUN.yaml"), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


# ---- cache ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_plan_follows_nothing(planned, plan_folder):
    """Not even NeMo is imported, which takes ten seconds."""
    code = "import sys; from finetune.plan import main; print('exit', main(sys.argv[1:]), 'nemo' in sys.modules)"
    planned("--gpu", "a100-80gb", "--strategies", "adamw")
    arguments = ["--config", str(plan_folder / "RUN.yaml"), "--gpu", "l4", "--strategies", "adamw"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("exit 0 False\n"), done.stdout + done.stderr


def test_what_decides_on_memory_is_followed_anew(plan_folder):
    def key(*overrides: str, seconds: float = 10.0) -> str:
        config, _ = load_config(plan_folder / "RUN.yaml", [], list(overrides))
        layout = read_layout(config.model.name)
        return cache.key_of(layout, kind_of(config), [seconds, 6.0, 3.0], 5.0)

    assert key() == key() == key("model.sigma=0.1", "training.learning_rate=1e-4")
    changed = ["model.dropout=0.2", "model.lora_rank=4", "model.gradient_checkpointing=true", "model.dtype=bfloat16"]
    assert len({key(), key(seconds=11.0), *(key(c) for c in changed)}) == 2 + len(changed)


def kind_of(config: Any, cuda: bool = True) -> Any:
    from finetune.tools.planning.follow import Kind

    return Kind(config.model, "bf16", releases=False, cuda=cuda)


def test_a_cache_that_cannot_be_written_is_done_without(tiny_memory, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("no folder")
    monkeypatch.setenv("PARAKEET_FINETUNE_CACHE", str(file))
    cache.store("key", tiny_memory)
    assert cache.find("key") is None
    monkeypatch.setenv("PARAKEET_FINETUNE_CACHE", str(tmp_path / "folder"))
    cache.store("key", tiny_memory)
    assert str(cache.find("key").at(3, 1.0)) == str(tiny_memory.at(3, 1.0))
    (tmp_path / "folder" / "plan" / "key.json").write_text("{}")
    assert cache.find("key") is None


FOLLOW_TWICE = """
import os
import sys
from pathlib import Path
import numpy
import torch
from torch._subclasses import FakeTensorMode
from finetune.config.load import load_config
from finetune.tools.planning import cache
from finetune.tools.planning.follow import Kind
from finetune.tools.planning.layout import read_layout

with FakeTensorMode():  # from here on, autograd starts threads
    torch.ones(1)
torch.ones(1, requires_grad=True).backward()
config, _ = load_config(Path(sys.argv[1]), [], [])
kinds = [Kind(config.model, precision, releases=False, cuda=False) for precision in ("bf16", "no")]
for memory in cache.follow_all(read_layout(config.model.name), kinds, [1.5, 0.9, 0.45], 5.0):
    print(type(memory).__name__)

# As on a machine with a GPU, where NeMo's preprocessor reads a value from the device.
os.environ["PARAKEET_FINETUNE_CACHE"] += "/another"
torch.cuda.is_available, torch.cuda.is_current_stream_capturing = lambda: True, lambda: False
[again] = cache.follow_all(read_layout(config.model.name), kinds[-1:], [1.5, 0.9, 0.45], 5.0)
print(numpy.allclose(again.peaks_L2PN, memory.peaks_L2PN, rtol=1e-3))
"""


@pytest.mark.slow
def test_steps_are_followed_where_autograd_forbids_to_fork_and_where_there_is_a_gpu(plan_folder, tmp_path):
    code = [sys.executable, "-c", FOLLOW_TWICE, str(plan_folder / "RUN.yaml")]
    env = {**os.environ, "PARAKEET_FINETUNE_CACHE": str(tmp_path)}
    done = subprocess.run(code, capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.stdout.split() == ["StepMemory", "StepMemory", "True"], done.stdout + done.stderr


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_memory(plan_folder):
    """Of the run file alone."""
    config, _ = load_config(plan_folder / "RUN.yaml", [], [])
    lengths = [LONGEST, 0.6 * LONGEST, 0.3 * LONGEST]
    [memory] = cache.follow_all(read_layout(config.model.name), [kind_of(config)], lengths, 5.0)
    return memory


@pytest.fixture(scope="module")
def predictor(tiny_memory, plan_folder):
    config, _ = load_config(plan_folder / "RUN.yaml", [], [])
    data = Data(LONGEST, 1.0, None)
    layout = read_layout(config.model.name)
    return Predictor(config, Engine("none", 1, 1), card_named("l4"), data, layout, tiny_memory)


@settings(max_examples=60, deadline=None)
@given(clips=st.integers(1, 500), more=st.integers(0, 50), seconds=st.floats(0.45, 1.4), longer=st.floats(0.0, 0.1))
def test_more_and_longer_clips_never_need_less(predictor, clips, more, seconds, longer):
    # Tokens are whole: a little of slack for a length at which the rounded number of tokens is small.
    assert predictor.peak(clips + more, seconds + longer) >= 0.995 * predictor.peak(clips, seconds)


@settings(max_examples=30, deadline=None)
@given(usable=st.floats(0.005, 0.5), seconds=st.floats(0.45, LONGEST))
def test_the_largest_batch_fits_and_one_more_clip_does_not(predictor, usable, seconds):
    most = predictor.most_clips(seconds, usable * GIB)
    assert most == 0 or predictor.peak(most, seconds) <= usable * GIB
    assert predictor.peak(most + 1, seconds) > usable * GIB


def row(name: str, gib: float, fits: bool, most: int = 0) -> Row:
    return Row(name, peak_memory_gib=gib, fits=fits, batch=16, max_batch=most)


CARD = card_with_memory("24GB")


def test_the_first_that_fits_in_the_order_of_what_they_cost_is_recommended():
    rows = [row("freeze_encoder", 4, True), row("recommended", 9, True), row("adamw_8bit", 30, False)]
    name, why = recommend([*rows, row("adamw", 33, False)], CARD, 1)
    assert name == "recommended"
    assert "adamw needs 33.0" in why
    assert recommend([*rows, row("adamw", 20, True)], CARD, 1)[0] == "adamw"


def test_several_gpus_get_a_strategy_for_several():
    rows = [row("adamw", 9, True), row("ddp", 30, False), row("fsdp2", 18, True), row("zero2", 17, True)]
    assert recommend(rows, CARD, 4)[0] == "fsdp2"


def test_where_none_fits_the_smallest_with_a_smaller_batch_is_named():
    name, why = recommend([row("adamw", 40, False, 3), row("lora", 30, False, 7)], CARD, 1)
    assert name == "lora"
    assert "training.per_device_train_batch_size=7" in why
    assert recommend([row("adamw", 40, False), row("lora", 30, False)], CARD, 1)[0] is None


# ---- the 0.6 B layout -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("distillation", [0, 1])
def test_a_few_layers_stand_for_the_24_of_the_large_model(monkeypatch, distillation):
    """Followed with two of the layers and at other batches, against all 24 of them followed at this one."""
    from finetune.tools.planning.follow import Follower

    run = ROOT / "finetune" / "configs" / "parakeet_tdt_0.6b_v3.yaml"
    config, _ = load_config(run, [], [f"model.distillation={distillation}"])
    layout = read_layout(config.model.name)
    follower, kind = Follower(layout), kind_of(config)
    found = memory.measure(follower, kind, [30.0, 18.0, 9.0], 5.0)
    assert found.weights["parameters"] / 4 == pytest.approx(627e6, rel=0.02)
    assert found.at(6, 20.0).peaks["base"].max() / 4 == pytest.approx(627e6 * distillation, rel=0.03)
    monkeypatch.setattr(memory, "FOLLOWED_WHOLE", 24)
    whole = memory.followed_step(follower, kind, 6, 20.0, found.tokens_of(20.0))
    expected = max(sum(phase.peak.values()) for phase in whole)
    predicted = sum(found.at(6, 20.0).peaks.values()).max()
    assert predicted == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_the_whole_plan_of_the_large_model(tmp_path, monkeypatch, capsys):
    """Meant to take at most 60 s on two free cores; the time is printed, for a busy machine takes longer."""
    monkeypatch.setenv("PARAKEET_FINETUNE_CACHE", str(tmp_path))
    run = ROOT / "finetune" / "configs" / "parakeet_tdt_0.6b_v3.yaml"
    assert plan.main(["--config", str(run), "--gpu", "rtx-3090", "--json", str(tmp_path / "plan.json")]) == 0
    rows = rows_of(json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")))
    assert not [r for r in rows.values() if "cannot be followed" in r["reason"]]
    with capsys.disabled():
        print(capsys.readouterr().out.splitlines()[-6:])
