"""Which layers can be replaced at all, whatever the scheme, and why others stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ...compat import has_hooks, has_state_hooks, own_parameters, submodule
from ...compat.packed import Geometry
from ...layers.folded import Fold, Folds
from ...layers.members import FusedMembers, stacked_weights
from ...layers.quantized import ASKED, FakeQuantized, QuantizedLayer, is_quantized_by_torch
from ...operators import Derived, why_not_plain
from ...passes.contract import word_for
from ...passes.rewriting import Layer, holds_inputs_first, layer_of
from ...passes.sites import Refusal
from ...runtime.record import record_of
from ...runtime.values import qualified, user_class
from ...tracing.program import Program, TensorOwners, TensorReads

__all__ = [
    "CONVOLUTIONS", "Candidate", "already_quantized", "candidates", "even_geometry", "is_candidate", "is_tied",
    "linear_of", "linears", "outputs_first", "product_of", "reason_against_layer", "reason_against_module", "weight_of",
]  # fmt: skip

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Those that `int8_static` takes."""

_QUANTIZED = "it is quantized already; for another scheme, begin with the model as it was, or with fxopt.restore(model)"
_FOLDED = (
    "a batch norm was folded into it; int8_static folds norms itself: begin with the model as it was, or with "
    "fxopt.restore(model), and list quantize{scheme=int8_static} before fold_batchnorm or the preset that has it"
)
_SMALL = (torch.int8, torch.uint8)
"""What quantized layers of other packages hold weights in."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PATCHES = 1 << 14
"""So many rows of a convolution's input are looked at in a call, of all images alike."""


_ONE_FUNCTION = "torch computes it as one function of its weights, in which no layer can be replaced"

_EXPERTS = "its experts' weights are stacked ({}), and there is no kernel for batched products of small numbers"

_STACKED = "the weights of its members are stacked, and there is no kernel for batched products of small numbers"


_TRAINED = (
    "it was trained for int8_static, which takes over its ranges: list quantize{scheme=int8_static} before "
    "fold_batchnorm or the preset that has it"
)

_OF_GEOMETRIC = "it is a Linear of torch_geometric; only nn.Linear and the Conv1D of transformers are replaced"


@dataclass(frozen=True)
class Candidate:
    """A layer to replace, with the weights to quantize by name; `stays`: a weight that others have too may stay."""

    name: str
    module: nn.Module
    weights: Mapping[str, Tensor]
    detail: str = ""
    reason: str = ""
    stays: bool = False

    @property
    def size(self) -> int:
        return sum(weight.numel() for weight in self.weights.values())


def already_quantized(keep: Sequence[str], program: Program) -> Iterator[Refusal]:
    """Yield why layers stay as they are that were quantized before this run."""
    earlier = record_of(program.model)
    steps = () if earlier is None else earlier.state_map.steps
    names = dict.fromkeys(target.rpartition(".")[0] for step in steps for target in step.targets)
    for name in names:
        if isinstance(submodule(program.model, name), QuantizedLayer) and word_for(keep, name, program) is None:
            yield Refusal(_QUANTIZED, name)
    for module in program.names.distinct:
        kind, weight = user_class(type(module)), own_parameters(module).get("weight")
        if isinstance(module, QuantizedLayer) or not hasattr(module, "weight"):
            continue
        if is_quantized_by_torch(module) or (weight is not None and weight.dtype in _SMALL):
            name = program.names.name(module)
            if word_for(keep, name, program) is None:
                yield Refusal(f"it is a {kind.__name__}, whose weight is quantized already", name)


def reason_against_layer(layer: Candidate, program: Program) -> str:
    """Return why a layer must stay as it is, or ""."""
    if not layer.name:
        return "the whole model is this layer, and nothing can be put in its place"
    if has_hooks(layer.module) or has_state_hooks(layer.module):
        return "it has hooks, which the layer in its place would not have"
    return next(filter(None, (_weight_problem(layer, name, program) for name in layer.weights)), "")


def tied_to(name: str, program: Program) -> list[str]:
    """Return the other names of a tensor."""
    return [other for other in program.analyses[TensorOwners].names(name) if other != name]


def _weight_problem(layer: Candidate, name: str, program: Program) -> str:
    weight, tensor = qualified(layer.name, name), layer.weights[name]
    tied = tied_to(weight, program)
    if tied:
        return _value_problem(f"'{weight}'", tensor) if layer.stays else f"its weight is tied to '{tied[0]}'"
    reads = program.analyses[TensorReads]
    for reader in reads.readers_of(tensor):
        users = [user for node in reads.nodes_of(tensor, reader) for user in node.users]
        derived = (user.target.function for user in users if isinstance(user.target, Derived))
        if any(isinstance(function, (Fold, Folds)) for function in derived):
            return _FOLDED
        only_asks = all(user.target is getattr and user.args[1] in ASKED for user in users)  # for its type and the like
        if reader != layer.name and not (name == "weight" and only_asks):
            return f"'{reader}' reads its weight"
    return _value_problem(f"'{weight}'", tensor)


def _value_problem(name: str, tensor: Tensor) -> str:
    """Return what keeps a weight from being quantized, or ""."""
    if tensor.dtype not in _DTYPES:
        return f"{name} is of {str(tensor.dtype).removeprefix('torch.')}; convert it to float32, bfloat16 or float16"
    if reason := why_not_plain(tensor):
        return f"{name} {reason}"
    if not tensor.numel():
        return f"{name} is empty"
    return "" if tensor.is_meta or tensor.isfinite().all() else f"{name} has elements that are not finite"


# -- linear layers -------------------------------------------------------------------------------------------------


def linear_of(module: nn.Module) -> Layer | None:
    """Return a module as a linear layer: `nn.Linear` itself, or the `Conv1D` of transformers; None for any other."""
    layer = layer_of(module)
    if layer is None or user_class(type(module)) is not layer.base:
        return None
    return layer if layer.is_linear and len(layer.shape) == 2 else None


def weight_of(module: nn.Module) -> nn.Parameter:
    """Return the weight of a layer."""
    return cast("nn.Parameter", own_parameters(module)["weight"])


def outputs_first(module: nn.Module, weight: Tensor) -> Tensor:
    """Return the weight of a layer with the outputs in its first dimension."""
    return weight.t() if holds_inputs_first(module) else weight


def is_tied(module: nn.Module, program: Program) -> bool:
    """Say whether the weight of a layer has other names, too."""
    return bool(tied_to(qualified(program.names.name(module), "weight"), program))


def linears(program: Program, reason_of: Callable[[Layer, Tensor], str], *, stays: bool = False) -> list[Candidate]:
    """Return each linear layer, and what seems to hold some; `reason_of` says why the scheme cannot take a weight."""
    found: list[Candidate] = []
    for module in program.names.distinct:
        linear, name = linear_of(module), program.names.name(module)
        if linear is None:
            reason = _objection(module)
            found += [Candidate(name, module, {}, reason=reason)] if reason else []
            continue
        weight, (inputs, outputs) = weight_of(module), linear.channels
        detail, wrong = f"{inputs} to {outputs}", reason_of(linear, weight)
        found.append(Candidate(name, module, {"weight": weight}, detail, wrong, stays and not linear.inputs_first))
    return found


def _objection(module: nn.Module) -> str:
    """Return why linear layers that a module is made of cannot be replaced, or "" where it holds none."""
    if isinstance(module, FusedMembers):
        return _STACKED
    if isinstance(module, FakeQuantized):
        return _TRAINED
    if isinstance(module, nn.MultiheadAttention):
        return _ONE_FUNCTION
    kind = user_class(type(module))
    if kind.__name__ == "Linear" and kind.__module__.startswith("torch_geometric."):
        return _OF_GEOMETRIC
    is_other = isinstance(module, nn.Bilinear) or layer_of(module) is not None
    names = [] if is_other else stacked_weights(module)
    return _EXPERTS.format(" and ".join(names)) if names else ""


# -- layers with static ranges ---------------------------------------------------------------------------------------


def is_candidate(module: nn.Module) -> bool:
    """Say whether a module is a linear layer or a convolution, or one that was trained to be quantized."""
    is_plain = user_class(type(module)) in CONVOLUTIONS or linear_of(module) is not None
    return is_plain or isinstance(module, FakeQuantized)


def candidates(
    keep: Sequence[str], program: Program, *, runs_here: bool = True, stays: bool = False
) -> tuple[dict[str, nn.Module], list[Refusal]]:
    """Return the layers that can be quantized, by name, on the CPU here if `runs_here`, and why others cannot; `stays`:
    the weight of a linear layer that others have too may stay.
    """
    layers, refused = dict[str, nn.Module](), list(already_quantized(keep, program))
    for module in program.names.distinct:
        name = program.names.name(module)
        if not is_candidate(module) or word_for(keep, name, program) is not None:
            continue
        reason = reason_against_module(name, module, program, runs_here=runs_here, stays=stays)
        if reason:
            refused.append(Refusal(reason, name or "(root)"))
        else:
            layers[name] = module
    return layers, refused


def product_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a function from a convolution's input to the rows that its weight multiplies, [rows, inputs]: of many
    about `_PATCHES`. None where the weight is not [outputs, inputs]: of several groups, or of uneven padding.
    """
    layer, geometry = layer_of(module), even_geometry(module)
    if layer is None or geometry is None or not layer.rank or geometry.groups != 1:
        return None
    around = [each for zeros in reversed(geometry.padding) for each in (zeros, zeros)]

    def patches(image: Tensor) -> Tensor:
        found = nn.functional.pad(image, around)
        for dim, size in enumerate(layer.kernel, 1):
            step, between = geometry.stride[dim - 1], geometry.dilation[dim - 1]
            found = found.unfold(dim, (size - 1) * between + 1, step)[..., ::between]
        return found.movedim(0, layer.rank).flatten(layer.rank).flatten(0, layer.rank - 1)

    def rows(x: Tensor) -> Tensor:
        images = x.reshape(-1, *x.shape[-1 - layer.rank :])
        every = -(-len(images) * len(patches(images[0])) // _PATCHES)
        return torch.cat([patches(image)[::every] for image in images])

    return rows


def even_geometry(module: nn.Module) -> Geometry | None:
    """Return the settings of a convolution; None where it pads with anything but as many zeros on both sides."""
    layer = layer_of(module)
    geometry = None if layer is None else layer.geometry
    return None if geometry is None or geometry.padding_after is not None else geometry


def reason_against_module(
    name: str, module: nn.Module, program: Program, *, runs_here: bool = True, stays: bool = False
) -> str:
    """Return why a candidate must stay as it is, or ""; see `candidates`."""
    weight = cast("nn.Parameter", cast("nn.Linear", module).weight)
    linear = linear_of(module)
    may_stay = stays and linear is not None and not linear.inputs_first
    reason = reason_against_layer(Candidate(name, module, {"weight": weight}, stays=may_stay), program)
    if reason:
        return reason
    if runs_here and weight.device.type != "cpu":
        return f"it is on {weight.device.type}, and the kernels are for CPUs"
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return f"its weight is of {str(weight.dtype).removeprefix('torch.')}; the kernels take float32 and bfloat16"
    if isinstance(module, CONVOLUTIONS) and even_geometry(module) is None:
        return "its padding is not the same number of zeros on both sides"
    return ""
