"""What a model holds, by name: which modules and tensors of it go into a standalone archive, and as what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..compat import has_hooks, own_buffers, own_parameters, transient_buffers
from ..errors import ArchiveError
from ..layers.ensemble import VectorizedMembers
from ..tracing.dynamic import user_class
from ..tracing.names import ModelNames
from ..tracing.regions import ContextRegion, Region
from .flat_tree import VECTORIZED, HeldModule, HeldTensor, strides_of
from .held_members import held_member
from .nn_modules import class_name, settings_of

__all__ = ["Found", "Holdings"]

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Found(NamedTuple):
    """What a dotted name leads to.

    Attributes:
        name: of the tensor, or of the mode ("encoder.training").
        tensor: None for a mode.
        rest: the attributes behind it (of "weight.shape": "shape").
    """

    name: str
    tensor: Tensor | None
    rest: tuple[str, ...]


class Holdings:
    """Look things up in a model, and note what its graphs use.

    Attributes:
        names: of the modules.
        attributes: the tensors and modes that graphs read.
        modules: the modules that graphs call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = ModelNames(model)
        self.attributes: dict[str, None] = {}
        self.modules: dict[str, None] = {}
        self._constants: dict[str, Tensor] = {}
        self.kind_of = cache(self._kind_of)

    def check_callable(self, module: nn.Module) -> None:
        """Make sure that calling a module does nothing but run its forward.

        Raises:
            ArchiveError: if it does; the message is a clause.
        """
        if isinstance(module, ContextRegion):
            raise ArchiveError(f"its forward opens {module.context}, which archives do not")
        if has_hooks(module):
            raise ArchiveError("it has hooks, which no graph runs")
        if parametrize.is_parametrized(module):
            raise ArchiveError("it has parametrizations")
        if "forward" in vars(module):
            raise ArchiveError("its forward was replaced on the instance")
        if user_class(type(module)).__call__ is not nn.Module.__call__:
            raise ArchiveError(f"{type(module).__name__} has a __call__ of its own")

    def takes_gradients(self, name: str) -> bool:
        """Tell whether the model holds a parameter under a name, or another tensor that wants gradients."""
        path, _, own = name.rpartition(".")
        held = getattr(self.names.modules.get(path), own, None)
        return isinstance(held, nn.Parameter) or (isinstance(held, Tensor) and held.requires_grad)

    def read(self, name: str) -> str:
        """Note that a graph reads a tensor or mode, and return its name."""
        self.attributes[name] = None
        return name

    def called(self, name: str) -> str:
        """Note that a graph calls a module, and return its name."""
        self.modules[name] = None
        return name

    def look_up(self, name: str) -> Found:
        """Return the tensor or mode that a dotted name leads to.

        Raises:
            ArchiveError: if it leads to something else; the message is a clause.
        """
        steps = name.split(".")
        for count in range(len(steps) - 1, -1, -1):
            module = self.names.modules.get(".".join(steps[:count]))
            if module is not None:
                return self._attribute(module, steps[count], tuple(steps[count + 1 :]))
        raise ArchiveError(f"it reads self.{name}, which is not there")

    def _attribute(self, module: nn.Module, key: str, rest: tuple[str, ...]) -> Found:
        home = self.names.name(module)
        name = f"{home}.{key}" if home else key
        if key == "training":
            return Found(name, None, rest)
        held: Mapping[str, Any] = {**vars(module), **own_parameters(module), **own_buffers(module)}
        tensor = held.get(key)
        if not isinstance(tensor, Tensor):
            raise ArchiveError(f"it reads {name!r}, which is neither a parameter nor a buffer nor a plain tensor")
        if key in vars(module):
            self._constants[name] = tensor
        return Found(name, tensor, rest)

    # -- what goes into the archive --------------------------------------------------------------------------------

    def _kind_of(self, name: str) -> HeldModule | None:
        """Return how archives hold a module that is called, or None if they do not."""
        module = self.names.modules[name]
        if isinstance(module, VectorizedMembers):
            member = held_member(module.member, len(module.in_dims))
            settings = {"in_dims": module.in_dims, "structured": module.structured}
            return member and HeldModule(name, None, VECTORIZED, settings, member)
        settings = settings_of(module)
        return None if settings is None else HeldModule(name, None, class_name(module), settings)

    def held_modules(self) -> list[HeldModule]:
        """Return every module, but those that make or borrow others' parts."""
        held: list[HeldModule] = []
        closed: set[str] = set()
        for name, module in self.names.modules.items():
            first = self.names.name(module)
            if _home(name) in closed or isinstance(module, Region):
                closed.add(name)
                continue
            kind = self.kind_of(first) if name else None
            if first != name:
                held.append(HeldModule(name, first))
            else:
                held.append(kind or HeldModule(name))
            if first != name or kind is not None:
                closed.add(name)
        return held

    def held_tensors(self) -> tuple[list[HeldTensor], dict[str, Tensor]]:
        """Return every parameter, buffer and constant that a graph reads, and the tensors to store.

        Raises:
            ArchiveError: if one is of a kind of its own.
        """
        held: list[HeldTensor] = []
        first: dict[int, str] = {}
        stored: dict[str, Tensor] = {}
        for name, tensor, flag in self._tensors():
            if type(tensor) not in _PLAIN_TENSORS:
                raise ArchiveError(f"{name!r} is a {type(tensor).__name__}, not a plain tensor")
            known = first.setdefault(id(tensor), name)
            same = known if known != name else None
            strides = None if same is not None or tensor.is_contiguous() else strides_of(tensor)
            held.append(HeldTensor(name, same, isinstance(tensor, nn.Parameter), flag, strides))
            if same is None:
                stored[name] = tensor
        return held, stored

    def _tensors(self) -> Iterator[tuple[str, Tensor, bool]]:
        borrowed: set[str] = set()
        for home, module in self.names.modules.items():
            if _home(home) in borrowed or isinstance(module, Region) or self.names.name(module) != home:
                borrowed.add(home)
                continue
            dot = f"{home}." if home else ""
            for key, parameter in own_parameters(module).items():
                if parameter is not None:
                    yield dot + key, parameter, parameter.requires_grad
            for key, buffer in own_buffers(module).items():
                if buffer is not None:
                    yield dot + key, buffer, key not in transient_buffers(module)
        for name, tensor in self._constants.items():
            yield name, tensor, False

    def in_training(self) -> frozenset[str]:
        """Return the names of the modules in training mode."""
        return frozenset(name for name, module in self.names.modules.items() if module.training)


def _home(name: str) -> str | None:
    """Return the name of the module around a module, None for the model itself."""
    return name.rpartition(".")[0] if name else None
