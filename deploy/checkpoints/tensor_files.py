"""Checkpoints in several files, of which parts are read: folders of safetensors files, and torch's own."""

from __future__ import annotations

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import ArchiveError, UsageError, one_line
from ...runtime.state import Piece

__all__ = ["TensorFiles", "open_tensor_files"]

_INDEX = ".safetensors.index.json"
_METADATA = ".metadata"
_PARTS = "shard-*-model-*.safetensors"
"""How `torch.distributed.checkpoint` calls the files of its HuggingFaceStorageWriter that have parts of tensors."""


class TensorFiles(ABC):
    """The tensors of a checkpoint: their forms, as tensors without data, and their parts, on demand.

    The names are those in the files, less `prefix`; what does not begin with it is no part of the checkpoint.
    """

    def __init__(self, where: Path, prefix: str, forms: Mapping[str, Tensor]) -> None:
        self.where, self.prefix, self.names = where, prefix, list(forms)
        self.forms = {name.removeprefix(prefix): form for name, form in forms.items() if name.startswith(prefix)}

    def read(self, pieces: Sequence[Piece]) -> None:
        """Write parts of tensors into their memory, in the memory's dtype and on its device."""
        named = [replace(piece, name=self.prefix + piece.name) for piece in pieces if piece.memory.numel()]
        with _readable(self.where):
            self._read(named)

    @abstractmethod
    def _read(self, pieces: Sequence[Piece]) -> None:
        """Do so; names are those in the files, and no piece is empty."""


def open_tensor_files(where: Path, key: str | None) -> TensorFiles:
    """Open a checkpoint: a folder, the index of one, or a single safetensors file. ArchiveError if it is damaged."""
    prefix = f"{key}." if key else ""
    with _readable(where):
        if (where / _METADATA).is_file():
            return _DistributedFiles(where, prefix)
        if any(where.glob(_PARTS)) and not any(where.glob(f"*{_INDEX}")):
            return _SafetensorsInParts(where, prefix)
        return _Safetensors(where, prefix, _files_of(where))


@contextmanager
def _readable(where: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise ArchiveError(f"{where} cannot be read: {one_line(error)}") from error


# -- safetensors ---------------------------------------------------------------------------------------------------


def _files_of(where: Path) -> dict[Path, set[str] | None]:
    """Return the safetensors files of a checkpoint, each with the names that an index says are in it."""
    if where.is_file() and where.name.endswith(_INDEX):
        return _indexed(where)
    if where.is_file():
        return {where: None}
    indices, files = ([*where.glob(f"*{end}")] for end in (_INDEX, ".safetensors"))
    if len(indices) == 1:
        return _indexed(indices[0])
    if not indices and len(files) == 1:
        return {files[0]: None}
    if not where.exists():
        raise ArchiveError(f"{where} is not there")
    if not files:
        raise ArchiveError(
            f"{where} holds no checkpoint: no safetensors file, and no '{_METADATA}' of torch.distributed.checkpoint"
        )
    found = ", ".join(sorted(path.name for path in indices or files))
    raise UsageError(f"{where} holds several checkpoints ({found}): give the path of one of these files")


def _indexed(index: Path) -> dict[Path, set[str] | None]:
    try:
        places: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        named = {file: {name for name, place in places.items() if place == file} for file in set(places.values())}
        paths: dict[Path, set[str] | None] = {index.parent / Path(file).name: names for file, names in named.items()}
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArchiveError(f"{index} is no index of safetensors files: {one_line(error)}") from error
    missing = sorted(path.name for path in paths if not path.is_file())
    if missing:
        raise ArchiveError(
            f"{index.parent} lacks {', '.join(missing)}, which {index.name} names: copy the whole folder"
        )
    return paths


class _Safetensors(TensorFiles):
    def __init__(self, where: Path, prefix: str, files: Mapping[Path, set[str] | None]) -> None:
        self._file_of: dict[str, Path] = {}
        forms: dict[str, Tensor] = {}
        for path, names in sorted(files.items()):
            with _opened(path) as file:
                inside = set(file.keys())
                if names is not None and not names <= inside:
                    raise ArchiveError(f"{path} lacks {min(names - inside)!r}, which the index says is in it")
                for name in sorted(inside if names is None else names):
                    self._file_of[name] = path
                    forms[name] = _form(file, name)
        super().__init__(where, prefix, forms)

    def _read(self, pieces: Sequence[Piece]) -> None:
        of_file: dict[Path, list[Piece]] = {}
        for piece in pieces:
            of_file.setdefault(self._file_of[piece.name], []).append(piece)
        for path, inside in of_file.items():
            with _opened(path) as file:
                for piece in inside:
                    read = file.get_slice(piece.name)[piece.index] if piece.start else file.get_tensor(piece.name)
                    piece.memory.copy_(read)


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        with cast("Any", safe_open)(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ArchiveError(f"{path} cannot be read: {one_line(error)}") from error


def _form(file: Any, name: str) -> Tensor:
    part = file.get_slice(name)
    dtype = _DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ArchiveError(f"{name!r} has elements of type {part.get_dtype()}, which torch does not compute with")
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip


# -- torch.distributed.checkpoint ----------------------------------------------------------------------------------


class _DistributedFiles(TensorFiles):
    def __init__(self, where: Path, prefix: str) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._metadata: Any = self._read_metadata(where)
        super().__init__(
            where,
            prefix,
            {
                name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
                for name, tensor in self._metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
            },
        )

    def _read_metadata(self, where: Path) -> Any:
        with (where / _METADATA).open("rb") as file:
            metadata = _MetadataReader(file).load()
        _check_sizes(where, metadata)
        return metadata

    def _reader(self, where: Path) -> Any:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        return FileSystemReader(where)

    def _read(self, pieces: Sequence[Piece]) -> None:
        from .piece_planner import PiecePlanner

        reader, planner = self._reader(self.where), PiecePlanner(pieces, self._metadata)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


class _SafetensorsInParts(_DistributedFiles):
    """Safetensors files of which each has parts of tensors, as each rank wrote its own."""

    def _read_metadata(self, where: Path) -> Any:
        return self._reader(where).read_metadata()

    def _reader(self, where: Path) -> Any:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(where))


def _check_sizes(where: Path, metadata: Any) -> None:
    """Raise `ArchiveError` where a file is missing, or shorter than the metadata says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = where / name
        if not path.is_file():
            raise ArchiveError(f"{where} lacks {name}, which its metadata names: copy the whole folder")
        if path.stat().st_size < end:
            raise ArchiveError(f"{path} is damaged: it has {path.stat().st_size:,} bytes of {end:,}")


class _MetadataReader(pickle.Unpickler):
    """Read the metadata, which is a pickle, and let it make nothing but what torch writes there."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _IN_METADATA.get(module, ()):
            raise ArchiveError(
                f"the metadata of a checkpoint holds a {module}.{name}, which torch does not write there"
            )
        return super().find_class(module, name)


_IN_METADATA: Mapping[str, tuple[str, ...]] = {
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "torch": ("Size",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",),
}  # fmt: skip
