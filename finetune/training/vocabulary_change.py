"""Growing or replacing the model's vocabulary before a run: once, by the main process, and the same on all of them and
after a resume."""

import atexit
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from omegaconf import OmegaConf

from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import TokenizerSetting, default_growth, tokenizer_setting
from finetune.data.sources import OpenSource
from finetune.data.text_corpus import Text, read_texts
from finetune.distributed import broadcast, on_main
from finetune.errors import UserError
from finetune.models.heard_letters import Heard
from finetune.models.loading import is_tokenizer, read_tokenizer
from finetune.models.protocols import AsrModel
from finetune.models.sentencepiece_model import (
    FILE,
    kind_of,
    parse,
    processor,
    tokenizer_of,
    train_tokenizer,
    write_tokenizer,
)
from finetune.models.tokenizer_coverage import compare, table
from finetune.models.tokenizer_growth import grow_as_heard, grow_from_tokenizer, grow_on_texts
from finetune.models.vocabulary_rows import (
    change_vocabulary,
    changes_of,
    letters_without_relative,
    start_as_heard,
)
from finetune.security.safe_text import Block
from finetune.training.listening import listen

log = logging.getLogger(__name__)

FOLDER, REPORT = "tokenizer", "report.json"
# Beside the final place, where the run that is to be overwritten may still have its own.
WAITING = ".tokenizer.new"


def set_vocabulary(
    accelerator: Accelerator,
    model: AsrModel,
    config: RunConfig,
    sources: list[OpenSource],
    checkpoint: Path | None,
) -> bool:
    """Give the model the vocabulary that `model.tokenizer` asks for, in place; nothing where it asks for none.

    A checkpoint's run has its tokenizer already. Else the main process makes one, and all take its file, byte by byte.
    A model that was changed in the same way by the same texts before, as in an earlier stage, is left as it is.

    Args:
        sources: of data.train, to listen to where new letters have no relative among the old ones.

    Returns:
        Whether the vocabulary is another one than that of `model.name` now.

    Raises:
        UserError: on all processes, where the tokenizer cannot be made.
    """
    setting, folder = tokenizer_setting(config), Path(config.training.output_dir)
    stored = None if checkpoint is None else checkpoint.parent.parent / FOLDER
    if stored is not None and broadcast((stored / FILE).is_file()):
        return _take_stored(accelerator, model, setting, stored, folder / FOLDER)
    if not setting.changes:
        return False

    def hear(letters: set[str]) -> Heard:
        return listen(accelerator, model, config, sources, letters)

    # A dry run goes on without sources.
    ears = hear if sources and checkpoint is None else None
    content, report, heard = on_main(lambda: make_tokenizer(model, setting, config.data.text_normalization, ears))
    if content is None:
        log.info("%s: the model has this vocabulary already", setting.key)
        return False
    if checkpoint is not None:
        raise UserError(
            f"{setting.key}: {checkpoint} was written without it, and its vocabulary cannot change on the way. Take "
            "out the key, or begin a new run from the model."
        )
    if "by_language" in report:
        log.info("the tokenizer before and now, on the texts of %s:\n%s", setting.key, Block(table(report)))
    old = tokenizer_of(model, setting.key)
    change_vocabulary(model, _place(accelerator, content, folder / WAITING, report), {"setting": report["setting"]})
    if heard is not None:
        start_as_heard(model, old, heard.letters, heard.texts)
    log.info("vocabulary of %d pieces now", model.tokenizer.vocab_size)
    return True


def move_tokenizer_into_run(models: list[AsrModel | None], output_dir: Path) -> None:
    """Move a tokenizer that was made for this run to its place in the run's directory. On the main process.

    Args:
        models: those that may be saved later and have to know the place; None among them is passed over.
        output_dir: of the run.
    """
    waiting, final = (output_dir / WAITING).absolute(), (output_dir / FOLDER).absolute()
    for model in (model for model in models if model is not None):
        files = {k: f for k, f in model.artifacts.items() if Path(f.path).parent == waiting}
        if files and waiting.is_dir():
            shutil.rmtree(final, ignore_errors=True)
            waiting.rename(final)
        for key, file in files.items():
            file.path = str(final / Path(file.path).name)
            OmegaConf.update(model.cfg, key, file.path)
        if files:
            model.cfg.tokenizer.dir = str(final)


def tokenizer_of_run(model: AsrModel, config: RunConfig) -> Any:
    """Return the tokenizer that a run's texts are encoded with, which has NeMo's `text_to_ids` and `tokenizer`: the
    model's, or the one that `model.tokenizer` asks for, made anew. The model stays as it is."""
    setting = tokenizer_setting(config)
    content = make_tokenizer(model, setting, config.data.text_normalization)[0] if setting.changes else None
    if content is None:
        return model.tokenizer
    encoder = processor(parse(content, setting.key))
    return SimpleNamespace(tokenizer=encoder, text_to_ids=encoder.encode)


def _noted(setting: TokenizerSetting) -> dict[str, Any]:
    """Return the setting of a change as the model keeps it."""
    kind = "extend_from" if setting.extend_from is not None else "replace_with"
    return {kind: setting.origin, "size": setting.size, "pieces": setting.pieces, "coverage": setting.coverage}


def _has_already(model: AsrModel, note: dict[str, Any]) -> bool:
    """Return whether the model's vocabulary was changed in this way, and not replaced since."""
    changes = [change.get("setting") or {} for change in changes_of(model)]
    replaced = [i for i, change in enumerate(changes) if "replace_with" in change]
    return note in changes[replaced[-1] if replaced else 0 :]


def make_tokenizer(
    model: AsrModel,
    setting: TokenizerSetting,
    normalization: str,
    hear: Callable[[set[str]], Heard] | None = None,
) -> tuple[bytes | None, dict[str, Any], Heard | None]:
    """Return the file that a setting asks for, which may be the old one, the report on it, and what was heard; no file
    where the model was changed in this way already, by the same texts or tokenizer.

    Args:
        model: NeMo transducer with the old tokenizer.
        setting: with extend_from or replace_with.
        normalization: of the texts, as `data.text_normalization`.
        hear: finds the old letters for new ones that have no relative among them; None does without.

    Raises:
        UserError: see `finetune.models.tokenizer_growth` and `finetune.data.text_corpus`.
    """
    key, old = setting.key, tokenizer_of(model, setting.key)
    texts: list[Text] = []
    other, heard = None, None
    if is_tokenizer(setting.origin):
        other = read_tokenizer(setting.origin, key)
        content = other.SerializeToString()
    else:
        texts = read_texts(setting.origin, key, normalization)
        content = "\n".join(sorted({text.text for text in texts})).encode("utf-8", "surrogatepass")
    # The digest tells one text or tokenizer from another of the same name.
    note = {**_noted(setting), "sha256": hashlib.sha256(content).hexdigest()}
    report: dict[str, Any] = {"setting": note}
    if _has_already(model, note):
        return None, report, None
    plain, coverage = [text.text for text in texts], 1.0 if setting.coverage is None else setting.coverage
    if setting.extend_from is not None:
        if other is None:
            size = setting.size or default_growth(len(old.pieces))
            growth = grow_on_texts(old, plain, size, pieces=setting.pieces, coverage=coverage, key=key)
        else:
            size = setting.size or len(other.pieces)
            growth = grow_from_tokenizer(old, other, size, pieces=setting.pieces, key=key)
        unrelated = letters_without_relative(old, growth.model)
        if unrelated and hear is not None:
            heard = hear(unrelated)
            report["new_letters"] = heard.as_json()
            if heard.letters and other is None and setting.pieces == "new_characters":
                most = setting.size or max(len(old.pieces), size)
                growth = grow_as_heard(old, plain, heard.letters, growth, most, size)
        new, report["growth"] = growth.model, growth.as_json()
        (log.info if growth.added else log.warning)("%s: %s", key, growth)
    elif other is None:
        size = setting.size or len(old.pieces)
        new = train_tokenizer(plain, size, kind=kind_of(old), coverage=coverage, key=key)
    else:
        new = other
        if setting.size not in (None, len(new.pieces)):
            log.warning("model.tokenizer.size has no effect: %s has %d pieces", setting.origin, len(new.pieces))
    report["pieces"] = len(new.pieces)
    if texts:
        report |= compare(texts, new, old)
        if report["not_written"]:
            log.warning("%s: characters without a piece: %s", key, report["not_written"][:20])
    return new.SerializeToString(), report, heard


def _place(accelerator: Accelerator, content: bytes, shared: Path, report: dict[str, Any] | None) -> Path:
    """Directory with the tokenizer's files: the main process's is kept, the others may not see its disk and have one
    of their own."""
    place = shared
    if accelerator.is_main_process:
        shutil.rmtree(shared, ignore_errors=True)
    else:
        place = Path(tempfile.mkdtemp(prefix="tokenizer-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
    write_tokenizer(parse(content, str(place)), place)
    if accelerator.is_main_process and report is not None:
        text = json.dumps(report, ensure_ascii=False, indent=2)
        (place / REPORT).write_text(text + "\n", encoding="utf-8")
    return place


def _take_stored(
    accelerator: Accelerator, model: AsrModel, setting: TokenizerSetting, stored: Path, final: Path
) -> bool:
    """Give the model the tokenizer of the run that is resumed; return whether it did not have it yet."""
    content, note = b"", None
    if accelerator.is_main_process:
        content, file = (stored / FILE).read_bytes(), stored / REPORT
        note = json.loads(file.read_text(encoding="utf-8")).get("setting") if file.is_file() else None
    content, note = broadcast((content, note))
    made_with = {key: value for key, value in (note or {}).items() if key != "sha256"}
    if not setting.changes or made_with != _noted(setting):
        log.warning("model.tokenizer: the vocabulary of %s counts, which was made with %s", stored, made_with)
    if tokenizer_of(model, "model.tokenizer").SerializeToString() == content:
        return False
    if accelerator.is_main_process and stored.resolve() != final.resolve():
        shutil.copytree(stored, final, dirs_exist_ok=True)
    place = final if accelerator.is_main_process else _place(accelerator, content, final, None)
    change_vocabulary(model, place, {"setting": note})
    return True
