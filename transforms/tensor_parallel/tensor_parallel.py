"""Split the linear layers of MLPs and of attention over processes: the search, and the pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import distributed, fx, nn

from ...errors import UsageError
from ...operators import operator_info, operator_of_module
from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.rewriting import Opener, holds_inputs_first, layer_of, substituted
from ...passes.sites import Goal, Phase, Refusal, Site
from ...runtime.graphs import Specialization, capture_of, specializations_of
from ...runtime.guards import Argument, reader
from ...runtime.values import qualified, user_class
from ...tracing.program import Program, TensorOwners
from .rules import SplitBlock, SplitCall, SplitSize, SplitTensor, Stop, parts_in, result_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TensorParallel", "blocks_in"]

_HARMLESS = ("dtype", "device", "requires_grad")
"""What may be asked of a tensor without its numbers."""


def blocks_in(program: Program, processes: int, *, must_divide: bool = False) -> tuple[list[SplitBlock], list[Refusal]]:
    """Return the layers that can be split together, and the blocks that almost can.
    What cannot be a block is left whole, and the rest is looked at again. UsageError for heads or layers whose number
    alone does not fit, where it `must_divide`.
    """
    left_out, refusals = set[str](), list[Refusal]()
    while True:
        walk = _Walk(program, processes, left_out)
        walk.model()
        blocks = list({id(block.whole): block.whole for block in walk.blocks}.values())
        for block in blocks:
            block.stop = block.stop or _uneven(program, block, processes)
        stopped = [block for block in blocks if block.stop is not None or not block.rows]
        if not stopped:
            return blocks, refusals
        for block in stopped:
            if block.stop is not None and block.stop.is_uneven and block.stop.is_near and must_divide:
                raise UsageError(
                    f"'{block.columns[0]}' cannot be split: {block.stop}; give another number of processes"
                )
            if block.stop is not None and block.stop.is_near:
                refusals.append(Refusal(str(block.stop), at=block.columns[0]))
            left_out.update(block.columns)


def _uneven(program: Program, block: SplitBlock, processes: int) -> Stop | None:
    """Say which layer cannot be split evenly."""
    for layer in (layer_of(program.module(name)) for name in block.columns):
        outputs = 0 if layer is None else layer.channels[1]
        if outputs % processes:
            return Stop(
                f"its {outputs} outputs do not divide by {processes} processes",
                is_near=bool(block.rows),
                is_uneven=True,
            )
    return None


@dataclass
class _Walk(Opener):
    """One walk through all graphs of each mode, as they run. A place is a module, by its name and itself."""

    program: Program
    processes: int
    left_out: set[str]  # layers that are left whole
    flipped: bool = False  # whether the graphs are followed for the other mode than the model is in
    blocks: list[SplitBlock] = field(default_factory=list[SplitBlock])
    roles: dict[str, str] = field(default_factory=dict[str, str])  # how each layer is split

    @cached_property
    def read(self) -> set[int]:
        """Return the ids of the tensors whose numbers a graph reads that is not of their own module."""
        found: set[int] = set()
        for module in self.program.names.distinct:
            for graph in (each.graph for each in specializations_of(module)):
                for node in graph.find_nodes(op="get_attr"):
                    path, _, last = str(node.target).rpartition(".")
                    reads = any(user.target is not getattr or user.args[1] not in _HARMLESS for user in node.users)
                    if reads and (path or not holds_inputs_first(module)):
                        found.add(id(getattr(module.get_submodule(path), last, None)))
        return found

    def model(self) -> None:
        """Follow the whole model as it runs in its mode and then, where it has other graphs there, in the other one."""
        self.module("", self.program.model, (), {})
        if any(len(specializations_of(module)) > 1 for module in self.program.names.distinct):
            self.flipped = True
            self.module("", self.program.model, (), {})

    def module(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if user_class(type(module)) is nn.Linear or holds_inputs_first(module):
            return self._linear(name, module, args[0] if args else next(iter(kwargs.values()), None))
        capture, found = capture_of(module), specializations_of(module)
        if capture is None or not found:
            return self._leaf(name, module, (args, kwargs))
        specialization = next((each for each in found if each.runs_in_mode(module, flipped=self.flipped)), found[0])
        try:
            given = capture.parameters.bind(args, kwargs)
        except TypeError as error:
            given = dict[str, Any]()
            _stop_all((args, kwargs), Stop(f"'{name}' is called in a way that its forward does not take: {error}"))
        graph = specialization.graph
        inputs = [_read(given, specialization, node) for node in graph.find_nodes(op="placeholder")]
        result = self.run(graph, (name, module), inputs)
        if not name:
            _stop_all(result, Stop("", is_near=False))  # no linear layer follows
        return result

    def value(self, node: fx.Node, place: tuple[str, nn.Module], values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return None
        value = partial(substituted, values=values)
        if node.op == "call_module":
            name, owner, path = *place, str(node.target)
            return self.module(qualified(name, path), owner.get_submodule(path), value(node.args), value(node.kwargs))
        call = SplitCall(node, value, self.processes)
        if not _alive(call.parts):
            return None
        try:
            return result_of(call)
        except Stop as stop:
            _stop_all(call.parts, stop)
            return None

    def _linear(self, name: str, module: nn.Module, given: Any) -> Any:
        """Split a layer by inputs where its input is a part; else by outputs, if that is to be tried."""
        name = self.program.name_of(self.program.module(name))
        part = given if isinstance(given, SplitTensor) and given.block.whole.stop is None else None
        role = "row" if part is not None else "column" if name not in self.left_out else "whole"
        if self.roles.setdefault(name, role) != role:
            where = "in training and in evaluation" if self.flipped else "at several places"
            stop = Stop(f"'{name}' is called {where}, which would split it differently")
            concerned = (block for block in self.blocks if name in block.columns or name in block.rows)
            _stop_all([given, *(SplitTensor(-1, block) for block in concerned)], stop)
            return None
        if part is not None:
            return self._row(name, part)
        if role == "whole" or self._is_bound_elsewhere(module, name):
            return None
        block = next((each for each in self.blocks if name in each.columns), None)
        if block is None:
            block = SplitBlock([name], [])
            self.blocks.append(block)
        return SplitTensor(-1, block)

    def _row(self, name: str, part: SplitTensor) -> None:
        if part.dim != -1:
            _stop_all(part, Stop(f"'{name}' gets what is split along another dimension than its inputs"))
        elif self._is_bound_elsewhere(self.program.module(name), name):
            _stop_all(part, Stop(f"the parameters of '{name}' are used elsewhere, too"))
        elif name not in part.block.whole.rows:
            part.block.whole.rows.append(name)

    def _is_bound_elsewhere(self, module: nn.Module, name: str) -> bool:
        """Say whether the parameters of a layer are tied, or read by another module's graph."""
        owners = self.program.analyses[TensorOwners]
        inside = tuple(f"{each}." for each in self.program.names.names(module))
        return any(
            id(parameter) in self.read
            or any(not alias.startswith(inside) for alias in owners.names(qualified(name, own)))
            for own, parameter in module.named_parameters()
        )

    def _leaf(self, name: str, module: nn.Module, given: Any) -> Any:
        """Return the value of a call of a module that has no graph."""
        parts = _alive(list(parts_in(given)))
        if not parts:
            return None
        operator = operator_of_module(user_class(type(module)))
        is_alike = operator in ("dropout", "identity") or (operator is not None and operator_info(operator).elementwise)
        if is_alike and len(parts) == 1 and isinstance(parts[0], SplitTensor):
            return parts[0]
        _stop_all(parts, Stop(f"'{name}' ({type(module).__name__}) needs the whole of it", is_near=False))
        return None


def _read(given: Mapping[str, Any], specialization: Specialization, node: fx.Node) -> Any:
    """Return the value of a placeholder; what is read from inside something whole is whole."""
    argument = specialization.argument(node)
    try:
        return reader(given)(argument)
    except (LookupError, TypeError, AttributeError):
        roots = [given.get(each.name) for each in argument.all() if isinstance(each, Argument)]
        _stop_all(roots, Stop(f"'{argument}' cannot be followed into the module that reads it"))
        return None


def _alive(parts: list[SplitTensor | SplitSize]) -> list[SplitTensor | SplitSize]:
    return [part for part in parts if part.block.whole.stop is None]


def _stop_all(value: Any, stop: Stop) -> None:
    for part in parts_in(value):
        part.block.whole.stop = part.block.whole.stop or stop


@dataclass(frozen=True)
class TensorParallel(Pass):
    """Split the linear layers of MLPs and of attention over the processes, which all get the same rows.

    Before: down(act(up(x)))        After: the same, with a share of up's outputs and down's inputs on each process
    Refuses: head counts that do not divide, shapes that are written out, what needs the whole between two layers.
    """

    goal: ClassVar[Goal] = Goal.PARALLEL
    phase: ClassVar[Phase] = Phase.BOTH

    def check(self, model: nn.Module) -> None:
        require_process_group(self.name)
        device_type(model, self.name)

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        blocks, refusals = blocks_in(program, distributed.get_world_size())
        for block in blocks:
            detail = f"columns of {', '.join(block.columns)}; rows of {', '.join(block.rows)}"
            yield Site(
                program, block.columns[0], {}, detail=detail, data={"columns": block.columns, "rows": block.rows}
            )
        yield from refusals

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        self.split(sites[0].program, [site.data for site in sites], mesh_of_same_weights(model, self.name))
        return model

    def split(
        self,
        program: Program,
        blocks: Sequence[Mapping[str, Sequence[str]]],
        mesh: DeviceMesh,
        around: Sequence[nn.Module] = (),
    ) -> None:
        """Split the layers that `blocks` name over a mesh; `around`: what reads parameters outside of the model."""
        from .write import split  # with torch's parts for tensors that are split: only where it is used

        split(program, blocks, mesh, around)
