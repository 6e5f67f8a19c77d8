"""Read a Hugging Face Parakeet-TDT directory as the NeMo model that this project trains, bit for bit the same weights.

Loss, strategies, checkpoints and the files that a run leaves are then those of a .nemo. No code of the directory is
ever run.
"""

import atexit
import logging
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import open_dict

from finetune.errors import UserError
from finetune.models.huggingface.layout import (
    ACTIVATIONS,
    ENCODER,
    NOT_KEPT,
    RECOMPUTED,
    TARGETS,
    TRAINING_SETTINGS,
    feature_settings,
    head_of,
    misfits,
    to_nemo,
)
from finetune.models.huggingface.tokenizer import sentencepiece_of
from finetune.models.nemo import build
from finetune.models.nemo_archive import NOT_BUILT, check_model_config, check_size
from finetune.models.protocols import Transducer
from finetune.models.sentencepiece_model import FILE, parse, write_tokenizer
from finetune.paths import ROOT
from finetune.security.documents import first_line, read_json_object, read_settings, resolved

log = logging.getLogger(__name__)

# NeMo's published Parakeet-TDT recipe, for what transformers has no setting for.
RECIPE = ROOT / "finetune" / "configs" / "models" / "parakeet_tdt_0.6b_v3.yaml"
HUB_TIMEOUT = 5.0  # seconds to wait for an answer
SPEC_AUGMENT = "nemo.collections.asr.modules.SpectrogramAugmentation"
WANTED_FILES = [
    "config.json",
    "*processor*.json",
    "tokenizer*",
    "*.safetensors",
    "*.safetensors.index.json",
    TRAINING_SETTINGS,
]


def is_hugging_face(path: Path) -> bool:
    """Return whether it is a directory in Hugging Face's format, of whatever model."""
    return path.is_dir() and (path / "config.json").is_file()


def load_hugging_face(directory: Path) -> Transducer:
    """Load the NeMo model of a ParakeetForTDT's directory on the CPU, in float32.

    Raises:
        UserError: it is of another kind, or NeMo's modules cannot express it.
    """
    config = nemo_config(directory, log_sources=True)
    weights = read_weights(directory)
    check_size(config, sum(tensor.nbytes for tensor in weights.values()), f"model.name: {directory}")
    content, source = sentencepiece_of(directory, int(config["decoder"]["vocab_size"]))
    log.info("model %s: Hugging Face format; tokenizer from %s", directory, source)
    config["tokenizer"] = {"dir": str(_tokenizer_directory(content)), "type": "bpe"}
    model = build(config, str(directory))
    with open_dict(model.cfg):
        model.cfg.tokenizer.dir = str(directory)
        model.cfg.validation_ds = {"use_start_end_token": False}  # NeMo's own transcribe() reads this key
    _take_weights(model, weights, directory)
    return model.eval()


def nemo_config(directory: Path, log_sources: bool = False) -> dict[str, Any]:
    """Return the NeMo model configuration of a Hugging Face directory, without its tokenizer.

    Args:
        log_sources: log where the settings come from that transformers does not keep.

    Raises:
        UserError: it is no ParakeetForTDT, or one that NeMo's modules cannot express.
    """
    config = _config(directory)
    kept = directory / TRAINING_SETTINGS
    nemo = _read_kept(kept) if kept.is_file() else _recipe()
    try:
        _check_settings(config, directory)
        changed = _merge(nemo, _derived(config, _features(directory), nemo["preprocessor"]))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f"model.name: {directory} holds settings that no ParakeetForTDT has: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from error
    # A file of this machine that it names would be read, and packed into what is saved.
    check_model_config(nemo, f"model.name: {directory}", set())
    if log_sources and not kept.is_file():
        log.info(
            "model %s: it has no %s. What transformers does not keep (loss sigma %g, omega %g; SpecAugment; dropout "
            "%g of the prediction network and %g of the joint; dither) is taken from NeMo's published Parakeet recipe",
            directory,
            TRAINING_SETTINGS,
            nemo["loss"]["tdt_kwargs"].get("sigma", 0.0),
            nemo["loss"]["tdt_kwargs"].get("omega", 0.0),
            nemo["decoder"]["prednet"].get("dropout", 0.0),
            nemo["joint"]["jointnet"].get("dropout", 0.0),
        )
    elif log_sources and changed:
        log.warning("model %s: config.json differs from %s and holds: %s", directory, kept.name, "; ".join(changed))
    return nemo


def check_type(model_type: object, name: str) -> None:
    """Raise UserError if a config.json is of another model than ParakeetForTDT."""
    if model_type != "parakeet_tdt":
        raise UserError(
            f"model.name: {name} is a Hugging Face model of the type {model_type!r}; this project trains models of "
            "the type 'parakeet_tdt' (transformers' ParakeetForTDT) and NeMo transducers (.nemo)."
        )


def _config(directory: Path) -> dict[str, Any]:
    """Return config.json with transformers' defaults for what it leaves out."""
    from transformers import ParakeetTDTConfig

    file = directory / "config.json"
    config = read_json_object(file, "model.name")
    check_type(config.get("model_type"), str(directory))
    try:
        return ParakeetTDTConfig.from_dict(config).to_dict()
    except Exception as error:
        raise UserError(f"model.name: transformers does not take {file}: {error}") from error


def _features(directory: Path) -> dict[str, Any]:
    """Return the feature extractor's settings, from processor_config.json or an older directory's own file."""
    processor, alone = directory / "processor_config.json", directory / "preprocessor_config.json"
    found = read_json_object(processor, "model.name").get("feature_extractor") if processor.is_file() else None
    if not found and alone.is_file():
        found = read_json_object(alone, "model.name")
    if not found:
        raise UserError(f"model.name: {directory} has no processor_config.json with the settings of its features.")
    defaults = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400}
    return {**defaults, "preemphasis": 0.97, **found}


def _check_settings(config: dict[str, Any], directory: Path) -> None:
    encoder = config["encoder_config"]
    problems = []
    if encoder["attention_bias"] != encoder["convolution_bias"]:
        problems.append("encoder_config: attention_bias and convolution_bias differ; NeMo's use_bias is both")
    for key, wanted in (("hidden_act", "silu"), ("subsampling_conv_kernel_size", 3), ("subsampling_conv_stride", 2)):
        if encoder[key] != wanted:
            problems.append(f"encoder_config.{key}: {encoder[key]!r}; NeMo has {wanted!r}")
    if encoder["intermediate_size"] % encoder["hidden_size"]:
        problems.append("encoder_config.intermediate_size is no multiple of hidden_size")
    if config["hidden_act"] not in ACTIVATIONS:
        problems.append(f"hidden_act: {config['hidden_act']!r}; NeMo's joint has {', '.join(ACTIVATIONS)}")
    if config["blank_token_id"] != config["vocab_size"] - 1:
        size = config["vocab_size"]
        problems.append(f"blank_token_id: {config['blank_token_id']} is not the last of vocab_size {size} ids")
    if problems:
        raise UserError(f"model.name: {directory} cannot be expressed in NeMo: {'; '.join(problems)}.")


def _read_kept(path: Path) -> dict[str, Any]:
    """Read the kept NeMo configuration; the classes that it names are replaced by those of ParakeetForTDT."""
    kept = resolved(read_settings(path, "model.name"), f"model.name: {path}")
    return _with_targets({k: v for k, v in kept.items() if k not in NOT_KEPT})


def _recipe() -> dict[str, Any]:
    root = read_settings(RECIPE, "model.name")
    model = {k: v for k, v in root["model"].items() if k not in ("tokenizer", *NOT_BUILT)}
    recipe = resolved({**root, "model": model}, f"model.name: {RECIPE}")["model"]
    return _with_targets(recipe)


def _with_targets(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with NeMo's own classes in place of those that it names."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in ("_target_", "cls", "target")}
        return [without(v) for v in value] if isinstance(value, list) else value

    plain = without(config)
    for part, target in TARGETS.items():
        plain[part] = {"_target_": target, **(plain.get(part) or {})}
    if plain.get("spec_augment"):
        plain["spec_augment"] = {"_target_": SPEC_AUGMENT, **plain["spec_augment"]}
    for section in ("loss", "decoding", "model_defaults"):
        plain[section] = plain.get(section) or {}
    plain["loss"] = {"loss_name": "tdt", **plain["loss"]}
    return plain


def _derived(config: dict[str, Any], features: dict[str, Any], preprocessor: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the Hugging Face files under NeMo's keys."""
    e = config["encoder_config"]
    tokens, durations = int(config["vocab_size"]) - 1, [int(d) for d in config["durations"]]
    width = config["decoder_hidden_size"]
    encoder = {ours: e[theirs] for ours, (theirs, _) in ENCODER.items()}
    return {
        "sample_rate": features["sampling_rate"],
        "model_defaults": {
            "enc_hidden": e["hidden_size"],
            "pred_hidden": width,
            "joint_hidden": width,
            "tdt_durations": durations,
            "num_tdt_durations": len(durations),
        },
        "preprocessor": _preprocessor(features, preprocessor),
        "encoder": {
            **encoder,
            "subsampling": "dw_striding",
            "ff_expansion_factor": e["intermediate_size"] // e["hidden_size"],
        },
        "decoder": {
            "vocab_size": tokens,
            "prednet": {"pred_hidden": width, "pred_rnn_layers": config["num_decoder_layers"]},
        },
        "joint": {
            "num_classes": tokens,
            "num_extra_outputs": len(durations),
            "jointnet": {
                "joint_hidden": width,
                "pred_hidden": width,
                "encoder_hidden": e["hidden_size"],
                "activation": config["hidden_act"],
            },
        },
        "decoding": {
            "model_type": "tdt",
            "durations": durations,
            "greedy": {"max_symbols": config["max_symbols_per_step"]},
        },
        "loss": {"tdt_kwargs": {"durations": durations}},
    }


def _preprocessor(features: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return the features' settings under NeMo's keys; empty where the kept ones already agree."""
    found = feature_settings({"preprocessor": kept})
    del found["padding_value"]
    if all(features[key] == value for key, value in found.items()):
        return {}
    rate = features["sampling_rate"]

    def seconds(samples: int) -> float:
        """Return seconds that NeMo, which truncates the product with the rate, converts to so many samples."""
        found = samples / rate
        return found if int(found * rate) == samples else math.nextafter(found, math.inf)

    return {
        "features": features["feature_size"],
        "sample_rate": rate,
        "n_fft": features["n_fft"],
        "window_size": seconds(features["win_length"]),
        "window_stride": seconds(features["hop_length"]),
        "n_window_size": None,
        "n_window_stride": None,
        "preemph": features["preemphasis"],
    }


def _merge(into: dict[str, Any], values: dict[str, Any], at: str = "") -> list[str]:
    """Override values of a nested dict, in place; return descriptions of the changes."""
    changed = []
    for key, value in values.items():
        if isinstance(value, dict):
            into[key] = into.get(key) or {}
            changed += _merge(into[key], value, f"{at}{key}.")
            continue
        if key in into and into[key] != value:
            changed.append(f"{at}{key} {into[key]} -> {value}")
        into[key] = value
    return changed


def _tokenizer_directory(sentencepiece: bytes) -> Path:
    """Make a directory with the tokenizer files that NeMo packs into a .nemo; it is removed when the process ends."""
    directory = Path(tempfile.mkdtemp(prefix="finetune-tokenizer-"))
    maker = os.getpid()
    atexit.register(lambda: os.getpid() == maker and shutil.rmtree(directory, ignore_errors=True))
    write_tokenizer(parse(sentencepiece, "model.name: the tokenizer"), directory)
    (directory / FILE).write_bytes(sentencepiece)  # byte for byte
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a directory's safetensors files, in float32 (integers as they are).

    Raises:
        UserError: there are none, or one is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        parts = read_json_object(index, "model.name").get("weight_map")
        names = sorted({str(name) for name in parts.values()}) if isinstance(parts, dict) else []
        if outside := [name for name in names if Path(name).name != name]:
            raise UserError(f"model.name: {index} names {outside[0]!r}, which is no file of its folder.")
    weights: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            weights.update(load_file(directory / name))
        except (OSError, SafetensorError) as error:
            file = directory / name
            raise UserError(
                f"model.name: the weights {file} cannot be read: {error}. Only safetensors files are taken."
            ) from error
    return {key: t.float() if t.is_floating_point() else t for key, t in weights.items()}


def _take_weights(model: Transducer, saved: dict[str, torch.Tensor], directory: Path) -> None:
    """Load a directory's weights into the NeMo model, in place; every tensor has to fit."""
    own = model.state_dict()
    head = head_of(own)
    weights = {to_nemo(key, head): tensor for key, tensor in saved.items()}
    expected = {key: tensor for key, tensor in own.items() if not RECOMPUTED.match(key)}
    if problems := misfits(weights, expected):
        raise UserError(f"model.name: the weights of {directory} do not fit: {problems}.")
    blank_H = weights["decoder.prediction.embed.weight"][-1]
    if largest := float(blank_H.abs().max()):
        # Training with transformers changes this row; NeMo's embedding has it as padding, which stays zero.
        log.warning(
            "model %s: the blank's row of the prediction network's embedding is not zero (up to %.3g), as after "
            "training with transformers. NeMo starts from zero, so it is set to zero; the output may change a little",
            directory,
            largest,
        )
        blank_H.zero_()
    model.load_state_dict({**own, **weights})


def cached_file(name: str, file: str) -> Path | None:
    """Return a file of a hub repository from the cache; None if it is not there, or the name is invalid."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:
        return None
    return Path(found) if isinstance(found, str) else None


def files_on_hub(name: str) -> list[str]:
    """Return the names of a hub repository's files. A hub that cannot be reached is asked once, a busy one again."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = HfApi().model_info(name, timeout=HUB_TIMEOUT).siblings or []
    except HfHubHTTPError:
        return HfApi().list_repo_files(name)
    return [file.rfilename for file in found]


def fetch(name: str) -> Path:
    """Return the local copy of a hub repository: its .nemo file, else a directory in Hugging Face's format.

    Args:
        name: "owner/name".

    Raises:
        UserError: the repository holds a model of another kind, or several .nemo files and none of its own name.
        Exception: of huggingface_hub, where the hub is not reached and nothing is cached.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    own = name.split("/")[1] + ".nemo"
    if (cached := cached_file(name, own)) is not None:
        return cached
    try:
        files = files_on_hub(name)
    except Exception as error:  # no network, offline, no such repository
        if (cached := cached_file(name, "config.json")) is None:
            raise
        check_type(read_json_object(cached, "model.name").get("model_type"), name)
        log.info("model %s: the hub was not reached (%s); the copy in the cache is taken", name, type(error).__name__)
        return cached.parent
    archives = [own] if own in files else [file for file in files if file.endswith(".nemo")]
    if len(archives) > 1:
        raise UserError(
            f"model.name: {name} has several .nemo files ({', '.join(archives)}): download one and give its path."
        )
    if archives:
        return Path(hf_hub_download(name, archives[0]))
    if "config.json" not in files:
        raise UserError(f"model.name: {name} has neither a .nemo file nor a model in transformers' format.")
    config = Path(hf_hub_download(name, "config.json"))
    check_type(read_json_object(config, "model.name").get("model_type"), name)
    return Path(snapshot_download(name, allow_patterns=WANTED_FILES))
