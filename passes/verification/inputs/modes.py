"""What graphs say of how a module must be checked: in which modes, and whether data picks what it computes."""

from __future__ import annotations

from torch import fx, nn

from ....compat import all_modules, own_children
from ....runtime.graphs import capture_of
from ....runtime.values import user_class
from ...sites import Phase

__all__ = ["depends_on_mode", "modes_to_check", "picks_by_data", "shows_modes"]

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
        return len(capture.specializations) > 1 or _asks_for_mode(module)
    base = user_class(type(module))
    if base in (nn.MultiheadAttention, nn.RReLU):
        return True
    return base not in _STEADY and base.__module__ != "torch.nn.modules.activation"


def _asks_for_mode(module: nn.Module) -> bool:
    """Say whether a graph of a module reads the mode."""
    capture = capture_of(module)
    graphs = [] if capture is None else [specialization.graph for specialization in capture.specializations]
    return any(
        node.op == "get_attr" and str(node.target).endswith("training") for graph in graphs for node in graph.nodes
    )


def shows_modes(original: nn.Module, captured: nn.Module) -> bool:
    """Say whether graphs ask for the mode, or layers of torch that have none: other classes may, and need not."""
    leaves = (each for each in all_modules(original) if not own_children(each))
    layers = (each for each in leaves if user_class(type(each)).__module__.startswith("torch.nn."))
    graphs = (each for each in all_modules(captured) if capture_of(each) is not None)
    return any(map(_reads_mode, graphs)) or any(map(_reads_mode, layers))


def modes_to_check(
    module: nn.Module, phase: Phase, training: bool, rewritten: nn.Module | None = None
) -> list[bool | None]:
    """Return the modes for verification: True for training, False for evaluation, None for the flags as they are.
    Graphs of a `rewritten` module may ask for the mode where the module does not.
    """
    if len({submodule.training for submodule in all_modules(module)}) > 1:
        return [None]
    covered = {True: phase.covers_training, False: phase.covers_evaluation}
    modes: list[bool | None] = [mode for mode in (training, not training) if covered[mode]]
    asks = rewritten is not None and any(map(_asks_for_mode, all_modules(rewritten)))
    return modes if asks or depends_on_mode(module) else modes[:1]


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
