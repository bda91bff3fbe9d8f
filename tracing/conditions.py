"""Write the conditions of a graph as Python; what many of them read is looked up once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from .guards import NOT_HELD, Guard
from .outside import bound

__all__ = ["fits"]

_DICTIONARY = r"self(?:\.\w+|\[\d+\]|\['\w+'\])*\.__dict__"
_ITEM = re.compile(rf"({_DICTIONARY})\['\w+'\] == ")
_MISSING = re.compile(rf"'\w+' not in ({_DICTIONARY})$")


_SIZE = re.compile(r"(?<![\w.)\]])[A-Za-z_]\w*\.(?:shape|size\(\))(?![\w(])")


def _conjunction(guards: Sequence[Guard], fresh: Callable[[str], str], name: Callable[[object], str]) -> str:
    """Return one expression for all of `guards`, in their order; see `fits`."""
    found = [_ITEM.match(guard.expression) or _MISSING.match(guard.expression) for guard in guards]
    counts = Counter(match[1] for match in found if match is not None)
    names: dict[str, str] = {}
    written: list[str] = []
    for guard, match in zip(guards, found, strict=True):
        if match is None or counts[match[1]] == 1:
            written.append(f"({guard.expression})")
            continue
        known = names.get(match[1])
        if known is None:
            names[match[1]] = fresh("held")
        # A class may have a slow way of reading of its own, which says nothing else of the dictionary.
        read = f"{name(object.__getattribute__)}({match[1].removesuffix('.__dict__')}, '__dict__')"
        dictionary = known or f"({names[match[1]]} := {read})"
        written.append(f"({guard.expression[: match.start(1)]}{dictionary}{guard.expression[match.end(1) :]})")
    return bound(" and ".join(_sizes_asked_once(written, fresh)), name)


def _sizes_asked_once(written: Sequence[str], fresh: Callable[[str], str]) -> list[str]:
    """Return conditions that ask a tensor for its shape once: each time takes longer than to compare the answer."""
    plain = [condition for condition in written if "'" not in condition and '"' not in condition]
    counts = Counter(size for condition in plain for size in _SIZE.findall(condition))
    names: dict[str, str] = {}

    def name(match: re.Match[str]) -> str:
        size = match[0]
        if counts[size] == 1:
            return size
        if size in names:
            return names[size]
        names[size] = fresh("size")
        return f"({names[size]} := {size})"

    return [_SIZE.sub(name, condition) if condition in plain else condition for condition in written]


def fits(guards: Sequence[Guard], fresh: Callable[[str], str], name: Callable[[object], str]) -> tuple[list[str], str]:
    """Return lines that find out whether all of `guards` hold, and an expression that says so after them.

    Args:
        guards: the conditions; one that cannot be asked (a key that is gone) does not hold.
        fresh: gives a name that nothing has, from a hint.
        name: gives a name for an object.
    """
    text = _conjunction(guards, fresh, name)
    if not re.search(r"[.\[]", text):
        return [], text
    answer = fresh("fits")
    return [
        "try:",
        f"    {answer} = {text}",
        f"except {name(NOT_HELD)}:",
        f"    {answer} = False",
    ], answer
