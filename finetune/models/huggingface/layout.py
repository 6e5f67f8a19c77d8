"""The map between NeMo's EncDecRNNTBPEModel and transformers' ParakeetForTDT, the same network under other names.

Tensors are renamed, never transposed, split or reshaped. What one side cannot express is reported, never dropped.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

TRAINING_SETTINGS = "nemo_config.yaml"
# Not kept in it: what the tokenizer's file says too, paths, and what belongs to a training run.
NOT_KEPT = ("labels", "tokenizer", "train_ds", "validation_ds", "test_ds", "optim", "target")

# In NeMo's name -> in transformers'. `{head}` is the place of the joint's last layer, behind a dropout layer or not.
RENAMED = (
    ("encoder.pre_encode.conv.", "encoder.subsampling.layers."),
    ("encoder.pre_encode.out.", "encoder.subsampling.linear."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.linear_pos.", ".self_attn.relative_k_proj."),
    (".self_attn.pos_bias_", ".self_attn.bias_"),
    (".conv.batch_norm.", ".conv.norm."),
    ("decoder.prediction.embed.", "decoder.embedding."),
    ("decoder.prediction.dec_rnn.lstm.", "decoder.lstm."),
    ("joint.enc.", "encoder_projector."),
    ("joint.pred.", "decoder.decoder_projector."),
    ("joint.joint_net.{head}.", "joint.head."),
)
# Computed on both sides. `pos_enc` is the table of relative positions that old NeMo checkpoints keep.
RECOMPUTED = re.compile(r"^(preprocessor\.featurizer\.(window|fb)|encoder\.pos_enc\..*)$")
HEAD = re.compile(r"^joint\.joint_net\.(\d+)\.weight$")

TARGETS = {
    "preprocessor": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
    "encoder": "nemo.collections.asr.modules.ConformerEncoder",
    "decoder": "nemo.collections.asr.modules.RNNTDecoder",
    "joint": "nemo.collections.asr.modules.RNNTJoint",
}
ACTIVATIONS = ("relu", "sigmoid", "tanh")
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
# What transformers has no setting for, with the values that it computes as; the first is NeMo's default.
FIXED_ENCODER = {
    "causal_downsampling": (False,),
    "self_attention_model": ("rel_pos",),
    "att_context_size": (None, [-1, -1]),
    "conv_norm_type": ("batch_norm",),
    "conv_context_size": (None,),
    "reduction": (None,),
    "feat_out": (-1, None, 0),
}
FIXED_PREPROCESSOR = {
    "window": ("hann",),
    "normalize": ("per_feature",),
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


def head_of(weights: Mapping[str, Any]) -> int:
    """Return the index of the joint's last layer in `joint.joint_net` (1, or 2 behind a dropout layer)."""
    return max((int(found[1]) for key in weights if (found := HEAD.match(key))), default=2)


def to_hugging_face(key: str, head: int) -> str | None:
    """Return a NeMo tensor's name in transformers' ParakeetForTDT; None for what transformers computes itself."""
    if RECOMPUTED.match(key):
        return None
    for nemo, hugging_face in RENAMED:
        nemo = nemo.format(head=head)
        if nemo in key:
            return key.replace(nemo, hugging_face, 1)
    return key


def to_nemo(key: str, head: int) -> str:
    """Return the NeMo name of a tensor of transformers' ParakeetForTDT."""
    for nemo, hugging_face in RENAMED:
        if hugging_face in key:
            return key.replace(hugging_face, nemo.format(head=head), 1)
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
    """Return the settings of transformers' ParakeetFeatureExtractor."""
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


def encoder_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of transformers' ParakeetEncoderConfig."""
    encoder = config["encoder"]
    settings = {theirs: encoder.get(ours, default) for ours, (theirs, default) in ENCODER.items()}
    if settings["subsampling_conv_channels"] == -1:
        settings["subsampling_conv_channels"] = settings["hidden_size"]
    return {
        **settings,
        "intermediate_size": settings["hidden_size"] * encoder.get("ff_expansion_factor", 4),
        "convolution_bias": settings["attention_bias"],
        "activation_dropout": settings["dropout"],
        "layerdrop": encoder.get("stochastic_depth_drop_prob", 0.0),
    }


def model_settings(config: Mapping[str, Any], tokens: int, pad_id: int) -> dict[str, Any]:
    """Return the settings of transformers' ParakeetTDTConfig.

    Args:
        tokens: pieces of the tokenizer, without the blank, which comes after them.
    """
    greedy = (config.get("decoding") or {}).get("greedy") or {}
    return {
        "vocab_size": tokens + 1,
        "blank_token_id": tokens,
        "pad_token_id": pad_id,
        "decoder_hidden_size": config["decoder"]["prednet"]["pred_hidden"],
        "num_decoder_layers": config["decoder"]["prednet"].get("pred_rnn_layers", 1),
        "hidden_act": config["joint"]["jointnet"]["activation"],
        "max_symbols_per_step": int(greedy.get("max_symbols") or greedy.get("max_symbols_per_step") or MAX_SYMBOLS),
        "durations": durations_of(config),
        "encoder_config": encoder_settings(config),
    }


def generation_settings(tokens: int, pad_id: int, durations: int) -> dict[str, Any]:
    """Return the settings with which transformers' `generate` decodes a batch as it decodes its utterances alone.

    Without a suppressed duration head a duration could win over all tokens; without an end of sequence finished rows
    of a batch go on emitting until its longest utterance ends. The end of sequence is a suppressed id: it is never
    emitted, and only switches on the padding of finished rows.
    """
    return {
        "decoder_start_token_id": tokens,
        "pad_token_id": pad_id,
        "eos_token_id": tokens + 1,
        "suppress_tokens": [tokens + 1 + i for i in range(durations)],
    }


def reasons_against(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokens: int) -> list[str]:
    """Return what ParakeetForTDT cannot express of a NeMo model, one line each; empty where it can be converted."""
    reasons: list[str] = []
    kind = str(config.get("target", "EncDecRNNTBPEModel")).rsplit(".", 1)[-1]
    if kind != "EncDecRNNTBPEModel":
        reasons.append(f"it is a {kind}; only EncDecRNNTBPEModel (a transducer with one SentencePiece tokenizer) maps")
    if any(key.startswith("ctc_decoder.") for key in weights):
        reasons.append("ctc_decoder: a hybrid model's CTC head has no place in ParakeetForTDT")
    missing = [part for part in ("preprocessor", "encoder", "decoder", "joint") if not config.get(part)]
    if missing:
        return [*reasons, f"its configuration has no {', '.join(missing)}"]
    for part, target in TARGETS.items():
        found = str(config[part].get("_target_", target))
        if found.rsplit(".", 1)[-1] != target.rsplit(".", 1)[-1]:
            reasons.append(f"{part}._target_: {found} is no {target.rsplit('.', 1)[-1]}")
    highest = (None, preprocessor_settings(config)["sample_rate"] / 2)
    reasons += _differences("preprocessor", config, {**FIXED_PREPROCESSOR, "highfreq": highest})
    reasons += _differences("encoder", config, FIXED_ENCODER)
    reasons += _against_subsampling(config)
    reasons += _against_transducer(config, tokens)
    return reasons or _against_weights(config, weights, tokens)


def _differences(part: str, config: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> list[str]:
    return [
        f"{part}.{key}: {config[part][key]!r}; transformers has only {values[0]!r}"
        for key, values in fixed.items()
        if config[part].get(key, values[0]) not in values
    ]


def _against_subsampling(config: Mapping[str, Any]) -> list[str]:
    kind = config["encoder"].get("subsampling", "striding")
    reasons = [] if kind == "dw_striding" else [f"encoder.subsampling: {kind!r}; transformers has only 'dw_striding'"]
    settings = encoder_settings(config)
    factor, bins = settings["subsampling_factor"], settings["num_mel_bins"]
    if factor < 2 or factor & (factor - 1):
        return [*reasons, f"encoder.subsampling_factor: {factor}; transformers has only powers of two"]
    if bins % factor:
        reasons.append(
            f"encoder.feat_in: {bins} mel bins are not divisible by subsampling_factor {factor}: NeMo's subsampling "
            f"ends in {bins // factor + 1} of them, transformers' in {bins // factor}"
        )
    elif bins != preprocessor_settings(config)["features"]:
        reasons.append("encoder.feat_in is not preprocessor.features")
    return reasons


def _against_transducer(config: Mapping[str, Any], tokens: int) -> list[str]:
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
    if not outputs:
        reasons.append("joint.num_extra_outputs: 0; this is a plain RNN-T, and ParakeetForTDT has a duration head")
    elif durations != list(range(len(durations))):
        reasons.append(
            f"durations: {durations}; transformers' generate takes the number of a duration for the duration, so only "
            "0, 1, 2, ... decode right"
        )
    elif len(durations) != outputs:
        reasons.append(f"durations: {durations} are not the joint's {outputs} outputs (num_extra_outputs)")
    if int(joint.get("num_classes", tokens)) not in (tokens, -1):
        reasons.append(f"joint.num_classes: {joint['num_classes']}, but the tokenizer has {tokens} pieces")
    return reasons


def _against_weights(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokens: int) -> list[str]:
    reasons = []
    embedding_VH = weights.get("decoder.prediction.embed.weight")
    if embedding_VH is None or len(embedding_VH) != tokens + 1:
        reasons.append(f"decoder.prediction.embed.weight has not {tokens} + 1 rows")
    elif largest := float(embedding_VH[-1].abs().max()):
        reasons.append(
            f"decoder.prediction.embed.weight: the blank's row is not zero (up to {largest:.3g}), so NeMo and "
            "transformers would start from different states"
        )
    adapters = sorted({".".join(key.split(".")[:4]) for key in weights if ".adapter" in key or ".lora_" in key})
    if adapters:
        reasons.append(f"{adapters[0]}: adapters have to be merged into the weights first")
    return reasons + _against_filters(config, weights)


def _against_filters(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> list[str]:
    """NeMo keeps window and mel filters with the weights; transformers makes them from the settings."""
    from transformers import ParakeetFeatureExtractor

    settings = feature_settings(config)
    made = ParakeetFeatureExtractor(**settings)
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
