"""Run the walk-through of docs/your_language.md as it stands there, and write what each command prints below it.

    python scripts/docs/write_your_language.py [--folder DIR] [--keep]
    python scripts/docs/write_your_language.py --recordings DIR        # only the recordings of the page

The page has blocks that begin with ```console: a line with `$ ` is a command, the lines below it are its output. What
a block of ```python prints on stdout stands in a block of ```text below it.
The recordings are the French sample prompts, as sound files and a metadata.csv: those of the training split, and the
others for the test; the old data are the English ones. Run files are the page's YAML blocks, whose first line is
`# NAME`. --keep leaves the page as it is and only fails where a command does.
"""

import argparse
import csv
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "your_language.md"
PROMPTS = ROOT / "examples" / "voice_prompts" / "data"
LINKED = ("accelerate_configs", "ds_configs", "examples", "finetune", "scripts", "constraints.txt", "pyproject.toml")
BLOCK = re.compile(
    r"^(`{3,})console\n(.*?)^\1$|^```python\n(.*?)^```$(?:\n\n```text\n.*?^```$)?", re.MULTILINE | re.DOTALL
)
RUN_FILE = re.compile(r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def write_recordings(folder: Path, language: str, splits: tuple[str, ...]) -> None:
    """Write the prompts of a language as files and a metadata.csv with the columns file_name and text."""
    folder.mkdir(parents=True)
    with (folder / "metadata.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("file_name", "text"))
        for shard in (shard for split in splits for shard in sorted(PROMPTS.glob(f"{split}-*.parquet"))):
            for row in pq.read_table(shard).to_pylist():
                if row["language"] == language:
                    (folder / row["audio"]["path"]).write_bytes(row["audio"]["bytes"])
                    table.writerow((row["audio"]["path"], row["text"]))


def write_all_recordings(folder: Path) -> None:
    """Write the three folders of the page."""
    write_recordings(folder / "recordings", "fr", ("train",))
    write_recordings(folder / "test_recordings", "fr", ("validation", "test"))
    write_recordings(folder / "old_recordings", "en", ("train", "validation", "test"))


def prepare(folder: Path, page: str) -> None:
    """Write what the commands of the page take for granted: recordings, run files, and this project beside them."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    write_all_recordings(folder)
    for name, text in RUN_FILE.findall(page):
        (folder / name).write_text(text, encoding="utf-8")


def commands_of(block: re.Match[str]) -> list[str]:
    """Return the commands of a block of the page; a block of Python is one."""
    if block[3] is not None:
        return [f"python -c {shlex.quote(block[3])}"]
    return [line[2:] for line in block[2].splitlines() if line.startswith("$ ")]


def all_commands(page: str) -> list[str]:
    """Return the commands of all blocks, in their order."""
    return [command for block in BLOCK.finditer(page) for command in commands_of(block)]


def run_command(
    command: str, folder: Path, stderr: int | None = subprocess.STDOUT
) -> subprocess.CompletedProcess[bytes]:
    """Run a command of the page in the folder that `prepare` made."""
    python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": python, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        check=False,
    )


def on_screen(printed: bytes) -> list[str]:
    """Return the lines that stay on a terminal, without those that are empty."""
    lines = (ESCAPES.sub("", line.rpartition("\r")[2].rstrip()) for line in printed.decode().split("\n"))
    return [line for line in lines if line]


def output_of(command: str, folder: Path, stderr: int | None = subprocess.STDOUT) -> str:
    """Return what a command of the page prints, without this machine's paths.

    Raises:
        SystemExit: it fails.
    """
    print(f"$ {command}", file=sys.stderr, flush=True)
    done = run_command(command, folder, stderr)
    text = "".join(f"{line}\n" for line in on_screen(done.stdout))
    text = text.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{text}")
    return text


def with_outputs(page: str, folder: Path) -> str:
    """Run a page's commands in `folder`; return the page with what they print.

    Raises:
        SystemExit: one of them fails.
    """

    def run(block: re.Match[str]) -> str:
        commands = commands_of(block)
        if block[3] is not None:
            return f"```python\n{block[3]}```\n\n```text\n{output_of(commands[0], folder, None)}```"
        text = "".join(f"$ {one}\n{output_of(one, folder)}" for one in commands)
        fence = "`" * (1 + max([2, *map(len, re.findall(r"^`+", text, re.MULTILINE))]))
        return f"{fence}console\n{text}{fence}"

    return BLOCK.sub(run, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument(
        "--recordings", type=Path, metavar="DIR", help="only write the three folders of recordings there"
    )
    arguments = parser.parse_args()
    if arguments.recordings:
        write_all_recordings(arguments.recordings)
        return 0
    page = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.folder or Path(temporary) / "work").resolve()
        folder.mkdir(parents=True)
        prepare(folder, page)
        written = with_outputs(page, folder)
    if not arguments.keep:
        PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
