"""Who needs tensors to lie in memory in the order of their dimensions: packed convolutions lay channels last."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass

from torch import fx

from ...layers.packed import PackedConvolution
from ...operators import canonical_name, operator_info, operator_of_module
from ...passes.rewriting import obstacle_to_inlining
from ...runtime.graphs import capture_of
from ...runtime.values import user_class
from ...tracing.program import Program
from .layers import layer_at, shape_of

__all__ = ["readers_in"]

_KEEPING = frozenset(
    "packed conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d batch_norm group_norm layer_norm "
    "rms_norm instance_norm local_response_norm prelu dropout dropout1d dropout2d dropout3d alpha_dropout identity "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
    "adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d interpolate upsample pad "
    "pixel_shuffle pixel_unshuffle softmax log_softmax normalize glu cumsum amax amin logsumexp mean prod sum norm std "
    "var flip roll cat stack chunk split flatten unsqueeze squeeze expand expand_as getitem narrow reshape permute "
    "transpose unbind laid_last to clone detach float double half bfloat16 type type_as masked_fill".split()
)
"""They take tensors in any order of memory; results may lie like what they are given."""

_ANEW = frozenset("linear matmul bmm mm einsum contiguous size shape dim numel len setitem argmax argmin item".split())
"""They take tensors in any order of memory; what they give lies as it did."""

_LEAST = 3
"""What a module is given with fewer dimensions is no image."""


def readers_in(
    program: Program, packed: Mapping[tuple[str, int], Collection[fx.Node]]
) -> dict[tuple[str, int], dict[str, str]]:
    """Return, by graph, who reads images or parts of them and may need them in order, and what they read.

    Args:
        program: the model.
        packed: by graph, the nodes whose results will lie otherwise.

    Returns:
        By graph, names of nodes by labels: `reader.N` reads `value.N`; and the graph returns `output.N`.
    """
    found: dict[tuple[str, int], dict[str, str]] = {}
    for owner, capture in program.captures.items():
        for number, specialization in enumerate(capture.specializations):
            if specialization.runs_in_mode(program.module(owner)):
                graph = _Graph(program, owner, specialization.graph, packed.get((owner, number), ()))
                labels = dict(graph.labels())
                if labels:
                    found[owner, number] = labels
    return found


@dataclass
class _Graph:
    """A graph, and which of its tensors may lie otherwise than they did.

    Attributes:
        program, owner, graph: where it is.
        packed: the nodes whose results will lie otherwise.
    """

    program: Program
    owner: str
    graph: fx.Graph
    packed: Collection[fx.Node]
    _odd: set[fx.Node] = field(default_factory=set[fx.Node])

    def labels(self) -> Iterator[tuple[str, str]]:
        """Yield the names of readers and of what they read, by labels."""
        count = 0
        for node in self.graph.nodes:
            read = [each for each in node.all_input_nodes if each in self._odd]
            if node.op == "output":
                inner = read if self._is_read_in_order() else []
                yield from ((f"output.{i}", each.name) for i, each in enumerate(inner) if shape_of(each) is not None)
            elif self._takes_any(node):
                if self._lies_otherwise(node, read):
                    self._odd.add(node)
            else:
                for each in (each for each in read if shape_of(each) is not None):
                    yield f"reader.{count}", node.name
                    yield f"value.{count}", each.name
                    count += 1

    def _lies_otherwise(self, node: fx.Node, read: list[fx.Node]) -> bool:
        if node.op == "placeholder" or self._is_captured(node):
            shape = shape_of(node)  # of other graphs, that is, which may have packed convolutions
            return (bool(self.owner) or node.op != "placeholder") and (shape is None or len(shape) >= _LEAST)
        is_packed = node in self.packed or isinstance(node.target, PackedConvolution)
        return is_packed or (bool(read) and self._name(node) not in _ANEW)

    def _takes_any(self, node: fx.Node) -> bool:
        """Say whether a node takes tensors in any order of memory."""
        if node.op in ("placeholder", "get_attr") or self._is_captured(node):
            return True
        if _is_container(node):
            return not self._is_read_in_order()
        name = self._name(node)
        if name is None:
            return layer_at(self.program, self.owner, node) is not None
        return operator_info(name).elementwise or name in _KEEPING or name in _ANEW

    def _name(self, node: fx.Node) -> str | None:
        """Return the operator that a node computes; None where it may do more."""
        if node.op != "call_module":
            return canonical_name(node)
        module = self.program.callee(self.owner, node)
        return None if obstacle_to_inlining(module) else operator_of_module(user_class(type(module)))

    def _is_captured(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        capture = capture_of(self.program.callee(self.owner, node))
        return capture is not None and bool(capture.specializations)

    def _is_read_in_order(self) -> bool:
        """Say whether results are the model's, or go to a module that runs its own forward."""
        around = [name for name in self.program.opaque if not name or self.owner.startswith(f"{name}.")]
        return not self.owner or bool(around)


def _is_container(node: fx.Node) -> bool:
    """Say whether a node makes an object that only holds results, such as a `ModelOutput`."""
    return node.op == "call_function" and isinstance(node.target, type) and is_dataclass(node.target)
