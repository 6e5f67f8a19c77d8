"""Turns a NeMo fine-tuning YAML, or a config.yaml of another script, into a run file.

    python scripts/import_nemo_config.py FILE [key=value ...] [--output RUN.yaml]

Settings are given in the names of FILE, as on NeMo's command line: model.train_ds.manifest_filepath=train.json. Each
value has a comment with where it came from; on stderr stand the keys that have no counterpart, with the reason, what
has to be filled in, and the command that starts the training. Without --output the run file is printed.

Exit codes: 0 done, 1 the run file has to be filled in or mended first, 2 bad arguments or a FILE of another kind.
"""

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.tools.nemo_import.run_file import as_yaml, command, import_config, left_over


def refusal(text: str, output: Path | None) -> str | None:
    """Why training would refuse the run file; None where it takes it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            load_config(path, [], [])
        except UserError as error:
            return str(error).replace(str(path), str(output or "the run file"))
    return None


def main(argv: list[str] | None = None) -> int:
    """Runs the import; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python scripts/import_nemo_config.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="NeMo's YAML, or a config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, in the names of FILE")
    parser.add_argument("--output", type=Path, metavar="RUN.yaml", help="write the run file here")
    arguments = parser.parse_intermixed_args(argv)

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    try:
        if arguments.output and arguments.output.exists() and arguments.output.samefile(arguments.file):
            raise UserError(f"--output: {arguments.output} is FILE itself. Name another file.")
        imported = import_config(arguments.file, arguments.overrides)
        text = as_yaml(imported)
        if arguments.output:
            try:
                arguments.output.write_text(text, encoding="utf-8")
            except OSError as error:
                raise UserError(f"--output: {arguments.output} cannot be written: {error}") from error
        else:
            print(text, end="")
    except UserError as error:
        say(f"error: {error}")
        return error.exit_code
    lines = left_over(imported)
    if lines:
        say(f"without a counterpart ({len(imported.left)} keys):")
        for line in lines:
            say(f"  {line}")
    for note in imported.notes:
        say(f"note: {note}")
    if imported.to_fill:
        say("to fill in:")
        for key, source in imported.to_fill.items():
            say(f"  {key}" + (f" ({source} of {arguments.file} is not set)" if source else ""))
        return 1
    problem = refusal(text, arguments.output)
    if problem:
        say(f"training would refuse it: {problem}")
        return 1
    say(f"start: {command(imported, str(arguments.output or 'RUN.yaml'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
