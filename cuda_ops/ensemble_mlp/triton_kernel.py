# ruff: noqa: RUF005 - Triton unpacks no tuple into another
"""The kernels of `ensemble_mlp`: a program holds one member's weights, and takes blocks of rows through all layers.
Tuples hold one thing for each layer; loops over layers are unrolled when a kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..triton_activations import CODES, activated, activation_gradient
from .reference import gradients, results

__all__ = ["ensemble_mlp", "ensemble_mlp_backward"]

_LEAST = 16
"""Rows of a block, and the smallest padded width: what a matrix product takes at the least."""
_PROGRAMS = 256
"""That share out the rows of all members: enough for every processor of a GPU to have one."""
_MOST_LAYERS = 6
_MOST_WEIGHTS = 10240
"""Of one member, padded. Beyond it a backward, which sums their gradients in registers, spills hundreds of bytes where
rows are not aligned."""


@triton.jit
def _tile(tensor, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, P_ROWS: tl.constexpr, P_COLUMNS: tl.constexpr):
    """Return a matrix that lies at `first` of a tensor, with zeros up to the padded sizes."""
    row, column = tl.arange(0, P_ROWS)[:, None], tl.arange(0, P_COLUMNS)[None, :]
    inside = (row < ROWS) & (column < COLUMNS)
    return tl.load(tensor + first + row * COLUMNS + column, inside, other=0.0).to(tl.float32)


@triton.jit
def _rows(tensor, first, start, rows, WIDTH: tl.constexpr, P_WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a block of rows lies, and which of its elements are there."""
    row, column = start + tl.arange(0, BLOCK)[:, None], tl.arange(0, P_WIDTH)[None, :]
    return tensor + first + row.to(tl.int64) * WIDTH + column, (row < rows) & (column < WIDTH)


@triton.jit
def _bias(bias, member, WIDTH: tl.constexpr, P_WIDTH: tl.constexpr):
    at = tl.arange(0, P_WIDTH)
    return tl.load(bias + member * WIDTH + at, at < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _forward(
    x, weights, biases, out, rows, x_step,
    WIDTHS: tl.constexpr, PADDED: tl.constexpr, BIASED: tl.constexpr, LAYERS: tl.constexpr, CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    member = tl.program_id(0).to(tl.int64)
    held = ()
    for layer in tl.static_range(LAYERS):
        first = member * WIDTHS[layer + 1] * WIDTHS[layer]
        held = held + (
            _tile(weights[layer], first, WIDTHS[layer + 1], WIDTHS[layer], PADDED[layer + 1], PADDED[layer]),
        )
    for start in range(tl.program_id(1) * BLOCK, rows, tl.num_programs(1) * BLOCK):
        at, inside = _rows(x, member * x_step, start, rows, WIDTHS[0], PADDED[0], BLOCK)
        value = tl.load(at, inside, other=0.0).to(tl.float32)
        for layer in tl.static_range(LAYERS):
            value = _product(value, tl.trans(held[layer]))
            if BIASED[layer]:
                value += _bias(biases[layer], member, WIDTHS[layer + 1], PADDED[layer + 1])[None, :]
            if layer + 1 < LAYERS:
                value = activated(value, CODE)
        at, inside = _rows(out, member * rows * WIDTHS[LAYERS], start, rows, WIDTHS[LAYERS], PADDED[LAYERS], BLOCK)
        tl.store(at, value, inside)


@triton.jit
def _backward(
    grad, x, weights, biases, of_x, of_weights, of_biases, members, rows, x_step,
    WIDTHS: tl.constexpr, PADDED: tl.constexpr, BIASED: tl.constexpr, LAYERS: tl.constexpr, CODE: tl.constexpr,
    OF_X: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Go forward again, and back; the gradients of weights and biases are summed over the rows of this program."""
    member = tl.program_id(0).to(tl.int64)
    held, sums, bias_sums = (), (), ()
    for layer in tl.static_range(LAYERS):
        first = member * WIDTHS[layer + 1] * WIDTHS[layer]
        held = held + (
            _tile(weights[layer], first, WIDTHS[layer + 1], WIDTHS[layer], PADDED[layer + 1], PADDED[layer]),
        )
        sums = sums + (_zeros(PADDED[layer + 1], PADDED[layer]),)
        bias_sums = bias_sums + (tl.sum(_zeros(PADDED[layer + 1], 1), 1),)
    for start in range(tl.program_id(1) * BLOCK, rows, tl.num_programs(1) * BLOCK):
        at, inside = _rows(x, member * x_step, start, rows, WIDTHS[0], PADDED[0], BLOCK)
        value = tl.load(at, inside, other=0.0).to(tl.float32)
        inputs, before = (value,), ()
        for layer in tl.static_range(LAYERS - 1):
            z = _product(inputs[layer], tl.trans(held[layer]))
            if BIASED[layer]:
                z += _bias(biases[layer], member, WIDTHS[layer + 1], PADDED[layer + 1])[None, :]
            before = before + (z,)
            inputs = inputs + (activated(z, CODE),)
        at, inside = _rows(grad, member * rows * WIDTHS[LAYERS], start, rows, WIDTHS[LAYERS], PADDED[LAYERS], BLOCK)
        of_value = tl.load(at, inside, other=0.0).to(tl.float32)
        new_sums, new_bias_sums = (), ()
        for layer in tl.static_range(LAYERS - 1, -1, -1):
            new_sums = (sums[layer] + _product(tl.trans(of_value), inputs[layer]),) + new_sums
            new_bias_sums = (bias_sums[layer] + tl.sum(of_value, 0),) + new_bias_sums
            if layer > 0:
                of_value = _product(of_value, held[layer]) * activation_gradient(before[layer - 1], CODE)
            elif OF_X:
                at, inside = _rows(of_x, member * rows * WIDTHS[0], start, rows, WIDTHS[0], PADDED[0], BLOCK)
                tl.store(at, _product(of_value, held[0]), inside)
        sums, bias_sums = new_sums, new_bias_sums
    part = tl.program_id(1) * members + member
    for layer in tl.static_range(LAYERS):
        row, column = tl.arange(0, PADDED[layer + 1]), tl.arange(0, PADDED[layer])
        at = part * WIDTHS[layer + 1] * WIDTHS[layer] + row[:, None] * WIDTHS[layer] + column[None, :]
        inside = (row[:, None] < WIDTHS[layer + 1]) & (column[None, :] < WIDTHS[layer])
        tl.store(of_weights[layer] + at, sums[layer], inside)
        if BIASED[layer]:
            tl.store(of_biases[layer] + part * WIDTHS[layer + 1] + row, bias_sums[layer], row < WIDTHS[layer + 1])


def _padded(widths: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(_LEAST, triton.next_power_of_2(width)) for width in widths)


def _held(padded: Sequence[int]) -> int:
    """Return how many weights a program holds."""
    return sum(before * after for before, after in pairwise(padded))


def _fits(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Say whether one launch computes this: there is something to do, and a member's weights have room."""
    if not x.numel() or not all(weight.numel() for weight in weights) or len(weights) > _MOST_LAYERS:
        return False
    return _held(_padded(_widths(weights))) <= _MOST_WEIGHTS


def _widths(weights: Sequence[Tensor]) -> tuple[int, ...]:
    return weights[0].shape[2], *(weight.shape[1] for weight in weights)


def _settings(weights: Sequence[Tensor], biases: Sequence[Tensor], activation: str) -> dict[str, Any]:
    """Return what a kernel is compiled for."""
    widths = _widths(weights)
    padded = _padded(widths)
    held = _held(padded)
    return {
        "WIDTHS": widths,
        "PADDED": padded,
        "BIASED": tuple(bias.numel() > 0 for bias in biases),
        "LAYERS": len(weights),
        "CODE": CODES[activation],
        "BLOCK": _LEAST,
        "num_warps": 4 if held <= 2048 else 8 if held <= 6144 else 16,
    }


def _parts(members: int, rows: int) -> int:
    """Return how many programs share out the rows of one member."""
    return max(1, min(triton.cdiv(rows, _LEAST), _PROGRAMS // members))


def _contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(each.contiguous() for each in tensors)


def ensemble_mlp(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """Return the last layer's result of each member."""
    if not _fits(x, weights):
        return results(x, weights, biases, activation)
    x, members, rows = x.contiguous(), weights[0].shape[0], x.shape[-2]
    out = x.new_empty(members, rows, weights[-1].shape[1])
    _forward[members, _parts(members, rows)](
        x,
        _contiguous(weights),
        _contiguous(biases),
        out,
        rows,
        x.shape[-1] * rows if x.dim() == 3 else 0,
        **_settings(weights, biases, activation),
    )
    return out


def ensemble_mlp_backward(
    grad: Tensor, x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str, of_x: bool
) -> list[Tensor]:
    """Return the gradients of x, of the weights, and of the biases."""
    if not _fits(x, weights):
        return gradients(grad, x, weights, biases, activation, of_x)
    x, members, rows = x.contiguous(), weights[0].shape[0], x.shape[-2]
    parts = _parts(members, rows)
    found = x.new_empty((members, rows, x.shape[-1]) if of_x else 0)
    sums = [each.new_empty(parts, *each.shape, dtype=torch.float32) for each in (*weights, *biases)]
    _backward[members, parts](
        grad.contiguous(),
        x,
        _contiguous(weights),
        _contiguous(biases),
        found,
        tuple(sums[: len(weights)]),
        tuple(sums[len(weights) :]),
        members,
        rows,
        x.shape[-1] * rows if x.dim() == 3 else 0,
        **_settings(weights, biases, activation),
        OF_X=of_x,
    )
    shared = of_x and x.dim() == 2
    return [found.sum(0) if shared else found, *(each.sum(0).to(x.dtype) for each in sums)]
