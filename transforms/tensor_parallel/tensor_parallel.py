"""Split the linear layers of MLPs and of attention over processes: the search, and the pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import distributed, fx, nn

from ...compat import has_hooks
from ...errors import UsageError
from ...operators import operator_info, operator_of_module
from ...passes.contract import Pass, device_type, mesh_of_same_weights, require_process_group
from ...passes.rewriting import Opener, holds_inputs_first, layer_of, substituted
from ...passes.sites import Goal, Phase, Refusal, Site
from ...runtime.graphs import Specialization, capture_of, specializations_of
from ...runtime.guards import Argument, reader
from ...runtime.values import qualified, user_class
from ...tracing.program import Program, TensorOwners
from .axes import SplitAxis, SplitBlock, SplitSize, SplitTensor, Stop, parts_in, settled
from .prepare import prepare
from .rules import SplitCall, result_of, stop_at_one_head
from .vocabulary import vocabularies_in

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
    left_out, in_sections, refusals = set[str](), set[str](), list[Refusal]()
    while True:
        walk = _Walk(program, processes, left_out, in_sections)
        walk.model()
        walk.note_what_changes()
        blocks = list({id(block.whole): block.whole for block in walk.blocks}.values())
        for block in blocks:
            block.stop = block.stop or _uneven(program, block, processes)
        stopped = [block for block in blocks if block.stop is not None or not block.rows]
        if not stopped:
            return blocks, refusals
        unsure = {name for block in stopped for name in block.columns if walk.axes[name].whole.has_choice}
        if unsure - in_sections:
            in_sections |= unsure
            continue
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
    for name in block.columns:
        layer = layer_of(program.module(name))
        sizes = block.sections.get(name) or [0 if layer is None else layer.channels[1]]
        outputs = next((size for size in sizes if size % processes), None)
        if outputs is not None:
            of_them = f"its {outputs} outputs" if len(sizes) == 1 else f"parts of its outputs, such as {outputs},"
            return Stop(f"{of_them} do not divide by {processes} processes", is_near=bool(block.rows), is_uneven=True)
    return None


@dataclass
class _Walk(Opener):
    """One walk through all graphs of each mode, as they run.
    A place is a module, by its name and itself, and the number of its graph.
    """

    program: Program
    processes: int
    left_out: set[str]  # layers that are left whole
    in_sections: set[str]  # layers whose outputs are to be read in parts where that is not clear
    flipped: bool = False  # whether the graphs are followed for the other mode than the model is in
    blocks: list[SplitBlock] = field(default_factory=list[SplitBlock])
    roles: dict[str, str] = field(default_factory=dict[str, str])  # how each layer is split
    axes: dict[str, SplitAxis] = field(default_factory=dict[str, SplitAxis])  # the outputs of each that is by columns
    # of each node the numbers that are others for a part, and whose parts these were
    numbers: dict[tuple[str, int, str], tuple[list[Any], list[SplitBlock]]] = field(
        default_factory=dict[tuple[str, int, str], tuple[list[Any], list[SplitBlock]]]
    )

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
        """Return the value of a call of a module; what its hooks see is whole."""
        if not has_hooks(module):
            return self._called(name, module, args, kwargs)
        stop = Stop(f"hooks of '{name}' would see a part")
        _stop_all((args, kwargs), stop)
        _stop_all(self._called(name, module, args, kwargs), stop)
        return None

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
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
        graph, number = specialization.graph, next(n for n, each in enumerate(found) if each is specialization)
        inputs = [_read(given, specialization, node) for node in graph.find_nodes(op="placeholder")]
        result = self.run(graph, (name, module, number), inputs)
        if not name:
            _stop_all(result, Stop("", is_near=False))  # no linear layer follows
        return result

    def value(self, node: fx.Node, place: tuple[str, nn.Module, int], values: Mapping[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return None
        value = partial(substituted, values=values)
        if node.op == "call_module":
            name, owner, path = *place[:2], str(node.target)
            return self.module(qualified(name, path), owner.get_submodule(path), value(node.args), value(node.kwargs))
        call = SplitCall(node, value, self.processes)
        parts, result = _alive(call.parts), None
        heads = [part.block.whole.one_head for part in parts]  # blocks that meet become one
        try:
            result = result_of(call) if parts else None
        except Stop as stop:
            _stop_all(call.parts, stop_at_one_head(call, heads) or stop)
        else:
            self._note_numbers(call, parts, place)
        return result

    def _note_numbers(
        self, call: SplitCall, parts: Sequence[SplitTensor | SplitSize], place: tuple[str, nn.Module, int]
    ) -> None:
        """Note which numbers of a call are others for parts; it may run at several places, which have to agree."""
        _, owner, number = place
        key, blocks = (self.program.names.name(owner), number, call.node.name), [part.block for part in parts]
        numbers, known = self.numbers.setdefault(key, (call.numbers, blocks))
        known += [block for block in blocks if block not in known]
        if numbers != call.numbers:
            stop = Stop(f"'{call.node.name}' is run for parts, and for whole tensors")
            _stop_all([SplitTensor(-1, block) for block in known], stop)

    def note_what_changes(self) -> None:
        """Note in each block which numbers in graphs change for it, and which layers' outputs are in sections."""
        followed = {key[:2] for key in self.numbers}
        for (owner, number, node), (numbers, blocks) in self.numbers.items():
            every = range(len(specializations_of(self.program.module(owner))))
            for block in {id(each.whole): each.whole for each in blocks if numbers}.values():
                graphs = block.numbers.setdefault(owner, {})
                graphs.setdefault(str(number), {})[node] = numbers
                if any((owner, other) not in followed for other in every):
                    block.stop = block.stop or Stop(f"'{owner}' has graphs for several kinds of calls")
        for name, axis in self.axes.items():
            block, sections = next(each.whole for each in self.blocks if name in each.columns), axis.sections()
            if len(sections) > 1:
                block.sections[name] = sections
                if len(self.program.names.names(self.program.module(name))) > 1:
                    block.stop = block.stop or Stop(f"'{name}' is in the model under several names")

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
        if name not in self.axes:
            layer = layer_of(module)
            outputs = 0 if layer is None else layer.channels[1]
            self.axes[name] = SplitAxis(outputs, prefers_sections=name in self.in_sections)
        return SplitTensor(-1, block, self.axes[name])

    def _row(self, name: str, part: SplitTensor) -> None:
        try:
            part = settled(part)
        except Stop as stop:
            _stop_all(part, stop)
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
        processes = distributed.get_world_size()
        blocks, refusals = blocks_in(program, processes)
        for block in blocks:
            detail = f"columns of {', '.join(block.columns)}; rows of {', '.join(block.rows)}"
            yield Site(program, block.columns[0], {}, detail=detail, data=block.data())
        yield from refusals
        for found in vocabularies_in(program, processes, {name for block in blocks for name in block.layers}):
            if isinstance(found, Refusal):
                yield found
                continue
            names = ", ".join((*found["embeddings"], *found["columns"]))
            yield Site(program, found["embeddings"][0], {}, detail=f"words of {names}", data=found)

    def finalize(self, model: nn.Module, sites: Sequence[Site]) -> nn.Module:
        blocks = [site.data for site in sites]
        mesh = mesh_of_same_weights(model, self.name)
        prepare(model, blocks, mesh)
        self.split(Program(model), blocks, mesh)
        return model

    def split(
        self,
        program: Program,
        blocks: Sequence[Mapping[str, Any]],
        mesh: DeviceMesh,
        around: Sequence[nn.Module] = (),
    ) -> None:
        """Split the layers that `blocks` name over a mesh, once these are prepared.

        `around`: what reads parameters outside of the model.
        """
        from .write import split  # with torch's parts for tensors that are split: only where it is used

        split(program, blocks, mesh, around)
