"""Write the removal of units: tensors are cut, and sizes in graphs and attributes follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import fx, nn

from ....compat import own_tensor, submodule, transient_buffers
from ....errors import MatchFailure
from ....layers.resized import KeptExperts
from ....passes.rewriting import Edit
from ....passes.sites import Site
from ....runtime.state import Select
from ..dependency_groups import ResizedAttention

__all__ = ["remove"]


def remove(site: Site, edit: Edit) -> None:
    """Take the units away that a site's data names.

    Sizes are made smaller by what is gone, whatever they are by now: other sites count along the same ones.

    Raises:
        MatchFailure: if a tensor or a size is not what it was when the units were chosen.
    """
    lists = site.data["lists"]
    for name in site.data["replaced"]:
        _replace(edit, name)
    for name, dim, size, number in site.data["tensors"]:
        _cut(edit, name, Select(name, name, dim, tuple(lists[number]), size))
    for label, path, gone in site.data["numbers"]:
        node = site[label]
        arguments = _without((node.args, node.kwargs), path, gone, node)
        node.args, node.kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", arguments)
    for module, name, index, gone in site.data["attributes"]:
        old = getattr(edit.owner.get_submodule(module), name, None)
        edit.set_attribute(module, name, _without(old, [] if index is None else [index], gone, f"{module}.{name}"))
    for name, size, number in site.data["experts"]:
        _take_out(edit, name, size, lists[number])


def _take_out(edit: Edit, name: str, size: int, kept: Sequence[int]) -> None:
    """Put a list of the experts that are left in the place of the one of all."""
    experts = edit.owner.get_submodule(name)
    if not isinstance(experts, nn.ModuleList) or len(experts) != size:
        raise MatchFailure(f"'{name}' is no list of {size} modules any more")
    edit.replace_module(name, KeptExperts.of(experts, kept))


def _replace(edit: Edit, name: str) -> None:
    """Put a module that runs with any width in the place of one of torch that does not."""
    module = edit.owner.get_submodule(name)
    if isinstance(module, ResizedAttention):
        return
    try:
        edit.replace_module(name, ResizedAttention.of(cast("nn.MultiheadAttention", module)))
    except ValueError as error:
        raise MatchFailure(f"'{name}': {error}") from error


def _cut(edit: Edit, name: str, step: Select) -> None:
    path, _, last = name.rpartition(".")
    module = submodule(edit.owner, path)
    tensor = None if module is None else own_tensor(module, last)
    if module is None or tensor is None:
        raise MatchFailure(f"'{name}' is no parameter or buffer any more")
    if tensor.shape[step.dim] != step.size:
        raise MatchFailure(f"'{name}' has shape {list(tensor.shape)}; dimension {step.dim} was {step.size} long")
    (cut,) = step.forward([tensor.detach()])
    edit.set_tensor(name, cut, None if last in transient_buffers(module) else step)


def _without(value: Any, path: Sequence[str | int], gone: int, where: fx.Node | str) -> Any:
    """Return nested arguments with a number in them smaller by `gone`."""
    if path:
        first, *rest = path
        if isinstance(value, slice) and first in ("start", "stop"):
            old = cast("Any", value)
            ends = {"start": old.start, "stop": old.stop}
            ends[first] = _without(ends[first], rest, gone, where)
            return slice(ends["start"], ends["stop"], old.step)
        if isinstance(value, dict):
            old = cast("dict[Any, Any]", value)
            return {**old, first: _without(old.get(first), rest, gone, where)}
        if isinstance(value, (list, tuple)) and isinstance(first, int):
            whole: Any = cast("Any", value)
            if -len(whole) <= first < len(whole):
                items = [_without(item, rest, gone, where) if n == first else item for n, item in enumerate(whole)]
                return type(whole)(items)
    if path or isinstance(value, bool) or not isinstance(value, int) or value < gone:
        raise MatchFailure(f"{where} has no size of {gone} or more where units were counted")
    return value - gone
