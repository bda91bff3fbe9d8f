"""Small work beside an engine runs in one thread, and leaves the number of threads as it was."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional

from fxopt.layers.delegated import LookUp, one_thread
from fxopt.layers.delegated.one_thread import OneThread

needs_openmp = pytest.mark.skipif(one_thread._set_threads() is None, reason="torch computes without OpenMP here")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@needs_openmp
def test_the_number_of_threads_is_one_inside_and_comes_back():
    with OneThread(100):
        assert torch.get_num_threads() == 1
        with OneThread(100):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_what_raises_inside_leaves_the_number_of_threads():
    weight = torch.randn(4, 3)
    with pytest.raises(IndexError):
        LookUp()(torch.tensor([4]), weight)
    assert torch.get_num_threads() == 2


def test_a_new_thread_keeps_the_number_of_threads_of_torch():
    found: list[int] = []

    def look_up() -> None:
        LookUp()(torch.tensor([0, 1]), torch.randn(4, 3))
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=look_up)
    thread.start()
    thread.join()
    assert found == [2]


@pytest.mark.parametrize("rows", [3, 3000])
def test_rows_and_gradients_are_those_of_torch(rows: int):
    weight = torch.randn(50, 400, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(0, 50, (rows,))
    results = [each(indices, weight, padding_idx=0) for each in (LookUp(), functional.embedding)]
    gradients = [torch.autograd.grad(each.sum(), weight)[0] for each in results]
    assert torch.equal(*results)
    assert torch.equal(*gradients)


def test_compiled_and_exported_code_has_the_look_up_of_torch():
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.look_up = nn.Parameter(torch.randn(5, 4)), LookUp()

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.look_up(indices, self.weight)

    model, indices = Rows().eval(), torch.tensor([1, 4])
    exported = torch.export.export(model, (indices,))
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == [
        "aten.embedding.default"
    ]
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(indices), model(indices))
