"""Warnings for settings that are known to make a good model worse."""

from finetune.config.schema import RunConfig
from finetune.strategies.optimizers import ROUNDS_SAFELY
from finetune.training.schedule import warmup_steps


def warnings_for(
    config: RunConfig, *, pretrained: bool, parameters: int, clips_per_step: int, total_steps: int
) -> list[str]:
    """One sentence for each risky setting.

    Args:
        config: the run's configuration.
        pretrained: whether the run starts from a trained model.
        parameters: of the model.
        clips_per_step: over all processes and accumulated batches.
        total_steps: optimizer steps of the run.
    """
    t, found = config.training, []
    rates = [
        r for r in (t.learning_rate, t.encoder_learning_rate, t.decoder_learning_rate, t.joint_learning_rate) if r
    ]
    big = parameters > 100_000_000
    if pretrained and big and max(rates) > 5e-5 and clips_per_step < 64:
        found.append(
            f"learning rate {max(rates):g} with {clips_per_step} clips a step: fine-tuning Parakeet at 8e-5 with 16 clips has "
            "raised WER from 2.5 to 7.3 % on its own domain (NeMo issue 15382). Try training.learning_rate=1e-5 or more "
            "accumulation, and watch data.guard."
        )
    elif pretrained and max(rates) > 2e-3:
        found.append(f"learning rate {max(rates):g} is high for a trained model; 1e-3 is a lot even for a small one.")
    if (
        warmup_steps(t, total_steps) == 0
        and t.lr_scheduler_type not in ("constant", "inverse_sqrt")
        and total_steps > 20
    ):
        found.append(
            "no warm-up: the first steps at full learning rate can wreck a trained model. Set training.warmup_ratio=0.1."
        )
    if (
        pretrained
        and t.per_device_train_batch_size < 8
        and not config.model.freeze_batchnorm
        and not config.model.sync_batchnorm
    ):
        found.append(
            f"batches of {t.per_device_train_batch_size} clips move the BatchNorm statistics with every small batch "
            "(accumulation does not help: it sees them one by one). Set model.freeze_batchnorm=true."
        )
    if config.model.dtype == "bfloat16" and t.optimizer not in ROUNDS_SAFELY:
        found.append(
            f"model.dtype bfloat16 with {t.optimizer}: updates smaller than a 256th of a weight are lost in rounding. Take an "
            f"optimizer that rounds safely: {', '.join(sorted(ROUNDS_SAFELY))}."
        )
    if not config.data.validation:
        found.append(
            "no data.validation: nothing can tell whether the model gets better, and the last weights are kept."
        )
    return found
