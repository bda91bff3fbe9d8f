"""Give a model its tensors from a checkpoint of the original, to each process no more than the part that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from ...compat import all_modules
from ...compat.distributed import give_memory, local_part, shard_again, with_memory
from ...errors import StateError, UsageError, one_line
from ...runtime.record import Record
from ...runtime.state import Piece, StateMap
from ...runtime.values import ModelNames
from .conversion import saved_form
from .tensor_files import TensorFiles, open_tensor_files

__all__ = ["load_sharded"]


def load_sharded(
    model: nn.Module,
    where: Path,
    *,
    record: Record,
    key: str | None = None,
    device: str | torch.device | None = None,
    init: Callable[[nn.Module], object] | None = None,
    strict: bool = True,
) -> None:
    """Load an optimized model's tensors from a checkpoint with original names; see `fxopt.load_sharded`."""
    where_to = _device(device)
    for module in all_modules(model):
        shard_again(module)
    originals = {name: value for name, value in record.skeleton.state_dict().items() if isinstance(value, Tensor)}
    files = open_tensor_files(where, key)
    state_map, saved = _as_saved(files, originals, record)
    _check(files, saved, state_map, strict=strict)
    parts = _Parts(state_map, saved, files)
    parts.check_tied(model)
    owners = parts.owners_of_others(model)
    if owners and init is None:
        raise StateError(
            f"the {type(owners[0]).__name__} has buffers on the meta device that are in no checkpoint; give init=, a "
            "function that computes those of a module (for models of transformers: init=model._init_weights)"
        )
    with torch.no_grad():
        memories = parts.read(model, where_to)
        parts.move_in(model, where_to, memories)
        if init is not None:
            for module in owners:
                init(module)
            parts.read_again(model, owners)


def _device(device: str | torch.device | None) -> torch.device:
    """Return the device that was asked for, or where the ranks of the process group have their tensors."""
    is_grouped = distributed.is_available() and distributed.is_initialized()
    try:
        found = torch.device(device or ("cuda" if is_grouped and "nccl" in distributed.get_backend_config() else "cpu"))
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"device={str(device)!r}: {one_line(error)}; give a device of this machine, such as 'cpu'"
        ) from None
    return found


def _as_saved(
    files: TensorFiles, originals: Mapping[str, Tensor], record: Record
) -> tuple[StateMap, Mapping[str, Tensor]]:
    """Return the way from the names of a checkpoint to those of the model, and what is expected under the former."""
    try:
        form = saved_form(record.skeleton, files.forms, originals)
        return form.compose(record.state_map), form.backward(originals)
    except StateError as error:
        raise StateError(f"{files.where}: {error}") from None


def _check(files: TensorFiles, originals: Mapping[str, Tensor], state_map: StateMap, *, strict: bool) -> None:
    """Raise a StateError that names what the checkpoint lacks, what it has besides, and what has another form."""
    given = {name: form for name, form in files.forms.items() if strict or name in originals}
    try:
        state_map.check(given, originals)
    except StateError as error:
        raise StateError(f"{files.where}: {error}{_advice(files, originals)}") from None
    for name, form in given.items():
        model_dtype = originals[name].dtype
        if form.dtype != model_dtype and not (_is_plain_float(form.dtype) and _is_plain_float(model_dtype)):
            raise StateError(
                f"{files.where}: '{name}' is {form.dtype}, the model's is {model_dtype}; convert the checkpoint, or "
                "build the model in that dtype"
            )


def _is_plain_float(dtype: torch.dtype) -> bool:
    """Say whether numbers of a dtype stand for themselves: those of 8 bits have scales elsewhere."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _advice(files: TensorFiles, originals: Mapping[str, Tensor]) -> str:
    """Say under which key the model's names are, if there is one."""
    first = next(iter(originals), "")
    keys = (name.removesuffix(f".{first}") for name in files.names if name.endswith(f".{first}"))
    key = next(keys, None)
    return "" if key is None or files.forms.keys() & originals.keys() else f"; its names are under key={key!r}"


@dataclass(frozen=True)
class _Parts:
    """Which parts of a checkpoint's tensors go where in a model."""

    state_map: StateMap
    originals: Mapping[str, Tensor]  # of the unoptimized model, as the checkpoint calls them, without data
    files: TensorFiles

    def read(self, model: nn.Module, device: torch.device) -> dict[int, Tensor]:
        """Return new memory, filled, for each tensor, by its id: like it for one on the meta device, else of this
        rank's part. The model is as it was.
        """
        memories, pieces = dict[int, Tensor](), list[Piece]()
        for name, tensor in self._loaded(ModelNames(model)):
            start, part = local_part(tensor)
            memory = with_memory(tensor, device) if tensor.is_meta else torch.empty_like(part, device="cpu")
            memories[id(tensor)] = memory
            pieces.append(Piece(name, start, local_part(memory)[1]))
        self._fill(pieces)
        return memories

    def move_in(self, model: nn.Module, device: torch.device, memories: dict[int, Tensor]) -> None:
        """Give a model what was read."""
        for _, tensor in self._loaded(ModelNames(model)):
            if not tensor.is_meta:
                local_part(tensor)[1].copy_(memories[id(tensor)])
        give_memory(model, device, memories)

    def read_again(self, model: nn.Module, owners: Sequence[nn.Module]) -> None:
        """Fill the tensors of some modules again, which a function has initialized."""
        inside = {id(tensor) for owner in owners for tensor in ModelNames(owner).registered().values()}
        again = ((name, tensor) for name, tensor in self._loaded(ModelNames(model)) if id(tensor) in inside)
        self._fill([Piece(name, *local_part(tensor)) for name, tensor in again])

    def _fill(self, pieces: Iterable[Piece]) -> None:
        """Read parts of tensors into their memory; those that are made of others as a whole come one after another."""
        direct, computed = self._planned(pieces)
        self.files.read([replace(piece, name=self._stored(piece.name)[0]) for piece in direct])
        for piece in computed:
            roots = {name: torch.empty_like(self.originals[name], device="cpu") for name in self._roots(piece.name)}
            whole = (Piece(self._stored(name)[0], (0,) * memory.ndim, memory) for name, memory in roots.items())
            self.files.read(list(whole))
            piece.memory.copy_(self.state_map.forward(roots, strict=False)[piece.name][piece.index])

    def check_tied(self, model: nn.Module) -> None:
        """Raise a StateError where tensors differ that are one in the model; this rank looks at its own parts."""
        pieces = [Piece(name, *local_part(tensor)) for name, tensor in self._loaded(ModelNames(model))]
        for piece in self._planned(pieces)[0]:
            names = self._stored(piece.name)
            if len(names) < 2:
                continue
            memories = [torch.empty(piece.memory.shape, dtype=self.files.forms[name].dtype) for name in names]
            self.files.read([Piece(*each) for each in zip(names, [piece.start] * len(names), memories, strict=True)])
            for name, memory in zip(names[1:], memories[1:], strict=True):
                if not torch.equal(memory, memories[0]):
                    raise StateError(
                        f"{self.files.where}: '{names[0]}' and '{name}' are one tensor in the model, and differ"
                    )

    def owners_of_others(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules with tensors that no checkpoint has, and that are on the meta device."""
        names = ModelNames(model)
        loaded = {id(tensor) for _, tensor in self._loaded(names)}
        others = [name for name, tensor in names.registered().items() if tensor.is_meta and id(tensor) not in loaded]
        return list(dict.fromkeys(names.modules[name.rpartition(".")[0]] for name in others))

    def _planned(self, pieces: Iterable[Piece]) -> tuple[list[Piece], list[Piece]]:
        """Return the parts of original tensors that are read, and parts of new ones that are computed."""
        direct, computed = list[Piece](), list[Piece]()
        for piece in pieces:
            if not piece.memory.numel():
                continue
            found = self.state_map.pieces(piece)
            if found is None:
                computed.append(piece)
            else:
                direct += found
        return direct, computed

    def _loaded(self, names: ModelNames) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are made of those of a checkpoint, each once."""
        seen = set[int]()
        for name, tensor in names.registered(transient=False).items():
            if id(tensor) not in seen and all(root in self.originals for root in self._roots(name)):
                seen.add(id(tensor))
                yield name, tensor

    def _roots(self, name: str) -> tuple[str, ...]:
        return self.state_map.original_names(name)

    def _stored(self, name: str) -> list[str]:
        """Return the names by which the checkpoint has an original tensor."""
        return [each for each in self.state_map.names_of(name) if each in self.files.forms]
