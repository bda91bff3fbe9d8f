"""Inputs for any `transformers` model, from its signature and configuration: what fits is found by trying."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .shrinking import VOCABULARY

__all__ = ["InputError", "Recipe", "find_recipe"]

Maker = Callable[[int, int], Tensor]
"""Makes one argument for a batch size and a length."""

Recipe = Callable[[int, int], dict[str, Tensor]]
"""Makes all arguments for a batch size and a length."""

_TOKENS = ("input_ids", "decoder_input_ids")
_ATTEMPTS = 24
_LARGEST = 1_000_000
"""Numbers in one input: a model that takes only larger ones is left out."""


class InputError(Exception):
    """No inputs were found that the model takes."""


def find_recipe(model: nn.Module, batch: int = 2, length: int = 12) -> Recipe:
    """Return what makes inputs that `model` takes and answers with finite numbers.

    Raises:
        InputError: if none of those tried is taken; the message is the last reason.
    """
    config: Any = model.config
    reason = "nothing to give it"
    for makers in itertools.islice(_candidates(model, config), _ATTEMPTS):
        try:
            recipe = _recipe(makers, config, 0)
            reason = _refusal(model, recipe, batch, length)
            features = re.search(r"tokens:? *\(?(\d+).*features:? *\(?(\d+)", reason.replace("\n", " "))
            if features:
                recipe = _recipe(makers, config, max(1, int(features[2]) // batch))
                reason = _refusal(model, recipe, batch, length)
        except InputError as error:
            reason = str(error)
            continue
        if not reason:
            return recipe
    raise InputError(reason)


def _refusal(model: nn.Module, recipe: Recipe, batch: int, length: int) -> str:
    inputs = recipe(batch, length)
    if max(tensor.numel() for tensor in inputs.values()) > _LARGEST:
        return "its inputs are too large"
    try:
        with torch.no_grad():
            output = model(**inputs)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    found = list(_floats(output))
    if not found:
        return "its output holds no numbers"
    return "" if all(bool(torch.isfinite(t).all()) for t in found[:1]) else "its output is not finite"


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)


def _recipe(makers: dict[str, Maker], config: Any, placeholders: int) -> Recipe:
    def make(batch: int, length: int) -> dict[str, Tensor]:
        generator_state = torch.get_rng_state()
        torch.manual_seed(batch * 1000 + length)
        made = {name: maker(batch, length + placeholders) for name, maker in makers.items()}
        torch.set_rng_state(generator_state)
        if placeholders and "input_ids" in made:
            made["input_ids"][:, 1 : 1 + placeholders] = _placeholder(config)
        return made

    return make


def _placeholder(config: Any) -> int:
    for name in ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index"):
        found = getattr(config, name, None)
        if found is not None:
            return found
    raise InputError("it asks for placeholder tokens that its configuration does not name")


def _candidates(model: nn.Module, config: Any) -> Iterator[dict[str, Maker]]:
    """Yield makers of every argument needed; what may be left out is left out later."""
    for names in _argument_sets(model, config):
        alternatives = [[(name, maker) for maker in _makers(name, config)] for name in names]
        yield from (dict(chosen) for chosen in itertools.product(*alternatives))


def _argument_sets(model: nn.Module, config: Any) -> Iterator[list[str]]:
    parameters = inspect.signature(model.forward).parameters
    required = [
        p.name for p in parameters.values() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    main: str = getattr(model, "main_input_name", "input_ids")
    base = [*dict.fromkeys([*required, *([main] if main in parameters else [])])]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        base.append("decoder_input_ids")
    senses = getattr(model, "input_modalities", ())
    more = [name for name in _of_senses(senses) if name in parameters and name not in base]
    if "image_grid_thw" in parameters and "pixel_values" in (*base, *more):
        more.append("image_grid_thw")
    if more:
        yield [*base, *more]
    yield base
    if "input_ids" in parameters and "input_ids" not in base:
        yield ["input_ids", *base]


def _of_senses(senses: Any) -> list[str]:
    names = {"text": ["input_ids"], "image": ["pixel_values"], "audio": ["input_features"], "video": []}
    given = (senses,) if isinstance(senses, str) else senses
    return [name for sense in given for name in names.get(sense, [])]


def _makers(name: str, config: Any) -> list[Maker]:
    if name in _TOKENS:
        return [lambda batch, length: torch.randint(3, _vocabulary(config), (batch, length))]
    if name in _MAKERS:
        return _MAKERS[name](config)
    raise InputError(f"no rule makes its argument {name!r}")


def _vocabulary(config: Any) -> int:
    known = getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY
    return min(int(known), VOCABULARY // 2)


def _field(config: Any, names: str, default: Any) -> Any:
    """Return the first of several fields that a configuration, or a part of it, has."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    parts += [value for part in parts[1:] for value in vars(part).values() if hasattr(value, "to_dict")]
    for name in names.split():
        for part in parts:
            found = getattr(part, name, None)
            if found is not None:
                return found
    return default


def _pixels(config: Any) -> list[Maker]:
    size = _field(config, "image_size input_size crop_size", 64)
    height, width = (size if isinstance(size, (tuple, list)) else (size, size))[:2]
    channels = _field(config, "num_channels in_channels in_chans", 3)
    channels = channels if type(channels) is int else 3
    frames = _field(config, "num_frames frames_per_clip", 4)
    patch = _field(config, "patch_size", 8)
    temporal = _field(config, "temporal_patch_size", 2)
    found: list[Maker] = [
        lambda batch, length: torch.randn(batch, channels, height, width),
        lambda batch, length: torch.randn(batch, frames, channels, height, width),
        lambda batch, length: torch.randn(batch, 1, channels, height, width),
    ]
    if type(patch) is int:
        found.append(lambda batch, length: torch.randn(batch * 16, channels * temporal * patch * patch))
    return found


def _features(config: Any) -> list[Maker]:
    bins = _field(config, "num_mel_bins feature_size input_feat_size input_feat_per_channel input_dim", 80)
    frames = 2 * _field(config, "max_source_positions", 32)
    return [
        lambda batch, length: torch.randn(batch, bins, frames),
        lambda batch, length: torch.randn(batch, frames + length, bins),
        lambda batch, length: torch.randn(batch, 1, frames * 4, bins),
    ]


def _waves(config: Any) -> list[Maker]:
    bins = _field(config, "num_mel_bins feature_size", 80)
    frames = _field(config, "max_length", 64)
    return [
        lambda batch, length: torch.randn(batch, 4000 + 320 * length),
        lambda batch, length: torch.randn(batch, frames, bins),
        lambda batch, length: torch.randn(batch, 1, 4000 + 320 * length),
        *_pixels(config),
    ]


_MAKERS: dict[str, Callable[[Any], list[Maker]]] = {
    "pixel_values": _pixels,
    "pixel_values_videos": _pixels,
    "input_features": _features,
    "input_values": _waves,
    "attention_mask": lambda config: [lambda batch, length: torch.ones(batch, length, dtype=torch.int64)],
    "bbox": lambda config: [lambda batch, length: torch.zeros(batch, length, 4, dtype=torch.int64)],
    "image_grid_thw": lambda config: [lambda batch, length: torch.tensor([[1, 4, 4]] * batch)],
    "inputs": lambda config: [lambda batch, length: torch.randint(3, _vocabulary(config), (batch, length))],
}
