"""Attention weights that a module returns: who reads them, mostly nobody, and what stands in their place."""

from __future__ import annotations

import operator
from typing import Any, NoReturn, cast

from torch import fx, nn

from ...compat import has_hooks, modules_by_name
from ...errors import FxoptError
from ...passes.sites import Site
from ...tracing.program import CallSites, Program

__all__ = ["readers_of", "weights_left_out"]


def readers_of(program: Program, owner: str, node: fx.Node) -> list[Site] | None:
    """Return where calls of a module end that returns a node unread; None where somebody may read it."""
    returned = _several(node.graph.output_node().args[0])
    places = [number for number, each in enumerate(returned) if each is node]
    return _callers(program, program.module(owner), places[0], depth=3) if len(places) == 1 else None


def _several(returned: Any) -> list[Any]:
    return list(cast("tuple[Any, ...]", returned)) if isinstance(returned, (tuple, list)) else []


def _callers(program: Program, module: nn.Module, position: int, depth: int) -> list[Site] | None:
    calls = program.analyses[CallSites].of(module)
    if not calls or depth == 0 or has_hooks(module) or not _is_captured_around(program, module):
        return None
    found: list[Site] = []
    for owner, number, call in calls:
        ends = _end(program, owner, number, call, position, depth)
        if ends is None:
            return None
        found += ends
    return found


def _end(program: Program, owner: str, number: int, call: fx.Node, position: int, depth: int) -> list[Site] | None:
    """Return where it is unread: the caller, or those that call it in turn where it only hands it on."""
    reads = [user for user in call.users if user.target is not len]
    indices = [user.args[1] if user.target is operator.getitem else None for user in reads]
    if not all(isinstance(index, int) and index >= 0 for index in indices):
        return None
    handed_on = [user for user in reads if user.args[1] == position and user.users]
    if not handed_on:
        return [Site(program, owner, {f"{owner}/{call.name}/{number}": call.name}, number)]
    output = call.graph.output_node()
    returned = _several(output.args[0])
    places = [place for place, each in enumerate(returned) if each in handed_on]
    if len(handed_on) != 1 or len(places) != 1 or list(handed_on[0].users) != [output]:
        return None
    return _callers(program, program.module(owner), places[0], depth - 1)


def _is_captured_around(program: Program, module: nn.Module) -> bool:
    """Say whether every module around it that runs itself has a graph: no other call is unseen."""
    everywhere = modules_by_name(program.model, every_name=True).items()
    names = [name for name, each in everywhere if each is module]
    around = {".".join(name.split(".")[:count]) for name in names for count in range(name.count(".") + 1)}
    captures = program.captures
    return all(name in captures or type(program.module(name)).forward is nn.Module.forward for name in around)


# -- what stands in their place ------------------------------------------------------------------------------------


class _LeftOut:
    """Attention weights that were not computed; any use of them is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return "<attention weights that were left out>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FxoptError(
            "these attention weights were left out by the pass 'attention', as no call in example_inputs read them; "
            "add the call that does to example_inputs, or call fxopt.restore"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = __torch_function__ = _refuse


_LEFT_OUT = _LeftOut()


def weights_left_out() -> Any:
    """Return what stands for weights that were not computed."""
    return _LEFT_OUT
