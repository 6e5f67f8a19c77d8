"""Checkpoints from elsewhere: pickles, programs and links that were made to do harm are refused before anything of
them is read."""

import contextlib
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from hostile_files import Touch, evil_torch_file, torch_file

from finetune.errors import UserError
from finetune.security.pickles import check_checkpoint, check_torch_file, load_tensors
from finetune.training.checkpoints import load_checkpoint


def test_pickles_that_hide_what_they_call(tmp_path):
    mark = tmp_path / "mark"
    # The name is put together on the stack, and pushed below two harmless ones that are taken off again.
    below = b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x8c\x0bcollections\x8c\x0bOrderedDict00\x93."
    extension = b"\x80\x02\x82\x01."
    for content in (below, extension, pickle.dumps(Touch(mark), 4), pickle.dumps(Touch(mark), 0)):
        (tmp_path / "optimizer.bin").write_bytes(torch_file(content))
        for check in (check_checkpoint, lambda folder: load_tensors(folder / "optimizer.bin", "weights")):
            with pytest.raises(UserError, match=r"cannot be read|would run posix\.mkdir"):
                check(tmp_path)
        (tmp_path / "optimizer.bin").unlink()
        (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(UserError, match=r"\.metadata is refused"):
            check_checkpoint(tmp_path)
        (tmp_path / ".metadata").unlink()
    for content, said in (
        (torch_file(pickle.dumps({}, 2), zipfile.ZIP_DEFLATED), "compressed"),
        (pickle.dumps(Touch(mark), 2), "no torch file of the present form"),
        (torch_file(pickle.dumps(Touch(mark), 2)), r"would run posix\.mkdir"),
    ):
        (tmp_path / "w.pt").write_bytes(content)
        with pytest.raises(UserError, match=said):
            load_tensors(tmp_path / "w.pt", "weights")
    assert not mark.exists()


class Loads:
    """An accelerator that would read a checkpoint."""

    def load_state(self, path: str) -> None:
        raise AssertionError("the checkpoint was read")


@pytest.mark.parametrize(
    "file",
    [
        "optimizer.bin",
        "random_states_0.pkl",
        "scaler.pt",
        "pytorch_model/mp_rank_00_model_states.pt",
        "pytorch_model/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_a_pickle_of_a_checkpoint_is_looked_at_before_it_is_read(file, tmp_path):
    """DeepSpeed reads its own with the full unpickler, which would run it."""
    mark, path = tmp_path / "mark", tmp_path / "step" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(evil_torch_file(mark))
    with pytest.raises(UserError, match=rf"{path.name} is refused: it would run posix\.mkdir"):
        load_checkpoint(Loads(), tmp_path / "step")
    if "model_states" in file:
        torch.load(path, weights_only=False)  # the file does what it says
        assert mark.is_dir()
    else:
        assert not mark.exists()


def test_a_distributed_checkpoint_is_looked_at(tmp_path):
    import torch.distributed.checkpoint as dcp

    folder, mark = tmp_path / "pytorch_model_fsdp_0", tmp_path / "mark"
    dcp.save({"a": torch.ones(3), "rate": 0.5, "betas": (0.9, 0.98)}, checkpoint_id=folder, no_dist=True)
    check_checkpoint(tmp_path)
    dcp.save({"a": torch.ones(3), "evil": Touch(mark)}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(UserError, match=r"\.metadata is refused: it would run posix\.mkdir"):
        check_checkpoint(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Touch(mark)))
    with pytest.raises(UserError, match=r"\.metadata is refused: it would run posix\.mkdir"):
        check_checkpoint(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("where", ["pytorch_model", "pytorch_model/mp_rank_00_model_states.pt", "deep/er"])
def test_a_link_in_a_checkpoint_is_refused(where, tmp_path):
    """Whoever reads a checkpoint follows links; what looks it through does not. The checkpoint itself may be one."""
    mark, step = tmp_path / "mark", tmp_path / "step"
    states = tmp_path / "elsewhere" / "mp_rank_00_model_states.pt"
    for path in (states, step / "pytorch_model" / states.name):
        path.parent.mkdir(parents=True)
        torch.save({"a": torch.ones(2)}, path)
    (tmp_path / "linked").symlink_to(step)
    check_checkpoint(tmp_path / "linked")
    states.write_bytes(evil_torch_file(mark))
    link = step / where
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(states if link.suffix else states.parent)
    for checkpoint in (step, tmp_path / "linked"):
        with pytest.raises(UserError, match=rf"{link.name} is refused: it is a symbolic link"):
            load_checkpoint(Loads(), checkpoint)
    assert not mark.exists()


def test_a_pipe_in_a_checkpoint_is_refused(tmp_path):
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / "optimizer.bin")
    with pytest.raises(UserError, match=r"optimizer\.bin is refused: it is neither a file nor a directory"):
        check_checkpoint(tmp_path)


class Program(torch.nn.Module):
    """What TorchScript saves with a program that runs where it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.a = 1

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return self.a, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.a = state[0]
        self.training = state[1]
        print("the program ran")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name.split("/", 1)[1]: archive.read(name) for name in archive.namelist()}


def test_a_program_beside_a_harmless_pickle_is_refused(tmp_path, capfd):
    """torch.load takes a file with constants.pkl in it for TorchScript, whatever its data.pkl holds."""
    script, plain, evil = tmp_path / "script.pt", tmp_path / "plain.pt", tmp_path / "step" / "optimizer.bin"
    torch.jit.save(torch.jit.script(Program()), str(script))
    torch.save({"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.bfloat16)}, plain)
    check_torch_file(plain, "x")
    program = records_of(script)
    records = {
        **program,
        "data.pkl": records_of(plain)["data.pkl"],
        "constants.pkl": program["data.pkl"][:-1] + b"\x85.",
    }
    evil.parent.mkdir()
    writer = torch._C.PyTorchFileWriter(str(evil))
    for name, content in records.items():
        if name not in ("version", "byteorder", ".data/serialization_id"):
            writer.write_record(name, content, len(content))
    writer.write_end_of_file()
    with pytest.raises(UserError, match=r"optimizer\.bin is refused: '.*' in it is nothing that torch\.save writes"):
        load_checkpoint(Loads(), evil.parent)
    with pytest.raises(UserError, match=r"is nothing that torch\.save writes"):
        load_tensors(evil, "weights")
    assert "the program ran" not in capfd.readouterr().out
    with contextlib.suppress(RuntimeError):
        torch.load(evil, weights_only=False)
    assert "the program ran" in capfd.readouterr().out  # the file does what it says
    for other in ("constants.pkl", "CONSTANTS.PKL", "Data.pkl", "code/x.py"):
        evil.write_bytes(torch_file(pickle.dumps({}, 2), extra={other: b"x"}))
        with pytest.raises(UserError, match=r"optimizer\.bin is (refused|damaged)"):
            check_checkpoint(evil.parent)
