"""What a cleaning leaves: problems.jsonl, clean.json and the page clean.html."""

from collections import Counter
from pathlib import Path
from typing import Any

from finetune.durable_files import write_json, write_text
from finetune.security.safe_text import json_line
from finetune.tools.cleaning.judging import FEWEST_WORDS_HEARD, POWER, Judgement, Problem, aligned_pairs
from finetune.tools.command_line import writing
from finetune.tools.report.page import write_page

MEANING = {
    "exchanged": "two clips have each other's text",
    "wrong_text": "the text does not fit the audio, and no other clip's audio was found for it",
    "other_language": "the text is in another language than the clip",
    "cut_off": "the audio ends before the text does, or begins after it",
    "words_missing": "words were said that are not in the text",
    "words_not_said": "words of the text were not said",
    "other_word": "another word was said",
    "speech_without_words": "speech in which the text has no words",
    "repeated": "the text goes round in circles",
    "silence": "a text, but no sound",
}
SHOWN = 500
PROBLEMS, RESULT, PAGE = "problems.jsonl", "clean.json", "clean.html"
MEDIA = "'self' file: data:"
"""Where the page may take audio from: the directory that it lies in."""


def sentences_of(judgement: Judgement, listed: list[Problem]) -> list[str]:
    """Say what came out, whether the labels are worse than the model, and what the model is too weak to judge."""
    j = judgement
    listing = f"{len(listed):,} of {j.clips:,} clips have a suspicious label."
    if not j.compared:
        return [
            f"{listing} No clip has a text that could be compared with another clip's, so nothing is listed but "
            "silence, repeats, and speech without words."
        ]
    said = [
        f"{listing} The model's WER against the labels is {j.wer:.3f}; in {100 * j.power:.0f} % of the clips the text "
        "of another one fits worse than the label."
    ]
    if not j.judges_texts:
        said.append(
            f"The model is too weak to judge these labels: in {100 * (1 - j.power):.0f} % of the clips the text of "
            f"another one fits as well; {100 * (1 - POWER):.0f} % at most may do so, chance has 50 %. Nothing is "
            "listed but silence, repeats, and speech without words. Take a better model, or train this one on "
            "the data first."
        )
    elif not j.judges_words:
        said.append(
            f"The model is too weak to judge single words: its WER is {j.wer:.3f}, {1 - FEWEST_WORDS_HEARD:g} at most "
            "is needed. Only texts that do not fit as a whole are listed."
        )
    elif j.label_words > j.model_words:
        said.append(
            f"The labels are worse than the model: where they differ, {j.label_words:,} words of the labels are wrong "
            f"by its judgement and {j.model_words:,} of its own. Look through the problems before anything is trained."
        )
    if j.judges_texts and j.languages < 2:
        said.append(
            "The rows name no two languages, so a text in another language is listed as wrong_text. Name them "
            "in the rows' column lang."
        )
    return said


def problem_row(problem: Problem, correction: str | None) -> dict[str, Any]:
    """Return a line of problems.jsonl, which `data.leave_out` takes."""
    row = problem.row
    return {
        "source": row["source"],
        "reason": f"{problem.kind}: {problem.difference}",
        "id": row["id"],
        "kind": problem.kind,
        "confidence": round(problem.confidence, 4),
        "text": row["text"],
        "heard": row["heard"],
        "difference": problem.difference,
        "score": round(problem.score, 3),
        "correction": correction,
        "partner": problem.partner,
    }


def write_outputs(
    judgement: Judgement, listed: list[Problem], corrections: dict[str, str], audio: dict[str, str], folder: Path
) -> list[str]:
    """Write all files into the folder; return what is said at the top of the page."""
    said = sentences_of(judgement, listed)
    kinds = Counter(problem.kind for problem in listed)
    with writing("--output", folder):
        rows = [problem_row(problem, corrections.get(problem.row["source"])) for problem in listed]
        write_text(folder / PROBLEMS, "".join(json_line(row) + "\n" for row in rows))
        write_json(
            folder / RESULT,
            {
                "clips": judgement.clips,
                "problems": len(listed),
                "kinds": dict(kinds.most_common()),
                "wer": judgement.wer,
                "other_texts_fit_worse": judgement.power,
                "judges_texts": judgement.judges_texts,
                "judges_words": judgement.judges_words,
                "label_words": judgement.label_words,
                "model_words": judgement.model_words,
                "thresholds": {
                    name: mixture and {**vars(mixture), "threshold": mixture.threshold}
                    for name, mixture in judgement.mixtures.items()
                },
                "said": said,
            },
        )
    shown = [
        {
            "label": problem.kind.replace("_", " "),
            "about": f"confidence {problem.confidence:.2f}, {problem.row['duration']:.1f} s",
            "id": problem.row["id"],
            "source": problem.row["source"],
            "difference": problem.difference,
            "text": problem.row["text"],
            "heard": problem.row["heard"],
            "pairs": aligned_pairs(problem.row["text"], problem.row["heard"]),
            "audio": audio.get(problem.row["source"]),
            "correction": corrections.get(problem.row["source"]),
        }
        for problem in listed[:SHOWN]
    ]
    write_page(
        "clean.html",
        folder / PAGE,
        "Labels to look at",
        [],
        intro=f"{len(listed):,} of {judgement.clips:,} clips.",
        navigation=[("result", "Result"), ("problems", "Problems")],
        sentences=said,
        kinds=[[kind.replace("_", " "), n, MEANING[kind]] for kind, n in kinds.most_common()],
        problems=shown,
        not_shown=max(len(listed) - SHOWN, 0),
        problems_file=PROBLEMS,
        media=MEDIA,
    )
    return said
