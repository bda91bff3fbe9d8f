"""Parameters that all processes of a mesh have whole, as DTensors: then all that an optimizer trains is of one kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ...compat import all_modules, own_parameters
from ...runtime.values import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["replicate_parameters"]

_Place = tuple[nn.Module, str]
"""A module, and the name of a parameter in it."""


def replicate_parameters(
    model: nn.Module, mesh: DeviceMesh, readers: Callable[[nn.Parameter], Iterable[nn.Module]]
) -> None:
    """Make DTensors of a model's trained parameters that are none, each whole on every process of `mesh`.

    The code of a model goes on with plain tensors: while a module runs, it has those in the place of its own
    parameters, and of others that it is among the `readers` of.
    """
    from torch.distributed.tensor import DTensor, Replicate

    made = dict[nn.Parameter, nn.Parameter]()
    places = defaultdict[nn.Module, dict[_Place, None]](dict)
    for holder in all_modules(model):
        for name, parameter in own_parameters(holder).items():
            if parameter is None or is_sharded(parameter) or not parameter.requires_grad:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(DTensor.from_local(parameter.detach(), mesh, [Replicate()]))
                vars(made[parameter]).update(vars(parameter))
            own_parameters(holder)[name] = made[parameter]
            for reader in (holder, *readers(parameter)):
                places[reader][holder, name] = None
    for reader, held in places.items():
        plain = _Plain(list(held))
        reader.register_forward_pre_hook(plain.before)
        reader.register_forward_hook(plain.after, always_call=True)


def _is_whole(tensor: object) -> bool:
    """Say whether a tensor is a DTensor of which every process has all: FSDP2 has gathered it, if it is sharded."""
    return is_sharded(tensor) and all(placement.is_replicate() for placement in cast("Any", tensor).placements)


class _Plain:
    """Puts plain tensors in the place of some DTensors while a module runs."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self._places = places
        self._replaced: list[list[tuple[_Place, nn.Parameter]]] = []  # by call: a module may be called inside itself
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # without gradients, the same tensor at each call

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put them there; a hook before the forward."""
        held = [((holder, name), own_parameters(holder)[name]) for holder, name in self._places]
        replaced = [(place, cast("nn.Parameter", tensor)) for place, tensor in held if _is_whole(tensor)]
        for (holder, name), parameter in replaced:
            cast("dict[str, Tensor]", own_parameters(holder))[name] = self._plain(parameter)
        self._replaced.append(replaced)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take them away again; a hook after the forward."""
        for (holder, name), parameter in self._replaced.pop():
            own_parameters(holder)[name] = parameter

    def _plain(self, parameter: nn.Parameter) -> Tensor:
        if torch.is_grad_enabled():
            return cast("Any", parameter).to_local()
        known = self._known.get(id(parameter))
        if known is None or known[0] is not parameter:
            known = self._known[id(parameter)] = parameter, cast("Any", parameter).to_local()
        return known[1]
