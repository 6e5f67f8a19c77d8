"""Documents that are made from code, or name what the code has, stay true."""

import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def test_the_configuration_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "docs" / "write_configuration_docs.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = "callbacks|config|data|evaluation|losses|models|rank_monitor|security|strategies|tools|training"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_pages_list_every_strategy_and_none_that_is_not_there():
    from finetune.paths import strategy_names

    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    table = page[page.index("<!-- strategies:") : page.index("<!-- end of strategies -->")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == strategy_names()
    # Each has a measured row, or is named as needing a GPU.
    page = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    measured = page[page.index("<!-- measured:") : page.index("<!-- end of measured -->")]
    rows = re.findall(r"^\| `(\w+)` \|", measured, re.MULTILINE)
    lacking = re.findall(r"`(\w+)`", measured[measured.index("Need a GPU:") :])
    assert sorted(rows + lacking) == strategy_names()


def test_the_readme_is_short_and_names_strategies_that_there_are():
    from finetune.paths import strategy_names

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    table = readme[readme.index("## Strategies") : readme.index("## During and after")]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(rows) == 10
    assert set(rows) <= {*strategy_names()}
    assert f"has all {len(strategy_names())}:" in table


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders = "finetune|scripts|accelerate_configs|ds_configs|docs|examples"
    named = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]+\w)", text))
    made = ("NAME", "FILE")
    assert not [path for path in named if not (ROOT / path).exists() and not any(word in path for word in made)]
    assert page.name != "README.md" or page.parent != ROOT or len(named) > 10


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(rf"(?<![\w/.-])((?:{ROOMS})/\w[\w/]*(?:\.\w+)?)", text))
    assert len(named) > 12
    package = ROOT / "finetune"
    assert not [path for path in named if not ((package / path).exists() or (package / f"{path}.py").exists())]


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_of_a_page_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_index_names_every_page_and_the_benchmarks_every_result():
    linked = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted({*linked}), "a page stands twice"
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert {*linked} == {*pages, "../CONTRIBUTING.md"}
    results = {path.name for path in (ROOT / "docs" / "benchmarks").glob("*.json")}
    text = (ROOT / "docs" / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert results == set(re.findall(r"\[(\w+\.json)\]", text))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_of_a_page_and_their_options_exist(page):
    """Each `parakeet-finetune NAME` and `python -m finetune.NAME`, in code blocks and in running text."""
    from finetune.cli import COMMANDS, load

    modules = {module: name for name, (module, _) in COMMANDS.items()}
    text = page.read_text(encoding="utf-8")
    for start, rest in re.findall(r"(parakeet-finetune [a-z][\w-]*|python -m finetune\.\w+)((?:[^\n`]|\\\n)*)", text):
        word = start.split()[-1]
        name = modules.get(word, word)
        if name in ("COMMAND", "NAME", "completion", "finetune.NAME"):
            continue
        assert name in COMMANDS, start
        known = set(re.findall(r"--[\w-]+", load(name).make_parser().format_help()))
        used = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.partition("#")[0].partition(" | ")[0]))
        assert used <= known, f"{start}: {used - known}"


# ---- strategies.md and full_dataset.md ------------------------------------------------------------------------------

LABELS = ["Background", "Use", "Requirements", "How it works", "Excludes", "Limits"]
GUIDES = ("docs/strategies.md", "docs/full_dataset.md")
LAUNCHERS = ("accelerate", "bash", "deepspeed", "python", "torchrun")


def sections(text: str) -> dict[str, str]:
    """What stands under each heading of the third level whose title is a plain name; a name that comes twice fails."""
    parts = re.split(r"^(#{2,3}) (.+)$", text, flags=re.MULTILINE)
    found: dict[str, str] = {}
    for level, title, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if level == "###" and re.fullmatch(r"\w+", title):
            assert title not in found, f"two sections {title}"
            found[title] = body
    return found


def commands(guide: str) -> list[str]:
    """Command lines of a document, in code blocks and in running text."""
    text = (ROOT / guide).read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    running = [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    lines = [line.strip() for line in [*blocks.splitlines(), *running]]
    return [line for line in lines if " " in line and line.split()[0] in LAUNCHERS]


def named_strategies(words: list[str]) -> list[str]:
    """Strategies of a command: by `--config_file`, by `--strategy` and by compare_strategies' list."""
    found = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, _, value = word.partition("=")
        value = value or following
        if option == "--config_file":
            found.append(Path(value).stem)
        if option == "--strategy":
            found.append(value)
        if option == "--strategies":
            found += re.split(r"[,+]", value)
    return found


def test_every_strategy_has_one_section_with_every_label():
    from finetune.paths import strategy_names

    found = sections((ROOT / "docs" / "strategies.md").read_text(encoding="utf-8"))
    assert sorted(found) == strategy_names()
    for name, body in found.items():
        assert re.findall(r"^\*\*([^*]+)\*\*", body, re.MULTILINE) == LABELS, name
        assert re.search(r"^\*\*Use\*\*\n\n```bash\n.*\n```", body, re.MULTILINE), f"{name}: a command in one line"
        uses = re.findall(r"^(?:accelerate|deepspeed|torchrun) .*", body, re.MULTILINE)
        assert name in named_strategies(shlex.split(uses[0])), name


@pytest.mark.parametrize("guide", GUIDES)
def test_commands_name_files_and_strategies_that_exist(guide):
    from finetune.paths import strategy_names

    lines = commands(guide)
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line)
        for word in words:
            path = word.rpartition("=")[2]
            if re.match(r"(finetune|scripts|accelerate_configs|ds_configs|docs|examples)/", path):
                assert (ROOT / path).is_file(), line
        if "-m" in words:
            assert (ROOT / (words[words.index("-m") + 1].replace(".", "/") + ".py")).is_file(), line
        assert set(named_strategies(words)) <= {*strategy_names()}, line
    text = (ROOT / guide).read_text(encoding="utf-8")
    assert set(re.findall(r"--strategy[ =](\w+)", text)) <= {*strategy_names()}
    for target in re.findall(r"\]\(([^)#]+\.\w+)\)", text):
        assert (ROOT / "docs" / target).exists(), target


@pytest.mark.parametrize("guide", GUIDES)
def test_trainings_that_the_guides_start_are_accepted(guide, monkeypatch):
    """Each command's run file, strategies and settings make a configuration in which nothing excludes itself."""
    from finetune.config.compatibility import find_conflicts
    from finetune.config.load import load_config
    from finetune.strategies.strategy import resolve_precision, resolve_strategy

    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(name)
    trainings = [line for line in commands(guide) if "train.py" in line or "run_training.sh" in line]
    assert len(trainings) > 5
    for line in trainings:
        words = shlex.split(line)
        option = dict(itertools.pairwise(words))
        deepspeed_file = option.get("--deepspeed")
        strategy = resolve_strategy(named_strategies(words), deepspeed_file and str(ROOT / deepspeed_file))
        start = next(i for i, word in enumerate(words) if word.endswith(("train.py", "run_training.sh")))
        settings = [word for word in words[start:] if re.match(r"(model|data|training)\.\w+", word)]
        config, _ = load_config(ROOT / option["--config"], strategy.names, settings)
        resolve_precision(config.training.bf16, config.training.fp16, strategy)
        several = int(option.get("--nproc_per_node") or option.get("--num_processes") or 1) > 1
        engine = "ddp" if several and strategy.engine == "none" else strategy.engine
        assert not find_conflicts(config, engine, gpu=True), line


@pytest.mark.parametrize("guide", GUIDES)
def test_settings_that_the_guides_name_exist(guide):
    from finetune.config.schema import schema_fields

    text = (ROOT / guide).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./])((?:model|data|training)\.[a-z]\w+)\b(?!\()", text)) - {
        "model.nemo",
        "data.md",
    }
    assert len(named) > 20
    assert not named - schema_fields().keys()


# ---- data.md --------------------------------------------------------------------------------------------------------


def test_settings_and_examples_of_the_data_page(tmp_path):
    from finetune.config.load import load_config
    from finetune.config.schema import schema_fields

    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./])((?:model|data|training)\.[a-z]\w+)\b(?!\()", text))
    assert len(named) > 20
    assert not named - schema_fields().keys()
    for line in commands("docs/data.md"):
        words = shlex.split(line)
        file = words[words.index("-m") + 1].replace(".", "/") + ".py" if "-m" in words else words[1]
        assert (ROOT / file).is_file(), line
    examples = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    for number, example in enumerate(examples):
        run_file = tmp_path / f"{number}.yaml"
        train = "" if "train:" in example else "\n  train: my_data/train.jsonl"
        head = "model: {name: base.nemo}\n" + ("" if "data:" in example else f"data:{train}\n")
        run_file.write_text(head + example.replace("data:\n", f"data:{train}\n"))
        config, _ = load_config(run_file, [], ["training.output_dir=runs/x"])
        assert config.data.train


# ---- plan.md --------------------------------------------------------------------------------------------------------


def test_commands_options_and_settings_of_the_plans_page(capsys):
    from finetune import plan
    from finetune.config.schema import schema_fields
    from finetune.tools.planning.gpus import card_named, card_with_memory

    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"--[a-z-]+\b", text)) <= known | {"--dry-run"}
    lines = [line for line in commands("docs/plan.md") if "finetune.plan" in line]
    assert len(lines) > 2
    for line in lines:
        option = dict(itertools.pairwise(shlex.split(line)))
        assert (ROOT / option["--config"]).is_file(), line
        assert card_named(option["--gpu"]) if "--gpu" in option else card_with_memory(option["--gpu-memory"])
    named = set(re.findall(r"(?<![\w./])((?:model|data|training)\.[a-z]\w+)\b(?!\()", text))
    assert len(named) > 5
    assert not named - schema_fields().keys()


# ---- doctor.md ------------------------------------------------------------------------------------------------------


def test_commands_and_settings_of_the_doctors_page():
    from finetune.config.schema import schema_fields

    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    lines = commands("docs/doctor.md")
    assert len(lines) > 4
    for line in lines:
        words = shlex.split(line)
        file = words[words.index("-m") + 1].replace(".", "/") + ".py" if "-m" in words else words[1]
        assert (ROOT / file).is_file(), line
    named = set(re.findall(r"(?<![\w./])((?:data|training)\.[a-z]\w+)\b", text))
    assert not named - schema_fields().keys()


# ---- evaluation.md --------------------------------------------------------------------------------------------------


def test_commands_options_and_settings_of_the_evaluations_page(capsys):
    from finetune import evaluate
    from finetune.config.schema import schema_fields
    from finetune.data.normalization import SCORE_NORMALIZATIONS

    text = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(re.findall(r"(?<![\w-])--[a-z-]+\b", text)) <= known | {"--words", "--shared", "--check"}
    lines = [line for line in commands("docs/evaluation.md") if "finetune.evaluate" in line]
    assert len(lines) == 5
    for line in lines:
        evaluate.parse_arguments(shlex.split(line)[3:])
    named = set(re.findall(r"(?<![\w./])((?:model|data|training)\.[a-z]\w+)\b(?!\()", text))
    assert len(named) > 4
    assert not named - schema_fields().keys()
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(SCORE_NORMALIZATIONS)
    for path in re.findall(r"`python (scripts/\S+?)`?[ `]", text):
        assert (ROOT / path).is_file(), path


# ---- your_language.md -----------------------------------------------------------------------------------------------


@pytest.fixture
def walk_through(tmp_path, monkeypatch):
    """The functions of the script that runs the page, in the folder that it prepares."""
    script = runpy.run_path(str(ROOT / "scripts" / "docs" / "write_your_language.py"))
    script["prepare"](tmp_path, script["PAGE"].read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    return script


def test_the_commands_of_the_walk_through_parse(walk_through):
    from finetune.cli import load
    from finetune.train import parse_arguments

    page = walk_through["PAGE"].read_text(encoding="utf-8")
    commands = walk_through["all_commands"](page)
    assert [line for line in commands if not line.startswith("python -c")] == re.findall(r"(?m)^\$ (.+)$", page)
    assert (len(commands), page.count("\n```text\n")) == (12, 1)
    for line in commands:
        first, second, *words = shlex.split(line)
        if first == "bash":
            assert second == "scripts/run_training.sh"
            parse_arguments(words)
        elif first == "python":
            compile(words[0], "the page", "exec")
        else:
            load(second).make_parser().parse_intermixed_args(words)
        assert all(Path(word).is_file() for word in words if re.match(r"(test_)?recordings/|my_run", word)), line


def test_commands_and_python_of_the_page_are_run(walk_through, tmp_path):
    page = """```console
$ printf '50%%\\r100%%\\r    \\rdone\\n'; printf '```python\\n1/0\\n```\\n' >&2; pwd
old
```

```python
import sys
print("one"), sys.stderr.write("a bar")
```

```text
old
```
"""
    new = walk_through["with_outputs"](page, tmp_path)
    assert new.splitlines()[2:8] == ["done", "```python", "1/0", "```", str(tmp_path), "````"]
    assert new.endswith('sys.stderr.write("a bar")\n```\n\n```text\none\n```\n')
    assert walk_through["with_outputs"](new, tmp_path) == new
    with pytest.raises(SystemExit, match="exit code 1"):
        walk_through["with_outputs"]("```python\n1 / 0\n```", tmp_path)


def test_output_with_fences_of_its_own_ends_no_block():
    """All headings of the walk-through are headings; those of the model card that a command prints are not."""
    headings, fence = [], ""
    for line in (ROOT / "docs" / "your_language.md").read_text(encoding="utf-8").splitlines():
        backticks = re.match(r"`{3,}", line)
        if fence:
            fence = "" if line == fence else fence
        elif backticks:
            fence = backticks[0]
        elif line.startswith("## "):
            headings.append(line[3:])
    assert not fence
    assert [name.partition(".")[0] for name in headings[1:-1]] == [str(n) for n in range(1, 11)]


def test_the_run_files_of_the_walk_through_name_what_its_first_step_makes(walk_through, capsys):
    from finetune.cli import main
    from finetune.config.compatibility import find_conflicts
    from finetune.config.load import load_config
    from finetune.data.run_file import open_sources

    page = walk_through["PAGE"].read_text(encoding="utf-8")
    for line in re.findall(r"^\$ parakeet-finetune (split .+)$", page, re.MULTILINE):
        assert main(shlex.split(line)) == 0, capsys.readouterr().err
    names = re.findall(r"^```yaml\n# (\S+)$", page, re.MULTILINE)
    assert len(names) == page.count("```yaml") == 2
    for name, strategies in zip(names, ([], ["recommended"]), strict=True):
        config, _ = load_config(Path(name), strategies, [])
        assert not find_conflicts(config, "none", gpu=True)
        clips = {key: sum(source.clips or 0 for source in sources) for key, sources in open_sources(config).items()}
        assert clips.keys() == {"train", "validation", "test", "guard"}
        assert clips["train"] > 800
        assert min(clips["validation"], clips["guard"]) >= 30
