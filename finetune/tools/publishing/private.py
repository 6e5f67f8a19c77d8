"""Take out of a run's records and of a .nemo what is private to the machine: paths, names of users, secrets."""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper
from yaml import YAMLError

from finetune.errors import UserError
from finetune.security.archives import content_of, named, reading
from finetune.security.documents import first_line, parse_json, parse_yaml
from finetune.security.secrets import REMOVED, TOKENS, clean, clean_text, clean_urls

# A whole text that is a path or a URL. A relative one has no spaces, so that "and / or" is none.
WHOLE_PATH = re.compile(
    r"(?:~|\.{1,2})?[/\\](?![/\\\s]*$).*|[A-Za-z]:[/\\].*|\w[\w+.-]*://.*|[^\s/\\]+(?:[/\\]+[^\s/\\]+)+[/\\]?"
)
ABSOLUTE = re.compile(r"(?:~\w*|\.{1,2})?[/\\](?![/\\\s]*$).*|[A-Za-z]:[/\\].*|\w[\w+.-]*://.*")
INSIDE = re.compile(r"(?<![\w/\\:.~])(?:~\w*|[A-Za-z]:)?[/\\][\w.@+~-]+(?:[/\\][\w.@+~*-]+)+[/\\]?")
PATH_KEY = re.compile(r"(?:.*_)?(?:dir|directory|folder|path|filepath|file|files|filepaths|manifest)", re.IGNORECASE)
SETTINGS_WITH_PATHS = {
    "name",
    "train",
    "validation",
    "test",
    "guard",
    "tokenizer",
    "extend_from",
    "replace_with",
    "leave_out",
    "tarred_audio",
    "output_dir",
}
"""Keys of a run's configuration whose texts are paths, whatever they look like."""
NOT_PATHS = {"alphabet"}
"""Keys whose texts may hold a slash and are no paths."""
TOKEN_LISTS = {"labels", "vocabulary"}
"""Keys of a NeMo configuration that hold the tokens themselves."""
VOCABULARY_CHANGES = "vocabulary_changes"
"""Key of a NeMo configuration: what this project notes of each change of the vocabulary."""
ORIGINS = ("extend_from", "replace_with")
"""Keys that name the data or the tokenizer that new pieces come from."""
CONFIG = "model_config.yaml"


def last_part(path: str) -> str:
    """Return the name at the end of a path or URL, without what stands behind a question mark."""
    parts = [part for part in re.split(r"[/\\]", path.partition("?")[0]) if part not in ("", ".", "..", "~")]
    return parts[-1] if parts else REMOVED


def without_paths(text: str) -> str:
    """Return a text with its paths reduced to the names at their ends."""
    if WHOLE_PATH.fullmatch(text):
        return last_part(text)
    return INSIDE.sub(lambda found: last_part(found[0]), text)


def publishable(value: Any, keep: Set[str] = frozenset(), secrets: Set[str] = frozenset()) -> Any:
    """Return a structure of JSON or YAML without secrets, home, user and host, and with paths reduced to names.

    Args:
        keep: texts that stay, such as names on the hub, which look like paths.
        secrets: values that are replaced wherever they stand, from `finetune.security.secrets.known_secrets`.
    """

    def reduce(inner: Any, key: str = "") -> Any:
        if isinstance(inner, dict):
            return {clean_text(without_paths(str(k))): reduce(v, str(k)) for k, v in inner.items()}
        if isinstance(inner, list):
            return [reduce(v, key) for v in inner]
        if not isinstance(inner, str) or inner in keep or key in NOT_PATHS:
            return inner
        is_path = (key in SETTINGS_WITH_PATHS or PATH_KEY.fullmatch(key)) and re.search(r"[/\\]", inner)
        return clean_text(last_part(inner) if is_path else without_paths(inner))

    return reduce(clean(value, frozenset(secrets), personal=False))


# ---- a .nemo -------------------------------------------------------------------------------------------------------


def private_parts(source: Path, secrets: Set[str] = frozenset()) -> list[str]:
    """Return what of a .nemo tells of the machine that made it; none of the weights is read.

    Raises:
        UserError: it is no archive with a NeMo configuration.
    """
    found: list[str] = []
    with _opened(source) as (archive, members, _):
        if any(member.uname not in ("", "root") or member.gname not in ("", "root") for member in members):
            found.append("owner of the files in the archive")
        for member in members:
            if member.isfile() and (changed := _changed(archive, member, secrets)) is not None:
                name = re.sub(r"^[0-9a-f]{32}_", "", Path(member.name).name)  # what NeMo puts before its names
                found += [f"{name}: {what}" for what in changed[1]]
    return found


def write_cleaned_nemo(source: Path, target: Path, secrets: Set[str] = frozenset()) -> None:
    """Write a copy of a .nemo without what `private_parts` finds; weights and tokens stay byte for byte.

    Raises:
        UserError: it is no archive with a NeMo configuration, or there is no room for the copy.
    """
    try:
        with (
            _opened(source) as (archive, members, _),
            tarfile.open(target, "w:") as copy,
            tqdm(total=source.stat().st_size, unit="B", unit_scale=True, desc="copy without paths", delay=2) as bar,
        ):
            for member in members:
                clean = tarfile.TarInfo(member.name)
                clean.type, clean.mode = member.type, member.mode
                if member.isfile():
                    changed = _changed(archive, member, secrets)
                    file = io.BytesIO(changed[0]) if changed else archive.extractfile(member)
                    clean.size = len(changed[0]) if changed else member.size
                    # tqdm makes the attribute `read` at run time.
                    copy.addfile(clean, CallbackIOWrapper(bar.update, file, "read"))  # type: ignore[arg-type]
                elif member.isdir():
                    copy.addfile(clean)
    except OSError as error:
        raise UserError(
            f"a copy of {source.name} without local paths cannot be written to {target.parent}: "
            f"{error.strerror or error}. Set TMPDIR to a folder with room for it.",
            exit_code=1,
        ) from error


def read_nemo_config(source: Path) -> dict[str, Any]:
    """Return the model's configuration in a .nemo, with its interpolations as they stand.

    Raises:
        UserError: it is no archive with a NeMo configuration.
    """
    with _opened(source) as (archive, _, config):
        return _parse(content_of(archive, config))


def read_nemo_yaml(path: Path) -> dict[str, Any]:
    """Return the NeMo configuration beside a Hugging Face model; empty where there is none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        return _parse(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from error


@contextmanager
def _opened(source: Path) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo], tarfile.TarInfo]]:
    """Open a .nemo: the archive, its members, and its configuration. An archive of another kind is refused."""
    with reading(source, "--model") as (archive, members):
        config = named(members, CONFIG)
        if config is None:
            raise UserError(f"--model: {source} cannot be read as a .nemo: it holds no {CONFIG}")
        yield archive, members, config


def _parse(content: bytes) -> dict[str, Any]:
    values = parse_yaml(content.decode("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"a mapping is expected, found {type(values).__name__}")
    return values


def _changed(archive: tarfile.TarFile, member: tarfile.TarInfo, secrets: Set[str]) -> tuple[bytes, list[str]] | None:
    """Return the cleaned content of a member and what was changed in it; None where it stays as it is."""
    name = Path(member.name).name
    if name == CONFIG:
        return clean_nemo_yaml(content_of(archive, member), secrets)
    if name.endswith("tokenizer.model"):
        return clean_sentencepiece(content_of(archive, member))
    return None


def clean_nemo_yaml(content: bytes, secrets: Set[str]) -> tuple[bytes, list[str]] | None:
    """Return a NeMo configuration without paths and tokens, and the changed keys; None where it stays as it is."""
    found: list[str] = []
    cleaned = _clean_nemo_config(_parse(content), secrets, "", found)
    return (OmegaConf.to_yaml(OmegaConf.create(cleaned)).encode(), found) if found else None


def _clean_nemo_config(value: Any, secrets: Set[str], at: str, found: list[str]) -> Any:
    """Take out paths, tokens and the names of what a vocabulary was made from; NeMo builds the model from all else.

    Args:
        at: the value's key.
        found: takes the keys that were changed.
    """
    key = at.rpartition(".")[2]
    if key in ORIGINS and at.startswith(f"{VOCABULARY_CHANGES}.") and value not in (None, REMOVED):
        found.append(at)
        return REMOVED
    if isinstance(value, dict):
        return {k: _clean_nemo_config(v, secrets, f"{at}.{k}".strip("."), found) for k, v in value.items()}
    if isinstance(value, list):
        return value if key in TOKEN_LISTS else [_clean_nemo_config(v, secrets, at, found) for v in value]
    if not isinstance(value, str) or value.startswith("nemo:"):
        return value
    is_path = ABSOLUTE.fullmatch(value) or (PATH_KEY.fullmatch(key) and WHOLE_PATH.fullmatch(value))
    cleaned = last_part(value) if is_path else INSIDE.sub(lambda m: last_part(m[0]), clean_urls(value))
    for secret in secrets:
        cleaned = cleaned.replace(secret, REMOVED)
    cleaned = TOKENS.sub(REMOVED, cleaned)
    if cleaned != value:
        found.append(at)
    return cleaned


def clean_sentencepiece(content: bytes) -> tuple[bytes, list[str]] | None:
    """Return a SentencePiece model without the paths of its training, and what was changed; None if nothing was."""
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]  # made on import

    model = ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError:
        return None
    trainer, found = model.trainer_spec, []
    inputs = [last_part(path) if WHOLE_PATH.fullmatch(path) else path for path in trainer.input]
    if inputs != list(trainer.input):
        del trainer.input[:]
        trainer.input.extend(inputs)
        found.append("trainer_spec.input")
    for field in ("model_prefix", "seed_sentencepieces_file"):
        path = getattr(trainer, field)
        if WHOLE_PATH.fullmatch(path):
            setattr(trainer, field, last_part(path))
            found.append(f"trainer_spec.{field}")
    return (model.SerializeToString(), found) if found else None


# ---- files of a Hugging Face or PEFT directory ---------------------------------------------------------------------

BASE_OF_ADAPTER = "base_model.json"
"""Beside an adapter: name and hash of its base model."""
NAMES_OF_MODELS = ("_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path")


def clean_in_folder(path: Path, base: str | None, secrets: Set[str]) -> tuple[bytes, list[str]] | None:
    """Return a file of a Hugging Face or PEFT directory without local names and paths, and what was changed in it.

    Args:
        path: the file.
        base: the base model's name on the Hub, for the keys that name it; None: the name at the path's end.
        secrets: values that go wherever they stand.

    Returns:
        None where the file stays as it is.

    Raises:
        UserError: a configuration that is no valid JSON or YAML.
    """
    try:
        if path.suffix == ".model":
            return clean_sentencepiece(path.read_bytes())
        if path.suffix in (".yaml", ".yml"):
            return clean_nemo_yaml(path.read_bytes(), secrets)
        if path.name.endswith("config.json") or path.name == BASE_OF_ADAPTER:
            return _clean_json(parse_json(path.read_text(encoding="utf-8")), path.name, base)
    except (OSError, ValueError, RecursionError, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}.") from error
    return None


def _clean_json(value: Any, file: str, base: str | None) -> tuple[bytes, list[str]] | None:
    found = []
    for owner, key in _keys(value, (*NAMES_OF_MODELS, "name") if file == BASE_OF_ADAPTER else NAMES_OF_MODELS):
        name = owner[key]
        names_base = key == "base_model_name_or_path" or file == BASE_OF_ADAPTER
        if not isinstance(name, str) or not name:
            continue
        is_local = ABSOLUTE.fullmatch(name) or name.count("/") > 1 or "\\" in name or Path(name).exists()
        # An adapter on an adapter names the run of the first: its own folder may be called adapter too.
        short = last_part(re.sub(r"(?<=[^/\\])[/\\]+adapter[/\\]*$", "", name)) if names_base else last_part(name)
        instead = base if names_base and base is not None else short if is_local else name
        if instead != name:
            owner[key] = instead
            found.append(key)
    return ((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(), found) if found else None


def _keys(value: Any, wanted: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where a structure has one of these keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in wanted:
                yield value, key
            else:
                yield from _keys(inner, wanted)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, wanted)
