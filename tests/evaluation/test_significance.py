"""Confidence intervals and tests of significance: against scipy, and against what simulated models have to give."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from finetune.errors import UserError
from finetune.evaluation.scores import WerAccumulator
from finetune.evaluation.significance import (
    block_names,
    clips_needed,
    compare_counts,
    describe_difference,
    holm,
    increase_bound,
    permutation_p,
    rate_interval,
    resampled_sums,
    sum_blocks,
)
from finetune.evaluation.utterance_counts import UtteranceCounts, compare_evaluations


def simulated_errors(
    generator: np.random.Generator, clips: int, models: tuple[float, ...], talkers: int | None = None
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Word errors of several models on the same clips, words, and talkers. A clip is hard or easy for all of them; so
    is a talker.

    Args:
        models: WER of each.
        talkers: each model has good and bad ones of its own; None: all alike.
    """
    words_N = 1 + generator.poisson(9, clips)
    hardness_N = generator.gamma(2.0, 0.5, clips)
    talker_N = np.arange(clips) % (talkers or 1)
    errors = []
    for wer in models:
        liking = generator.gamma(4.0, 0.25, talkers)[talker_N] if talkers else 1.0
        errors.append(generator.binomial(words_N, np.clip(wer * hardness_N * liking, 0, 1)))
    return errors, words_N, talker_N


# ---- intervals ------------------------------------------------------------------------------------------------------


def test_kinds_drawn_are_clips_drawn_with_replacement():
    """Means, spreads and correlation of the sums equal those of drawing clips one by one."""
    (errors_N,), words_N, _ = simulated_errors(np.random.default_rng(0), 60, (0.2,))
    sums_RC = resampled_sums(np.stack([errors_N, words_N], axis=1), 40_000)
    drawn_RN = np.random.default_rng(1).integers(60, size=(40_000, 60))
    one_by_one_RC = np.stack([errors_N[drawn_RN].sum(1), words_N[drawn_RN].sum(1)], axis=1)
    assert sums_RC.mean(0) == pytest.approx(one_by_one_RC.mean(0), rel=0.01)
    assert np.cov(sums_RC.T) == pytest.approx(np.cov(one_by_one_RC.T), rel=0.05)
    assert np.corrcoef(sums_RC.T)[0, 1] > 0.2, "long clips have more errors; the sums have to go together"


def test_the_interval_is_scipys_percentile_bootstrap():
    (errors_N,), words_N, _ = simulated_errors(np.random.default_rng(2), 400, (0.15,))
    ours = rate_interval(errors_N, words_N, 20_000)
    theirs = stats.bootstrap(
        (errors_N, words_N),
        lambda errors, words, axis=-1: errors.sum(axis) / words.sum(axis),
        paired=True,
        n_resamples=20_000,
        batch=1000,
        method="percentile",
        rng=0,
    ).confidence_interval
    assert ours == pytest.approx([theirs.low, theirs.high], abs=0.001)
    assert ours[1] - ours[0] > 0.02
    assert ours == rate_interval(errors_N, words_N, 20_000), "the same each time"


@pytest.mark.parametrize("clips", [60, 400])
def test_nineteen_of_twenty_intervals_hold_the_true_wer(clips):
    generator = np.random.default_rng(3)
    true_wer, held, trials = 0.12, 0, 500
    for _ in range(trials):
        (errors_N,), words_N, _ = simulated_errors(generator, clips, (true_wer,))
        low, high = rate_interval(errors_N, words_N, 400)
        held += low <= true_wer <= high
    # The noise of 500 trials is 1 point; with few clips a percentile interval is a little too short.
    assert 0.91 <= held / trials <= 0.975


@pytest.mark.slow
def test_nineteen_of_twenty_paired_intervals_hold_the_true_difference():
    generator = np.random.default_rng(4)
    held, trials = 0, 400
    for _ in range(trials):
        (a_N, b_N), words_N, _ = simulated_errors(generator, 300, (0.12, 0.15))
        found = compare_counts(a_N, b_N, words_N, ["en"] * 300, resamples=500)
        low, high = found["difference_interval"]
        held += low <= 0.03 <= high
    assert 0.915 <= held / trials <= 0.98, "docs/evaluation.md has the figures of a longer simulation"


@pytest.mark.parametrize("relative", [True, False])
def test_the_bound_of_an_increase_holds_as_often_as_it_says(relative):
    generator, runs, held = np.random.default_rng(5), 200, 0
    for _ in range(runs):
        words_N = generator.integers(2, 12, size=150)
        errors_a_N = generator.binomial(words_N, 0.2)
        errors_b_N = generator.binomial(words_N, 0.23)
        bound = increase_bound(errors_a_N, errors_b_N, words_N, 0.9, relative=relative)
        held += bound >= (0.15 if relative else 0.03) - 1e-12
    assert stats.binom.interval(0.999, runs, 0.9)[0] <= held <= stats.binom.interval(0.999, runs, 0.9)[1]


def test_the_bound_of_an_increase_grows_with_confidence_and_shrinks_with_words():
    generator = np.random.default_rng(6)
    words_N = generator.integers(2, 12, size=200)
    counts = generator.binomial(words_N, 0.2), generator.binomial(words_N, 0.2), words_N
    sure = [increase_bound(*counts, confidence, relative=True) for confidence in (0.5, 0.7, 0.9, 0.99)]
    assert sure == sorted(sure)
    more = increase_bound(*(np.tile(x, 10) for x in counts), 0.9, relative=True)
    assert more < sure[2]
    none = np.zeros(5, dtype=int)
    assert increase_bound(none, none, none + 3, 0.9, relative=True) == 0
    assert (
        increase_bound(none, none + 1, none + 3, 0.9, relative=True) == 10
    )  # 5 errors instead of half a one, less it


def test_intervals_without_words_or_resamples():
    assert rate_interval(np.array([1, 2]), np.array([0, 0])) is None
    assert rate_interval(np.array([1, 2]), np.array([3, 4]), 0) is None
    assert rate_interval(np.array([0, 0]), np.array([3, 4])) == [0.0, 0.0]


# ---- the permutation test -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_p_value_counts_all_choices_of_signs(seed):
    differences_N = np.random.default_rng(seed).integers(-4, 6, size=11)
    observed = abs(differences_N.sum())
    sums = [abs(np.dot(signs, differences_N)) for signs in product((-1, 1), repeat=11)]
    assert permutation_p(differences_N) == pytest.approx(np.mean([s >= observed for s in sums]), abs=1e-12)
    theirs = stats.permutation_test(
        (differences_N,), lambda d, axis: d.sum(axis), permutation_type="samples", n_resamples=np.inf
    )
    assert permutation_p(differences_N) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_the_p_value_of_many_clips_is_that_of_sampled_signs():
    (a_N, b_N), _, _ = simulated_errors(np.random.default_rng(5), 2000, (0.100, 0.104))
    exact = permutation_p(b_N - a_N)
    sampled = stats.permutation_test(
        (b_N - a_N,), lambda d, axis: d.sum(axis), permutation_type="samples", n_resamples=20_000, batch=500, rng=0
    ).pvalue
    assert 0.01 < exact < 0.9
    assert exact == pytest.approx(sampled, abs=0.015)


def test_no_difference_and_a_huge_one():
    assert permutation_p(np.zeros(50, dtype=int)) == 1.0
    assert permutation_p(np.array([3, -3])) == 1.0
    assert permutation_p(np.full(10, 2)) == pytest.approx(2 / 2**10)
    assert permutation_p(np.full(5000, 2)) == 1e-12


def test_p_values_of_equal_models_are_uniform():
    generator = np.random.default_rng(6)
    p_values = []
    for _ in range(600):
        (a_N, b_N), _, _ = simulated_errors(generator, 500, (0.12, 0.12))
        p_values.append(permutation_p(b_N - a_N))
    assert stats.kstest(p_values, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(np.array(p_values) < 0.05) < 0.08


def test_p_values_of_unequal_models_are_small_as_often_as_planned():
    """`clips_needed` promises four findings of five."""
    generator = np.random.default_rng(7)
    (a_N, b_N), words_N, _ = simulated_errors(generator, 20_000, (0.12, 0.135))
    needed = compare_counts(a_N, b_N, words_N, ["en"] * 20_000)["clips_needed"]
    assert 200 < needed < 3000
    found = 0
    for _ in range(300):
        (a_N, b_N), _, _ = simulated_errors(generator, needed, (0.12, 0.135))
        found += permutation_p(b_N - a_N) < 0.05
    assert 0.7 < found / 300 < 0.9
    assert (
        clips_needed(0.9, 0.01, 100) == 6 == min(n for n in range(20) if permutation_p(np.ones(n, dtype=int)) < 0.05)
    )
    assert clips_needed(0.01, 0.01, 100) == pytest.approx(100 * (1.96 + 0.8416) ** 2, abs=1)


def test_holm_corrects_for_the_number_of_languages():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.6]) == [1.0, 1.0]
    assert holm([]) == []


# ---- blocks ---------------------------------------------------------------------------------------------------------


def test_clips_of_one_talker_are_drawn_as_one_block():
    """Where a talker has many clips and models like talkers differently, only blocks keep to their level."""
    generator = np.random.default_rng(8)
    by_clip, by_block, held, trials = [], [], 0, 300
    for _ in range(trials):
        (a_N, b_N), words_N, talker_N = simulated_errors(generator, 1200, (0.12, 0.12), talkers=30)
        names = [f"talker{t}" for t in talker_N]
        by_clip.append(permutation_p(b_N - a_N))
        found = compare_counts(a_N, b_N, words_N, ["en"] * 1200, names_N=names, resamples=200)
        by_block.append(found["p_value"])
        low, high = found["difference_interval"]
        held += low <= 0 <= high
        assert (found["blocks"], found["clips"]) == (30, 1200)
    assert np.mean(np.array(by_clip) < 0.05) > 0.3, "clip by clip, equal models are called different far too often"
    assert 0.02 < np.mean(np.array(by_block) < 0.05) < 0.09
    assert 0.88 < held / trials < 0.98


def test_blocks_are_found_in_ids():
    assert block_names(["1089-134-0", "61-70-1"], r"^(\d+)-") == ["1089", "61"]
    assert block_names(["talk3.wav"], r"\d") == ["3"]
    with pytest.raises(UserError, match="finds nothing in the id 'x'"):
        block_names(["x"], r"^(\d+)-")
    with pytest.raises(UserError, match="no regular expression"):
        block_names([], "(")
    sums = sum_blocks(np.array([[1, 10], [2, 20], [4, 40]]), ["b", "a", "b"])
    assert sums.tolist() == [[2, 20], [5, 50]]


# ---- comparisons ----------------------------------------------------------------------------------------------------


def test_a_comparison_tells_each_language_and_its_verdict():
    generator = np.random.default_rng(9)
    (a_N, better_N, same_N), words_N, _ = simulated_errors(generator, 1600, (0.20, 0.14, 0.20))
    languages = np.where(np.arange(1600) < 800, "en", "fr")
    b_N = np.where(languages == "en", better_N, same_N)
    found = compare_counts(a_N, b_N, words_N, languages)
    assert found["wer_a"] == pytest.approx(a_N.sum() / words_N.sum())
    assert found["difference"] == pytest.approx((b_N - a_N).sum() / words_N.sum())
    english, french = found["by_language"]["en"], found["by_language"]["fr"]
    assert english["significant"]
    assert not french["significant"]
    assert english["p_value_holm"] == pytest.approx(2 * english["p_value"])
    low, high = found["difference_interval"]
    assert low < found["difference"] < high < 0
    assert describe_difference(found, "better", "worse").startswith(
        f"better by {-100 * found['difference']:.2f} points (95 % interval {-100 * high:.2f} to {-100 * low:.2f}, p"
    )
    assert describe_difference({**found, "difference": 0.06}, "better", "worse").startswith("worse by 6.00 points")
    assert describe_difference(french, "better", "worse").startswith("no significant difference")
    assert "p < 1e-12)" in describe_difference({**found, "p_value": 1e-12}, "better", "worse")
    assert "clips to show" in describe_difference({**french, "clips_needed": 9000}, "better", "worse")
    assert "clips to show" not in describe_difference({**french, "clips_needed": 9}, "better", "worse")


def test_a_hundred_thousand_clips_narrow_the_interval():
    (a_N, b_N), words_N, _ = simulated_errors(np.random.default_rng(10), 100_000, (0.08, 0.081))
    found = compare_counts(a_N, b_N, words_N, np.where(np.arange(100_000) % 3, "en", "fr"))
    assert found["interval_a"][1] - found["interval_a"][0] < 0.003


# ---- what an evaluation keeps of each clip --------------------------------------------------------------------------


def accumulated(rows: list[tuple[str, str, str, str]], normalization: str = "basic") -> WerAccumulator:
    wer = WerAccumulator(normalization)
    for row in rows:
        wer.add(*row)
    return wer


def rows_of(count: int, wrong: int) -> list[tuple[str, str, str, str]]:
    """Clips of three words of which the first `wrong` have an error."""
    return [
        (f"clip{i}", ("en", "fr")[i % 2], f"press button {i}", f"press {'a' if i < wrong else 'button'} {i}")
        for i in range(count)
    ]


def test_counts_of_clips_stay_small_and_come_back(tmp_path):
    wer = accumulated(rows_of(40, 25))
    counts = wer.utterance_counts
    size = sum(a.itemsize * len(a) for a in (counts.keys, counts.counts, counts.languages))
    assert size == 26 * 40
    assert counts.table()[:, 0].sum() == wer.total.word_errors == 25
    assert counts.table()[:, 1].sum() == wer.total.words == 120
    assert counts.table()[:, 3].sum() == wer.total.characters
    counts.save(tmp_path / "base.npz")
    assert UtteranceCounts.load(tmp_path / "base.npz") == counts
    assert [path.name for path in tmp_path.iterdir()] == ["base.npz"]
    whole = (tmp_path / "base.npz").read_bytes()
    for spoiled in (b"", whole[:60], b"PK\x03\x04 cut off", whole[:100] + bytes(50) + whole[150:]):
        (tmp_path / "base.npz").write_bytes(spoiled)
        with pytest.raises(ValueError, match=r"base\.npz does not hold counts of clips"):
            UtteranceCounts.load(tmp_path / "base.npz")


def test_counts_of_ranks_merge_to_those_of_one_process():
    rows = rows_of(31, 12)
    whole, parts = accumulated(rows), [accumulated(rows[1::2]), accumulated(rows[0::2]), accumulated([])]
    merged = WerAccumulator("basic")
    for part in parts:
        merged.merge(part)
    other = accumulated(rows_of(31, 20))
    expected, found = (compare_evaluations(b.utterance_counts, other.utterance_counts) for b in (whole, merged))
    assert found == expected
    assert found["unmatched"] == 0
    assert sorted(found["by_language"]) == ["en", "fr"]
    assert merged.utterance_counts.intervals()["by_language"].keys() == {"en", "fr"}


def test_clips_are_compared_where_id_and_reference_agree():
    before, rows = accumulated(rows_of(30, 20)), rows_of(32, 4)
    rows[7] = ("clip7", "fr", "another reference now", "another reference now")
    found = compare_evaluations(before.utterance_counts, accumulated(rows).utterance_counts)
    assert found["clips"] == 29
    assert found["unmatched"] == 1 + 3  # clip7 in both, clip30 and clip31 in one
    assert found["wer_a"] == pytest.approx(19 / 87)
    assert found["wer_b"] == pytest.approx(4 / 87)
    assert found["significant"]
    assert found["p_value"] == pytest.approx(2 / 2**15)
    other = accumulated(rows_of(30, 20), "none").utterance_counts
    assert compare_evaluations(before.utterance_counts, other)["unmatched"] == 0, (
        "these texts are alike in both spellings"
    )


def test_an_id_that_comes_twice_is_one_clip():
    rows = [*rows_of(6, 2), ("clip0", "en", "press button 0", "press button")]
    found = compare_evaluations(accumulated(rows).utterance_counts, accumulated(rows[::-1]).utterance_counts)
    assert (found["clips"], found["words"], found["unmatched"]) == (6, 21, 0)
    assert found["difference"] == 0
    once = compare_evaluations(accumulated(rows).utterance_counts, accumulated(rows_of(6, 2)).utterance_counts)
    assert (once["clips"], once["unmatched"]) == (5, 2), "twice in one and once in the other cannot be compared"


def test_evaluations_without_a_common_clip():
    some, none = accumulated(rows_of(5, 2)).utterance_counts, accumulated([]).utterance_counts
    for before, after in ((some, none), (none, some), (none, none)):
        found = compare_evaluations(before, after)
        assert (found["clips"], found["difference"], found["significant"]) == (0, None, False)
        assert found["unmatched"] == len(before) + len(after)
        assert "nothing can be said" in describe_difference(found, "better", "worse")


def test_a_loss_on_the_guard_set_within_chance_is_no_warning(tmp_path, messages):
    """The closing lines of a run: five clips of thirty became worse and three better."""
    from finetune.training.evaluation import keep_base
    from finetune.training.summary import log_result, significance

    def heard(wrong: set[int]) -> WerAccumulator:
        rows = rows_of(30, 0)
        return accumulated([(*row[:3], f"press a {i}" if i in wrong else row[3]) for i, row in enumerate(rows)])

    def close(wrong: set[int]) -> str:
        messages.clear()
        after = heard(wrong)
        summary = {
            "steps": 2,
            "clipped_steps": 0,
            "judged_on": "test",
            "wer_before": None,
            "wer_after": None,
            "wer_by_language": {},
            "adapter_bytes": None,
            "guard_wer_before": before.total.rates()["wer"],
            "guard_wer_after": after.total.rates()["wer"],
            **significance(tmp_path, {"guard": after}, "test"),
        }
        log_result(summary, None, None, tmp_path)
        return "\n".join(messages)

    before = heard({0, 1, 2})
    keep_base(tmp_path, "guard", before)
    slightly, clearly = close({3, 4, 5, 6, 7}), close({0, 1, 2, *range(10, 20)})
    assert "WER on guard: 0.033 before, 0.056 after: no significant difference: +2.22 points" in slightly
    assert "the model lost on data.guard" not in slightly
    assert "significantly worse than the base model by 11.11 points" in clearly
    assert "the model lost on data.guard. Less forgetting" in clearly
