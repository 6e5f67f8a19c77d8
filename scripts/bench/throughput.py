"""Audio hours an hour of training on clips of 1 to 20 s, against NeMo's own training and transformers' Trainer.

    python scripts/bench/throughput.py [--sides ours nemo transformers] [--json FILE]      on a GPU, in bf16
    python scripts/bench/throughput.py --rehearsal                                         small, on the CPU

Each side trains the layout of parakeet-tdt-0.6b-v3 with random weights on the same clips of noise, with AdamW, in a
process of its own (a rehearsal has one for all) with worker processes that read the audio, in batches by length:
  ours          finetune/train.py: batches of --batch-seconds, the loss with occupancy_threshold 1e-4
  nemo          the step of NeMo's speech_to_text_finetune.py: Lightning's Trainer, bf16-mixed, Lhotse's buckets of
                --batch-seconds, joint and loss fused for --fused-batch-size clips at once
  transformers  Trainer and ParakeetForTDT, bf16, fused AdamW, batches of --transformers-seconds, since its joint's
                outputs are all in memory
Counted is what goes by between the end of a warm-up and the end of the last step, waiting for data included. A side
that runs out of memory gets batches of half the seconds, twice at most; one that fails is recorded as failed, and FILE
is written anew after each side.

Model FLOPs are three times those of a forward pass over each clip without its padding, from counted matrix products
and convolutions of the encoder at three lengths and 2 T (U + 1) H O of the joint; recomputation adds nothing. Their
share of the peak is of the card's published rate, and beside it of the rate of a large product measured in the same
process. The rehearsal's NeMo trains an RNN-T: its TDT loss has no kernel for a CPU.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from compare_strategies import machine
from real_size import LAYOUT, RATE, make_data, make_tokenizer

SMALL_LAYOUT = LAYOUT.with_name("fastconformer_tdt_3m.yaml")
FRAMES_A_SECOND = 12.5


class Meter:
    """What is trained on behind a warm-up of `skipped` steps."""

    def __init__(self, skipped: int):
        self.skipped, self.steps, self.began, self.seconds = skipped, 0, 0.0, 0.0
        self.samples: list[torch.Tensor] = []
        self.tokens: list[torch.Tensor] = []

    def step(self, samples_B: torch.Tensor, tokens_B: torch.Tensor, last: bool) -> None:
        """Count a step that is done; the tensors are read at the end."""
        if self.steps >= self.skipped:
            self.samples.append(samples_B)
            self.tokens.append(tokens_B)
        self.steps += 1
        if last or self.steps == self.skipped:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds = time.perf_counter() - self.began
            self.began = time.perf_counter()

    def result(self) -> dict[str, Any]:
        seconds = torch.cat([x.cpu() for x in self.samples]).double() / RATE
        found = {"clips": len(seconds), "audio_seconds": float(seconds.sum()), "seconds": self.seconds}
        found["audio_hours_an_hour"] = found["audio_seconds"] / self.seconds
        if torch.cuda.is_available():
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        return found


def model_flops(model: Any, seconds_B: Sequence[float], tokens_B: Sequence[float]) -> dict[str, float]:
    """FLOPs of forward and backward over clips, without padding and recomputation; by part."""
    from torch.utils.flop_counter import FlopCounterMode

    device, counted, lengths = next(model.parameters()).device, [], (2.0, 8.0, 20.0)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    for seconds in lengths:
        mel_BFT = torch.zeros(1, model.cfg.preprocessor.features, int(100 * seconds), device=device)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.encoder(audio_signal=mel_BFT, length=torch.tensor([mel_BFT.size(2)], device=device))
        counted.append(counter.get_total_flops())
    for module, training in modes.items():
        module.training = training
    encoder = np.polyval(np.polyfit(lengths, counted, 2), np.asarray(seconds_B)).sum()
    head = model.joint.joint_net[-1]
    cells = (np.asarray(seconds_B) * FRAMES_A_SECOND * (np.asarray(tokens_B) + 1)).sum()
    return {"encoder": 3.0 * float(encoder), "joint": 6.0 * float(cells) * head.in_features * head.out_features}


def product_rate(device: str) -> float:
    """FLOP/s of a large bf16 matrix product here (float32 on a CPU)."""
    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype).unbind(0)
    for timed in (3, 10):
        started = time.perf_counter()
        for _ in range(timed):
            a @ b
        if device == "cuda":
            torch.cuda.synchronize()
    return 10 * 2 * n**3 / (time.perf_counter() - started)


# ---- the sides -----------------------------------------------------------------------------------------------------


def ours(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Train with finetune/train.py in this process."""
    from finetune import train
    from finetune.tools.planning.gpus import card_here
    from finetune.training.callbacks import Callback, StepResult
    from finetune.training.trainer import Trainer

    meter, models = Meter(arguments.skipped), []

    class Watch(Callback):
        def __init__(self, trainer: Trainer):
            trainer.saves_checkpoints = trainer.evaluator.keeps_models = False
            models.append(trainer.model)
            trainer.add_callback(self)

        def on_step_end(self, result: StepResult) -> None:
            batches = result.batches.batches
            samples_B = torch.cat([b.audio_lengths_B for b in batches])
            meter.step(samples_B, torch.cat([b.token_lengths_B for b in batches]), result.step == arguments.steps)

    run = {
        "model": {
            "name": str(arguments.layout), "tokenizer": str(arguments.folder / "tokenizer"),
            "occupancy_threshold": 1e-4,
        },
        "data": {
            "train": str(arguments.folder / "data" / "manifest.jsonl"), "max_duration": arguments.longest + 1,
            "batch_duration": arguments.batch_seconds,
        },
        "training": {
            "output_dir": str(arguments.folder / "run"), "overwrite_output_dir": True, "max_steps": arguments.steps,
            "learning_rate": 1e-5, "bf16": device == "cuda", "eval_steps": 0, "eval_on_start": False, "save_steps": 0,
            "dataloader_num_workers": arguments.workers, "report_to": "none",
            "cuda_alloc_conf": "expandable_segments:True",
        },
    }  # fmt: skip
    file = arguments.folder / "RUN.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    if train.main(["--config", str(file), "--strategy", "adamw"], observe=Watch):
        raise RuntimeError("the training failed")
    found, card = meter.result(), card_here()
    seconds, tokens = torch.cat(meter.samples).double() / RATE, torch.cat(meter.tokens)
    flops = model_flops(models[0], seconds.tolist(), tokens.tolist())
    rates = {"published": card.flops_16, "measured": product_rate(device)}
    achieved = sum(flops.values()) / found["seconds"]
    found |= {"model_flops": flops, "peak_flops": rates, "flops_a_second": achieved}
    return found | {f"share_of_{name}_peak": achieved / rate for name, rate in rates.items() if rate}


def transformers(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Train with transformers' Trainer, with batches of like length made beforehand."""
    import sentencepiece
    import soundfile
    from transformers import (
        ParakeetFeatureExtractor,
        ParakeetForTDT,
        ParakeetTDTConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from finetune.models.huggingface.layout import KINDS, feature_settings, model_settings

    layout = yaml.safe_load(arguments.layout.read_text(encoding="utf-8"))["model"]
    folder, blank, pad = arguments.folder / "data", arguments.vocabulary, 0
    layout["loss"] = {"tdt_kwargs": {"durations": layout["model_defaults"]["tdt_durations"]}}
    layout["decoder"]["prednet"]["pred_hidden"] = layout["model_defaults"]["pred_hidden"]
    model = ParakeetForTDT(ParakeetTDTConfig(**model_settings(layout, KINDS["parakeet_tdt"], blank, pad)))
    features = ParakeetFeatureExtractor(**feature_settings(layout))
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(arguments.folder / "tokenizer" / "tokenizer.model"))
    rows = [json.loads(line) for line in (folder / "manifest.jsonl").read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["duration"])
    batches: list[list[dict[str, Any]]] = [[]]
    for row in rows:
        if batches[-1] and (len(batches[-1]) + 1) * row["duration"] > arguments.transformers_seconds:
            batches.append([])
        batches[-1].append({**row, "ids": pieces.encode(row["text"])})
    batches = [batches[i] for i in np.random.default_rng(0).permutation(len(batches))]

    def collate(found: list[list[dict[str, Any]]]) -> dict[str, torch.Tensor]:
        (batch,) = found
        audio = [soundfile.read(folder / row["audio_filepath"], dtype="float32")[0] for row in batch]
        inputs = features(audio, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
        ids = [torch.tensor(row["ids"]) for row in batch]
        labels = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=pad)
        start = torch.full((len(batch), 1), blank)
        return {**inputs, "labels": labels, "decoder_input_ids": torch.cat([start, labels], 1)}

    meter = Meter(arguments.skipped)

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            batch = batches[(state.global_step - 1) % len(batches)]
            samples_B = torch.tensor([int(row["duration"] * RATE) for row in batch])
            tokens_B = torch.tensor([len(row["ids"]) for row in batch])
            meter.step(samples_B, tokens_B, state.global_step == arguments.steps)

    settings = TrainingArguments(
        output_dir=str(arguments.folder / "transformers"), max_steps=arguments.steps, bf16=device == "cuda",
        per_device_train_batch_size=1, train_sampling_strategy="sequential", learning_rate=1e-5,
        optim="adamw_torch_fused", dataloader_num_workers=arguments.workers, use_cpu=device == "cpu",
        report_to="none", save_strategy="no", logging_strategy="no", remove_unused_columns=False, disable_tqdm=True,
    )  # fmt: skip
    dataset: Any = batches
    Trainer(model, settings, data_collator=collate, train_dataset=dataset, callbacks=[Watch()]).train()
    return meter.result()


def nemo(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Train as NeMo's own script does."""
    from omegaconf import OmegaConf, open_dict

    from finetune.models.nemo import import_nemo

    models = import_nemo()
    import lightning.pytorch as pl

    meter = Meter(arguments.skipped)

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            meter.step(batch[1], batch[3], trainer.global_step == arguments.steps)

    cfg = OmegaConf.load(arguments.layout).model
    with open_dict(cfg):
        cfg.tokenizer.dir = str(arguments.folder / "tokenizer")
        cfg.joint.fuse_loss_wer, cfg.joint.fused_batch_size = True, arguments.fused_batch_size
        if device == "cpu":
            cfg.joint.num_extra_outputs, cfg.loss = 0, {"loss_name": "warprnnt_numba"}
            cfg.decoding = {"strategy": "greedy_batch", "model_type": "rnnt", "greedy": {"max_symbols": 10}}
        cfg.train_ds = {
            "use_lhotse": True, "manifest_filepath": str(arguments.folder / "data" / "manifest.jsonl"),
            "sample_rate": RATE, "batch_duration": arguments.batch_seconds, "use_bucketing": True, "num_buckets": 10,
            "batch_size": None, "max_duration": arguments.longest + 1, "shuffle": True, "pin_memory": True,
            "num_workers": arguments.workers,
        }  # fmt: skip
        cfg.optim = {"name": "adamw", "lr": 1e-5, "betas": [0.9, 0.98], "weight_decay": 1e-3, "fused": True}
    trainer = pl.Trainer(
        max_steps=arguments.steps, accelerator="gpu" if device == "cuda" else "cpu", devices=1, logger=False,
        precision="bf16-mixed" if device == "cuda" else 32, callbacks=[Watch()], enable_checkpointing=False,
        enable_progress_bar=False, use_distributed_sampler=False, limit_val_batches=0, num_sanity_val_steps=0,
        log_every_n_steps=10**6,
    )  # fmt: skip
    trainer.fit(models.EncDecRNNTBPEModel(cfg=cfg, trainer=trainer))
    return meter.result()


TRAININGS = {"ours": ours, "transformers": transformers, "nemo": nemo}


def side_alone(name: str, arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return what a side measured in a process of its own (a rehearsal has one for all), or why it failed."""
    if arguments.rehearsal:
        try:
            return TRAININGS[name](arguments, device)
        except Exception as error:  # of whatever library the side belongs to
            return {"failed": f"{type(error).__name__}: {error}"}
    left = arguments.folder / f"{name}.json"
    for share in (1, 2, 4):
        left.unlink(missing_ok=True)
        sizes = {key: vars(arguments)[key] / share for key in ("batch_seconds", "transformers_seconds")}
        settings = [f"--{key.replace('_', '-')}={seconds}" for key, seconds in sizes.items()]
        command = [sys.executable, *sys.argv, *settings, "--side", name]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if not done.returncode and left.is_file():
            seconds = sizes["transformers_seconds" if name == "transformers" else "batch_seconds"]
            return {"batch_seconds": seconds, **json.loads(left.read_text(encoding="utf-8"))}
        print(done.stderr[-3000:], file=sys.stderr)
        if "out of memory" not in done.stderr.lower().replace("_", " "):
            break
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return {"failed": f"exit code {done.returncode}: {last}"}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--layout", type=Path, default=LAYOUT, help="NeMo model YAML")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--clips", type=int, default=600, help="of 1 to 20 s; each comes ten times")
    parser.add_argument("--batch-seconds", type=float, default=1200.0)
    parser.add_argument("--transformers-seconds", type=float, default=320.0)
    parser.add_argument("--fused-batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--skipped", type=int, default=10, help="of them, as a warm-up")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rehearsal", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/throughput"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=TRAININGS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.longest, times, device = 20.0, 10, "cuda"
    if arguments.rehearsal:
        small = {
            "layout": SMALL_LAYOUT,
            "vocabulary": 200,
            "clips": 12,
            "batch_seconds": 8.0,
            "steps": 3,
            "skipped": 1,
        }
        vars(arguments).update({**small, "transformers_seconds": 4.0, "fused_batch_size": 2, "workers": 1})
        arguments.longest, times, device = 2.0, 2, "cpu"
    if arguments.side:
        measured = TRAININGS[arguments.side](arguments, device)
        (arguments.folder / f"{arguments.side}.json").write_text(json.dumps(measured), encoding="utf-8")
        return 0
    words = make_tokenizer(arguments.folder / "tokenizer", arguments.vocabulary)
    lengths = np.random.default_rng(0).uniform(1.0, arguments.longest, arguments.clips).round(2)
    make_data(arguments.folder / "data", words, lengths.tolist(), times)
    found: dict[str, Any] = {"machine": machine(), "command": "python " + " ".join(sys.argv), "sides": {}}
    for name in arguments.sides:
        found["sides"][name] = side_alone(name, arguments, device)
        side = found["sides"][name]
        print(f"{name}: {side.get('failed') or format(side['audio_hours_an_hour'], '.0f') + ' audio hours an hour'}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any("failed" in side for side in found["sides"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
