"""The model that a standalone archive gives: flat graphs over torch's own functions, without the user's classes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from ..compat import modules_by_name
from ..errors import ArchiveError, GuardError, ModeError
from ..passes.checkpoints import translate_on_load
from ..passes.state_map import StateMap
from ..tracing.capture import Variant
from ..tracing.compiled_class import dynamic_class
from ..tracing.dynamic import class_recipe
from ..tracing.signature import Signature
from ..tracing.source import generate
from .flat_code import FlatCode, FlatVariant
from .flat_program import FlatProgram
from .flat_tree import furnish, grow

__all__ = ["FlatModel", "program_of"]


class FlatModel(nn.Module):
    """A model read from a standalone archive.

    It holds parameters, buffers and `torch.nn` modules under the names they had, and computes with them what its graphs
    say. It takes the arguments that the saved model took. A call that no graph was made for raises `GuardError`, and
    setting a mode that none was made for `ModeError`. Checkpoints load by today's names and by those that the model had
    before it was optimized.

    Args:
        program: what to hold, and what to compute.
        tensors: parameters and buffers by name, tied ones under one of theirs; taken over, not copied.

    Raises:
        ArchiveError: if the tensors are not those of the program.
    """

    _fxopt_signature: Signature
    _fxopt_variants: Sequence[Variant]

    def __init__(self, program: FlatProgram, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        grow(self, program.modules)
        furnish(self, program.tensors, tensors)
        self._fxopt_program = program
        for name, module in modules_by_name(self).items():
            module.training = name in program.training
        cast("Any", self).__class__ = _class_of(program.code)

    @property
    def _fxopt_state_map(self) -> StateMap:
        return self._fxopt_program.state_map

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the graphs say; the class made for each program has a forward of its own."""
        raise GuardError("this FlatModel has no graph")

    def train(self, mode: bool = True) -> FlatModel:
        """Set training or evaluation mode, unless the model was saved for the other one only."""
        modes = self._fxopt_program.modes
        if bool(mode) not in modes:
            saved = "training" if modes == frozenset((True,)) else "evaluation"
            raise ModeError(f"this model was saved for {saved} only; save it anew from the original for the other mode")
        return super().train(mode)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        translate_on_load(self, self._fxopt_state_map, state_dict, prefix, missing_keys, error_msgs)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _fxopt_miss(self, *args: Any, **kwargs: Any) -> Any:
        names = {"self": self, **self._fxopt_signature.bind(args, kwargs)}
        failed = (next((g for g in variant.guards if not g.holds(names)), None) for variant in self._fxopt_variants)
        reasons = dict.fromkeys(f"{guard.reason} ({guard.expression})" for guard in failed if guard is not None)
        raise GuardError(f"this call is none that the model was saved for, where {', or '.join(reasons)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, class_recipe(type(self)), self.__getstate__()


def program_of(model: nn.Module) -> FlatProgram | None:
    """Return what a flat model was made from, or None for any other model."""
    return vars(model).get("_fxopt_program") if isinstance(model, FlatModel) else None


def _rebuild(make: Callable[..., type[nn.Module]], arguments: tuple[Any, ...]) -> nn.Module:
    return nn.Module.__new__(make(*arguments))


class _Running:
    """Mix into the classes made for programs, which are told apart by their forward alone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


_classes: weakref.WeakValueDictionary[str, type[nn.Module]] = weakref.WeakValueDictionary()


def _class_of(code: FlatCode) -> type[nn.Module]:
    """Return the class whose forward runs a program's graphs."""
    return _class_from(json.dumps(code.to_json()))


def _class_from(text: str) -> type[nn.Module]:
    known = _classes.get(text)
    if known is None:
        known = _classes[text] = _made(FlatCode.from_json(json.loads(text)), text)
    return known


def _made(code: FlatCode, text: str) -> type[nn.Module]:
    variants = [_variant(variant) for variant in code.variants]
    attributes = {
        "_fxopt_base": FlatModel,
        "_fxopt_recipe": (_class_from, (text,)),
        "_fxopt_signature": code.signature,
        "_fxopt_variants": variants,
    }
    try:
        source = generate(code.signature, variants)
        return dynamic_class(FlatModel, _Running, source, code.signature, attributes)
    except (SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        raise ArchiveError(f"its graph cannot be written as Python: {error}") from error


def _variant(variant: FlatVariant) -> Variant:
    guards = tuple(condition.guard() for condition in variant.conditions)
    arguments = {
        name: f"{path[0]}{''.join(f'[{key!r}]' for key in path[1:])}" for name, path in variant.flat.paths.items()
    }
    return Variant(guards, variant.flat.graph, arguments)
