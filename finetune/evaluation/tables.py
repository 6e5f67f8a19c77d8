"""Print error rates and comparisons as aligned tables. Texts from data cannot act on the terminal."""

from typing import Any

from finetune.evaluation.significance import FEW, describe_difference, p_value_text
from finetune.security.safe_text import one_line


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{100 * value:{sign}.2f}"


def _interval(value: list[float] | None, sign: str = "") -> str:
    return "-" if value is None else f"[{_percent(value[0], sign)}, {_percent(value[1], sign)}]"


def _print_row(language: str, cells: tuple[object, ...], widths: tuple[int, ...]) -> None:
    print(
        f"{one_line(language):10} " + " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, widths, strict=True))
    )


def print_rates(result: dict[str, Any]) -> None:
    """Print the rates of one model, its speed, and what was left out.

    Args:
        result: from `finetune.evaluation.dataset.evaluate_model`.
    """
    widths = (7, 16, 7, 16, 6, 6, 6, 7, 6)
    _print_row("language", ("WER %", "95 %", "CER %", "95 %", "sub", "del", "ins", "words", "clips"), widths)
    languages = result["by_language"].items() if len(result["by_language"]) > 1 else []
    for name, r in [*languages, ("all", result)]:
        rates = (
            _percent(r["wer"]),
            _interval(r.get("wer_interval")),
            _percent(r["cer"]),
            _interval(r.get("cer_interval")),
        )
        counts = (r["substitutions"], r["deletions"], r["insertions"], r["words"], r["clips"])
        _print_row(name, (*rates, *counts), widths)
    whole = f", {result['rtfx_whole']:.1f} with reading the data" if result["rtfx_whole"] else ""
    print(f"{result['audio_seconds']:.0f} s of audio: RTFx {result['rtfx']:.1f} decoding{whole}")
    if result.get("head") == "ctc":
        print("decoded with the CTC head")
    if "wer_interval" in result and result.get("blocks", result["clips"]) < FEW:
        print(f"with fewer than {FEW} clips or blocks intervals are too short")
    if result["left_out"]:
        print(f"{result['left_out']} clip(s) without a reference after normalisation are left out")
    if result["normalization"] == "open_asr" and "unknown" in result["by_language"]:
        print(f"{result['by_language']['unknown']['clips']} clip(s) name no language: normalised as English")
    if bad := result["quarantined"]:
        example = f"{one_line(bad[0]['id'])}: {one_line(bad[0]['reason'])}"
        print(f"{len(bad)} clip(s) could not be used, such as {example}")


def print_streaming(result: dict[str, Any]) -> None:
    """Print the rates by look-ahead beside those of whole recordings.

    Args:
        result: from `finetune.evaluation.dataset.evaluate_model`, with `streaming`.
    """
    widths = (16, 7, 16, 7, 8, 8, 9)
    print(f"\nwhole recordings (attention context {result['att_context_size']}) and chunk by chunk:")
    _print_row("look-ahead", ("context", "WER %", "95 %", "CER %", "chunk ms", "delay ms", "compute ms"), widths)
    for r in [{**result, "look_ahead": "offline"}, *result["streaming"]]:
        rates = (_percent(r["wer"]), _interval(r.get("wer_interval")), _percent(r["cer"]))
        times = [r.get(key) for key in ("chunk_ms", "latency_ms", "chunk_compute_ms")]
        shown = ("-" if ms is None else f"{ms:.0f}" for ms in times)
        _print_row(r["look_ahead"], (r["att_context_size"], *rates, *shown), widths)
    if result["online_normalization"]:
        print("features are normalised over each chunk when streaming, over whole recordings offline")


def print_boosting(result: dict[str, Any]) -> None:
    """Print a decoding with phrases or a language model beside the one without.

    Args:
        result: `boosting` of `finetune.evaluation.boosting.evaluate_boosted`.
    """
    phrases = "phrases" in result
    if phrases:
        said = f"said {result['with']['said']} times"
        print(
            f"\n{result['phrases']} phrases of {one_line(result['file'])}, {said}; weight {result['boost_weight']:g}"
        )
    if "lm" in result:
        print(f"{'' if phrases else chr(10)}language model {one_line(result['lm'])}; weight {result['lm_weight']:g}")
    if result["beam"] > 1:
        print(f"beam of {result['beam']}, in both")
    widths = (*((8, 16, 11, 16, 10, 16) if phrases else ()), 7, 16, 6)
    of_phrases = ("recall %", "95 %", "precision %", "95 %", "rest WER %", "95 %") if phrases else ()
    _print_row("decoding", (*of_phrases, "WER %", "95 %", "RTFx"), widths)
    for name in ("without", "with"):
        r, cells = result[name], []
        for key in ("recall", "precision", "rest_wer") if phrases else ():
            cells += [_percent(r[key]), _interval(r[f"{key}_interval"])]
        cells += [_percent(r["wer"]), _interval(r.get("wer_interval")), f"{r['rtfx']:.1f}"]
        _print_row(name, tuple(cells), widths)
    print_phrase_verdicts(result, "with it", "all words")
    if phrases:
        for title, key in (("still missed", "most_missed"), ("written where not said", "most_false")):
            if found := result["with"][key]:
                print(f"{title}: {', '.join(f'{one_line(phrase)} {n}' for phrase, n in found)}")


def print_phrase_verdicts(result: dict[str, Any], side: str, words: str | None = None) -> None:
    """Print what comparisons of phrases and other words say.

    Args:
        result: missed and rest, of `finetune.evaluation.phrases.compare_phrases`, and wer.
        side: the second decoding's name.
        words: title of the comparison of all words; None: it is not printed.
    """
    if result.get("missed"):
        print(f"phrases: {describe_difference(result['missed'], f'{side} fewer missed', f'{side} more missed')}")
    if result.get("rest"):
        print(f"the other words: {describe_difference(result['rest'], f'{side} better', f'{side} worse')}")
    if words is not None:
        print(f"{words}: {describe_difference(result['wer'], f'{side} better', f'{side} worse')}")


def print_boost_or_train(result: dict[str, Any]) -> None:
    """Print what boosting brought a base model, beside what fine-tuning brought.

    Args:
        result: of `evaluate --against --boost`: models and missed, of the base model with phrases and the tuned one
            without.
    """
    base, tuned = (one["boosting"] for one in result["models"])
    print("\nboost before you train:")
    widths = (9, 12, 11, 8)
    _print_row("", ("recall %", "precision %", "rest WER %", "WER %"), widths)
    rows = [("base", base["without"]), ("boosted", base["with"])]
    rows += [("tuned", tuned["without"]), ("both", tuned["with"])]
    for name, r in rows:
        _print_row(name, tuple(_percent(r[key]) for key in ("recall", "precision", "rest_wer", "wer")), widths)
    print("tuned against boosted:")
    print_phrase_verdicts(result, "tuned")


def print_tried_weights(result: dict[str, Any]) -> None:
    """Print what each weight gave, and the options to type.

    Args:
        result: of `finetune.evaluation.boosting.choose_weights`.
    """
    print(f"on {one_line(' '.join(result['data']))}, {result['split']}:")
    widths = (9, 9, 11, 11, 16, 8, 8)
    names = ("--boost", "recall %", "precision %", "rest WER %", "95 %", "p", "WER %")
    _print_row("--lm", names, widths)
    for r in result["tried"]:
        lm = f"{r['lm_weight']:g}" if "lm_weight" in r else "-"
        if "boost_weight" not in r:
            _print_row(lm, ("-", "-", "-", "-", "-", "-", _percent(r["wer"])), widths)
            continue
        p_value = (
            p_value_text(r["rest"]).removeprefix("p ").removeprefix("= ").replace("< ", "<") if r["rest"] else "-"
        )
        rates = (_percent(r["recall"]), _percent(r["precision"]), _percent(r["rest_wer"]))
        cells = (f"{r['boost_weight']:g}", *rates, _interval(r["rest_wer_interval"]), p_value, _percent(r["wer"]))
        _print_row(lm, cells, widths)
    said = [r["said"] for r in result["tried"] if "said" in r]
    if said and said[0] < FEW:
        print(f"(the phrases are said {said[0]} times: a weight is not well chosen on fewer than {FEW})")
    options = [f"--boost {result['file']} --boost-weight {result['boost_weight']:g}"] if "file" in result else []
    options += [f"--lm {result['lm']} --lm-weight {result['lm_weight']:g}"] if "lm" in result else []
    options += [f"--beam {result['beam']}"] if result["beam"] > 1 else []
    print(f"\nchosen: {one_line(' '.join(options))}")


def print_comparison(result: dict[str, Any]) -> None:
    """Print a comparison of two models as a table, a verdict, and the utterances that changed most.

    Args:
        result: from `finetune.evaluation.comparison.compare_utterances`, with names as `a` and `b`.
    """
    print(f"a: {result['a']}\nb: {result['b']}\n")
    widths = (8, 16, 8, 16, 7, 16, 8, 8, 7)
    _print_row("language", ("WER a %", "95 %", "WER b %", "95 %", "b - a", "95 %", "p", "words", "clips"), widths)
    languages = result["by_language"].items() if len(result["by_language"]) > 1 else []
    for name, r in [*languages, ("all", result)]:
        wers = (_percent(r["wer_a"]), _interval(r["interval_a"]), _percent(r["wer_b"]), _interval(r["interval_b"]))
        difference = (_percent(r["difference"], "+"), _interval(r["difference_interval"], "+"))
        p_value = p_value_text(r).removeprefix("p ").removeprefix("= ").replace("< ", "<")
        _print_row(name, (*wers, *difference, p_value, r["words"], r["clips"]), widths)
    if languages:
        print("(p of the languages: corrected for their number after Holm)")
    if result["blocks"] != result["clips"]:
        print(f"({result['clips']} clips in {result['blocks']} blocks, drawn and exchanged as blocks)")
    if result["blocks"] < FEW:
        print(f"(with fewer than {FEW} clips or blocks intervals are too short)")
    print(f"\n{result['verdict']}")
    print(f"clips better {result['better']}, worse {result['worse']}, with as many errors {result['unchanged']}")
    reasons = {
        "only_in_a": "only in a",
        "only_in_b": "only in b",
        "other_reference": "with another reference",
        "left_out": "without a reference",
    }
    if skipped := [f"{result[key]} {reason}" for key, reason in reasons.items() if result[key]]:
        print(f"not compared: {', '.join(skipped)}")
    for title, key in (("most improved", "most_improved"), ("most worsened", "most_worsened")):
        for row in result[key]:
            print(f"\n{title}: {one_line(row['id'])} ({row['more_errors']:+d} errors)")
            for name, text in (("reference", "reference"), ("a", "hypothesis_a"), ("b", "hypothesis_b")):
                print(f"  {name:<9} {one_line(row[text])}")
