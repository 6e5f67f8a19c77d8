"""A transducer's layout at a chosen depth, without its weights: what a training step is followed on.

The layout comes from a NeMo model YAML, from the configuration inside of a .nemo, from a Hugging Face directory, or
for hub names that this project ships a layout of or whose Hugging Face files were downloaded, from that. No weights
are read and nothing is fetched.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from finetune.config.schema import RunConfig
from finetune.config.tokenizer_setting import tokenizer_setting
from finetune.errors import UserError
from finetune.models.adapters import is_adapter, read_adapter
from finetune.models.add_ctc import aux_ctc_section
from finetune.models.huggingface.layout import piece_count
from finetune.models.huggingface.reading import cached_archive, cached_file, is_hugging_face, nemo_config
from finetune.models.loading import is_tokenizer, read_tokenizer
from finetune.models.nemo import import_nemo
from finetune.models.nemo_archive import NOT_BUILT, archive_of, check_model_config, read_config, vocabulary_in
from finetune.models.protocols import AsrModel, Decoding
from finetune.models.sentencepiece_model import parse
from finetune.paths import ROOT, check_access, near_path
from finetune.security.documents import read_settings, resolved

# Hub names whose layout is shipped, with the number of their tokens.
KNOWN = {
    "nvidia/parakeet-tdt-0.6b-v3": ("parakeet_tdt_0.6b_v3.yaml", 8192),
    "nvidia/parakeet-tdt-0.6b-v2": ("parakeet_tdt_0.6b_v3.yaml", 1024),
}
# Where a layout names no tokenizer: the number of tokens that the seeds' model has.
TOKENS_OF_A_BARE_LAYOUT = 8192


@dataclass(frozen=True)
class Layout:
    """A model's NeMo configuration, resolved."""

    name: str
    model: DictConfig
    """The configuration's `model:` section."""
    tokens: int
    """Pieces of the tokenizer, without the blank."""
    guessed: str = ""
    """What was assumed because the layout does not say it."""

    @property
    def layers(self) -> int:
        return int(self.model.encoder.n_layers)

    @property
    def seconds_a_frame(self) -> float:
        return float(self.model.preprocessor.window_stride) * int(self.model.encoder.subsampling_factor)

    @property
    def sample_rate(self) -> int:
        return int(self.model.preprocessor.sample_rate)


def layout_of(config: RunConfig) -> Layout:
    """The layout of a run's model, with the vocabulary that `model.tokenizer` gives it.

    No text is read: where pieces are learned from texts, as many count as may be added at most.

    Raises:
        UserError: as `read_layout`.
    """
    setting = tokenizer_setting(config)
    layout = read_layout(config.model.name, setting.dir)
    if config.model.add_ctc and "joint" in layout.model and not layout.model.get("aux_ctc"):
        with open_dict(layout.model):
            layout.model.aux_ctc = aux_ctc_section(layout.model.encoder.d_model, [])
    if not setting.changes:
        return layout
    if setting.size is None and is_tokenizer(setting.origin):
        size = len(read_tokenizer(setting.origin, setting.key).pieces)
        setting = setting.model_copy(update={"size": size})
    return replace(layout, tokens=setting.most_pieces(layout.tokens))


def read_layout(name: str, tokenizer: str | None = None) -> Layout:
    """Return the layout of `model.name`, with `model.tokenizer` where it is a YAML.

    Raises:
        UserError: nothing is found under the name that says what the model looks like.
    """
    check_access(name, "model.name")
    path = Path(name)
    on_hub = name.count("/") == 1 and not path.exists()
    archive = cached_archive(name) if on_hub else archive_of(path)
    if archive is not None:
        model = read_config(archive)
        return _of_config(str(archive), {"model": model}, len(vocabulary_in(model)))
    if is_adapter(path):
        return read_layout(read_adapter(path).base["name"])
    if is_hugging_face(path):
        return _of_hugging_face(name, path)
    if path.suffix in (".yaml", ".yml") and path.is_file():
        return _of_yaml(name, path, tokenizer)
    if name in KNOWN:
        file, tokens = KNOWN[name]
        return _of_config(name, read_settings(ROOT / "finetune" / "configs" / "models" / file, "model.name"), tokens)
    if on_hub and (downloaded := cached_file(name, "config.json")):
        return _of_hugging_face(name, downloaded.parent)
    raise UserError(
        f"model.name: {name} is no .nemo file, run directory, Hugging Face directory or NeMo model YAML here, and no "
        f"hub name that was downloaded or whose layout is known ({', '.join(KNOWN)}). Give the model's .nemo file, or "
        f"the NeMo model YAML that it was made from.{near_path(name)}"
    )


def _of_hugging_face(name: str, directory: Path) -> Layout:
    model = nemo_config(directory)
    return _of_config(name, {"model": model}, piece_count(model))


def _of_yaml(name: str, path: Path, tokenizer: str | None) -> Layout:
    root = read_settings(path, "model.name")
    model = root.get("model")
    if not isinstance(model, dict) or "encoder" not in model:
        raise UserError(f"model.name: {path} has no `model.encoder`; a NeMo model YAML has the layout under `model:`.")
    settings = model.get("tokenizer")
    directory = tokenizer or (settings.get("dir") if isinstance(settings, dict) else None)
    if not directory:
        guess = f"{name} names no tokenizer: {TOKENS_OF_A_BARE_LAYOUT} tokens are assumed"
        return _of_config(name, root, TOKENS_OF_A_BARE_LAYOUT, guess)
    file = Path(directory) / "tokenizer.model"
    if not file.is_file():
        raise UserError(f"model.tokenizer: there is no tokenizer.model in {directory}.")
    return _of_config(name, root, len(parse(file.read_bytes(), f"model.tokenizer: {file}").pieces))


def _of_config(name: str, values: dict[str, Any], tokens: int, guessed: str = "") -> Layout:
    model = {k: v for k, v in values["model"].items() if k not in ("tokenizer", *NOT_BUILT)}
    model = resolved({**values, "model": model}, f"model.name: {name}")["model"]
    check_model_config(model, f"model.name: {name}")
    root = OmegaConf.create({"model": model})
    try:
        root.model.encoder.n_layers, root.model.decoder  # noqa: B018
        if "joint" in root.model:
            root.model.joint.jointnet, root.model.decoder.prednet  # noqa: B018
    except Exception as error:
        raise UserError(f"model.name: {name} is no layout of a Conformer transducer or CTC model: {error}") from error
    if root.model.encoder.get("global_tokens"):
        raise UserError(
            f"model.name: {name} attends globally to some frames (encoder.global_tokens), which are looked up by "
            "value: a step cannot be followed without values. Measure one: finetune/train.py --dry-run."
        )
    if tokens < 1:
        head = "joint" if "joint" in root.model else "decoder"
        raise UserError(f"model.name: {name} does not say how many tokens it has ({head}.vocabulary is empty).")
    return Layout(name, root.model, tokens, guessed)


class Skeleton(AsrModel, torch.nn.Module):
    """NeMo's encoder, prompt kernel and heads with random weights, under the names that a NeMo model gives them.

    The encoder has one Conformer layer; `deepen` makes more.
    """

    def __init__(self, layout: Layout):
        super().__init__()
        models = import_nemo()
        cfg = copy.deepcopy(layout.model)
        with open_dict(cfg):
            cfg.encoder.n_layers = 1
            heads = [cfg.aux_ctc.decoder] if cfg.get("aux_ctc") else []
            if "joint" in cfg:
                cfg.decoder.vocab_size = layout.tokens
                cfg.joint.num_classes = layout.tokens
                cfg.joint.vocabulary = []  # the pieces themselves: only decoding reads them
                cfg.joint.jointnet.encoder_hidden = cfg.encoder.d_model
                cfg.joint.jointnet.pred_hidden = cfg.decoder.prednet.pred_hidden
            else:
                heads = [cfg.decoder]
            for head in heads:
                head.update(feat_in=cfg.encoder.d_model, num_classes=layout.tokens, vocabulary=None)
        make = models.EncDecRNNTModel.from_config_dict
        self.cfg = cfg
        self.preprocessor = make(cfg.preprocessor)
        self.encoder = make(cfg.encoder)
        self.decoder = make(cfg.decoder)
        if "joint" in cfg:
            self.joint = make(cfg.joint)
        if cfg.get("aux_ctc"):
            self.ctc_decoder = make(cfg.aux_ctc.decoder)
        if cfg.get("model_defaults", {}).get("initialize_prompt_feature"):
            self.num_prompts = int(cfg.model_defaults.get("num_prompts", 128))
            width = int(cfg.encoder.d_model)
            self.prompt_kernel = torch.nn.Sequential(
                torch.nn.Linear(width + self.num_prompts, 2 * width),
                torch.nn.ReLU(),
                torch.nn.Linear(2 * width, width),
            )
        self.spec_augmentation = None
        self.decoding = cast("Decoding", SimpleNamespace(decoding=None))  # a step decodes nothing
        self.frozen_modules: list[torch.nn.Module] = []
        self.encoder.sync_max_audio_length = False

    def deepen(self, depth: int) -> "Skeleton":
        """Return a copy with `depth` Conformer layers."""
        deeper = copy.deepcopy(self)
        encoder = deeper.encoder
        for _ in range(depth - len(encoder.layers)):
            encoder.layers.append(copy.deepcopy(encoder.layers[0]))
        encoder.layer_drop_probs = encoder.layer_drop_probs[:1] * depth
        return deeper
