"""The console command: help, examples, start-up, completion."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT

from finetune import __version__
from finetune.cli import COMMANDS, completion_script, help_of, load, main

HEAVY = {"torch", "nemo", "transformers", "datasets", "accelerate", "deepspeed", "pandas", "matplotlib", "plotly"}


def test_the_installed_script_is_this_command():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"parakeet-finetune": "finetune.cli:main"}


def test_help_lists_every_command_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE), name
    assert main([]) == 2
    assert capsys.readouterr().err == text


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"parakeet-finetune {__version__}\n"


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [("evalute", "Did you mean evaluate?"), ("push_to_hub", "Did you mean push-to-hub?"), ("xyzzy", "--help lists")],
)
def test_an_unknown_command(typed, suggestion, capsys):
    assert main([typed, "--model", "m.nemo"]) == 2
    message = capsys.readouterr().err
    assert f"there is no command '{typed}'" in message
    assert suggestion in message


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_parses(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: parakeet-finetune {command} ")
    assert "python -m" not in text
    assert "--verbose" in text
    examples = re.findall(rf"^ +(parakeet-finetune {command} [^\[\n]+)$", text, re.MULTILINE)
    assert examples, text
    words = shlex.split(examples[-1], comments=True)
    load(command).make_parser().parse_intermixed_args(words[2:])
    paths = [word for word in words if re.match(r"(finetune|examples|accelerate_configs)/", word)]
    assert all((ROOT / path).exists() for path in paths), examples[-1]


def test_help_imports_nothing_heavy():
    """In one process, each command answers for the modules that its help is the first to import."""
    script = f"""
import sys
from finetune.cli import COMMANDS, help_of, make_parser
make_parser().format_help()
seen = set()
for command in [None, *COMMANDS]:
    if command:
        help_of(command)
    loaded = {HEAVY!r} & sys.modules.keys()
    print(command, *loaded - seen)
    seen |= loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=1500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["None", *COMMANDS]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert script.strip() == completion_script(shell).strip()
    for word in (*COMMANDS, "completion", "--strategy", "adamw_8bit", "--timestamps"):
        assert word in script, word
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("start", [["-m", "finetune.cli", "evaluate"], ["-m", "finetune.evaluate"]], ids=" ".join)
def test_an_interrupted_command_says_one_word(start, tmp_path):
    file = tmp_path / "utterances.jsonl"
    os.mkfifo(file)
    command = [sys.executable, *start, "--compare", str(file), str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    with file.open("w"):  # when the command reads it
        process.send_signal(signal.SIGINT)
        printed = process.communicate()
    assert (process.returncode, *printed) == (130, "", "interrupted\n")


def test_a_command_runs_as_its_module_does(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--gpus", "many"])
    assert stop.value.code == 2
    assert "--gpus" in capsys.readouterr().err
    assert help_of("plan") != load("plan").make_parser().format_help()


@pytest.mark.parametrize("command", ["check", "split", "tokenizer", "evaluate", "average", "export"])
def test_a_split_that_would_choose_nothing_is_refused(command, tmp_path, capsys):
    """By every command that takes --split, before it reads a model or writes anything."""
    (tmp_path / "all.jsonl").write_text('{"audio_filepath": "a.wav", "duration": 1.0, "text": "a"}\n')
    output = str(tmp_path / "out")
    own = {
        "check": ["--output-dir", output],
        "split": ["--output", output],
        "tokenizer": ["--size", "32", "--output", output],
        "evaluate": ["--model", "a.nemo"],
        "average": ["--models", "a.nemo", "b.nemo", "--output", output],
        "export": ["--model", "a.nemo", "--to", "hf", "--output", output],
    }[command]
    assert main([command, "--data", str(tmp_path / "all.jsonl"), "--split", "test", *own]) == 2
    assert "error: --split: `split` has no effect on " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
