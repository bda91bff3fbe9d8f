"""Split the linear layers of MLPs and of attention over processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import distributed, nn

from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.sites import Goal, Phase, Refusal, Site
from ...tracing.program import Program
from .find import Blocks, is_conv1d

__all__ = ["TensorParallel"]


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Split the linear layers of MLPs and of attention over the processes, which all get the same rows.

    Before: down(act(up(x)))        After: the same, with a share of up's outputs and down's inputs on each process
    Refuses: head counts that do not divide, shapes that are written out, what needs the whole between two layers.
    """

    goal: ClassVar[Goal] = Goal.PARALLEL
    phase: ClassVar[Phase] = Phase.BOTH

    def check(self, model: nn.Module) -> None:
        """Refuse a process without a group."""
        require_process_group(self.name)
        device_type(model, self.name)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        search = Blocks(program, distributed.get_world_size())
        for block in search.find():
            detail = f"columns of {', '.join(block.columns)}; rows of {', '.join(block.rows)}"
            yield Site(
                program, block.columns[0], {}, detail=detail, data={"columns": block.columns, "rows": block.rows}
            )
        yield from search.refusals

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        from torch.distributed.tensor.parallel import parallelize_module

        from .write import column_style, row_style

        mesh = mesh_of_same_weights(model, self.name)
        plan = {
            name: style(is_conv1d(model.get_submodule(name)))
            for site in sites
            for role, style in (("columns", column_style), ("rows", row_style))
            for name in site.data[role]
        }
        # Every process has the whole weights: nothing needs to be sent.
        return parallelize_module(model, mesh, plan, src_data_rank=None)
