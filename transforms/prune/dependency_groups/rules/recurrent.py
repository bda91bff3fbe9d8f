"""Functions that are followed as a whole: recurrent layers, and torch's own multi-head attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..index_classes import Array
from ..labels import Block, Labels
from .elementwise import results_of

__all__ = ["WHOLE"]

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:  # noqa: ARG001
    """Join the gates of each unit, and the units of all layers and directions: a module has one `hidden_size`."""
    packed = isinstance(args[3], (list, tuple))
    x, state, weights = (args[0], args[2], args[3]) if packed else args[:3]
    layers, directions = args[5 if packed else 4], 2 if args[8 if packed else 7] else 1
    per = len(weights) // (layers * directions)
    above: Block | None = _line(tracker, x)
    units: list[Array | None] = [None, None]
    for layer in range(layers):
        made: list[Array] = []
        for direction in range(directions):
            first = (layer * directions + direction) * per
            made.append(_one_direction(tracker, weights[first : first + per], above, units))
        above = Block((0,), np.concatenate(made))
    outputs, states = out[0], out[1:]
    dim = len(outputs.shape) - 1
    if above is not None:
        tracker.set(outputs, Labels(tuple(outputs.shape), (Block((dim,), above.atoms),)))
    given = results_of(state)
    results = list(states)
    for before, after, atoms in zip(given, results, units, strict=False):
        tracker.join(_line(tracker, before), None if atoms is None else Block((0,), atoms))
        if atoms is not None:
            tracker.set(after, Labels(tuple(after.shape), (Block((len(after.shape) - 1,), atoms),)))


def _line(tracker: DimensionTracker, tensor: Tensor) -> Block | None:
    return tracker.get(tensor).line(len(tensor.shape) - 1, tracker.atoms, tracker.why)


def _one_direction(
    tracker: DimensionTracker, weights: Sequence[Tensor], above: Block | None, units: list[Array | None]
) -> Array:
    """Follow one direction of one layer; return the atoms of what it gives. `units` are those of all: output, cell."""
    projected = weights[-1] if len(weights) in (3, 5) else None
    inputs, hidden = tracker.get(weights[0]), tracker.get(weights[1])
    biases = [tracker.get(each) for each in weights[2 : 4 if len(weights) > 3 else 2]]
    gates = _GATES[tracker.operator]
    cells = _rows(tracker, inputs, gates)
    for each in (hidden, *biases):
        tracker.atoms.join(_rows(tracker, each, gates), cells, tracker.why)
    columns = inputs.of(1)
    if columns is not None:
        tracker.reads(columns.atoms)
    tracker.join(above, columns)
    made = cells if projected is None else _projected(tracker, tracker.get(projected), cells)
    back = hidden.of(1)
    tracker.join(back, Block((0,), made))
    for position, atoms in enumerate((made, cells)):
        before = units[position]
        if before is None:
            units[position] = atoms
        else:
            tracker.atoms.join(before, atoms, tracker.why)
    return made


def _projected(tracker: DimensionTracker, weight: Labels, cells: Array) -> Array:
    rows, columns = weight.of(0), weight.of(1)
    tracker.join(columns, Block((0,), cells))
    if rows is None:
        return np.zeros(weight.shape[0], dtype=np.int64)
    tracker.makes(rows.atoms)
    return rows.atoms


def _rows(tracker: DimensionTracker, labels: Labels, gates: int) -> Array:
    """Return the atoms of a weight's units: its rows are those of one gate after the other."""
    block = labels.of(0)
    if block is None:
        return np.zeros(labels.shape[0] // gates, dtype=np.int64)
    tracker.makes(block.atoms)
    return tracker.atoms.join_along(block.atoms.reshape(gates, -1), 0, tracker.why)


_ATTENTION = (
    "query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p "
    "out_proj_weight out_proj_bias"
).split()


def _attention(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Join the heads of the projections, the width of the inputs, and that of the result."""
    given = dict(zip(_ATTENTION, args, strict=False)) | dict(kwargs)
    count = int(given["num_heads"])
    if any(given.get(name) is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or count == 1:
        for value in given.values():
            if isinstance(value, Tensor):
                tracker.keep_whole(tracker.get(value))
        return
    heads: Array | None = None
    for weight, first, value in _projections(tracker, given):
        rows, columns = weight
        tracker.reads(columns.atoms)
        tracker.join(_line(tracker, value), columns)
        tracker.makes(rows)
        mine = tracker.atoms.join_along(rows.reshape(count, -1), 1, tracker.why)
        heads = mine if heads is None else heads
        tracker.atoms.join(heads, mine, tracker.why)
        if given.get("in_proj_bias") is not None:
            bias = tracker.get(given["in_proj_bias"]).of(0)
            if bias is not None:
                tracker.atoms.join(bias.atoms[first : first + len(rows)], rows, tracker.why)
    if heads is not None:
        _returned(tracker, given, heads, count, out)


def _projections(
    tracker: DimensionTracker, given: Mapping[str, Any]
) -> list[tuple[tuple[Array, Block], int, Tensor]]:  # fmt: skip
    """Return rows and columns of the three projections, where their rows begin in the bias, and what they read."""
    inputs = [given[name] for name in ("query", "key", "value")]
    if given.get("in_proj_weight") is None or given.get("use_separate_proj_weight"):
        labels = [tracker.get(given[f"{name}_proj_weight"]) for name in "qkv"]
        blocks = [(each.of(0), each.of(1)) for each in labels]
        rows = [(r.atoms, c) for r, c in blocks if r is not None and c is not None]
    else:
        labels = tracker.get(given["in_proj_weight"])
        row, column = labels.of(0), labels.of(1)
        thirds = [] if row is None else np.split(row.atoms, 3)
        rows = [(third, column) for third in thirds if column is not None]
    width = len(rows[0][0]) if rows else 0
    return [(pair, number * width, value) for number, (pair, value) in enumerate(zip(rows, inputs, strict=False))]


def _returned(tracker: DimensionTracker, given: Mapping[str, Any], heads: Array, count: int, out: Any) -> None:
    """Follow the last projection, and mark what only another module than torch's can run."""
    block = Block((0,), heads)
    tracker.require(given["num_heads"], block, 0)
    tracker.heads.append(heads)
    weight = tracker.get(given["out_proj_weight"])
    rows, columns = weight.of(0), weight.of(1)
    if columns is None or rows is None:
        tracker.atoms.fix(heads, tracker.why)
        return
    tracker.atoms.join(tracker.atoms.join_along(columns.atoms.reshape(count, -1), 1, tracker.why), heads, tracker.why)
    tracker.reads(columns.atoms)
    tracker.makes(rows.atoms)
    if given.get("out_proj_bias") is not None:
        tracker.join(tracker.get(given["out_proj_bias"]).of(0), rows)
    result, weights = out
    dim = len(result.shape) - 1
    tracker.set(result, Labels(tuple(result.shape), (Block((dim,), rows.atoms),)))
    if isinstance(weights, Tensor):
        tracker.set(weights, Labels(tuple(weights.shape), (), spoilt=heads))
    for atoms in (heads, rows.atoms, *(pair[1].atoms for pair, _, _ in _projections(tracker, given))):
        tracker.replaced.append((tracker.place.module, atoms))


WHOLE: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(_GATES, _recurrent),
    "multi_head_attention_forward": _attention,
}
"""Name of a function -> what is said of it as a whole; what runs inside it is not followed."""
