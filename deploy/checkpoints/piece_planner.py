"""Which parts of the files of `torch.distributed.checkpoint` are read, and where they go."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...errors import ArchiveError
from ...runtime.state import Piece

__all__ = ["PiecePlanner"]


class PiecePlanner(LoadPlanner):
    """Read pieces; the index of a read item says which one."""

    def __init__(self, pieces: Sequence[Piece], metadata: Metadata) -> None:
        self._pieces, self._metadata = pieces, metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, piece in enumerate(self._pieces):
            tensor = cast("TensorStorageMetadata", self._metadata.state_dict_metadata[piece.name])
            chunk = ChunkStorageMetadata(torch.Size(piece.start), piece.memory.shape)
            found = create_read_items_for_chunk_list(piece.name, tensor, [chunk])
            if sum(item.lengths.numel() for item in found) != piece.memory.numel():
                raise ArchiveError(f"the checkpoint does not hold all of {piece.name!r}")
            items += [replace(item, dest_index=MetadataIndex(piece.name, piece.start, number)) for item in found]
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        memory = self._pieces[cast("int", read_item.dest_index.index)].memory
        starts = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return memory[tuple(slice(start, start + length) for start, length in starts)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: what was resolved is the memory itself."""

    # What torch asks for elsewhere, and not here: every rank plans for itself, and reads tensors alone.

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError
