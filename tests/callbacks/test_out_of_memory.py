"""Running out of memory ends in one message with settings that would help."""

import os

import pytest
import torch

from finetune.callbacks.out_of_memory import is_out_of_memory, remedies
from finetune.config.allocator import allocator_settings
from finetune.config.load import load_config
from finetune.training import run


def test_errors_that_mean_it():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())
    for words in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ):
        assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_remedies_are_those_not_taken_yet(run_file):
    config, _ = load_config(run_file(), [], [])
    found = "\n".join(remedies(config, gpu=True))
    for words in (
        "training.cuda_alloc_conf=expandable_segments:True",
        "training.per_device_eval_batch_size=2",
        "training.bf16=true",
        "--strategy adamw_8bit",
        "--strategy gradient_checkpointing",
        "training.per_device_train_batch_size=4 with training.gradient_accumulation_steps=2",
        "data.max_duration=20",
        "training.empty_cache_each_epoch=true",
    ):
        assert words in found
    config, _ = load_config(run_file(), ["recommended_small"], ["training.empty_cache_each_epoch=true"])
    found = "\n".join(remedies(config, gpu=True))
    for words in (
        "cuda_alloc_conf",
        "bf16=true",
        "adamw_8bit",
        "gradient_checkpointing",
        "max_duration",
        "empty_cache",
    ):
        assert words not in found
    assert "training.per_device_train_batch_size=8 with training.gradient_accumulation_steps=16" in found


def test_each_remedy_is_a_setting_that_exists(run_file):
    config, _ = load_config(run_file(), [], [])
    for gpu, engine in ((True, "none"), (True, "ddp"), (False, "none")):
        found = remedies(config, gpu, engine)
        assert len(found) >= 4
        for remedy in found:
            command = remedy.split(" (")[0]
            names = command.removeprefix("--strategy ").split(" or ") if command.startswith("--strategy") else []
            settings = [] if names else command.split(" with ")
            load_config(run_file(), names, settings)


@pytest.mark.parametrize(
    ("strategies", "engine", "never"),
    [
        (["zero2_offload"], "deepspeed_offload", ("adamw_8bit", "bf16_full", "cpu_offload_ao")),
        (["bf16_stochastic_rounding"], "none", ("adamw_8bit (", "bf16_full")),
        (["freeze_encoder"], "none", ("gradient_checkpointing", "lora")),
        (["cpu_offload_ao"], "none", ("cpu_offload_ao", "adamw_8bit")),
        (["cpu_offload_gradients_ao"], "none", ("gradient_accumulation_steps",)),
        (["fsdp2"], "fsdp", ("adamw_8bit (", "cpu_offload_ao", "bf16_full", "activation_offload")),
    ],
)
def test_no_remedy_that_would_be_refused(run_file, strategies, engine, never):
    config, _ = load_config(run_file(), strategies, ["training.gradient_accumulation_steps=1"])
    found = "\n".join(remedies(config, gpu=True, engine=engine))
    assert found
    assert not [words for words in never if words in found]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError()]
)
def test_the_run_ends_with_one_message(failed, tiny_run, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr("finetune.training.trainer.Trainer._optimizer_step", full)
    message = failed(1, *tiny_run(data={"validation": None, "test": None}))
    assert "is out of memory" in message
    assert "What would help, cheapest first" in message
    assert "--strategy gradient_checkpointing" in message


def test_the_allocators_settings(monkeypatch, messages):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    run.set_allocator(None)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    run.set_allocator("expandable_segments:True")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    run.set_allocator("expandable_segments:False")
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "the environment's allocator settings 'expandable_segments:True' count" in messages[-1]


def test_batches_that_fill_the_card_get_segments_that_grow(run_file, monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)

    def settings(gpu: bool, *overrides: str) -> str | None:
        return allocator_settings(load_config(run_file(), [], list(overrides))[0].training, gpu)

    auto = "training.auto_batch=true"
    assert settings(True, auto) == "expandable_segments:True"
    assert settings(False, auto) is settings(True) is None
    assert settings(True, auto, "training.cuda_alloc_conf=max_split_size_mb:64") == "max_split_size_mb:64"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")
    assert settings(True, auto) is None, "the user's environment counts"
