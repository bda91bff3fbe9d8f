"""Tensors that an engine holds, too, in files: the system takes their memory where it is needed."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import storage_id
from ...errors import StateError
from ...operators import is_dense
from .refresh import regions_of, tensors_of

__all__ = ["fit_for_disk", "move_to_disk"]

_LEAST = 1 << 16
"""Bytes that are worth a file."""


def fit_for_disk(model: nn.Module) -> list[str]:
    """Return the names of the tensors that engines hold, too, and that are alone in memory worth a file."""
    every = [*model.named_parameters(), *model.named_buffers()]  # each once
    sharing = Counter(storage_id(each) for _, each in every if _has_memory(each))
    read = {id(each) for _, names in regions_of(model) for each in tensors_of(model, names)}
    return [name for name, each in every if id(each) in read and _has_memory(each) and _is_alone(each, sharing)]


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and tensor.is_cpu


def _is_alone(tensor: Tensor, sharing: Counter[int]) -> bool:
    size = tensor.numel() * tensor.element_size()
    own = sharing[storage_id(tensor)] == 1 and tensor.untyped_storage().nbytes() == size
    return own and size >= _LEAST and is_dense(tensor) and not tensor.is_inference()


def move_to_disk(model: nn.Module, names: Iterable[str]) -> None:
    """Let tensors of a model lie in files; engines go on with what they hold.

    Raises:
        StateError: the files cannot be written; nothing has changed.
    """
    tensors = tensors_of(model, list(names))
    with torch.inference_mode(False), torch.no_grad():
        try:
            mapped = _mapped(tensors)
        except (OSError, RuntimeError) as error:  # torch maps the files, and raises its own where that fails
            raise StateError(
                f"the weights cannot be written to files ({error}): set TMPDIR to a folder with room for them, or "
                "leave the pass 'release' out"
            ) from error
        calls = [(region, tensors_of(model, read)) for region, read in regions_of(model)]
        held = [(region.held(read), read) for region, read in calls]
        for tensor, new in zip(tensors, mapped, strict=True):
            tensor.data = new
        for each, read in held:
            if each is not None:
                each.move_to(read)


def _mapped(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the same numbers in files that are gone from their folder, and last as long as the tensors."""
    with tempfile.TemporaryDirectory(prefix="fxopt-", ignore_cleanup_errors=True) as folder:
        return [_written(Path(folder) / str(number), each.detach()) for number, each in enumerate(tensors)]


def _written(path: Path, tensor: Tensor) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,))
    path.write_bytes(cast("Any", flat.view(torch.uint8).numpy()))
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=flat.nbytes)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
