"""The calls that a language model makes of itself while it generates, as example inputs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError, UsageError, one_line
from ...runtime.graphs import CACHES
from ...runtime.values import flatten, is_meta
from ..examples import Generating, Inputs
from ..isolation import in_phase, preserved
from .example_calls import recording

__all__ = ["NO_STEP", "calls_by_kind", "calls_of_generate", "generated_calls"]

NO_STEP = "the steps of generate have no graphs"

_STEPS = 2
"""So many steps are generated behind a prompt: the second has a cache of the kind that all later ones have."""

_LENGTHS = ("max_new_tokens", "max_length", "generation_config", "max_time", "stop_strings", "stopping_criteria")
_TAKEN = ("attention_mask", "token_type_ids")
"""What `generate` takes as the forward does, besides its main input."""
_PASSED_OVER = ("decoder_input_ids", "decoder_attention_mask", "position_ids", "use_cache", "return_dict")
"""What `generate` makes by itself."""


def generated_calls(model: nn.Module, call: Generating) -> list[Inputs]:
    """Return the calls that a model makes of itself, one of each kind, and leave no trace on it.

    Raises:
        UsageError: the model does not generate.
        InputError: its `generate` raises; chained.
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
    with preserved(model), _settings_kept(model), in_phase(model, False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with recording(model) as calls:
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
