"""Read a whole data set; report what is in it, what training would leave out and why, and how its batches would be.

D is a NeMo manifest, a folder or glob of parquet or tar shards, an audio folder, or a hub data set name. With a model
(or a run file, which names one) texts are tokenised and utterances judged by what its encoder's frames can carry. An
interrupted check goes on where it was. Leaves report.html, check.json, and problems.jsonl with each utterance that
cannot be used, comes twice, or is in data.validation, test or guard of the run file as well, which `data.leave_out`
takes; suspicious.jsonl has these and the clips that somebody should look at.

Exit codes: 0 all is usable but what filters leave out, 1 more than data.max_bad_fraction is bad or clips of
data.validation, test or guard are also in data.train, 2 bad arguments.
"""

import argparse
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

from finetune.durable_files import write_json
from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.security.safe_text import one_line
from finetune.tools.command_line import add_json, command, positive, run_command, writing
from finetune.tools.jobs.arguments import add_cluster, check_address

RESULT = "check.json"
WITH_DATA = ("split", "model", "tokenizer")
SETTING = re.compile(r"(model|data|training)\.[\w.]+=")
VALIDATION = re.compile(r"(validation|valid|val|dev)([-.].*)?")


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "check",
        __doc__ or "",
        "python -m finetune.check --data my_data/train.jsonl --model M data.text_normalization=basic",
        "python -m finetune.check --config RUN.yaml --output-dir runs/check     # data.train, filtered as in training",
    )
    parser.add_argument("--data", nargs="+", metavar="D", help="one data set or several, read as one")
    parser.add_argument("--config", type=Path, help="run file: its data.train, filters and model")
    parser.add_argument("--split", help="split of a folder or hub data set (default: train)")
    parser.add_argument("--model", help="model whose tokenizer and frames are used")
    parser.add_argument("--tokenizer", help="tokenizer directory, for a NeMo model YAML")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="processes that read and decode (default: one a core)"
    )
    add_cluster(parser)
    parser.add_argument("--output-dir", type=Path, default=Path("check"), help="folder of the report (default: check)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result without asking")
    add_json(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as of a run file")
    return parser


def may_write(folder: Path, overwrite: bool) -> bool:
    """Return whether an earlier result may be replaced; where there is a terminal, ask.

    Raises:
        UserError: nobody is there to answer.
    """
    if overwrite or not (folder / RESULT).is_file():
        return True
    if not sys.stdin.isatty():
        raise UserError(
            f"--output-dir: {folder} holds the result of a check. --overwrite replaces it; or name another folder."
        )
    return input(f"{folder} holds the result of a check. Replace it? [y/N] ").strip().lower() in ("y", "yes")


def is_divided(data: str) -> bool:
    """Return whether a validation set stands in or beside data; True where they are not on this machine."""
    path = Path(data)
    folder = path if path.is_dir() else path.parent
    if not path.exists() and not ("*" in path.name and folder.is_dir()):
        return True
    names = (file.name for own in (folder, folder / "data") if own.is_dir() for file in own.iterdir())
    return any(map(VALIDATION.fullmatch, names))


def main(argv: list[str] | None = None) -> int:
    """Check a data set; return the exit code."""
    parser = make_parser()
    arguments = parser.parse_intermixed_args(argv)
    settings = [entry for entry in arguments.data or () if SETTING.match(entry)]  # behind --data they seem data sets
    arguments.overrides += settings
    arguments.data = [entry for entry in arguments.data or () if entry not in settings]
    if bool(arguments.data) == bool(arguments.config):
        parser.error("give either --data or --config")
    if arguments.config and (alone := [name for name in WITH_DATA if getattr(arguments, name)]):
        parser.error(f"--{alone[0]} goes with --data; with --config, the run file says it")
    if arguments.workers and arguments.engine == "ray":
        parser.error("--workers is of --engine local: Ray reads on all CPUs of its cluster")
    set_up_logging(arguments.verbose)

    from finetune.data.sources import split_to_read
    from finetune.tools.data_check import inspection
    from finetune.tools.data_check.report import write_report

    a, folder = arguments, arguments.output_dir
    try:
        check_address(a)
        if not may_write(folder, a.overwrite):
            return 2
        if a.config:
            make_work = partial(inspection.work_on_run_file, a.config, a.overrides, folder)
        else:
            split = split_to_read(a.data, a.split, "train")
            make_work = partial(inspection.work_on_data, a.data, split, a.model, a.tokenizer, a.overrides, folder)
        if a.engine == "ray":
            from finetune.tools.data_check.on_ray import read_on_ray

            read = partial(read_on_ray, make_work, a.address)
        else:
            read = partial(inspection.read_here, a.workers or os.cpu_count() or 1)
        with writing("--output-dir", folder):
            (folder / RESULT).unlink(missing_ok=True)
            found = inspection.inspect(make_work(), folder, read)
            said = found.pop("said")
            write_json(folder / RESULT, found)
            write_report(found, folder / "report.html")
        with writing("--json", a.json):
            if a.json:
                write_json(a.json, found)
    except UserError as error:
        print_error(error)
        return error.exit_code
    for error in found["errors"]:
        print_error(error)
    for line in (*found["same_clips"], *(f"warning: {text}" for text in found["same_texts"])):
        print(line)
    for line in said:
        print(one_line(line))
    print(
        f"{found['rows']} rows, {found['clips']} clips to train on, {found['hours']:.2f} h; left out by filters: "
        f"{sum(found['filtered'].values())}; bad: {found['bad']}; the report: {folder / 'report.html'}"
    )
    for reason, n, example in found["left_out"]:
        print(one_line(f"  {n:>7,}  {reason}, such as {example}"))
    for kind, n in found["problems"].items():
        print(one_line(f"  {n:>7,}  bad, such as {found['examples'][kind]}"))
    for kind, n in found["doubts"].items():
        print(one_line(f"  {n:>7,}  {kind}, such as {found['examples'][kind]}"))
    split = f"parakeet-finetune split --data {shlex.join(a.data or [])} --output DIR"
    split += f" --split {shlex.quote(a.split)}" if a.split else ""
    if n := found["suspicious"]:
        listed = shlex.quote(str(folder / "suspicious.jsonl"))
        without = f"data.leave_out={listed}" if a.config else f"{split} --leave-out {listed}"
        print(
            f"{n:,} suspicious clip{'s' if n > 1 else ''}, with reasons: {listed}. Correct them"
            f"{' and split the data again' if a.config else ''}; or, to train without them: {without}"
        )
    if found["same_clips"]:
        print(found["way_out"])
    if found["errors"] or found["same_clips"] or found["bad_fraction"] > found["max_bad_fraction"]:
        return 1
    run_file = shlex.quote(str(a.config)) if a.config else "RUN.yaml, with these data as its data.train"
    is_next = f"parakeet-finetune plan --config {run_file}" if a.config or any(map(is_divided, a.data)) else split
    print(f"next: {is_next}")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
