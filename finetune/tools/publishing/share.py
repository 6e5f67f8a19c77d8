"""The way from a run's folder to what is shown or uploaded."""

import argparse
import shlex
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from finetune.errors import UserError
from finetune.security.documents import read_settings
from finetune.tools.publishing.base import is_hub_data_form, with_answers
from finetune.tools.publishing.card import make_card
from finetune.tools.publishing.exports import exports_of
from finetune.tools.publishing.facts import LANGUAGE, Data, Facts, facts_of
from finetune.tools.publishing.hub_upload import licence_from_hub, need_token, push
from finetune.tools.publishing.private import ORIGINS, read_nemo_config
from finetune.tools.publishing.uploads import Upload
from finetune.tools.report.read import is_run


@dataclass
class Share:
    """A model that is to be shared."""

    upload: Upload
    facts: Facts
    formats: set[str]
    """Which of nemo, hf and adapter are uploaded."""
    architecture: dict[str, Any] = field(default_factory=dict)
    """NeMo's configuration of the model; empty where it is not at hand."""


def share(arguments: argparse.Namespace, argv: list[str]) -> None:
    """Gather the files, make the card, and show or upload both.

    Args:
        arguments: of `python -m finetune.push_to_hub`.
        argv: the words that they were read from, for the line to type.

    Raises:
        UserError: wrong arguments, something private in a file, or the Hub refuses.
    """
    check_arguments(arguments)
    if arguments.yes:
        need_token()
    with tempfile.TemporaryDirectory() as name:  # for files that are made on the way
        folder = Path(name)
        found = gather(arguments, folder)
        upload, facts = found.upload, found.facts
        if arguments.data_name:
            rename_data(facts, arguments.data_name)
        upload.add_records(facts)
        missing = missing_licence(facts)
        if arguments.yes and missing and facts.base.hub:
            facts.base = licence_from_hub(facts.base, facts.base.hub, facts.secrets)
            still_missing = f"the card of {facts.base.hub} on the Hub names no licence. Give --base-licence ID"
            missing = still_missing if missing_licence(facts) else None
        card = make_card(
            facts,
            arguments.repo,
            found.formats,
            architecture=found.architecture,
            licence=arguments.licence and arguments.licence.lower(),
            languages=arguments.language or facts.languages,
            revision=arguments.revision,
        )
        upload.files = {"README.md": str(card).encode(), **upload.files}
        if "-nd" in (licence := facts.base.licence or ""):
            text = f"the base model's licence {licence} does not allow to share changed versions"
            print(f"warning: {text}", file=sys.stderr)
        upload.check_texts(facts.secrets)
        if not arguments.yes:
            show(upload, str(card), arguments, argv, facts, missing)
            return
        if missing:
            raise UserError(f"missing: {missing}. Nothing was uploaded.")
        for text in facts.unsure:
            print(f"note: {text}", file=sys.stderr)
        upload.copy_private_nemo(folder, facts.secrets)
        print(push(upload, arguments, facts.secrets))


def check_arguments(arguments: argparse.Namespace) -> None:
    """Check names that the Hub would refuse.

    Raises:
        UserError: the repository, a language or the model's place is wrong.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(arguments.repo)
    except HFValidationError as error:
        raise UserError(f"--repo: {error}") from error
    if arguments.repo.count("/") != 1:
        raise UserError(f"--repo: OWNER/NAME is expected, found {arguments.repo}.")
    wrong = [code for code in arguments.language or [] if not LANGUAGE.fullmatch(code)]
    if wrong:
        raise UserError(
            f"--language: {', '.join(wrong)}: a code of two or three letters is expected, such as en or yue."
        )
    if not arguments.model.exists():
        raise UserError(f"--model: there is no {arguments.model} (looked in {Path.cwd()}).")


def gather(arguments: argparse.Namespace, folder: Path) -> Share:
    """Return the model's files and what is known of it; a Hugging Face export is made in `folder` where needed.

    Raises:
        UserError: a format that was asked for is not there.
    """
    model, hf_dir = arguments.model, arguments.hf_dir
    facts, upload = facts_of(model), Upload()
    found = Share(upload, facts, {"nemo", "hf"} if arguments.format == "both" else {arguments.format})
    if not is_run(model) and (model / "config.json").is_file() and not (model / "model.nemo").is_file():
        if arguments.format == "both":
            raise UserError(f"--format: {model} is a Hugging Face directory without a .nemo. Leave --format out.")
        found.formats, hf_dir = {"hf"}, hf_dir or model
    facts.exports = exports_of(model, arguments.export)
    for export in facts.exports:
        if export.uploaded:
            upload.add_export(export)
    facts.base = with_answers(facts.base, arguments.base_model, arguments.base_licence)
    if arguments.base_model:
        facts.unsure = [text for text in facts.unsure if "--base-model" not in text]
    nemo = model if model.is_file() else model / "model.nemo"
    if nemo.is_file():
        found.architecture = read_nemo_config(nemo)
    if "nemo" in found.formats:
        if not nemo.is_file():
            raise UserError(
                f"--model: {model} holds no model.nemo. Name a run's output directory, a .nemo file or a "
                "Hugging Face directory."
            )
        upload.add_nemo(nemo, arguments.repo.rpartition("/")[2], facts.secrets)
    if "hf" in found.formats:
        hf_dir = hf_dir or hugging_face_directory(model, folder)
        upload.add_folder(hf_dir, "--hf-dir", "config.json", facts.base.hub, facts.secrets)
        kept = hf_dir / "nemo_config.yaml"
        if not found.architecture and kept.is_file():
            found.architecture = read_settings(kept, "--hf-dir")
    if "adapter" in found.formats:
        if facts.base.through and not arguments.base_model:  # the adapter fits that run's model only, and not its base
            facts.base = replace(facts.base, name=facts.base.through, hub=None)
        base = facts.base
        if base.hub is None:
            facts.unsure.append(
                f"the adapter is of use with its base model only ({base.name}): share that too, and name it with "
                "--base-model OWNER/NAME"
            )
        upload.add_folder(model / "adapter", "--format adapter", "adapter_config.json", base.hub, facts.secrets)
    return found


def hugging_face_directory(model: Path, folder: Path) -> Path:
    """Export the model in Hugging Face's format and compare it with the .nemo.

    Raises:
        UserError: the format cannot hold this model, or the export gives other texts.
    """
    from finetune.tools.export.hugging_face import export_hugging_face

    print("converting the model for transformers, and comparing it ...", file=sys.stderr)
    print(export_hugging_face(str(model), folder / "hf"), file=sys.stderr)
    return folder / "hf"


def rename_data(facts: Facts, names: list[str]) -> None:
    """Give the training data the user's names in place of those of files, in the card and in the run's configuration.

    With one name for each source, evaluation data and the texts of new pieces (`model.tokenizer`) from the same
    place get them too.
    """
    model, data = facts.run.config.get("model", {}), facts.run.config.get("data", {})
    tokenizer = model.get("tokenizer")
    old = list(dict.fromkeys(source.name for source in facts.data.get("train", [])))
    if len(old) == len(names):
        new = dict(zip(old, names))
        for source in (source for sources in facts.data.values() for source in sources if source.name in new):
            source.name = new[source.name]
            source.hub = source.name if is_hub_data_form(source.name) else None
        data.update({split: _renamed(data[split], new) for split in facts.data if split in data})
        model["tokenizer"] = _renamed(tokenizer, new)
    else:
        facts.data["train"] = [Data(name, hub=name if is_hub_data_form(name) else None) for name in names]
        data["train"] = list(names)
        made_from = tokenizer if isinstance(tokenizer, dict) else {}
        for key in ORIGINS:
            if _renamed(made_from.get(key), dict.fromkeys(old, "")) != made_from.get(key):
                made_from[key] = list(names)
    facts.unsure = [text for text in facts.unsure if "--data-name" not in text]


def _renamed(value: Any, new: dict[str, str]) -> Any:
    """Return sources of a configuration, or a `model.tokenizer`, with other names."""
    if isinstance(value, list):
        return [_renamed(inner, new) for inner in value]
    if isinstance(value, dict):
        return {key: _renamed(v, new) if key in ("path", *ORIGINS) else v for key, v in value.items()}
    return new.get(value, value) if isinstance(value, str) else value


def missing_licence(facts: Facts) -> str | None:
    """Return what has to be known of licences before anything is uploaded."""
    base = facts.base
    if base.random or base.licence:
        return None
    if base.hub:
        return (
            f"the licence of {base.hub} (no card of it in the cache). With --yes it is read from the Hub; "
            "or give --base-licence ID"
        )
    what = f"the licence of the base model {base.name}" if base.name else "the base model and its licence"
    return (
        f"{what}: there is no model card with it. Give --base-licence ID, and --base-model OWNER/NAME where the Hub "
        "has it"
    )


def show(
    upload: Upload, card: str, arguments: argparse.Namespace, argv: list[str], facts: Facts, missing: str | None
) -> None:
    """Print what would be uploaded and the line to type."""
    state = "public" if arguments.public else "private"
    print(f"to {arguments.repo}, branch {arguments.revision or 'main'}; a new repository would be {state}\n")
    for name in upload.files:
        print(f"  {tqdm.format_sizeof(upload.size(name), 'B'):>10}  {name}")
    for note in upload.notes:
        print(f"  note: {note}")
    print(f"\nREADME.md:\n\n{card}")
    for text in facts.unsure:
        print(f"look at this: {text}")
    if facts.base.licence and facts.base.licence_from:
        print(f"licence of the base model: {facts.base.licence}, from {facts.base.licence_from}")
    if missing:
        print(f"missing: {missing}")
    asked = ["--base-licence", "ID"] if missing and not facts.base.hub else []
    line = shlex.join(["python", "-m", "finetune.push_to_hub", *argv, *asked, "--yes"])
    print(f"\nNothing was uploaded and the Hub was not asked. To upload:\n\n    {line}")
