"""Write a .nemo file as a directory that transformers loads; NeMo is not needed."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.models.huggingface.layout import (
    NOT_KEPT,
    TRAINING_SETTINGS,
    durations_of,
    encoder_settings,
    feature_settings,
    generation_settings,
    head_of,
    misfits,
    model_settings,
    reasons_against,
    to_hugging_face,
)
from finetune.models.huggingface.tokenizer import (
    decoding_differs,
    differing_as_written,
    encoding_differs,
    processor_tokenizer,
)
from finetune.models.nemo_archive import NemoFile
from finetune.models.sentencepiece_model import FILE

log = logging.getLogger(__name__)


def check_expressible(nemo: NemoFile) -> None:
    """Raise UserError, with every reason, for a model that transformers' ParakeetForTDT cannot express."""
    reasons = []
    if nemo.sentencepiece is None:
        kind = (nemo.config.get("tokenizer") or {}).get("type")
        reasons.append(f"tokenizer.type: {kind!r}; transformers' ParakeetTokenizer is one SentencePiece model (bpe)")
    reasons += reasons_against(nemo.config, nemo.weights, nemo.tokens)
    if nemo.sentencepiece is not None:
        proto = nemo.tokenizer
        try:
            tokenizer = processor_tokenizer(proto).backend_tokenizer
            reasons += [r for r in (encoding_differs(proto, tokenizer), decoding_differs(proto, tokenizer)) if r]
        except UserError as error:
            reasons.append(str(error).rstrip("."))
    if reasons:
        raise _refusal(nemo, reasons)


def check_texts(nemo: NemoFile, texts: list[str]) -> None:
    """Raise UserError for a model whose tokenizer encodes one of these texts differently in transformers.

    Texts that differ only before they are normalised are counted in a warning: recognising needs no encoding.
    """
    proto = nemo.tokenizer
    tokenizer = processor_tokenizer(proto).backend_tokenizer
    if reason := encoding_differs(proto, tokenizer, texts):
        raise _refusal(nemo, [reason])
    if differing := differing_as_written(proto, tokenizer, texts):
        log.warning(
            "labels made with transformers differ for text that is not NFC: %d of %d texts, such as %r. Normalise "
            "texts before transformers is trained on them; what it recognises is not touched",
            len(differing),
            len(texts),
            differing[0],
        )


def _refusal(nemo: NemoFile, reasons: list[str]) -> UserError:
    return UserError(
        f"--to hf: {nemo.path} cannot be expressed as transformers' ParakeetForTDT:\n"
        + "\n".join(f"  {reason}." for reason in reasons)
        + "\nNothing was written. --to nemo keeps such a model as it is."
    )


def write_hugging_face(nemo: NemoFile, directory: Path, dtype: str = "float32") -> None:
    """Write the files that AutoModelForTDT, AutoProcessor and pipeline("automatic-speech-recognition") load.

    Args:
        nemo: a model that passes `check_expressible`.
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

    tokenizer = processor_tokenizer(nemo.tokenizer)
    pad_id = cast(int, tokenizer.pad_token_id)
    config = ParakeetTDTConfig(
        **model_settings(nemo.config, nemo.tokens, pad_id), dtype=dtype, architectures=["ParakeetForTDT"]
    )
    with torch.device("meta"):
        expected = ParakeetForTDT(config).state_dict()
    weights = _renamed(nemo.weights, expected, nemo.path)
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
    GenerationConfig(**generation_settings(nemo.tokens, pad_id, durations)).save_pretrained(directory)
    features = ParakeetFeatureExtractor(**feature_settings(nemo.config))
    ParakeetProcessor(features, tokenizer, decoder_type="tdt").save_pretrained(directory)
    factor = encoder_settings(nemo.config)["subsampling_factor"]
    if factor != 8:
        log.warning(
            "transformers' processor counts 8 frames of features to an encoder frame, this model has %d: multiply its "
            "timestamps by %g",
            factor,
            factor / 8,
        )
    if nemo.sentencepiece is not None:
        (directory / FILE).write_bytes(nemo.sentencepiece)
    (directory / TRAINING_SETTINGS).write_text(_training_settings(nemo.config), encoding="utf-8")


def _renamed(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], path: Path
) -> dict[str, torch.Tensor]:
    """Return a NeMo model's tensors under transformers' names, each with its own memory."""
    head = head_of(weights)
    found = {new: t for key, t in weights.items() if (new := to_hugging_face(key, head)) is not None}
    if problems := misfits(found, expected):
        raise UserError(f"--to hf: the weights of {path} do not fit ParakeetForTDT: {problems}.")
    own, memory = {}, set()
    for key, tensor in found.items():
        storage = tensor.untyped_storage()
        shares = storage.data_ptr() in memory or storage.nbytes() != tensor.nbytes
        memory.add(storage.data_ptr())
        own[key] = tensor.detach().clone().contiguous() if shares else tensor.detach().contiguous()
    return own


def _training_settings(config: Mapping[str, Any]) -> str:
    """Return the NeMo configuration as YAML, without what the other files of the directory hold."""
    kept = {key: value for key, value in config.items() if key not in NOT_KEPT}
    kept["joint"] = {key: value for key, value in config["joint"].items() if key != "vocabulary"}
    head = (
        "# The NeMo configuration that this model was made with. transformers does not read it; the way back to NeMo "
        "takes from\n# here what config.json has no setting for. Where both say something, config.json holds.\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(kept))
