"""Run a module on stand-ins for its tensors, and leave no trace on it."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...compat import modules_by_name
from ...runtime.graphs import Region, capture_of
from ...runtime.state import absent_from_checkpoints
from ...runtime.values import INTERNAL, RandomState, TensorFunction, map_tensors, put_members_back, qualified
from ...tracing.isolation import AttributeState

__all__ = ["ModuleHarness", "random_state_kept"]

_OURS = "_fxopt_"
"""What fxopt itself keeps on modules; no forward changes it."""


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class ModuleHarness:
    """Hold where a module and its children keep their tensors, so that stand-ins can take their places: in microseconds
    where copying takes milliseconds, and tied tensors stay tied, and views of a fused tensor follow it.
    """

    module: nn.Module  # the module to run
    # its parameters by qualified name; a tied one under each of its names
    parameters: dict[str, Tensor] = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)  # its buffers likewise
    state: dict[str, Tensor] = field(init=False)  # both
    _modules: dict[str, nn.Module] = field(init=False)
    _belongings: list[_Belongings] = field(init=False)
    _plain: list[tuple[str, dict[str, Any], str]] = field(init=False)
    _elsewhere: list[Tensor] = field(init=False)
    """Buffers that a part of a fused ensemble reads and writes in a module outside of it."""

    def __post_init__(self) -> None:
        self._modules = modules_by_name(self.module, every_name=True)
        self.parameters = self._named("_parameters")
        self.buffers = self._named("_buffers")
        self.state = {**self.parameters, **self.buffers}
        self._belongings = [_Belongings(module) for module in dict.fromkeys(self._modules.values())]
        self._plain = [
            (qualified(prefix, name), vars(module), name)
            for prefix, module in self._modules.items()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        ]
        self._elsewhere = [buffer for name, buffer in self.module.named_buffers() if name not in self.buffers]

    def _named(self, kind: str) -> dict[str, Tensor]:
        owners = ((f"{prefix}." if prefix else "", vars(module)[kind]) for prefix, module in self._modules.items())
        return {dot + key: tensor for dot, owner in owners for key, tensor in owner.items() if tensor is not None}

    @property
    def has_missed(self) -> bool:
        """Say whether, in the run that is under way, no graph of some module fitted a call, and its own code
        ran; where it has no graph for the mode, that is no miss.
        """
        modules = zip(dict.fromkeys(self._modules.values()), self._belongings, strict=True)
        captures = ((module, capture_of(module)) for module, each in modules if each.has_missed)
        return any(
            capture is not None and any(graph.runs_in_mode(module) for graph in capture.specializations)
            for module, capture in captures
        )

    def regions(self, inner: Iterable[str] = ()) -> dict[Region, bool]:
        """Return the parts of graphs that run as modules of their own; whether they are parts of an interpreted
        graph, of this module or an `inner` one.
        """
        interpreted: set[nn.Module] = {self.module, *(self._modules[name] for name in inner)}
        found: dict[Region, bool] = {}
        for name, module in self._modules.items():
            if isinstance(module, Region) and capture_of(module):
                found[module] = self._around(name) in interpreted
                interpreted.update((module,) if found[module] else ())
        return found

    def _around(self, name: str) -> nn.Module:
        """Return the module around another that runs from a graph, which a wrapper does not; or the outermost."""
        outer = name.rpartition(".")[0]
        module = self._modules[outer]
        return module if not outer or capture_of(module) else self._around(outer)

    @property
    def lasting(self) -> dict[str, Tensor]:
        """Return what a state dict holds and original checkpoints have: no transient buffers, nothing added."""
        passing = {
            qualified(prefix, name)
            for prefix, module in self._modules.items()
            for name in absent_from_checkpoints(module)
        }
        return {name: tensor for name, tensor in self.state.items() if name not in passing}

    @property
    def plain(self) -> dict[str, Tensor]:
        """Return the tensors that modules hold as plain attributes, by name."""
        return {name: own[key] for name, own, key in self._plain if isinstance(own.get(key), Tensor)}

    @contextmanager
    def playing(
        self,
        stand_ins: Mapping[str, Tensor],
        convert: TensorFunction = _same,
        *,
        training: bool | None = None,
    ) -> Generator[None]:
        """Let `stand_ins` be the module's tensors, by name; the run may change them. `convert` makes those of others.
        `training` is set where the module's own flag differs; None leaves all.
        """
        cast = {id(tensor): stand_ins[name] for name, tensor in self.state.items() if name in stand_ins}
        elsewhere = [(buffer, buffer.detach().clone()) for buffer in self._elsewhere]
        try:
            for belongings in self._belongings:
                belongings.replace(cast, convert)
            if training is not None and training != self.module.training:
                for belongings in self._belongings:
                    belongings.own["training"] = training
            yield
        finally:
            for belongings in self._belongings:
                belongings.restore()
            with torch.no_grad():
                for buffer, copy in elsewhere:
                    buffer.copy_(copy)

    @property
    def buffers_now(self) -> dict[str, Tensor]:
        """Return the buffers that the module has now, during or after a run."""
        return self._named("_buffers")


class _Belongings:
    """What one module holds."""

    __slots__ = ("_held", "_misses", "_state", "own")

    def __init__(self, module: nn.Module) -> None:
        own = self.own = vars(module)
        capture = capture_of(module)
        self._misses = None if capture is None else (capture.misses, dict(capture.misses))
        self._state = AttributeState(module)
        added = {name: value for name, value in own.items() if name not in INTERNAL and not name.startswith(_OURS)}
        self._held = {name: value for name, value in added.items() if _holds_tensors(value)}

    def replace(self, cast: Mapping[int, Tensor], convert: TensorFunction) -> None:
        """Put stand-ins in the registers, and in the attributes and containers that hold tensors directly."""

        def stand_in(tensor: Tensor) -> Tensor:
            return cast[id(tensor)] if id(tensor) in cast else convert(tensor)

        for register, tensors in zip(("_parameters", "_buffers"), self._state.registered, strict=True):
            for name, tensor in tensors.items():
                if tensor is not None:
                    self.own[register][name] = stand_in(tensor)
        for name, value in self._held.items():
            self.own[name] = map_tensors(stand_in, value)

    @property
    def has_missed(self) -> bool:
        """Say whether the module ran its own code, in the place of its graphs, since it was looked at."""
        return self._misses is not None and self._misses[0] != self._misses[1]

    def restore(self) -> None:
        own, before = self.own, self._state.copy
        own.update(before)  # in half the time that looking for what has changed takes
        if len(own) > len(before):
            for name in own.keys() - before.keys():
                del own[name]
        self._state.restore_containers()
        if self._misses is not None and self.has_missed:
            put_members_back(*self._misses)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        items = cast("Iterable[object]", value.values() if isinstance(value, dict) else value)
        return any(isinstance(item, Tensor) for item in items)
    return isinstance(value, Tensor)


@contextmanager
def random_state_kept(seed: int) -> Generator[None]:
    """Seed every generator with `seed` for a while, then put each back where it was."""
    generators = RandomState()
    try:
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` notes a stack trace for GPUs that may come
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield
    finally:
        generators.restore()
