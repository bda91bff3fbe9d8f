"""What traced code sees in the place of values, and the session that sends its operations to a tracer."""

from __future__ import annotations

from .memos import asks_memo
from .protocol import Tracer
from .proxy import PLAIN, UNKNOWN, MethodProxy, ValueProxy, examples_of, is_tensor_method, proxies_in
from .session import Session

__all__ = [
    "PLAIN", "UNKNOWN", "MethodProxy", "Session", "Tracer", "ValueProxy", "asks_memo", "examples_of",
    "is_tensor_method", "proxies_in",
]  # fmt: skip
