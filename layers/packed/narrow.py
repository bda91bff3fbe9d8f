"""Results of packed convolutions that stay in bfloat16, where nothing would see the difference."""

from __future__ import annotations

from torch import fx

from ...operators import canonical_name
from .convolution import PackedConvolution

__all__ = ["keep_narrow"]

_CARRYING = frozenset("relu relu6 hardtanh max_pool2d max_pool3d cat identity contiguous".split())
"""What they give of numbers in bfloat16 is in bfloat16, or is rounded to what they give of these in bfloat16."""


def keep_narrow(graph: fx.Graph) -> None:
    """Let results of convolutions in bfloat16 stay so where only such convolutions read them.

    They are converted to float32 otherwise, and back by each that reads them, which changes no number: so results are
    the same to the bit.
    """
    narrow: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        computes = _computes_narrow(node)
        carries = node.op in ("call_function", "call_method") and canonical_name(node) in _CARRYING
        if (computes or carries) and node.users and all(_takes(user, node, narrow) for user in node.users):
            narrow.add(node)
    for node in graph.nodes:
        if _computes_narrow(node):
            node.target = node.target.kept(given=node.args[0] in narrow, gives=node in narrow)


def _computes_narrow(node: fx.Node) -> bool:
    """Say whether a node calls a convolution in bfloat16 that adds nothing to its result."""
    return isinstance(node.target, PackedConvolution) and node.target.is_narrow


def _takes(user: fx.Node, node: fx.Node, narrow: set[fx.Node]) -> bool:
    return user in narrow or (_computes_narrow(user) and node not in user.args[1:] and not user.kwargs)
