"""Build a model from `package.module:factory`, the one way to name code that a file or a command line has."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import nn

from ..errors import InputError, UsageError, did_you_mean, one_line
from .configurations import is_configuration, model_of_configuration

__all__ = [
    "build_model", "find_factory", "find_function", "import_module", "importable", "is_trusted", "module_of",
    "name_class", "owner_of",
]  # fmt: skip

_SPEC = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<path>[^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def find_factory(spec: str) -> Callable[[], object]:
    """Import the function or class without arguments that `package.module:factory` names; `InputError` if it breaks."""
    found = _imported(spec)
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(f"{spec!r} is of type {type(found).__name__}, not a function or class that builds a model")
    missing = _required_parameters(found)
    if missing:
        module_name, _ = _parts(spec)
        configuration: Any = getattr(found, "config_class", None)
        other = (
            f"its configuration, {module_name}:{configuration.__name__}"
            if configuration
            else "a function that needs none"
        )
        raise UsageError(f"{spec!r} needs arguments ({', '.join(missing)}); name {other}")
    return found


def find_function(spec: str) -> Callable[..., Any]:
    """Import the function that `package.module:function` or `path/to/file.py:function` names."""
    found = _imported(importable(spec))
    if not callable(found):
        raise UsageError(f"{spec!r} is of type {type(found).__name__}, not a function")
    return found


def _imported(spec: str) -> Any:
    """Import what `package.module:name` names."""
    module_name, path = _parts(spec)
    found: Any = import_module(module_name)
    for attribute in path.split("."):
        owner, found = found, getattr(found, attribute, None)
        if found is None:
            public = [name for name in dir(owner) if not name.startswith("_")]
            raise UsageError(f"{spec!r}: {module_name} has no {attribute!r}{did_you_mean(attribute, public)}")
    return found


def build_model(spec: str) -> nn.Module:
    """Return the model that a factory builds, or that of the configuration of `transformers` that it returns.

    Raises `InputError` if it raises or returns something else.
    """
    factory = find_factory(spec)
    try:
        model = factory()
    except (Exception, SystemExit) as error:
        raise InputError(f"{spec!r} raised {type(error).__name__}: {one_line(error)}") from error
    if is_configuration(model):
        return model_of_configuration(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"{spec!r} returned {type(model).__name__}, expected a torch.nn.Module")
    return model


def import_module(name: str) -> ModuleType:
    """Import a module by name; raise `UsageError` if it is not there, `InputError` if it is broken."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            folders = ", ".join(folder or "." for folder in sys.path[:2])
            raise UsageError(f"there is no module {error.name!r}; looked in {folders} and elsewhere") from error
        raise InputError(f"importing {name!r} failed: {one_line(error)}") from error
    except (Exception, SystemExit) as error:  # a script may parse its own arguments and exit
        raise InputError(f"importing {name!r} raised {type(error).__name__}: {one_line(error)}") from error


def importable(spec: str) -> str:
    """Return `package.module:factory` for `path/to/file.py:factory`, whose folder can be imported from then."""
    place, separator, path = spec.rpartition(".py:")
    if not separator:
        return spec
    file = Path(f"{place}.py").resolve()
    if not file.is_file():
        raise UsageError(f"{spec!r}: there is no file {place}.py")
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        names, folder = [folder.name, *names], folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = ".".join(names[:-1] if file.stem == "__init__" else names)
    found = getattr(import_module(module), "__file__", None)
    if found is None or Path(found).resolve() != file:
        raise UsageError(f"{spec!r}: another module is called {module!r} ({found or 'built in'}); rename the file")
    return f"{module}:{path}"


def module_of(spec: str) -> str:
    """Return the module part of `package.module:factory`; raise `UsageError` if it is not written so."""
    return _parts(spec)[0]


def owner_of(spec: str) -> str:
    """Import what `package.module:factory` names, and return the module that it was defined in."""
    found: Any = find_factory(spec)
    while isinstance(found, functools.partial):
        found = cast("functools.partial[object]", found).func
    found = inspect.unwrap(found)
    owner = getattr(found, "__module__", None) or type(found).__module__
    return str(owner)


def is_trusted(module: str, packages: Iterable[str]) -> bool:
    """Say whether a module is one of these packages or inside one."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def name_class(kind: type[nn.Module]) -> str | None:
    """Return `module:Class` if importing that gives the class back and it needs no arguments, else None."""
    spec = f"{kind.__module__}:{kind.__qualname__}"
    if kind.__module__ == "__main__" or not _SPEC.fullmatch(spec):
        return None
    found: Any = sys.modules.get(kind.__module__)
    for attribute in kind.__qualname__.split("."):
        found = getattr(found, attribute, None)
    return spec if found is kind and not _required_parameters(kind) else None


def _parts(spec: str) -> tuple[str, str]:
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec!r} does not name a model; write package.module:factory")
    return match["module"], match["path"]


def _required_parameters(factory: Callable[..., object]) -> list[str]:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # built-in callables may have none
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind not in optional]
