"""Shares a trained model on the Hugging Face Hub, with a model card that is filled from the run.

    python -m finetune.push_to_hub --model RUN_DIR --repo OWNER/NAME            shows what would be uploaded; asks nobody
    python -m finetune.push_to_hub --model RUN_DIR --repo OWNER/NAME --yes      uploads it, in one commit

RUN_DIR: a run's output directory. A .nemo file or an exported Hugging Face directory can be given too; its card says less. A new
repository is private unless --public is given. The token is that of `hf auth login` or HF_TOKEN. See docs/sharing.md.
"""

import argparse
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from finetune.errors import UserError
from finetune.logs import print_error, set_up_logging
from finetune.tools.publishing.base import with_answers
from finetune.tools.publishing.card import make_card
from finetune.tools.publishing.facts import (
    LANGUAGE,
    Data,
    Facts,
    facts_of_run,
    facts_without_run,
    is_hub_data_form,
    run_of,
)
from finetune.tools.publishing.hub_upload import licence_from_hub, need_token, push
from finetune.tools.publishing.private import ORIGINS, read_nemo_config, read_nemo_yaml
from finetune.tools.publishing.uploads import Upload, add_folder, add_nemo, add_records, check_texts

FORMATS = {"nemo": {"nemo"}, "hf": {"hf"}, "both": {"nemo", "hf"}, "adapter": {"adapter"}}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m finetune.push_to_hub",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, type=Path, metavar="RUN_DIR")
    parser.add_argument("--repo", required=True, metavar="OWNER/NAME")
    parser.add_argument("--format", choices=tuple(FORMATS), default="nemo", help="what is uploaded (default: nemo)")
    parser.add_argument(
        "--hf-dir",
        type=Path,
        metavar="DIR",
        help="a Hugging Face export of the model, for --format hf or both (default: it is made)",
    )
    seen = parser.add_mutually_exclusive_group()
    seen.add_argument("--private", action="store_true", help="make a new repository private (the default)")
    seen.add_argument(
        "--public", action="store_true", help="make a new repository public; needed for one that is public already"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="branch, made where it is not there (default: main)")
    parser.add_argument(
        "--language",
        nargs="+",
        metavar="CODE",
        help="languages, such as en fr (default: those that the run measured or names)",
    )
    parser.add_argument(
        "--base-model", metavar="OWNER/NAME", help="hub name of the base model, where the run had it as a file"
    )
    parser.add_argument(
        "--base-licence",
        "--base-license",
        metavar="ID",
        help="licence of the base model as the Hub names it, such as cc-by-4.0",
    )
    parser.add_argument(
        "--licence", "--license", metavar="ID", help="licence of this model (default: that of the base)"
    )
    parser.add_argument(
        "--data-name",
        nargs="+",
        metavar="NAME",
        help="what the training data is called, in place of file names; OWNER/NAME is a data set on the Hub",
    )
    parser.add_argument("--message", default="Upload the model and its card", help="of the commit")
    parser.add_argument(
        "--yes", action="store_true", help="upload; without it nothing is asked of the Hub and nothing sent"
    )
    return parser.parse_args(argv)


def gather(arguments: argparse.Namespace, upload: Upload, folder: Path) -> tuple[Facts, dict[str, Any], set[str]]:
    """Puts the model's files into the upload; what is known of the model, its NeMo configuration and the formats.

    Raises:
        UserError: the model, or a format that was asked for, is not there.
    """
    model: Path = arguments.model
    if not model.exists():
        raise UserError(f"--model: there is no {model} (looked in {Path.cwd()}).")
    run = run_of(model)
    facts = facts_of_run(run) if run is not None else facts_without_run()
    formats, hf_dir = set(FORMATS[arguments.format]), arguments.hf_dir
    if run is None and model.is_dir() and (model / "config.json").is_file() and not (model / "model.nemo").is_file():
        if "nemo" in formats and arguments.format != "nemo":
            raise UserError(f"--format: {model} is a Hugging Face directory without a .nemo. Leave --format out.")
        formats, hf_dir = {"hf"}, hf_dir or model
    facts.base = with_answers(facts.base, arguments.base_model, arguments.base_licence)
    if arguments.base_model:
        facts.unsure = [text for text in facts.unsure if "--base-model" not in text]
    nemo = model if model.is_file() else model / "model.nemo"
    architecture = read_nemo_config(nemo) if nemo.is_file() else {}
    if "nemo" in formats:
        if not nemo.is_file():
            raise UserError(
                f"--model: {model} holds no model.nemo. Name a run's output directory, a .nemo file or a Hugging Face directory."
            )
        add_nemo(upload, nemo, arguments.repo.rpartition("/")[2], facts.secrets)
    if "hf" in formats:
        hf_dir = hf_dir or hugging_face_directory(model, folder)
        add_folder(upload, hf_dir, "--hf-dir", "config.json", facts.base.hub, facts.secrets)
        architecture = architecture or read_nemo_yaml(hf_dir / "nemo_config.yaml")
    if "adapter" in formats:
        if facts.base.through and not arguments.base_model:  # the adapter fits that run's model only, and not its base
            facts.base = replace(facts.base, name=facts.base.through, hub=None)
        if facts.base.hub is None:
            facts.unsure.append(
                f"the adapter is of use with its base model only ({facts.base.name}): share that too, and name it with --base-model OWNER/NAME"
            )
        add_folder(upload, model / "adapter", "--format adapter", "adapter_config.json", facts.base.hub, facts.secrets)
    return facts, architecture, formats


def hugging_face_directory(model: Path, folder: Path) -> Path:
    """The model in Hugging Face's format, made and compared with the .nemo, where no such directory was given.

    Args:
        model: as `--model`.
        folder: for what is made; it goes after the upload.

    Raises:
        UserError: the format cannot hold this model, or what was made gives other texts.
    """
    from finetune.tools.export.hugging_face import TOLERANCE, describe_export, export_hugging_face

    print("converting the model for transformers, and comparing it ...", file=sys.stderr)
    output = folder / "hf"
    samples, agreement = export_hugging_face(str(model), output)
    print(describe_export(output, samples, agreement, TOLERANCE, "float32"), file=sys.stderr)
    return output


def rename_data(facts: Facts, names: list[str]) -> None:
    """What the user calls the training data, in place of the names of files, in the card and in the run's configuration; the same for
    evaluation data and for the texts of new pieces (`model.tokenizer`) from the same place."""
    model = facts.config.get("model") or {}
    old = list(dict.fromkeys(source.name for source in facts.data.get("train", [])))
    if len(old) == len(names):
        new = dict(zip(old, names))
        for sources in facts.data.values():
            for source in sources:
                if source.name in new:
                    source.name = new[source.name]
                    source.hub = source.name if is_hub_data_form(source.name) else None
        data = facts.config.get("data") or {}
        data.update({split: _renamed(data[split], new) for split in facts.data if split in data})
        if "tokenizer" in model:
            model["tokenizer"] = _renamed(model["tokenizer"], new)
    else:
        facts.data["train"] = [Data(name, hub=name if is_hub_data_form(name) else None) for name in names]
        if facts.config.get("data"):
            facts.config["data"]["train"] = list(names)
        tokenizer = model.get("tokenizer")
        if isinstance(tokenizer, dict):
            for key in ORIGINS:
                if _renamed(tokenizer.get(key), dict.fromkeys(old, "")) != tokenizer.get(key):
                    tokenizer[key] = list(names)
    facts.unsure = [text for text in facts.unsure if "--data-name" not in text]


def _renamed(value: Any, new: dict[str, str]) -> Any:
    """Sources of a configuration, or what `model.tokenizer` says, under other names."""
    if isinstance(value, list):
        return [_renamed(inner, new) for inner in value]
    if isinstance(value, dict):
        named = ("path", *ORIGINS)
        return {key: _renamed(inner, new) if key in named else inner for key, inner in value.items()}
    return new.get(value, value) if isinstance(value, str) else value


def languages_of(arguments: argparse.Namespace, facts: Facts) -> list[str]:
    """Languages for the card.

    Raises:
        UserError: one that the Hub would not take.
    """
    wrong = [code for code in arguments.language or [] if not LANGUAGE.fullmatch(code)]
    if wrong:
        raise UserError(
            f"--language: {', '.join(wrong)}: a code of two or three letters is expected, such as en or yue."
        )
    return arguments.language or facts.languages


def show(upload: Upload, card: str, arguments: argparse.Namespace, facts: Facts, missing: list[str]) -> None:
    """Prints what would be uploaded and the line to type."""
    state = "public" if arguments.public else "private"
    print(f"to {arguments.repo}, branch {arguments.revision or 'main'}; a new repository would be {state}\n")
    for name in upload.files:
        print(f"  {readable(upload.size(name)):>10}  {name}")
    for note in upload.notes:
        print(f"  note: {note}")
    print(f"\nREADME.md:\n\n{card}")
    for text in facts.unsure:
        print(f"look at this: {text}")
    if facts.base.licence and facts.base.licence_from:
        print(f"licence of the base model: {facts.base.licence}, from {facts.base.licence_from}")
    for text in missing:
        print(f"missing: {text}")
    print("\nNothing was uploaded and the Hub was not asked. To upload:\n")
    asked = [] if not missing or facts.base.hub else ["--base-licence", "ID"]
    print(f"    {command_line([*(sys.argv[1:] if arguments.argv is None else arguments.argv), *asked])}")


def command_line(argv: list[str]) -> str:
    """The line to type."""
    return shlex.join(["python", "-m", "finetune.push_to_hub", *argv, "--yes"])


def readable(size: int) -> str:
    """Bytes in the unit that suits."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def missing_licence(facts: Facts) -> list[str]:
    """What has to be known of licences before anything is uploaded."""
    base = facts.base
    if base.random or base.licence:
        return []
    if base.hub:
        return [
            f"the licence of {base.hub} (no card of it in the cache). With --yes it is read from the Hub; or give --base-licence ID"
        ]
    what = f"the licence of the base model {base.name}" if base.name else "the base model and its licence"
    return [
        f"{what}: there is no model card with it. Give --base-licence ID, and --base-model OWNER/NAME where the Hub has it"
    ]


def warnings_of(facts: Facts) -> list[str]:
    """What the base model's licence forbids or asks for."""
    licence = facts.base.licence or ""
    if "-nd" in licence:
        return [f"the base model's licence {licence} does not allow to share changed versions"]
    return []


def main(argv: list[str] | None = None) -> int:
    """Shows or uploads; returns the exit code."""
    set_up_logging()
    arguments = parse_arguments(argv)
    arguments.argv = argv
    try:
        with tempfile.TemporaryDirectory() as folder:
            return share(arguments, Path(folder))
    except UserError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:  # `| head`: nobody reads on, and Python would say so once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def share(arguments: argparse.Namespace, folder: Path) -> int:
    """Gathers, makes the card, and shows or uploads both; `folder` is for files that are made on the way."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(arguments.repo)
    except HFValidationError as error:
        raise UserError(f"--repo: {error}") from error
    if arguments.repo.count("/") != 1:
        raise UserError(f"--repo: OWNER/NAME is expected, found {arguments.repo}.")
    if arguments.yes:
        need_token()
    upload = Upload()
    facts, architecture, formats = gather(arguments, upload, folder)
    languages = languages_of(arguments, facts)
    if arguments.data_name:
        rename_data(facts, arguments.data_name)
    run = run_of(arguments.model)
    if run is not None:
        add_records(upload, run, facts)
    licence = arguments.licence and arguments.licence.lower()
    missing = missing_licence(facts)
    if arguments.yes and missing and facts.base.hub:
        facts.base = licence_from_hub(facts.base, facts.secrets)
        missing = missing_licence(facts)
        missing = missing and [f"the card of {facts.base.hub} on the Hub names no licence. Give --base-licence ID"]
    card = make_card(
        facts,
        arguments.repo,
        formats,
        architecture=architecture,
        licence=licence,
        languages=languages,
        revision=arguments.revision,
    )
    upload.files = {"README.md": str(card).encode(), **upload.files}
    for text in warnings_of(facts):
        print(f"warning: {text}", file=sys.stderr)
    check_texts(upload, facts.secrets)
    if not arguments.yes:
        show(upload, str(card), arguments, facts, missing)
        return 0
    if missing:
        raise UserError(f"missing: {'; '.join(missing)}. Nothing was uploaded.")
    for text in facts.unsure:
        print(f"note: {text}", file=sys.stderr)
    upload.finish(folder, facts.secrets)
    done = push(
        upload,
        arguments.repo,
        private=not arguments.public,
        revision=arguments.revision,
        message=arguments.message,
        secrets=facts.secrets,
    )
    print(
        f"{done.address}  ({'private' if done.private else 'public'}, {len(upload.files)} files, commit {done.commit[:12]})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
