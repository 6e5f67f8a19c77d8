"""Phrases that matter: their file, their tokens, decoding with them, how well they are found, and their weight."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from conftest import ROOT, read_lines, slow

from finetune.data.phrases import LONGEST_PHRASE, Phrase, read_phrases
from finetune.errors import UserError
from finetune.evaluation.boosting import best_boost
from finetune.evaluation.phrases import PhraseFinder, compare_phrases, count_phrases
from finetune.evaluation.recognise import evaluation_mode, recognise_batch
from finetune.evaluation.scores import Utterance
from finetune.models.boosting import Boosting, boost
from finetune.models.fusion import Fusion, boosting_tree, fuse, fused_labels, tokenise
from finetune.models.loading import load_model
from finetune.models.nemo import set_head

BASE = ROOT / "examples" / "base" / "fastconformer_tdt_3m.nemo"
RATE = 16_000


def evaluate(*arguments: Any) -> int:
    from finetune.evaluate import main

    return main([str(a) for a in arguments])


def transcribe(*arguments: Any) -> int:
    from finetune.transcribe import main

    return main([str(a) for a in arguments])


# ---- the file -------------------------------------------------------------------------------------------------------


def test_a_file_of_phrases(tmp_path):
    path = tmp_path / "phrases.txt"
    path.write_bytes(
        "\ufeff# names\r\nKempinski\r\n\r\n  reverse   osmosis \n Mbappé :2\nratio 3:1\nKempinski\n".encode()
    )
    assert read_phrases(path) == [
        Phrase("Kempinski", 1.0, 2),
        Phrase("reverse osmosis", 1.0, 4),
        Phrase("Mbappé", 2.0, 5),
        Phrase("ratio 3:1", 1.0, 6),
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "there is no phrase in"),
        (b"# nothing\n\n", "there is no phrase in"),
        (b"a\nb :-1\n", "line 2: the weight :-1 is no number above 0"),
        (b"a :0\n", "line 1: the weight :0 is no number above 0"),
        (b"a :nan\n", "line 1: the weight :nan"),
        (b"a :inf\n", "line 1: the weight :inf"),
        (b"a :much\n", "line 1: the weight :much"),
        (b"a :2\nb\na\n", "line 3: 'a' has the weight 1, and 2 in line 1"),
        (b"x" * (LONGEST_PHRASE + 1), f"line 1: {LONGEST_PHRASE + 1} characters, and a phrase has at most"),
        (b"a :-1\nb :-1\n", "line 1: the weight :-1 .*line 2: the weight :-1"),
        (b"caf\xe9\n", "is no text in UTF-8"),
        (b"a\0b", "is no text"),
        (b"a\n" * 2**23 + b"b", "has more than 16 MiB"),
    ],
)
def test_files_that_are_refused(content, told, tmp_path):
    path = tmp_path / "phrases.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"--boost: .*{told}"):
        read_phrases(path)


def test_audio_and_missing_files_are_refused(clips, tmp_path):
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(0, 0.1, 4000), RATE)
    with pytest.raises(UserError, match=r"a\.wav is no text"):
        read_phrases(tmp_path / "a.wav")
    (tmp_path / "names.txt").write_text("a")
    with pytest.raises(UserError, match=r"no file .*name\.txt\. Did you mean .*names\.txt"):
        read_phrases(tmp_path / "name.txt")


# ---- tokens ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> Any:
    return load_model(str(BASE))


def test_a_vocabulary_without_capitals_gets_normalised_phrases(base):
    found = tokenise(base, [Phrase("The, Pound-KEY!"), Phrase("日本"), Phrase("..."), Phrase("x" * 200)])
    assert found.tokens == [base.tokenizer.text_to_ids("the pound key")]
    assert found.left_out["日本"] == "the tokenizer has no piece for '日本'"
    assert "nothing is left" in found.left_out["..."]
    assert "at most 64" in found.left_out["x" * 200]
    with pytest.raises(UserError, match="none of the phrases, such as '日本'"):
        tokenise(base, [Phrase("日本")])


def test_a_vocabulary_with_capitals_gets_phrases_as_written_and_as_a_sentence_begins(archive_of):
    model = load_model(str(archive_of("tdt", "plain", speaking=True)))
    assert any(c.isupper() for piece in model.joint.vocabulary for c in piece)
    found = tokenise(model, [Phrase("pound key", 3.0), Phrase("Welcome", 2.0), Phrase("welcome")])
    ids = model.tokenizer.text_to_ids
    expected = {"pound key": 3.0, "Pound key": 3.0, "Welcome": 2.0, "welcome": 1.0}
    assert {tuple(t): w for t, w in zip(found.tokens, found.weights, strict=True)} == {
        tuple(ids(text)): weight for text, weight in expected.items()
    }


def test_a_heavier_phrase_keeps_its_weight_where_a_lighter_one_begins_alike():
    def scores(phrases: list[list[int]], weights: list[float]) -> list[float]:
        tree = boosting_tree(phrases, weights, 6)
        state, found = tree.get_init_states(1), []
        for token in (1, 2, 3):
            added, following = tree.advance(state)
            found.append(added[0, token].item())
            state = following[0, token : token + 1]
        return found

    alone = scores([[1, 2, 3]], [3.0])
    assert alone == pytest.approx([3.0, 6.0 + math.log(2), 6.0 + math.log(3)], rel=1e-6)
    assert scores([[1, 2], [1, 2, 3]], [1.0, 3.0]) == pytest.approx(alone)
    assert scores([[1, 2, 3], [1, 2]], [3.0, 1.0]) == pytest.approx(alone)


# ---- decoding -------------------------------------------------------------------------------------------------------

PHRASES = ["pound key", "conference", "eighty"]
HEADS = [
    ("base", None, 1),
    ("base", None, 4),
    ("rnnt", None, 1),
    slow(("rnnt", None, 3)),
    slow(("stateless-tdt", None, 1)),
    ("hybrid-tdt", "transducer", 1),
    ("hybrid-rnnt", "ctc", 1),
    ("ctc", None, 1),
    slow(("prompt", None, 1)),
]


@pytest.fixture(scope="module")
def batch(clips: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Clips of different lengths, and one of three in a row."""
    rows = read_lines(clips / "manifest.jsonl")[:8]
    audio = [torch.from_numpy(soundfile.read(clips / row["audio_filepath"], dtype="float32")[0]) for row in rows]
    audio.append(torch.cat(audio[:3]))
    return torch.nn.utils.rnn.pad_sequence(audio, batch_first=True), torch.tensor([len(one) for one in audio])


@pytest.fixture(params=HEADS, ids=lambda named: "-".join(str(part) for part in named if part))
def speaker(request: pytest.FixtureRequest, archive_of: Callable[..., Path]) -> tuple[Any, int]:
    """A model of each kind that writes something for each clip, with the head that decodes, and the beam."""
    name, head, beam = request.param
    model = load_model(str(BASE if name == "base" else archive_of(name, "plain", speaking=True)))
    set_head(model, head)
    return model, beam


def texts(model: Any, audio_BS: torch.Tensor, lengths_B: torch.Tensor) -> list[str]:
    with evaluation_mode(model):
        return [h.text for h in recognise_batch(model, audio_BS, lengths_B)]


def test_boosting_writes_the_phrases_and_weight_0_nothing(speaker, batch):
    model, beam = speaker
    if beam > 1:
        search_with(model, beam)
    plain = texts(model, *batch)
    assert sum(map(bool, plain)) > 4
    boosting = Boosting(phrases=[Phrase(text) for text in PHRASES], weight=4.0 if beam > 1 else 20.0, beam=beam)
    fusion = boost(model, boosting)
    boosted = texts(model, *batch)

    def said(found: list[str]) -> int:
        return sum(text.lower().count(phrase) for text in found for phrase in PHRASES)

    assert said(boosted) > said(plain) + 5
    # Clip by clip as together.
    audio_BS, lengths_B = batch
    alone = [texts(model, audio_BS[i : i + 1, :n], lengths_B[i : i + 1])[0] for i, n in enumerate(lengths_B.tolist())]
    assert alone == boosted
    fusion.weights[0] = 0.0
    assert texts(model, *batch) == plain


def search_with(model: Any, beam: int, **fused: Any) -> None:
    """Let NeMo decode by its own configuration."""
    from omegaconf import OmegaConf

    decoding = OmegaConf.create(OmegaConf.to_container(model.cfg.decoding))
    decoding.strategy = "malsd_batch" if beam > 1 else "greedy_batch"
    section = "beam" if beam > 1 else "greedy"
    decoding[section] = {**({"beam_size": beam} if beam > 1 else {}), "max_symbols": 10, **fused}
    model.change_decoding_strategy(decoding, verbose=False)


@pytest.mark.parametrize("beam", [1, 4])
def test_a_transducers_fusion_is_that_of_nemos_own_decoding(beam, base, batch):
    """With the same phrases in NeMo's configuration."""
    theirs, ours = load_model(str(BASE)), load_model(str(BASE))
    tree = {"key_phrases_list": PHRASES, "context_score": 1.0, "depth_scaling": 2.0}
    search_with(theirs, beam, boosting_tree=tree, boosting_tree_alpha=0.8)
    boost(ours, Boosting(phrases=[Phrase(text) for text in PHRASES], weight=0.8, beam=beam))
    expected = texts(theirs, *batch)
    assert texts(ours, *batch) == expected
    assert expected != texts(base, *batch)


def test_beams_that_there_are_none_of(archive_of):
    boosting = Boosting(phrases=[Phrase(text) for text in PHRASES], weight=1.0, beam=4)
    with pytest.raises(UserError, match="--beam: a CTC head decodes greedily here"):
        boost(load_model(str(archive_of("ctc", "plain", speaking=True))), boosting)
    with pytest.raises(UserError, match="--beam: NeMo's batched beam search takes no StatelessTransducerDecoder"):
        boost(load_model(str(archive_of("stateless-tdt", "plain", speaking=True))), boosting)


def test_labels_of_a_ctc_head_with_a_fusion_are_nemos():
    from nemo.collections.asr.parts.submodules.ctc_greedy_decoding import GreedyBatchedCTCInfer

    generator = torch.Generator().manual_seed(0)
    blank = 8
    trees = [boosting_tree([[1, 2, 3], [4, 5]], [1.0, 2.0], blank), boosting_tree([[2, 6], [7]], [1.0, 1.0], blank)]
    log_probs_BTV = torch.randn(60, 14, blank + 1, generator=generator).mul(2).log_softmax(-1)
    log_probs_BTV[:, 1::3] = log_probs_BTV[:, ::3][:, :5]  # tokens that last
    theirs = GreedyBatchedCTCInfer(blank_id=blank, preserve_alignments=True)
    theirs.fusion_models, theirs.fusion_models_alpha = trees, [0.7, 0.4]
    lengths_B = torch.full((60,), 14)
    [hypotheses] = theirs(decoder_output=log_probs_BTV, decoder_lengths=lengths_B)
    with torch.no_grad():
        found_BT = fused_labels(Fusion(trees, [0.7, 0.4]), log_probs_BTV)
    assert torch.equal(found_BT, torch.stack([h.alignments[1] for h in hypotheses]))
    assert (found_BT != log_probs_BTV.argmax(-1)).sum() > 40


def test_a_prediction_network_that_knows_no_blank_is_refused(base):
    class WithoutBlank:
        blank_as_pad = False

    class Model:
        decoder, joint = WithoutBlank(), None

    with pytest.raises(UserError, match="--boost and --lm: the model's prediction network knows no blank"):
        fuse(Model(), Fusion())


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("names") / "names.txt"
    path.write_text("# of the prompts\n" + "\n".join(PHRASES) + "\nPound :2\n日本\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("head", "beam"), [("transducer", 1), slow("transducer", 3), ("ctc", 1)])
def test_timestamps_and_long_files_with_phrases(head, beam, names, archive_of, batch, tmp_path, capsys):
    audio_BS, lengths_B = batch
    long_S = torch.cat([audio_S[:n] for audio_S, n in zip(audio_BS, lengths_B.tolist(), strict=True)] * 2)
    soundfile.write(tmp_path / "long.wav", long_S.numpy(), RATE)
    common = ["--model", archive_of("hybrid-rnnt", "plain", speaking=True), "--head", head, tmp_path / "long.wav"]
    common += ["--chunk", "8", "--timestamps"]
    assert transcribe(*common) == 0
    plain = json.loads(capsys.readouterr().out)
    assert transcribe(*common, "--boost", names, "--boost-weight", 20 if beam == 1 else 4, "--beam", beam) == 0
    told = capsys.readouterr()
    row = json.loads(told.out)
    assert "日本" in told.err
    assert row["text"].lower().count("pound") > plain["text"].lower().count("pound") + 3
    assert [w["word"] for w in row["words"]] == row["text"].split()
    assert all(0 <= w["confidence"] <= 1 if beam == 1 else "confidence" not in w for w in row["words"])
    starts = [w["start"] for w in row["words"]]
    assert starts == sorted(starts)
    assert starts[-1] > 0.8 * row["duration"]


@pytest.mark.slow
def test_streaming_with_phrases(archive_of, names, batch, tmp_path, capsys):
    audio_BS, lengths_B = batch
    soundfile.write(tmp_path / "a.wav", audio_BS[-1].numpy(), RATE)
    common = [tmp_path / "a.wav", "--streaming"]
    streaming = archive_of("streaming-hybrid", "plain", speaking=True)
    found = []
    for weight in ("0", "20"):
        assert transcribe("--model", streaming, *common, "--boost", names, "--boost-weight", weight) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["text"])
    assert transcribe("--model", streaming, *common) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["text"] == found[0]
    plain, boosted = (sum(text.lower().count(phrase) for phrase in PHRASES) for text in found)
    assert boosted > plain + 2
    assert transcribe("--model", streaming, *common, "--boost", names, "--head", "ctc") == 2
    assert "a CTC head that streams takes none" in capsys.readouterr().err


# ---- how well phrases are found -------------------------------------------------------------------------------------


def test_phrases_are_found_from_left_to_right_the_longest_first():
    finder = PhraseFinder(["New York", "new york city", "York hotel", "the", "!"], "basic")
    words = ["the", "new", "york", "city", "hotel", "new", "york", "hotel", "york", "new", "the"]
    assert finder.occurrences(words, "en") == [
        (0, 1, "the"),
        (1, 4, "new york city"),
        (5, 7, "new york"),
        (10, 11, "the"),
    ]
    written = PhraseFinder(["twenty colours", "vingt"], "open_asr")
    assert written.occurrences(["20", "colors"], "en") == [(0, 2, "20 colors")]
    assert written.occurrences(["20", "colors"], "fr") == []
    assert written.occurrences(["vingt"], "fr") == [(0, 1, "vingt")]


def utterances(*pairs: tuple[str, str]) -> list[Utterance]:
    return [Utterance(str(i), "en", reference, hypothesis) for i, (reference, hypothesis) in enumerate(pairs)]


def test_recall_precision_and_the_errors_of_the_rest():
    finder = PhraseFinder(["kriegspiel", "pound key"], "basic")
    counts = count_phrases(
        utterances(
            ("play kriegspiel now", "play creek spiel now"),  # missed; the insertion is the phrase's
            ("press the pound key", "press pound key please"),  # found; one word missing, one too many
            ("press the key", "press the pound key"),  # written where it is not said
            ("pound key pound key", "pound key the bound key"),  # one of two; the insertion is the phrase's
            ("", "hello you"),
            ("stop", "stop"),
        ),
        finder,
    )
    assert counts.said_N == [1, 1, 0, 2, 0, 0]
    assert counts.missed_N == [1, 0, 0, 1, 0, 0]
    assert counts.written_N == [0, 1, 1, 1, 0, 0]
    assert counts.false_N == [0, 0, 1, 0, 0, 0]
    assert counts.rest_words_N == [2, 2, 3, 0, 0, 1]
    assert counts.rest_errors_N == [0, 2, 1, 0, 2, 0]
    found = counts.result()
    assert (found["recall"], found["precision"], found["rest_wer"]) == pytest.approx((2 / 4, 2 / 3, 5 / 8))
    assert found["recall_interval"][0] <= found["recall"] <= found["recall_interval"][1]
    assert found["most_missed"] == [("kriegspiel", 1), ("pound key", 1)]
    assert found["most_false"] == [("pound key", 1)]
    nothing = count_phrases(utterances(("stop", "stop")), finder).result()
    assert (nothing["recall"], nothing["recall_interval"], nothing["precision"]) == (None, None, None)


def test_two_decodings_are_compared_by_phrases_and_by_the_rest():
    finder = PhraseFinder(["kriegspiel"], "basic")
    said = [f"word{i} kriegspiel end" for i in range(12)]
    missing = utterances(*((text, text.replace("kriegspiel", "creek")) for text in said))
    finding = utterances(*((text, text.replace("end", "and") if i < 2 else text) for i, text in enumerate(said)))
    found = compare_phrases(count_phrases(missing, finder), count_phrases(finding, finder))
    assert (found["missed"]["difference"], found["missed"]["significant"]) == (-1.0, True)
    assert (found["rest"]["difference"], found["rest"]["significant"]) == (2 / 24, False)
    assert compare_phrases(*[count_phrases(utterances(("stop", "stop")), finder)] * 2)["missed"] is None


def test_the_weight_that_is_chosen():
    def row(weight: float, missed: int, errors: int, significant: bool = False) -> dict[str, Any]:
        rest = {"significant": significant, "difference": (errors - 10) / 100}
        return {"boost_weight": weight, "missed": missed, "rest_errors": errors, "rest": rest}

    rows = [row(0, 20, 10), row(0.5, 14, 10), row(1, 8, 13), row(2, 2, 40, significant=True)]
    assert best_boost(rows) == 1
    assert best_boost([*rows, row(3, 7, 14)]) == 1
    assert best_boost([row(0, 20, 10), row(1, 0, 25, significant=True), row(2, 19, 11)]) == 0
    assert best_boost([row(0, 20, 10), row(1, 10, 2, significant=True)]) == 1  # significantly better


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with some of the words that the clips say, and one that none of them does."""
    words = [row["text"].strip(" .").lower() for row in read_lines(clips / "manifest.jsonl")]
    path = tmp_path_factory.mktemp("spoken") / "spoken.txt"
    path.write_text("\n".join(sorted({text for text in words if " " not in text}) + ["kriegspiel"]) + "\n")
    return path


@pytest.mark.slow
def test_evaluate_reports_phrases_with_and_without(clips, spoken, tmp_path, capsys):
    # Some clips are longer than a chunk.
    common = [
        "--data",
        clips / "manifest.jsonl",
        "--model",
        BASE,
        "--json",
        tmp_path / "result.json",
        "--chunk",
        "1.2",
    ]
    common += ["--bootstrap-by-id", "^(....)"]
    assert evaluate(*common, "--utterances", tmp_path / "plain.jsonl") == 0
    plain = json.loads((tmp_path / "result.json").read_text())
    options = ["--boost", spoken, "--boost-weight", "1", "--utterances", tmp_path / "with.jsonl"]
    assert evaluate(*common, *options) == 0
    said = capsys.readouterr().out
    told = json.loads((tmp_path / "result.json").read_text())
    boosting = told["boosting"]
    assert boosting["without"]["wer"] == plain["wer"]
    assert 1 < boosting["missed"]["blocks"] == boosting["rest"]["blocks"] == told["blocks"] < 24
    assert boosting["with"]["wer"] == told["wer"]
    assert boosting["with"]["recall"] > boosting["without"]["recall"]
    assert boosting["missed"]["difference"] == pytest.approx(
        boosting["without"]["recall"] - boosting["with"]["recall"]
    )
    rows = read_lines(tmp_path / "with.jsonl")
    assert sum(row["word_errors"] for row in rows) == told["word_errors"]
    finder = PhraseFinder([phrase.text for phrase in read_phrases(spoken)], "basic")
    again = count_phrases([Utterance(r["id"], r["language"], r["reference"], r["hypothesis"]) for r in rows], finder)
    assert again.result()["recall"] == boosting["with"]["recall"]
    assert f"phrases of {spoken}, said {sum(again.said_N)} times; weight 1" in said
    assert "phrases: with it fewer missed" in said or "phrases: no significant difference" in said


def test_evaluate_chooses_a_weight_and_prints_the_line_to_type(clips, spoken, tmp_path, capsys):
    common = ["--data", clips / "manifest.jsonl", "--model", BASE, "--json", tmp_path / "result.json"]
    assert evaluate(*common, "--boost", spoken, "--tune-boost") == 0
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["boost_weight"] == best_boost(told["tried"])
    assert f"chosen: --boost {spoken} --boost-weight {told['boost_weight']:g}" in capsys.readouterr().out
    assert told["tried"][0]["boost_weight"] == 0
    (tmp_path / "none.txt").write_text("kriegspiel\n")
    assert evaluate(*common, "--boost", tmp_path / "none.txt", "--tune-boost") == 1
    assert "none of the phrases" in capsys.readouterr().err


@pytest.mark.slow
def test_boosting_is_compared_with_fine_tuning(clips, spoken, archive_of, tmp_path, capsys):
    other = archive_of("rnnt", "plain", speaking=True)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    arguments = ["--model", BASE, "--against", other, "--data", clips / "manifest.jsonl", "--boost", spoken]
    assert evaluate(*arguments, "--json", tmp_path / "result.json", "--utterances", *files) == 0
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["wer_a"] == told["models"][0]["boosting"]["with"]["wer"]
    assert told["wer_b"] == told["models"][1]["boosting"]["without"]["wer"] == told["models"][1]["wer"]
    assert told["missed"]["wer_a"] == pytest.approx(1 - told["models"][0]["boosting"]["with"]["recall"])
    assert told["missed"]["wer_b"] == pytest.approx(1 - told["models"][1]["boosting"]["without"]["recall"])
    assert sum(row["word_errors"] for row in read_lines(files[1])) == told["models"][1]["word_errors"]
    assert "boost before you train:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--boost-weight", "1"], "--boost-weight goes with --boost"),
        (["--lm-weight", "1"], "--lm-weight goes with --lm"),
        (["--beam", "4"], "--beam goes with --boost or --lm"),
        (["--boost", "F", "--boost-weight", "-1"], "has to be 0 or more"),
        (["--boost", "F", "--look-ahead", "all"], "leave out --output and --look-ahead"),
        (["--boost", "F", "--output", "DIR"], "leave out --output and --look-ahead"),
        (["--tune-boost"], "--tune-boost goes with --boost or --lm"),
        (["--boost", "F", "--boost-weight", "1", "--tune-boost"], "leave one of them out"),
    ],
)
def test_options_that_do_not_go_together(options, told, capsys):
    with pytest.raises(SystemExit) as stop:
        evaluate("--model", BASE, "--data", "D", *options)
    assert stop.value.code == 2
    assert told in capsys.readouterr().err


def test_a_wrong_file_ends_before_the_model_is_loaded(tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    for command in ((evaluate, "--data", "D"), (transcribe, "a.wav")):
        assert command[0]("--model", "gone.nemo", *command[1:], "--boost", tmp_path / "empty.txt") == 2
        assert "there is no phrase in" in capsys.readouterr().err
