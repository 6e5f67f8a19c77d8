"""Print error rates and comparisons as aligned tables. Texts from data cannot act on the terminal."""

from typing import Any

from finetune.evaluation.significance import FEW, p_value_text
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
