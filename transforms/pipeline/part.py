"""One rank's part of a model as a module of its own, and which tensors stay on which rank."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ...compat import all_modules, own_buffers, own_children, own_parameters, tensor_at
from ...errors import StateError
from ...runtime.state import STATE_MAP, VIEWS, InParts, StateMap, StateStep
from ...runtime.values import all_tensors, own_part, whole_tensor
from .layout import Layout
from .line import Line

__all__ = ["Placement", "RankPart"]


class Elsewhere(nn.Module):
    """Stand for a module that is on another rank."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise StateError(f"this module is on stage {self.stage}, on another rank; call the whole model, on every rank")

    def extra_repr(self) -> str:
        return f"stage={self.stage}"


@dataclass(frozen=True)
class Tied:
    """A parameter that several ranks hold."""

    parameter: nn.Parameter  # this rank's
    group: Any  # of the ranks that hold it
    is_first: bool  # whether this rank is the first of them


@dataclass(frozen=True)
class Placement:
    """This rank's share of a model."""

    line: Line  # the ranks of all stages
    rank_of: Sequence[int]  # by stage
    own: tuple[int, ...]  # its stages
    stages_of: Mapping[int, Collection[int]]  # id of a tensor -> the stages that need it
    called: Mapping[nn.Module, AbstractSet[int]]  # module that is called -> by which stages
    tied: tuple[Tied, ...]  # the parameters that other ranks hold, too

    @classmethod
    def of(cls, model: nn.Module, layouts: Sequence[Layout], line: Line, *, turns: bool = False) -> Placement:
        """Return this rank's share; every rank calls this. `turns`: the second half of the stages goes back."""
        rank, size, count = distributed.get_rank(), line.size, len(layouts[0].parts)
        places = [count - 1 - stage if turns and stage >= size else stage % size for stage in range(count)]
        rank_of = [line.ranks[place] for place in places]
        stages_of: dict[int, set[int]] = {}
        called: dict[nn.Module, set[int]] = {}
        for layout in layouts:
            for stage, tensors in layout.tensors(model).items():
                for key in tensors:
                    stages_of.setdefault(key, set()).add(stage)
            for module, stages in layout.called(model).items():
                called.setdefault(module, set()).update(stages)
        everything = all_tensors(all_modules(model))
        for tensor in everything:
            stages_of.setdefault(id(tensor), {0})  # nothing reads it, but checkpoints have it
        shared = {
            parameter: tuple(sorted({rank_of[stage] for stage in stages_of[id(parameter)]}))
            for parameter in everything
            if isinstance(parameter, nn.Parameter)
        }
        shared = {parameter: ranks for parameter, ranks in shared.items() if len(ranks) > 1}
        groups: dict[tuple[int, ...], Any] = {
            ranks: distributed.new_group(list(ranks), use_local_synchronization=True)
            for ranks in sorted(set(shared.values()))
            if rank in ranks
        }
        tied = tuple(Tied(p, groups[ranks], ranks[0] == rank) for p, ranks in shared.items() if rank in ranks)
        for parameter, ranks in shared.items():
            if rank in ranks and not parameter.is_meta:
                distributed.broadcast(parameter.detach(), src=ranks[0], group=groups[ranks])
        own = tuple(stage for stage in range(count) if rank_of[stage] == rank)
        return cls(line, rank_of, own, stages_of, called, tied)

    def free(self, model: nn.Module) -> None:
        """Take out of a model what no stage of this rank needs."""
        needed = {module: self._stages(module) for module in all_modules(model)}
        for module in needed:
            for registry in (own_parameters(module), own_buffers(module)):
                for name, tensor in registry.items():
                    if tensor is not None and not self._is_own(self.stages_of[id(tensor)]):
                        registry[name] = None
            for name, child in own_children(module).items():
                if child is not None and needed.get(child) and not self._is_own(needed[child]):
                    own_children(module).update({name: Elsewhere(min(needed[child]))})
        for module in needed:
            if STATE_MAP in vars(module):
                vars(module)[STATE_MAP] = _of_this_rank(module, vars(module)[STATE_MAP])

    def _stages(self, module: nn.Module) -> set[int]:
        """Return the stages that need a module, or anything in it."""
        inside = all_modules(module)
        views: list[Any] = [view for each in inside for view in vars(each).get(VIEWS, {}).values()]
        calls = {stage for each in inside for stage in self.called.get(each, ())}
        tensors = [*all_tensors(inside), *(view.stacked for view in views)]
        return calls | {stage for tensor in tensors for stage in self.stages_of[id(tensor)]}

    def _is_own(self, stages: Collection[int]) -> bool:
        return any(stage in self.own for stage in stages)

    @contextmanager
    def synchronised(self) -> Generator[None]:
        """Add up, on leaving, the gradients that the ranks have made meanwhile of the parameters that they share."""
        trained = [tied for tied in self.tied if tied.parameter.requires_grad]
        before = [tied.parameter.grad for tied in trained]
        for tied in trained:
            tied.parameter.grad = None
        yield
        for tied, earlier in zip(trained, before, strict=True):
            made = tied.parameter.grad
            gradient = torch.zeros_like(tied.parameter) if made is None else made
            distributed.all_reduce(own_part(gradient), group=tied.group)
            tied.parameter.grad = gradient if earlier is None else earlier.add_(gradient)

    def counted(self, parameters: Collection[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of some parameters; of those that several ranks hold, the first one's."""
        others = {id(tied.parameter) for tied in self.tied if not tied.is_first}
        return [p.grad for p in parameters if p.grad is not None and id(p) not in others]


def _of_this_rank(module: nn.Module, state_map: StateMap) -> StateMap:
    """Return a module's map without the steps whose tensors are elsewhere."""
    gone = {name for name in state_map.targets if tensor_at(module, name) is None}
    steps: list[StateStep] = []
    for step in reversed(state_map.steps):
        if gone.issuperset(step.targets):
            gone.update(step.sources)
        else:
            steps.append(step)
    return replace(state_map, steps=tuple(reversed(steps)))


class RankPart(InParts):
    """The part of a model that is on this rank, under the original names; the model loses the rest to `Elsewhere`."""

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        super().__init__()
        names = list(model.state_dict())
        parameters = dict(model.named_parameters())
        placement.free(model)
        # The very registries: what is moved, loaded or replaced in one is so in the other.
        vars(self).update(_modules=own_children(model), _parameters=own_parameters(model), _buffers=own_buffers(model))
        vars(self).update(_whole=model, training=model.training, _line=placement.line)
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
        own: dict[str, Tensor] = {name: whole_tensor(tensor.detach()) for name, tensor in self.state_dict().items()}
        everyone: list[Any] = [None] * self._line.size
        forms_here = {name: (t.shape, t.dtype) for name, t in own.items()}
        distributed.all_gather_object(everyone, forms_here, group=self._line.group)
        found: dict[str, Tensor] = {}
        for rank, forms in zip(self._line.ranks, everyone, strict=True):
            for name, (shape, dtype) in forms.items():
                if name in found:
                    continue
                has = rank == distributed.get_rank()
                found[name] = own[name].contiguous() if has else torch.empty(shape, dtype=dtype, device=self._device)
                distributed.broadcast(found[name], src=rank, group=self._line.group)
        return {name: found.pop(name) for name in self._names if name in found} | found

    def parameters_elsewhere(self) -> dict[str, nn.Parameter]:
        """Return, by name, stand-ins for the parameters of other ranks: they have shapes, and no data."""
        return dict(self._absent)

    # -- a module --------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RankPart:
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
