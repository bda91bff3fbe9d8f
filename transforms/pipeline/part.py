"""One rank's part of a model as a module of its own: its registers, its state, and what is on other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...compat import own_buffers, own_children, own_parameters
from ...runtime.state import InParts
from .placement import Placement

__all__ = ["Part"]


class Part(InParts):
    """The part of a model that is on this rank, under the original names; the model loses the rest.

    A child that is elsewhere is an `Elsewhere`; attributes of the model (`config`) are read through.
    """

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        super().__init__()
        names = list(model.state_dict())
        parameters = dict(model.named_parameters())
        placement.free(model)
        # The very registries: what is moved, loaded or replaced in one is so in the other.
        vars(self).update(_modules=own_children(model), _parameters=own_parameters(model), _buffers=own_buffers(model))
        vars(self).update(_whole=model, training=model.training)
        self._names, self._elsewhere = names, frozenset(names) - frozenset(model.state_dict())
        own = {id(parameter) for parameter in model.parameters()}
        absent = {name: parameter for name, parameter in parameters.items() if id(parameter) not in own}
        self._absent = {name: nn.Parameter(p.detach().to("meta"), p.requires_grad) for name, p in absent.items()}

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of this rank's stages under the original names; `fxopt.state_dict` gathers all of it."""
        return self._whole.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part, or the whole model's: what belongs to other ranks is passed over."""
        own = {name: value for name, value in state_dict.items() if name not in self._elsewhere}
        return self._whole.load_state_dict(own, strict=strict, assign=assign)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Return the state of all stages; every rank calls this, and gets it all."""
        own: dict[str, Tensor] = {name: tensor.detach() for name, tensor in self.state_dict().items()}
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, {name: (t.shape, t.dtype) for name, t in own.items()})
        found: dict[str, Tensor] = {}
        for rank, forms in enumerate(everyone):
            for name, (shape, dtype) in forms.items():
                if name in found:
                    continue
                has = rank == distributed.get_rank()
                found[name] = own[name].contiguous() if has else torch.empty(shape, dtype=dtype, device=self._device)
                distributed.broadcast(found[name], src=rank)
        return {name: found.pop(name) for name in self._names if name in found} | found

    def parameters_elsewhere(self) -> dict[str, nn.Parameter]:
        """Return, by name, stand-ins for the parameters of other ranks: they have shapes, and no data."""
        return dict(self._absent)

    # -- a module --------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Part:
        """Set the mode of this rank's modules."""
        self._whole.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_whole" in self.__dict__:
                return getattr(self.__dict__["_whole"], name)
            raise

    @property
    def _device(self) -> torch.device:
        tensor = next(self.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device
