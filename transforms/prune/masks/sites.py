"""One site for each layer: its masks are the site's data, and the original with zeros is its reference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ....compat import own_parameters
from ....layers.masked import masked_module
from ....passes.rewriting import Edit
from ....passes.sites import Refusal, Site
from ....passes.state import Mask, packed, unpacked
from ....tracing.program import Program
from ..checks import Options
from .ranking import chosen
from .targets import Target, targets

__all__ = ["find", "reference", "rewrite"]


def find(program: Program, options: Options) -> Iterator[Site | Refusal]:
    """Yield a site for each layer that gets masks, and why others get none."""
    found = list(targets(program, options.keep))
    yield from (each for each in found if isinstance(each, Refusal))
    wanted = [each for each in found if isinstance(each, Target)]
    yield from sites(program, wanted, gone(wanted, options))


def gone(wanted: list[Target], options: Options) -> dict[str, Tensor]:
    """Return which elements of each weight are zero for good, by its qualified name; what was gone before stays so."""
    weights = {target.path: target.weight for target in wanted}
    before = {target.path: target.gone for target in wanted}
    if options.schedule != "one_shot":
        return before
    return chosen(weights, before, options, options.amount)


def sites(program: Program, wanted: list[Target], masks: Mapping[str, Tensor]) -> Iterator[Site]:
    """Yield the sites of the layers whose weights have masks; the masks are their data."""
    owners = dict.fromkeys(target.owner for target in wanted if target.path in masks)
    for owner in owners:
        mine = {target.name: masks[target.path] for target in wanted if target.owner == owner}
        size, zeros = sum(m.numel() for m in mine.values()), sum(int(m.sum()) for m in mine.values())
        detail = f"{zeros} of {size} weights are zero"
        yield Site(program, owner, {}, detail=detail, data={"gone": {name: packed(m) for name, m in mine.items()}})


def rewrite(site: Site, edit: Edit) -> None:
    """Put the layer behind its masks, and zeros into its weights."""
    weights, gone = _weights(edit.owner), _gone(site, edit.owner)
    edit.replace_module("", masked_module(edit.owner, gone))
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
    weights, texts = _weights(module), site.data["gone"]
    return {name: unpacked(text, weights[name].shape).to(weights[name].device) for name, text in texts.items()}


def _weights(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in own_parameters(module).items() if weight is not None}
