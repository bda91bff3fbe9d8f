"""What an engine makes of a region with the tensors of a model as they are, and which tensors it does not take."""

from __future__ import annotations

import ctypes
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ...compat import dispatch_modes_off, version_of
from ...compat.quantized import why_overflow
from ...interrupts import interruptible
from ...operators import Unchanged, sample_of, why_unseen
from ...runtime.graphs import copy_graph
from ...runtime.values import ContextFlag
from ..folded import CHECKS
from .constants import with_derived
from .engine import Engine, Session

__all__ = [
    "MOST_SHAPES", "Converted", "OtherNumbers", "OtherType", "Refused", "as_converted", "converted", "is_forked",
    "key_of", "sum_of",
]  # fmt: skip

MOST_SHAPES = 1000
"""So many combinations of shapes are remembered; with others, the region's own operations run."""

_MOST_ONCE = 8
"""Where so many were compared and did not come again, another one is compared at its second call only."""

_MOST_FAILURES = 4
"""Each shape at which an engine raises costs a new session: where more do, it is done without."""

_LONG = 0.1
"""Seconds of a call: of a longer one a second session would take too long to be made and timed."""
_ROUNDS, _FEWEST, _SECONDS, _GAINS = 8, 3, 0.15, 0.95
"""A session for one shape is timed in so many rounds, or fewer that take this time, and kept if it takes this part of
the time of the other one; see decision 036."""
_SMALL, _GAINS_OF_SMALL = 1 << 27, 0.98
"""Tensors of so many bytes may be held twice for a smaller gain, and the session for one shape is made first."""

_users = set[int]()  # the process in which engines were used first, by its id; a fork of it has that, too


def is_forked() -> bool:
    """Say whether this is a fork of a process with engines: it lacks their threads, and a call would wait for ever."""
    return bool(_users) and os.getpid() not in _users


class Refused(RuntimeError):
    """The tensors of the model are none that an engine takes, as they are."""


class OtherType(Refused):
    """They are of another type than float32."""


class OtherNumbers(Refused):
    """They hold other numbers than what engines have taken, and are not to be taken now."""


as_converted = ContextFlag("as_converted")
"""Engines compute with the numbers that they have taken; with others, regions compute by their own operations.

Verification makes up many numbers. To convert a region takes seconds, and one that is converted anew later compares its
first results with those of its own operations.
"""


@dataclass
class _Compile:
    """Compile a computation for a number of threads."""

    engine: Engine
    computation: _Computation
    example: Sequence[Tensor]
    dtype: torch.dtype

    def __call__(self, threads: int) -> Session:
        with warnings.catch_warnings(), torch.no_grad(), interruptible():
            warnings.simplefilter("ignore")  # torch.jit is deprecated, and tracing tells of each size it reads
            return self.engine.compile(self.computation, self.example, self.dtype, threads)


@dataclass
class Converted:
    """What an engine made of a region with the tensors as they were; for tensors of equal numbers the same serves."""

    unchanged: Unchanged
    compile: _Compile
    noted: Sequence[tuple[Tensor, int, Any]]  # the tensors' memory, with counts of writes and samples of then
    checksum: int  # of all their numbers
    seconds: float = 0.0
    by_threads: dict[int, Session] = field(default_factory=dict[int, Session])
    fixed: dict[Any, Session] = field(default_factory=dict[Any, Session])  # for the shapes of the example alone
    by_shapes: dict[Any, Session | None] = field(default_factory=dict[Any, "Session | None"])  # None: other results
    failures: set[Any] = field(default_factory=set[Any])  # the shapes at which the engine raised
    once: set[Any] = field(default_factory=set[Any])  # the shapes that did not come again since they were compared
    passing: set[Any] = field(default_factory=set[Any])  # those that came once, and were not compared
    doubted: bool = False  # writes that torch does not count may have gone unseen
    is_lent: Callable[[], bool] | None = None  # where sessions read others' memory: whether that is as it was

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether it serves tensors as they are."""
        return self.unchanged.same(*tensors) and (self.is_lent is None or self.is_lent())

    def lent(self, tensors: Sequence[Tensor], unchanged: Unchanged) -> Converted | None:
        """Return the same for other tensors; None where they hold other numbers."""
        read = [old for (old, *_), new in zip(self.noted, tensors, strict=True) if old.data_ptr() != new.data_ptr()]
        is_lent = partial(Unchanged(read).same, *read) if read else None
        return replace(self, unchanged=unchanged, is_lent=is_lent) if self.holds(tensors) else None

    @property
    def example(self) -> Sequence[Tensor]:
        return self.compile.example

    @property
    def sessions(self) -> list[Session]:
        """Return those sessions that hold the tensors."""
        every = (*self.by_threads.values(), *self.fixed.values())
        return [session for session in every if getattr(session, "is_compiled", True)]

    def takes(self, inputs: Sequence[Tensor]) -> bool:
        """Say whether inputs are of the types that it was made for."""
        return all(x.dtype is old.dtype for x, old in zip(inputs, self.example, strict=True))

    def is_worth_comparing(self, key: Any) -> bool:
        """Say whether inputs of such shapes are computed twice, to compare: not where mostly others come each time."""
        if len(self.once) < _MOST_ONCE or key in self.passing:
            return True
        if len(self.passing) < MOST_SHAPES:
            self.passing.add(key)
        return False

    def session(self, key: Any) -> Session:
        """Return what computes with so many threads, and inputs of such shapes; see `key_of`."""
        threads = key[0]
        if threads not in self.by_threads:
            self.by_threads[threads] = self.compile(threads)
        return self.fixed.get(key) or self.by_threads[threads]

    def failed(self, key: Any) -> bool:
        """Note that inputs of such shapes cannot be computed, and let go of the session that tried; False where too
        many failed.
        """
        if len(self.failures) >= _MOST_FAILURES:
            return False
        session = self.by_threads.pop(key[0], None)
        for other in [other for other, each in self.by_shapes.items() if each is session]:
            del self.by_shapes[other]  # in place: copies of the model have the same
        self.by_shapes[key] = None
        self.failures.add(key)
        return True

    @property
    def is_small(self) -> bool:
        """Say whether the tensors may well be held twice."""
        return sum(tensor.nbytes for tensor, *_ in self.noted) <= _SMALL

    def fix(self) -> None:
        """Compile for the shapes of the example alone, too."""
        key = key_of(self.example)
        self.session(key)
        fixed = getattr(self.by_threads[key[0]], "fixed", None)
        if fixed is not None and key not in self.fixed:
            self.fixed[key] = fixed(self.example)

    def settle(self) -> bool:
        """Keep a session for the shapes of the example alone where it is faster, or where there is no other one yet;
        say whether there is one then.
        """
        key = key_of(self.example)
        general = self.by_threads.get(key[0])
        if not hasattr(general, "fixed") or (key in self.fixed and not getattr(general, "is_compiled", True)):
            return key in self.fixed
        try:
            fixed = self._faster(key, cast("Session", general))
        except Exception:  # an engine raises anything, for instance after a call that failed: what computes now stays
            return key in self.fixed
        if fixed is not self.fixed.get(key):
            self.by_shapes.pop(key, None)  # results of the other session are compared at the next call
        if fixed is None:  # in place: copies of the model have the same
            self.fixed.pop(key, None)
        else:
            self.fixed[key] = fixed
        return key in self.fixed

    def _faster(self, key: Any, general: Session) -> Session | None:
        """Return the session for the shapes of the example alone, if it is faster than the one for all shapes."""
        seconds = min(_seconds_of(time.perf_counter, general, self.example) for _ in range(2))  # the first gets ready
        if seconds > _LONG:
            return None
        session = self.fixed.get(key) or cast("Any", general).fixed(self.example)
        session(self.example)
        # Others take processors, so time on them counts; an engine of several threads works on threads of its own.
        clock = time.thread_time if key[0] == 1 else time.process_time
        rounds = range(min(_ROUNDS, max(_FEWEST, int(_SECONDS / seconds))))
        both = [[_seconds_of(clock, each, self.example) for each in (session, general)] for _ in rounds]
        took, before = (min(seconds[place] for seconds in both) for place in range(2))
        return session if took <= (_GAINS_OF_SMALL if self.is_small else _GAINS) * before else None

    def move_to(self, tensors: Sequence[Tensor]) -> None:
        """Know the same numbers in other memory; compile anew what holds on to the old one."""
        self.unchanged, self.noted, self.is_lent = Unchanged(tensors), _notes_of(tensors), None
        self.compile = replace(self.compile, computation=self.compile.computation.of(tensors))
        if self.compile.engine.shares_memory:
            self.by_threads = {threads: self.compile(threads) for threads in self.by_threads}
            self.fixed = {key: cast("Any", self.by_threads[key[0]]).fixed(self.example) for key in self.fixed}
            right = [key for key, session in self.by_shapes.items() if session is not None]
            self.by_shapes |= {key: self.session(key) for key in right}

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Say whether other tensors hold the same numbers, those of a copy of the model."""
        return all(
            old.shape == new.shape and old.dtype is new.dtype and new.is_cpu and version_of(old) == version
            and view == sample and torch.equal(old, new)
            for (old, version, (view, sample)), new in zip(self.noted, tensors, strict=True)
        )  # fmt: skip


def converted(
    engine: Engine, graph: fx.Graph, inputs: Sequence[Tensor], tensors: Sequence[Tensor], dtype: torch.dtype,
    known: Iterable[Converted], *, fixed: bool | None = None,
) -> Converted:  # fmt: skip
    """Let an engine take a region, for inputs such as these, or return what is `known` of tensors that hold the same.
    If `fixed`, it is compiled at first for the shapes of the inputs alone, and for others when these come; None: if the
    tensors are small.

    Raises:
        Refused: a tensor is none that engines take, or its numbers are not to be taken now.
        RuntimeError: the engine cannot be used here; it may raise anything else, too.
    """
    with torch.inference_mode(False), torch.no_grad(), dispatch_modes_off():
        if reason := "a forked process has no threads of it" if is_forked() else engine.reason_against(dtype):
            raise RuntimeError(reason)
        for tensor in tensors:
            if _is_of_other_type(tensor):
                raise OtherType(f"a parameter is of {str(tensor.dtype).removeprefix('torch.')}")
        for tensor in tensors:
            if reason := _reason_against(tensor):
                raise Refused(reason)
        _users.add(os.getpid())
        start, unchanged = time.perf_counter(), Unchanged(tensors)
        for held in known:
            if not held.doubted and (lent := held.lent(tensors, unchanged)) is not None:
                return lent
        if as_converted:
            raise OtherNumbers("what is made up to verify a rewrite is no reason to convert")
        example = [x.detach().clone(memory_format=torch.contiguous_format) for x in inputs]  # as at each call
        compile_ = _Compile(engine, _Computation(graph, tensors), example, dtype)
        result = Converted(unchanged, compile_, _notes_of(tensors), sum_of(tensors))
        begins_fixed = result.is_small if fixed is None else fixed
        if begins_fixed:
            result.fix()
        result.session(key_of(example))
        result.seconds = time.perf_counter() - start
        return result


def _check_8_bits(graph: fx.Graph, read: Sequence[Tensor]) -> None:
    """Raise a RuntimeError for layers in 8 bits whose sums would overflow, silently, in engines, too.
    The last placeholders stand for what is `read`.
    """
    of = dict(zip(reversed(graph.find_nodes(op="placeholder")), reversed(read), strict=False))
    for node in graph.nodes:
        values = of.get(node.args[1]) if getattr(node.target, "operator", "") == "static_int8" else None
        if values is not None and (reason := why_overflow(values)):
            raise RuntimeError(f"a layer of 8 bits: {reason}")


class _Computation(nn.Module):
    """A region as a module of its inputs alone, without checks, for an engine."""

    def __init__(self, graph: fx.Graph, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._source = graph
        graph = copy_graph(graph)
        for node in [node for node in graph.nodes if node.target in CHECKS]:
            graph.erase_node(node)
        read = with_derived(graph, tensors)
        _check_8_bits(graph, read)
        self._graph, self._count = graph, len(read)
        last = {operand: node for node in graph.nodes for operand in node.all_input_nodes}
        self._spent = dict[fx.Node, list[fx.Node]]()  # by node, what is read there for the last time
        for operand, node in last.items():
            self._spent.setdefault(node, []).append(operand)
        for number, tensor in enumerate(read):
            self.register_buffer(f"tensor{number}", tensor.detach())
        self.eval()

    def of(self, tensors: Sequence[Tensor]) -> _Computation:
        """Return the same computation with other tensors, and what is derived of them."""
        return _Computation(self._source, tensors)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run node by node: what traces it looks for each value among the local variables, which are few here."""
        given = (*inputs, *(getattr(self, f"tensor{number}") for number in range(self._count)))
        values: dict[fx.Node, Any] = dict(zip(self._graph.find_nodes(op="placeholder"), given, strict=True))
        for node in self._graph.nodes:
            if node.op == "placeholder":
                continue
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return tuple(args[0])
            function = getattr(args[0], node.target) if node.op == "call_method" else node.target
            values[node] = function(*args[node.op == "call_method" :], **kwargs)
            for spent in self._spent.get(node, ()):
                del values[spent]
        return ()


def _seconds_of(clock: Callable[[], float], session: Session, inputs: Sequence[Tensor]) -> float:
    """Return what a call takes by a clock."""
    start = clock()
    session(inputs)
    return clock() - start


def key_of(inputs: Sequence[Tensor]) -> Any:
    """Return by what sessions are told apart: the number of threads, and what inputs are like."""
    return (torch.get_num_threads(), *[(x.shape, x.dtype) for x in inputs])


def _notes_of(tensors: Sequence[Tensor]) -> list[tuple[Tensor, int, Any]]:
    return [(each.detach(), version_of(each), sample_of(each)) for each in tensors]


def sum_of(tensors: Sequence[Tensor]) -> int:
    """Return a checksum of all numbers; that of zlib reads memory three times as fast as those of hashlib.

    By the address: who watches what is written to parameters takes `numpy` for a way to do so, and copies them.
    """
    found = 0
    for each in tensors:
        flat = each.detach().resolve_conj().resolve_neg().reshape(-1)
        if flat.nbytes and not (flat.is_cpu and flat.data_ptr()):
            raise RuntimeError("a tensor has no memory of its own on the CPU")
        found = zlib.crc32((ctypes.c_byte * flat.nbytes).from_address(flat.data_ptr()), found) if flat.nbytes else found
    return found


def _is_of_other_type(tensor: Tensor) -> bool:
    return tensor.dtype is not torch.float32 and (tensor.is_floating_point() or tensor.is_complex())


def _reason_against(tensor: Tensor) -> str:
    """Return why a tensor of the model cannot be handed to an engine, or ""."""
    if unseen := why_unseen(tensor):
        return f"a parameter {unseen}"
    if not tensor.is_cpu:
        return f"a parameter is on {tensor.device}"
    if tensor.is_floating_point() and not (math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())):
        return "a parameter holds NaN or infinities"
    return ""
