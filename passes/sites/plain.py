"""Plain values: what a plan, which is JSON, gives back as it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ...errors import UsageError

__all__ = ["as_plain"]


def as_plain(value: Any, where: str) -> Any:
    """Return a value as JSON gives it back, tuples as lists; raise UsageError, naming `where`, for any other."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [as_plain(item, f"{where}[{number}]") for number, item in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        odd = next((key for key, _ in items if type(key) is not str), None)
        if odd is not None:
            raise UsageError(f"{where} has the key {odd!r}; a plan stores texts as keys")
        return {key: as_plain(item, f"{where}[{key!r}]") for key, item in items}
    advice = "; use .tolist()" if hasattr(value, "tolist") else ""
    shown = f"{value}" if type(value) is float else f"a {type(value).__name__}"
    raise UsageError(f"{where} is {shown}, which a plan cannot store: plain values only{advice}")
