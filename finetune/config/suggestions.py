"""What a misspelt name was probably meant to be."""

import difflib
import re
from collections.abc import Iterable

OTHER_SECTION = 0.15
"""By how much a name of another section is less likely."""

OTHER_NAMES = {
    name: keys.split()
    for keys, names in {
        "training.learning_rate": "lr max_lr base_lr peak_lr",
        "training.per_device_train_batch_size": "batch batch_size bs train_batch_size micro_batch_size "
        "batch_size_per_gpu per_gpu_train_batch_size train_micro_batch_size_per_gpu",
        "training.per_device_eval_batch_size": "eval_batch_size validation_batch_size per_gpu_eval_batch_size",
        "training.gradient_accumulation_steps": "grad_accum accum accumulation gradient_accumulation accum_steps "
        "grad_accum_steps grad_accumulation_steps accumulate_grad_batches accumulation_steps",
        "training.num_train_epochs": "epoch epochs num_epochs max_epochs n_epochs train_epochs",
        "training.max_steps": "steps num_steps max_iters max_train_steps total_steps num_train_steps iterations",
        "training.max_grad_norm": "grad_clip clip clip_grad gradient_clip gradient_clip_val clip_grad_norm "
        "gradient_clipping grad_norm",
        "training.bf16 training.fp16": "precision mixed_precision amp half",
        "training.optimizer": "optim opt",
        "training.optimizer_args": "betas eps adam_beta1 adam_beta2 adam_epsilon optim_args",
        "training.lr_scheduler_type": "scheduler sched lr_scheduler schedule",
        "training.warmup_steps training.warmup_ratio": "warmup num_warmup_steps",
        "training.weight_decay": "wd",
        "training.dataloader_num_workers": "workers num_workers",
        "training.eval_steps": "val_check_interval eval_every eval_interval evaluation_strategy eval_strategy",
        "training.save_steps": "save_every save_interval checkpoint_every save_strategy every_n_train_steps",
        "training.logging_steps": "log_every log_interval log_every_n_steps",
        "training.output_dir": "output out_dir exp_dir save_dir output_path logging_dir",
        "training.resume_from_checkpoint": "resume ckpt_path resume_if_exists",
        "training.num_gpus": "gpus devices n_gpu nproc_per_node",
        "model.name": "model pretrained_model model_name_or_path pretrained_model_name_or_path init_from_nemo_model "
        "init_from_pretrained_model",
        "model.lora_rank": "lora_r rank",
        "data.train": "train_ds train_data train_file train_manifest manifest_filepath manifest train_dataset",
        "data.validation": "validation_ds val dev valid eval eval_dataset validation_file val_manifest dev_manifest",
        "data.test": "test_ds test_file test_manifest",
    }.items()
    for name in names.split()
}
"""What other tools call a key -> the keys that are meant."""


def closest(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the names most like a word, best first; none if none is like it.

    Names are compared by their parts in any order (`8bit_adamw`, `adamw_8bit`), by their initials (`lr`,
    `learning_rate`), by whether they contain all parts of the word (`epochs`, `num_train_epochs`), and by spelling.

    Args:
        word: as written, such as "adam" or "training.lr".
        known: names, dotted or not; what follows the last dot is compared.
        most: how many at most by likeness; those clearly worse than the best are left out.
    """
    section = word.rpartition(".")[0]
    names = list(known)
    if (usual := OTHER_NAMES.get(_last(word))) and set(usual) <= set(names):
        return usual
    scores = {
        name: _likeness(_last(word), _last(name)) - (0.0 if name.rpartition(".")[0] == section else OTHER_SECTION)
        for name in names
    }
    best = max(scores.values(), default=0.0)
    near = [name for name, score in scores.items() if score >= max(0.5, best - 0.1)]
    return sorted(near, key=lambda name: -scores[name])[:most]


def did_you_mean(word: str, known: Iterable[str], most: int = 1) -> str:
    """Return " Did you mean X?", or nothing if no name is like the word."""
    near = closest(word, known, most)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1].lower()


def _likeness(word: str, name: str) -> float:
    """Return 0 to 1."""
    parts, known = re.findall(r"[a-z]+|\d+", word), re.findall(r"[a-z]+|\d+", name)
    if word == name or (parts and sorted(parts) == sorted(known)):
        return 1.0
    if len(word) > 1 and word == "".join(part[0] for part in known):
        return 0.95
    by_spelling = max(
        difflib.SequenceMatcher(None, word, name).ratio(),
        difflib.SequenceMatcher(None, " ".join(sorted(parts)), " ".join(sorted(known))).ratio(),
    )
    contained = bool(parts) and set(parts) <= set(known)
    return max(by_spelling, 0.65 + 0.3 * len(parts) / len(known)) if contained else by_spelling
