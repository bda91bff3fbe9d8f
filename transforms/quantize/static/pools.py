"""Max pooling, as a module or a function, that can be done on numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import fx, nn

from ....compat import has_hooks
from ....operators import canonical_name, normalized_arguments
from ....runtime.values import user_class
from ....tracing.program import Program

__all__ = ["pooling_of"]

_SETTINGS: Mapping[str, Any] = {
    "kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False, "return_indices": False,
}  # fmt: skip
"""Of max pooling, with what they are by default."""


def pooling_of(program: Program, owner: str, node: fx.Node) -> tuple[list[int], list[int], list[int]] | None:
    """Return the kernel, stride and padding of a node that pools images by the largest; None of any other node."""
    settings = _settings(program, owner, node)
    if settings is None or settings["ceil_mode"] or settings["return_indices"] or _pair(settings["dilation"]) != [1, 1]:
        return None
    kernel = settings["kernel_size"]
    pairs = [_pair(given) for given in (kernel, settings["stride"] or kernel, settings["padding"])]
    known = [pair for pair in pairs if pair is not None]
    return (known[0], known[1], known[2]) if len(known) == 3 else None


def _settings(program: Program, owner: str, node: fx.Node) -> Mapping[str, Any] | None:
    if node.op == "call_module":
        module = program.callee(owner, node)
        is_pool = user_class(type(module)) is nn.MaxPool2d and not has_hooks(module)
        return {name: getattr(module, name) for name in _SETTINGS} if is_pool else None
    if canonical_name(node) != "max_pool2d":
        return None
    named = normalized_arguments("max_pool2d", node.target, node.args, node.kwargs).named
    return {name: named.get(name, default) for name, default in _SETTINGS.items()}


def _pair(value: Any) -> list[int] | None:
    values = list(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else [value, value]
    return values if len(values) == 2 and all(type(each) is int for each in values) else None
