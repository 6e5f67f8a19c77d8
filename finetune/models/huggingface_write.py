"""From a .nemo file to a directory that transformers loads, without NeMo: the archive is read as what it is, a tar file."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.models.huggingface_layout import (
    durations_of,
    feature_settings,
    generation_settings,
    head_of,
    model_settings,
    reasons_against,
    to_hugging_face,
)
from finetune.models.huggingface_tokenizer import (
    decoding_differs,
    differing_as_written,
    encoding_differs,
    processor_tokenizer,
    read_sentencepiece,
)
from finetune.models.nemo_files import NOT_BUILT, config_in, weights_in
from finetune.security.archives import content_of, named, reading

log = logging.getLogger(__name__)

TRAINING_SETTINGS = "nemo_config.yaml"
SENTENCEPIECE = "tokenizer.model"
# Not kept: what the tokenizer's file says too, paths, and what belongs to a training run.
NOT_KEPT = ("labels", "tokenizer", "train_ds", "validation_ds", "test_ds", "optim", "target")


@dataclass
class NemoFile:
    """What a .nemo file holds."""

    path: Path
    config: dict[str, Any]
    """The model's configuration, resolved."""
    weights: dict[str, torch.Tensor]
    sentencepiece: bytes | None
    """The tokenizer's file; None where it has not exactly one."""

    @property
    def tokens(self) -> int:
        """Pieces of the tokenizer, without the blank."""
        if self.sentencepiece is not None:
            return len(read_sentencepiece(self.sentencepiece).pieces)
        return len((self.config.get("joint") or {}).get("vocabulary") or [])


def read_nemo(path: Path) -> NemoFile:
    """Reads a .nemo file: the YAML, the weights (as tensors only, no code is run), the SentencePiece file.

    Raises:
        UserError: it is none.
    """
    with reading(path, "--model") as (archive, members):
        plain = config_in(archive, members, f"--model: {path}")
        for section in NOT_BUILT:
            plain.pop(section, None)
        tokenizer = plain.get("tokenizer") or {}
        file = str(tokenizer.get("model_path") or "").removeprefix("nemo:")
        sentencepiece = None
        if tokenizer.get("type") == "bpe" and "custom_tokenizer" not in tokenizer and file:
            member = named(members, Path(file).name)
            if member is None:
                raise UserError(f"--model: {path} holds no {file}; it is no NeMo model.")
            sentencepiece = content_of(archive, member)
        weights = weights_in(archive, members, f"--model: {path}")
    return NemoFile(path, plain, weights, sentencepiece)


def check_expressible(nemo: NemoFile) -> None:
    """Refuses a model that transformers' ParakeetForTDT cannot express.

    Raises:
        UserError: with every reason.
    """
    reasons = []
    if nemo.sentencepiece is None:
        kind = (nemo.config.get("tokenizer") or {}).get("type")
        reasons.append(f"tokenizer.type: {kind!r}; transformers' ParakeetTokenizer is one SentencePiece model (bpe)")
    reasons += reasons_against(nemo.config, nemo.weights, nemo.tokens)
    if nemo.sentencepiece is not None:
        proto = read_sentencepiece(nemo.sentencepiece)
        try:
            tokenizer = processor_tokenizer(proto).backend_tokenizer
            reasons += [r for r in (encoding_differs(proto, tokenizer), decoding_differs(proto, tokenizer)) if r]
        except UserError as error:
            reasons.append(str(error).rstrip("."))
    _refuse(nemo, reasons)


def check_texts(nemo: NemoFile, texts: list[str]) -> None:
    """Refuses a model whose tokenizer encodes one of these texts otherwise in transformers; after `check_expressible`.

    Texts that differ only before they are normalised are counted in a warning: recognising needs no encoding.

    Raises:
        UserError: with the text.
    """
    assert nemo.sentencepiece is not None
    proto = read_sentencepiece(nemo.sentencepiece)
    tokenizer = processor_tokenizer(proto).backend_tokenizer
    _refuse(nemo, [r for r in [encoding_differs(proto, tokenizer, texts)] if r])
    if differing := differing_as_written(proto, tokenizer, texts):
        log.warning(
            "labels made with transformers differ for text that is not NFC: %d of %d texts, such as %r. Normalise texts before transformers "
            "is trained on them; what it recognises is not touched",
            len(differing),
            len(texts),
            differing[0],
        )


def _refuse(nemo: NemoFile, reasons: list[str]) -> None:
    if reasons:
        raise UserError(
            f"--to hf: {nemo.path} cannot be expressed as transformers' ParakeetForTDT:\n"
            + "\n".join(f"  {reason}." for reason in reasons)
            + "\nNothing was written. --to nemo keeps such a model as it is."
        )


def write_hugging_face(nemo: NemoFile, directory: Path, dtype: str = "float32") -> None:
    """Writes the files that AutoModelForTDT, AutoProcessor and pipeline("automatic-speech-recognition") load.

    Args:
        nemo: a model that `check_expressible` lets pass.
        directory: for the files; made where it is not there.
        dtype: of all weights, "float32", "bfloat16" or "float16".

    Raises:
        UserError: a tensor has no place in the transformers model, or the other way round.
    """
    from safetensors.torch import save_file
    from transformers import (
        GenerationConfig,
        ParakeetFeatureExtractor,
        ParakeetForTDT,
        ParakeetProcessor,
        ParakeetTDTConfig,
    )

    assert nemo.sentencepiece is not None
    proto = read_sentencepiece(nemo.sentencepiece)
    tokenizer = processor_tokenizer(proto)
    settings = model_settings(nemo.config, nemo.tokens, tokenizer.pad_token_id)
    config = ParakeetTDTConfig(**settings, dtype=dtype, architectures=["ParakeetForTDT"])
    with torch.device("meta"):
        expected = ParakeetForTDT(config).state_dict()
    weights = renamed(nemo.weights, expected, nemo.path)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "model.safetensors"
    save_file(
        {key: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for key, t in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    config.save_pretrained(directory)
    os.chmod(file, (directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    durations = len(durations_of(nemo.config))
    GenerationConfig(**generation_settings(nemo.tokens, tokenizer.pad_token_id, durations)).save_pretrained(directory)
    features = ParakeetFeatureExtractor(**feature_settings(nemo.config))
    ParakeetProcessor(features, tokenizer, decoder_type="tdt").save_pretrained(directory)
    factor = config.encoder_config.subsampling_factor
    if factor != 8:
        log.warning(
            "transformers' processor counts 8 frames of features to an encoder frame, this model has %d: multiply its timestamps by %g",
            factor,
            factor / 8,
        )
    (directory / SENTENCEPIECE).write_bytes(nemo.sentencepiece)
    (directory / TRAINING_SETTINGS).write_text(training_settings(nemo.config), encoding="utf-8")


def renamed(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """A NeMo model's tensors under transformers' names, each with its own memory.

    Args:
        weights: NeMo state dict.
        expected: state dict of the transformers model; only its names and shapes are read.
        path: of the model, for messages.

    Raises:
        UserError: names or shapes are not those expected.
    """
    head = head_of(weights)
    found = {new: t for key, t in weights.items() if (new := to_hugging_face(key, head)) is not None}
    problems = [f"{key} is missing" for key in expected if key not in found]
    problems += [f"{key} has no place" for key in found if key not in expected]
    problems += [
        f"{key} has the shape {tuple(found[key].shape)}, not {tuple(expected[key].shape)}"
        for key in expected
        if key in found and found[key].shape != expected[key].shape
    ]
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise UserError(f"--to hf: the weights of {path} do not fit ParakeetForTDT: {'; '.join(problems[:8])}{more}.")
    own, memory = {}, set()
    for key, tensor in found.items():
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in memory or storage.nbytes() != tensor.nbytes
        memory.add(storage.data_ptr())
        own[key] = tensor.detach().clone().contiguous() if shares else tensor.detach().contiguous()
    return own


def training_settings(config: Mapping[str, Any]) -> str:
    """The NeMo configuration as YAML, without what the other files of the directory say: loss, SpecAugment, dither, dropout of
    prediction network and joint and all else that transformers has no setting for stay as they were."""
    kept = {key: value for key, value in config.items() if key not in NOT_KEPT}
    kept["joint"] = {key: value for key, value in config["joint"].items() if key != "vocabulary"}
    head = (
        "# The NeMo configuration that this model was made with. transformers does not read it; the way back to NeMo takes from\n"
        "# here what config.json has no setting for. Where both say something, config.json holds.\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(kept))
