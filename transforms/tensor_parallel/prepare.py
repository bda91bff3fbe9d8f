"""What changes in a model before its layers are split: numbers in its graphs, and the order of layers' outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import fx, nn

from ...compat import all_modules, own_children, own_parameters
from ...layers.distributed import COLUMNS, DealtColumns, Share, SplitColumns
from ...passes.driver import make_root
from ...passes.rewriting import holds_inputs_first
from ...runtime.graphs import own, recompile, specializations_of
from ...runtime.record import record_of
from ...runtime.state import Deal, StateMap, StateStep
from ...runtime.values import qualified, user_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["become", "prepare", "run_from_graphs", "write_number"]

_LOST = "tensor_parallel split its layers, and the original forward has the sizes of the whole model"


def prepare(model: nn.Module, blocks: Sequence[Mapping[str, Any]], mesh: DeviceMesh) -> None:
    """Make the model ready for `blocks` to be split over a mesh: then it is right only with a share of each."""
    steps, callers = list[StateStep](), _callers(model)
    asking = [_one_caller(model, block, callers) for block in blocks]
    for block in blocks:
        for name, sizes in block.get("sections", {}).items():
            steps += _dealt(model, name, sizes, mesh.size())
    record = record_of(model)
    if steps and record is not None:
        make_root(model, record.changed(record.plan, record.state_map.compose(StateMap(tuple(steps)))))
    pairs = list(zip(blocks, asking, strict=True))
    only_whole = {owner for block, caller in pairs if caller is None for owner in block.get("numbers", ())}
    for owner, graphs in _numbers_by_owner(blocks).items():
        _write_numbers(model.get_submodule(owner), graphs, _LOST if owner in only_whole else "")
    for block, caller in pairs:
        if caller is not None:
            _ask_for_parts(caller, [model.get_submodule(name) for name in block["columns"]], mesh)


def _numbers_by_owner(blocks: Sequence[Mapping[str, Any]]) -> Mapping[str, Mapping[int, dict[str, Any]]]:
    """Return what all blocks change, by module, number of its graph, and node."""
    numbers = defaultdict[str, defaultdict[int, dict[str, Any]]](lambda: defaultdict(dict))
    for block in blocks:
        for owner, graphs in block.get("numbers", {}).items():
            for number, nodes in graphs.items():
                numbers[owner][int(number)].update(nodes)
    return numbers


def _callers(model: nn.Module) -> Mapping[nn.Module, set[nn.Module]]:
    """Return, by module, those whose graphs call it."""
    found = defaultdict[nn.Module, set[nn.Module]](set)
    for module in all_modules(model):
        for graph in (each.graph for each in specializations_of(module)):
            for call in graph.find_nodes(op="call_module"):
                found[module.get_submodule(str(call.target))].add(module)
    return found


def _one_caller(
    model: nn.Module, block: Mapping[str, Any], callers: Mapping[nn.Module, set[nn.Module]]
) -> nn.Module | None:
    """Return the module that calls a block's first layers and whose numbers alone are others for a part, if there is
    one: its own forward is right with all outputs, as no graph behind it counts parts.
    """
    layers = [model.get_submodule(name) for name in block["columns"]]
    owners = {model.get_submodule(owner) for owner in block.get("numbers", ())}
    in_sections = block.get("sections", ())
    are_known = all(
        name in in_sections or user_class(type(layer)) is nn.Linear
        for name, layer in zip(block["columns"], layers, strict=True)
    )
    is_one = len(owners) == 1 and all(callers[layer] == owners for layer in layers)
    return next(iter(owners)) if are_known and is_one else None


def _ask_for_parts(caller: nn.Module, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Let layers give all outputs to who does not ask for a part, as the graphs of a module do."""
    for layer in layers:
        if isinstance(layer, DealtColumns):
            layer.mesh = mesh
        else:
            become(layer, SplitColumns, Share(mesh, cast("nn.Linear", layer).out_features))
    for graph in (each.graph for each in own(caller).specializations):
        for call in graph.find_nodes(op="call_module"):
            if caller.get_submodule(str(call.target)) in layers:
                call.kwargs = {**call.kwargs, "part": True}
    recompile(caller)


def become(module: nn.Module, kind: type[nn.Module], share: Share) -> None:
    """Let a module be one of whose tensors each process has a share."""
    object.__setattr__(module, "__class__", kind)
    vars(module)["share"] = share


def _dealt(model: nn.Module, name: str, sizes: Sequence[int], processes: int) -> list[StateStep]:
    """Put a layer's outputs in the order of the processes that get them; return what that does to its tensors."""
    layer = model.get_submodule(name)
    steps: list[StateStep] = []
    for last, parameter in list(own_parameters(layer).items()):
        if parameter is None:
            continue
        dim = 1 if last == "weight" and holds_inputs_first(layer) else 0
        old, new = qualified(name, last), qualified(qualified(name, COLUMNS), last)
        step = Deal(old, new, dim, tuple(sizes), processes)
        (values,) = step.forward([parameter.detach()])
        own_parameters(layer)[last] = made = nn.Parameter(values, parameter.requires_grad)
        vars(made).update(vars(parameter))
        steps.append(step)
    dealt = DealtColumns(layer, sizes).train(layer.training)
    for holder in all_modules(model):
        for last, child in own_children(holder).items():
            if child is layer and holder is not dealt:
                own_children(holder)[last] = dealt
    return steps


def _write_numbers(owner: nn.Module, graphs: Mapping[int, Mapping[str, Sequence[Sequence[Any]]]], lost: str) -> None:
    """Let a module's graphs have other numbers; its own forward has those of the whole model."""
    capture = own(owner)
    for number, changes in graphs.items():
        nodes = {node.name: node for node in capture.specializations[number].graph.nodes}
        for name, every in changes.items():
            for *path, value in every:
                write_number(nodes[name], path, value)
    run_from_graphs(owner, lost)


def run_from_graphs(owner: nn.Module, lost: str = "") -> None:
    """Let a module run from its own graphs, which are others now; never by its original forward if that is `lost`."""
    capture = own(owner)
    capture.inactive, capture.rewritten, capture.lost = False, True, capture.lost or lost
    recompile(owner)


def write_number(node: fx.Node, path: Sequence[Any], value: int) -> None:
    """Let a call have another number among its arguments."""
    first, *inside = path
    setattr(node, first, _written(getattr(node, first), inside, value))


def _written(structure: Any, path: Sequence[Any], value: int) -> Any:
    """Return a structure of arguments with another number at a place."""
    if not path:
        return value
    first, *inside = path
    if isinstance(structure, slice):
        given = cast("Any", structure)
        start, stop = (value if name == first else getattr(given, name) for name in ("start", "stop"))
        return slice(start, stop, given.step)
    if isinstance(structure, Mapping):
        named = cast("Mapping[str, Any]", structure)
        return {**named, first: _written(named[first], inside, value)}
    items = [_written(each, inside, value) if number == first else each for number, each in enumerate(structure)]
    return tuple(items) if isinstance(structure, tuple) else items
