"""Write a .nemo file as a directory that transformers loads; NeMo is not needed."""

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from finetune.errors import UserError
from finetune.models.huggingface.layout import (
    CTC,
    NOT_KEPT,
    TRAINING_SETTINGS,
    TRANSDUCER,
    Kind,
    durations_of,
    encoder_settings,
    feature_settings,
    generation_settings,
    kind_of,
    language_tags,
    misfits,
    model_settings,
    names_of,
    processor_settings,
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

HYBRID_SECTIONS = ("aux_ctc", "interctc")
TRANSDUCER_SECTIONS = ("joint", "loss", "rnnt_reduction", "model_defaults")


def head_of_hybrid(nemo: NemoFile, head: str | None) -> tuple[NemoFile, str]:
    """Return one head of a hybrid model with the encoder as a model of its own, and what is left out, in words.

    Args:
        head: "ctc" or "transducer" (TDT or RNN-T), the default of a hybrid model unless CTC was trained alone.

    Raises:
        UserError: the model has no such head.
    """
    if not nemo.config.get("aux_ctc"):
        own = "ctc" if kind_of(nemo.config).head == "ctc" else "transducer"
        if head not in (None, own):
            raise UserError(f"--head {head}: {nemo.path} has only {'a CTC head' if own == 'ctc' else 'a transducer'}.")
        return nemo, ""
    if head is None and nemo.config["aux_ctc"].get("ctc_loss_weight") == 1:
        head = "ctc"
    plain = {key: value for key, value in nemo.config.items() if key not in HYBRID_SECTIONS}
    if head != "ctc":
        weights = {key: tensor for key, tensor in nemo.weights.items() if not key.startswith("ctc_decoder.")}
        return replace(nemo, config={**plain, "target": TRANSDUCER}, weights=weights), "the CTC head (--head ctc)"
    aux, decoder = nemo.config["aux_ctc"], {"feat_in": nemo.config["encoder"]["d_model"]}
    config = {
        **{key: value for key, value in plain.items() if key not in TRANSDUCER_SECTIONS},
        "target": CTC,
        "ctc_reduction": aux.get("ctc_reduction", "mean_batch"),
        "decoder": {**decoder, **{key: value for key, value in aux["decoder"].items() if value is not None}},
        "decoding": aux.get("decoding") or {},
    }
    weights = {
        key.replace("ctc_decoder.", "decoder.", 1): tensor
        for key, tensor in nemo.weights.items()
        if not key.startswith(("decoder.", "joint."))
    }
    return replace(nemo, config=config, weights=weights), "the transducer (--head transducer)"


def check_expressible(nemo: NemoFile) -> None:
    """Raise UserError, with every reason, for a model that no class of transformers can express."""
    reasons, kind = [], kind_of(nemo.config)
    if nemo.sentencepiece is None:
        type_ = (nemo.config.get("tokenizer") or {}).get("type")
        reasons.append(f"tokenizer.type: {type_!r}; transformers' ParakeetTokenizer is one SentencePiece model (bpe)")
    reasons += reasons_against(nemo.config, nemo.weights, kind, nemo.tokens)
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
        f"--to hf: {nemo.path} cannot be expressed as transformers' {kind_of(nemo.config).name}:\n"
        + "\n".join(f"  {reason}." for reason in reasons)
        + "\nNothing was written. --to nemo keeps such a model as it is."
    )


def write_hugging_face(nemo: NemoFile, directory: Path, dtype: str = "float32") -> None:
    """Write the files that transformers' auto classes and pipeline("automatic-speech-recognition") load.

    Args:
        nemo: a model that passes `check_expressible`.
        dtype: of all weights, "float32", "bfloat16" or "float16".

    Raises:
        UserError: a tensor has no place in the transformers model, or the other way round.
    """
    import transformers
    from safetensors.torch import save_file

    kind = kind_of(nemo.config)
    tags = language_tags(nemo.config)
    tokenizer = processor_tokenizer(nemo.tokenizer, blank_pads=kind.head == "ctc", left_out=tags)
    pad_id = cast(int, tokenizer.pad_token_id)
    settings = model_settings(nemo.config, kind, nemo.tokens, pad_id)
    config = getattr(transformers, kind.config)(**settings, dtype=dtype, architectures=[kind.name])
    with torch.device("meta"):
        expected = getattr(transformers, kind.name)(config).state_dict()
    weights = _renamed(nemo, kind, expected)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "model.safetensors"
    save_file(
        {key: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for key, t in weights.items()},
        file,
        metadata={"format": "pt"},
    )
    config.save_pretrained(directory)
    os.chmod(file, (directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone
    if kind.head != "ctc":
        generation = generation_settings(kind, nemo.tokens, pad_id, len(durations_of(nemo.config)))
        transformers.GenerationConfig(**generation).save_pretrained(directory)
    features = getattr(transformers, kind.features)(**feature_settings(nemo.config))
    processor = getattr(transformers, kind.processor)(features, tokenizer, **processor_settings(nemo.config, kind))
    processor.save_pretrained(directory)
    factor = encoder_settings(nemo.config, kind)["subsampling_factor"]
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


def _renamed(nemo: NemoFile, kind: Kind, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a NeMo model's tensors under transformers' names, each with its own memory."""
    names = names_of(kind, nemo.weights)
    found = {new: t for key, t in nemo.weights.items() if (new := to_hugging_face(key, names)) is not None}
    if problems := misfits(found, expected):
        raise UserError(f"--to hf: the weights of {nemo.path} do not fit {kind.name}: {problems}.")
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
    for part in {"joint", "decoder"} & kept.keys():
        kept[part] = {key: value for key, value in config[part].items() if key != "vocabulary"}
    head = (
        "# The NeMo configuration that this model was made with. transformers does not read it; the way back to NeMo "
        "takes from\n# here what config.json has no setting for. Where both say something, config.json holds.\n"
    )
    return head + OmegaConf.to_yaml(OmegaConf.create(kept))
