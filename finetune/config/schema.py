"""The run file's schema: every key with its type, default, range, unit and meaning.

`docs/configuration.md` is generated from these classes (`python scripts/docs/write_configuration_docs.py`). Checks of
a single value stand in its field's definition, those of several values together in `finetune.config.compatibility`.
"""

import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SkipValidation,
    StrictFloat,
    StrictInt,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError, core_schema
from typing_extensions import is_typeddict

from finetune.config.guard_limit import FORMS, check_guard_limit
from finetune.config.optimizers import Optimizer, OptimizerArgs
from finetune.config.suggestions import did_you_mean

Schedule = Literal[
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "onecycle",
]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
TRACKERS = ("tensorboard", "wandb", "trackio", "aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "none")

GROUPS = {
    "data": "Data",
    "texts": "Texts and filters",
    "batches": "Batches",
    "reading": "Reading and shuffling",
    "memory": "Memory",
    "speed": "Speed",
    "parts": "Which parts are trained, and how",
    "loss": "Loss and regularization",
    "optimizer": "Optimizer",
    "schedule": "Length and schedule",
    "evaluation": "Evaluation",
    "averages": "Averages of the weights",
    "checkpoints": "Output and checkpoints",
    "safety": "Safety nets",
    "ranks": "Several processes",
    "logging": "Logging",
    "stages": "Plans of stages",
}
"""Concerns by which docs/configuration.md orders the keys, with their headings."""

RENAMED = {"training.spike_guard": "training.spike_threshold"}
"""Old key -> new key. The old one is still understood; the log gives the new name."""


@dataclass(frozen=True)
class Option:
    """How the documentation and messages present a key, beside its docstring.

    Attributes:
        group: a key of GROUPS.
        unit: of a number.
        common: whether most runs set the key; the documentation begins with these.
        form: what the value has to look like, where the type does not say enough.
    """

    group: str
    unit: str = ""
    common: bool = False
    form: str = ""


@dataclass(frozen=True)
class Besides:
    """Allow one value outside the range, such as -1 for all."""

    value: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._validate, handler(source))

    def _validate(self, value: Any, within_range: Callable[[Any], Any]) -> Any:
        try:
            allowed = float(value) == self.value
        except (TypeError, ValueError):
            allowed = False
        return self.value if allowed else within_range(value)


def _check_trackers(value: Any) -> Any:
    for name in value if isinstance(value, list) else [value]:
        if name not in TRACKERS:
            raise ValueError(f"{name!r} is not one of {', '.join(TRACKERS)}.{did_you_mean(str(name), TRACKERS)}")
    return value


def _check_bounds(bounds: list[list[int | float]]) -> list[list[int | float]]:
    for pair in bounds:
        if len(pair) != 2 or pair[0] <= 0 or pair[1] < 1 or not isinstance(pair[1], int):
            raise ValueError(f"has to be {BOUNDS_FORM}, found {bounds}.")
    if any(later[0] <= earlier[0] for earlier, later in itertools.pairwise(bounds)):
        raise ValueError(f"has to be ordered by seconds, found {bounds}.")
    return bounds


Probability = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
CountOrAll = Annotated[int, Field(ge=1), Besides(-1)]
LORA_TARGETS = ["linear_q", "linear_k", "linear_v", "linear_out", "linear1", "linear2"]
BOUNDS_FORM = "a list of pairs (seconds above 0, whole clips from 1 on), such as [[5, 64], [15, 24]]"
Sources = str | list[Any] | dict[str, Any]
"""A path or name, a mapping with `path`, or a list of these. `finetune.data.sources` reads and checks them."""


class Section(BaseModel):
    """A section of the run file.

    Attributes may be assigned; what is assigned is not checked again.
    """

    model_config = ConfigDict(
        extra="forbid",
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_values(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number; pydantic would take them for 1 and 0."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {annotation, *get_args(annotation)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise PydanticCustomError("float_type" if float in kinds else "int_type", "true and false are no numbers")
        return value


class ModelConfig(Section):
    """What is trained."""

    name: Annotated[str, Option("parts", common=True)]
    """A .nemo file, a run's output directory, a LoRA adapter's directory, a Hugging Face directory,
    a hub name such as `nvidia/parakeet-tdt-0.6b-v3`, or a NeMo model YAML (random weights)."""
    tokenizer: Annotated[str | dict[str, Any] | None, SkipValidation, Option("parts")] = None
    """Directory with a SentencePiece `tokenizer.model`, only for a NeMo model YAML without a tokenizer of its own. Or
    a mapping: `extend_from` appends pieces to the model's vocabulary, `replace_with` puts another in its place; each
    names a data set as `data.train` does, a tokenizer's directory or .model, or a .txt file. `size`: pieces appended
    at most (null: an eighth of the vocabulary, 64 at least; for letters without a relative in it, as many as it has),
    or pieces of the new vocabulary (null: as many as before). `pieces`: `new_characters` (default) appends only pieces
    with a character that the tokenizer lacks, `all` also shorter ways to write what it can. `coverage`: share of the
    texts' characters that get a piece (null: 1).
    `dir`: as the directory alone. See docs/vocabulary.md."""
    gradient_checkpointing: Annotated[bool, Option("memory")] = False
    """Recompute the activations of the encoder's subsampling and Conformer layers in the backward pass instead of
    storing them."""
    gradient_checkpointing_every: Annotated[PositiveInt, Option("memory", "layers")] = 1
    """Checkpoint every N-th Conformer layer. Larger is faster and needs more memory. No effect without
    `gradient_checkpointing`."""
    activation_offload: Annotated[bool, Option("memory")] = False
    """Keep what the backward pass needs of the encoder in pinned host memory instead of on the GPU; the copies overlap
    with the computation."""
    dtype: Annotated[Literal["float32", "bfloat16"], Option("memory")] = "float32"
    """Type of the parameters. bfloat16 halves parameters and gradients; BatchNorm stays in float32. Needs an optimizer
    that rounds its updates safely (strategies bf16_full and bf16_stochastic_rounding)."""
    freeze_encoder: Annotated[bool, Option("parts")] = False
    """Train the heads only (prediction network and joint, CTC head, prompt kernel); the encoder gets no gradients."""
    unfreeze_encoder_layers: Annotated[NonNegativeInt, Option("parts", "layers")] = 0
    """Still train the last N Conformer layers. No effect without `freeze_encoder`."""
    lora_rank: Annotated[NonNegativeInt, Option("parts")] = 0
    """Rank of LoRA adapters in the encoder (arXiv 2106.09685); the rest of the encoder is frozen. model.nemo is
    written with the adapters merged. 0: no LoRA."""
    lora_alpha: Annotated[float | None, Field(gt=0), Option("parts")] = None
    """LoRA updates are scaled by alpha / rank. null: twice the rank. No effect without `lora_rank`."""
    lora_dropout: Annotated[Probability, Option("parts", "probability")] = 0.0
    """Dropout before the adapters. No effect without `lora_rank`."""
    lora_targets: Annotated[list[str], Option("parts")] = LORA_TARGETS
    """Linear layers of each Conformer layer that get adapters: `linear_q`, `linear_k`, `linear_v`, `linear_out`,
    `linear_pos` (attention), `linear1`, `linear2` (feed-forward). No effect without `lora_rank`."""
    lora_train_decoder: Annotated[bool, Option("parts")] = True
    """Train prediction network, joint, CTC head and prompt kernel in full beside the adapters. false: they are frozen,
    and the adapter is much smaller. No effect without `lora_rank`."""
    adapter: Annotated[str | None, Option("parts")] = None
    """Directory of an adapter that a LoRA run left (`output_dir`/adapter), to continue training it on its base model
    `name`. Needs `lora_rank` and the other LoRA keys as the adapter has them. To train from base and adapter merged,
    give the directory as `name`."""
    scaled_dot_product_attention: Annotated[bool, Option("speed")] = False
    """Compute the encoder's attention with torch's scaled_dot_product_attention."""
    compile: Annotated[bool, Option("speed")] = False
    """Compile the Conformer layers with torch.compile: one graph for all layers, made in the first step. For GPUs: on
    a CPU each length is compiled anew, for minutes."""
    compile_bucket: Annotated[NonNegativeFloat, Option("speed", "seconds")] = 2.0
    """Pad batches to a multiple of this, so that few lengths are compiled where a graph fits one length only. The
    padding counts in BatchNorm's statistics unless `freeze_batchnorm` is set. 0: no padding. No effect without
    `compile`."""
    freeze_batchnorm: Annotated[bool, Option("parts", common=True)] = False
    """Use the stored BatchNorm statistics and do not update them. Right for small batches, and needed where ranks or
    accumulated batches must give the same result as one large batch."""
    sync_batchnorm: Annotated[bool, Option("ranks")] = False
    """Share BatchNorm statistics between the GPUs of a DDP run; refused without a GPU. No effect on one process."""
    spec_augment: Annotated[bool, Option("loss")] = True
    """Apply the model's own SpecAugment settings while training."""
    dropout: Annotated[float | None, Field(ge=0, lt=1), Option("loss", "probability")] = None
    """Replace every dropout probability of the model. null: the model's own."""
    sigma: Annotated[float | None, Field(ge=0), Option("loss")] = None
    """Logit under-normalisation of the TDT loss. null: the model's own (NeMo's `loss.tdt_kwargs.sigma`)."""
    omega: Annotated[float | None, Field(ge=0, le=1), Option("loss", "probability")] = None
    """Probability with which a batch is trained with the plain RNN-T loss. null: the model's own
    (`loss.tdt_kwargs.omega`)."""
    fastemit_lambda: Annotated[float | None, Field(ge=0), Option("loss")] = None
    """FastEmit regularization of the transducer loss (arXiv 2010.11148). null: the model's own
    (`loss.tdt_kwargs.fastemit_lambda`; of an RNN-T `loss.warprnnt_numba_kwargs`)."""
    ctc_loss_weight: Annotated[float | None, Field(ge=0, le=1), Option("loss", "share")] = None
    """Share w of the CTC loss in that of a hybrid model, (1 - w) x transducer + w x CTC. null: the model's own
    (`aux_ctc.ctc_loss_weight`). 0 leaves its CTC head as it is, 1 its prediction network and joint; with 1 the CTC
    head decodes. No effect on models with one head."""
    add_ctc: Annotated[bool, Option("parts")] = False
    """Give a TDT or RNN-T model a CTC head with random weights, trained with `ctc_loss_weight` (null: 0.3); model.nemo
    is NeMo's hybrid. No effect on models that have one."""
    unified_auto_ratio: Annotated[float | None, Field(ge=0, le=1), Option("parts", "share")] = None
    """Share of the training clips of a prompt model that get the language-less prompt `auto` in place of their
    language's, drawn anew in each epoch. null: the model's own (`train_ds.unified_auto_ratio`, 0.5 where it names
    none). No effect on models without language prompts (docs/prompt_models.md)."""
    streaming_share: Annotated[float | None, Field(ge=0, le=1), Option("loss", "share")] = None
    """Share of a unified model's steps (`att_chunk_context_size`) that see chunks, each time another context of its
    lists; the others see whole recordings. null: as the model weights its two losses (`loss.streaming_loss_weight`,
    0.7 in parakeet-unified), else 0.5. No effect on other models (docs/streaming.md)."""
    distillation: Annotated[NonNegativeFloat, Option("loss")] = 0.0
    """Weight of the distillation from the frozen base, the model as the run begins: how far next token, blank and
    duration of the cells that alignments pass through may move. A source of `data.train` may have a factor
    `distillation` of its own. The base takes memory for its weights and time for its forward pass
    (docs/forgetting.md). 0: none."""
    joint_memory_budget: Annotated[int | None, Field(ge=1), Option("memory", "MiB")] = None
    """Memory for one block of joint outputs. null: chosen by device."""
    occupancy_threshold: Annotated[Probability, Option("loss", "probability")] = 0.0
    """Leave lattice cells out of the loss that less than this share of an utterance's alignments pass through. 0 is
    exact, 1e-8 exact up to rounding; 1e-4 trains alike and is several times faster (docs/loss.md)."""


class DataConfig(Section):
    """What the model is trained and evaluated on."""

    train: Annotated[Sources, SkipValidation, Option("data", common=True)]
    """Training source, or a list of sources (a mixture)."""
    validation: Annotated[Sources | None, SkipValidation, Option("data", common=True)] = None
    """Source for the evaluations during the run; the best model is chosen on it."""
    test: Annotated[Sources | None, SkipValidation, Option("data", common=True)] = None
    """Source for the WER before and after the run. Never used to choose a model."""
    guard: Annotated[Sources | None, SkipValidation, Option("data")] = None
    """Source of the original domain, evaluated before, during (`training.guard_steps`) and after the run; a loss of
    accuracy on it is reported."""
    guard_limit: Annotated[str | None, AfterValidator(check_guard_limit), Option("data", form=FORMS)] = None
    """How much worse than the base model the best model may be on `guard`: "+5 %" of the base model's WER, or "+0.01"
    of WER. The best model is then the best by validation WER among those that keep it, or the base model. One half of
    `guard` chooses, the other judges the chosen one (docs/forgetting.md). null: `guard` does not choose."""
    guard_confidence: Annotated[float, Field(ge=0.5, lt=1), Option("data", "share")] = 0.5
    """How sure it has to be that a model keeps `guard_limit`: the share of resamplings of the guard's clips in which
    it does. The surer, the larger the guard has to be. 0.5: the WER as measured counts. No effect without
    `guard_limit`."""
    rehearsal: Annotated[Sources | None, SkipValidation, Option("data")] = None
    """Source of the original domain to train on beside `train`, or a list of them, so that it is not forgotten. An
    epoch stays one pass over `train` and gets more steps (docs/forgetting.md)."""
    rehearsal_share: Annotated[float, Field(gt=0, lt=1), Option("data", "share")] = 0.4
    """Share of the training clips that is drawn from `rehearsal`. No effect without it."""
    root: Annotated[str | None, Option("data")] = None
    """Directory, or prefix of a URL, below which the audio that rows name has to lie, links resolved. Set it for
    manifests that others wrote; what lies elsewhere goes to quarantine. null: anywhere (docs/security.md)."""
    temperature: Annotated[float | None, Field(ge=1), Option("data")] = None
    """Draw languages in proportion to their clips to the power of 1 / temperature: 1 as they are, larger evens them
    out. Replaces weights; each source of `train` names its `language`. An epoch is one pass over the first source. The
    sources of `rehearsal` keep their own weights."""
    max_samples: Annotated[CountOrAll, Option("data", "clips", common=True)] = -1
    """Train on a fixed random subset of N clips, which lies within every larger subset; each source of a mixture has
    its share. Without `shuffle` the first N. -1: all. `rehearsal` is not cut."""
    skip_samples: Annotated[NonNegativeInt, Option("data", "clips")] = 0
    """Leave out the first N clips of the subset that `max_samples` takes: those of a subset of N. Not for a
    mixture."""
    max_eval_samples: Annotated[CountOrAll, Option("evaluation", "clips")] = -1
    """Use only the first N clips of each evaluation set. -1: all."""
    min_duration: Annotated[float, Option("texts", "seconds")] = 0.1
    """Leave out and count training clips that are shorter."""
    max_duration: Annotated[float, Field(gt=0, allow_inf_nan=True), Option("texts", "seconds", common=True)] = 40.0
    """Leave out and count training clips that are longer."""
    text_normalization: Annotated[Literal["none", "lower", "basic"], Option("texts", common=True)] = "none"
    """Normalization of the training texts: `none`, `lower`, or `basic` (lower case, no punctuation but apostrophes,
    single spaces)."""
    wer_normalization: Annotated[Literal["none", "lower", "basic", "open_asr"], Option("evaluation")] = "basic"
    """Normalization of references and hypotheses before WER and CER. `open_asr`: as the Open ASR Leaderboard, by the
    clip's language (docs/evaluation.md)."""
    keep_empty_text: Annotated[bool, Option("texts")] = False
    """Train on clips whose text is empty, such as noise and silence: the model learns to hear nothing in them. Without
    it they are left out and counted."""
    filters: Annotated[dict[str, Any], Option("texts")] = {}
    """Further filters, each counted in summary.json: `min_characters_per_second`, `max_characters_per_second`,
    `max_tokens`, `alphabet` (the characters that texts may have), `alphabet_before_normalization` (the same, as the
    texts stand in the data), `min_level` (dB of full scale), `max_clipped` (share of the samples), `min_sample_rate`
    (Hz), `max_channels`. A source may have `filters` of its own."""
    leave_out: Annotated[str | list[str] | None, Option("texts")] = None
    """The problems.jsonl or suspicious.jsonl of a check of `train` (`python -m finetune.check`), or several: training
    clips that they name are left out and counted."""
    augment: Annotated[dict[str, Any], Option("loss")] = {}
    """Changes of the waveform, by probability: `speed` (`speed_factors`, default 0.9 and 1.1), `gain` (`gain_db`, -6
    to 6), `noise` (`noise_folder`, `noise_snr_db`, 5 to 25), `room` (`room_folder` of impulse responses)."""
    shuffle: Annotated[bool, Option("reading")] = True
    """Shuffle shards and clips anew in each epoch."""
    shuffle_buffer_size: Annotated[PositiveInt, Option("reading", "clips")] = 2048
    """Clips buffered in each worker, from which batches are drawn. No effect without `shuffle`."""
    shuffle_buffer_mib: Annotated[PositiveInt, Option("reading", "MiB")] = 256
    """Limit on the audio files buffered in each worker, for sources that hold audio and not its paths. No effect
    without `shuffle`."""
    group_by_duration: Annotated[bool, Option("batches")] = True
    """Put clips of similar length and number of tokens into a batch, which saves padding. No effect without
    `shuffle`."""
    batch_duration: Annotated[NonNegativeFloat, Option("batches", "seconds")] = 0.0
    """Audio of a batch with its padding (clips x the longest); short clips then come in large batches. Replaces
    `training.per_device_train_batch_size`; at least `max_duration`. 0: a fixed number of clips."""
    batch_cells: Annotated[NonNegativeInt, Option("batches", "cells")] = 0
    """Limit on the cells of a batch's alignment lattices, encoder frames x (tokens + 1) summed over its clips: what
    the loss computes with. 0: no limit."""
    batch_bounds: Annotated[
        list[list[StrictInt | StrictFloat]], AfterValidator(_check_bounds), Option("batches", form=BOUNDS_FORM)
    ] = []
    """Clips of a batch by the length of its longest: pairs (seconds, clips), the last also for longer ones, such as
    [[5, 64], [15, 24], [40, 8]]. Replaces `training.per_device_train_batch_size`; `training.auto_batch` fills it."""
    features: Annotated[Literal["model", "workers"], Option("reading")] = "model"
    """Where log-mel features of training are computed: by the model's process on its device, or by the workers on the
    CPU, for machines with spare cores. Equal but for the draws of dither. No effect on evaluation."""
    read_retries: Annotated[NonNegativeInt, Option("reading", "attempts")] = 5
    """Attempts after a failed read over the network, with growing delays. Local files are read once."""
    max_bad_fraction: Annotated[Fraction, Option("safety", "fraction")] = 0.05
    """Stop the run when a larger share of the clips read so far had to be put in quarantine (judged once 200 clips are
    read, and at the end of each epoch)."""
    allow_large_losses: Annotated[bool, Option("safety")] = False
    """Train although filters, quarantine and the other settings leave out more than half of the training clips or
    audio, which ends the run before its first step otherwise. A resumed run only warns."""
    allow_overlap: Annotated[bool, Option("safety")] = False
    """Train although clips of `validation`, `test` or `guard` are also in `train` or `rehearsal`; else that is
    refused."""


class TrainingConfig(Section):
    """How it is trained. Names follow `transformers.TrainingArguments` where there is a counterpart."""

    output_dir: Annotated[str, Option("checkpoints", common=True)]
    """Directory for everything that the run leaves."""
    overwrite_output_dir: Annotated[bool, Option("checkpoints")] = False
    """Delete an earlier run in `output_dir` and start afresh."""
    optimizer: Annotated[Optimizer, Option("optimizer", common=True)] = "adamw"
    """The optimizer."""
    optimizer_args: Annotated[OptimizerArgs, Option("optimizer")] = {}
    """Options of the optimizer: `betas`, `eps` (not Lion); for bitsandbytes `min_8bit_size` (elements; smaller
    tensors keep 32-bit states) and `embeddings_32bit` (default true); for torchao `block_size` (elements that
    share a scale)."""
    learning_rate: Annotated[PositiveFloat, Option("optimizer", common=True)] = 1e-4
    """Peak learning rate."""
    encoder_learning_rate: Annotated[float | None, Field(gt=0), Option("optimizer")] = None
    """Peak learning rate of the encoder. null: `learning_rate`."""
    decoder_learning_rate: Annotated[float | None, Field(gt=0), Option("optimizer")] = None
    """Peak learning rate of the prediction network. null: `learning_rate`."""
    joint_learning_rate: Annotated[float | None, Field(gt=0), Option("optimizer")] = None
    """Peak learning rate of the joint. null: `learning_rate`."""
    layer_decay: Annotated[float, Field(gt=0, le=1), Option("optimizer", "factor")] = 1.0
    """Multiply the encoder's learning rate by this for each Conformer layer below the top one, and once more for what
    lies below the layers (subsampling); 0.9 and 24 layers end at 0.08. The heads keep theirs. 1: equal rates. No
    effect on a frozen encoder."""
    weight_decay: Annotated[NonNegativeFloat, Option("optimizer")] = 0.01
    """Decoupled weight decay; never on biases, norms and other vectors."""
    l2_sp: Annotated[float | None, Field(ge=0), Option("optimizer")] = None
    """Pull each trained weight w towards its value w0 at the run's start (L2-SP, arXiv 1802.01483), decoupled as
    weight decay: w - learning rate x this x (w - w0) after each step. Useful values are about one over the sum of the
    learning rates of all steps (docs/forgetting.md). Costs a copy of the trained weights. null: 0, but with
    `data.guard_limit` and nothing else against forgetting 2 / (steps x `learning_rate`)."""
    lr_scheduler_type: Annotated[Schedule, Option("schedule", common=True)] = "cosine"
    """Learning-rate schedule."""
    warmup_ratio: Annotated[Fraction, Option("schedule", "fraction", common=True)] = 0.1
    """Share of the steps in which the learning rate rises. No effect with `warmup_steps` above 0."""
    warmup_steps: Annotated[NonNegativeInt, Option("schedule", "steps")] = 0
    """Warm-up in steps. 0: `warmup_ratio` decides."""
    max_grad_norm: Annotated[NonNegativeFloat, Option("optimizer")] = 1.0
    """Scale gradients down to this norm, after accumulation. 0: never."""
    max_skipped_steps: Annotated[NonNegativeInt, Option("safety", "steps")] = 20
    """End the run with a diagnosis after so many skipped steps in a row (loss or gradient not finite, or a spike).
    Steps that fp16's loss scaling skips while it finds its scale do not count. 0: never."""
    stop_if_diverged: Annotated[bool, Option("safety")] = False
    """End a run that diverges, with exit code 1 and the best model so far: training loss or gradient norm far above
    the first steps', or validation WER far above the base model's (docs/forgetting.md). false: it is said only."""
    spike_threshold: Annotated[float, Field(gt=1), Besides(0), Option("safety", "times")] = 0.0
    """Skip a step whose loss, or gradient norm, exceeds this many times its median over the last `spike_window` steps.
    Under DeepSpeed only the loss is judged. 0: never."""
    spike_window: Annotated[PositiveInt, Option("safety", "steps")] = 100
    """Steps over which `spike_threshold` takes the median; steps are judged once there are 20 of them, or all if the
    window is smaller. No effect without `spike_threshold`."""
    per_device_train_batch_size: Annotated[PositiveInt, Option("batches", "clips", common=True)] = 8
    """Clips in one forward pass of one process. No effect with `auto_batch`, `data.batch_duration` or
    `data.batch_bounds`."""
    auto_batch: Annotated[bool, Option("batches", common=True)] = False
    """Set `data.batch_bounds` from the memory plan of this machine, and try them with the worst batches before the run
    begins. If memory runs out later, a bound is halved and the step repeated instead of ending the run."""
    memory_limit_gib: Annotated[float | None, Field(gt=0), Option("batches", "GiB")] = None
    """Memory that `auto_batch` may fill on each GPU. null: what the card has. No effect without `auto_batch`."""
    per_device_eval_batch_size: Annotated[PositiveInt, Option("evaluation", "clips", common=True)] = 8
    """Clips decoded together in one process."""
    gradient_accumulation_steps: Annotated[PositiveInt, Option("batches", "batches", common=True)] = 1
    """Forward passes for one optimizer step."""
    loss_reduction: Annotated[Literal["mean_batch", "mean_volume"], Option("loss")] = "mean_batch"
    """`mean_batch`: mean over the clips of the optimizer step; `mean_volume`: sum divided by its tokens."""
    max_steps: Annotated[CountOrAll, Option("schedule", "steps", common=True)] = -1
    """Optimizer steps of the run. -1: `num_train_epochs` decides."""
    num_train_epochs: Annotated[float, Option("schedule", "epochs", common=True)] = 3.0
    """Passes over the data. No effect with `max_steps` set."""
    bf16: Annotated[bool, Option("memory", common=True)] = False
    """Mixed precision with bfloat16."""
    fp16: Annotated[bool, Option("memory")] = False
    """Mixed precision with float16 and loss scaling. GPU only."""
    tf32: Annotated[bool, Option("speed")] = False
    """Let a GPU round the factors of float32 matrix products and convolutions to TensorFloat-32. No effect on a
    CPU."""
    empty_cache_each_epoch: Annotated[bool, Option("memory")] = False
    """Return the allocator's unused GPU memory after each epoch and evaluation. No effect on a CPU."""
    cuda_alloc_conf: Annotated[str | None, Option("memory")] = None
    """PYTORCH_CUDA_ALLOC_CONF of the run, such as `expandable_segments:True`. null: torch's own settings, with
    `auto_batch` `expandable_segments:True`. A value in the environment takes precedence. No effect on a CPU."""
    num_gpus: Annotated[NonNegativeInt, Option("ranks", "processes")] = 0
    """Number of processes that the run expects; another number is refused. 0: not checked."""
    rank_timeout: Annotated[float, Option("ranks", "seconds")] = 30.0
    """Seconds after which a process that is stopped, or does not respond, counts as lost and the others end with a
    message. One that dies is noticed at once. 0: no monitoring. No effect on one process."""
    ddp_timeout: Annotated[int, Option("ranks", "seconds")] = 1800
    """How long an exchange between processes may wait for one that is still alive. No effect on one process."""
    seed: Annotated[NonNegativeInt, Option("schedule", common=True)] = 42
    """Seed of shuffling, dropout, SpecAugment and new weights."""
    dataloader_num_workers: Annotated[NonNegativeInt, Option("reading", "processes", common=True)] = 2
    """Worker processes that read, decode and tokenize."""
    dataloader_prefetch_factor: Annotated[PositiveInt, Option("reading", "batches")] = 4
    """Batches that each worker keeps ready."""
    dataloader_pin_memory: Annotated[bool, Option("reading")] = True
    """Keep batches in page-locked memory, so that copies to the GPU overlap with the computation. No effect on a
    CPU."""
    eval_steps: Annotated[NonNegativeInt, Option("evaluation", "steps", common=True)] = 500
    """Evaluate on `data.validation` every N steps. 0: only at the end."""
    guard_steps: Annotated[int, Field(ge=-1), Option("evaluation", "steps")] = -1
    """Evaluate `data.guard` with the first evaluation after every N steps. -1: with every evaluation. 0: only before
    and after the run. With `data.guard_limit` each evaluation is judged, and this stays -1."""
    eval_on_start: Annotated[bool, Option("evaluation")] = True
    """Evaluate the base model as step 0. With `data.guard_limit` false leaves out `data.test` only."""
    ema_decay: Annotated[Probability, Option("averages", "fraction")] = 0.0
    """Decay of a moving average of the weights, such as 0.999, which is evaluated beside them; the better of the two
    by validation WER becomes model.nemo. It costs 4 bytes for each trained parameter and a second evaluation of
    `data.validation` each time. 0: none."""
    ema_device: Annotated[Literal["same", "cpu"], Option("averages")] = "same"
    """Where the moving average lies: `same` as the weights, or `cpu`, to which the weights are copied in each step. No
    effect without `ema_decay`."""
    average_checkpoints: Annotated[int, Field(ge=2), Besides(0), Option("averages", "evaluations")] = 0
    """Keep the weights of N evaluations and average them at the end; the mean becomes model.nemo if its validation WER
    is better than that of the best single one. 0: no average."""
    average_by: Annotated[Literal["last", "best"], Option("averages")] = "last"
    """Which evaluations' weights are averaged: the `last` N, or the `best` N by validation WER. No effect without
    `average_checkpoints`."""
    save_steps: Annotated[NonNegativeInt, Option("checkpoints", "steps", common=True)] = 500
    """Write a checkpoint every N steps. 0: only at the end."""
    save_minutes: Annotated[NonNegativeFloat, Option("checkpoints", "minutes")] = 0.0
    """Also write a checkpoint when the last one is this old. 0: by steps alone."""
    save_total_limit: Annotated[NonNegativeInt, Option("checkpoints", "checkpoints")] = 2
    """Number of newest checkpoints to keep, beside that of the best evaluation. 0: all."""
    async_save: Annotated[bool, Option("checkpoints")] = True
    """Write checkpoints in a thread while training goes on, from a copy of weights and optimizer state in host
    memory. Engines that shard them (DeepSpeed, FSDP) write their parts at once and leave checksums and the rest
    to the thread."""
    resume_from_checkpoint: Annotated[
        bool | str, Option("checkpoints", common=True, form="true, false or the path of a checkpoint")
    ] = False
    """true: continue from the newest whole checkpoint of `output_dir`; or the path of a checkpoint."""
    logging_steps: Annotated[PositiveInt, Option("logging", "steps")] = 10
    """Steps between two lines in metrics.jsonl, the log and the trackers; drift is judged by these lines."""
    log_clips: Annotated[bool, Option("logging")] = False
    """Write the ids of each step's clips to clips.jsonl, to find what a step contained."""
    report_to: Annotated[str | list[str], BeforeValidator(_check_trackers), Option("logging")] = "tensorboard"
    """Trackers of Accelerate, one or a list: `tensorboard`, `wandb`, `trackio`, `none`, ... They get the numbers, and
    samples of each evaluation to read and hear."""
    sample_predictions: Annotated[NonNegativeInt, Option("logging", "clips")] = 5
    """Pairs of reference and hypothesis that an evaluation shows."""
    report_clips: Annotated[int, Option("logging", "clips")] = 20
    """Worst clips of an evaluation that report.html shows and plays, with at most 20 s of audio each. 0: none, and no
    words of the data in the page either."""
    stages: Annotated[list[Any], Option("stages")] = []
    """A plan: stages that train one after the other, each from the model of the one before, in `output_dir`/stage-N.
    Each is a mapping of `max_samples`, `seen` (`repeat`, or `skip` for clips of the stage before), and settings under
    `model`, `data` and `training`. `stages` may also stand at the top of the run file."""
    stage_margin: Annotated[NonNegativeFloat, Option("stages", "fraction")] = 0.0
    """Stop the plan if a stage leaves the validation WER worse than the one before by more than this."""
    num_threads: Annotated[NonNegativeInt, Option("speed", "threads")] = 0
    """CPU threads of the training process. 0: torch's own choice."""


class RunConfig(BaseModel):
    """A run file: a typed object with plain values, lists and dicts inside, and no references left."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: ModelConfig
    data: DataConfig
    training: TrainingConfig

    def get(self, key: str) -> Any:
        """Return the value of a dotted key, such as "data.train"."""
        section, name = key.split(".", 1)
        return getattr(getattr(self, section), name)

    def replaced(self, values: dict[str, Any]) -> Self:
        """Return a deep copy with other values.

        Args:
            values: dotted key -> value; not checked.
        """
        changed = self.model_copy(deep=True)
        for key, value in values.items():
            section, name = key.split(".", 1)
            setattr(getattr(changed, section), name, value)
        return changed

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return plain nested dicts and lists."""
        return self.model_dump(warnings=False)


SECTIONS: dict[str, type[Section]] = {"model": ModelConfig, "data": DataConfig, "training": TrainingConfig}


def schema_fields() -> dict[str, FieldInfo]:
    """Return the field of every key of the run file, keys in dotted form."""
    return {
        f"{section}.{name}": field for section, cls in SECTIONS.items() for name, field in cls.model_fields.items()
    }


def option_of(field: FieldInfo) -> Option:
    """Return how a key is presented."""
    return next(note for note in field.metadata if isinstance(note, Option))


def meaning_of(field: FieldInfo) -> str:
    """Return a key's docstring in one line."""
    return " ".join((field.description or "").split())


def choices_of(field: FieldInfo) -> tuple[Any, ...]:
    """Return the values that a field may have, or nothing where there is no such list."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def type_of(annotation: Any) -> str:
    """Return a field's type in a few words, such as "float or null"."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return "str"
    if origin in (Union, types.UnionType):
        return " or ".join(type_of(part) for part in inside)
    kind = origin or annotation
    return "dict" if is_typeddict(kind) else kind.__name__


def range_of(field: FieldInfo) -> str:
    """Return the range of a number, such as "1 or more, or -1"; "" where there is none."""
    bound = {name: getattr(m, name) for m in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(m, name)}
    if "gt" in bound and field.annotation is int:
        bound["ge"] = bound.pop("gt") + 1
    low = f"{bound['ge']:g}" if "ge" in bound else f"above {bound['gt']:g}" if "gt" in bound else ""
    high = f"{bound['le']:g}" if "le" in bound else f"below {bound['lt']:g}" if "lt" in bound else ""
    text = f"{low} to {high}" if low and high else f"{low} or more" if "ge" in bound else low or high
    besides = [f"{m.value:g}" for m in field.metadata if isinstance(m, Besides)]
    return ", or ".join([text, *besides]) if text else ""
