"""Which cases `make test` runs of those that differ in numbers or sizes only; `make nightly` runs the others, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

__all__ = ["each_value_once", "later", "share"]

_CASE = type(pytest.param())


def later(case: Any) -> Any:
    """Return a case that runs in `make nightly` only."""
    values = case.values if isinstance(case, _CASE) else case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, id=getattr(case, "id", None), marks=pytest.mark.nightly)


def share(of: int, cases: Iterable[Any]) -> list[Any]:
    """Return the cases, of each `of` in a row one as it is, at another place in each row, and the others for later."""
    return [case if (number // of + number) % of == 0 else later(case) for number, case in enumerate(cases)]


def each_value_once(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that products of `parametrize` can spare: all their values are in cases before them."""
    seen: dict[str, set[object]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and len(values := _values(item)) > 1:
            known = seen.setdefault(item.nodeid.partition("[")[0], set())
            if values <= known:
                yield item
            known |= values


def _values(item: pytest.Function) -> set[object]:
    """Return what each `parametrize`, or fixture with parameters, gives a case: equal ones are the same object."""
    given: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [[name.strip() for name in (m.split(",") if isinstance(m, str) else m)] for m in marks]
    alone = [[name] for name in given if not any(name in group for group in groups)]
    return {tuple((name, id(given[name])) for name in group if name in given) for group in (*groups, *alone)}
