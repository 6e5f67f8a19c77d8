"""What phrases and a language model bring a model, and what they cost the other words.

    python scripts/bench/boost.py --model RUN [--base M] [--sherpa DIR] [--json docs/benchmarks/boost_cpu.json]

Phrases, by a rule that knows no result: the words of the validation and the test prompts of examples/voice_prompts
that have four letters or more and come at most once in the training texts. One list for both, so that each hears with
the other's words on its list. Weights are chosen on validation, by `evaluate --tune-boost`, and figures are those of
test; turned: the other way round, as a check on the one choice. The language model is made of the training texts.
--sherpa takes an export of the same model for sherpa-onnx (encoder.onnx, decoder.onnx, joiner.onnx, tokens.txt), and
decodes with its hotwords.

Run it in the repository's folder. The goal: a third more phrases found, relatively, and no significant loss elsewhere.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from compare_strategies import machine

from finetune.data.phrases import Phrase
from finetune.data.text_corpus import read_texts
from finetune.durable_files import write_json
from finetune.evaluation.boosting import choose_weights, compare_with_tuned, evaluate_boosted
from finetune.evaluation.dataset import EvaluationSettings
from finetune.evaluation.phrases import PhraseCounts, PhraseFinder, compare_phrases, count_phrases
from finetune.evaluation.scores import Utterance, WerAccumulator
from finetune.evaluation.tables import print_boosting, print_tried_weights
from finetune.logs import set_up_logging
from finetune.models.boosting import Boosting
from finetune.tools.export.hotwords import HOTWORDS, VOCABULARY, write_hotwords
from finetune.tools.language_model.making import make_language_model

DATA, BASE = "examples/voice_prompts", "examples/base/fastconformer_tdt_3m.nemo"
LETTERS, TIMES = 4, 1
GAIN = 1 / 3
BEAM = 4
SCORES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.5)
"""Of sherpa-onnx's hotwords."""


def words_of(split: str) -> Counter[str]:
    return Counter(word for text in read_texts([DATA], "--data", "basic", split) for word in text.text.split())


def rare_words() -> list[str]:
    """Return the phrases."""
    known = words_of("train")
    said = words_of("validation") | words_of("test")
    return sorted(word for word in said if sum(map(str.isalpha, word)) >= LETTERS and known[word] <= TIMES)


def measure(model: str, boosting: Boosting, chosen_on: str, measured_on: str) -> dict[str, Any]:
    """Choose the weights on one split, and return what they bring on the other."""
    settings = EvaluationSettings([DATA], chosen_on, workers=0)
    started = time.perf_counter()
    chosen = choose_weights(model, settings, boosting, boost_weight=None, lm_weight=None)
    seconds = time.perf_counter() - started
    print_tried_weights(chosen)
    weights = {"weight": chosen.get("boost_weight", 0.0), "lm_weight": chosen.get("lm_weight", 0.0)}
    found = on_split(model, replace(boosting, **weights), measured_on)
    return {"chosen_on": chosen_on, "seconds_to_choose": seconds, "tried": chosen["tried"], **found}


def on_split(model: str, boosting: Boosting, split: str) -> dict[str, Any]:
    found = evaluate_boosted(model, EvaluationSettings([DATA], split, workers=0), boosting)["boosting"]
    print_boosting(found)
    found.pop("lm", None)  # its folder is gone
    return {"split": split, **found}


def in_sherpa(directory: Path, model: str, phrases: list[str]) -> dict[str, Any]:
    """Return what sherpa-onnx's hotwords bring on test, by the score that is best on validation."""
    import sherpa_onnx

    finder = PhraseFinder(phrases, "basic")
    files = {name: str(directory / f"{name}.onnx") for name in ("encoder", "decoder", "joiner")}
    files |= {"tokens": str(directory / "tokens.txt"), "model_type": "nemo_transducer"}

    def decode(split: str, **options: Any) -> tuple[PhraseCounts, dict[str, Any]]:
        recogniser = sherpa_onnx.OfflineRecognizer.from_transducer(**files, num_threads=1, **options)
        wer, found = WerAccumulator("basic"), []
        for row in pq.read_table(next((ROOT / DATA / "data").glob(f"{split}-*.parquet"))).to_pylist():
            stream = recogniser.create_stream()
            samples_S, rate = soundfile.read(io.BytesIO(row["audio"]["bytes"]), dtype="float32")
            stream.accept_waveform(rate, samples_S)
            recogniser.decode_stream(stream)
            found.append(Utterance(row["id"], row["language"], row["text"], stream.result.text))
            wer.add(*vars(found[-1]).values())
        counts = count_phrases(found, finder)
        empty = sum(not utterance.hypothesis.strip() for utterance in found)
        return counts, {"wer": wer.total.rates()["wer"], "empty": empty, **counts.result()}

    with tempfile.TemporaryDirectory() as folder:
        write_hotwords(model, [Phrase(phrase) for phrase in phrases], Path(folder))
        beam = {"decoding_method": "modified_beam_search", "max_active_paths": 4}
        hot = {**beam, "modeling_unit": "bpe", "bpe_vocab": f"{folder}/{VOCABULARY}"}
        hot["hotwords_file"] = f"{folder}/{HOTWORDS}"
        tried = [{"score": score, **decode("validation", **hot, hotwords_score=score)[1]} for score in SCORES]
        chosen = min(tried, key=lambda row: (row["missed"] + row["rest_errors"], row["score"]))["score"]
        ways = {"greedy": {}, "beam": beam, "hotwords": {**hot, "hotwords_score": chosen}}
        decoded = {name: decode("test", **options) for name, options in ways.items()}
    for row in [*tried, *({"way": name, **rates} for name, (_, rates) in decoded.items())]:
        print({key: value for key, value in row.items() if not isinstance(value, list)})
    compared = compare_phrases(decoded["beam"][0], decoded["hotwords"][0])
    ways = {name: rates for name, (_, rates) in decoded.items()}
    return {"version": metadata.version("sherpa-onnx"), "tried": slim(tried), "score": chosen, **ways, **compared}


def greedier(tried: list[dict[str, Any]]) -> float:
    """Return the weight that finds most phrases of those without a significant loss: what is not done, and why."""
    harmless = [row for row in tried if not row["rest"]["significant"] or row["rest"]["difference"] <= 0]
    return max(harmless, key=lambda row: (row["recall"], -row["boost_weight"]))["boost_weight"]


def slim(tried: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of each weight what is worth keeping."""
    kept = ("boost_weight", "lm_weight", "score", "recall", "precision", "rest_wer", "wer")
    rows = [{key: row[key] for key in kept if key in row} for row in tried]
    for row, own in zip(rows, tried, strict=True):
        if "rest" in own:
            row["rest_p_value"] = own["rest"]["p_value"]
    return rows


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Return the relative gain of recall, and whether the goal is reached."""
    gain = found["with"]["recall"] / found["without"]["recall"] - 1
    loss = found["rest"]["significant"] and found["rest"]["difference"] > 0
    return {"recall_gain": gain, "significant_loss": loss, "reached": gain >= GAIN and not loss}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="RUN", help="a fine-tuned model, such as runs/quickstart")
    parser.add_argument("--base", default=BASE, metavar="M")
    parser.add_argument("--sherpa", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    set_up_logging(False)
    tuned, base = arguments.model, arguments.base
    phrases = rare_words()
    with tempfile.TemporaryDirectory() as folder:
        lm = Path(folder) / "lm"
        boost = Boosting(Path("phrases"), [Phrase(phrase) for phrase in phrases])
        started = time.perf_counter()
        made = make_language_model([DATA], "train", tuned, lm, order=4)
        made["seconds"] = time.perf_counter() - started
        result: dict[str, Any] = {
            "machine": {**machine(), "nemo": metadata.version("nemo_toolkit")},
            "command": "python scripts/bench/boost.py " + " ".join(sys.argv[1:]),
            "rule": f"words of {LETTERS} letters or more that come at most {TIMES} time in the training texts",
            "phrases": phrases,
            "language_model": made,
        }
        for name, beam in (("greedy", 1), ("beam", BEAM)):
            result[name] = measured(tuned, base, replace(boost, beam=beam), lm)
    for name in ("greedy", "beam"):
        for part, found in result[name].items():
            if "recall" in found.get("with", {}):
                found["verdict"] = verdict(found)
                print(f"{name}, {part}: weight {found['boost_weight']:g}: {found['verdict']}")
            if "tried" in found:
                found["tried"] = slim(found["tried"])
    if arguments.sherpa:
        result["sherpa"] = in_sherpa(arguments.sherpa, tuned, phrases)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


def measured(tuned: str, base: str, boost: Boosting, lm: Path) -> dict[str, dict[str, Any]]:
    """Return all that is measured of one search."""
    found = {
        "test": measure(tuned, boost, "validation", "test"),
        "turned": measure(tuned, boost, "test", "validation"),
        "lm": measure(tuned, replace(boost, file=None, phrases=[], lm=lm), "validation", "test"),
        "phrases_and_lm": measure(tuned, replace(boost, lm=lm), "validation", "test"),
        "base": measure(base, boost, "validation", "test"),
    }
    most = greedier(found["test"]["tried"])
    found["most_phrases_found"] = on_split(tuned, replace(boost, weight=most), "test")
    found["boost_or_train"] = boost_or_train(base, tuned, replace(boost, weight=found["base"]["boost_weight"]))
    return found


def boost_or_train(base: str, tuned: str, boosting: Boosting) -> dict[str, Any]:
    """Compare the base model with phrases to the tuned one without, on test."""
    settings, boosted, plain = EvaluationSettings([DATA], "test", workers=0), [], []
    evaluate_boosted(base, settings, boosting, keep=boosted)
    evaluate_boosted(tuned, settings, boosting, keep=plain, plain=True)
    return compare_with_tuned(boosted, plain, boosting, settings)


if __name__ == "__main__":
    sys.exit(main())
