"""LoRA adapters: merged into their base weights, and as files in PEFT's format.

A checkpoint keeps base weights and adapters apart, so that a run continues exactly. A .nemo file holds their sum under
the original names, so that plain NeMo reads it. An adapter's directory holds what a run trained, without the weights
of the base model: adapter_config.json and adapter_model.safetensors as PEFT's `save_pretrained` of the whole NeMo
model would write them (prediction network, joint and CTC head are its `modules_to_save`), and base_model.json with
name and hash of the base model.
"""

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from finetune.errors import UserError
from finetune.models.nemo import HEAD_MODULES, pieces_of
from finetune.models.protocols import AsrModel
from finetune.security.documents import first_line, parse_json, read_text

if TYPE_CHECKING:
    from peft import LoraConfig

    from finetune.config.schema import ModelConfig

log = logging.getLogger(__name__)

LORA_KEY = re.compile(r"^(.*)\.lora_([AB])\.\w+\.weight$")
CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base_model.json"
PREFIX = "base_model.model."
TRAINED_WHOLE = tuple(f"{name}." for name in HEAD_MODULES)


def merge_saved_lora(state: dict[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """Return the state dict with the adapters added to their base weights, named as without adapters.

    Args:
        state: state dict of a model or checkpoint, with any prefix; not changed.
        scaling: alpha / rank.

    Returns:
        A new dict; tensors without an adapter are those of `state`. Sums are made in float32 and kept in the base
        weight's type.
    """
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        if found := LORA_KEY.match(key):
            adapters.setdefault(found[1], {})[found[2]] = tensor
    merged = type(state)()
    for key, tensor in state.items():
        if LORA_KEY.match(key):
            continue
        linear, _, name = key.rpartition(".base_layer.")
        if linear in adapters and name == "weight":
            update = scaling * (adapters[linear]["B"].float() @ adapters[linear]["A"].float())
            tensor = (tensor.float() + update.to(tensor.device)).to(tensor.dtype)
        merged[f"{linear}.{name}" if linear else key] = tensor
    return merged


def merged_state_dict(model: AsrModel) -> dict[str, torch.Tensor]:
    """Return the weights as a model without adapters has them; the model's own are not changed."""
    state = model.state_dict()
    return merge_saved_lora(state, model.lora_scaling) if hasattr(model, "lora_scaling") else state


def load_merged_state_dict(model: AsrModel, weights: dict[str, torch.Tensor]) -> None:
    """Load weights without adapters into the model's base layers, in place; its adapters then add nothing.

    Args:
        weights: what `merged_state_dict` returned.

    Raises:
        KeyError: names differ.
    """
    full, plain = {}, {key: key.replace(".base_layer.", ".") for key in model.state_dict()}
    present = {t.data_ptr(): plain[key] for key, t in model.state_dict().items() if plain[key] in weights}
    for key, tensor in model.state_dict().items():
        if found := LORA_KEY.match(key):
            full[key] = torch.zeros_like(tensor) if found[2] == "B" else tensor
        else:
            # A file keeps a tensor that modules share under one of its names only.
            full[key] = weights[plain[key] if plain[key] in weights else present[tensor.data_ptr()]]
    if unexpected := sorted(set(weights) - set(plain.values())):
        raise KeyError(f"weights without a place in the model: {', '.join(unexpected[:8])}")
    model.load_state_dict(full)


@dataclass(frozen=True)
class Adapter:
    """An adapter read from its files."""

    path: Path
    settings: dict[str, Any]
    """Those of `lora_settings` that decide what fits: rank, alpha, targets and train_decoder."""
    base: dict[str, Any]
    """base_model.json: `name` and `sha256`."""
    tensors: dict[str, torch.Tensor]
    """By PEFT's names without their prefix: factors `encoder...lora_A.weight`, and weights under their own names."""


def is_adapter(path: Path) -> bool:
    """Return whether it is the directory of a PEFT adapter."""
    return (path / CONFIG).is_file()


def _adapter_names(model: AsrModel, train_decoder: bool) -> dict[str, str]:
    """Return what an adapter holds of a model, by PEFT's names without their prefix: the names in its state dict."""
    names = {}
    for name in model.state_dict():
        if found := LORA_KEY.match(name):
            names[f"{found[1]}.lora_{found[2]}.weight"] = name
        elif train_decoder and name.startswith(TRAINED_WHOLE):
            names[name] = name
    return names


def base_hash(model: AsrModel, train_decoder: bool) -> str:
    """Return the SHA-256 of what an adapter needs of its base model: names, shapes, types and values of the weights,
    and the tokens. LoRA layers change nothing of it.

    Args:
        train_decoder: prediction network and joint come with the adapter, so they are left out.
    """
    digest = hashlib.sha256(json.dumps(pieces_of(model)).encode())
    state = {n.replace(".base_layer.", "."): t for n, t in model.state_dict().items() if not LORA_KEY.match(n)}
    for name in sorted(state):
        if train_decoder and name.startswith(TRAINED_WHOLE):
            continue
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def name_base(model: AsrModel, m: "ModelConfig", base: str, started_from: str | None, changed: bool) -> None:
    """Set `model.lora_base`, by which an adapter names its base model; where it cannot, no adapter is written.

    Args:
        base: hash of the base model as it was loaded.
        started_from: the same hash when a checkpoint's weights were loaded; None: no checkpoint.
        changed: whether vocabulary or heads differ from the base model's.
    """
    why = ""
    if str(m.name).endswith((".yaml", ".yml")):
        why = "the base model is no file that can be loaded again"
    elif changed:
        why = (
            "the run changed the base model's heads (model.tokenizer, model.add_ctc), so that the adapter does not "
            "fit its file; model.nemo is whole"
        )
    elif started_from is not None and base_hash(model, m.lora_train_decoder) != started_from:
        why = "the checkpoint's base weights are not those of model.name"
    model.lora_base = None if why else {"name": str(m.name), "sha256": base}
    if why:
        log.warning("no adapter will be written beside model.nemo: %s", why)


def write_adapter(model: AsrModel, folder: Path) -> None:
    """Write the adapter of a model with LoRA layers and whole weights, over an earlier one."""
    state = model.state_dict()
    names = _adapter_names(model, model.lora_settings["train_decoder"])
    tensors = {PREFIX + name: state[own].detach().to("cpu", copy=True).contiguous() for name, own in names.items()}
    aside = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    _config(model).save_pretrained(str(aside))
    save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    os.chmod(aside / WEIGHTS, (aside / CONFIG).stat().st_mode)  # safetensors writes for the owner alone
    (aside / BASE).write_text(json.dumps(model.lora_base, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(aside, folder)


def _config(model: AsrModel) -> "LoraConfig":
    from peft import LoraConfig

    s = model.lora_settings
    saved = None
    if s["train_decoder"]:
        # The modules that hold parameters themselves: PEFT replaces them in place, so that NeMo's decoding, which
        # holds the prediction network and the joint, computes with the trained ones.
        saved = [
            name
            for name, module in model.named_modules()
            if name.startswith(TRAINED_WHOLE) and next(module.parameters(recurse=False), None) is not None
        ]
    return LoraConfig(
        r=s["rank"],
        lora_alpha=int(s["alpha"]) if s["alpha"].is_integer() else s["alpha"],
        lora_dropout=s["dropout"],
        target_modules=rf"encoder\.layers\.\d+\.(.*\.)?({'|'.join(s['targets'])})",
        modules_to_save=saved,
        base_model_name_or_path=model.lora_base["name"] if model.lora_base else None,
        inference_mode=True,
    )


def read_adapter(path: Path) -> Adapter:
    """Read an adapter that `write_adapter` or PEFT has written; raise UserError where it is not whole, or another."""
    try:
        config, base = (parse_json(read_text(path / name)) for name in (CONFIG, BASE))
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path / WEIGHTS).items()}
        found = str(config["target_modules"])
        settings = {
            "rank": int(config["r"]),
            "alpha": float(config["lora_alpha"]),
            "targets": sorted(found[found.rindex("(") + 1 : found.rindex(")")].split("|")),
            "train_decoder": any(name.startswith(TRAINED_WHOLE) for name in tensors),
        }
        plain = not (config.get("use_dora") or config.get("use_rslora") or config.get("rank_pattern"))
        if config.get("peft_type") != "LORA" or not plain or settings["rank"] < 1:
            raise ValueError("it is no plain LoRA adapter")
        if not {"name", "sha256"} <= base.keys():
            raise ValueError(f"{BASE} names no base model")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, SafetensorError) as error:
        raise UserError(
            f"{path} cannot be read as an adapter: {first_line(error)}. It needs {CONFIG}, {WEIGHTS} and {BASE}, as a "
            "LoRA run leaves them in training.output_dir/adapter."
        ) from error
    return Adapter(path, settings, base, tensors)


def check_base(adapter: Adapter, model: AsrModel, name: str) -> None:
    """Raise UserError if weights or tokens of the base model, as it was loaded, are not those of the adapter's."""
    found = base_hash(model, adapter.settings["train_decoder"])
    if found != adapter.base["sha256"]:
        raise UserError(
            f"the adapter {adapter.path} was trained on another base model than {name}: weights or tokens differ "
            f"(SHA-256 {adapter.base['sha256'][:12]}... in {BASE}, {found[:12]}... here). Give the base model that it "
            f"was trained on: {adapter.base['name']}."
        )


def _check_names(adapter: Adapter, expected: set[str]) -> None:
    if set(adapter.tensors) != expected:
        odd = sorted(set(adapter.tensors) ^ expected)
        raise UserError(
            f"the adapter {adapter.path} does not fit this model: {len(odd)} tensors are in one of them only, such as "
            f"{odd[0]}."
        )


@torch.no_grad()
def merge_adapter(model: AsrModel, adapter: Adapter) -> None:
    """Add the updates to the weights of a checked base model, in place, with the same sums as in a run's model.nemo.

    Raises:
        UserError: the adapter has no place in the model.
    """
    weights = model.state_dict()
    factors = {n.removesuffix(".lora_A.weight") for n in adapter.tensors if n.endswith(".lora_A.weight")}
    own = set(_adapter_names(model, adapter.settings["train_decoder"]))
    _check_names(adapter, {f"{n}.lora_{x}.weight" for n in factors for x in "AB"} | own)
    scaling = adapter.settings["alpha"] / adapter.settings["rank"]
    added = 0.0
    try:
        for name in factors:
            a, b = (adapter.tensors[f"{name}.lora_{x}.weight"].float() for x in "AB")
            weight, update = weights[f"{name}.weight"], scaling * (b @ a)
            weight.copy_((weight.float() + update).to(weight.dtype))
            added = max(added, float(update.abs().max()))
        for name in own:
            weights[name].copy_(adapter.tensors[name])
    except (KeyError, RuntimeError) as error:
        raise UserError(f"the adapter {adapter.path} does not fit this model: {first_line(error)}.") from error
    if not added:
        log.warning("the adapter %s changes no weight of the encoder: its second factors are zero", adapter.path)


@torch.no_grad()
def load_into_lora(model: AsrModel, adapter: Adapter) -> None:
    """Load the adapter into the LoRA layers of a base model, in place, to continue its training.

    Raises:
        UserError: the layers have other settings than the adapter's.
    """
    ours = {**model.lora_settings, "targets": sorted(model.lora_settings["targets"])}
    wrong = [
        f"model.lora_{key}: {str(value).replace(chr(39), '').replace('True', 'true').replace('False', 'false')}"
        for key, value in adapter.settings.items()
        if value != ours[key]
    ]
    if wrong:
        raise UserError(
            f"model.adapter: {adapter.path} was trained with other settings than this run's. Write {', '.join(wrong)}."
        )
    state, names = model.state_dict(), _adapter_names(model, adapter.settings["train_decoder"])
    _check_names(adapter, set(names))
    for name, own in names.items():
        if state[own].shape != adapter.tensors[name].shape:
            raise UserError(
                f"model.adapter: {adapter.path} does not fit this model: {name} is "
                f"{tuple(adapter.tensors[name].shape)} there and {tuple(state[own].shape)} here."
            )
        state[own].copy_(adapter.tensors[name])
