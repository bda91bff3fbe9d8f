"""A region of a graph, computed by an engine where that gives the same, and by its own operations everywhere else."""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ...compat import dispatch_modes_off, runs_kernels, wants_gradients
from ...errors import EngineWarning, one_line
from ...operators import Keeping, Unchanged
from ...runtime.graphs import PortableGraph, copy_graph
from ...runtime.values import ContextFlag
from .conversion import MOST_SHAPES, Converted, OtherNumbers, OtherType, Refused, converted, is_forked, key_of, sum_of
from .engine import OtherSizes
from .engines import engine_named
from .one_thread import OneThread, numbers_of
from .trial import noted, try_apart

__all__ = ["DelegatedRegion", "judged_outside"]

_MOST_KEPT = 2
"""For so many copies of a model the engine holds the numbers at a time."""

_MOST_WAITING = 8
"""Of so many copies that the engine does not hold is noted how long they compute by themselves."""

_ERROR = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.int8: 1e-1}
"""What a result may be off, relative to its scale, at the first call with new shapes. How exact an engine is was
verified before; an engine that took a size for a constant is off by more."""

_MOST, _LOWEST = 1e6, torch.finfo(torch.float32).min
"""Larger inputs may overflow inside, and then engines give numbers for NaN."""

_SUMMED = 8
"""So many times as many numbers are summed in one thread as are written: 6.4 million took 1.7 ms of processor time in
one, and 8 to 12 ms in two, which then wait for more."""

_TAKEN = frozenset((torch.float32, torch.int64, torch.int32, torch.bool))
"""What inputs may hold: a model in float64 computes in float64, and other types are rare."""


judged_outside = ContextFlag("judged_outside")
"""No region compares what its engine gives with its own operations, as it is prepared or called, nor times what it
prepares: who runs the model compares what comes of it, and says what is faster.
"""


@dataclass
class _Waiting:
    """Tensors that the engine does not hold, and how long the region computed with them by itself."""

    unchanged: Unchanged
    seconds: float = 0.0
    is_refused: bool = False  # no engine takes them as they are


class DelegatedRegion(Keeping):
    """Compute a region of a graph by an engine, on the parameters and buffers of the model as they are.

    A graph calls it with what the region is given, and then with the tensors of the model that it reads; the result is
    a tuple. The region's own operations run where a gradient could be asked for, under autocast, in compiled, exported
    and transformed code, on other types than float32, for NaN and infinities, and where the engine fails. With shapes
    that it has not seen they run beside the engine once: what they check is checked, and the results are compared.
    Where shapes do not come again, they run alone.

    What the engine holds is made of the model's tensors. Where these were changed, the region's own operations run
    until they have taken as long as a conversion does; then the engine takes the new numbers.
    """

    operator = "delegated"
    __name__ = "delegated_region"

    def __init__(self, engine: str, graph: fx.Graph, inputs: int, dtype: torch.dtype = torch.float32) -> None:
        self.engine, self.graph, self.inputs, self.dtype = engine, graph, inputs, dtype
        self._own: Callable[..., Any] = cast("Any", fx.GraphModule(nn.Module(), graph, "Region")).forward
        self._lock = threading.RLock()
        self._converted: dict[int, Converted] = {}
        """By the identity of a tensor of the model: copies of a model may share a graph."""
        self._waiting: dict[int, _Waiting] = {}
        self._copies = weakref.WeakSet[DelegatedRegion]((self,))
        """Copies of it, too: what is made for one of them serves all that hold the same numbers."""
        self.left = ""
        """Why the region does without its engine."""
        self._told = ""
        self._fixes: bool | None = None
        """Whether the engine has a session for the shapes of the example alone; None where that is not decided."""

    def __call__(self, *operands: Any) -> Sequence[Tensor]:
        """Return what the region computes, each result in memory of its own."""
        if self.left or wants_gradients(*operands) or not runs_kernels() or is_forked():
            return self._own(*operands)
        inputs, tensors = operands[: self.inputs], operands[self.inputs :]
        with OneThread(numbers_of(inputs)):
            are_taken = all(map(_is_taken, inputs))
        if not are_taken:
            return self._own(*operands)
        held = self._current(inputs, tensors)
        if held is None:
            return self._by_itself(operands, tensors)
        key = key_of(inputs)
        if key not in held.by_shapes:
            if not held.takes(inputs) or not (judged_outside or held.is_worth_comparing(key)):
                return self._own(*operands)
            return (self._judged_outside if judged_outside else self._first)(held, key, operands)
        session = held.by_shapes[key]
        if session is None:
            return self._own(*operands)
        held.once.discard(key)
        try:
            found = session([x.detach().contiguous() for x in inputs])
            with OneThread(numbers_of(found) // _SUMMED):
                is_finite = all(map(_is_finite, found))
        except Exception as error:
            self._give_up(error)
            return self._own(*operands)
        # Engines have rules of their own for what overflows inside, and for rows of which everything is masked.
        return found if is_finite else self._own(*operands)

    # -- what the engine holds -----------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Return about how much memory the engine takes: the tensors again, for each number of threads."""
        held = tuple(self._converted.values())
        sessions = {id(session): each for each in held for session in each.sessions}
        return sum(tensor.nbytes for each in sessions.values() for tensor, *_ in each.noted)

    @property
    def is_fixed(self) -> bool:
        """Say whether the engine has taken the tensors twice: once more for the shapes of the example alone."""
        return any(held.fixed for held in tuple(self._converted.values()))

    @property
    def is_held_twice(self) -> bool:
        """Say whether it holds them twice now: for other shapes, too."""
        return any(held.fixed and len(held.sessions) > len(held.fixed) for held in tuple(self._converted.values()))

    def repeat_choice(self, *, fixed: bool) -> None:
        """Hold the tensors for the shapes of the example alone, too, or not, as was decided for an equal region."""
        with self._lock:
            self._fixes = fixed
            for held in self._converted.values() if fixed else ():
                held.fix()

    def settle(self) -> None:
        """Learn whether a session for the shapes of the example alone is worth its memory, and keep it if so."""
        with self._lock, dispatch_modes_off(), torch.no_grad():
            for held in {id(each.fixed): each for each in self._converted.values()}.values():  # copies share it
                self._fixes = held.settle()

    def prepare(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor], allowed: float = math.inf) -> None:
        """Let the engine take the tensors as they are, for inputs such as these; raise what it raises, or RuntimeError
        where results are off by more than `allowed` of their scale, or so much that the region would do without it.

        A conversion that has ended a process is tried in one of its own first.
        """
        with noted(self._described(inputs, tensors), lambda: try_apart(self, inputs, tensors)):
            self._prepare(inputs, tensors, allowed)

    def _described(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> str:
        """Describe what an engine takes, but for numbers."""
        forms = [(tuple(x.shape), x.dtype) for x in (*inputs, *tensors)]
        return f"{self.engine} {engine_named(self.engine).version} {self.dtype} {len(self.graph.nodes)} {forms}"

    def _prepare(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor], allowed: float) -> None:
        held = self._convert(inputs, tensors)
        if judged_outside or not all(map(_is_taken, inputs)):
            return
        with dispatch_modes_off(), torch.no_grad():
            found = held.session(key_of(inputs))([x.detach().contiguous() for x in inputs])
            if _agree(found, self._own(*inputs, *tensors), min(allowed, _ERROR[self.dtype])) is False:
                raise RuntimeError("it gives something else")

    def forget_all(self) -> None:
        """Compare all numbers with those that the engine took, at the next call: some may have been changed unseen.

        To convert equal numbers anew would cost more than many calls, and models are often set to `eval()` before each.
        """
        with self._lock:
            for held in self._converted.values():
                held.doubted = True
            self._waiting = {key: waiting for key, waiting in self._waiting.items() if not waiting.is_refused}
            self.left = ""

    def forget_gone(self) -> None:
        """Let go of what serves tensors that nobody holds any more: copies of those that it was made of."""
        with self._lock:
            for kept in (self._converted, self._waiting):
                for key in [key for key, each in kept.items() if each.unchanged.first_is_gone]:
                    del kept[key]

    def refresh(self, tensors: Sequence[Tensor]) -> None:
        """Let the engine take the tensors as they are now, at the next call if it has none; raise what it raises."""
        with self._lock:
            held = self._converted.get(_key_of(tensors)) or next(iter(self._converted.values()), None)
            self.left = ""
            if held is not None and not is_forked() and (held.doubted or not held.is_of(tensors)):
                self._convert(held.example, tensors)

    def held(self, tensors: Sequence[Tensor]) -> Converted | None:
        """Return what the engine made of these tensors, if they are as they were then."""
        held = self._converted.get(_key_of(tensors))
        return held if held is not None and not held.doubted and held.is_of(tensors) else None

    def _current(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Converted | None:
        """Return what the engine made of the tensors as they are now; None where it holds others."""
        if (held := self.held(tensors)) is not None:
            return held
        key = _key_of(tensors)
        with self._lock:
            held = self._converted.get(key)  # another thread may have been here
            if held is not None and held.is_of(tensors):
                if not held.doubted or held.checksum == sum_of(tensors):
                    held.doubted = False
                    return held
                del self._converted[key]
                held = None
            if self._is_due(held, key, tensors):
                try:
                    return self._convert(inputs, tensors)
                except OtherNumbers:
                    pass
                except Refused as refusal:
                    self._waiting[key].is_refused = True
                    if not isinstance(refusal, OtherType):  # a model in another type computes in that
                        _warn(f"the model's own operations run: {refusal}")
                except Exception as error:
                    self._give_up(error)
        return None

    def _is_due(self, held: Converted | None, key: int, tensors: Sequence[Tensor]) -> bool:
        waiting = self._waiting.get(key)
        if waiting is None or not waiting.unchanged.same(*tensors):
            try:
                waiting = self._waiting[key] = _Waiting(Unchanged(tensors))
            except RuntimeError:  # a parameter without memory of its own, such as a sparse one
                return False
            while len(self._waiting) > _MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            return held is None
        return not waiting.is_refused and waiting.seconds >= (0.0 if held is None else held.seconds)

    def _convert(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Converted:
        with self._lock:
            known = [each for copy in tuple(self._copies) for each in tuple(copy._converted.values())]
            engine = engine_named(self.engine)
            fixed = False if judged_outside else self._fixes  # whoever repeats a decision says so afterwards
            new = converted(engine, self.graph, inputs, tensors, self.dtype, known, fixed=fixed)
            return self._keep(_key_of(tensors), new)

    def _keep(self, key: int, new: Converted) -> Converted:
        self._converted.pop(key, None)  # what is replaced takes no other's place
        for other, held in tuple(self._converted.items()):
            if held.unchanged.first_is_gone or len(self._converted) >= _MOST_KEPT:
                self._converted.pop(other, None)
        self._converted[key] = new
        self._waiting.pop(key, None)
        return new

    # -- the region's own operations -----------------------------------------------------------------------------

    def _by_itself(self, operands: Sequence[Any], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute by the region's own operations, and note how long that takes."""
        start = time.perf_counter()
        result = self._own(*operands)
        waiting = self._waiting.get(_key_of(tensors))
        if waiting is not None:
            waiting.seconds += time.perf_counter() - start
        return result

    def _first(self, held: Converted, key: Any, operands: Sequence[Any]) -> Sequence[Tensor]:
        """Compute by the engine and by the region's own operations, and note whether they agree."""
        own = self._own(*operands)
        try:
            session = held.session(key)
            inputs = [x.detach().contiguous() for x in operands[: self.inputs]]
            found = session(inputs)
            agree = _agree(found, own, _ERROR[self.dtype])
            if not any(held.by_shapes.values()) and _are_in_memory_of(found, [*session(inputs), *inputs]):
                raise RuntimeError("its results lie in memory that it uses again")
        except OtherSizes:
            if len(held.by_shapes) < MOST_SHAPES:
                held.by_shapes[key] = None
            return own
        except Exception as error:
            if held.failed(key):
                _warn(
                    f"{self.engine} cannot compute {_shapes(operands[: self.inputs])}; the model's own operations run"
                )
            else:
                self._give_up(error)
            return own
        if not agree and not held.is_of(operands[self.inputs :]):  # another thread writes to the tensors
            return own
        if agree is not None and len(held.by_shapes) < MOST_SHAPES:
            held.by_shapes[key] = session if agree else None
            held.once.add(key)
        if agree is False:
            shapes = _shapes(operands[: self.inputs])
            _warn(f"{self.engine} gives something else for {shapes}; the model's own operations run")
        return found if agree else own

    def _judged_outside(self, held: Converted, key: Any, operands: Sequence[Any]) -> Sequence[Tensor]:
        """Compute by the engine alone: the whole model's results are compared."""
        session = held.session(key)
        found = session([x.detach().contiguous() for x in operands[: self.inputs]])
        if not all(map(_is_finite, found)):
            return self._own(*operands)
        if len(held.by_shapes) < MOST_SHAPES:
            held.by_shapes[key] = session
        return found

    def leave(self, error: Exception) -> None:
        """Do without the engine, until `refresh`, `eval()` or another process; the caller tells the user."""
        if not isinstance(error, Refused):  # of a refusal: it may take other tensors
            self.left = self._told = one_line(error)

    def _give_up(self, error: Exception) -> None:
        told = self._told
        self.leave(error)
        if self._told != told:
            _warn(f"{self.engine} cannot compute a region, and the model's own operations do: {self.left}")

    # -- copies, pickles -----------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DelegatedRegion:
        copy = DelegatedRegion(self.engine, copy_graph(self.graph), self.inputs, self.dtype)
        copy._copies, copy._fixes = self._copies, self._fixes
        copy._copies.add(copy)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return _region, (self.engine, PortableGraph(self.graph), self.inputs, self.dtype)

    def __repr__(self) -> str:
        return f"DelegatedRegion({self.engine}, {len(self.graph.nodes)} nodes)"


def _region(engine: str, graph: PortableGraph, inputs: int, dtype: torch.dtype) -> DelegatedRegion:
    return DelegatedRegion(engine, graph.graph(), inputs, dtype)


def _key_of(tensors: Sequence[Tensor]) -> int:
    return id(tensors[0]) if tensors else 0


def _is_taken(x: Any) -> bool:
    """Say whether an input is one that engines compute as torch does."""
    return (
        type(x) is Tensor and x.dtype in _TAKEN and x.is_cpu and x.layout is torch.strided and x.numel() > 0
        and not x.is_neg() and (not x.is_floating_point() or _is_moderate(x))
    )  # fmt: skip


def _is_moderate(x: Tensor) -> bool:
    """Say whether an input is finite and of a size with which nothing overflows; masks hold the lowest number."""
    if torch.linalg.vector_norm(x) <= _MOST:  # in half the time, and true of most
        return True
    low, high = (float(each) for each in torch.aminmax(x))
    return high <= _MOST and (low >= -_MOST or low == _LOWEST)  # not so where one is NaN


def _is_finite(x: Tensor) -> bool:
    """Say whether all numbers are finite; a sum takes a twentieth of the time, and shows NaN and infinities."""
    return not x.is_floating_point() or math.isfinite(x.sum()) or bool(torch.isfinite(x).all())


def _are_in_memory_of(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    places = {each.untyped_storage().data_ptr() for each in others if each.numel()}
    return any(each.untyped_storage().data_ptr() in places for each in results if each.numel())


def _agree(found: Sequence[Tensor], own: Sequence[Tensor], allowed: float) -> bool | None:
    """Say whether results are the same, but for rounding; None where they hold NaN or infinities, and tell nothing."""
    for new, old in zip(found, own, strict=True):
        if new.shape != old.shape or new.dtype is not old.dtype:
            return False
        if not old.is_floating_point():
            if not torch.equal(new, old):
                return False
        elif not bool(torch.isfinite(old).all()):
            return None
        elif old.numel() and not float((new - old).abs().max()) <= allowed * max(float(old.abs().max()), 1e-30):
            return False  # NaN is off, too
    return True


def _shapes(inputs: Sequence[Tensor]) -> str:
    return f"inputs of shape {', '.join(str(tuple(x.shape)) for x in inputs)}"


def _warn(message: str) -> None:
    warnings.warn(message, EngineWarning, stacklevel=2)
