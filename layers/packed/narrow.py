"""Results of packed layers that stay in bfloat16, where nothing would see the difference."""

from __future__ import annotations

from torch import fx

from ...operators import canonical_name
from .convolution import PackedConvolution
from .linear import PackedLinear

__all__ = ["keep_narrow"]

_CARRYING = frozenset("relu relu6 hardtanh max_pool2d max_pool3d cat identity contiguous".split())
"""What they give of numbers in bfloat16 is in bfloat16, or is rounded to what they give of these in bfloat16."""

_ALONE = 3
"""Arguments of a layer that joins its result with nothing: input, weight and bias."""


def keep_narrow(graph: fx.Graph, *, exactly: bool = False) -> None:
    """Let bfloat16 results of packed layers stay so where only such read them; `exactly`: with equal numbers."""
    _keep_convolutions_narrow(graph)
    _keep_linears_narrow(graph, exactly=exactly)


def _keep_linears_narrow(graph: fx.Graph, *, exactly: bool) -> None:
    calls = {node: node.target for node in graph.nodes if isinstance(node.target, PackedLinear)}
    taking: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    for node, layer in calls.items():
        readers = _readers(node)
        # Something is added to its result or multiplied with it, or it to something.
        is_joined = len(node.args) > _ALONE or any(node in reader.args[1:] for reader in readers)
        are_alike = all(reader in calls and calls[reader].dtype is layer.dtype for reader in readers)
        if readers and are_alike and not (exactly and is_joined):
            kept.add(node)
            taking.update(readers)
    for node, layer in calls.items():
        node.target = layer.narrowed(takes=node in taking, gives=node in kept)


def _keep_convolutions_narrow(graph: fx.Graph) -> None:
    narrow: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        computes = _computes_narrow(node)
        carries = node.op in ("call_function", "call_method") and canonical_name(node) in _CARRYING
        readers = _readers(node) if computes or carries else []
        if readers and all(_takes(reader, node, narrow) for reader in readers):
            narrow.add(node)
    for node in graph.nodes:
        if _computes_narrow(node):
            node.target = node.target.with_narrow(given=node.args[0] in narrow, gives=node in narrow)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return what reads a tensor's numbers, beside its shape."""
    return [user for user in node.users if not (user.target is getattr and user.args[1:] == ("shape",))]


def _computes_narrow(node: fx.Node) -> bool:
    """Say whether a node calls a convolution in bfloat16 that adds nothing to its result."""
    return isinstance(node.target, PackedConvolution) and node.target.is_narrow


def _takes(user: fx.Node, node: fx.Node, narrow: set[fx.Node]) -> bool:
    return user in narrow or (_computes_narrow(user) and node not in user.args[1:] and not user.kwargs)
