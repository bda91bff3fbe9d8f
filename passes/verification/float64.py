"""The float64 reference: run eager code in double precision although it casts to, or creates, narrower floats."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...compat import DispatchMode, draws_randomly, is_view_operator, operator_name
from ...compat.operators import written_arguments
from ...operators import operator_info

__all__ = ["Float64Mode", "Table", "double_defaults", "narrow", "widened"]


class Table(NamedTuple):
    """What identifiers pick from."""

    length: int  # how many there are to pick from, from 0 on; 0: that is not known
    apart: int | None = None  # a number besides, which picks nothing: of labels that do not count


_Picked = tuple[int | Table, Sequence[Tensor | None]]

_PLACING = ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_reduce")

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def narrow(dtype: torch.dtype, wide: torch.dtype = torch.float64) -> bool:
    """Say whether `dtype` is a float or complex type that float64 replaces; 8-bit floats are left alone."""
    if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize < 2:
        return False
    return dtype.itemsize < (_COMPLEX[wide] if dtype.is_complex else wide).itemsize


def widened(dtype: torch.dtype, wide: torch.dtype = torch.float64) -> torch.dtype:
    """Return the type that stands for `dtype` in the reference: float64, complex128, or itself."""
    if not narrow(dtype, wide):
        return dtype
    return _COMPLEX[wide] if dtype.is_complex else wide


@contextmanager
def double_defaults(wide: torch.dtype = torch.float64) -> Generator[None]:
    """Make Python numbers and factory functions yield `wide` for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Float64Mode(DispatchMode):
    """Promote inner casts, factories and stray narrow tensors to `wide`, and note what the code is made of. Autocast
    needs no treatment: it never casts a float64 tensor down.
    """

    def __init__(self, wide: torch.dtype = torch.float64, in_time: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.wide, self._in_time = wide, in_time
        self.promoted = False  # whether there was anything to promote; if not, the code runs alike without this mode
        self.random = False  # whether a random operator ran
        self._tables: dict[int, Table] = {}
        self._casts: dict[int, tuple[int, Tensor]] = {}
        """Where integers lie that others were cast to, and those; held, so that their memory goes to nobody else."""

    def tables_of(self, arguments: Mapping[str, Tensor]) -> dict[str, Table]:
        """Return the arguments that were used to pick from tables, each with the length of the shortest table: 0 for
        those whose range is not known, as they were only compared, sorted, counted, or said where to write.
        """
        places = {name: _place(tensor) for name, tensor in arguments.items() if _counts(tensor)}
        return {name: self._tables[place] for name, place in places.items() if place in self._tables}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._in_time()
        self.random = self.random or draws_randomly(func, args, kwargs or {})
        picked = _PICKING.get(operator_name(func) or "")
        if picked is not None:
            self._note_table(*picked(*args))
        if is_view_operator(func):
            return func(*args, **(kwargs or {}))
        written = written_arguments(func)
        args = [item if i in written else self._widen(item) for i, item in enumerate(args)]
        named: dict[str, Any] = kwargs or {}
        named = {key: item if key in written else self._widen(item) for key, item in named.items()}
        result = self._run(func, args, named)
        if operator_name(func) == "aten::_to_copy" and _counts(args[0]) and _counts(result):
            self._casts[_place(result)] = self._origin(args[0]), result
        return result if written else self._widen(result)

    def _note_table(self, table: int | Table, picks: Sequence[Tensor | None]) -> None:
        new = table if isinstance(table, Table) else Table(table)
        for pick in picks:
            if pick is not None and _counts(pick):
                place = self._origin(pick)
                known = self._tables.get(place, Table(0))
                lengths = [length for length in (known.length, new.length) if length]
                self._tables[place] = Table(min(lengths, default=0), known.apart if new.apart is None else new.apart)

    def _origin(self, tensor: Tensor) -> int:
        """Return where integers lie, or those that they were cast from."""
        place = _place(tensor)
        return self._casts[place][0] if place in self._casts else place

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, or what is said to compute it in float64."""
        reference = None if func.namespace == "aten" else operator_info(operator_name(func)).reference
        if reference is None:
            return func(*args, **kwargs)
        self.promoted = True
        with self:
            return reference(*args, **kwargs)

    def _widen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if not narrow(value.dtype, self.wide):
                return value
            self.promoted = True
            return value.to(widened(value.dtype, self.wide))
        if isinstance(value, torch.dtype):
            self.promoted = self.promoted or narrow(value, self.wide)
            return widened(value, self.wide)
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in cast("list[Any]", value)):
            return type(cast("Any", value))(self._widen(item) for item in cast("list[Any]", value))
        return cast("Any", value)


def _counts(tensor: Tensor) -> bool:
    is_integer = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.dtype is not torch.bool
    return is_integer and tensor.layout is torch.strided


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _indexed(table: Tensor, picks: Sequence[Tensor | None], *_: Any) -> _Picked:
    return min((size for size, pick in zip(table.shape, picks, strict=False) if pick is not None), default=0), picks


def _embedded(table: Tensor, picks: Tensor, *_: Any) -> _Picked:
    return len(table), [picks]


def _gathered(table: Tensor, dim: int, picks: Tensor, *_: Any) -> _Picked:
    return (table.shape[dim] if table.dim() else 1), [picks]


def _compared(*operands: Any) -> _Picked:
    return 0, [operand for operand in operands if isinstance(operand, Tensor)]


def _placed(target: Tensor, dim: int, places: Tensor, source: Any = None, *_: Any) -> _Picked:
    """Numbers that are alike may be put anywhere: one-hot classes."""
    is_known = isinstance(source, (int, float)) and target.dim() > 0
    return (target.shape[dim] if is_known else 0), [places]


def _labelled(scores: Tensor, labels: Tensor, _: Any, __: int, apart: int) -> _Picked:
    return Table(scores.shape[1 if scores.dim() > 1 else 0], apart), [labels]


_PICKING: Mapping[str, Callable[..., _Picked]] = {
    "aten::embedding": _embedded,
    "aten::_embedding_bag": _embedded,
    "aten::index": _indexed,
    "aten::index_select": _gathered,
    "aten::gather": _gathered,
    **dict.fromkeys(("aten::nll_loss_forward", "aten::nll_loss2d_forward"), _labelled),
    **dict.fromkeys(("aten::eq", "aten::ne", "aten::sort", "aten::bincount", "aten::histc"), _compared),
    **dict.fromkeys((f"aten::{name}{end}" for name in _PLACING for end in ("", "_")), _placed),
}
"""Operators that pick from tables, or take identifiers: how long the table is (0: not known), and by what they pick."""
