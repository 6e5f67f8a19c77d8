"""Read a Parakeet in Hugging Face's format as the NeMo model that this project trains, bit for bit the same weights.

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
    KINDS,
    NOT_KEPT,
    RECOMPUTED,
    STREAMING_ENCODER,
    TRAINING_SETTINGS,
    Kind,
    feature_settings,
    misfits,
    names_of,
    piece_count,
    to_nemo,
)
from finetune.models.huggingface.tokenizer import sentencepiece_of
from finetune.models.nemo import build
from finetune.models.nemo_archive import NOT_BUILT, check_model_config, check_size
from finetune.models.protocols import AsrModel
from finetune.models.sentencepiece_model import FILE, parse, write_tokenizer
from finetune.models.skip_init import SkipInit
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


def load_hugging_face(directory: Path) -> AsrModel:
    """Load the NeMo model of a directory in Hugging Face's format on the CPU, in float32.

    Raises:
        UserError: it is of another kind, or NeMo's modules cannot express it.
    """
    config = nemo_config(directory, log_sources=True)
    weights = read_weights(directory)
    check_size(config, sum(tensor.nbytes for tensor in weights.values()), f"model.name: {directory}")
    content, source = sentencepiece_of(directory, piece_count(config))
    log.info("model %s: Hugging Face format; tokenizer from %s", directory, source)
    config["tokenizer"] = {"dir": str(_tokenizer_directory(content)), "type": "bpe"}
    with SkipInit():
        model = build(config, str(directory))
    with open_dict(model.cfg):
        model.cfg.tokenizer.dir = str(directory)
        model.cfg.validation_ds = {"use_start_end_token": False}  # NeMo's own transcribe() reads this key
    _take_weights(model, weights, directory, _kind(directory))
    return model.eval()


def nemo_config(directory: Path, log_sources: bool = False) -> dict[str, Any]:
    """Return the NeMo model configuration of a Hugging Face directory, with `target`, without its tokenizer.

    Args:
        log_sources: log where the settings come from that transformers does not keep.

    Raises:
        UserError: it is no model of `KINDS`, or one that NeMo's modules cannot express.
    """
    kind = _kind(directory)
    config = _config(directory, kind)
    kept = directory / TRAINING_SETTINGS
    nemo = _read_kept(kept, kind) if kept.is_file() else _recipe(kind)
    try:
        processor = _processor(directory)
        _check_settings(config, processor, kind, directory)
        changed = _merge(nemo, _derived(config, processor, nemo["preprocessor"], kind))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
        raise UserError(
            f"model.name: {directory} holds settings that no {kind.name} has: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from error
    # A file of this machine that it names would be read, and packed into what is saved.
    check_model_config(nemo, f"model.name: {directory}", set())
    if log_sources and not kept.is_file():
        log.info(
            "model %s: it has no %s. What transformers does not keep (%s) is taken from NeMo's published recipes",
            directory,
            TRAINING_SETTINGS,
            _not_kept(nemo),
        )
    elif log_sources and changed:
        log.warning("model %s: config.json differs from %s and holds: %s", directory, kept.name, "; ".join(changed))
    return nemo


def _not_kept(nemo: dict[str, Any]) -> str:
    """Return in words what a configuration holds that transformers has no setting for."""
    told = []
    if "joint" in nemo:
        loss = nemo["loss"].get("tdt_kwargs") or nemo["loss"].get("warprnnt_numba_kwargs") or {}
        known = ("sigma", "omega", "fastemit_lambda")
        told.append("loss " + ", ".join(f"{key.split('_')[0]} {loss[key]:g}" for key in known if key in loss))
        networks = nemo["decoder"]["prednet"].get("dropout", 0.0), nemo["joint"]["jointnet"].get("dropout", 0.0)
        told.append("dropout {:g} of the prediction network and {:g} of the joint".format(*networks))
    return "; ".join([*told, "SpecAugment", "dither"])


def check_type(model_type: object, name: str) -> None:
    """Raise UserError if a config.json is of a model that is none of `KINDS`."""
    if model_type not in KINDS:
        known = ", ".join(f"{key} ({kind.name})" for key, kind in KINDS.items())
        raise UserError(
            f"model.name: {name} is a Hugging Face model of the type {model_type!r}; this project trains NeMo models "
            f"(.nemo) and models of the types {known}."
        )


def _kind(directory: Path) -> Kind:
    model_type = read_json_object(directory / "config.json", "model.name").get("model_type")
    check_type(model_type, str(directory))
    return KINDS[str(model_type)]


def _config(directory: Path, kind: Kind) -> dict[str, Any]:
    """Return config.json with transformers' defaults for what it leaves out."""
    import transformers

    file = directory / "config.json"
    try:
        return getattr(transformers, kind.config).from_dict(read_json_object(file, "model.name")).to_dict()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.name: transformers does not take {file}: {error}") from error


def _processor(directory: Path) -> dict[str, Any]:
    """Return processor_config.json with the feature extractor's settings, which older directories keep in a file of
    their own, and transformers' defaults for those that it leaves out."""
    file, alone = directory / "processor_config.json", directory / "preprocessor_config.json"
    found = read_json_object(file, "model.name") if file.is_file() else {}
    features = found.get("feature_extractor")
    if not features and alone.is_file():
        features = read_json_object(alone, "model.name")
    if not features:
        raise UserError(f"model.name: {directory} has no processor_config.json with the settings of its features.")
    defaults = {"feature_size": 80, "sampling_rate": 16000, "hop_length": 160, "n_fft": 512, "win_length": 400}
    return {**found, "feature_extractor": {**defaults, "preemphasis": 0.97, **features}}


def _check_settings(config: dict[str, Any], processor: dict[str, Any], kind: Kind, directory: Path) -> None:
    encoder, problems = config["encoder_config"], []
    if encoder["attention_bias"] != encoder["convolution_bias"]:
        problems.append("encoder_config: attention_bias and convolution_bias differ; NeMo's use_bias is both")
    for key, wanted in (("hidden_act", "silu"), ("subsampling_conv_kernel_size", 3), ("subsampling_conv_stride", 2)):
        if encoder[key] != wanted:
            problems.append(f"encoder_config.{key}: {encoder[key]!r}; NeMo has {wanted!r}")
    if encoder["intermediate_size"] % encoder["hidden_size"]:
        problems.append("encoder_config.intermediate_size is no multiple of hidden_size")
    if kind.head != "ctc" and config["hidden_act"] not in ACTIVATIONS:
        problems.append(f"hidden_act: {config['hidden_act']!r}; NeMo's joint has {', '.join(ACTIVATIONS)}")
    blank = "pad_token_id" if kind.head == "ctc" else "blank_token_id"
    if config[blank] != config["vocab_size"] - 1:
        problems.append(f"{blank}: {config[blank]} is not the last of vocab_size {config['vocab_size']} ids")
    if (dtype := processor["feature_extractor"].get("mel_filters_dtype", "float32")) != "float32":
        problems.append(f"feature_extractor.mel_filters_dtype: {dtype!r}; NeMo's filters are in float32")
    if kind.prompt and config["prompt_intermediate_size"] != 2 * encoder["hidden_size"]:
        problems.append(
            f"prompt_intermediate_size: {config['prompt_intermediate_size']} is not twice the encoder's hidden_size "
            f"{encoder['hidden_size']}, as NeMo's is"
        )
    if problems:
        raise UserError(f"model.name: {directory} cannot be expressed in NeMo: {'; '.join(problems)}.")


def _read_kept(path: Path, kind: Kind) -> dict[str, Any]:
    """Read the kept NeMo configuration; the classes that it names are replaced by those of the kind."""
    kept = resolved(read_settings(path, "model.name"), f"model.name: {path}")
    return _with_targets({k: v for k, v in kept.items() if k not in NOT_KEPT}, kind)


def _recipe(kind: Kind) -> dict[str, Any]:
    """Return NeMo's published recipe for a kind: that of Parakeet-TDT, with what the others have in its place."""
    root = read_settings(RECIPE, "model.name")
    model = {k: v for k, v in root["model"].items() if k not in ("tokenizer", *NOT_BUILT)}
    recipe = resolved({**root, "model": model}, f"model.name: {RECIPE}")["model"]
    if kind.head != "tdt":
        for section, key in (
            ("model_defaults", "tdt_durations"),
            ("model_defaults", "num_tdt_durations"),
            ("joint", "num_extra_outputs"),
            ("decoding", "model_type"),
            ("decoding", "durations"),
        ):
            del recipe[section][key]
        fast_emit = 0.005 if kind.streaming else 0.0
        recipe["loss"] = {
            "loss_name": "default",
            "warprnnt_numba_kwargs": {"fastemit_lambda": fast_emit, "clamp": -1.0},
        }
    if kind.head == "ctc":
        for section in ("joint", "loss", "rnnt_reduction", "model_defaults"):
            del recipe[section]
        recipe |= {"ctc_reduction": "mean_batch", "decoder": {}, "decoding": {"strategy": "greedy_batch"}}
    if kind.streaming:
        recipe["preprocessor"]["normalize"] = "NA"
    if kind.prompt:
        recipe["decoding"]["strip_lang_tags"] = True
    return _with_targets(recipe, kind)


def _with_targets(config: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the configuration with NeMo's own classes in place of those that it names."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in ("_target_", "cls", "target")}
        return [without(v) for v in value] if isinstance(value, list) else value

    plain = {"target": kind.target, **without(config)}
    for part, target in kind.targets.items():
        plain[part] = {"_target_": target, **(plain.get(part) or {})}
    if plain.get("spec_augment"):
        plain["spec_augment"] = {"_target_": SPEC_AUGMENT, **plain["spec_augment"]}
    for section in ("decoding",) if kind.head == "ctc" else ("loss", "decoding", "model_defaults"):
        plain[section] = plain.get(section) or {}
    if kind.head == "tdt":
        plain["loss"] = {"loss_name": "tdt", **plain["loss"]}
    return plain


def _derived(
    config: dict[str, Any], processor: dict[str, Any], preprocessor: dict[str, Any], kind: Kind
) -> dict[str, Any]:
    """Return the settings of the Hugging Face files under NeMo's keys."""
    e, features = config["encoder_config"], processor["feature_extractor"]
    tokens = int(config["vocab_size"]) - 1
    encoder = {
        **{ours: e[theirs] for ours, (theirs, _) in ENCODER.items()},
        "subsampling": "dw_striding",
        "ff_expansion_factor": e["intermediate_size"] // e["hidden_size"],
    }
    if kind.streaming:
        encoder |= {key: values[0] for key, values in STREAMING_ENCODER.items()}
        encoder["att_context_size"] = _contexts(e, processor)
    derived = {
        "sample_rate": features["sampling_rate"],
        "preprocessor": _preprocessor(features, preprocessor),
        "encoder": encoder,
    }
    if kind.head == "ctc":
        return {**derived, "decoder": {"feat_in": e["hidden_size"], "num_classes": tokens, "vocabulary": []}}
    width = config["decoder_hidden_size"]
    jointnet = {"joint_hidden": width, "pred_hidden": width, "encoder_hidden": e["hidden_size"]}
    derived |= {
        "model_defaults": {"enc_hidden": e["hidden_size"], "pred_hidden": width, "joint_hidden": width},
        "decoder": {
            "vocab_size": tokens,
            "prednet": {"pred_hidden": width, "pred_rnn_layers": config["num_decoder_layers"]},
        },
        "joint": {"num_classes": tokens, "jointnet": {**jointnet, "activation": config["hidden_act"]}},
        "decoding": {"greedy": {"max_symbols": config["max_symbols_per_step"]}},
    }
    if kind.head == "tdt":
        durations = [int(d) for d in config["durations"]]
        derived["model_defaults"] |= {"tdt_durations": durations, "num_tdt_durations": len(durations)}
        derived["joint"]["num_extra_outputs"] = len(durations)
        derived["decoding"] |= {"model_type": "tdt", "durations": durations}
        derived["loss"] = {"tdt_kwargs": {"durations": durations}}
    if kind.prompt:
        derived["initialize_prompt_feature"] = True
        derived["model_defaults"] |= {
            "initialize_prompt_feature": True,
            "num_prompts": config["num_prompts"],
            "prompt_dictionary": _prompts(processor),
        }
    return derived


def _contexts(encoder: dict[str, Any], processor: dict[str, Any]) -> list[Any]:
    """Return the attention contexts as NeMo writes them: the default first, one alone without a list around it."""
    from transformers.models.nemotron_asr_streaming.processing_nemotron_asr_streaming import (
        DEFAULT_NUM_LOOKAHEAD_TOKENS,
    )

    left, default = encoder["sliding_window"] - 1, encoder["default_num_lookahead_tokens"]
    rights = processor.get("supported_num_lookahead_tokens") or DEFAULT_NUM_LOOKAHEAD_TOKENS
    contexts = [[left, right] for right in dict.fromkeys([default, *rights])]
    return contexts[0] if len(contexts) == 1 else contexts


def _prompts(processor: dict[str, Any]) -> dict[str, int]:
    from transformers.models.nemotron3_5_asr.processing_nemotron3_5_asr import DEFAULT_PROMPT_DICTIONARY

    return dict(processor.get("prompt_dictionary") or DEFAULT_PROMPT_DICTIONARY)


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


def _take_weights(model: AsrModel, saved: dict[str, torch.Tensor], directory: Path, kind: Kind) -> None:
    """Load a directory's weights into the NeMo model, in place; every tensor has to fit."""
    own = model.state_dict()
    names = names_of(kind, own)
    weights = {to_nemo(key, names): tensor for key, tensor in saved.items()}
    expected = {key: tensor for key, tensor in own.items() if not RECOMPUTED.match(key)}
    if problems := misfits(weights, expected):
        raise UserError(f"model.name: the weights of {directory} do not fit: {problems}.")
    if kind.head != "ctc":
        _clear_blank(weights["decoder.prediction.embed.weight"][-1], directory)
    model.load_state_dict({**own, **weights})


def _clear_blank(blank_H: torch.Tensor, directory: Path) -> None:
    """Set the embedding of the blank to zero, in place."""
    if largest := float(blank_H.abs().max()):
        # Training with transformers changes this row; NeMo's embedding has it as padding, which stays zero.
        log.warning(
            "model %s: the blank's row of the prediction network's embedding is not zero (up to %.3g), as after "
            "training with transformers. NeMo starts from zero, so it is set to zero; the output may change a little",
            directory,
            largest,
        )
        blank_H.zero_()


def cached_file(name: str, file: str) -> Path | None:
    """Return a file of a hub repository from the cache; None if it is not there, or the name is invalid."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:
        return None
    return Path(found) if isinstance(found, str) else None


def cached_archive(name: str) -> Path | None:
    """Return the .nemo file of a hub repository from the cache: that of its own name, else the only one."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if (own := cached_file(name, name.split("/")[1] + ".nemo")) is not None:
        return own
    folder = Path(HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    found = list((folder / "snapshots" / commit).glob("*.nemo"))
    return found[0] if len(found) == 1 else None


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
        if (archive := cached_archive(name)) is not None:
            return archive
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
