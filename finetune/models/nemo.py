"""NeMo transducer models: loading, checking, and preparing them for training outside of Lightning."""

import logging
import os
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.models import huggingface, nemo_files
from finetune.security.archives import reading
from finetune.security.documents import read_settings, resolved
from finetune.strategies.lora import load_merged_state_dict, merged_state_dict
from finetune.strategies.lora_adapters import check_base, is_adapter, merge_adapter, read_adapter

log = logging.getLogger(__name__)


def import_nemo() -> Any:
    """NeMo's ASR models module, imported late (it takes 10 s) and with its own logging turned down."""
    os.environ.setdefault("ONE_LOGGER_JOB_CATEGORY", "test")
    warnings.filterwarnings("ignore", category=UserWarning, module="(pydub|lightning|nemo|lhotse|torch.jit).*")
    warnings.filterwarnings("ignore", category=SyntaxWarning)
    for noisy in ("nv_one_logger", "numexpr", "lhotse", "matplotlib", "lightning", "lightning.pytorch"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from nemo.collections.asr import models

    return models


def load_model(name: str, tokenizer: str | None = None) -> Any:
    """A NeMo transducer with a SentencePiece tokenizer (EncDecRNNTBPEModel, TDT or RNN-T head), on the CPU.

    Args:
        name: a .nemo file, a run's output directory (its model.nemo), the directory of an adapter (its base model with the adapter
            merged), a Hugging Face directory (ParakeetForTDT), a hub name, or a NeMo model YAML (random weights).
        tokenizer: directory with `tokenizer.model`, for a YAML that names none.

    Raises:
        UserError: nothing is found under the name, or it is not a transducer that this project trains.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "model.nemo").is_file():
            return _restore(path / "model.nemo")
        if is_adapter(path):
            return _with_adapter(path)
        if huggingface.is_hugging_face(path):
            return _check(huggingface.load_hugging_face(path), name)
        raise UserError(
            f"model.name: the directory {name} holds no model.nemo and no config.json. Give a .nemo file, a finished run's directory or a "
            "Hugging Face directory."
        )
    if path.suffix in (".yaml", ".yml"):
        return _build(path, tokenizer)
    if path.suffix == ".nemo":
        if not path.is_file():
            raise UserError(f"model.name: there is no file {name} (looked in {Path.cwd()}).")
        return _restore(path)
    return _download(name)


def _with_adapter(path: Path) -> Any:
    adapter = read_adapter(path)
    base = adapter.base["name"]
    try:
        model = load_model(base)
    except UserError as error:
        raise UserError(
            f"model.name: {path} is an adapter of the base model {base}, which cannot be loaded: {error} Put it there, or write its present "
            f"place as `name` into {path / 'base_model.json'}.",
            exit_code=error.exit_code,
        ) from error
    check_base(adapter, model, base)
    merge_adapter(model, adapter)
    return model


def move_to_device(model: Any, device: str) -> Any:
    """The model on a device of this machine.

    Raises:
        UserError: there is no such device.
    """
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device: {device} cannot be used: {str(error).splitlines()[0]}. This machine has "
            f"cpu{''.join(f', cuda:{i}' for i in range(torch.cuda.device_count()))}."
        ) from error


def _restore(path: Path) -> Any:
    import_nemo()
    try:
        model = nemo_files.restore(path)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"model.name: {path} cannot be read as a NeMo model: {type(error).__name__}: {error}"
        ) from error
    return _check(model, str(path))


def _download(name: str) -> Any:
    if Path(name).exists():
        raise UserError(
            f"model.name: {name} is neither a .nemo file nor a NeMo model YAML (.yaml). Weights alone do not say what the "
            "model looks like: give the .nemo file that they came with."
        )
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise UserError(
            f"model.name: there is no file or directory {name}, and it is not a hub name like nvidia/parakeet-tdt-0.6b-v3."
        )
    fetched = huggingface.fetch(name)
    if fetched is not None:
        return load_model(str(fetched))
    models = import_nemo()
    try:
        file = Path(models.ASRModel.from_pretrained(model_name=name, return_model_file=True))
    except Exception as error:
        raise UserError(
            f"model.name: {name} is no local file, and loading it from the hub failed: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}. Check the name and the network, or download the .nemo file and give its path.",
            exit_code=1,
        ) from error
    if not file.is_file():
        raise UserError(
            f"model.name: {name} has no .nemo file; an archive in one file, or transformers' format, is expected."
        )
    return _restore(file)


def _build(path: Path, tokenizer: str | None) -> Any:
    if not path.is_file():
        raise UserError(f"model.name: there is no file {path} (looked in {Path.cwd()}).")
    root = read_settings(path, "model.name")
    layout = root.get("model")
    if not isinstance(layout, dict):
        raise UserError(f"{path}: no key `model:`; a NeMo model YAML has the layout of the network under `model:`.")
    for key in nemo_files.NOT_BUILT:
        layout.pop(key, None)
    if not isinstance(layout.setdefault("tokenizer", {}), dict):
        raise UserError(f"{path}: model.tokenizer: a mapping is expected, found {layout['tokenizer']!r}.")
    if tokenizer is not None:
        layout["tokenizer"]["dir"] = tokenizer
    layout = resolved({**root, "model": layout}, f"model.name: {path}")["model"]
    nemo_files.check_model_config(layout, f"model.name: {path}")
    directory = layout["tokenizer"].get("dir")
    if not isinstance(directory, str) or not directory or not (Path(directory) / "tokenizer.model").is_file():
        raise UserError(
            f"model.tokenizer: {path} needs a SentencePiece tokenizer, and there is no tokenizer.model in {directory!r}. "
            "Set model.tokenizer to its directory (python -m finetune.tokenizer makes one)."
        )
    models = import_nemo()
    try:
        model = models.EncDecRNNTBPEModel(cfg=OmegaConf.create(layout))
    except Exception as error:
        raise UserError(f"{path}: NeMo cannot build this model: {type(error).__name__}: {error}") from error
    return _check(model, str(path))


def _check(model: Any, name: str) -> Any:
    """Refuses what would train the wrong thing in silence: a head that does not match its loss."""
    durations = tdt_durations(model)
    outputs = model.joint.joint_net[-1].out_features
    expected = model.tokenizer.vocab_size + 1 + len(durations)
    if outputs != expected:
        raise UserError(
            f"model.name: {name}: the joint has {outputs} outputs, but tokenizer ({model.tokenizer.vocab_size}) + blank + "
            f"durations {list(durations)} make {expected}. The loss settings were probably lost in a change of vocabulary: "
            "restore `loss.loss_name: tdt` and `loss.tdt_kwargs.durations` in the model's configuration."
        )
    return model


def tdt_durations(model: Any) -> tuple[int, ...]:
    """Durations of the TDT head in encoder frames; empty for a plain RNN-T."""
    if model.joint.num_extra_outputs == 0:
        return ()
    kwargs = (model.cfg.get("loss") or {}).get("tdt_kwargs") or {}
    durations = kwargs.get("durations") or model.cfg.decoding.get("durations")
    if not durations:
        raise UserError(
            f"model.name: the joint has {model.joint.num_extra_outputs} outputs for durations, but the model's configuration "
            "names none (loss.tdt_kwargs.durations)."
        )
    return tuple(int(d) for d in durations)


def prepare_for_training(model: Any, *, spec_augment: bool, dropout: float | None, freeze_batchnorm: bool) -> None:
    """Takes out what only works under Lightning, and applies the run file's choices, in place."""
    # A collective in the encoder's forward would hang when ranks take different numbers of evaluation batches.
    model.encoder.sync_max_audio_length = False
    if not spec_augment:
        model.spec_augmentation = None
    for module in model.modules():
        # NeMo's SpecAugment keeps a private unseeded generator; the global one is seeded and saved in checkpoints.
        if hasattr(module, "_rng"):
            module._rng = random
        if dropout is not None and isinstance(module, torch.nn.Dropout):
            module.p = dropout
        if dropout is not None and isinstance(module, torch.nn.LSTM):
            module.dropout = dropout
    if dropout is not None:
        for layer in model.encoder.layers:
            layer.self_attn.dropout_rate = dropout
    if hasattr(model, "ctc_decoder"):
        model.ctc_decoder.requires_grad_(False)
        log.warning("this is a hybrid model: its transducer head is trained, its CTC head stays as it is")
    model.freeze_batchnorm = freeze_batchnorm
    disable_cuda_graphs(model)


def cast_parameters(model: Any, dtype: torch.dtype) -> None:
    """Parameters and buffers of encoder, prediction network and joint in another type, in place.

    BatchNorm stays in float32, whose running statistics would stand still in bf16; so does the preprocessor.
    """
    for part in (model.encoder, model.decoder, model.joint):
        for module in part.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                continue
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))


def disable_cuda_graphs(model: Any) -> None:
    """CUDA-graph decoding disturbs later work in the same process (NeMo issue 15423), so training does without it."""
    greedy = model.decoding.decoding
    if hasattr(greedy, "disable_cuda_graphs"):
        greedy.disable_cuda_graphs()


def set_train_mode(model: Any) -> None:
    """`model.train()`, but frozen modules stay in evaluation mode, and BatchNorm on its stored statistics where the run file asks for it."""
    model.train()
    for module in getattr(model, "frozen_modules", ()):
        module.training = False
    if getattr(model, "freeze_batchnorm", False):
        set_batchnorm_mode(model, training=False)


def set_batchnorm_mode(model: Any, training: bool) -> None:
    """Whether BatchNorm uses and updates the statistics of the batch."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.train(training)


def learning_batchnorms(model: Any) -> list[torch.nn.Module]:
    """The BatchNorm modules whose statistics change in training."""
    if getattr(model, "freeze_batchnorm", False):
        return []
    frozen = set(getattr(model, "frozen_modules", ()))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    return [norm for norm in norms if norm not in frozen]


def encoder_lengths(model: Any, audio_lengths_B: torch.Tensor) -> torch.Tensor:
    """Encoder frames for each clip.

    Args:
        audio_lengths_B: (B,) samples at the model's sample rate.

    Returns:
        (B,) frames after subsampling, int64.
    """
    from nemo.collections.asr.parts.submodules.subsampling import calc_length

    mel_lengths_B = model.preprocessor.featurizer.get_seq_len(audio_lengths_B)
    pre_encode = model.encoder.pre_encode
    if not hasattr(pre_encode, "_stride"):  # a plain linear stacking of frames
        return torch.div(
            mel_lengths_B + model.encoder.subsampling_factor - 1,
            model.encoder.subsampling_factor,
            rounding_mode="floor",
        ).long()
    return calc_length(
        mel_lengths_B,
        all_paddings=pre_encode._left_padding + pre_encode._right_padding,
        kernel_size=pre_encode._kernel_size,
        stride=pre_encode._stride,
        ceil_mode=pre_encode._ceil_mode,
        repeat_num=pre_encode._sampling_num,
    ).long()


def save_nemo(model: Any, path: Path) -> None:
    """Writes a .nemo that plain NeMo restores, LoRA adapters merged; written aside and renamed, so it is whole or absent."""
    put_in_place(write_nemo(model, path), path)


def write_nemo(model: Any, path: Path) -> Path:
    """Writes the .nemo for `path` under another name beside it, which is returned."""
    if "validation_ds" not in model.cfg:
        with open_dict(model.cfg):  # NeMo's own transcribe() reads this key
            model.cfg.validation_ds = {"use_start_end_token": False}
    aside = path.with_name(f".{path.name}.tmp.nemo")
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = merged_state_dict(model)
    model.state_dict = lambda: weights  # what NeMo's save_to asks for
    try:
        model.save_to(str(aside))
    finally:
        del model.state_dict
    return aside


def load_weights(model: Any, path: Path) -> None:
    """Puts the weights of a .nemo into a model of the same layout, in place; LoRA adapters add nothing to them afterwards."""
    with reading(path, "model.nemo") as (archive, members):
        weights = nemo_files.weights_in(archive, members, str(path))
    load_merged_state_dict(model, weights)
