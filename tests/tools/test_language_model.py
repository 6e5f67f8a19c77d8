"""`python -m finetune.language_model`: probabilities as the formulas give them, files, and decoding with it."""

import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, TOKENIZER, read_lines

from finetune.errors import UserError
from finetune.models.boosting import Boosting, boost
from finetune.models.language_model import ABOUT, ARPA, TENSORS, read_language_model
from finetune.models.loading import load_model
from finetune.tools.language_model.kneser_ney import FALLBACK, estimate

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
VOCABULARY = 12


def make(*arguments: Any) -> int:
    from finetune.language_model import main

    return main([str(a) for a in arguments])


def sequences(texts: int, seed: int = 0) -> list[list[int]]:
    """Token sequences in which some n-grams come often and some once; token 11 never comes."""
    rng = np.random.default_rng(seed)
    return [(rng.zipf(1.4, size=rng.integers(1, 14)) % (VOCABULARY - 1)).tolist() for _ in range(texts)]


class Reference:
    """Interpolated modified Kneser-Ney by its formulas, in plain Python: recursive, one n-gram at a time."""

    def __init__(self, texts: list[list[int]], order: int, least: int = 1):
        self.order, self.least = order, least
        seen: Counter[tuple[Any, ...]] = Counter()
        for text in texts:
            words = ["<s>", *text, "</s>"]
            for n in range(1, order + 1):
                seen.update(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
        self.seen = seen
        before = defaultdict(set)
        for ngram in seen:
            if len(ngram) > 1:
                before[ngram[1:]].add(ngram[0])
        self.count = {
            ngram: times if len(ngram) == order or ngram[0] == "<s>" else len(before[ngram])
            for ngram, times in seen.items()
            if ngram != ("<s>",)
        }
        self.discount = {n: self._discounts(n) for n in range(1, order + 1)}
        self.after = defaultdict(list)
        for ngram in self.count:
            self.after[ngram[:-1]].append(ngram)

    def _discounts(self, n: int) -> list[float]:
        t = Counter(c for ngram, c in self.count.items() if len(ngram) == n)
        if all(t[c] for c in (1, 2, 3, 4)):
            y = t[1] / (t[1] + 2 * t[2])
            found = [c - (c + 1) * y * t[c + 1] / t[c] for c in (1, 2, 3)]
            if all(0 <= d <= c for c, d in enumerate(found, 1)):
                return found
        return list(FALLBACK)

    def _less(self, ngram: tuple[Any, ...]) -> float:
        if len(ngram) > 2 and self.seen[ngram] < self.least:
            return 0.0
        return self.count[ngram] - self.discount[len(ngram)][min(self.count[ngram], 3) - 1]

    def p(self, history: tuple[Any, ...], word: Any) -> float:
        history = history[max(0, len(history) - self.order + 1) :]
        following = self.after.get(history, [])
        total = sum(self.count[ngram] for ngram in following)
        if not history:
            left = 1 - sum(map(self._less, following)) / total
            own = self._less((word,)) / total if (word,) in self.count else 0.0
            return own + left / (VOCABULARY + 1)
        lower = self.p(history[1:], word)
        if not total:
            return lower
        ngram = (*history, word)
        own = self._less(ngram) / total if ngram in self.count else 0.0
        return own + (1 - sum(map(self._less, following)) / total) * lower


@pytest.mark.parametrize(("texts", "order", "least"), [(300, 4, 1), (300, 3, 2), (4, 3, 1), (60, 2, 1), (1, 4, 1)])
def test_probabilities_are_those_of_the_formulas(texts, order, least, tmp_path):
    """Through the ARPA file and NeMo's model, for every token behind every beginning of new texts."""
    from finetune.models.fusion import read_arpa
    from finetune.tools.language_model.arpa import arpa_lines

    learnt = sequences(texts)
    counted = estimate(learnt, VOCABULARY, order, least)
    (tmp_path / "lm.arpa").write_text("".join(f"{line}\n" for line in arpa_lines(counted, VOCABULARY)))
    model = read_arpa(tmp_path / "lm.arpa", VOCABULARY)
    reference = Reference(learnt, order, least)
    fallback = reference.discount[order] == list(FALLBACK)
    assert fallback == (texts < 60), "both ways are to be tested"
    with torch.no_grad():
        for text in [*sequences(12, seed=1), [11, 11, 0], []]:
            state = model.get_init_states(1, bos=True)
            for i in range(len(text) + 1):
                history = ("<s>", *text[:i])
                added, following = model.advance(state)
                expected = [reference.p(history, word) for word in (*range(VOCABULARY), "</s>")]
                assert sum(expected) == pytest.approx(1)
                found = [*added[0].tolist(), model.get_final(state).item()]
                assert found == pytest.approx([math.log(p) for p in expected], abs=1e-4)
                if i < len(text):
                    state = following[0, text[i] : text[i] + 1]


@pytest.fixture(scope="module")
def lm(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the texts of the 24 clips, in the tokens of the base model."""
    folder = tmp_path_factory.mktemp("language_model") / "lm"
    assert make("--data", clips / "manifest.jsonl", "--model", TOKENIZER, "--output", folder, "--order", "3") == 0
    return folder


@pytest.fixture(scope="module")
def base() -> Any:
    return load_model(str(BASE))


def test_what_the_command_leaves(lm, clips, base):
    about = json.loads((lm / ABOUT).read_text())
    assert (about["order"], about["texts"], about["normalization"]) == (3, 24, "basic")
    quick, slow = read_language_model(lm, base), read_language_model(lm / ARPA, base)
    ids = torch.tensor([base.tokenizer.text_to_ids(text) for text in ("thank you", "you thank")])
    with torch.no_grad():
        learnt, swapped = quick(ids).sum(1).tolist()
        assert torch.equal(quick(ids), slow(ids))
    assert about["text_tokens"] > 100
    assert learnt != swapped


def test_texts_that_the_tokens_cannot_write_are_left_out(tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("hello there\n日本\n\nhello you\n", encoding="utf-8")
    common = ["--model", TOKENIZER, "--output", tmp_path / "lm"]
    assert make("--data", tmp_path / "texts.txt", *common) == 0
    said = capsys.readouterr().out
    assert "2 texts" in said
    assert "1 texts have characters without a token" in said
    (tmp_path / "texts.txt").write_text("日本\n", encoding="utf-8")
    assert make("--data", tmp_path / "texts.txt", *common) == 2
    assert "every text has characters without a token" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make("--data", tmp_path / "texts.txt", *common, "--order", "1")
    assert "--order: from 2 to 10" in capsys.readouterr().err


def test_language_models_that_are_refused(lm, base, archive_of, tmp_path):
    other = load_model(str(archive_of("rnnt", "plain", speaking=True)))
    with pytest.raises(UserError, match="was made for a model with other tokens"):
        read_language_model(lm, other)
    with pytest.raises(UserError, match="no file or directory"):
        read_language_model(tmp_path / "gone", base)
    (tmp_path / "text.arpa").write_text("hello\n")
    with pytest.raises(UserError, match="no ARPA file of this model's 128 tokens"):
        read_language_model(tmp_path / "text.arpa", base)
    words = (lm / ARPA).read_text(encoding="utf-8").replace(chr(100), chr(100 + 500))
    (tmp_path / "words.arpa").write_text(words, encoding="utf-8")
    with pytest.raises(UserError, match="no ARPA file of this model's 128 tokens"):
        read_language_model(tmp_path / "words.arpa", base)
    half = tmp_path / "half"
    half.mkdir()
    for name in (ARPA, TENSORS):
        (half / name).write_bytes((lm / name).read_bytes())
    with pytest.raises(UserError, match=r"holds no lm\.json"):
        read_language_model(half, base)
    (half / ABOUT).write_bytes((lm / ABOUT).read_bytes())
    (half / TENSORS).write_bytes((lm / TENSORS).read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read"):
        read_language_model(half, base)


def test_tensors_that_lead_outside_are_refused(lm, base, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(lm / TENSORS)
    tensors["to_states"][3] = len(tensors["backoff_weights"])
    save_file(tensors, tmp_path / TENSORS)
    (tmp_path / ABOUT).write_bytes((lm / ABOUT).read_bytes())
    with pytest.raises(UserError, match="to_states leads outside"):
        read_language_model(tmp_path, base)


@pytest.mark.slow
def test_evaluate_with_a_language_model(lm, clips, tmp_path, capsys):
    from finetune.evaluate import main

    common = ["--model", BASE, "--data", clips / "manifest.jsonl", "--json", tmp_path / "result.json", "--lm", lm]
    assert main([str(a) for a in (*common, "--lm-weight", "0.5", "--utterances", tmp_path / "a.jsonl")]) == 0
    told = json.loads((tmp_path / "result.json").read_text())["boosting"]
    assert "phrases" not in told
    # It knows the very texts.
    assert told["with"]["wer"] < told["without"]["wer"] - 0.02
    assert told["wer"]["difference"] == pytest.approx(told["with"]["wer"] - told["without"]["wer"])
    assert "all words: with it better" in capsys.readouterr().out or not told["wer"]["significant"]
    assert main([str(a) for a in (*common, "--tune-boost")]) == 0
    tried = json.loads((tmp_path / "result.json").read_text())
    best = min(tried["tried"], key=lambda row: (row["wer"], row["lm_weight"]))
    assert tried["lm_weight"] == best["lm_weight"] > 0
    assert f"chosen: --lm {lm} --lm-weight {best['lm_weight']:g}" in capsys.readouterr().out
    assert len(read_lines(tmp_path / "a.jsonl")) == 24


def test_phrases_and_a_language_model_together(lm, base):
    from finetune.data.phrases import Phrase

    fusion = boost(base, Boosting(phrases=[Phrase("pound")], weight=0.4, lm=lm, lm_weight=0.3))
    assert [type(model).__name__ for model in fusion.models] == ["GPUBoostingTreeModel", "NGramGPULanguageModel"]
    assert fusion.weights == [0.4, 0.3]
    computer = base.decoding.decoding.decoding_computer
    assert computer.fusion_models is fusion.models
    assert computer.fusion_models_alpha is fusion.weights
