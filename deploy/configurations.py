"""Models of `transformers` from their configurations, with random weights and inputs: what is tried without a file."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, one_line
from ..runtime.values import user_class
from ..storage import byte_text

__all__ = ["inputs_for", "is_configuration", "model_of_configuration"]

_ROWS, _TOKENS, _PIXELS, _CHANNELS = 2, 16, 224, 3
_SEED = 0


def is_configuration(value: object) -> bool:
    """Say whether a value is a configuration of `transformers`; without that package there are none."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PreTrainedConfig)


def model_of_configuration(configuration: Any) -> nn.Module:
    """Return the model of a configuration in evaluation mode, its weights drawn from a fixed seed.

    Raises `InputError` if `transformers` has no such model, or its weights would not leave half of the memory free.
    """
    with torch.device("meta"):
        size = sum(each.numel() * each.element_size() for each in _built(configuration).parameters())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if 2 * size > memory:
        raise InputError(
            f"the weights of {type(configuration).__name__} take {byte_text(size)} of {byte_text(memory)}; name a "
            "function that returns a smaller configuration, with fewer or narrower layers"
        )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(_SEED)
        return _built(configuration).eval()


def _built(configuration: Any) -> nn.Module:
    from transformers import AutoModel

    try:
        return cast(nn.Module, AutoModel.from_config(configuration))
    except Exception as error:  # each family checks its configuration in its own way
        name = type(configuration).__name__
        raise InputError(f"transformers builds no model of a plain {name}: {one_line(error)}") from error


def inputs_for(model: nn.Module) -> dict[str, Tensor] | None:
    """Return inputs for a model of `transformers` on text or images, drawn from a fixed seed; None for other models."""
    configuration: Any = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if not is_configuration(configuration) or main not in ("input_ids", "pixel_values"):
        return None
    generator = torch.Generator().manual_seed(_SEED)
    taken = inspect.signature(user_class(type(model)).forward).parameters
    given: dict[str, Tensor] = {}
    if main == "input_ids":
        words = getattr(configuration, "text_config", configuration).vocab_size
        texts = ["input_ids", *(["decoder_input_ids"] if configuration.is_encoder_decoder else [])]
        for name in texts:
            if name in taken:
                given[name] = torch.randint(words, (_ROWS, _TOKENS), generator=generator)
    if main == "pixel_values" or ("pixel_values" in taken and not _puts_images_into_text(configuration)):
        given["pixel_values"] = torch.randn(_ROWS, *_image_shape(configuration), generator=generator)
    return given


def _puts_images_into_text(configuration: Any) -> bool:
    """Say whether images stand in the text as tokens, so that text without them is a whole input."""
    return any(hasattr(configuration, name) for name in ("image_token_id", "image_token_index"))


def _image_shape(configuration: Any) -> tuple[int, ...]:
    seen = getattr(configuration, "vision_config", configuration)
    size: Any = getattr(seen, "image_size", _PIXELS)
    sides = cast("Sequence[int]", size) if isinstance(size, (list, tuple)) else (size, size)
    return int(getattr(seen, "num_channels", _CHANNELS)), *map(int, sides)
