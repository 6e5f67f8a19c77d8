"""Turn a NeMo fine-tuning YAML, or a config.yaml of another script, into a run file.

Settings are given in the names of FILE, as on NeMo's command line. Each value of the run file has a comment with where
it came from; on stderr stand the keys that have no counterpart, with the reason, what has to be filled in, and the
command that starts the training. Without --output the run file is printed.

Exit codes: 0 done, 1 the run file has to be filled in or mended first, 2 bad arguments or a FILE of another kind.
"""

import argparse
import sys
from pathlib import Path

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.command_line import command, run_command


def make_parser() -> argparse.ArgumentParser:
    parser = command(
        "import_nemo",
        __doc__ or "",
        "python -m finetune.import_nemo nemo.yaml model.train_ds.manifest_filepath=train.json --output RUN.yaml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="NeMo's YAML, or a config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in the names of FILE")
    parser.add_argument("--output", type=Path, metavar="RUN.yaml", help="write the run file here")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Import a configuration; return the exit code."""
    arguments = make_parser().parse_intermixed_args(argv)
    set_up_logging(arguments.verbose)
    from finetune.tools.nemo_import.run_file import as_yaml, import_config, left_over, refusal, start_line

    output: Path | None = arguments.output
    try:
        if output and output.exists() and output.samefile(arguments.file):
            raise UserError(f"--output: {output} is FILE itself. Name another file.")
        imported = import_config(arguments.file, arguments.overrides)
        text = as_yaml(imported)
        if output:
            try:
                output.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UserError(f"--output: {output} cannot be written: {error}") from error
        else:
            print(text, end="")
    except UserError as error:
        print_error(error)
        return error.exit_code
    notes = [f"  {line}" for line in left_over(imported)]
    if notes:
        notes.insert(0, f"without a counterpart ({len(imported.left)} keys):")
    notes += [f"note: {note}" for note in imported.notes]
    problem = None
    if imported.to_fill:
        notes.append("to fill in:")
        for key, source in imported.to_fill.items():
            notes.append(f"  {key}" + (f" ({source} of {arguments.file} is not set)" if source else ""))
    elif problem := refusal(text, output):
        notes.append(f"training would refuse it: {problem}")
    else:
        notes.append(f"start: {start_line(imported, str(output or 'RUN.yaml'))}")
    print("\n".join(notes), file=sys.stderr)
    return 1 if imported.to_fill or problem else 0


if __name__ == "__main__":
    sys.exit(run_command(main))
