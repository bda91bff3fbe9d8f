"""What tests of several processes share: rows of each, a folder of all, what is said, and how far results are apart."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn


def own_rows(values: Any) -> Any:
    """Return this process's rows of a tensor, or of each tensor in a dict: as many as the others have."""
    if isinstance(values, Mapping):
        return {name: own_rows(value) for name, value in values.items()}
    return values[distributed.get_rank() :: distributed.get_world_size()].contiguous()


def uneven_rows(x: Tensor) -> Tensor:
    """Return this process's rows: two thirds, and the rest."""
    cut = 2 * len(x) // 3
    return x[:cut] if distributed.get_rank() == 0 else x[cut:]


def shared_folder() -> Path:
    """Return a new folder that all processes know."""
    agreed = [tempfile.mkdtemp() if distributed.get_rank() == 0 else ""]
    distributed.broadcast_object_list(agreed)
    return Path(agreed[0])


def said(run: Callable[[], Any]) -> str:
    """Return the type and the message of what a function raises."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def summed(tensor: Tensor) -> Tensor:
    """Return the sum over all processes."""
    total = tensor.clone()
    distributed.all_reduce(total)
    return total


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference beside the scale."""
    return float((one - other).abs().max() / other.abs().max())


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest difference beside the scale of all."""
    assert list(one) == list(other)
    scale = max(float(tensor.abs().max()) for tensor in other.values())
    return max(float((one[name] - tensor).abs().max()) for name, tensor in other.items()) / scale


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor that may be split; every process calls this."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name, those of sharded parameters whole."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: whole(gradient) for name, gradient in found.items() if gradient is not None}
