"""Functions that are followed as a whole: recurrent layers, and torch's own multi-head attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..dimension_tracker import DimensionTracker
from ..labels import Array, Block, Labels
from .elementwise import labelled, results_of

__all__ = ["WHOLE"]

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _recurrent(tracker: DimensionTracker, args: Sequence[Any], _: Mapping[str, Any], out: Any) -> None:
    """Join the gates of each unit, and the units of all layers and directions: a module has one `hidden_size`."""
    is_packed = isinstance(args[3], (list, tuple))
    x, state, weights = (args[0], args[2], args[3]) if is_packed else args[:3]
    layers, directions = args[4 + is_packed], 1 + bool(args[7 + is_packed])
    per = len(weights) // (layers * directions)
    above = _line(tracker, x)
    units: list[tuple[Array, Array]] = []
    for layer in range(layers):
        firsts = range(layer * directions * per, (layer + 1) * directions * per, per)
        made = [_one_direction(tracker, weights[first : first + per], above) for first in firsts]
        units += made
        above = Block((0,), np.concatenate([outputs for outputs, _ in made]))
    for outputs, cells in units[1:]:
        tracker.join(units[0][0], outputs)
        tracker.join(units[0][1], cells)
    _ends(tracker, out[0], above)
    for before, after, atoms in zip(results_of(state), out[1:], units[0], strict=False):
        tracker.pair(_line(tracker, before), Block((0,), atoms))
        _ends(tracker, after, Block((0,), atoms))


def _line(tracker: DimensionTracker, tensor: Tensor) -> Block | None:
    return tracker.get(tensor).line(len(tensor.shape) - 1, tracker)


def _ends(tracker: DimensionTracker, tensor: Tensor, block: Block | None) -> None:
    """Note the atoms of a result's last dimension."""
    if block is not None:
        tracker.set(tensor, labelled(tensor, Block((len(tensor.shape) - 1,), block.atoms)))


def _one_direction(tracker: DimensionTracker, weights: Sequence[Tensor], above: Block | None) -> tuple[Array, Array]:
    """Follow one direction of one layer; return the atoms of what it gives, and of its cells."""
    inputs, hidden = tracker.get(weights[0]), tracker.get(weights[1])
    gates = _GATES[tracker.operator]
    cells = _rows(tracker, inputs, gates)
    for each in (hidden, *map(tracker.get, weights[2 : 4 if len(weights) > 3 else 2])):
        tracker.join(_rows(tracker, each, gates), cells)
    tracker.reads(inputs.of(1))
    tracker.pair(above, inputs.of(1))
    made = _projected(tracker, tracker.get(weights[-1]), cells) if len(weights) in (3, 5) else cells
    tracker.pair(hidden.of(1), Block((0,), made))
    return made, cells


def _projected(tracker: DimensionTracker, weight: Labels, cells: Array) -> Array:
    rows = weight.of(0)
    tracker.pair(weight.of(1), Block((0,), cells))
    tracker.makes(rows)
    return np.zeros(weight.shape[0], dtype=np.int64) if rows is None else rows.atoms


def _rows(tracker: DimensionTracker, labels: Labels, gates: int) -> Array:
    """Return the atoms of a weight's units: its rows are those of one gate after the other."""
    block = labels.of(0)
    if block is None:
        return np.zeros(labels.shape[0] // gates, dtype=np.int64)
    tracker.makes(block)
    return tracker.join_along(block.atoms.reshape(gates, -1), 0)


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
    heads: list[Array] = []
    projections = _projections(tracker, given)
    for number, (rows, columns) in enumerate(projections):
        tracker.reads(columns)
        tracker.pair(_line(tracker, given[_ATTENTION[number]]), columns)
        tracker.makes(rows)
        heads.append(tracker.join_along(rows.atoms.reshape(count, -1), 1))
        tracker.join(heads[0], heads[-1])
        bias = None if given.get("in_proj_bias") is None else tracker.get(given["in_proj_bias"]).of(0)
        if bias is not None:
            first = number * projections[0][0].atoms.size
            tracker.join(bias.atoms[first : first + rows.atoms.size], rows.atoms)
    if heads:
        _returned(tracker, given, heads[0], [columns for _, columns in projections], out)


def _projections(tracker: DimensionTracker, given: Mapping[str, Any]) -> list[tuple[Block, Block]]:
    """Return rows and columns of the three projections, as far as these may be cut."""
    if given.get("in_proj_weight") is None or given.get("use_separate_proj_weight"):
        labels = [tracker.get(given[f"{name}_proj_weight"]) for name in "qkv"]
        pairs = [(each.of(0), each.of(1)) for each in labels]
    else:
        labels = tracker.get(given["in_proj_weight"])
        row = labels.of(0)
        thirds = [] if row is None else np.split(row.atoms, 3)
        pairs = [(Block((0,), third), labels.of(1)) for third in thirds]
    return [(rows, columns) for rows, columns in pairs if rows is not None and columns is not None]


def _returned(
    tracker: DimensionTracker, given: Mapping[str, Any], heads: Array, inputs: Sequence[Block], out: Any
) -> None:
    """Follow the last projection, and mark what only another module than torch's can run."""
    tracker.require(given["num_heads"], Block((0,), heads))
    tracker.heads.append(heads)
    weight = tracker.get(given["out_proj_weight"])
    rows, columns = weight.of(0), weight.of(1)
    if columns is None or rows is None:
        tracker.fix(heads)
        return
    tracker.join(tracker.join_along(columns.atoms.reshape(given["num_heads"], -1), 1), heads)
    tracker.reads(columns)
    tracker.makes(rows)
    if given.get("out_proj_bias") is not None:
        tracker.pair(tracker.get(given["out_proj_bias"]).of(0), rows)
    result, weights = out
    _ends(tracker, result, rows)
    if isinstance(weights, Tensor):
        tracker.set(weights, Labels(tuple(weights.shape), (), spoilt=heads))
    for atoms in (heads, rows.atoms, *(block.atoms for block in inputs)):
        tracker.replaced.append((tracker.module, atoms))


def _normalize(tracker: DimensionTracker, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Divide by a norm over some dimensions, to which zeros add nothing."""
    given = dict(zip(("input", "p", "dim", "eps", "out"), args, strict=False)) | dict(kwargs)
    labels = tracker.get(given["input"])
    dims = [dim % len(labels.shape) for dim in results_of(given.get("dim", 1))]
    is_additive = given.get("p", 2.0) > 0 and given.get("out") is None
    for block in labels.blocks:
        inside = [dim for dim in block.dims if dim in dims]
        if inside and not (is_additive and block.zero and len(inside) == len(block.dims)):
            labels = tracker.keep_whole(labels, inside)
    tracker.set(out, labels)


WHOLE: Mapping[str, Callable[[DimensionTracker, Sequence[Any], Mapping[str, Any], Any], None]] = {
    **dict.fromkeys(_GATES, _recurrent),
    "multi_head_attention_forward": _attention,
    "normalize": _normalize,
}
"""Name of a function -> what is said of it as a whole; what runs inside it is not followed."""
