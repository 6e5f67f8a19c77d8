"""`data.rehearsal`: clips of the old domain in each step, while an epoch stays one pass over the new ones."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ONLY_TRAIN, problem, read_lines, write_manifest
from launching import summary
from stream_cases import RATE, check_resume, encode, ids, read_epoch

from finetune.config.load import load_config
from finetune.config.schema import RunConfig
from finetune.data.batching import BatchLimits
from finetune.data.options import StreamOptions
from finetune.data.overlap import find_overlap, warnings_about
from finetune.data.run_file import count_clips, mean_seconds, open_sources, with_filters
from finetune.data.stream import UtteranceStream
from finetune.data.usable import look_at_usable
from finetune.errors import UserError
from finetune.tools.planning.dataset import sample

NEW, OLD = 40, 25


@pytest.fixture
def domains(corpus: Path, tmp_path: Path) -> dict[str, str]:
    """Two new sources of 40 clips and an old one of 25, over the files of the corpus."""

    def write(name: str, count: int, seconds: float) -> str:
        rows = [
            {"audio_filepath": str(corpus / f"clip{i % 5:02d}.flac"), "id": f"{name}{i:02d}", "text": "x"}
            for i in range(count)
        ]
        return str(write_manifest(tmp_path / f"{name}.jsonl", [{**row, "duration": seconds} for row in rows]))

    return {"a": write("a", NEW, 1.0), "b": write("b", NEW, 1.0), "old": write("old", OLD, 3.0)}


@pytest.fixture
def configured(run_file: Any, domains: dict[str, str]) -> Any:
    """Makes the configuration of a run with these domains; `train` and `rehearsal` name them by their letters."""

    def make(train: Any = "ab", rehearsal: Any = ("old",), **data: Any) -> RunConfig:
        def named(value: Any) -> list[Any]:
            return [
                {"path": domains[one]} if isinstance(one, str) else {**one, "path": domains[one["path"]]}
                for one in value
            ]

        keys = {"train": named(train), "rehearsal": named(rehearsal), **data}
        return load_config(run_file(**{f"data__{key}": value for key, value in keys.items()}), [], [])[0]

    return make


def stream_of(config: RunConfig, **options: Any) -> UtteranceStream:
    d = config.data
    fixed = StreamOptions(
        BatchLimits(clips=4), RATE, seed=1, shuffle_buffer_size=9,
        max_samples=d.max_samples, skip_samples=d.skip_samples,
    )  # fmt: skip
    how = {name: options.pop(name) for name in ("rank", "ranks", "workers") if name in options}
    vars(fixed).update(options)
    return UtteranceStream(with_filters(open_sources(config)["train"], d), fixed, encode, **how)


def by_domain(clips: list[str]) -> Counter[str]:
    return Counter(clip.rstrip("0123456789") for clip in clips)


WEIGHTED = [{"path": "a", "weight": 1}, {"path": "b", "weight": 3}]


@pytest.mark.parametrize(("train", "share"), [("ab", 0.4), ("ab", 0.75), (WEIGHTED, 0.4)], ids=str)
def test_the_share_is_that_of_the_clips_and_an_epoch_is_one_pass_over_the_new(
    configured: Any, train: Any, share: float
) -> None:
    config = configured(train, rehearsal_share=share)
    stream, drawn = stream_of(config), Counter[str]()
    epochs = 10
    for _ in range(epochs):
        batches = read_epoch(stream)
        found = by_domain(ids(batches))
        assert found["a"] == NEW
        assert found["old"] == sum(sum(batch.from_rehearsal) for batch in batches)
        assert found["old"] == pytest.approx(found.total() * share, abs=1)
        once = Counter(clip for clip in ids(batches) if not clip.startswith("old"))
        assert train == WEIGHTED or (set(once.values()) == {1} and len(once) == 2 * NEW)
        drawn += found
    # As many clips as the steps are counted from.
    planned = count_clips(training_sources(config), -1)
    assert planned is not None
    assert drawn.total() == pytest.approx(epochs * planned, rel=0.2 if train == WEIGHTED else 0.02)
    if train == WEIGHTED:
        assert drawn["b"] / drawn["a"] == pytest.approx(3, rel=0.25)


def training_sources(config: RunConfig) -> Any:
    return open_sources(config)["train"]


def test_steps_are_counted_from_the_new_clips_with_the_share_beside_them(configured: Any) -> None:
    sources = training_sources(configured(rehearsal_share=0.2))
    assert count_clips(sources, -1) == 100
    assert count_clips(sources, 40) == 50
    assert count_clips(sources, 40, 8) == 40
    assert count_clips(training_sources(configured(WEIGHTED, rehearsal_share=0.2)), -1) == 200


@pytest.mark.parametrize("options", [{}, {"group_by_duration": True}, {"shuffle": False, "interleave": True}])
def test_a_run_goes_on_at_the_next_clip(configured: Any, options: dict[str, Any]) -> None:
    config = configured()
    check_resume(lambda: stream_of(config, **options), 1, [5, -2, -1])


def test_other_ranks_go_on_with_what_is_left(configured: Any) -> None:
    config, given, states = configured(), [], []
    for rank in range(2):
        stream = stream_of(config, rank=rank, ranks=2)
        for _, batch in zip(range(2), stream.batches()):
            given += batch.ids
        states.append(stream.state_dict())
    alone = stream_of(config)
    assert alone.load_state_dict(states)
    given += ids(list(alone.batches()))
    assert sorted(clip for clip in given if not clip.startswith("old")) == sorted(
        f"{name}{i:02d}" for name in "ab" for i in range(NEW)
    )


def test_max_samples_and_skip_samples_concern_the_new_data(configured: Any) -> None:
    def clips(**data: Any) -> set[str]:
        stream = stream_of(configured(**data))
        return {clip for _ in range(20) for clip in ids(read_epoch(stream))}

    some, rest = clips(max_samples=20), clips(max_samples=30, skip_samples=20)
    old = {f"old{i:02d}" for i in range(OLD)}
    assert {len(some - old), len(rest - old)} == {20, 10}
    assert not (some & rest) - old
    # An epoch reads a third of the old clips, and not always the same.
    assert some & old == rest & old == old


def test_languages_are_evened_out_among_the_new_sources(configured: Any) -> None:
    named = [{"path": "a", "language": "fr"}, {"path": "b", "language": "de"}]
    stream = stream_of(configured(named, temperature=2.0, rehearsal_share=0.3))
    assert stream.sources.weights == pytest.approx([0.35, 0.35, 0.3])


def test_lengths_are_those_of_the_mixture(configured: Any) -> None:
    config = configured(rehearsal_share=0.25)
    assert mean_seconds(training_sources(config), config.data) == pytest.approx(0.75 * 1.0 + 0.25 * 3.0)
    hours, seconds, _, word = sample(config)
    assert seconds == pytest.approx(1.5, rel=0.1)
    assert hours == pytest.approx(2 * NEW / 0.75 * 1.5 / 3600, rel=0.1)
    assert "rows of data.train and data.rehearsal" in word


def test_each_part_has_its_account(configured: Any) -> None:
    stream = stream_of(configured(rehearsal_share=0.4))
    new, old = (stream.sources.part(rehearsal) for rehearsal in (False, True))
    stream.sources = new
    assert look_at_usable(stream).clips == 2 * NEW
    stream.sources = old
    assert look_at_usable(stream).clips == OLD


def test_what_is_rehearsed_and_evaluated_is_found(configured: Any, domains: dict[str, str]) -> None:
    config = configured(guard=domains["old"])
    opened = open_sources(config)
    with pytest.raises(UserError, match=f"data.guard: {OLD} of {OLD} clips are also in data.train and data.rehearsal"):
        warnings_about(find_overlap(opened, config, 20.0), opened, config)


def test_lists_of_what_to_leave_out_may_be_of_either(configured: Any, domains: dict[str, str], tmp_path: Path) -> None:
    listed = tmp_path / "problems.jsonl"
    listed.write_text(json.dumps({"source": f"{domains['old']} line 1", "reason": "noise"}) + "\n")
    assert open_sources(configured(leave_out=str(listed)))
    listed.write_text(json.dumps({"source": "elsewhere.jsonl line 1", "reason": "noise"}) + "\n")
    with pytest.raises(UserError, match=r"but data\.train and data.rehearsal reads"):
        open_sources(configured(leave_out=str(listed)))


def test_bad_values(run_file: Any, configured: Any) -> None:
    assert "data.rehearsal_share" in problem(run_file(data__rehearsal_share=1.0))
    with pytest.raises(UserError, match=r"data\.rehearsal: there is no manifest gone"):
        open_sources(load_config(run_file(data__rehearsal="gone.jsonl"), [], [])[0])
    mixed = [{"path": "old", "weight": 1}, "a"]
    with pytest.raises(UserError, match=r"data\.rehearsal: give every source of the list a weight, or none"):
        open_sources(configured("b", mixed))


# ---- whole runs ----------------------------------------------------------------------------------------------------


def rehearsing(tiny_run: Any, clips: Path, folder: Path, *overrides: str, **training: Any) -> list[str]:
    """A run on a third of the clips that rehearses the others, one of which has no file."""
    rows = [
        {**row, "audio_filepath": str(clips / row["audio_filepath"])} for row in read_lines(clips / "manifest.jsonl")
    ]
    broken = {**rows[0], "audio_filepath": "gone.wav", "id": "broken"}
    data = {
        "train": str(write_manifest(folder / "new.jsonl", rows[:8])),
        "rehearsal": str(write_manifest(folder / "old.jsonl", [*rows[8:], broken])),
        "max_bad_fraction": 0.2,
    }
    training = {"save_steps": 0, "eval_on_start": False, "log_clips": True, **training}
    return tiny_run(*overrides, data={**ONLY_TRAIN, "shuffle": True, **data}, training=training)


def test_epochs_have_more_steps_and_the_summary_counts(
    run_train: Any, tiny_run: Any, clips: Path, tmp_path: Path, capsys: Any
) -> None:
    arguments = rehearsing(tiny_run, clips, tmp_path, max_steps=-1, num_train_epochs=3.0)
    assert run_train(*arguments) == 0
    lines = read_lines(tmp_path / "run" / "clips.jsonl")
    told, names = summary(tmp_path / "run"), {row["id"] for row in read_lines(tmp_path / "new.jsonl")}
    assert (told["epochs"], told["total_steps"]) == (3, 10)  # 24 new clips and 16 others, 4 in a step
    trained = [c for line in lines for rank in line["ids_by_rank"] for batch in rank for c in batch]
    assert Counter(c for c in trained if c in names) == dict.fromkeys(names, 3)
    rehearsed = len(trained) - 24
    assert told["rehearsal"] == {"share": rehearsed / len(trained), "clips": rehearsed}
    assert 13 <= rehearsed <= 18  # of 16 rows at most three are the broken one
    said = "".join(capsys.readouterr()).splitlines()
    assert any("data.train: training on 8 of 8 clips" in line for line in said)
    old = next(line for line in said if "data.rehearsal: training on 16 of 17 clips" in line)
    assert old.endswith("; 3 epochs pass over them 1.0 times")
    assert {row["id"] for row in read_lines(tmp_path / "run" / "quarantine.jsonl")} <= {"broken"}


def test_a_run_that_was_killed_continues_with_the_same_clips(
    run_train: Any, tiny_run: Any, clips: Path, tmp_path: Path
) -> None:
    training = {"max_steps": 8, "save_steps": 4, "save_total_limit": 0}
    arguments = rehearsing(tiny_run, clips, tmp_path, **training)
    assert run_train(*arguments) == 0
    run = tmp_path / "run"
    whole, told = read_lines(run / "clips.jsonl"), summary(run)["rehearsal"]
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    assert run_train(*arguments, "training.resume_from_checkpoint=true") == 0
    assert summary(run)["resumed_from"] == 4
    assert read_lines(run / "clips.jsonl") == whole
    assert summary(run)["rehearsal"] == told


def test_new_data_that_filters_take_whole_are_no_run_on_the_old(
    failed: Any, tiny_run: Any, clips: Path, tmp_path: Path
) -> None:
    arguments = rehearsing(tiny_run, clips, tmp_path, max_steps=2)
    rows = [{**row, "duration": 99.0} for row in read_lines(tmp_path / "new.jsonl")]
    write_manifest(tmp_path / "new.jsonl", rows)
    assert "data.train: no clip is left to train on of 8" in failed(1, *arguments)


def test_a_dry_run_tells_both_apart(run_train: Any, tiny_run: Any, clips: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = rehearsing(tiny_run, clips, tmp_path, max_steps=2)
    assert run_train(*arguments, "--dry-run") == 0
    said = "".join(capsys.readouterr())
    assert "train 8 rows" in said
    assert "rehearsal 17 rows" in said
    assert "data.rehearsal: training on 16 of 17 clips" in said
