"""The map between NeMo's models and the classes of transformers that are the same networks under other names.

Tensors are renamed, never transposed, split or reshaped. What one side cannot express is reported, never dropped.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

MODULES = "nemo.collections.asr.modules"
MODELS = "nemo.collections.asr.models"
TRANSDUCER = f"{MODELS}.rnnt_bpe_models.EncDecRNNTBPEModel"
CTC = f"{MODELS}.ctc_bpe_models.EncDecCTCModelBPE"
PROMPT = f"{MODELS}.rnnt_bpe_models_prompt.EncDecRNNTBPEModelWithPrompt"


@dataclass(frozen=True)
class Kind:
    """A class of transformers, and the NeMo model that is the same network.

    Attributes:
        name: of the class; `config` and `processor` are those of its configuration and its processor.
        target: NeMo's class.
        streaming: the encoder is cache-aware: causal, with a limited attention context.
        prompt: the language of an utterance is given to the network.
    """

    name: str
    config: str
    processor: str
    target: str
    head: Literal["tdt", "rnnt", "ctc"]
    streaming: bool = False
    prompt: bool = False

    @property
    def auto_class(self) -> str:
        """transformers' auto class that loads it."""
        return {"tdt": "AutoModelForTDT", "rnnt": "AutoModelForRNNT", "ctc": "AutoModelForCTC"}[self.head]

    @property
    def head_name(self) -> str:
        """What gives its outputs, in words."""
        return "CTC head" if self.head == "ctc" else "joint"

    @property
    def features(self) -> str:
        """The class of its feature extractor."""
        return "NemotronAsrStreamingFeatureExtractor" if self.streaming else "ParakeetFeatureExtractor"

    @property
    def targets(self) -> dict[str, str]:
        """NeMo's classes of its parts."""
        heads = (
            {"decoder": "ConvASRDecoder"} if self.head == "ctc" else {"decoder": "RNNTDecoder", "joint": "RNNTJoint"}
        )
        parts = {"preprocessor": "AudioToMelSpectrogramPreprocessor", "encoder": "ConformerEncoder", **heads}
        return {part: f"{MODULES}.{name}" for part, name in parts.items()}


KINDS = {
    "parakeet_tdt": Kind("ParakeetForTDT", "ParakeetTDTConfig", "ParakeetProcessor", TRANSDUCER, "tdt"),
    "parakeet_rnnt": Kind("ParakeetForRNNT", "ParakeetRNNTConfig", "ParakeetProcessor", TRANSDUCER, "rnnt"),
    "parakeet_ctc": Kind("ParakeetForCTC", "ParakeetCTCConfig", "ParakeetProcessor", CTC, "ctc"),
    "nemotron_asr_streaming": Kind(
        "NemotronAsrStreamingForRNNT",
        "NemotronAsrStreamingConfig",
        "NemotronAsrStreamingProcessor",
        TRANSDUCER,
        "rnnt",
        streaming=True,
    ),
    "nemotron3_5_asr": Kind(
        "Nemotron3_5AsrForRNNT",
        "Nemotron3_5AsrConfig",
        "Nemotron3_5AsrProcessor",
        PROMPT,
        "rnnt",
        streaming=True,
        prompt=True,
    ),
}
"""By `model_type` of config.json."""

TRAINING_SETTINGS = "nemo_config.yaml"
# Not kept in it: what the tokenizer's file says too, paths, and what belongs to a training run.
NOT_KEPT = ("labels", "tokenizer", "train_ds", "validation_ds", "test_ds", "optim", "target")

# In NeMo's name -> in transformers'. `{joint}` is the place of the joint's last layer, behind a dropout layer or not.
ENCODER_NAMES = (
    ("encoder.pre_encode.out.", "encoder.subsampling.linear."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.linear_pos.", ".self_attn.relative_k_proj."),
    (".self_attn.pos_bias_", ".self_attn.bias_"),
    (".conv.batch_norm.", ".conv.norm."),
)
OFFLINE_NAMES = (("encoder.pre_encode.conv.", "encoder.subsampling.layers."),)
STREAMING_NAMES = (
    ("encoder.pre_encode.conv.0.", "encoder.subsampling.conv_in."),
    *(
        (f"encoder.pre_encode.conv.{3 * i + 2 + j}.", f"encoder.subsampling.layers.{i}.{name}.")
        for i in range(5)
        for j, name in enumerate(("depthwise_conv", "pointwise_conv"))
    ),
)
CTC_NAMES = (("decoder.decoder_layers.0.", "ctc_head."),)
TRANSDUCER_NAMES = (
    ("decoder.prediction.embed.", "decoder.embedding."),
    ("decoder.prediction.dec_rnn.lstm.", "decoder.lstm."),
    ("joint.enc.", "encoder_projector."),
    ("joint.pred.", "decoder.decoder_projector."),
    ("joint.joint_net.{joint}.", "joint.head."),
)
PROMPT_NAMES = (
    ("prompt_kernel.0.", "prompt_projector.linear_1."),
    ("prompt_kernel.2.", "prompt_projector.linear_2."),
)
# Computed on both sides. `pos_enc` is the table of relative positions that old NeMo checkpoints keep.
RECOMPUTED = re.compile(r"^(preprocessor\.featurizer\.(window|fb)|encoder\.pos_enc\..*)$")
JOINT = re.compile(r"^joint\.joint_net\.(\d+)\.weight$")

ACTIVATIONS = ("relu", "sigmoid", "tanh")
NO_LIMIT = 10**9  # tokens
MAX_SYMBOLS = 10  # a frame, where the NeMo configuration names no limit

# NeMo's key of the encoder: transformers' key, and NeMo's default where a configuration may leave it out.
ENCODER = {
    "d_model": ("hidden_size", None),
    "n_layers": ("num_hidden_layers", None),
    "n_heads": ("num_attention_heads", 4),
    "feat_in": ("num_mel_bins", None),
    "conv_kernel_size": ("conv_kernel_size", 31),
    "subsampling_factor": ("subsampling_factor", 4),
    "subsampling_conv_channels": ("subsampling_conv_channels", -1),
    "pos_emb_max_len": ("max_position_embeddings", 5000),
    "use_bias": ("attention_bias", True),
    "xscaling": ("scale_input", True),
    "dropout": ("dropout", 0.1),
    "dropout_emb": ("dropout_positions", 0.1),
    "dropout_att": ("attention_dropout", 0.0),
}
PREPROCESSOR_DEFAULTS = {
    "sample_rate": 16000,
    "window_size": 0.02,
    "window_stride": 0.01,
    "n_window_size": None,
    "n_window_stride": None,
    "n_fft": None,
    "preemph": 0.97,
    "features": 64,
}
# What transformers has no setting for, with the values that it computes as, and NeMo's defaults.
FIXED_ENCODER = {
    "subsampling": ("dw_striding",),
    "self_attention_model": ("rel_pos",),
    "reduction": (None,),
    "feat_out": (-1, None, 0),
}
OFFLINE_ENCODER = {
    "causal_downsampling": (False,),
    "att_context_size": ([-1, -1], None),
    "conv_norm_type": ("batch_norm",),
    "conv_context_size": (None,),
}
STREAMING_ENCODER = {
    "causal_downsampling": (True,),
    "att_context_style": ("chunked_limited",),
    "conv_norm_type": ("layer_norm",),
    "conv_context_size": ("causal",),
}
ENCODER_DEFAULTS = {
    "subsampling": "striding",
    "self_attention_model": "rel_pos",
    "feat_out": -1,
    "causal_downsampling": False,
    "att_context_style": "regular",
    "conv_norm_type": "batch_norm",
}
FIXED_PREPROCESSOR = {
    "window": ("hann",),
    "log": (True,),
    "log_zero_guard_type": ("add",),
    "log_zero_guard_value": (2**-24,),
    "lowfreq": (0, None),
    "frame_splicing": (1,),
    "exact_pad": (False,),
    "pad_value": (0,),
    "mag_power": (2,),
    "mel_norm": ("slaney",),
}


def kind_of(config: Mapping[str, Any]) -> Kind:
    """Return the class of transformers that a NeMo model comes nearest to; `reasons_against` it say how near."""
    target, encoder = _class(config.get("target")), config.get("encoder") or {}
    if target == _class(CTC):
        return KINDS["parakeet_ctc"]
    if target == _class(PROMPT):
        return KINDS["nemotron3_5_asr"]
    if (config.get("joint") or {}).get("num_extra_outputs"):
        return KINDS["parakeet_tdt"]
    causal = encoder.get("causal_downsampling") or encoder.get("conv_context_size") == "causal"
    return KINDS["nemotron_asr_streaming" if causal else "parakeet_rnnt"]


def _class(target: object) -> str:
    return str(target or "").rsplit(".", 1)[-1]


def names_of(kind: Kind, nemo_keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the names that differ, NeMo's first, given those of the NeMo model's tensors."""
    joint = max((int(found[1]) for key in nemo_keys if (found := JOINT.match(key))), default=2)
    names = (*ENCODER_NAMES, *(STREAMING_NAMES if kind.streaming else OFFLINE_NAMES))
    names += CTC_NAMES if kind.head == "ctc" else TRANSDUCER_NAMES
    if kind.prompt:
        names += PROMPT_NAMES
    return tuple((nemo.format(joint=joint), theirs) for nemo, theirs in names)


def to_hugging_face(key: str, names: tuple[tuple[str, str], ...]) -> str | None:
    """Return a NeMo tensor's name in transformers; None for what transformers computes itself."""
    if RECOMPUTED.match(key):
        return None
    for nemo, hugging_face in names:
        if nemo in key:
            return key.replace(nemo, hugging_face, 1)
    return key


def to_nemo(key: str, names: tuple[tuple[str, str], ...]) -> str:
    """Return the NeMo name of a tensor of transformers."""
    for nemo, hugging_face in names:
        if hugging_face in key:
            return key.replace(hugging_face, nemo, 1)
    return key


def misfits(weights: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """Return which names and shapes differ from those expected, the first eight; empty where all fit."""
    problems = [f"{key} is missing" for key in expected if key not in weights]
    problems += [f"{key} has no place" for key in weights if key not in expected]
    problems += [
        f"{key} has the shape {tuple(weights[key].shape)}, not {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in weights and weights[key].shape != tensor.shape
    ]
    more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
    return "; ".join(problems[:8]) + more


def preprocessor_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preprocessor's section with NeMo's defaults for what it leaves out."""
    return {**PREPROCESSOR_DEFAULTS, **config["preprocessor"]}


def feature_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of transformers' feature extractor."""
    p = preprocessor_settings(config)
    rate = p["sample_rate"]
    # NeMo truncates seconds to samples.
    window = int(p["n_window_size"] or p["window_size"] * rate)
    return {
        "feature_size": int(p["features"]),
        "sampling_rate": int(rate),
        "win_length": window,
        "hop_length": int(p["n_window_stride"] or p["window_stride"] * rate),
        "n_fft": int(p["n_fft"] or 2 ** math.ceil(math.log2(window))),
        "preemphasis": p["preemph"],
        "padding_value": 0.0,
    }


def durations_of(config: Mapping[str, Any]) -> list[int]:
    """Return the durations of the TDT head in encoder frames; empty where the configuration has none."""
    kwargs = (config.get("loss") or {}).get("tdt_kwargs") or {}
    found = kwargs.get("durations") or (config.get("decoding") or {}).get("durations")
    return [int(d) for d in found or (config.get("model_defaults") or {}).get("tdt_durations") or []]


def piece_count(config: Mapping[str, Any]) -> int:
    """Return the tokenizer's pieces, which the decoder's section of a NeMo configuration counts."""
    decoder = config["decoder"]
    return int(decoder["vocab_size"] if "vocab_size" in decoder else decoder["num_classes"])


def attention_contexts(config: Mapping[str, Any]) -> list[list[int]]:
    """Return the attention contexts that a streaming encoder is trained for, [left, right] in its frames each; the
    first is the default."""
    found: Any = config["encoder"].get("att_context_size") or [-1, -1]
    return [list(pair) for pair in ([found] if isinstance(found[0], int) else found)]


def prompts_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of each language's prompt."""
    found = (config.get("model_defaults") or {}).get("prompt_dictionary") or {}
    return {str(language): int(number) for language, number in found.items()}


def language_tags(config: Mapping[str, Any]) -> re.Pattern[str] | None:
    """Return what the language tags look like that NeMo takes out of its texts; None if it leaves them in."""
    decoding = config.get("decoding") or {}
    pattern = decoding.get("lang_tag_pattern") or r"\s*<[a-z]{2}-[A-Z]{2}>"  # NeMo's own
    return re.compile(pattern) if decoding.get("strip_lang_tags") else None


def encoder_settings(config: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the settings of transformers' encoder."""
    encoder = config["encoder"]
    settings = {theirs: encoder.get(ours, default) for ours, (theirs, default) in ENCODER.items()}
    if settings["subsampling_conv_channels"] == -1:
        settings["subsampling_conv_channels"] = settings["hidden_size"]
    if kind.streaming:
        left, right = attention_contexts(config)[0]
        settings |= {"sliding_window": left + 1, "default_num_lookahead_tokens": right}
    return {
        **settings,
        "intermediate_size": settings["hidden_size"] * encoder.get("ff_expansion_factor", 4),
        "convolution_bias": settings["attention_bias"],
        "activation_dropout": settings["dropout"],
        "layerdrop": encoder.get("stochastic_depth_drop_prob", 0.0),
    }


def model_settings(config: Mapping[str, Any], kind: Kind, tokens: int, pad_id: int) -> dict[str, Any]:
    """Return the settings of transformers' model.

    Args:
        tokens: pieces of the tokenizer, without the blank, which comes after them.
        pad_id: of the tokenizer; a CTC model takes it for the blank.
    """
    settings = {"vocab_size": tokens + 1, "pad_token_id": pad_id, "encoder_config": encoder_settings(config, kind)}
    if kind.head == "ctc":
        return settings
    greedy = (config.get("decoding") or {}).get("greedy") or {}
    settings |= {
        "blank_token_id": tokens,
        "decoder_hidden_size": config["decoder"]["prednet"]["pred_hidden"],
        "num_decoder_layers": config["decoder"]["prednet"].get("pred_rnn_layers", 1),
        "hidden_act": config["joint"]["jointnet"]["activation"],
        "max_symbols_per_step": int(greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or MAX_SYMBOLS),
    }
    if kind.head == "tdt":
        settings["durations"] = durations_of(config)
    if kind.prompt:
        settings |= {
            "num_prompts": int(config["model_defaults"].get("num_prompts", 128)),
            "prompt_intermediate_size": 2 * config["encoder"]["d_model"],
            "default_prompt_id": prompts_of(config).get("auto", 0),
        }
    return settings


def processor_settings(config: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Return the settings of transformers' processor beside its tokenizer and features."""
    if not kind.streaming:
        return {"decoder_type": kind.head}
    rights = [right for _, right in attention_contexts(config)]
    settings: dict[str, Any] = {
        "supported_num_lookahead_tokens": rights,
        "default_num_lookahead_tokens": rights[0],
    }
    if kind.prompt:
        settings |= {
            "prompt_dictionary": prompts_of(config),
            "num_prompts": int(config["model_defaults"].get("num_prompts", 128)),
        }
    return settings


def generation_settings(kind: Kind, tokens: int, pad_id: int, durations: int) -> dict[str, Any]:
    """Return the settings with which transformers' `generate` decodes a batch of a transducer as NeMo does.

    Without an end of sequence finished rows of a batch go on emitting until its longest utterance ends. It is an id
    that is never emitted, and only switches on the padding of finished rows. Without a suppressed duration head a
    duration could win over all tokens. RNN-T ends by itself; transformers' own limit counts the start token too, and
    cuts the last token off where each frame has as many as it may.
    """
    settings = {"decoder_start_token_id": tokens, "pad_token_id": pad_id, "eos_token_id": tokens + 1}
    if kind.head == "tdt":
        return {**settings, "suppress_tokens": [tokens + 1 + i for i in range(durations)]}
    return {**settings, "max_length": NO_LIMIT}


def reasons_against(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: Kind, tokens: int
) -> list[str]:
    """Return what a class of transformers cannot express of a NeMo model, one line each; empty where it can be
    converted."""
    reasons: list[str] = []
    found, wanted = _class(config.get("target") or kind.target), _class(kind.target)
    if found != wanted:
        reasons.append(f"it is a {found}; only a {wanted} with one SentencePiece tokenizer maps")
    missing = [part for part in kind.targets if not config.get(part)]
    if missing:
        return [*reasons, f"its configuration has no {', '.join(missing)}"]
    for part, target in kind.targets.items():
        found = config[part].get("_target_", target)
        if _class(found) != _class(target):
            reasons.append(f"{part}._target_: {found} is no {_class(target)}")
    fixed = {
        **FIXED_PREPROCESSOR,
        "normalize": ("NA", None) if kind.streaming else ("per_feature",),
        "highfreq": (None, preprocessor_settings(config)["sample_rate"] / 2),
    }
    reasons += _differences("preprocessor", {"normalize": "per_feature", **config["preprocessor"]}, fixed)
    fixed = {**FIXED_ENCODER, **(STREAMING_ENCODER if kind.streaming else OFFLINE_ENCODER)}
    reasons += _differences("encoder", {**ENCODER_DEFAULTS, **config["encoder"]}, fixed)
    reasons += _against_subsampling(config, kind)
    if kind.streaming:
        reasons += _against_contexts(config)
    if kind.head != "ctc":
        reasons += _against_transducer(config, kind, tokens)
    if kind.prompt:
        reasons += _against_prompts(config)
    return reasons or _against_weights(config, weights, kind, tokens)


def _differences(part: str, settings: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{part}.{key}: {settings[key]!r}; transformers has only {values[0]!r}"
        for key, values in fixed.items()
        if settings.get(key, values[0]) not in values
    ]


def _against_subsampling(config: Mapping[str, Any], kind: Kind) -> list[str]:
    settings = encoder_settings(config, kind)
    factor, bins = settings["subsampling_factor"], settings["num_mel_bins"]
    if factor < 2 or factor & (factor - 1):
        return [f"encoder.subsampling_factor: {factor}; transformers has only powers of two"]
    if bins % factor and not kind.streaming:
        return [
            f"encoder.feat_in: {bins} mel bins are not divisible by subsampling_factor {factor}: NeMo's subsampling "
            f"ends in {bins // factor + 1} of them, transformers' in {bins // factor}"
        ]
    if bins != preprocessor_settings(config)["features"]:
        return ["encoder.feat_in is not preprocessor.features"]
    return []


def _against_contexts(config: Mapping[str, Any]) -> list[str]:
    contexts = attention_contexts(config)
    if len({left for left, _ in contexts}) > 1 or min(min(pair) for pair in contexts) < 0:
        return [
            f"encoder.att_context_size: {config['encoder'].get('att_context_size')}; transformers has one limited "
            "left context, and limited look-aheads"
        ]
    return []


def _against_transducer(config: Mapping[str, Any], kind: Kind, tokens: int) -> list[str]:
    reasons = []
    decoder, joint = config["decoder"], config["joint"]
    prednet, jointnet = decoder.get("prednet") or {}, joint.get("jointnet") or {}
    if decoder.get("normalization_mode") is not None:
        reasons.append(f"decoder.normalization_mode: {decoder['normalization_mode']!r}; transformers has a plain LSTM")
    if not decoder.get("blank_as_pad", True):
        reasons.append("decoder.blank_as_pad: false; transformers' embedding has a row for the blank")
    if (prednet.get("rnn_hidden_size") or -1) > 0:
        reasons.append("decoder.prednet.rnn_hidden_size: transformers' LSTM has no projection")
    if prednet.get("pred_hidden") != jointnet.get("joint_hidden"):
        reasons.append(
            f"joint.jointnet.joint_hidden: {jointnet.get('joint_hidden')} is not decoder.prednet.pred_hidden "
            f"{prednet.get('pred_hidden')}; transformers has one width for both"
        )
    if jointnet.get("activation") not in ACTIVATIONS:
        reasons.append(
            f"joint.jointnet.activation: {jointnet.get('activation')!r}; known are {', '.join(ACTIVATIONS)}"
        )
    durations, outputs = durations_of(config), int(joint.get("num_extra_outputs") or 0)
    if kind.head == "rnnt" and outputs:
        reasons.append(f"joint.num_extra_outputs: {outputs}; {kind.name} has no duration head")
    elif kind.head == "tdt" and durations != list(range(len(durations))):
        reasons.append(
            f"durations: {durations}; transformers' generate takes the number of a duration for the duration, so only "
            "0, 1, 2, ... decode right"
        )
    elif kind.head == "tdt" and len(durations) != outputs:
        reasons.append(f"durations: {durations} are not the joint's {outputs} outputs (num_extra_outputs)")
    if int(joint.get("num_classes", tokens)) not in (tokens, -1):
        reasons.append(f"joint.num_classes: {joint['num_classes']}, but the tokenizer has {tokens} pieces")
    return reasons


def _against_prompts(config: Mapping[str, Any]) -> list[str]:
    defaults = config.get("model_defaults") or {}
    if not defaults.get("initialize_prompt_feature"):
        return ["model_defaults.initialize_prompt_feature: false; transformers gives the language to the network"]
    numbers, prompts = prompts_of(config).values(), int(defaults.get("num_prompts", 128))
    if not numbers or not 0 <= min(numbers) <= max(numbers) < prompts:
        return [f"model_defaults.prompt_dictionary: its numbers have to be from 0 to {prompts - 1}"]
    return []


def _against_weights(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: Kind, tokens: int
) -> list[str]:
    reasons = []
    rows = "decoder.decoder_layers.0.weight" if kind.head == "ctc" else "decoder.prediction.embed.weight"
    if rows not in weights or len(weights[rows]) != tokens + 1:
        reasons.append(f"{rows} has not {tokens} + 1 rows")
    elif kind.head != "ctc" and (largest := float(weights[rows][-1].abs().max())):
        reasons.append(
            f"{rows}: the blank's row is not zero (up to {largest:.3g}), so NeMo and transformers would start from "
            "different states"
        )
    adapters = sorted({".".join(key.split(".")[:4]) for key in weights if ".adapter" in key or ".lora_" in key})
    if adapters:
        reasons.append(f"{adapters[0]}: adapters have to be merged into the weights first")
    return reasons + _against_filters(config, weights, kind)


def _against_filters(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], kind: Kind) -> list[str]:
    """NeMo keeps window and mel filters with the weights; transformers makes them from the settings."""
    import transformers

    settings = feature_settings(config)
    made = getattr(transformers, kind.features)(**settings)
    window_W = torch.hann_window(settings["win_length"], periodic=False)
    reasons = []
    for name, wanted in (("fb", made.mel_filters), ("window", window_W)):
        stored = weights.get(f"preprocessor.featurizer.{name}")
        if stored is None:
            continue
        stored = stored.float().reshape(wanted.shape) if stored.numel() == wanted.numel() else stored
        if stored.shape != wanted.shape or not torch.allclose(stored, wanted, rtol=0, atol=1e-6):
            reasons.append(f"preprocessor.featurizer.{name} is not what transformers makes of the settings")
    return reasons
