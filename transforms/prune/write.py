"""Write what was found: masks over weights, or the removal of units; and the original that the result is equal to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat import own_parameters, submodule, tensor_at, transient_buffers
from ...errors import MatchFailure
from ...layers.masked import masked_module, set_sparse
from ...layers.resized import KeptExperts, SkippedBlock
from ...passes.rewriting import Edit
from ...passes.sites import Site
from ...runtime.state import Mask, Select, unpacked
from .dependency_groups import ResizedAttention
from .reference import KeptStatistics, WithoutExperts, under_mode

__all__ = ["reference", "rewrite"]


def rewrite(site: Site, edit: Edit) -> None:
    """Put masks over weights, or take the units away that a site's data names; MatchFailure: these have changed."""
    if "gone" in site.data:
        _mask(site, edit)
    else:
        _remove(site, edit)


def reference(site: Site, original: nn.Module) -> nn.Module:
    """Return the original with zeros for what a site removes; norms and routers see the kept units alone."""
    if "gone" in site.data:
        weights = _weights(original)
        for name, flags in _gone(site, original).items():
            weights[name].data.masked_fill_(flags, 0)
        return original
    lists = site.data["lists"]
    for name, dim, size, number in site.data["tensors"]:
        tensor = tensor_at(original, name)
        gone = sorted(set(range(size)) - set(lists[number]))
        if tensor is not None:
            tensor.data.index_fill_(dim, torch.tensor(gone, device=tensor.device), 0)
    for module in original.modules() if site.data["norms"] else ():
        if isinstance(module, nn.TransformerEncoderLayer):  # let it call its norms, which one operator computes else
            vars(module)["activation_relu_or_gelu"] = 0
    for module, size, number in site.data["norms"]:
        under_mode(original.get_submodule(module), KeptStatistics(size, lists[number]))
    for name, length in site.data.get("skipped", ()):
        around, _, last = name.rpartition(".")
        block = original.get_submodule(name)
        setattr(original.get_submodule(around), last, SkippedBlock.skipping(block, length).train(block.training))
    for module, size, number in site.data["routers"]:
        under_mode(original.get_submodule(module), WithoutExperts(size, lists[number]))
    return original


def _mask(site: Site, edit: Edit) -> None:
    """Put the layer behind its masks, and zeros into its weights."""
    weights, gone = _weights(edit.owner), _gone(site, edit.owner)
    masked = masked_module(edit.owner, gone)
    if site.data.get("sparse", False):
        set_sparse(masked)
    edit.replace_module("", masked)
    for name, flags in gone.items():
        step = Mask(name, name, tuple(flags.shape), site.data["gone"][name])
        (zeroed,) = step.forward([weights[name]])
        edit.set_tensor(name, zeroed, step)


def _gone(site: Site, module: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a site; raise MatchFailure where one has not as many zeros as the site was found with."""
    weights, texts = _weights(module), site.data["gone"]
    found = {name: unpacked(text, weights[name].shape).to(weights[name].device) for name, text in texts.items()}
    for name, count in site.data.get("zeros", {}).items():
        if int(found[name].sum()) != count:
            raise MatchFailure(f"the mask of '{name}' has {int(found[name].sum())} zeros, and {count} were chosen")
    return found


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in own_parameters(module).items() if weight is not None}


def _remove(site: Site, edit: Edit) -> None:
    """Take units away; sizes become smaller by what is gone, whatever they are: other sites count along the same."""
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
    for name, length in site.data.get("skipped", ()):
        edit.replace_module(name, SkippedBlock.skipping(edit.owner.get_submodule(name), length))


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
    module, tensor = submodule(edit.owner, path), tensor_at(edit.owner, name)
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
