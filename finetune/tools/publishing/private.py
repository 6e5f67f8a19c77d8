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
from tqdm import tqdm
from tqdm.utils import CallbackIOWrapper

from finetune.errors import UserError
from finetune.security.archives import content_of, named, reading
from finetune.security.documents import leaves, parse_json, parse_yaml
from finetune.security.secrets import REMOVED, TOKENS, clean, clean_text, clean_urls
from finetune.tools.report.read import SPLITS

# A whole text that is a path or a URL. A relative one has no spaces, so that "and / or" is none.
WHOLE_PATH = re.compile(
    r"(?:~|\.{1,2})?[/\\](?![/\\\s]*$).*|[A-Za-z]:[/\\].*|\w[\w+.-]*://.*|[^\s/\\]+(?:[/\\]+[^\s/\\]+)+[/\\]?"
)
ABSOLUTE = re.compile(r"(?:~\w*|\.{1,2})?[/\\](?![/\\\s]*$).*|[A-Za-z]:[/\\].*|\w[\w+.-]*://.*")
INSIDE = re.compile(r"(?<![\w/\\:.~])(?:~\w*|[A-Za-z]:)?[/\\][\w.@+~-]+(?:[/\\][\w.@+~*-]+)+[/\\]?")
PATH_KEY = re.compile(r"(?:.*_)?(?:dir|directory|folder|path|filepath|file|files|filepaths|manifest)", re.IGNORECASE)
ORIGINS = ("extend_from", "replace_with")
"""Keys that name the data or the tokenizer that new pieces come from."""
SETTINGS_WITH_PATHS = {*SPLITS, *ORIGINS, "name", "tokenizer", "leave_out", "tarred_audio"}
"""Keys of a run's configuration whose texts are paths, whatever they look like."""
NOT_PATHS = {"alphabet"}
"""Keys whose texts may hold a slash and are no paths."""
TOKEN_LISTS = {"labels", "vocabulary"}
"""Keys of a NeMo configuration that hold the tokens themselves."""
VOCABULARY_CHANGES = "vocabulary_changes"
"""Key of a NeMo configuration: what this project notes of each change of the vocabulary."""
CONFIG = "model_config.yaml"
BASE_OF_ADAPTER = "base_model.json"
"""Beside an adapter: name and hash of its base model."""
NAMES_OF_MODELS = ("_name_or_path", "name_or_path", "base_model_name_or_path", "tokenizer_name_or_path")

Cleaned = tuple[bytes, list[str]]
"""A file's new content, and the keys that were changed."""


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
            if cleaned := _clean_member(archive, member, secrets):
                name = re.sub(r"^[0-9a-f]{32}_", "", Path(member.name).name)  # what NeMo puts before its names
                found += [f"{name}: {key}" for key in cleaned[1]]
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
                bare = tarfile.TarInfo(member.name)
                bare.type, bare.mode, bare.size = member.type, member.mode, member.size
                file = archive.extractfile(member)
                if cleaned := _clean_member(archive, member, secrets):
                    bare.size, file = len(cleaned[0]), io.BytesIO(cleaned[0])
                # tqdm makes the attribute `read` at run time.
                copy.addfile(bare, file and CallbackIOWrapper(bar.update, file, "read"))  # type: ignore[arg-type]
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


@contextmanager
def _opened(source: Path) -> Iterator[tuple[tarfile.TarFile, list[tarfile.TarInfo], tarfile.TarInfo]]:
    """Open a .nemo: the archive, its members, and its configuration. An archive of another kind is refused."""
    with reading(source, "--model") as (archive, members):
        config = named(members, CONFIG)
        if config is None:
            raise UserError(f"--model: {source} cannot be read as a .nemo: it holds no {CONFIG}")
        yield archive, members, config


def _clean_member(archive: tarfile.TarFile, member: tarfile.TarInfo, secrets: Set[str]) -> Cleaned | None:
    name = Path(member.name).name
    if not member.isfile() or not (name == CONFIG or name.endswith("tokenizer.model")):
        return None
    return clean_file(name, content_of(archive, member), secrets)


# ---- files of all kinds of models ----------------------------------------------------------------------------------


def clean_file(name: str, content: bytes, secrets: Set[str], base: str | None = None) -> Cleaned | None:
    """Return a model's configuration or tokenizer without local names and paths; None where it stays as it is.

    Args:
        name: of the file.
        content: of the file.
        secrets: values that are removed wherever they stand.
        base: the base model's name on the Hub, for the keys that name it; None: the name at the path's end.

    Raises:
        ValueError: it is no valid JSON or YAML.
    """
    if name.endswith(".model"):
        return _clean_sentencepiece(content)
    if name.endswith((".yaml", ".yml")):
        config = _parse(content)
        cleaned = _clean_nemo_config(config, secrets)
        changed = _changed_keys(config, cleaned)
        return (OmegaConf.to_yaml(OmegaConf.create(cleaned)).encode(), changed) if changed else None
    if name.endswith("config.json") or name == BASE_OF_ADAPTER:
        config = parse_json(content)
        cleaned = _clean_names(config, base, name == BASE_OF_ADAPTER)
        changed = _changed_keys(config, cleaned)
        return ((json.dumps(cleaned, indent=2, ensure_ascii=False) + "\n").encode(), changed) if changed else None
    return None


def _parse(content: bytes) -> dict[str, Any]:
    values = parse_yaml(content.decode("utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"a mapping is expected, found {type(values).__name__}")
    return values


def _changed_keys(before: Any, after: Any) -> list[str]:
    kept = dict(leaves(after))
    return [key for key, value in leaves(before) if kept.get(key) != value]


def _clean_nemo_config(value: Any, secrets: Set[str], key: str = "", in_changes: bool = False) -> Any:
    """Take out paths, tokens and the names of what a vocabulary was made from; NeMo builds the model from all else.

    Args:
        key: the value's.
        in_changes: it stands in the notes on changes of the vocabulary.
    """
    if in_changes and key in ORIGINS and value is not None:
        return REMOVED
    if isinstance(value, dict):
        return {
            k: _clean_nemo_config(v, secrets, str(k), in_changes or k == VOCABULARY_CHANGES) for k, v in value.items()
        }
    if isinstance(value, list):
        return value if key in TOKEN_LISTS else [_clean_nemo_config(v, secrets, key, in_changes) for v in value]
    if not isinstance(value, str) or value.startswith("nemo:"):
        return value
    is_path = ABSOLUTE.fullmatch(value) or (PATH_KEY.fullmatch(key) and WHOLE_PATH.fullmatch(value))
    cleaned = last_part(value) if is_path else INSIDE.sub(lambda m: last_part(m[0]), clean_urls(value))
    for secret in secrets:
        cleaned = cleaned.replace(secret, REMOVED)
    return TOKENS.sub(REMOVED, cleaned)


def _clean_names(value: Any, base: str | None, of_base: bool, key: str = "") -> Any:
    """Replace local places of models by names in a configuration of transformers or PEFT.

    Args:
        value: of the configuration, or a part of it.
        base: name of the base model on the Hub.
        of_base: `name` is that of the base model, as in base_model.json.
        key: the value's.
    """
    if isinstance(value, dict):
        return {k: _clean_names(v, base, of_base, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_clean_names(v, base, of_base) for v in value]
    if not isinstance(value, str) or not value or key not in (*NAMES_OF_MODELS, *(["name"] if of_base else [])):
        return value
    names_base = of_base or key == "base_model_name_or_path"
    if names_base and base is not None:
        return base
    is_local = ABSOLUTE.fullmatch(value) or value.count("/") > 1 or "\\" in value or Path(value).exists()
    if not is_local:
        return value
    # An adapter on an adapter names the run of the first: its own folder may be called adapter too.
    return last_part(re.sub(r"(?<=[^/\\])[/\\]+adapter[/\\]*$", "", value) if names_base else value)


def _clean_sentencepiece(content: bytes) -> Cleaned | None:
    """Take out of a SentencePiece model the paths of its training."""
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
        trainer.input[:] = inputs
        found.append("trainer_spec.input")
    for field in ("model_prefix", "seed_sentencepieces_file"):
        path = getattr(trainer, field)
        if WHOLE_PATH.fullmatch(path):
            setattr(trainer, field, last_part(path))
            found.append(f"trainer_spec.{field}")
    return (model.SerializeToString(), found) if found else None
