"""Note how a model is called, in a real run or by itself while it generates, to be given as example inputs."""

from __future__ import annotations

import enum
import inspect
import threading
import warnings
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...compat import modules_by_name
from ...compat.logs import unheard
from ...errors import FusedMemberError, InputError, UsageError, one_line
from ...runtime.graphs import CACHES, Region
from ...runtime.values import flatten, has_attributes, is_container, is_leaf, is_meta, map_tensors, parts_of
from ..examples import Generating, Inputs
from ..isolation import in_phase, preserved

__all__ = ["NO_STEP", "calls_by_kind", "calls_of_generate", "generated_calls", "recording"]


_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)
_DEEPEST = 12


@contextmanager
def recording(model: nn.Module, limit: int = 16) -> Generator[list[Inputs]]:
    """Note the calls of a model inside of `with`: `with fxopt.recording(model) as calls: model.generate(...)`.

    One call of each kind is kept, as it was before the model ran, its tensors copied. Two calls are of one kind if they
    have the same structure, types and plain values, and tensors of the same dtypes, devices and ranks; of each size of
    a tensor counts whether it is 0, 1 or more, and of numbers that objects hold (caches, say) only their types.

    Calls of its parts that are made around its own forward are noted, too, as `Inputs.of_part`: `generate` calls the
    encoder of a T5 so.

    Args:
        model: the module whose calls are noted, in every thread; it is left as it was.
        limit: how many kinds are kept at the most; a warning says if there were more.

    Returns:
        On entering, a list that fills while the model runs: give it to `optimize` or `capture` as `example_inputs`.

    Raises:
        UsageError: `model` is no module, or `limit` is less than one.
    """
    if not isinstance(cast("object", model), nn.Module) or limit < 1:
        raise UsageError(f"recording takes a torch.nn.Module and a limit of at least 1, not {type(model)}, {limit}")
    notes = _Notes(limit, {module: name for name, module in modules_by_name(model).items() if _is_noted(name, module)})
    with ExitStack() as hooks:
        for module in notes.names:
            with suppress(FusedMemberError):  # nobody calls a fused member by itself
                hooks.callback(module.register_forward_pre_hook(notes, prepend=True, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(notes.returned).remove)
                hooks.callback(module.register_forward_hook(notes.ended, always_call=True).remove)
        yield notes.calls
    if notes.left_out:
        warnings.warn(
            f"the {type(model).__name__} was called in {limit + notes.left_out} ways; the first {limit} were kept",
            stacklevel=3,
        )


def _is_noted(name: str, module: nn.Module) -> bool:
    """Say whether calls of a module are noted: of the model's parts, of those that may have graphs."""
    return not name or not (is_leaf(module) or is_container(module) or isinstance(module, Region))


class _Notes:
    """Keep one call of each kind that returned; called as a hook before each forward."""

    def __init__(self, limit: int, names: Mapping[nn.Module, str]) -> None:
        self.calls: list[Inputs] = []
        self.names = names
        self._limit = limit
        self._kinds: set[Hashable] = set()
        self._adding = threading.Lock()
        self._running = threading.local()
        self._begun: dict[Hashable, Inputs | None] = {}
        """Of the kinds that have not returned yet, a call as it was."""

    @property
    def left_out(self) -> int:
        """Return how many kinds were met beyond the limit."""
        return len(self._kinds) - len(self.calls)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running, name = self._calls_now(), self.names.get(module)
        kind = None if name is None or (running and name) else (name, _kind((args, kwargs), 0))
        running.append((module, kind))  # a call of a part inside of another call has no kind
        if kind is None or name is None:
            return
        with self._adding:
            if kind not in self._kinds:
                self._begun[kind] = _kept(name, args, kwargs) if len(self.calls) < self._limit else None

    def returned(self, module: nn.Module, *_: object) -> None:
        """Keep the call that returned just now, if it is the first of its kind; one that raised stays out."""
        running = self._calls_now()
        kind = running[-1][1] if running and running[-1][0] is module else None
        if kind is None:
            return  # a call that had begun before, or inside of another
        with self._adding:
            call = self._begun.pop(kind, None)
            if kind not in self._kinds:
                self._kinds.add(kind)
                if call is not None and len(self.calls) < self._limit:
                    self.calls.append(call)

    def ended(self, module: nn.Module, *_: object) -> None:
        """Forget a call that returned or raised."""
        running = self._calls_now()
        if running and running[-1][0] is module:
            running.pop()

    def _calls_now(self) -> list[tuple[nn.Module, Hashable]]:
        return vars(self._running).setdefault("calls", [])

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model, made meanwhile, note nothing in this list."""
        return _Notes, (0, {})


def _kept(module: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Return a call with copies of its tensors and objects; a tensor that is there twice is copied once."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    with torch.inference_mode(False):
        args, kwargs = map_tensors(copy, (args, kwargs))
    return Inputs.of_part(module, *args, **kwargs)


def _kind(value: Any, depth: int, *, held: bool = False) -> Hashable:
    """Return what is equal for values of one kind; `held` by an object, numbers count by their type."""
    cls = cast("Hashable", type(value))
    if isinstance(value, Tensor):
        return cls, value.dtype, value.device, tuple(min(size, 2) for size in value.shape)
    if isinstance(value, _PLAIN):
        return cls if held and isinstance(value, (int, float)) and cls is not bool else (cls, repr(value))
    if depth == _DEEPEST:
        return cls
    parts, inside = parts_of(value), held or has_attributes(value)
    return cls, tuple((key, _kind(part, depth + 1, held=inside)) for key, part in parts)


NO_STEP = "the steps of generate have no graphs"

_STEPS = 2
"""So many steps are generated behind a prompt: the second has a cache of the kind that all later ones have."""

_LENGTHS = ("max_new_tokens", "max_length", "generation_config", "max_time", "stop_strings", "stopping_criteria")
_TAKEN = ("attention_mask", "token_type_ids")
"""What `generate` takes as the forward does, besides its main input."""
_PASSED_OVER = ("decoder_input_ids", "decoder_attention_mask", "position_ids", "use_cache", "return_dict")
"""What `generate` makes by itself."""


def generated_calls(model: nn.Module, call: Generating) -> list[Inputs]:
    """Return the calls that a model makes of itself, one of each kind, and leave no trace on it. UsageError if it does
    not generate; InputError, chained, if its `generate` raises.
    """
    if not callable(getattr(model, "generate", None)):
        raise UsageError(f"Inputs.generating is for models with a method generate; {type(model).__name__} has none")
    try:
        return _recorded(model, call)
    except Exception as error:  # whatever the model's code raises
        raise InputError(f"generate raised {type(error).__name__}: {one_line(error)}") from error


def calls_of_generate(model: nn.Module, calls: Sequence[Inputs]) -> tuple[list[Inputs], str]:
    """Return the calls that a model makes of itself where it generates from the first of some, which have no cache.
    They are a prompt, a step and calls of parts, or none; the text is what the user should know.
    """
    if not calls or not _generates(model) or _has_cache(calls):
        return [], ""
    prompt = _prompt(model, calls[0])
    if not isinstance(prompt, Generating):
        return [], prompt
    try:
        found = generated_calls(model, prompt)
    except InputError as error:
        return [], f"{NO_STEP}: {error}; give fxopt.Inputs.generating(ids, ...) to say how"
    parts, own = [each for each in found if each.module], [each for each in found if not each.module]
    return [*parts, own[0], *own[1:][-1:]], ""  # between them are steps of caches that are being filled


def calls_by_kind(calls: Sequence[Inputs]) -> dict[str, list[Inputs]]:
    """Return calls of a model under "prompt" and "step", where it generates; else all of them under ""."""
    steps = [call for call in calls if _is_step(call)]
    prompts = [call for call in calls if call not in steps]
    return {"prompt": prompts, "step": steps} if steps and prompts else {"": list(calls)}


def _is_step(call: Inputs) -> bool:
    """Say whether a call is given a cache that earlier ones have filled; a static one holds zeros before."""
    caches = flatten([call.kwargs.get(name) for name in CACHES])
    return any(isinstance(part, Tensor) and bool(part.any()) for part in caches.values())


def _generates(model: nn.Module) -> bool:
    """Say whether a model is one of `transformers` that generates, with a cache, and holds data."""
    asked, settings = getattr(model, "can_generate", None), getattr(model, "generation_config", None)
    if not callable(asked) or settings is None or is_meta(model) or not asked():
        return False
    config = getattr(model, "config", None)
    return bool(getattr(config, "use_cache", True) and getattr(settings, "use_cache", True))


def _has_cache(calls: Sequence[Inputs]) -> bool:
    """Say whether calls are those of a run that was recorded."""
    return any(call.module or call.kwargs.get("past_key_values") is not None for call in calls)


def _prompt(model: nn.Module, call: Inputs) -> Generating | str:
    """Return how `generate` is called with the prompt of a call of the model; else why not, "" if nobody expects it."""
    try:
        bound = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return ""
    given: dict[str, Any] = {**bound, **bound.pop("kwargs", {})}
    name = str(getattr(model, "main_input_name", "input_ids"))
    main = given.pop(name, None)
    if not isinstance(main, Tensor) or given.get("labels") is not None or given.get("use_cache") is False:
        return ""
    taken = {key: given.pop(key) for key in _TAKEN if given.get(key) is not None}
    others = [key for key, value in given.items() if value is not None and key not in _PASSED_OVER]
    if others:
        return f"{NO_STEP}: the example has {', '.join(others)}; add fxopt.Inputs.generating(...), as you call generate"
    return _fitting(model, Generating(**{name: main}, **taken))


def _fitting(model: nn.Module, call: Generating) -> Generating:
    """Return a call whose prompt leaves room for the steps, where a model has so many positions only."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = call.kwargs.get("input_ids")
    if not isinstance(most, int) or tokens is None or tokens.dim() != 2 or tokens.shape[1] + _STEPS <= most:
        return call
    short = {key: value[:, : most - _STEPS] for key, value in call.kwargs.items()}
    return Generating(**short)


def _recorded(model: nn.Module, call: Generating) -> list[Inputs]:
    """Run `generate`, and return a call of each kind that it made."""
    settings: dict[str, Any] = dict(call.kwargs)
    if not any(name in settings for name in _LENGTHS):
        settings |= {"max_new_tokens": _STEPS + 1, "min_new_tokens": _STEPS + 1}
    whole = Generating(*call.args, **settings)
    with (
        preserved(model), _settings_kept(model), in_phase(model, False), torch.no_grad(), unheard("transformers"),
        recording(model) as calls,
    ):  # fmt: skip
        whole.run(model)
    if all(each.module for each in calls):
        raise UsageError("it never called the model")
    return calls


@contextmanager
def _settings_kept(model: nn.Module) -> Generator[None]:
    """Put back what `generate` writes into its settings."""
    settings: Any = getattr(model, "generation_config", None)
    held: dict[str, Any] = getattr(settings, "__dict__", {})
    before = held.copy()
    try:
        yield
    finally:
        held.clear()
        held.update(before)
