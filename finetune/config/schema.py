"""The run file's schema: every key with its type, default, unit and meaning.

`docs/configuration.md` is generated from these dataclasses (`python scripts/docs/write_configuration_docs.py`).
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def option(default: Any, help: str, unit: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field that carries its own documentation.

    A mutable default is copied for each instance. `choices` are checked by `finetune.config.load`.
    """
    metadata = {"help": help, "unit": unit, "choices": choices}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


OPTIMIZERS = (
    "adamw",
    "adamw_foreach",
    "adamw_loop",
    "adamw_compiled",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_8bit_ao",
    "adamw_4bit_ao",
    "adamw_fp8_ao",
    "adamw_bf16_ao",
    "cpu_offload_ao",
    "cpu_offload_gradients_ao",
    "flash_adamw",
    "flash_adamw_gradient_release",
)
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_min_lr",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "onecycle",
)


@dataclass
class ModelConfig:
    """What is trained."""

    name: str = option(
        MISSING,
        "A .nemo file, a run's output directory, a LoRA adapter's directory, a Hugging Face directory (`ParakeetForTDT`), a hub name such "
        "as `nvidia/parakeet-tdt-0.6b-v3`, or a NeMo model YAML (random weights).",
    )
    tokenizer: Any = option(
        None,
        "Directory with a SentencePiece `tokenizer.model`, only for a NeMo model YAML without a tokenizer of its own. Or a mapping: "
        "`extend_from` appends pieces to the model's vocabulary, `replace_with` puts another in its place; each names a data set as "
        "`data.train` does, a tokenizer's directory or .model, or a .txt file. `size`: pieces that are appended at most (null: an "
        "eighth of the vocabulary, 64 at least), or those of the new vocabulary (null: as many as before). `pieces`: "
        "`new_characters` (default) appends only pieces with a character that the tokenizer lacks, `all` also shorter ways to "
        "write what it can. `coverage`: share of the texts' characters that get a piece (null: 1). `dir`: as the directory "
        "alone. docs/vocabulary.md tells the rest.",
    )
    gradient_checkpointing: bool = option(
        False,
        "Recompute the activations of the encoder's subsampling and Conformer layers in the backward pass instead of storing "
        "them.",
    )
    gradient_checkpointing_every: int = option(
        1,
        "Checkpoint each N-th Conformer layer. Larger is faster and needs more memory. No effect without "
        "`gradient_checkpointing`.",
        "layers",
    )
    activation_offload: bool = option(
        False,
        "Keep what the backward pass needs of the encoder in pinned host memory instead of on the GPU, copied beside the "
        "computation.",
    )
    dtype: str = option(
        "float32",
        "Type of the parameters. bfloat16 halves parameters and gradients; BatchNorm stays in float32. Wants an optimizer that "
        "rounds its updates safely (the strategies bf16_full and bf16_stochastic_rounding).",
        choices=("float32", "bfloat16"),
    )
    freeze_encoder: bool = option(False, "Train prediction network and joint only; the encoder gets no gradients.")
    unfreeze_encoder_layers: int = option(
        0, "Train the last N Conformer layers nevertheless. No effect without `freeze_encoder`.", "layers"
    )
    lora_rank: int = option(
        0,
        "Rank of LoRA adapters in the encoder (arXiv 2106.09685); everything else of the encoder is frozen. 0: no LoRA. "
        "model.nemo is written with the adapters merged.",
    )
    lora_alpha: float | None = option(
        None, "LoRA updates are scaled by alpha / rank. null: twice the rank. No effect without `lora_rank`."
    )
    lora_dropout: float = option(0.0, "Dropout before the adapters. No effect without `lora_rank`.", "probability")
    lora_targets: list[str] = option(
        ["linear_q", "linear_k", "linear_v", "linear_out", "linear1", "linear2"],
        "Linear layers of each Conformer layer that get adapters: `linear_q`, `linear_k`, `linear_v`, `linear_out`, `linear_pos` "
        "(attention), `linear1`, `linear2` (feed-forward). No effect without `lora_rank`.",
    )
    lora_train_decoder: bool = option(
        True,
        "Train prediction network and joint whole beside the adapters. false: they are frozen, and the adapter is much smaller. No effect "
        "without `lora_rank`.",
    )
    adapter: str | None = option(
        None,
        "Directory of an adapter that a LoRA run left (`output_dir`/adapter): training goes on with it, on its base model `name`. Wants "
        "`lora_rank` and the others as the adapter has them. To train from base and adapter merged, give the directory as `name`.",
    )
    scaled_dot_product_attention: bool = option(
        False, "Attention of the encoder through torch's scaled_dot_product_attention."
    )
    compile: bool = option(
        False,
        "Compile the Conformer layers with torch.compile: one graph for all layers, made in the first step. For GPUs: on a CPU it "
        "is compiled again for each length, for minutes.",
    )
    compile_bucket: float = option(
        2.0,
        "Batches are padded to a multiple of this, so that few lengths have to be compiled where a graph fits one length only. 0: "
        "no padding. The padding counts in BatchNorm's statistics unless `freeze_batchnorm` is set. No effect without `compile`.",
        "seconds",
    )
    freeze_batchnorm: bool = option(
        False,
        "Use the stored BatchNorm statistics and do not update them. Right for small batches, and needed where ranks "
        "or accumulated batches must give the same result as one big batch.",
    )
    sync_batchnorm: bool = option(
        False,
        "Share BatchNorm statistics between the GPUs of a DDP run. No effect on one process; refused without a GPU.",
    )
    spec_augment: bool = option(True, "Use the model's own SpecAugment settings while training.")
    dropout: float | None = option(
        None, "Replaces every dropout probability of the model. null keeps the model's own.", "probability"
    )
    sigma: float | None = option(
        None, "Logit under-normalisation of the TDT loss. null keeps the model's own (NeMo's `loss.tdt_kwargs.sigma`)."
    )
    omega: float | None = option(
        None,
        "Probability with which a batch is trained with the plain RNN-T loss. null keeps the model's own "
        "(`loss.tdt_kwargs.omega`).",
        "probability",
    )
    fastemit_lambda: float = option(0.0, "FastEmit regularisation of the transducer loss (arXiv 2010.11148).")
    joint_memory_budget: int | None = option(
        None, "Memory for one block of joint outputs. null chooses by device.", "MiB"
    )
    occupancy_threshold: float = option(
        0.0,
        "Lattice cells that less than this share of a clip's alignments pass through are left out of the loss. 0 is exact, 1e-8 "
        "exact to rounding; 1e-4 trains alike and is several times faster (docs/loss.md).",
        "probability",
    )


@dataclass
class DataConfig:
    """What it is trained and judged on. A source is a path or name, or a mapping with `path` and the keys of
    `finetune.data.sources.Source`; a list is a mixture."""

    train: Any = option(MISSING, "Training source, or a list of sources.")
    validation: Any = option(None, "Source for the evaluations during the run; the best model is chosen on it.")
    test: Any = option(None, "Source for the WER before and after the run. Never used to choose a model.")
    guard: Any = option(
        None,
        "Source of the original domain, evaluated before, during (`training.guard_steps`) and after; a loss on it is said.",
    )
    root: str | None = option(
        None,
        "Directory, or beginning of a URL, below which the audio that rows name has to lie, links resolved: set it for manifests that "
        "others wrote. What lies elsewhere goes to quarantine with that reason. null: anywhere (docs/security.md).",
    )
    temperature: float | None = option(
        None,
        "Draw languages in proportion to their clips to the power of 1 / temperature: 1 as they are, larger evens them out. Takes the "
        "place of weights; each source of `train` names its `language`. An epoch is one pass over the first source.",
    )
    max_samples: int = option(
        -1,
        "Train on a fixed random subset of N clips, which lies within every larger subset; of a mixture each source has its share. "
        "Without `shuffle` the first N. -1 means all.",
        "clips",
    )
    skip_samples: int = option(
        0,
        "Leave out the first N clips of the subset that `max_samples` takes: those of a subset of N. Not for a mixture.",
        "clips",
    )
    max_eval_samples: int = option(-1, "Use only the first N clips of each evaluation set. -1 means all.", "clips")
    min_duration: float = option(0.1, "Shorter training clips are left out and counted.", "seconds")
    max_duration: float = option(40.0, "Longer training clips are left out and counted.", "seconds")
    text_normalization: str = option(
        "none",
        "What is done to the training texts: `none`, `lower`, or `basic` (lower case, no punctuation but apostrophes, "
        "single spaces).",
        choices=("none", "lower", "basic"),
    )
    wer_normalization: str = option(
        "basic",
        "What is done to references and hypotheses before WER and CER. `open_asr`: as the Open ASR Leaderboard did, by the clip's "
        "language (docs/evaluation.md).",
        choices=("none", "lower", "basic", "open_asr"),
    )
    filters: dict[str, Any] = option(
        {},
        "Further filters, each counted in summary.json: `min_characters_per_second`, `max_characters_per_second`, `max_tokens`, "
        "`alphabet` (the characters that texts may have), `min_level` (dB of full scale), `max_clipped` (share of the samples), "
        "`min_sample_rate` (Hz), `max_channels`. A source may have `filters` of its own.",
    )
    leave_out: str | None = option(
        None,
        "Training clips that a check found unfit or twice, which are left out and counted: its problems.jsonl.",
    )
    augment: dict[str, Any] = option(
        {},
        "Changes of the waveform, by probability: `speed` (`speed_factors`, default 0.9 and 1.1), `gain` (`gain_db`, -6 to 6), `noise` "
        "(`noise_folder`, `noise_snr_db`, 5 to 25), `room` (`room_folder` of impulse responses).",
    )
    shuffle: bool = option(True, "Shuffle shards and clips, anew each epoch.")
    shuffle_buffer_size: int = option(
        2048, "Clips that wait in each worker, from which batches are drawn. No effect without `shuffle`.", "clips"
    )
    shuffle_buffer_mib: int = option(
        256,
        "Audio files that wait in each worker at most, where the sources hold audio and not its paths. No effect without `shuffle`.",
        "MiB",
    )
    group_by_duration: bool = option(
        True,
        "Put clips of like length, and of like number of tokens, into a batch, which saves padding. No effect without `shuffle`.",
    )
    batch_duration: float = option(
        0.0,
        "Audio of a batch with its padding (clips x the longest). Short clips then come in large batches. Takes the place of "
        "`training.per_device_train_batch_size`; at least `max_duration`. 0: that many clips, whatever their length.",
        "seconds",
    )
    batch_cells: int = option(
        0,
        "Cells of the alignment lattices of a batch, encoder frames x (tokens + 1) summed over its clips: what the loss computes "
        "with. 0: no limit.",
        "cells",
    )
    batch_bounds: Any = option(
        [],
        "Clips of a batch by the length of its longest: pairs (seconds, clips), the last also for longer ones, such as [[5, 64], [15, 24], "
        "[40, 8]]. Takes the place of `training.per_device_train_batch_size`; `training.auto_batch` fills it.",
    )
    read_retries: int = option(
        5, "Attempts after a failed read over the network, with growing delays. Local files are read once.", "attempts"
    )
    max_bad_fraction: float = option(
        0.05,
        "The run stops when a larger share of the clips read so far had to be put in quarantine (judged once 200 clips are read, and at the end of each epoch).",
        "fraction",
    )


@dataclass
class TrainingConfig:
    """How it is trained. Names follow `transformers.TrainingArguments` where there is a counterpart."""

    output_dir: str = option(MISSING, "Directory for everything that the run leaves.")
    overwrite_output_dir: bool = option(False, "Delete an earlier run in `output_dir` and start afresh.")
    optimizer: str = option("adamw", "The optimizer.", choices=OPTIMIZERS)
    optimizer_args: dict[str, Any] = option(
        {},
        "Options of the optimizer: `betas`, `eps` (not Lion); for bitsandbytes `min_8bit_size` (elements; smaller tensors keep "
        "32-bit states) and `embeddings_32bit` (default true); for torchao `block_size` (elements that share a scale).",
    )
    learning_rate: float = option(1e-4, "Peak learning rate.")
    encoder_learning_rate: float | None = option(None, "Peak learning rate of the encoder. null: `learning_rate`.")
    decoder_learning_rate: float | None = option(
        None, "Peak learning rate of the prediction network. null: `learning_rate`."
    )
    joint_learning_rate: float | None = option(None, "Peak learning rate of the joint. null: `learning_rate`.")
    weight_decay: float = option(0.01, "Decoupled weight decay; never on biases, norms and other vectors.")
    lr_scheduler_type: str = option("cosine", "Learning-rate schedule.", choices=SCHEDULES)
    warmup_ratio: float = option(0.1, "Share of the steps in which the learning rate rises.", "fraction")
    warmup_steps: int = option(0, "Steps of warm-up. Replaces `warmup_ratio` where above 0.", "steps")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm, after accumulation. 0: never.")
    max_skipped_steps: int = option(
        20,
        "So many skipped steps in a row (loss or gradient not finite, or a spike) end the run with a diagnosis. Steps that fp16's loss "
        "scaling skips while it finds its scale do not count. 0: never.",
        "steps",
    )
    spike_guard: float = option(
        0.0,
        "A step whose loss, or gradient norm, exceeds this many times its median over the last `spike_window` steps is skipped. Under "
        "DeepSpeed the loss alone is judged. 0: none.",
        "times",
    )
    spike_window: int = option(
        100,
        "Steps whose median `spike_guard` goes by; it judges from 20 of them on, or all where they are fewer. No effect without "
        "`spike_guard`.",
        "steps",
    )
    per_device_train_batch_size: int = option(8, "Clips in one forward pass of one process.", "clips")
    auto_batch: bool = option(
        False,
        "Bounds of the batches by length of the clips from the plan of memory for this machine (`data.batch_bounds`), tried with the worst "
        "batches before the run begins. Memory that runs out later halves a bound and the step is made again, instead of ending the run. "
        "Takes the place of `per_device_train_batch_size`.",
    )
    memory_limit_gib: float | None = option(
        None,
        "Memory that `auto_batch` may fill on each GPU. null: what the card has. No effect without `auto_batch`.",
        "GiB",
    )
    per_device_eval_batch_size: int = option(8, "Clips decoded together in one process.", "clips")
    gradient_accumulation_steps: int = option(1, "Forward passes for one optimizer step.", "batches")
    loss_reduction: str = option(
        "mean_batch",
        "`mean_batch`: mean over the clips of the optimizer step; `mean_volume`: sum divided by its tokens.",
        choices=("mean_batch", "mean_volume"),
    )
    max_steps: int = option(-1, "Optimizer steps of the run. -1: `num_train_epochs` decides.", "steps")
    num_train_epochs: float = option(3.0, "Passes over the data. No effect where `max_steps` is set.", "epochs")
    bf16: bool = option(False, "Mixed precision with bfloat16.")
    fp16: bool = option(False, "Mixed precision with float16 and loss scaling. GPU only.")
    tf32: bool = option(
        False,
        "Let float32 matrix products and convolutions of a GPU round their factors to TensorFloat-32. No effect on a CPU.",
    )
    empty_cache_each_epoch: bool = option(
        False, "Give the allocator's unused GPU memory back after each epoch and evaluation. No effect on a CPU."
    )
    cuda_alloc_conf: str | None = option(
        None,
        "PYTORCH_CUDA_ALLOC_CONF of the run, such as `expandable_segments:True`. The environment's own value counts where "
        "there is one. No effect on a CPU.",
    )
    num_gpus: int = option(0, "Checked against the number of processes. 0: not checked.", "processes")
    rank_timeout: float = option(
        30.0,
        "With several processes: seconds after which one that is stopped, or not heard of, counts as lost and the others end with a message. One that dies is known at once. 0: nobody watches.",
        "seconds",
    )
    ddp_timeout: int = option(
        1800,
        "With several processes: how long an exchange between them may wait for one that is still alive.",
        "seconds",
    )
    seed: int = option(42, "Seed of shuffling, dropout, SpecAugment and new weights.")
    dataloader_num_workers: int = option(2, "Worker processes that read, decode and tokenise.", "processes")
    dataloader_prefetch_factor: int = option(4, "Batches that each worker keeps ready.", "batches")
    dataloader_pin_memory: bool = option(
        True, "Batches in page-locked memory, copied to the GPU beside the computation. No effect on a CPU."
    )
    eval_steps: int = option(500, "Evaluate on `data.validation` each N steps. 0: only at the end.", "steps")
    guard_steps: int = option(
        -1,
        "Evaluate `data.guard` with the first evaluation after each N steps. -1: with every evaluation. 0: only before and after.",
        "steps",
    )
    eval_on_start: bool = option(True, "Evaluate the base model as step 0.")
    ema_decay: float = option(
        0.0,
        "Decay of a moving average of the weights, such as 0.999, which is evaluated beside them: the better one by validation WER is "
        "model.nemo. It costs 4 bytes a trained parameter and a second evaluation of `data.validation` each time. 0: none.",
        "fraction",
    )
    ema_device: str = option(
        "same",
        "Where the moving average lies: `same` as the weights, or `cpu`, to which the weights are then copied in each step. No effect "
        "without `ema_decay`.",
        choices=("same", "cpu"),
    )
    average_checkpoints: int = option(
        0,
        "Keep the weights of N evaluations and average them at the end; the mean is model.nemo where its validation WER is better than the "
        "best single one's. 0: no average.",
        "evaluations",
    )
    average_by: str = option(
        "last",
        "Which evaluations' weights are averaged: the `last` N, or the `best` N by validation WER. No effect without "
        "`average_checkpoints`.",
        choices=("last", "best"),
    )
    save_steps: int = option(500, "Write a checkpoint each N steps. 0: only at the end.", "steps")
    save_minutes: float = option(
        0.0, "Write a checkpoint, too, when the last one is so old. 0: by steps alone.", "minutes"
    )
    save_total_limit: int = option(
        2,
        "Newest checkpoints that are kept, beside that of the best evaluation where there is one. 0: all.",
        "checkpoints",
    )
    async_save: bool = option(
        True,
        "Write checkpoints in a thread while training goes on, from a copy of weights and optimizer state in host memory. Engines that "
        "shard them (DeepSpeed, FSDP) write their parts at once and leave checksums and the rest to the thread.",
    )
    resume_from_checkpoint: Any = option(
        False, "true: continue from the newest whole checkpoint of `output_dir`; or the path of a checkpoint."
    )
    logging_steps: int = option(
        10,
        "Steps between two lines in metrics.jsonl, the log and the trackers; warnings of drift are judged by these lines.",
        "steps",
    )
    log_clips: bool = option(False, "Write the ids of each step's clips to clips.jsonl, to find what a step held.")
    report_to: Any = option(
        "tensorboard",
        "Tracker of Accelerate, or a list: `tensorboard`, `wandb`, `trackio`, `none`. They get the numbers, and samples of each evaluation to read and hear.",
    )
    sample_predictions: int = option(5, "Reference/hypothesis pairs shown by an evaluation.", "clips")
    report_clips: int = option(
        20,
        "Worst clips of an evaluation that report.html shows and plays, with at most 20 s of the audio of each. 0: none, and no words "
        "of the data in the page either.",
        "clips",
    )
    stages: list[Any] = option(
        [],
        "A plan: stages that train one after the other, each from the model of the one before, in `output_dir`/stage-N. Each is a mapping "
        "of `max_samples`, `seen` (`repeat`, or `skip` for clips of the stage before), and settings under `model`, `data` and "
        "`training`. `stages` may also stand at the top of the run file.",
    )
    stage_margin: float = option(
        0.0,
        "The plan stops where a stage leaves the validation WER worse than the one before by more than this.",
        "fraction",
    )
    num_threads: int = option(0, "CPU threads of the training process. 0: torch's own choice.", "threads")


@dataclass
class RunConfig:
    """A run file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
