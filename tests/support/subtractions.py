"""A pass that has many places in small models: it rewrites subtractions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import fx

from fxopt import Edit, Goal, Pass, Program, Refusal, Site, operation

__all__ = ["Subtractions"]


class Subtractions(Pass):
    """Write every subtraction as a call of `torch.sub`, or as what a subclass puts in its place."""

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        for match in program.matches(operation("sub", name="sub")):
            yield match.site()

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        return edit.call(torch.sub, *node.args)

    def rewrite(self, site: Site, edit: Edit) -> None:
        node = edit.graph_node("sub")
        edit.replace(node, self.replacement(site, edit, node))
