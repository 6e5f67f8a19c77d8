"""Documents that are made from code, or name what the code has, stay true."""

import re
import subprocess
import sys

from conftest import ROOT


def test_the_configuration_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "write_configuration_docs.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_lists_every_strategy_and_none_that_is_not_there():
    from finetune.strategies.accelerate_files import strategy_names

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("## Memory strategies") :]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == strategy_names()


def test_files_that_the_readme_names_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(
        re.findall(r"(?<![\w/])((?:finetune|scripts|accelerate_configs|ds_configs|docs|examples)/[\w./-]+\w)", readme)
    )
    missing = [path for path in named if not (ROOT / path).exists() and "NAME" not in path and "FILE" not in path]
    assert len(named) > 10
    assert not missing
