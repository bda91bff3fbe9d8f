"""Large results lie in memory that is written to again only where nobody holds what was given out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from fxopt.layers.delegated import Session, engine_named
from fxopt.layers.delegated.result_memory import ResultMemory, is_large

FORMS = [(torch.Size((3, 4)), torch.float32), (torch.Size((5,)), torch.int64)]
ROWS = 600  # of 512 numbers: more than 1 MiB


class Two(nn.Module):
    """Two results, one of which may be large."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(x) * 2 - 1, x.amax(-1)


@pytest.fixture
def session() -> Session:
    pytest.importorskip("openvino")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return engine_named("openvino").compile(Two(), [torch.randn(4, 512)], torch.float32, 1)


def _addresses(results: list[Tensor]) -> set[int]:
    return {each.data_ptr() for each in results}


def test_what_somebody_holds_is_not_lent_again() -> None:
    memory = ResultMemory(FORMS)
    held = [memory.lend() for _ in range(4)]
    assert [(each.shape, each.dtype) for each in held[3]] == FORMS
    assert len(set[int]().union(*map(_addresses, held))) == 8


@pytest.mark.parametrize("keep", [lambda x: x[1:], lambda x: x.detach().numpy(), lambda x: x.untyped_storage()])
def test_a_view_an_array_and_a_storage_hold_it_and_then_it_is_lent_again(keep: Callable[[Tensor], object]) -> None:
    memory = ResultMemory(FORMS)
    results = memory.lend()
    addresses, view = _addresses(results), keep(results[1])
    del results
    assert not _addresses(memory.lend()) & addresses  # all of a set, or none
    del view
    assert _addresses(memory.lend()) == addresses


def test_results_of_one_call_stay_as_they_are(session: Session) -> None:
    inputs = [torch.randn(rows, 512) for rows in (ROWS, 4, ROWS, ROWS, ROWS + 1, ROWS, 4, ROWS + 1, ROWS)]
    held = [session([x]) for x in inputs]
    for x, results in zip(inputs, held, strict=True):
        for result, expected in zip(results, Two()(x), strict=True):
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


def test_memory_of_large_results_is_used_again(session: Session) -> None:
    x = torch.randn(ROWS, 512)
    assert is_large(session([x]))
    first = session([x])
    address = first[0].data_ptr()
    del first
    assert session([x])[0].data_ptr() == address


def test_threads_have_memory_of_their_own(session: Session) -> None:
    inputs = [torch.randn(ROWS, 512) for _ in range(12)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda x: session([x])[0], inputs))
    for x, result in zip(inputs, found, strict=True):
        torch.testing.assert_close(result, Two()(x)[0])


class Chosen(nn.Module):
    """Results whose number of rows hangs on the numbers that come in."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x[x[:, 0] > 0]


def test_results_whose_shapes_numbers_decide_are_not_written_into_memory_of_the_last_shapes() -> None:
    pytest.importorskip("openvino")
    x = torch.randn(ROWS, 512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        session = engine_named("openvino").compile(Chosen(), [x[:4]], torch.float32, 1)
    for each in (x, x.abs(), -x.abs(), x.flip(0)):
        for found, expected in zip(session([each]), Chosen()(each), strict=True):
            assert torch.equal(found, expected)
