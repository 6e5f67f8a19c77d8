"""Load a transducer, or only its tokenizer, from whatever `model.name` may be."""

import logging
from pathlib import Path

import torch

from finetune.errors import UserError
from finetune.models import adapters, nemo_archive
from finetune.models.adapters import check_base, is_adapter, merge_adapter, read_adapter
from finetune.models.host_lstm import use_native_lstm
from finetune.models.host_memory import keep_freed_memory
from finetune.models.huggingface.layout import piece_count
from finetune.models.huggingface.reading import (
    WANTED_FILES,
    fetch,
    is_hugging_face,
    load_hugging_face,
    nemo_config,
)
from finetune.models.huggingface.tokenizer import sentencepiece_of
from finetune.models.nemo import build, check_heads, set_head
from finetune.models.prompts import check_prompts
from finetune.models.protocols import AsrModel
from finetune.models.sentencepiece_model import FILE, SentencePieceModel, parse, tokenizer_of
from finetune.paths import check_access, looks_local, near_path
from finetune.security.archives import content_of, reading
from finetune.security.documents import read_settings, resolved

log = logging.getLogger(__name__)


def load_model(name: str, tokenizer: str | None = None) -> AsrModel:
    """Load a NeMo model with a SentencePiece tokenizer on the CPU: a transducer (EncDecRNNTBPEModel, TDT or RNN-T), a
    hybrid or a CTC model.

    Args:
        name: a .nemo file, a run's output directory or another with one .nemo file, the directory of an adapter (its
            base model with the adapter merged), a Hugging Face directory, a hub name, or a NeMo model
            YAML (random weights).
        tokenizer: directory with `tokenizer.model`, for a YAML.

    Raises:
        UserError: nothing is found under the name, or it is no model that this project trains.
    """
    check_access(name, "model.name")
    path = Path(name)
    if (archive := nemo_archive.archive_of(path)) is not None:
        return _restore(archive)
    if path.is_dir():
        if is_adapter(path):
            return _merge_into_base(path)
        if is_hugging_face(path):
            return _checked(load_hugging_face(path), path)
        raise UserError(
            f"model.name: the directory {name} holds no .nemo file and no config.json. Give a .nemo file, a finished "
            "run's directory or a Hugging Face directory."
        )
    if path.suffix in (".yaml", ".yml"):
        return _build(path, tokenizer)
    return _download(name)


def files_of(name: str, key: str = "model.name") -> list[Path]:
    """Return the files that `load_model` reads for a name, without those of an adapter's base; none for a hub name.

    Raises:
        UserError: a directory holds several .nemo files, and none of them is model.nemo.
    """
    path = Path(name)
    if (archive := nemo_archive.archive_of(path, key)) is not None:
        return [archive]
    if not path.is_dir():
        return [path] if path.is_file() else []
    if is_adapter(path):
        return [path / file for file in (adapters.CONFIG, adapters.WEIGHTS, adapters.BASE) if (path / file).is_file()]
    return sorted({file for pattern in WANTED_FILES for file in path.glob(pattern) if file.is_file()})


def load_option(name: str, tokenizer: str | None = None) -> AsrModel:
    """Load what a command's --model and --tokenizer name, as `load_model` does; messages name these options.

    Raises:
        UserError: as from `load_model`.
    """
    try:
        return load_model(name, tokenizer)
    except UserError as error:
        text = str(error).replace("model.name:", "--model:").replace("model.tokenizer", "--tokenizer")
        raise UserError(text, exit_code=error.exit_code) from error


def _merge_into_base(path: Path) -> AsrModel:
    adapter = read_adapter(path)
    base = adapter.base["name"]
    try:
        model = load_model(base)
    except UserError as error:
        raise UserError(
            f"model.name: {path} is an adapter of the base model {base}, which cannot be loaded: {error} Put it "
            f"there, or write its present place as `name` into {path / 'base_model.json'}.",
            exit_code=error.exit_code,
        ) from error
    check_base(adapter, model, base)
    merge_adapter(model, adapter)
    return model


def _checked(model: AsrModel, path: Path) -> AsrModel:
    check_heads(model, str(path))
    check_prompts(model, str(path))
    set_head(model, None)
    return model


def _restore(path: Path) -> AsrModel:
    try:
        return _checked(nemo_archive.restore(path), path)
    except UserError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).rstrip('.')}."
        if "could not parse ModelProto" in why:
            why = "its tokenizer.model is no SentencePiece model, and no other kind is supported."
        raise UserError(
            f"model.name: {path} cannot be read as a NeMo model: {why}{nemo_archive.other_version(path)}"
        ) from error


def check_hub_name(name: str, key: str) -> None:
    """Raise UserError if the name of a missing file can be no hub's, so that a mistyped path asks no network."""
    if looks_local(name):
        raise UserError(f"{key}: there is no file or directory {name} (looked in {Path.cwd()}).{near_path(name)}")
    if name.count("/") != 1:
        raise UserError(
            f"{key}: there is no file or directory {name}, and it is not a hub name like nvidia/parakeet-tdt-0.6b-v3."
        )


def _download(name: str) -> AsrModel:
    if Path(name).exists():
        raise UserError(
            f"model.name: {name} is neither a .nemo file nor a NeMo model YAML (.yaml). Weights alone do not say what "
            "the model looks like: give the .nemo file that they came with."
        )
    check_hub_name(name, "model.name")
    try:
        fetched = fetch(name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.name: {name} is no local file, and loading it from the hub failed: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. Check the name and the network, or download the "
            f".nemo file and give its path.{near_path(name)}",
            exit_code=1,
        ) from error
    return load_model(str(fetched))


def _build(path: Path, tokenizer: str | None) -> AsrModel:
    if not path.is_file():
        raise UserError(f"model.name: there is no file {path} (looked in {Path.cwd()}).{near_path(str(path))}")
    root = read_settings(path, "model.name")
    layout = root.get("model")
    if not isinstance(layout, dict):
        raise UserError(f"{path}: no key `model:`; a NeMo model YAML has the layout of the network under `model:`.")
    for key in nemo_archive.NOT_BUILT:
        layout.pop(key, None)
    if not isinstance(layout.setdefault("tokenizer", {}), dict):
        raise UserError(f"{path}: model.tokenizer: a mapping is expected, found {layout['tokenizer']!r}.")
    if tokenizer is not None:
        layout["tokenizer"]["dir"] = tokenizer
    layout = resolved({**root, "model": layout}, f"model.name: {path}")["model"]
    nemo_archive.check_model_config(layout, f"model.name: {path}")
    directory = layout["tokenizer"].get("dir")
    if not isinstance(directory, str) or not directory or not (Path(directory) / FILE).is_file():
        why = f"there is no tokenizer.model in {directory!r}" if directory else "names none"
        raise UserError(
            f"model.tokenizer: {path} needs a SentencePiece tokenizer, and {why}. Set model.tokenizer to the "
            "directory of a tokenizer.model (python -m finetune.tokenizer makes one)."
        )
    return _checked(build(layout, str(path)), path)


def move_to_device(model: AsrModel, device: str) -> AsrModel:
    """Move the model to a device; raise UserError if this machine has no such device.

    On the CPU, memory that this process frees stays with it from now on.
    """
    if device.startswith("cpu"):
        keep_freed_memory()
        use_native_lstm(model)
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device: {device} cannot be used: {str(error).splitlines()[0]}. This machine has "
            f"cpu{''.join(f', cuda:{i}' for i in range(torch.cuda.device_count()))}."
        ) from error


def is_tokenizer(value: object) -> bool:
    """Return whether the value names a tokenizer's file or directory, and not a data set."""
    return isinstance(value, str) and (value.endswith(".model") or (Path(value) / FILE).is_file())


def read_tokenizer(name: str, key: str) -> SentencePieceModel:
    """Read the tokenizer of a model, of a directory, or a .model file.

    Args:
        name: directory with tokenizer.model, a .model file, or whatever `load_model` takes; an adapter has its base
            model's tokenizer.
        key: the option that names it, for messages.

    Raises:
        UserError: there is none, or it is an aggregate of several.
    """
    path = Path(name)
    if is_tokenizer(name):
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"{key}: there is no file {file} (looked in {Path.cwd()}).")
        return parse(file.read_bytes(), f"{key}: {file}")
    if (archive := nemo_archive.archive_of(path, key)) is not None:
        with reading(archive, key) as (tar, found):
            members = [m for m in found if m.isreg() and m.name.endswith(FILE)]
            if len(members) > 1:
                raise UserError(f"{key}: {archive} has an aggregate of {len(members)} tokenizers; one is expected.")
            if not members:
                raise UserError(f"{key}: {archive} holds no SentencePiece tokenizer.")
            content = content_of(tar, members[0])
        return parse(content, f"{key}: the tokenizer of {archive}")
    try:
        if is_adapter(path):
            return read_tokenizer(str(read_adapter(path).base["name"]), key)
        if is_hugging_face(path):
            content, _ = sentencepiece_of(path, piece_count(nemo_config(path)))
            return parse(content, f"{key}: the tokenizer of {path}")
        if path.exists() and path.suffix not in (".yaml", ".yml"):
            raise UserError(
                f"{name} holds neither tokenizer.model, model.nemo nor a Hugging Face model, and is no .nemo file."
            )
        return tokenizer_of(load_model(name), key)
    except UserError as error:
        reason = str(error).removeprefix("model.name: ").removeprefix(f"{key}: ")
        raise UserError(f"{key}: {reason}", error.exit_code) from error
