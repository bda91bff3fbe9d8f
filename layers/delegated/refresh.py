"""Engines take the numbers of a whole model anew."""

from __future__ import annotations

import operator

from torch import fx, nn

from ...compat import all_modules
from ...runtime.graphs import specializations_of
from .region import DelegatedRegion

__all__ = ["refresh"]


def refresh(model: nn.Module) -> None:
    """Let engines take the parameters and buffers of a model as they are now."""
    for module in all_modules(model):
        for node in (node for each in specializations_of(module) for node in each.graph.nodes):
            if isinstance(node.target, DelegatedRegion):
                read = [each for each in node.args[node.target.inputs :] if isinstance(each, fx.Node)]
                node.target.refresh([operator.attrgetter(str(each.target))(module) for each in read])
