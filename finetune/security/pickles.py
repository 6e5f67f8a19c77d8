"""Pickles: what their reader would call is listed without reading them, and they are refused where that is not known to be harmless.

Weights come as safetensors, or as torch files that only the restricted unpickler reads. DeepSpeed and torch's distributed checkpoints
read their own files with the full one, which runs what stands in them: these are looked through first.
"""

import io
import os
import pickletools
import re
import zipfile
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch

from finetune.errors import UserError
from finetune.security.documents import first_line
from finetune.security.safe_text import one_line


class Hostile(ValueError):
    """A file that was made to do something else than to hold weights; the text says what."""


LARGEST_PICKLE = 2**28
"""Bytes of the pickled part of a torch file; its tensors lie beside it."""
RECORDS = re.compile(
    r"data\.pkl|data/[^/]+|version|byteorder|\.format_version|\.storage_alignment|\.data/serialization_id"
)
"""What torch.save writes. With others, such as constants.pkl, torch.load takes a file for a program (TorchScript) and runs it."""

TENSORS = frozenset(
    {
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.storage.UntypedStorage",
        "_codecs.encode",
        *(
            f"{module}.{name}"
            for module in ("builtins", "__builtin__")
            for name in ("set", "bytearray", "int", "float", "complex")
        ),
        "numpy.dtype",
        "numpy.ndarray",
        "numpy._core.multiarray._reconstruct",
        "numpy.core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        *(
            f"torch.{name}Storage"
            for name in [
                "Float",
                "Double",
                "Half",
                "BFloat16",
                "Long",
                "Int",
                "Short",
                "Char",
                "Byte",
                "Bool",
                "Untyped",
                "ComplexFloat",
                "ComplexDouble",
            ]
        ),
        *(
            f"torch.{name}"
            for name in [
                "float16",
                "float32",
                "float64",
                "bfloat16",
                "int8",
                "int16",
                "int32",
                "int64",
                "uint8",
                "uint16",
                "uint32",
                "uint64",
                "bool",
                "complex64",
                "complex128",
                "float8_e4m3fn",
                "float8_e5m2",
                "float8_e4m3fnuz",
                "float8_e5m2fnuz",
                "strided",
            ]
        ),
    }
)
"""What the pickled part of tensors, arrays and plain values calls."""

OPTIMIZERS = frozenset(
    {
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torch.distributed.tensor.DTensor",
        "torch.distributed.tensor._dtensor_spec.DTensorSpec",
        "torch.distributed.tensor._dtensor_spec.TensorMeta",
        "torch.distributed.tensor.placement_types.Shard",
        "torch.distributed.tensor.placement_types.Replicate",
        "torch.distributed.device_mesh.DeviceMesh",
    }
)
"""States of optimizers that are tensors of a kind of their own."""

DEEPSPEED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
"""What DeepSpeed writes beside tensors."""

DISTRIBUTED = frozenset(
    {
        f"torch.distributed.checkpoint.{name}"
        for name in [
            "metadata.Metadata",
            "metadata.TensorStorageMetadata",
            "metadata.BytesStorageMetadata",
            "metadata.ChunkStorageMetadata",
            "metadata.TensorProperties",
            "metadata._MEM_FORMAT_ENCODING",
            "metadata.MetadataIndex",
            "metadata.StorageMeta",
            "filesystem._StorageInfo",
        ]
    }
)
"""What the table of contents of a distributed checkpoint consists of."""

ALLOWED = TENSORS | OPTIMIZERS | DEEPSPEED | DISTRIBUTED | {"pathlib.PosixPath"}


def calls_of(content: bytes) -> set[str]:
    """The names of what a pickle would call, module first, without reading it.

    Raises:
        ValueError: it is none, or hides what it calls.
    """
    found, memo, pushed = set(), {}, []
    try:
        for op, argument, _ in pickletools.genops(content):
            name = op.name
            if name in ("GLOBAL", "INST"):
                found.add(str(argument).replace(" ", ".", 1))
                pushed.append(None)
            elif name == "STACK_GLOBAL":
                module, attribute = pushed[-2:] if len(pushed) > 1 else (None, None)
                if not isinstance(module, str) or not isinstance(attribute, str):
                    raise Hostile("it hides what it would call")
                found.add(f"{module}.{attribute}")
                pushed.append(None)
            elif name == "MEMOIZE":
                memo[len(memo)] = pushed[-1] if pushed else None
            elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
                memo[argument] = pushed[-1] if pushed else None
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                pushed.append(memo.get(argument))
            elif name in ("EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"):
                raise Hostile(f"it hides what it would call ({name})")
            elif name not in ("PROTO", "FRAME", "STOP"):
                # Only the two texts right before it name what STACK_GLOBAL calls; what stands deeper does not matter.
                pushed.append(argument if "UNICODE" in name else None)
            del pushed[:-8]
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"it is no pickle: {type(error).__name__}: {first_line(error)}") from error
    return found


def _registered() -> set[str]:
    """What libraries such as torchao have told torch's restricted unpickler of."""
    found = set()
    for entry in torch.serialization.get_safe_globals():
        thing, name = entry if isinstance(entry, tuple) else (entry, "")
        found.add(name or f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', '')}")
    return found


def check_pickle(content: bytes, allowed: frozenset[str] = ALLOWED) -> None:
    """Raises ValueError where a pickle calls what is not known to be harmless; the text names it."""
    unknown = sorted(calls_of(content) - allowed - _registered())
    if unknown:
        raise Hostile(f"it would run {', '.join(one_line(name)[:100] for name in unknown[:3])}, which no weights need")


def pickled_part(file: Any, size: int) -> bytes:
    """The pickled part of a torch file, which says what is in it.

    Args:
        file: opened, which can seek.
        size: its bytes.

    Raises:
        ValueError: it is in torch's old form, damaged, or made to fill the memory.
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
            content = archive.read(pickled[0])
        file.seek(0)
        reader = torch._C.PyTorchFileReader(file)
        records = reader.get_all_records()
        other = [record for record in records if not RECORDS.fullmatch(record)]
        if other:
            raise Hostile(f"{one_line(other[0])[:200]!r} in it is nothing that torch.save writes")
        if len(records) != len(parts) or reader.get_record("data.pkl") != content:
            raise Hostile("it reads otherwise to torch than to zipfile: it was made to deceive one of them")
        return content
    except zipfile.BadZipFile as error:
        raise ValueError(
            "it is no torch file of the present form (torch 1.6 and later); load it with torch where it comes from, and save it again"
        ) from error
    except (NotImplementedError, RuntimeError, EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {first_line(error)}") from error


def check_torch_file(path: Path, what: str, allowed: frozenset[str] = ALLOWED) -> None:
    """Refuses a file that `torch.load` would run code from.

    Args:
        path: the file.
        what: names it at the beginning of a message.
        allowed: what it may call.

    Raises:
        UserError: it calls something else, or is no torch file.
    """
    with path.open("rb") as file:
        try:
            check_pickle(pickled_part(file, path.stat().st_size), allowed)
        except Hostile as error:
            raise UserError(f"{what}: {path} is refused: {error}. Nothing of it was run.") from error
        except ValueError as error:
            raise UserError(f"{what}: {path} is damaged, or no torch file: {error}.") from error


def load_tensors(file: Any, what: str, size: int | None = None, allowed: frozenset[str] = TENSORS) -> Any:
    """What a torch file holds, read by the restricted unpickler, on the host.

    Args:
        file: a path, or an opened file that can seek.
        what: names it in messages.
        size: bytes of an opened file.
        allowed: what it may call.

    Raises:
        UserError: it holds something else than tensors and plain values.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return load_tensors(opened, what, file.stat().st_size, allowed)
    try:
        start = file.tell()
        check_pickle(pickled_part(file, size if size is not None else file.seek(0, io.SEEK_END)), allowed)
        file.seek(start)
        # In words: TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD in the environment changes the default.
        return torch.load(file, map_location="cpu", weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except Hostile as error:
        reason = first_line(error)[:300]
        raise UserError(
            f"{what} is refused: {reason}. Only tensors and plain values are read, and nothing was run."
        ) from error
    except (
        ValueError,
        RuntimeError,
        UnpicklingError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        OSError,
        IndexError,
    ) as error:
        reason = first_line(error)[:300]
        raise UserError(
            f"{what} cannot be read: {reason}. It is damaged, or it is none: copy or download it again."
        ) from error


# ---- checkpoints ------------------------------------------------------------------------------------------------------

TORCH_FILES = (".pt", ".bin", ".pkl", ".pth", ".ckpt")


def check_checkpoint(folder: Path) -> None:
    """Looks through every pickle of a checkpoint, before Accelerate, DeepSpeed or torch's distributed checkpoints read it.

    Args:
        folder: of the checkpoint; it may be a link itself, and holds none.

    Raises:
        UserError: names the file, and what it would have run.
    """
    for here, folders, files in os.walk(folder):
        for name in sorted(folders + files):
            path = Path(here, name)
            # Whoever reads the checkpoint follows links, out of the folder too; none is written into one.
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                kind = "a symbolic link" if path.is_symlink() else "neither a file nor a directory"
                raise UserError(
                    f"training.resume_from_checkpoint: {path} is refused: it is {kind}, which no checkpoint holds. If it is yours, put "
                    "in its place what it leads to."
                )
            if name == ".metadata" and path.is_file():
                _check_distributed(path)
            elif path.suffix in TORCH_FILES and path.is_file():
                check_torch_file(path, "training.resume_from_checkpoint")


class _Listed(Unpickler):
    """An unpickler that finds what is allowed, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in ALLOWED:
            raise UnpicklingError(f"it would run {module}.{name}")
        return super().find_class(module, name)


def _check_distributed(metadata: Path) -> None:
    """The table of contents of a distributed checkpoint, and what of it is no tensor."""
    try:
        content = metadata.read_bytes()
        check_pickle(content)
        table = _Listed(io.BytesIO(content)).load()
        for index, place in (table.storage_data or {}).items():
            if type(table.state_dict_metadata[index.fqn]).__name__ != "BytesStorageMetadata":
                continue  # a tensor, which torch reads with the restricted unpickler
            name = Path(place.relative_path).name
            if name != place.relative_path:
                raise Hostile(f"it names a file outside of its folder: {one_line(place.relative_path)}")
            with (metadata.parent / name).open("rb") as file:
                file.seek(place.offset)
                part = file.read(place.length)
            check_pickle(pickled_part(io.BytesIO(part), len(part)))
    except (ValueError, KeyError, AttributeError, TypeError, OSError, EOFError, UnpicklingError) as error:
        raise UserError(
            f"training.resume_from_checkpoint: {metadata} is refused: {first_line(error)}. Nothing of it was run."
        ) from error
