"""What graphs say of how a module must be checked: in which modes, and whether data picks what it computes."""

from __future__ import annotations

from torch import fx, nn

from ....compat import all_modules
from ....runtime.graphs import capture_of
from ....runtime.values import user_class
from ...sites import Phase

__all__ = ["depends_on_mode", "modes_to_check", "picks_by_data"]

_STEADY = (
    nn.Linear, nn.Bilinear, nn.Identity, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Flatten,
    nn.Unflatten, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.ReLU, nn.GELU, nn.Tanh,
    nn.Sigmoid, nn.SiLU, nn.ELU, nn.Softmax, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
)  # fmt: skip


_PICKING = frozenset({"argmax", "argsort", "bincount", "nonzero", "one_hot", "sort", "topk"})


def depends_on_mode(module: nn.Module) -> bool:
    """Say whether a module may compute something else in training than in evaluation."""
    return any(_reads_mode(submodule) for submodule in all_modules(module))


def _reads_mode(module: nn.Module) -> bool:
    capture = capture_of(module)
    if capture is not None:
        graphs = [specialization.graph for specialization in capture.specializations]
        return len(graphs) > 1 or any(
            node.op == "get_attr" and str(node.target).endswith("training") for graph in graphs for node in graph.nodes
        )
    base = user_class(type(module))
    if base in (nn.MultiheadAttention, nn.RReLU):
        return True
    return base not in _STEADY and base.__module__ != "torch.nn.modules.activation"


def modes_to_check(module: nn.Module, phase: Phase, training: bool) -> list[bool | None]:
    """Return the modes for verification: True for training, False for evaluation, None for the flags as they are."""
    if len({submodule.training for submodule in all_modules(module)}) > 1:
        return [None]
    covered = {True: phase.covers_training, False: phase.covers_evaluation}
    modes: list[bool | None] = [mode for mode in (training, not training) if covered[mode]]
    return modes if depends_on_mode(module) else modes[:1]


def picks_by_data(module: nn.Module) -> bool:
    """Say whether a graph in the module holds an operation that is used to route rows by what they hold."""
    captures = (capture_of(child) for child in module.modules())
    graphs = (each.graph for capture in captures if capture is not None for each in capture.specializations)
    return any(_picks(node) for graph in graphs for node in graph.nodes)


def _picks(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "where":
        return len(node.args) == 1
    if name == "max":
        return len(node.args) + len(node.kwargs) > 1
    return node.op != "call_module" and name in _PICKING
