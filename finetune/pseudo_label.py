"""Label audio that has no texts: transcribe it, and keep what is as right as promised.

    python -m finetune.pseudo_label --model M --data AUDIO --calibrate VALIDATION --precision 0.95 --output DIR
    python -m finetune.pseudo_label ... --rounds 2 --config RUN.yaml      label, train on it, label again

AUDIO: recordings (files or folders of them), which are cut at pauses, or whatever training takes, without texts.
VALIDATION: clips with true texts that the model was not trained on, of the same kind of audio. On them the model's
confidence is calibrated: --precision 0.95 promises that 95 % of the words of what is kept are right (1 - WER).
A run that was stopped goes on with the same line. Exit codes: 0 done, 1 failed or no clip kept, 2 bad arguments or a
precision that cannot be promised, which it then says; 75 stopped by SIGTERM, 130 by Ctrl-C. docs/pseudo_labels.md
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.normalization import SCORE_NORMALIZATIONS
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import DATA, add_decoding, add_head, add_model, command, positive, run_command
from finetune.tools.jobs.arguments import add_engine, engine_of, worker_device

if TYPE_CHECKING:
    from finetune.tools.pseudo_labels.labels import LabelSettings
    from finetune.tools.pseudo_labels.outputs import Summary

EXAMPLE = (
    "python -m finetune.pseudo_label --model runs/quickstart --data recordings --calibrate examples/voice_prompts "
    "--precision 0.9 --output labels"
)


def make_parser() -> argparse.ArgumentParser:
    parser = command("pseudo_label", __doc__ or "", EXAMPLE)
    add_model(parser, required=True)
    add = parser.add_argument
    add("--data", nargs="+", required=True, metavar="AUDIO", help=f"audio files, folders of them, or {DATA}")
    add("--split", help="split of a folder or hub data set of --data (default: train)")
    add("--calibrate", nargs="+", required=True, metavar="D", help=f"labelled clips; each {DATA}")
    add("--calibrate-split", metavar="SPLIT", help="split of a folder or hub data set of it (default: validation)")
    add(
        "--output", type=Path, required=True, metavar="DIR", help="directory for manifest.jsonl and what belongs to it"
    )
    add("--precision", type=float, default=0.95, metavar="P", help="promised share of right words (default: 0.95)")
    sure = "probability with which the labelled clips let the promise hold (default: 0.9)"
    add("--certainty", type=float, default=0.9, metavar="P", help=sure)
    add(
        "--normalization",
        choices=SCORE_NORMALIZATIONS,
        default="basic",
        help="of texts that are compared (default: basic)",
    )
    add("--language", metavar="CODE", help="of clips that name none; of a prompt model also the prompt")
    add("--longest", type=float, default=20.0, metavar="SECONDS", help="cut longer clips at pauses (default: 20)")
    add("--keep-silence", action="store_true", help="keep clips that are surely without speech, with an empty text")
    rounds = parser.add_argument_group("rounds").add_argument
    rounds(
        "--rounds",
        type=positive,
        default=1,
        metavar="N",
        help="label N times, with a training in between (default: 1)",
    )
    rounds(
        "--config", type=Path, metavar="RUN.yaml", help="run file of the trainings; its data.train gets the labels too"
    )
    rounds("--strategy", action="append", default=[], metavar="NAME", help="of the trainings; repeat to combine")
    rounds("--set", nargs="+", default=[], metavar="key=value", help="settings that replace those of the run file")
    rounds("--weight", type=float, metavar="W", help="of the labels, where the sources of data.train have weights")
    rounds("--launcher", metavar="WORDS", help="start trainings so, such as 'torchrun --nproc_per_node 4'")
    add_decoding(parser, 16)
    add_head(parser)
    add_engine(parser)
    return parser


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser()
    a = parser.parse_args(argv)
    if a.rounds > 1 and a.config is None:
        parser.error("--rounds trains between labellings: name the run file with --config")
    if a.rounds == 1:
        given = [f"--{name}" for name in ("config", "strategy", "set", "weight", "launcher") if getattr(a, name)]
        if given:
            parser.error(f"{', '.join(given)} belong to --rounds 2 or more")
    elif a.shard != (0, 1):
        parser.error("--shard is for one labelling: leave it out with --rounds")
    return a


def settings_of(arguments: argparse.Namespace) -> LabelSettings:
    """Return the settings of a labelling."""
    from dataclasses import fields

    from finetune.tools.pseudo_labels.labels import LabelSettings

    values = {field.name: getattr(arguments, field.name) for field in fields(LabelSettings)}
    return LabelSettings(**{**values, "device": worker_device(arguments)})


def pseudo_label(arguments: argparse.Namespace) -> Summary | None:
    """Do what the arguments say; return the summary of the last labelling."""
    from finetune.tools.pseudo_labels.labels import check_settings, label
    from finetune.tools.pseudo_labels.rounds import TRAIN, Rounds, run_rounds

    a, settings = arguments, settings_of(arguments)
    check_settings(settings)
    if a.rounds == 1:
        return label(a.model, settings, engine_of(a), a.output)
    training = (*shlex.split(a.launcher), TRAIN[1]) if a.launcher else TRAIN
    plan = Rounds(a.model, settings, a.config, a.strategy, a.set, a.rounds, a.weight, training)
    return run_rounds(plan, engine_of(a), a.output)


def main(argv: list[str] | None = None) -> int:
    """Label; return the exit code."""
    arguments = parse_arguments(argv)
    set_up_logging(arguments.verbose)
    try:
        summary = pseudo_label(arguments)
    except UserError as error:
        print_error(error)
        return error.exit_code
    if summary is None:
        print("this part is done; the --shard that ends last chooses among the labels, or this line without --shard")
        return 0
    return print_summary(summary, arguments.output)


def print_summary(summary: Summary, folder: Path) -> int:
    """Print what came of a labelling; return the exit code, 1 where nothing is kept."""
    from finetune.tools.pseudo_labels.outputs import table

    print(table(summary))
    if not summary["kept_clips"] and not summary["silent_clips"]:
        print(f"no clip is kept: {folder / 'left_out.jsonl'} has the reasons")
        return 1
    manifest = folder / "manifest.jsonl"
    silent = " data.keep_empty_text=true" if summary["silent_clips"] else ""
    print(f"{manifest}\nto train on it: data.train='[{{path: LABELLED}}, {{path: {manifest}}}]'{silent}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
