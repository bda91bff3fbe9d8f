"""Parameters as DTensors, of which modules compute with what this process has: whole, or the part that is dealt to it.
Then all that an optimizer trains is of one kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...compat import all_modules, own_parameters
from ...errors import StateError, UsageError
from ...runtime.values import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

__all__ = ["Layout", "deal_parameter", "replicate_parameters"]

_Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


@dataclass(frozen=True)
class Layout:
    """How the processes of a mesh have a parameter; `average`, if any, is done to the gradient of each one's part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    average: Callable[[Tensor], Tensor] | None = None


def deal_parameter(holder: nn.Module, name: str, layout: Layout, readers: Iterable[nn.Module]) -> None:
    """Make a DTensor of a parameter; while its holder or a reader runs, it is there as the part of this process."""
    from torch.distributed.tensor import distribute_tensor

    parameter = cast("nn.Parameter", own_parameters(holder)[name])
    # Every process has the whole tensor: nothing needs to be sent. A part must not keep the memory of the whole.
    part: Any = distribute_tensor(parameter.detach(), layout.mesh, layout.placements, src_data_rank=None)
    made = nn.Parameter(part.clone(), parameter.requires_grad)
    vars(made).update(vars(parameter))
    own_parameters(holder)[name] = made
    for reader in dict.fromkeys((holder, *readers)):
        _hook(reader, {(holder, name): layout})


def replicate_parameters(
    model: nn.Module, mesh: DeviceMesh, readers: Callable[[nn.Parameter], Iterable[nn.Module]]
) -> None:
    """Make DTensors of a model's trained parameters that are none, each whole on every process of `mesh`.

    The code of a model goes on with plain tensors: while a module runs, it has those in the place of its own
    parameters, and of others that it is among the `readers` of.
    """
    from torch.distributed.tensor import DTensor, Replicate

    layout = Layout(mesh, (Replicate(),))
    made = dict[nn.Parameter, nn.Parameter]()
    places = defaultdict[nn.Module, dict[_Place, Layout]](dict)
    for holder in all_modules(model):
        for name, parameter in own_parameters(holder).items():
            if parameter is None or is_sharded(parameter) or not parameter.requires_grad:
                continue
            _check_embedding(holder)
            if parameter not in made:
                made[parameter] = nn.Parameter(DTensor.from_local(parameter.detach(), mesh, layout.placements))
                vars(made[parameter]).update(vars(parameter))
            own_parameters(holder)[name] = made[parameter]
            for reader in (holder, *readers(parameter)):
                places[reader][holder, name] = layout
    for reader, held in places.items():
        _hook(reader, held)


def _check_embedding(holder: nn.Module) -> None:
    """Refuse what torch's DTensors are not: written to by a call, or with gradients that are sparse."""
    if isinstance(holder, (nn.Embedding, nn.EmbeddingBag)) and (holder.sparse or holder.max_norm is not None):
        option = "sparse=True" if holder.sparse else f"max_norm={holder.max_norm}"
        raise UsageError(
            f"an embedding of {holder.num_embeddings} rows has {option}, which does not go with parameters on a mesh; "
            "make it without, or freeze its weight"
        )


def _parameter_at(holder: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return own_parameters(holder)[name]
    except KeyError as error:
        raise StateError(
            f"'{name}' is no parameter of a {type(holder).__name__} any more (parametrized, or deleted); change the "
            "plain model, then optimize it again"
        ) from error


def _hook(reader: nn.Module, places: Mapping[_Place, Layout]) -> None:
    plain = _Plain(places)
    reader.register_forward_pre_hook(plain.before)
    reader.register_forward_hook(plain.after, always_call=True)


class _Plain:
    """Puts plain tensors in the place of some DTensors while a module runs: where FSDP2 has gathered what it shards."""

    def __init__(self, places: Mapping[_Place, Layout]) -> None:
        self._places = places
        self._replaced: list[list[tuple[_Place, nn.Parameter]]] = []  # by call: a module may be called inside itself
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # without gradients, the same tensor at each call

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put them there; a hook before the forward."""
        replaced = list[tuple[_Place, nn.Parameter]]()
        self._replaced.append(replaced)
        for place, layout in self._places.items():
            tensor: Any = _parameter_at(*place)
            if is_sharded(tensor) and tuple(tensor.placements) == layout.placements:
                replaced.append((place, tensor))
                cast("dict[str, Tensor]", own_parameters(place[0]))[place[1]] = self._plain(tensor, layout)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take them away again; a hook after the forward."""
        for (holder, name), parameter in self._replaced.pop():
            own_parameters(holder)[name] = parameter

    def _plain(self, parameter: nn.Parameter, layout: Layout) -> Tensor:
        if torch.is_grad_enabled():
            part: Tensor = cast("Any", parameter).to_local()
            if layout.average is not None and part.requires_grad:
                part.register_hook(layout.average)
            return part
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            known = self._known[id(parameter)] = parameter, cast("Any", parameter).to_local()
        return known[1]
