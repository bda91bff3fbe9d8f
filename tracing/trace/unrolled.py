"""Trace a call as it went: what its data decided is decided as it was, and a loop over them becomes its rounds."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor, fx, nn

from ..proxies import ValueProxy
from ..values import copied, user_class
from .decisions import Decisions
from .tracer import ModuleTracer

__all__ = ["UnrollingTracer"]


class UnrollingTracer(ModuleTracer):
    """Trace a call as it went. The graph is to be read: it holds for the recorded numbers only.

    Attributes:
        seen: node -> its value in the recorded call, as the operation gave it.
        opened: the children whose calls are traced through.
    """

    opened: frozenset[nn.Module] = frozenset()

    @property
    def forward(self) -> Callable[..., Any]:
        """Return the forward that the user wrote, under what was wrapped around it."""
        return inspect.unwrap(user_class(type(self.module)).forward)

    def opens(self, child: nn.Module) -> bool:
        return child in self.opened

    def _decisions(self) -> Decisions:
        self.seen: dict[fx.Node, Any] = {}
        return _Answers(self, self.messages)

    def _proxy(self, node: fx.Node, value: Any) -> ValueProxy:
        proxy = super()._proxy(node, value)
        changes = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        self.seen[node] = copied(value) if changes else value
        return proxy


class _Answers(Decisions):
    """Answer what hangs on data as it was, and keep no guard of it."""

    def truth(self, proxy: ValueProxy) -> bool:
        return self._as_it_was(proxy, bool) if self._hangs_on_data(proxy) else super().truth(proxy)

    def plain(self, proxy: ValueProxy, source: str | None = None) -> Any:
        return self._as_it_was(proxy, _plain) if self._hangs_on_data(proxy) else super().plain(proxy, source)

    def text(self, proxy: ValueProxy, spec: str) -> str:
        if not self._hangs_on_data(proxy):
            return super().text(proxy, spec)
        return self._as_it_was(proxy, lambda value: format(value, spec))

    def index(self, proxy: ValueProxy, frame: FrameType) -> int:
        if not isinstance(proxy.fxopt_value, Tensor) and not self._hangs_on_data(proxy):
            return super().index(proxy, frame)
        return self._as_it_was(proxy, operator.index)

    def _assume_length(self, proxy: ValueProxy, count: int) -> None:
        if not self._tracer.data.decides(self._length(proxy)):
            super()._assume_length(proxy, count)

    def _as_it_was(self, proxy: ValueProxy, ask: Callable[[Any], Any]) -> Any:
        value = self._known(proxy)
        with self._tracer.session.suspended():
            return ask(value)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
