"""A check in graphs on how many dimensions a tensor has."""

from __future__ import annotations

from torch import fx, nn

from ...layers.folded import expect_dimensions
from ...operators import info_of, operator_info, operator_of_module
from ...passes.rewriting import Edit
from ...runtime.values import user_class
from .find import source_of

__all__ = ["write_check"]

_KEEPS_DIMENSIONS = (nn.Identity, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Beside what the table of operators knows."""


def write_check(node: fx.Node, count: int, edit: Edit, *, before: fx.Node | None = None) -> None:
    """Let the graph check a tensor's number of dimensions, once, on what it comes from."""
    while (source := _with_as_many(node, edit)) is not None:
        node = source
    checks = (user for asked in node.users for user in asked.users if user.target is expect_dimensions)
    if not any(check.args[1] == count for check in checks):
        # Asked for by an operator of torch, which other passes know not to read the data.
        edit.call(expect_dimensions, edit.call(".dim", node, before=before), count, before=before)


def _with_as_many(node: fx.Node, edit: Edit) -> fx.Node | None:
    """Return what a tensor is computed of, if that is bound to have as many dimensions."""
    if node.op == "call_module":
        kind = user_class(type(edit.program.callee(edit.site.owner, node)))
        info, known = operator_info(operator_of_module(kind)), kind in _KEEPS_DIMENSIONS
    else:
        info, known = info_of(node), False
    alone = len(node.all_input_nodes) == 1 and (info.elementwise or known)
    return source_of(node) if alone or info.keeps_rank else None
