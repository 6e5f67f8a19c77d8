"""Types of NeMo's transducers, for annotations only.

NeMo's own classes are untyped, and importing them takes ten seconds. These classes name the attributes that this
project uses of an EncDecRNNTBPEModel; nothing is ever an instance of them at run time. An attribute that is missing
here reads as torch's `Tensor | Module`: declare it instead of casting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from torch.nn import Embedding, Linear, Module, ModuleList, Sequential
else:
    Module = ModuleList = Sequential = object


class Featurizer(Module):
    """Mel filter bank (`FilterbankFeatures`)."""

    get_seq_len: Callable[[torch.Tensor], torch.Tensor]
    """Samples -> mel frames, (B,) each."""
    stft: Callable[[torch.Tensor], torch.Tensor]
    log_zero_guard_value_fn: Callable[[torch.Tensor], float]
    fb: torch.Tensor
    normalize: str | None
    exact_pad: bool
    use_grads: bool
    log: bool
    log_zero_guard_type: str
    frame_splicing: int
    nb_augmentation_prob: float
    dither: float
    preemph: float | None
    mag_power: float
    pad_to: int
    pad_value: float


class Preprocessor(Module):
    """Waveforms -> mel features (`AudioToMelSpectrogramPreprocessor`)."""

    _sample_rate: int
    featurizer: Featurizer
    dtype_sentinel_tensor: torch.Tensor


class Attention(Module):
    """Multi-head attention with relative positions (`RelPositionMultiHeadAttention`)."""

    dropout_rate: float
    linear_q: Linear
    use_pytorch_sdpa: bool
    use_pytorch_sdpa_backends: list[Any] | None


class EncoderLayer(Module):
    """One Conformer layer."""

    self_attn: Attention
    self_attention_model: str


class EncoderLayers(ModuleList):
    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[EncoderLayer]: ...

        @overload
        def __getitem__(self, idx: slice) -> EncoderLayers: ...
        @overload
        def __getitem__(self, idx: int) -> EncoderLayer: ...
        def __getitem__(self, idx: Any) -> Any: ...


class Subsampling(Module):
    """Convolutional subsampling; its settings are missing where frames are only stacked."""

    _stride: int
    _kernel_size: int
    _left_padding: int
    _right_padding: int
    _ceil_mode: bool
    _sampling_num: int
    get_sampling_frames: Callable[[], Any]
    """Mel frames that a chunk has at least: one number, or the first chunk's and the later ones'."""


class Encoder(Module):
    """FastConformer encoder (`ConformerEncoder`)."""

    pre_encode: Subsampling
    layers: EncoderLayers
    layer_drop_probs: list[float]
    n_layers: int
    d_model: int
    subsampling_factor: int
    self_attention_model: str
    sync_max_audio_length: bool
    use_pytorch_sdpa: bool
    att_context_style: str
    att_context_size: list[int]
    """Encoder frames that are seen on the left and on the right."""
    att_context_size_all: list[list[int]]
    att_context_probs: list[float]
    att_chunk_context_size: Sequence[Sequence[int]] | None
    """Of a unified model: left contexts, chunks and right contexts."""
    streaming_cfg: Any
    setup_streaming_params: Callable[..., None]
    get_initial_cache_state: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    cache_aware_stream_step: Callable[..., tuple[torch.Tensor, ...]]
    change_attention_model: Callable[..., None]
    change_subsampling_conv_chunking_factor: Callable[[int], None]


class PredictionEmbedding(Module):
    embed: Embedding


class PredictionNetwork(Module):
    """Prediction network (`RNNTDecoder`)."""

    prediction: PredictionEmbedding
    vocab_size: int
    blank_as_pad: bool


class JointLayers(Sequential):
    """Activation, dropout or not, and the head: V tokens, blank, D durations."""

    if TYPE_CHECKING:

        @overload
        def __getitem__(self, idx: Literal[-1]) -> Linear: ...
        @overload
        def __getitem__(self, idx: int | slice) -> Module: ...
        def __getitem__(self, idx: Any) -> Any: ...


class Joint(Module):
    """Joint network (`RNNTJoint`)."""

    enc: Linear
    pred: Linear
    joint_net: JointLayers
    vocabulary: Sequence[str]
    num_classes_with_blank: int
    num_extra_outputs: int
    fuse_loss_wer: bool
    project_encoder: Callable[[torch.Tensor], torch.Tensor]
    project_prednet: Callable[[torch.Tensor], torch.Tensor]
    set_loss: Callable[[Any], None]
    set_wer: Callable[[Any], None]


class CtcHead(Module):
    """Encoder outputs (B, H, T) -> log-probabilities of V tokens and blank, (B, T, V + 1) (`ConvASRDecoder`)."""

    vocabulary: Sequence[str]
    decoder_layers: Sequential
    num_classes_with_blank: int
    temperature: float
    is_adapter_available: Callable[[], bool]


class Decoding(Protocol):
    """Greedy decoding (`RNNTBPEDecoding`, or of a CTC model `CTCBPEDecoding`)."""

    decoding: Any
    """The greedy search itself."""
    joint_fused_batch_size: int | None
    rnnt_decoder_predictions_tensor: Callable[..., list[Any]]
    decode_hypothesis: Callable[[list[Any]], list[Any]]
    decode_tokens_to_str_with_strip_punctuation: Callable[[Sequence[int]], str]


class Tokenizer(Protocol):
    """SentencePiece tokenizer (`SentencePieceTokenizer`)."""

    vocab_size: int
    tokenizer: Any
    """The `SentencePieceProcessor`."""
    text_to_ids: Callable[[str], list[int]]
    ids_to_tokens: Callable[[Sequence[int]], list[str]]


class AsrModel(Module):
    """A NeMo model with a SentencePiece tokenizer: TDT or RNN-T transducer, hybrid with a CTC head, or CTC.

    Only a hybrid model has `ctc_decoder`. A CTC model (`EncDecCTCModelBPE`) has no joint, and its `decoder` is the CTC
    head: ask `finetune.models.nemo.has_transducer` before either is used. Only a prompt model has `prompt_kernel`,
    encoder outputs and a one-hot prompt -> encoder outputs.
    """

    cfg: DictConfig
    preprocessor: Preprocessor
    spec_augmentation: Module | None
    encoder: Encoder
    decoder: PredictionNetwork
    joint: Joint
    ctc_decoder: CtcHead
    cur_decoder: str
    """Which head of a hybrid model decodes: rnnt or ctc."""
    ctc_loss_weight: float
    ctc_loss: Any
    ctc_decoding: Any
    ctc_wer: Any
    setup_interctc: Callable[..., None]
    prompt_kernel: Sequential
    num_prompts: int
    loss: Any
    """NeMo's `RNNTLoss`."""
    wer: Any
    decoding: Decoding
    tokenizer: Tokenizer
    tokenizer_type: str

    change_vocabulary: Callable[[str, str], None]
    change_decoding_strategy: Callable[..., None]
    extract_rnnt_loss_cfg: Callable[[Any], tuple[str, dict[str, Any]]]
    artifacts: dict[str, Any]
    """NeMo's ArtifactItem by key of the configuration: the files of the archive."""
    transcribe: Callable[..., list[Any]]

    # Set by this project; missing where the run does not use them.
    ctc_fusion: Any
    """What the CTC head decodes with, a `finetune.models.fusion.Fusion`."""
    freeze_batchnorm: bool
    frozen_modules: list[Module]
    """Modules that stay in evaluation mode."""
    lora_scaling: float
    """alpha / rank."""
    lora_settings: dict[str, Any]
    lora_base: dict[str, Any] | None
    """Name and SHA-256 of the model that the adapter belongs to."""
    frozen_base: Any
    """What the run distils from, a `finetune.models.frozen_base.FrozenBase`."""
