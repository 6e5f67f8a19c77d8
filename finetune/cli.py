"""The console command: parakeet-finetune COMMAND [ARGUMENTS ...].

Each command is a module with `make_parser()` and `main(argv)`, which also runs as `python -m finetune.NAME`. A module
is imported when its command is called, so `parakeet-finetune --help` imports none of them.
"""

import argparse
import difflib
import importlib
import sys
from pathlib import Path
from types import ModuleType

from finetune import __version__
from finetune.tools.command_line import run_command

PROG = "parakeet-finetune"
COMMANDS = {
    "train": ("finetune.train", "fine-tune a model; --dry-run and --smoke N try it first"),
    "plan": ("finetune.plan", "predict memory and time of every strategy, without a GPU"),
    "check": ("finetune.check", "read a data set to its end: hours, lengths, what training leaves out"),
    "clean": ("finetune.clean", "find labels that do not fit their audio, by a model"),
    "split": ("finetune.split", "split data into manifests for training, validation and test"),
    "doctor": ("finetune.doctor", "say what this machine can run, and why not"),
    "evaluate": ("finetune.evaluate", "WER and CER by language, with intervals; compare two models"),
    "transcribe": ("finetune.transcribe", "transcribe audio of any length: JSON lines, SRT, VTT"),
    "serve": ("finetune.serve", "serve models over HTTP, as OpenAI's API for transcriptions"),
    "segment": ("finetune.segment", "cut a long recording with its text into clips to train on"),
    "align": ("finetune.align", "start and end of each word of a text: JSON lines, TextGrid, SRT"),
    "pseudo-label": ("finetune.pseudo_label", "label audio without texts, as right as promised"),
    "export": ("finetune.export", "write a model as .nemo or in transformers' format"),
    "average": ("finetune.average", "merge the weights of several models, or look between two"),
    "tokenizer": ("finetune.tokenizer", "train a SentencePiece tokenizer, or extend one"),
    "language-model": ("finetune.language_model", "make an n-gram language model of texts, for --lm"),
    "search": ("finetune.search", "search learning rates and other settings by short runs"),
    "report": ("finetune.report", "write a run's page, or compare several runs"),
    "push-to-hub": ("finetune.push_to_hub", "upload a model and its card to the Hugging Face Hub"),
    "import-nemo": ("finetune.import_nemo", "turn a NeMo fine-tuning YAML into a run file"),
}
SHELLS = ("bash", "zsh", "tcsh")
EPILOG = f"""commands:
{{commands}}
  completion   print a completion script for {", ".join(SHELLS)}

example:
  {PROG} train --config finetune/configs/quickstart.yaml

{PROG} COMMAND --help describes a command."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the top level; what follows COMMAND is left to the command."""
    commands = "\n".join(f"  {name:<14} {summary}" for name, (_, summary) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=PROG,
        usage=f"{PROG} COMMAND ...",
        description="Fine-tune NVIDIA Parakeet-TDT speech recognisers.",
        epilog=EPILOG.format(commands=commands),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="one of the commands below")
    return parser


def load(command: str) -> ModuleType:
    """Import the module of a command."""
    return importlib.import_module(COMMANDS[command][0])


def help_of(command: str) -> str:
    """Return a command's help with the console command in place of `python -m`."""
    module, _ = COMMANDS[command]
    parser, typed = load(command).make_parser(), f"{PROG} {command}"
    parser.prog = typed
    return parser.format_help().replace(f"python -m {module}", typed).replace("python finetune/train.py", typed)


def completion_script(shell: str) -> str:
    """Return a script that completes commands, options, strategies and files in `shell`."""
    import shtab

    from finetune.paths import strategy_names

    strategies = strategy_names()
    parser = argparse.ArgumentParser(prog=PROG)
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers()
    for name, (_, summary) in COMMANDS.items():
        own = load(name).make_parser()
        subparser = subparsers.add_parser(name, parents=[own], add_help=False, help=summary)
        for action in subparser._actions:
            if "--strategy" in action.option_strings:
                action.choices = strategies
            elif action.choices is None and (action.type is Path or action.dest in ("files", "model", "data")):
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads the attribute
    subparsers.add_parser("completion", help="print a completion script").add_argument("shell", choices=SHELLS)
    return shtab.complete(parser, shell)


def main(argv: list[str] | None = None) -> int:
    """Run the command that the arguments name; return its exit code."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int:
    parser = make_parser()
    command, rest = parser.parse_args(argv[:1]).command, argv[1:]
    if command is None:
        parser.print_help(sys.stderr)
        return 2
    if command == "completion":
        shell = argparse.ArgumentParser(prog=f"{PROG} completion", description=f'eval "$({PROG} completion bash)"')
        shell.add_argument("shell", choices=SHELLS)
        print(completion_script(shell.parse_args(rest).shell))
        return 0
    if command not in COMMANDS:
        close = difflib.get_close_matches(command.replace("_", "-"), COMMANDS, n=1)
        print(f"error: there is no command {command!r}.", end="", file=sys.stderr)
        print(f" Did you mean {close[0]}?" if close else f" {PROG} --help lists them.", file=sys.stderr)
        return 2
    if not {"-h", "--help"}.isdisjoint(rest):
        print(help_of(command), end="")
        return 0
    module = load(command)
    code = module.main(rest)
    if command == "train":
        module.leave(code)  # as `python finetune/train.py` does
    return code


if __name__ == "__main__":
    sys.exit(main())
