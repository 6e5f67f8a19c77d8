"""How many clips it takes to see a difference of two models, and how wide the interval of one is (docs/evaluation.md).

    python scripts/bench/clips_needed.py [--words 10] [--shared 0.5] [--check]

Simulated: clips of some words on average, some harder than others (the error rate of a clip varies with a standard
deviation of 70 % of its mean); of each model's errors a share are made by both.
"""

import argparse

import numpy as np

from finetune.evaluation.significance import clips_needed, percentiles, permutation_p, resampled_sums

CLIPS = 50_000
RESAMPLES = 400
TRIALS = 1500
WERS = (0.05, 0.10, 0.20, 0.40)
GAINS = (0.02, 0.05, 0.10, 0.20)


def simulate(
    generator: np.random.Generator, clips: int, words: float, wers: tuple[float, float], shared: float
) -> np.ndarray:
    """(clips, 3): errors of the first model, of the second, and words."""
    words_N = 1 + generator.poisson(words - 1, clips)
    hardness_N = generator.gamma(2.0, 0.5, clips)
    both = shared * min(wers)
    both_N = generator.binomial(words_N, np.minimum(both * hardness_N, 1))
    own = [
        generator.binomial(
            words_N - both_N, np.clip((wer - both) * hardness_N / np.maximum(1 - both * hardness_N, 0.05), 0, 1)
        )
        for wer in wers
    ]
    return np.stack([both_N + own[0], both_N + own[1], words_N], axis=1)


def check(generator: np.random.Generator, words: float, shared: float) -> None:
    """How often intervals hold the truth, and how often equal models are called different, at 10 % WER."""
    print("| clips | WER held | difference held | equal models called different |\n|---|---|---|---|")
    for clips in (30, 100, 300, 1000):
        held, truth = np.zeros(3), (0.10, 0.10)
        for trial in range(TRIALS):
            values_NC = simulate(generator, clips, words, truth, shared)
            sums_RC = resampled_sums(values_NC, 1000, seed=trial)
            for i, values_R in enumerate((sums_RC[:, 0], sums_RC[:, 1] - sums_RC[:, 0])):
                low, high = percentiles(values_R / sums_RC[:, 2])
                held[i] += low <= (truth[0], 0.0)[i] <= high
            held[2] += permutation_p(values_NC[:, 1] - values_NC[:, 0]) < 0.05
        print(f"| {clips:,} | {' | '.join(f'{100 * share:.1f} %' for share in held / TRIALS)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=float, default=10, help="mean of a clip")
    parser.add_argument("--shared", type=float, default=0.5, help="of the better model's errors, those that both make")
    parser.add_argument("--check", action="store_true", help="whether intervals and p-values keep what they promise")
    arguments = parser.parse_args()
    generator = np.random.default_rng(0)
    if arguments.check:
        check(generator, arguments.words, arguments.shared)
        return

    sizes = (100, 300, 1000, 3000, 10_000)
    print(f"| WER | {' | '.join(f'{n:,} clips' for n in sizes)} |\n|---|{'---|' * len(sizes)}")
    for wer in WERS:
        cells = []
        for clips in sizes:
            widths = []
            for _ in range(50 if clips < 3000 else 10):
                values_NC = simulate(generator, clips, arguments.words, (wer, wer), arguments.shared)
                sums_RC = resampled_sums(values_NC, RESAMPLES)
                low, high = percentiles(sums_RC[:, 0] / sums_RC[:, 2])
                widths.append(high - low)
            cells.append(f"± {50 * np.mean(widths):.1f}")
        print(f"| {100 * wer:.0f} % | {' | '.join(cells)} |")

    print(
        f"\n| WER | {' | '.join(f'{100 * gain:.0f} % fewer errors' for gain in GAINS)} |\n|---|{'---|' * len(GAINS)}"
    )
    for wer in WERS:
        cells = []
        for gain in GAINS:
            values_NC = simulate(generator, CLIPS, arguments.words, (wer, (1 - gain) * wer), arguments.shared)
            sums_RC = resampled_sums(values_NC, RESAMPLES)
            spread = np.std((sums_RC[:, 1] - sums_RC[:, 0]) / sums_RC[:, 2])
            needed = clips_needed(gain * wer, spread, CLIPS)  # by the difference meant, not the one that was drawn
            cells.append(f"{float(f'{needed:.1e}'):,.0f}")
        print(f"| {100 * wer:.0f} % | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
