"""The arguments of a captured forward: the same names, kinds and defaults as the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

__all__ = ["Absent", "Signature", "given", "signature_of"]

_Kind = inspect.Parameter
_POSITIONAL = (_Kind.POSITIONAL_ONLY, _Kind.POSITIONAL_OR_KEYWORD)


class Absent:
    """Stand, itself, for an argument or attribute that is not there: as a class it survives copies and pickles."""


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that a call did give."""
    return {name: value for name, value in arguments.items() if value is not Absent}


@dataclass(frozen=True)
class Signature:
    """Hold the parameters of a forward, without `self`. If `decorated`, what is not given is `Absent`."""

    parameters: tuple[inspect.Parameter, ...]
    decorated: bool = False

    @classmethod
    def of_names(cls, names: Iterable[str]) -> Signature:
        """Return the signature of a forward that takes `names`, all of them required."""
        return cls(tuple(_Kind(name, _Kind.POSITIONAL_OR_KEYWORD) for name in names))

    @cached_property
    def header(self) -> str:
        """Return the parameter list as source text; each default is written None, and set on the function later."""
        first = self.parameters[:1]
        kind = (
            _Kind.POSITIONAL_ONLY if first and first[0].kind is _Kind.POSITIONAL_ONLY else _Kind.POSITIONAL_OR_KEYWORD
        )
        bare = [
            p.replace(annotation=_Kind.empty, default=p.default if p.default is _Kind.empty else None)
            for p in self.parameters
        ]
        return str(inspect.Signature([_Kind("self", kind), *bare]))[1:-1]

    def forwarding(self, given_name: str) -> str:
        """Return the arguments as source text, to hand them on in a call; `given_name` is what `given` is called."""
        if self.decorated:
            named = ", ".join(f"{p.name}={p.name}" for p in self.parameters if p.kind is not _Kind.VAR_KEYWORD)
            rest = "".join(f", **{p.name}" for p in self.parameters if p.kind is _Kind.VAR_KEYWORD)
            return f"**{given_name}({named}){rest}"
        forms = {_Kind.VAR_POSITIONAL: "*{0}", _Kind.VAR_KEYWORD: "**{0}", _Kind.KEYWORD_ONLY: "{0}={0}"}
        return ", ".join(forms.get(p.kind, "{0}").format(p.name) for p in self.parameters)

    @property
    def defaults(self) -> tuple[Any, ...]:
        """Return the defaults of the positional parameters."""
        return tuple(
            self._default(p) for p in self.parameters if p.kind in _POSITIONAL and p.default is not _Kind.empty
        )

    @property
    def keyword_defaults(self) -> dict[str, Any]:
        """Return the defaults of the keyword-only parameters."""
        kind = _Kind.KEYWORD_ONLY
        return {p.name: self._default(p) for p in self.parameters if p.kind is kind and p.default is not _Kind.empty}

    @cached_property
    def _binder(self) -> Callable[..., dict[str, Any]]:
        """Return a function with these parameters, after `self`, that returns their values: Python binds fastest."""
        values = ", ".join(f"{p.name!r}: {p.name}" for p in self.parameters)
        names: dict[str, Any] = {}
        # Nothing but names of parameters is in the text.
        exec(f"def forward({self.header}): return {{{values}}}", names)  # noqa: S102
        binder = names["forward"]
        binder.__defaults__, binder.__kwdefaults__ = self.defaults or None, self.keyword_defaults or None
        return binder

    def __getstate__(self) -> dict[str, Any]:
        return {"parameters": self.parameters, "decorated": self.decorated}

    def _default(self, parameter: inspect.Parameter) -> Any:
        return Absent if self.decorated else parameter.default

    def bind(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameter name -> value for one call, `Absent` for what is not there, or raise a TypeError."""
        return self._binder(None, *args, **kwargs)


def signature_of(forward: Callable[..., Any], *, follow_wrapped: bool = True) -> Signature:
    """Return the signature of an unbound forward; `follow_wrapped` takes that of the function a decorator wrapped."""
    parameters = list(inspect.signature(forward, follow_wrapped=follow_wrapped).parameters.values())
    if not parameters or parameters[0].kind is not _Kind.VAR_POSITIONAL:
        parameters = parameters[1:]
    return Signature(tuple(parameters), follow_wrapped and _is_transparent(forward, parameters))


def _is_transparent(forward: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> bool:
    """Tell whether a decorated forward's arguments can all be handed on by name."""
    unnamed = (_Kind.POSITIONAL_ONLY, _Kind.VAR_POSITIONAL)
    return inspect.unwrap(forward) is not forward and all(p.kind not in unnamed for p in parameters)
