"""Reading and writing .nemo archives.

They may come from anywhere, so archive, configuration and weights are checked before NeMo sees any of them.
"""

import contextlib
import functools
import inspect
import logging
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from omegaconf import OmegaConf, open_dict

from finetune.durable_files import put_in_place
from finetune.errors import UserError
from finetune.models.adapters import is_adapter, load_merged_state_dict, merged_state_dict
from finetune.models.nemo import class_of, import_nemo
from finetune.models.protocols import AsrModel
from finetune.models.sentencepiece_model import SentencePieceModel, parse
from finetune.models.skip_init import SkipInit
from finetune.security.archives import content_of, named, reading, unpack
from finetune.security.documents import leaves, parse_settings, resolved
from finetune.security.pickles import load_tensors

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
ASR, COMMON = "nemo.collections.asr", "nemo.collections.common"


def _classes(package: str, module: str, *names: str) -> frozenset[str]:
    """Return the classes under the package's name and under that of the module in it: NeMo writes both."""
    return frozenset(f"{place}.{name}" for place in (package, f"{package}.{module}") for name in names)


MODELS = (
    _classes(f"{ASR}.models", "rnnt_bpe_models", "EncDecRNNTBPEModel")
    | _classes(f"{ASR}.models", "hybrid_rnnt_ctc_bpe_models", "EncDecHybridRNNTCTCBPEModel")
    | _classes(f"{ASR}.models", "ctc_bpe_models", "EncDecCTCModelBPE")
    | _classes(f"{ASR}.models", "rnnt_bpe_models_prompt", "EncDecRNNTBPEModelWithPrompt")
)
"""What `target` may name: the models that this project trains."""
PARTS = {
    "preprocessor": _classes(f"{ASR}.modules", "audio_preprocessing", "AudioToMelSpectrogramPreprocessor"),
    "spec_augment": _classes(
        f"{ASR}.modules",
        "audio_preprocessing",
        "SpectrogramAugmentation",
        "MaskedPatchAugmentation",
        "CropOrPadSpectrogramAugmentation",
    ),
    "encoder": _classes(f"{ASR}.modules", "conformer_encoder", "ConformerEncoder", "ConformerEncoderAdapter"),
    "decoder": _classes(f"{ASR}.modules", "rnnt", "RNNTDecoder", "StatelessTransducerDecoder")
    | _classes(f"{ASR}.modules", "conv_asr", "ConvASRDecoder"),
    "joint": _classes(f"{ASR}.modules", "rnnt", "RNNTJoint", "SampledRNNTJoint"),
    "aux_ctc.decoder": _classes(f"{ASR}.modules", "conv_asr", "ConvASRDecoder"),
}
"""The classes that a part may be of. NeMo has others, such as its AutoTokenizer, that run what they download."""
ADAPTERS = (
    _classes(f"{COMMON}.parts", "adapter_modules", "LinearAdapter")
    | _classes(
        f"{ASR}.parts.submodules.adapters",
        "multi_head_attention_adapter_module",
        "MultiHeadAttentionAdapter",
        "RelPositionMultiHeadAttentionAdapter",
        "PositionalEncodingAdapter",
        "RelPositionalEncodingAdapter",
        "MHAResidualAddAdapterStrategy",
    )
    | _classes(
        "nemo.core.classes.mixins",
        "adapter_mixin_strategies",
        "ResidualAddAdapterStrategy",
        "ReturnResultAdapterStrategy",
    )
)
"""What may be named anywhere below `adapters`."""
NAMES_A_CLASS = ("_target_", "target", "cls")
MAY_NAME_A_CLASS = ("class_name", "classname")
"""With a dotted name as their value."""
NOT_BUILT = ("train_ds", "validation_ds", "test_ds", "optim")
"""Sections of a training, which nothing here builds anything of."""
NOT_AT_THE_TOP = ("_target_", "cls", "params", "model")
"""With one of these NeMo would build the sections above too, or take what is below it for the whole."""
TOKEN = re.compile(r"(.*\.)?(labels|vocabulary)\[\d+\]")
"""Keys of pieces, which may look like anything."""
BOOSTED = ("model_path", "key_phrases_file", "key_phrases_list", "key_phrase_items_list")
"""What a boosting tree is made of."""
NOTES = ("vocabulary_changes",)
"""Sections that only tell."""


def check_model_config(config: dict[str, Any], name: str, folder: set[str] | None = None) -> None:
    """Refuse a NeMo model configuration that would build or read anything but a speech model.

    Args:
        config: resolved, without `${...}`.
        name: of the file, for messages.
        folder: names of the files in the archive that the configuration comes from; None where the user's own paths
            are meant.

    Raises:
        UserError: it names a class that no transducer is built of, code from a hub, or a file outside of its archive.
    """
    if config.get("target") is not None:  # first: the parts of another kind of model are none of this one
        _check_class(str(config["target"]), "", "target", name)
    for key in NOT_AT_THE_TOP:
        if key in config:
            raise UserError(f"{name}: {key}: is refused: a model's configuration has no such key. Nothing was run.")
    for key, value in leaves(config):
        if isinstance(value, str) and "${" in value:
            raise UserError(f"{name}: {key}: {value[:200]!r} is refused: a reference is left in it.")
    tokenizer = config.get("tokenizer")
    kind = tokenizer.get("type") if isinstance(tokenizer, dict) else None
    if kind not in (None, "bpe", "agg"):
        raise UserError(
            f"{name}: tokenizer.type: {kind!r} is not supported; models with a SentencePiece tokenizer (bpe) are."
        )
    for key, value in leaves({k: v for k, v in config.items() if k not in (*NOT_BUILT, *NOTES)}):
        if TOKEN.fullmatch(key):
            continue
        place, _, last = key.rpartition(".")
        names_a_class = last in NAMES_A_CLASS or (last in MAY_NAME_A_CLASS and "." in str(value))
        if names_a_class and value is not None:
            _check_class(str(value), place, key, name)
        if last == "trust_remote_code" and value:
            raise UserError(f"{name}: {key} is refused: no code from elsewhere is run. Take the key out.")
        if folder is None or not isinstance(value, str):
            continue
        if value.startswith("nemo:") and value[5:] not in folder:
            raise UserError(f"{name}: {key}: there is no {value[5:][:200]!r} in the archive.")
        # A plain name may be a file here by chance (`bpe`, `hann`), unless NeMo would read it as a path.
        may_be_path = "/" in value or last.endswith(("path", "file"))
        if last != "dir" and may_be_path and not value.startswith("nemo:") and _is_a_file_here(value):
            raise UserError(
                f"{name}: {key}: {value[:200]!r} is a file of this machine, which a model from elsewhere has no "
                "business with. If it is yours, take the key out of the configuration in the archive."
            )


def _check_class(named: str, place: str, key: str, name: str) -> None:
    if key == "target":
        if named in MODELS:
            return
        if re.fullmatch(r"nemo\.collections(\.[a-z_0-9]+)*\.[A-Z]\w*", named):
            raise UserError(
                f"{name.removesuffix(f': {CONFIG}')} is a {named.rpartition('.')[2]}, which is not supported. This "
                "project trains Parakeet models with a SentencePiece tokenizer: "
                f"{', '.join(sorted({model.rpartition('.')[2] for model in MODELS}))}."
            )
        known = MODELS
    else:
        known = ADAPTERS if place.startswith("adapters.") else PARTS.get(place, frozenset())
    if named not in known:
        if re.fullmatch(r"nemo\.collections\.asr\.modules(\.[a-z_0-9]+)*\.[A-Z]\w*", named) and place in PARTS:
            raise UserError(
                f"{name}: {key}: a {named.rpartition('.')[2]} is not supported; this project trains FastConformer and "
                f"Conformer models, where a {' or '.join(sorted({one.rpartition('.')[2] for one in known}))} stands."
            )
        here = " or ".join(sorted({one.rpartition(".")[2] for one in known})) or "no class"
        raise UserError(f"{name}: {key}: {named[:200]!r} is refused: NeMo's {here} may stand here. Nothing was run.")


def _is_a_file_here(text: str) -> bool:
    """Return whether a text is the path of a file here, or of a directory of several names (`/` may be a token)."""
    try:
        path = Path(text)
        return path.exists() and (not path.is_dir() or len(path.parts) > 1)
    except (OSError, ValueError):  # too long for a path, or with a zero in it
        return False


def check_size(config: dict[str, Any], weight_bytes: int, name: str) -> None:
    """Refuse a configuration of far more parameters than there are weights for: building it would fill the memory.

    Args:
        weight_bytes: of the weights' file.
    """

    def number(*keys: str) -> int:
        value: Any = config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    width = number("encoder", "d_model")
    pred, joint = number("decoder", "prednet", "pred_hidden"), number("joint", "jointnet", "joint_hidden")
    classes = max(number("decoder", "vocab_size"), number("joint", "num_classes"))
    # A lower bound: attention alone has 4 d² a layer, an LSTM 8 d² a layer.
    least = 4 * width * width * number("encoder", "n_layers")
    least += 8 * pred * pred * number("decoder", "prednet", "pred_rnn_layers")
    least += classes * (pred + joint) + width * number("encoder", "feat_in")
    for head in (("decoder",), ("aux_ctc", "decoder")):
        least += number(*head, "num_classes") * number(*head, "feat_in")
    defaults = config.get("model_defaults")
    if isinstance(defaults, dict) and defaults.get("initialize_prompt_feature"):
        prompted = number("model_defaults", "enc_hidden")
        least += 2 * prompted * (number("model_defaults", "num_prompts") + 2 * prompted)
    if least > max(weight_bytes, 2**20):
        raise UserError(
            f"{name} is refused: its configuration describes a model of more than {least:,} parameters, and it holds "
            f"{weight_bytes:,} bytes of weights."
        )


def config_in(archive: tarfile.TarFile, members: list[tarfile.TarInfo], name: str) -> dict[str, Any]:
    """Return the resolved configuration of an archive from `reading`, checked."""
    member = named(members, CONFIG)
    if member is None:
        raise UserError(f"{name} holds no {CONFIG}; it is no NeMo model.")
    try:
        text = content_of(archive, member).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: {CONFIG} is no text: {error}.") from error
    values = parse_settings(text, f"{name}: {CONFIG}")
    apart = {section: values.pop(section) for section in NOT_BUILT if section in values}

    def without_references(settings: dict[str, Any]) -> dict[str, Any]:
        if "${model." in text:  # from a file that had the model's part under this key
            return resolved({"model": settings}, f"{name}: {CONFIG}")["model"]
        return resolved(settings, f"{name}: {CONFIG}")

    config = without_references(values)
    for section, settings in apart.items():
        with contextlib.suppress(UserError):  # they refer to what was on another machine
            config[section] = without_references({**values, section: settings})[section]
    _drop_empty_boosting(config)
    weights = named(members, WEIGHTS)
    check_size(config, weights.size if weights is not None else 0, name)
    check_model_config(config, f"{name}: {CONFIG}", {m.name.removeprefix("./") for m in members})
    return config


def weights_in(archive: tarfile.TarFile, members: list[tarfile.TarInfo], name: str) -> dict[str, torch.Tensor]:
    """Return the weights of an archive from `reading`: tensors, read without running any code."""
    member = named(members, WEIGHTS)
    if member is None or (file := archive.extractfile(member)) is None:
        raise UserError(f"{name} holds no {WEIGHTS}; it is no NeMo model.")
    weights = load_tensors(file, f"{name}: {WEIGHTS}", member.size)
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise UserError(f"{name}: {WEIGHTS} is refused: it is no mapping of names to tensors.")
    return weights


def archive_of(path: Path, key: str = "model.name") -> Path | None:
    """Return the .nemo file that a path means: itself, or in a directory model.nemo, else the only one; None if none.

    An adapter's directory means the adapter, unless the model is in it as model.nemo.

    Raises:
        UserError: a directory holds several, and none of them is model.nemo.
    """
    if path.suffix == ".nemo" and path.is_file():
        return path
    if (path / "model.nemo").is_file():
        return path / "model.nemo"
    if not path.is_dir() or is_adapter(path):
        return None
    found = sorted(file for file in path.glob("*.nemo") if file.is_file() and not file.name.startswith("."))
    if len(found) > 1:
        raise UserError(
            f"{key}: {path} holds several .nemo files, such as {found[0].name} and {found[1].name}: name one."
        )
    return found[0] if found else None


def _drop_empty_boosting(config: dict[str, Any]) -> None:
    """Drop boosting trees without phrases, in place.

    NeMo 2.5 and 2.6 write them, and NeMo 3 misses a key of its own in them (NVIDIA-NeMo/Speech issue 16046).
    """
    for section in (config, config.get("aux_ctc")):
        decoding = section.get("decoding") if isinstance(section, dict) else None
        for search in decoding.values() if isinstance(decoding, dict) else ():
            tree = search.get("boosting_tree") if isinstance(search, dict) else None
            if isinstance(tree, dict) and not any(tree.get(key) for key in BOOSTED):
                del search["boosting_tree"]


def read_config(path: Path, key: str = "model.name") -> dict[str, Any]:
    """Read the resolved configuration of a .nemo file; nothing is unpacked."""
    with reading(path, key) as (archive, members):
        return config_in(archive, members, f"{key}: {path}")


def vocabulary_in(config: dict[str, Any]) -> list[str]:
    """Return the tokens that a model's configuration lists: the joint's, or those of a CTC model's head."""
    head = config.get("joint") or config.get("decoder") or {}
    return list(head.get("vocabulary") or [])


@functools.cache
def _connector() -> type:
    """Return NeMo's connector with checked readers, of the files that it copies on saving too."""
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    class CheckedConnector(SaveRestoreConnector):
        @staticmethod
        def _filtered_tar_info(tar_path: str, filter_fn: Any = None) -> list[tarfile.TarInfo]:
            with reading(Path(tar_path), "model.name") as (_, members):
                return [m for m in members if filter_fn is None or filter_fn(m.name)]

        @staticmethod
        def _unpack_nemo_file(path2file: str, out_folder: str, members: Any = None) -> str:
            wanted = None if members is None else {getattr(m, "name", m) for m in members}
            unpack(Path(path2file), Path(out_folder), "model.name", wanted)
            return out_folder

        @staticmethod
        def _load_state_dict_from_disk(model_weights: str, map_location: Any = "cpu") -> Any:
            return load_tensors(Path(model_weights), f"model.name: {WEIGHTS}")

        def save_to(self, model: AsrModel, save_path: str) -> None:
            with tempfile.TemporaryDirectory() as folder:
                self._handle_artifacts(model, nemo_file_folder=folder)
                (Path(folder) / CONFIG).write_text(_config_text(model), encoding="utf-8")
                self._save_state_dict_to_disk(merged_state_dict(model), str(Path(folder) / WEIGHTS))
                self._make_nemo_file_from_folder(filename=save_path, source_dir=folder)

    return CheckedConnector


def restore(path: Path) -> AsrModel:
    """Restore a model from a .nemo file on the CPU, as NeMo builds it.

    Raises:
        UserError: the file is refused; whatever NeMo raises where it cannot build it.
    """
    config = read_config(path)
    _check_keys(config, path)
    _drop_vocabularies(config)
    # Not the abstract ASRModel, which turns every failure into one of its own.
    kind = getattr(import_nemo(), class_of(config))
    with SkipInit():
        return kind.restore_from(
            str(path),
            override_config_path=OmegaConf.create(config),
            map_location="cpu",
            save_restore_connector=_connector()(),
        )


def _drop_vocabularies(config: dict[str, Any]) -> None:
    """Drop the lists of tokens, in place, which NeMo makes anew from the tokenizer: it copies a configuration a dozen
    times, and each copy of 8,192 tokens takes a third of a second."""
    config.pop("labels", None)
    for section in (config.get("joint"), config.get("decoder"), (config.get("aux_ctc") or {}).get("decoder")):
        if isinstance(section, dict):
            section.pop("vocabulary", None)


def other_version(path: Path) -> str:
    """Return a sentence on the version of NeMo that wrote a .nemo file; nothing where it is the one here."""
    from nemo import __version__

    wrote = read_config(path).get("nemo_version")
    if wrote in (None, __version__):
        return ""
    return f" It was written by NeMo {wrote}, and read by NeMo {__version__}: install the version that wrote it."


def _check_keys(config: dict[str, Any], path: Path) -> None:
    """Drop settings of a part that this version of NeMo does not know where they are null, in place; NeMo takes none.

    Raises:
        UserError: others have a value.
    """
    from nemo import __version__
    from nemo.core.classes.common import import_class_by_path

    unknown: dict[str, Any] = {}
    for place in PARTS:
        part = functools.reduce(lambda found, key: (found or {}).get(key), place.split("."), config)
        if not isinstance(part, dict) or "_target_" not in part:
            continue
        known = inspect.signature(import_class_by_path(part["_target_"])).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
            continue
        for key in [key for key in part if key not in known and not key.startswith("_")]:
            unknown[f"{place}.{key}"] = value = part[key]
            if value is None:
                del part[key]
    wrote = f"NeMo {config.get('nemo_version') or 'of another version'}"
    if empty := [name for name, value in unknown.items() if value is None]:
        log.warning(
            "%s, from %s: NeMo %s does not know %s, which are null", path, wrote, __version__, ", ".join(empty)
        )
    if wrong := [f"{name}: {value!r}"[:100] for name, value in unknown.items() if value is not None]:
        raise UserError(
            f"model.name: {path} was written by {wrote}, and NeMo {__version__} does not know {', '.join(wrong)}. "
            f"Install the NeMo that wrote it, or take these keys out of the archive's {CONFIG} if the model does "
            "without them."
        )


@dataclass
class NemoFile:
    """What a .nemo file holds, read without NeMo."""

    path: Path
    config: dict[str, Any]
    """The model's configuration, resolved."""
    weights: dict[str, torch.Tensor]
    sentencepiece: bytes | None
    """The tokenizer's file; None where it has not exactly one."""

    @property
    def tokenizer(self) -> SentencePieceModel:
        """Raises UserError where the model has not exactly one SentencePiece tokenizer."""
        return parse(self.sentencepiece or b"", f"--model: the tokenizer of {self.path}")

    @property
    def tokens(self) -> int:
        """Pieces of the tokenizer, without the blank."""
        if self.sentencepiece is not None:
            return len(self.tokenizer.pieces)
        return len(vocabulary_in(self.config))


def read_nemo(path: Path) -> NemoFile:
    """Read a .nemo file without NeMo: the YAML, the weights (as tensors only), the SentencePiece file."""
    with reading(path, "--model") as (archive, members):
        config = config_in(archive, members, f"--model: {path}")
        for section in NOT_BUILT:
            config.pop(section, None)
        tokenizer = config.get("tokenizer") or {}
        file = str(tokenizer.get("model_path") or "").removeprefix("nemo:")
        sentencepiece = None
        if tokenizer.get("type") == "bpe" and "custom_tokenizer" not in tokenizer and file:
            member = named(members, Path(file).name)
            if member is None:
                raise UserError(f"--model: {path} holds no {file}; it is no NeMo model.")
            sentencepiece = content_of(archive, member)
        weights = weights_in(archive, members, f"--model: {path}")
    return NemoFile(path, config, weights, sentencepiece)


def save_nemo(model: AsrModel, path: Path) -> None:
    """Write a .nemo that plain NeMo restores, LoRA adapters merged; it is whole or absent."""
    put_in_place(write_nemo(model, path), path)


def write_nemo(model: AsrModel, path: Path) -> Path:
    """Write the .nemo for `path` under another name beside it, and return that name."""
    if "validation_ds" not in model.cfg:
        with open_dict(model.cfg):  # NeMo's own transcribe() reads this key
            model.cfg.validation_ds = {"use_start_end_token": False}
    aside = path.with_name(f".{path.name}.tmp.nemo")
    path.parent.mkdir(parents=True, exist_ok=True)
    _connector()().save_to(model, str(aside))
    return aside


def _config_text(model: AsrModel) -> str:
    """Return the text of a model's configuration, with the names that its files have in an archive.

    As OmegaConf writes it, by libyaml: NeMo has Python write, read and write it, seconds for 8,192 tokens.
    """
    from omegaconf._utils import OmegaConfDumper

    class Dumper(yaml.CSafeDumper):
        pass

    # "1e5", a token, is no number.
    Dumper.add_representer(str, lambda to, text: OmegaConfDumper.str_representer(cast("yaml.Dumper", to), text))
    config = cast("dict[str, Any]", OmegaConf.to_container(model.cfg, resolve=True, enum_to_str=True))
    for place, file in model.artifacts.items():
        *sections, key = place.split(".")
        section = functools.reduce(lambda part, name: part.setdefault(name, {}), sections, config)
        section[key] = file.hashed_path or file.path
    return yaml.dump(config, Dumper=Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def load_weights(model: AsrModel, path: Path) -> None:
    """Load the weights of a .nemo into a model of the same layout, in place; LoRA adapters then add nothing."""
    with reading(path, "model.nemo") as (archive, members):
        weights = weights_in(archive, members, str(path))
    load_merged_state_dict(model, weights)
