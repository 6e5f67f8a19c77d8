"""Why keys of NeMo's and Lightning's configurations have no counterpart."""

LAYOUT = tuple(
    f"model.{name}"
    for name in (
        *("model_defaults", "preprocessor", "spec_augment", "encoder", "decoder", "joint", "decoding", "loss"),
        "aux_ctc",
    )
)
LAYOUT_SECTIONS = dict.fromkeys(LAYOUT, "comes with the model that model.name names") | {
    "model.interctc": "CTC losses between the layers are not trained",
    "model.freeze_updates": "set model.freeze_encoder and model.unfreeze_encoder_layers, for the whole run",
}
"""Sections of `model:` that describe the network, and what becomes of them."""

_LENGTHS = "batches hold clips of like length (data.group_by_duration); data.batch_duration limits their audio"
_EVALUATION = "evaluations share a batch size, training.per_device_eval_batch_size, and decode texts in full"
_KEPT = "the best model by validation WER is kept as model.nemo, and the newest checkpoints to continue from"

REASONS = (
    ("hydra.*", "Hydra is not used"),
    ("init_from_ptl_ckpt", "a checkpoint does not describe its model: give the .nemo file as init_from_nemo_model"),
    ("init_from_*", "one model is taken, whole"),
    ("model.train_ds.*bucket*", _LENGTHS),
    ("model.train_ds.num_cuts_for_bins_estimate", _LENGTHS),
    ("model.train_ds.quadratic_*", "data.batch_cells limits what grows faster than the audio"),
    ("model.train_ds.batch_tokens", "data.batch_duration and data.batch_cells limit a batch"),
    ("model.train_ds.m??_tps", "tokens a second are not filtered; data.filters has m..._characters_per_second"),
    ("model.train_ds.augmentor*", "data.augment has speed, gain, noise and room, by probability"),
    ("model.train_ds.noise_*", "data.augment has noise: the probability, with noise_folder and noise_snr_db"),
    ("model.train_ds.rir_*", "data.augment has room: the probability, with room_folder"),
    ("model.train_ds.tarred_shard_strategy", "every clip is seen once an epoch over all processes"),
    ("model.train_ds.*seed", "training.seed shuffles"),
    ("model.*_ds.*_path", "Lhotse's own formats are not read: give NeMo manifests, tar or parquet shards"),
    ("model.*_ds.channel_selector", "channels are averaged"),
    ("model.*_ds.trim_silence", "audio is not trimmed"),
    ("model.*_ds.labels", "the texts' characters are those of the model's tokenizer"),
    ("model.*_ds.normalize_transcripts", "set data.text_normalization"),
    ("model.*_ds.symbols_to_keep", "data.text_normalization basic keeps apostrophes"),
    ("model.*_ds.use_start_end_token", "transducers and CTC models have no such tokens"),
    ("model.*_ds.sample_rate_key", "the rate is read from the audio"),
    ("model.validation_ds.*", _EVALUATION),
    ("model.test_ds.*", _EVALUATION),
    ("model.train_ds.*", "an option of NeMo's data loader that is not here; docs/data.md says how batches are made"),
    ("model.char_labels.*", "models of characters are not supported"),
    ("model.tokenizer.*", "the model keeps its own tokenizer"),
    ("model.compute_eval_loss", "evaluations measure WER and CER, no loss"),
    ("model.skip_nan_grad", "steps with gradients that are not finite are always left out, and counted"),
    ("model.variational_noise.*", "noise on weights is not supported"),
    ("model.sample_rate", "the model's own"),
    ("model.optim.sched.*", "the schedule has no such option"),
    ("model.optim.*", "the optimizer has no such option"),
    ("model.data_path", "used where the sources refer to it"),
    ("model.streaming", "data sets of the hub are always streamed"),
    ("trainer.val_check_interval", "a share of an epoch: set training.eval_steps, in optimizer steps"),
    ("trainer.check_val_every_n_epoch", "set training.eval_steps, in optimizer steps"),
    ("trainer.limit_*", "set data.max_samples or data.max_eval_samples, in clips"),
    ("trainer.num_sanity_val_steps", "the base model is evaluated as step 0 (training.eval_on_start)"),
    ("trainer.gradient_clip_algorithm", "gradients are clipped by their norm"),
    ("trainer.max_time", "a run has no limit of time; it continues with training.resume_from_checkpoint"),
    ("trainer.*", "a switch of Lightning's trainer, which is not used here"),
    ("exp_manager.checkpoint_callback_params.*", _KEPT),
    ("exp_manager.create_checkpoint_callback", _KEPT),
    ("exp_manager.*_logger_kwargs.*", "set the tracker's own environment variables (WANDB_PROJECT and the like)"),
    ("exp_manager.*early_stopping*", "a run is not stopped early; the best model by validation WER is what you keep"),
    ("exp_manager.ema.*", "weights are not averaged"),
    ("exp_manager.resume_from_checkpoint", "checkpoints of NeMo are not read: give the .nemo file as model.name"),
    ("exp_manager.*", "part of NeMo's experiment manager, which is not used here"),
    ("training.deepspeed", "given on the command line: --deepspeed FILE, or --strategy zero2"),
    ("training.*_strategy", "set training.eval_steps and training.save_steps, in optimizer steps"),
)
"""Patterns of keys, the first that fits counts."""
