"""Torch files and checkpoints from elsewhere: what their pickles would call is listed first, without running them.

Weights are safetensors, or torch files read with `weights_only`. DeepSpeed and torch's distributed checkpoints read
their own files with the full unpickler, which runs what stands in them; so these are checked first.
"""

import io
import os
import pickle
import re
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch

from finetune.errors import UserError
from finetune.security.documents import first_line
from finetune.security.safe_text import one_line

LARGEST_PICKLE = 2**28
"""Bytes of the pickled part of a torch file; its tensors lie beside it."""
RECORDS = re.compile(
    r"data\.pkl|data/[^/]+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
"""What torch.save writes. With other records, such as constants.pkl, torch.load runs the file as TorchScript."""

ALLOWED = frozenset(
    {
        "builtins.int",
        "builtins.float",
        "pathlib.PosixPath",
        "torch.UntypedStorage",
        # random states and plain values of numpy
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        "numpy._core.numeric._frombuffer",
        # states of optimizers that are tensor subclasses, and sharded tensors
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor.placement_types.Shard",
        "torch.distributed.tensor.placement_types.Replicate",
        "torch.distributed.device_mesh.DeviceMesh",
        # what DeepSpeed writes beside tensors
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""What a checkpoint may call besides torch's own safe globals (tensors, storages, dtypes, plain values)."""

METADATA = frozenset(
    {
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "torch.Size",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
        "torch.distributed.checkpoint.metadata.TensorProperties",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.distributed.checkpoint.metadata.MetadataIndex",
        "torch.distributed.checkpoint.metadata.StorageMeta",
    }
)
"""What the table of contents of a distributed checkpoint consists of, with dtypes and plain values."""

TORCH_FILES = (".pt", ".bin", ".pkl", ".pth", ".ckpt")


class Hostile(ValueError):
    """A file that was made to do something else than to hold weights; the text says what."""


def check_torch_archive(file: IO[bytes], size: int, allowed: frozenset[str]) -> None:
    """Refuse a torch file whose pickle would call something unknown, without running it.

    Args:
        file: opened, which can seek.
        size: its bytes.
        allowed: what it may call besides torch's safe globals.

    Raises:
        Hostile: it calls something else, is a program, or was made to fill the memory.
        ValueError: it is in torch's old form, or damaged.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise Hostile(f"{one_line(packed[0])!r} in it is compressed, which torch does not do")
            if sum(part.file_size for part in parts) > size:
                raise Hostile("its parts say that they have more bytes than the file")
            pickled = [part for part in parts if part.filename.rsplit("/", 1)[-1] == "data.pkl"]
            if len(pickled) != 1 or pickled[0].file_size > LARGEST_PICKLE:
                raise ValueError("it has no single data.pkl, or a too large one")
        file.seek(0)
        records = torch._C.PyTorchFileReader(file).get_all_records()
        other = [record for record in records if not RECORDS.fullmatch(record)]
        if other:
            raise Hostile(f"{one_line(other[0])[:200]!r} in it is nothing that torch.save writes")
        if len(records) != len(parts):
            raise Hostile("it reads otherwise to torch than to zipfile: it was made to deceive one of them")
        file.seek(0)
        unknown = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - allowed)
    except zipfile.BadZipFile as error:
        raise ValueError(
            "it is no torch file of the present form (torch 1.6 and later); load it with torch where it comes from, "
            "and save it again"
        ) from error
    except (RuntimeError, EOFError, OSError, UnicodeDecodeError, UnpicklingError, struct.error, IndexError) as error:
        raise ValueError(f"it cannot be read: {first_line(error)}") from error
    if unknown:
        raise Hostile(f"it would run {', '.join(one_line(name)[:100] for name in unknown[:3])}, which no weights need")


def check_torch_file(path: Path, what: str) -> None:
    """Raise UserError for a file that `torch.load` would run code from: one that calls what is not in `ALLOWED`.

    Args:
        what: names it at the beginning of a message.
    """
    with path.open("rb") as file:
        try:
            check_torch_archive(file, path.stat().st_size, ALLOWED)
        except Hostile as error:
            raise UserError(f"{what}: {path} is refused: {error}. Nothing of it was run.") from error
        except ValueError as error:
            raise UserError(f"{what}: {path} is damaged, or no torch file: {error}.") from error


def load_tensors(file: Path | IO[bytes], what: str, size: int | None = None) -> Any:
    """Load the content of a torch file of tensors and plain values, on the host.

    Args:
        file: a path, or an opened file that can seek.
        what: names it in messages.
        size: bytes of an opened file.

    Raises:
        UserError: it holds something else.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return load_tensors(opened, what, file.stat().st_size)
    try:
        start = file.tell()
        check_torch_archive(file, size if size is not None else file.seek(0, io.SEEK_END), frozenset())
        file.seek(start)
        # Explicit: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment changes the default.
        return torch.load(file, map_location="cpu", weights_only=True)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Hostile as error:
        reason = first_line(error)[:300]
        raise UserError(
            f"{what} is refused: {reason}. Only tensors and plain values are read, and nothing was run."
        ) from error
    except Exception as error:  # torch raises anything on broken bytes
        reason = first_line(error)[:300]
        raise UserError(
            f"{what} cannot be read: {reason}. It is damaged, or it is none: copy or download it again."
        ) from error


def check_checkpoint(folder: Path) -> None:
    """Check every pickle of a checkpoint before Accelerate, DeepSpeed or torch's distributed checkpoints read it.

    Args:
        folder: it may be a link itself, and holds none.

    Raises:
        UserError: names the file, and what it would have run.
    """
    for here, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = Path(here, name)
            # The readers of a checkpoint follow links, also out of the folder; none is written into one.
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                kind = "a symbolic link" if path.is_symlink() else "neither a file nor a directory"
                raise UserError(
                    f"training.resume_from_checkpoint: {path} is refused: it is {kind}, which no checkpoint holds. If "
                    "it is yours, replace it by what it leads to."
                )
            if name == ".metadata" and path.is_file():
                _check_distributed(path)
            elif path.suffix in TORCH_FILES and path.is_file():
                check_torch_file(path, "training.resume_from_checkpoint")


class _MetadataUnpickler(pickle._Unpickler):
    """Finds what a table of contents consists of, and nothing else.

    Python's own unpickler: the one in C allocates as much memory as an index in the file says. So does BYTEARRAY8.
    """

    dispatch = {op: load for op, load in pickle._Unpickler.dispatch.items() if op != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in METADATA or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise Hostile(f"it would run {one_line(full_name)[:100]}")


def _check_distributed(metadata: Path) -> None:
    """Check the table of contents of a distributed checkpoint, and what of it is no tensor."""
    try:
        table = _MetadataUnpickler(io.BytesIO(metadata.read_bytes())).load()
        for index, place in (table.storage_data or {}).items():
            if type(table.state_dict_metadata[index.fqn]).__name__ != "BytesStorageMetadata":
                continue  # a tensor, which torch reads with weights_only
            name = Path(place.relative_path).name
            if name != place.relative_path:
                raise Hostile(f"it names a file outside of its folder: {one_line(place.relative_path)}")
            with (metadata.parent / name).open("rb") as file:
                file.seek(place.offset)
                part = file.read(place.length)
            check_torch_archive(io.BytesIO(part), len(part), ALLOWED)
    except Exception as error:  # pickle raises anything on broken bytes
        raise UserError(
            f"training.resume_from_checkpoint: {metadata} is refused: {first_line(error)}. Nothing of it was run."
        ) from error
