"""One site for each layer: its masks are the site's data, and the original with zeros is its reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....compat import own_parameters
from ....errors import MatchFailure
from ....layers.masked import masked_module, set_sparse
from ....passes.rewriting import Edit
from ....passes.sites import Refusal, Site
from ....runtime.state import Mask, packed, unpacked
from ....tracing.program import Program
from ..checks import kept_of
from ..settings import Settings
from .kernels import kernel_for
from .neighbours import order_of_inputs, weakest_of
from .ranking import chosen, scores_of
from .targets import Target, targets

__all__ = ["find", "reference", "rewrite"]


def find(program: Program, options: Settings) -> Iterator[Site | Refusal]:
    """Yield a site for each layer that gets masks, and why others get none."""
    found = [_as_fits(each, options) for each in targets(program, options.keep)]
    yield from (each for each in found if isinstance(each, Refusal))
    wanted = [each for each in found if isinstance(each, Target)]
    orders: dict[str, list[int]] = {}
    masks = _of_neighbours(wanted, options, orders) if options.method == "nm" else _of_all(wanted, options)
    owners: dict[str, list[Target]] = {}
    for target in wanted:
        owners.setdefault(target.owner, []).append(target)
    for owner, mine in owners.items():
        gone = {target.name: masks[target.path] for target in mine}
        zeros = {name: int(flags.sum()) for name, flags in gone.items()}
        data: dict[str, Any] = {"gone": {name: packed(flags) for name, flags in gone.items()}, "zeros": zeros}
        if orders:
            data["order"] = {target.name: orders[target.path] for target in mine}
        detail = _detail(mine, list(gone.values()), options)
        if options.method == "nm":
            data["sparse"], said = kernel_for(program, mine[0], gone[mine[0].name], options)
            detail = f"{detail}, {said}"
        yield Site(program, owner, {}, detail=detail, data=data)


def _as_fits(found: Target | Refusal, options: Settings) -> Target | Refusal:
    """Return a target, or why its inputs make no whole groups."""
    if isinstance(found, Refusal) or options.method != "nm":
        return found
    count, of = found.weight.shape[found.inputs], kept_of(options.pattern)[1]
    reason = f"the {count} inputs of its {found.name} make no whole groups of {of}"
    return Refusal(reason, found.owner) if count % of else found


def _of_all(wanted: Sequence[Target], options: Settings) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good, by its qualified name; what was gone before stays so."""
    gone = {target.path: target.gone for target in wanted}
    if options.schedule != "one_shot":
        return gone
    return chosen({target.path: target.weight for target in wanted}, gone, options, options.amount)


def _of_neighbours(wanted: Sequence[Target], options: Settings, orders: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the same where N of M stay; `orders` is told in which order the inputs of each weight are grouped."""
    weights, gone = {t.path: t.weight for t in wanted}, {t.path: t.gone for t in wanted}
    scores, (kept, of), masks = scores_of(weights, gone, options), kept_of(options.pattern), dict[str, Tensor]()
    for target in wanted:
        order = order_of_inputs(scores[target.path], target.inputs, kept, of) if options.permute else None
        if order is not None:
            orders[target.path] = order.tolist()
        masks[target.path] = weakest_of(scores[target.path], target.inputs, kept, of, order) | gone[target.path]
    return masks


def _detail(targets: Sequence[Target], gone: Sequence[Tensor], options: Settings) -> str:
    """Say how much is gone, by which pattern, and what a schedule plans."""
    zeros, size = sum(int(flags.sum()) for flags in gone), sum(flags.numel() for flags in gone)
    said = f"{zeros} of {size} weights are zero"
    if options.method == "nm":
        return f"{said}, {':'.join(map(str, kept_of(options.pattern)))}"
    if options.schedule != "one_shot":
        share = "of all layers" if options.scope == "global" else "of each layer"
        return f"{said}; a PruningSchedule brings that to {options.amount:g} {share} ({options.schedule})"
    was_zero = all(not target.weight[flags].any() for target, flags in zip(targets, gone, strict=True))
    return f"{said}, as they were: nothing had to be done" if zeros and was_zero else said


def rewrite(site: Site, edit: Edit) -> None:
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


def reference(site: Site, original: nn.Module) -> nn.Module:
    """Return the original with zeros where elements are gone."""
    weights = _weights(original)
    with torch.no_grad():
        for name, flags in _gone(site, original).items():
            weights[name].masked_fill_(flags, 0)
    return original


def _gone(site: Site, module: nn.Module) -> dict[str, Tensor]:
    """Return the masks of a site.

    Raises:
        MatchFailure: one has not as many zeros as the site was found with.
    """
    weights, texts = _weights(module), site.data["gone"]
    found = {name: unpacked(text, weights[name].shape).to(weights[name].device) for name, text in texts.items()}
    for name, count in site.data.get("zeros", {}).items():
        if int(found[name].sum()) != count:
            raise MatchFailure(f"the mask of '{name}' has {int(found[name].sum())} zeros, and {count} were chosen")
    return found


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in own_parameters(module).items() if weight is not None}
