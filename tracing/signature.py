"""The arguments of a captured forward: the same names, kinds and defaults as the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Signature", "signature_of"]

_Kind = inspect.Parameter


@dataclass(frozen=True)
class Signature:
    """Hold the parameters of a forward, without `self`."""

    parameters: tuple[inspect.Parameter, ...]

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Signature:
        """Return the signature of a forward that takes `names`, all of them required."""
        return cls(tuple(_Kind(name, _Kind.POSITIONAL_OR_KEYWORD) for name in names))

    @property
    def header(self) -> str:
        """Return the parameter list as source text; each default is written None, and set on the function later."""
        first = self.parameters[:1]
        kind = _Kind.POSITIONAL_ONLY if first and first[0].kind is _Kind.POSITIONAL_ONLY else _Kind.POSITIONAL_OR_KEYWORD
        bare = [
            p.replace(annotation=_Kind.empty, default=p.default if p.default is _Kind.empty else None)
            for p in self.parameters
        ]
        return str(inspect.Signature([_Kind("self", kind), *bare]))[1:-1]

    @property
    def forwarding(self) -> str:
        """Return the arguments as source text, to hand them on in a call."""
        forms = {_Kind.VAR_POSITIONAL: "*{0}", _Kind.VAR_KEYWORD: "**{0}", _Kind.KEYWORD_ONLY: "{0}={0}"}
        return ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in self.parameters)

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Return the defaults of the positional parameters."""
        kinds = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)
        return tuple(p.default for p in self.parameters if p.kind in kinds and p.default is not _Kind.empty)

    @property
    def keyword_defaults(self) -> dict[str, Any]:
        """Return the defaults of the keyword-only parameters."""
        return {
            p.name: p.default
            for p in self.parameters
            if p.kind is _Kind.KEYWORD_ONLY and p.default is not _Kind.empty
        }

    def bind(self, args: Iterable[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return parameter name -> value for one call, defaults filled in.

        Raises:
            TypeError: if the arguments do not fit.
        """
        bound = inspect.Signature(self.parameters).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


def signature_of(forward: Callable[..., Any], *, follow_wrapped: bool = True) -> Signature:
    """Return the signature of an unbound forward.

    Args:
        forward: the function as it stands on the class.
        follow_wrapped: take the parameters of the function that a decorator wrapped.
    """
    parameters = list(inspect.signature(forward, follow_wrapped=follow_wrapped).parameters.values())
    if parameters and parameters[0].kind is _Kind.VAR_POSITIONAL:
        return Signature(tuple(parameters))
    return Signature(tuple(parameters[1:]))
