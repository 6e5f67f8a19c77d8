"""Small archives of the Parakeet families: configuration, tokenizer and file layout as NVIDIA publishes them.

The settings are those of NeMo's public training configurations (Apache-2.0, examples/asr/conf) and of the published
models' own; widths, layers and vocabularies are reduced, and weights are random.
"""

import io
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
MODULES = "nemo.collections.asr.modules"
MODELS = "nemo.collections.asr.models"
TRANSDUCER = f"{MODELS}.rnnt_bpe_models.EncDecRNNTBPEModel"
HYBRID = f"{MODELS}.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel"
CTC = f"{MODELS}.ctc_bpe_models.EncDecCTCModelBPE"
PROMPT = f"{MODELS}.rnnt_bpe_models_prompt.EncDecRNNTBPEModelWithPrompt"

D_MODEL, HIDDEN = 32, 32
LOOK_AHEADS = {"large": [[70, 13], [70, 6], [70, 1], [70, 0]], "prompt": [[56, 3], [56, 0], [56, 6], [56, 13]]}
# Some of the published 110: several names of a slot, `no` (which YAML may read as false), languages without a bare
# code, `auto` in the middle.
PROMPTS = {"en-US": 0, "en": 0, "en-GB": 1, "enGB": 1, "es-ES": 2, "es-US": 3, "es": 3, "zh-CN": 4, "zh-ZH": 4}
PROMPTS |= {"zh-TW": 5, "fr-FR": 8, "fr": 8, "de-DE": 9, "de": 9, "ja-JP": 10, "ja-JA": 10, "no-NO": 27, "no": 27}
PROMPTS |= {"th-TH": 32, "fr-CA": 100, "mt-MT": 102, "auto": 101}


@dataclass(frozen=True)
class Family:
    """One layout.

    Attributes:
        published: models of this layout on the hub.
        target: NeMo's class.
        tokenizer: which of `make_tokenizer`.
        durations: of a TDT head; empty for RNN-T and CTC.
        settings: dotted keys of the model's configuration that differ from `transducer_config`.
    """

    published: tuple[str, ...]
    target: str
    tokenizer: str
    durations: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)


TDT = (0, 1, 2, 3, 4)
STREAMING = {
    "preprocessor.normalize": "NA",
    "encoder.causal_downsampling": True,
    "encoder.att_context_style": "chunked_limited",
    "encoder.att_context_size": LOOK_AHEADS["large"],
    "encoder.conv_context_size": "causal",
    "encoder.conv_norm_type": "layer_norm",
    "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.005, "clamp": -1.0}},
}
FAMILIES = {
    "tdt": Family(("nvidia/parakeet-tdt-0.6b-v3",), TRANSDUCER, "digits", TDT, {"preprocessor.features": 128}),
    "tdt-english": Family(
        ("nvidia/parakeet-tdt-0.6b-v2", "nvidia/parakeet-tdt-1.1b", "nvidia/parakeet-tdt_ctc-0.6b-ja"),
        TRANSDUCER,
        "plain",
        TDT,
    ),
    "rnnt": Family(
        ("nvidia/parakeet-rnnt-0.6b", "nvidia/parakeet-rnnt-1.1b", "nvidia/stt_en_fastconformer_transducer_large"),
        TRANSDUCER,
        "plain",
        settings={"encoder.xscaling": True, "encoder.use_bias": True},
    ),
    "conformer-rnnt": Family(
        ("nvidia/stt_en_conformer_transducer_large",),
        TRANSDUCER,
        "plain",
        settings={
            "encoder.subsampling": "striding",
            "encoder.subsampling_factor": 4,
            "encoder.conv_kernel_size": 31,
            "encoder.xscaling": True,
            "encoder.use_bias": True,
        },
    ),
    "long-rnnt": Family(
        ("nvidia/parakeet-tdt-1.1b (changed to local attention)",),
        TRANSDUCER,
        "plain",
        settings={
            "encoder.self_attention_model": "rel_pos_local_attn",
            "encoder.att_context_size": [128, 128],
            "encoder.global_tokens": 1,
            "encoder.global_tokens_spacing": 1,
            "encoder.global_attn_separate": False,
        },
    ),
    "stateless-tdt": Family(
        ("conformer_tdt_bpe_stateless.yaml",),
        TRANSDUCER,
        "plain",
        TDT,
        {
            "decoding.strategy": "greedy",
            "decoder": {
                "_target_": f"{MODULES}.StatelessTransducerDecoder",
                "context_size": 2,
                "normalization_mode": "layer",
                "prednet": {"pred_hidden": HIDDEN, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.2},
            },
        },
    ),
    "hybrid-tdt": Family(
        ("nvidia/parakeet-tdt_ctc-110m", "nvidia/parakeet-tdt_ctc-1.1b", "nvidia/parakeet-tdt_ctc-0.6b-ja"),
        HYBRID,
        "plain",
        TDT,
    ),
    "hybrid-rnnt": Family(
        ("nvidia/stt_en_fastconformer_hybrid_large_pc", "nvidia/stt_de_fastconformer_hybrid_large_pc"),
        HYBRID,
        "plain",
        settings={"encoder.xscaling": True, "encoder.use_bias": True},
    ),
    "ctc": Family(
        ("nvidia/parakeet-ctc-0.6b", "nvidia/parakeet-ctc-1.1b", "nvidia/stt_en_fastconformer_ctc_large"),
        CTC,
        "plain",
        settings={"encoder.xscaling": True, "encoder.use_bias": True},
    ),
    "streaming": Family(
        ("nvidia/nemotron-speech-streaming-en-0.6b",),
        TRANSDUCER,
        "plain",
        settings={**STREAMING, "preprocessor.features": 128, "decoder.prednet.pred_rnn_layers": 2},
    ),
    "streaming-eou": Family(
        ("nvidia/parakeet_realtime_eou_120m-v1",),
        TRANSDUCER,
        "end_of_utterance",
        settings={
            **STREAMING,
            "preprocessor.features": 128,
            "encoder.att_context_size": [70, 1],
            "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.03, "clamp": -1.0}},
        },
    ),
    "streaming-hybrid": Family(
        ("nvidia/stt_en_fastconformer_hybrid_large_streaming_multi",),
        HYBRID,
        "plain",
        settings={**STREAMING, "encoder.xscaling": True, "encoder.use_bias": True},
    ),
    "unified": Family(
        ("nvidia/parakeet-unified-en-0.6b",),
        TRANSDUCER,
        "plain",
        settings={
            "preprocessor.features": 128,
            "encoder.xscaling": True,
            "encoder.att_context_style": "chunked_limited_with_rc",
            "encoder.att_context_size": [-1, -1],
            "encoder.att_chunk_context_size": [[70], [1, 2, 7, 13], [0, 1, 2, 3, 4, 7, 13]],
            "encoder.conv_context_style": "dcc",
            "decoder.prednet.pred_rnn_layers": 2,
            "loss": {"loss_name": "default", "offline_loss_weight": 0.3, "streaming_loss_weight": 0.7},
        },
    ),
    "prompt": Family(
        ("nvidia/nemotron-3.5-asr-streaming-0.6b",),
        PROMPT,
        "many",
        settings={
            **STREAMING,
            "preprocessor.features": 128,
            "encoder.att_context_size": LOOK_AHEADS["prompt"],
            "decoder.prednet.pred_rnn_layers": 2,
            "model_defaults.initialize_prompt_feature": True,
            "model_defaults.num_prompts": 128,
            "model_defaults.prompt_dictionary": PROMPTS,
            "decoding.strip_lang_tags": True,
            "train_ds": {
                "manifest_filepath": "train.json",
                "use_lhotse": True,
                "lang_field": "target_lang",
                "default_prompt_mode": "unified",
                "unified_auto_ratio": 0.5,
                "defer_setup": True,
            },
        },
    ),
}


def model_config(family: Family, tokenizer: Path) -> dict[str, Any]:
    """Return the model's configuration, with `target`, for NeMo's class.

    Args:
        tokenizer: directory with tokenizer.model.
    """
    config: dict[str, Any] = {
        "target": family.target,
        "sample_rate": 16000,
        "compute_eval_loss": False,
        "log_prediction": False,
        "rnnt_reduction": "mean_volume",
        "skip_nan_grad": False,
        "model_defaults": {"enc_hidden": D_MODEL, "pred_hidden": HIDDEN, "joint_hidden": HIDDEN},
        "tokenizer": {"dir": str(tokenizer), "type": "bpe"},
        "preprocessor": {
            "_target_": f"{MODULES}.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "window": "hann",
            "features": 80,
            "n_fft": 512,
            "frame_splicing": 1,
            "dither": 0.00001,
            "pad_to": 0,
        },
        "spec_augment": {
            "_target_": f"{MODULES}.SpectrogramAugmentation",
            "freq_masks": 2,
            "time_masks": 10,
            "freq_width": 27,
            "time_width": 0.05,
        },
        "encoder": {
            "_target_": f"{MODULES}.ConformerEncoder",
            "feat_out": -1,
            "n_layers": 2,
            "d_model": D_MODEL,
            "use_bias": False,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": 16,
            "causal_downsampling": False,
            "ff_expansion_factor": 4,
            "self_attention_model": "rel_pos",
            "n_heads": 2,
            "att_context_size": [-1, -1],
            "att_context_style": "regular",
            "xscaling": False,
            "untie_biases": True,
            "pos_emb_max_len": 5000,
            "conv_kernel_size": 9,
            "conv_norm_type": "batch_norm",
            "conv_context_size": None,
            "dropout": 0.1,
            "dropout_pre_encoder": 0.1,
            "dropout_emb": 0.0,
            "dropout_att": 0.1,
            "stochastic_depth_drop_prob": 0.0,
            "stochastic_depth_mode": "linear",
            "stochastic_depth_start_layer": 1,
        },
        "optim": {"name": "adamw", "lr": 0.001, "betas": [0.9, 0.98], "weight_decay": 0.001},
    }
    ctc_head = {
        "_target_": f"{MODULES}.ConvASRDecoder",
        "feat_in": None,
        "num_classes": -1,
        "vocabulary": [],
    }
    if family.target == CTC:
        config |= {"ctc_reduction": "mean_batch", "decoder": ctc_head, "decoding": {"strategy": "greedy"}}
        del config["rnnt_reduction"]
        config["model_defaults"] = {}
    else:
        config |= transducer_config(family.durations)
    if family.target == HYBRID:
        config["aux_ctc"] = {
            "ctc_loss_weight": 0.3,
            "use_cer": False,
            "ctc_reduction": "mean_batch",
            "decoder": ctc_head,
            "decoding": {"strategy": "greedy"},
        }
        config["interctc"] = {"loss_weights": [], "apply_at_layers": []}
    for key, value in family.settings.items():
        section = config
        *path, last = key.split(".")
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    config["encoder"]["feat_in"] = config["preprocessor"]["features"]
    if family.target == CTC:
        config["decoder"]["feat_in"] = D_MODEL
    return config


def transducer_config(durations: tuple[int, ...]) -> dict[str, Any]:
    """Return prediction network, joint, decoding and loss of a TDT model; of an RNN-T where there are no durations."""
    config: dict[str, Any] = {
        "decoder": {
            "_target_": f"{MODULES}.RNNTDecoder",
            "normalization_mode": None,
            "random_state_sampling": False,
            "blank_as_pad": True,
            "prednet": {"pred_hidden": HIDDEN, "pred_rnn_layers": 1, "t_max": None, "dropout": 0.2},
        },
        "joint": {
            "_target_": f"{MODULES}.RNNTJoint",
            "log_softmax": None,
            "preserve_memory": False,
            "fuse_loss_wer": True,
            "fused_batch_size": 4,
            "jointnet": {"joint_hidden": HIDDEN, "activation": "relu", "dropout": 0.2},
        },
        "decoding": {
            "strategy": "greedy_batch",
            "greedy": {"max_symbols": 10},
            "beam": {"beam_size": 2, "return_best_hypothesis": False, "score_norm": True},
        },
        "loss": {"loss_name": "default", "warprnnt_numba_kwargs": {"fastemit_lambda": 0.0, "clamp": -1.0}},
    }
    if durations:
        config["joint"]["num_extra_outputs"] = len(durations)
        config["decoding"] |= {"model_type": "tdt", "durations": list(durations)}
        config["loss"] = {
            "loss_name": "tdt",
            "tdt_kwargs": {
                "fastemit_lambda": 0.0,
                "clamp": -1.0,
                "durations": list(durations),
                "sigma": 0.02,
                "omega": 0.1,
            },
        }
        config["model_defaults"] = {
            "enc_hidden": D_MODEL,
            "pred_hidden": HIDDEN,
            "joint_hidden": HIDDEN,
            "tdt_durations": list(durations),
            "num_tdt_durations": len(durations),
        }
    return config


def sample_texts() -> list[str]:
    """Return the texts of the sample data, for tokenizers, and one with all digits."""
    import pyarrow.parquet as pq

    prompts = ROOT / "examples" / "voice_prompts" / "data"
    texts = [
        text for path in sorted(prompts.glob("train-*.parquet")) for text in pq.read_table(path)["text"].to_pylist()
    ]
    return [*texts, "0 1 2 3 4 5 6 7 8 9 press 1, then 20"]


def make_tokenizer(kind: str, texts: Iterable[str], folder: Path) -> Path:
    """Train a SentencePiece tokenizer of a published kind into folder/tokenizer.model and vocab.txt; return folder.

    Args:
        kind: plain: BPE, nothing special. digits: special pieces and the ten digits are USER_DEFINED, as in
            parakeet-tdt-0.6b-v3. end_of_utterance: <EOU> and <EOB> are the last pieces. bytes: byte fallback. many:
            13,087 pieces.
        texts: to train on.
    """
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    options: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 400 if kind == "bytes" else 160,
        "character_coverage": 1.0,
        "bos_id": -1,
        "eos_id": -1,
        "remove_extra_whitespaces": False,
    }
    if kind == "digits":
        special = ["<|nospeech|>", "<pad>", "<|endoftext|>", "<|startoftranscript|>", "<|pnc|>", "<|nopnc|>"]
        options["user_defined_symbols"] = special + [str(digit) for digit in range(10)]
    if kind == "bytes":
        options["byte_fallback"] = True
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, minloglevel=2, **options
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    wanted = {"end_of_utterance": ["<EOU>", "<EOB>"], "many": [f"▁q{i}x" for i in range(13_087 - len(model.pieces))]}
    for i, piece in enumerate(wanted.get(kind, [])):
        user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
        added = model.pieces.add(piece=piece, score=-1000.0 - i)
        if kind == "end_of_utterance":
            added.type = user_defined
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / "vocab.txt").write_text("".join(f"{piece.piece}\n" for piece in model.pieces), encoding="utf-8")
    return folder


def sample_audio() -> "torch.Tensor":
    """Return (1, S) samples of a clip of the sample data at 16 kHz."""
    import pyarrow.parquet as pq
    import soundfile
    import torch

    path = min((ROOT / "examples" / "voice_prompts" / "data").glob("train-*.parquet"))
    audio = max(pq.read_table(path)["audio"].to_pylist(), key=lambda audio: len(audio["bytes"]))
    return torch.from_numpy(soundfile.read(io.BytesIO(audio["bytes"]), dtype="float32")[0])[None]


def tell_frames_apart(model: Any) -> None:
    """Let the heads answer to how frames differ, with a blank every other time, in place: random ones hear nearly the
    same in each frame, so that they say one thing everywhere, or nothing.

    No token has the duration 0, on which transformers' TDT models stay for ever.
    """
    import torch

    audio_BS = sample_audio()
    model.eval()
    with torch.no_grad():
        mel_BFT, lengths_B = model.preprocessor(input_signal=audio_BS, length=torch.tensor([audio_BS.size(1)]))
        enc_BHT, _ = model.encoder(audio_signal=mel_BFT, length=lengths_B)
        ctc = getattr(model, "ctc_decoder", None if hasattr(model, "joint") else model.decoder)
        if ctc is not None:
            head = ctc.decoder_layers[0]
            center(head, head.weight[:, :, 0], enc_BHT[0].T)
            even_out(head.bias, head(enc_BHT)[0].T, model.tokenizer.vocab_size)
        if hasattr(model, "joint"):
            if hasattr(model, "prompt_kernel"):
                slots_BPT = torch.zeros(1, model.num_prompts, enc_BHT.size(2))
                enc_BHT = model.prompt_kernel(torch.cat([enc_BHT, slots_BPT], dim=1).transpose(1, 2)).transpose(1, 2)
            center(model.joint.enc, model.joint.enc.weight, enc_BHT[0].T)
            pred_BHU, *_ = model.decoder(targets=torch.arange(1, 33)[None], target_length=torch.tensor([32]))
            sum_TUH = model.joint.enc(enc_BHT[0].T)[:, None] + model.joint.pred(pred_BHU[0].T)
            bias = model.joint.joint_net[-1].bias
            even_out(bias, model.joint.joint_net(sum_TUH.flatten(0, 1)), model.tokenizer.vocab_size)
            bias[model.tokenizer.vocab_size + 1 :][:1] -= 10
    model.train()


def center(layer: Any, weight_OH: "torch.Tensor", enc_TH: "torch.Tensor") -> None:
    """Let a layer take encoder outputs with mean 0 and deviation 1, in place."""
    mean_H = enc_TH.mean(0)
    weight_OH /= (enc_TH - mean_H).std()
    layer.bias -= weight_OH @ mean_H


def even_out(bias_V: "torch.Tensor", logits_NV: "torch.Tensor", blank: int) -> None:
    """Let the blank win every other time, in place."""
    bias_V[blank] += (logits_NV[:, :blank].amax(1) - logits_NV[:, blank]).median()


def build(name: str, texts: Iterable[str], path: Path, tokenizer: str | None = None, speaking: bool = False) -> Path:
    """Build a family's archive with NeMo itself, random weights of seed 0; return its path.

    Args:
        tokenizer: one of `make_tokenizer` in place of the family's own, which may be large.
        speaking: change the heads with `tell_frames_apart`, so that there are texts to compare.
    """
    import torch
    from nemo.core.classes.common import import_class_by_path
    from omegaconf import OmegaConf

    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        pieces = make_tokenizer(tokenizer or family.tokenizer, texts, Path(folder) / "tokenizer")
        config = OmegaConf.create(model_config(family, pieces))
        torch.manual_seed(0)
        model = import_class_by_path(family.target)(cfg=config)
        if speaking:
            tell_frames_apart(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save_to(str(path))
    return path
