"""Example inputs, in every form that users give them, as one tuple of calls."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...errors import InputError, UsageError, one_line
from ...runtime.values import RandomState, is_whole

__all__ = ["LOADER_BATCHES", "Generating", "Inputs", "call_of_batch", "check_whole", "is_input", "normalize_inputs"]

LOADER_BATCHES = 2
"""So many batches of a DataLoader are example inputs: each is one more call to record, to check and to time."""

_Kind = inspect.Parameter
_FORMS = (
    "a tuple (positional), a dict (keywords), fxopt.Inputs(*args, **kwargs), a tensor (the one argument), "
    "a DataLoader, or a list of calls"
)


class Inputs:
    """Hold the positional and keyword arguments of one call of a model. `module` names the part that is called around
    the model's own forward, as `generate` calls an encoder.
    """

    __slots__ = ("args", "kwargs", "module")

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs
        self.module = ""

    @classmethod
    def of_part(cls, module: str, /, *args: Any, **kwargs: Any) -> Inputs:
        """Return a call of the part of a model that has this qualified name."""
        call = cls(*args, **kwargs)
        call.module = module
        return call

    @staticmethod
    def generating(*args: Any, **settings: Any) -> Generating:
        """Return, as example inputs, the calls that a model of `transformers` makes of itself while it generates. The
        arguments are those of `model.generate`: token identifiers, then, by name, what is in use (`attention_mask`,
        `num_beams`, `cache_implementation`, an assistant model, ...). Without a length, two steps follow a prompt.
        """
        return Generating(*args, **settings)

    def run(self, model: nn.Module) -> Any:
        """Call the model, or the part of it, with these very arguments."""
        return model.get_submodule(self.module)(*self.args, **self.kwargs)

    @property
    def is_of_model(self) -> bool:
        """Return whether this is one call, and of the model itself."""
        return not self.module

    def __iter__(self) -> Iterator[Any]:
        yield self.args
        yield self.kwargs

    def __repr__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        if isinstance(self, Generating):
            return f"Inputs.generating({', '.join(parts)})"
        if self.module:
            return f"Inputs.of_part({', '.join([repr(self.module), *parts])})"
        return f"Inputs({', '.join(parts)})"


class Generating(Inputs):
    """Stand for the calls that `model.generate` makes with these arguments; see `Inputs.generating`."""

    __slots__ = ()

    @property
    def is_of_model(self) -> bool:
        """Return False: it is several calls."""
        return False

    def run(self, model: nn.Module) -> Any:
        """Generate with these very arguments."""
        return cast("Any", model).generate(*self.args, **self.kwargs)


def normalize_inputs(example_inputs: object, model: object = None) -> tuple[Inputs, ...]:
    """Return the calls meant by `example_inputs`, in any of the forms that `optimize` takes. UsageError for anything
    else, naming the forms, and for batches that the model's forward takes nothing of; InputError if the DataLoader
    raises, or is empty.
    """
    if example_inputs is None:
        return ()
    if isinstance(example_inputs, DataLoader):
        batches = _first_batches(cast("DataLoader[Any]", example_inputs))
        parameters = _parameters(getattr(model, "forward", None))
        return tuple(_call_of_batch(batch, parameters) for batch in batches)
    if isinstance(example_inputs, list):
        calls = cast("Sequence[object]", example_inputs)
        if not calls:
            raise UsageError("example_inputs is an empty list; give at least one call, or None")
        return tuple(_one_call(call, f"example_inputs[{number}]") for number, call in enumerate(calls))
    return (_one_call(example_inputs, "example_inputs"),)


def call_of_batch(batch: object, model: nn.Module) -> Inputs:
    """Return the call that a batch of a loader stands for, without labels, say; UsageError if nothing is taken."""
    return _call_of_batch(batch, _parameters(model.forward))


def check_whole(calls: Sequence[Inputs]) -> None:
    """Raise UsageError for calls of a part of a model, where the model itself is to be called."""
    for number, call in enumerate(calls):
        if isinstance(call, Generating):
            raise UsageError(f"example call {number} is Inputs.generating; give calls of the model itself")
        if call.module:
            raise UsageError(f"example call {number} is one of {call.module!r}; give calls of the model itself")


def is_input(value: object) -> bool:
    """Tell whether a value is plainly an example input, or several: to say so where one was given as something else."""
    if isinstance(value, (tuple, list)):
        return any(map(is_input, cast("Sequence[object]", value)))
    return isinstance(value, (Tensor, Inputs, DataLoader, Mapping)) or is_whole(type(value))


def _one_call(call: object, where: str) -> Inputs:
    if isinstance(call, Inputs):
        return call
    if isinstance(call, Tensor) or is_whole(type(call)):
        return Inputs(call)
    if isinstance(call, tuple):
        return Inputs(*cast("tuple[Any, ...]", call))
    if isinstance(call, Mapping):
        mapping = cast("Mapping[str, Any]", call)
        if not all(isinstance(key, str) for key in mapping):
            raise UsageError(f"{where} as a dict is keyword arguments; every key must be a string")
        return Inputs(**mapping)
    raise UsageError(f"{where} is of type {type(call).__name__}; give {_FORMS}")


# -- a DataLoader --------------------------------------------------------------------------------------------------


def _first_batches(loader: DataLoader[Any]) -> list[object]:
    """Return the first batches, and leave every generator that orders them as it was."""
    with _generators_kept(loader):
        try:
            batches = list(itertools.islice(loader, LOADER_BATCHES))
        except Exception as error:  # whatever the user's data set raises
            text = f"the DataLoader given as example_inputs raised {type(error).__name__}: {one_line(error)}"
            raise InputError(text) from error
    if not batches:
        raise InputError("the DataLoader given as example_inputs has no batches; give one that has, or a tuple")
    return batches


@contextmanager
def _generators_kept(loader: DataLoader[Any]) -> Generator[None]:
    state = RandomState()
    held = (getattr(owner, "generator", None) for owner in (loader, getattr(loader, "sampler", None)))
    own = {generator: generator.get_state() for generator in held if isinstance(generator, torch.Generator)}
    try:
        yield
    finally:
        state.restore()
        for generator, before in own.items():
            generator.set_state(before)


def _call_of_batch(batch: object, parameters: Sequence[inspect.Parameter] | None) -> Inputs:
    """Return the call that a batch stands for, without what the forward does not take: labels above all."""
    if isinstance(batch, (tuple, list)):
        parts = tuple(cast("Sequence[object]", batch))
        return Inputs(*(parts if parameters is None else parts[: _most_taken(parameters)]))
    if isinstance(batch, Mapping):
        return _call_by_name(cast("Mapping[str, Any]", batch), parameters)
    return batch if isinstance(batch, Inputs) else Inputs(batch)


def _most_taken(parameters: Sequence[inspect.Parameter]) -> int | None:
    """Return how many parts of a batch a forward is given: what it requires, at least one; None stands for all."""
    if any(p.kind is _Kind.VAR_POSITIONAL for p in parameters):
        return None
    positional = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)
    return max(1, sum(p.default is p.empty for p in parameters if p.kind in positional))


def _call_by_name(batch: Mapping[str, Any], parameters: Sequence[inspect.Parameter] | None) -> Inputs:
    if parameters is None or any(p.kind is _Kind.VAR_KEYWORD for p in parameters):
        return Inputs(**batch)
    taken = {p.name for p in parameters if p.kind is not _Kind.POSITIONAL_ONLY}
    named = {name: value for name, value in batch.items() if name in taken}
    if named:
        return Inputs(**named)
    if _most_taken(parameters) == 1:
        return Inputs(batch)  # the forward takes the dict itself
    raise UsageError(
        f"the DataLoader's batches have the keys {', '.join(map(str, batch))}, and forward takes none of them "
        f"({', '.join(p.name for p in parameters)}); give calls instead: example_inputs=[dict(...), ...]"
    )


def _parameters(forward: Callable[..., Any] | None) -> list[inspect.Parameter] | None:
    """Return the parameters of a bound forward, or None where nothing is known of them."""
    if not callable(forward):
        return None
    try:
        return list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return None
