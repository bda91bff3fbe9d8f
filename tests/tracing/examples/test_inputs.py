from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from transformers import BatchEncoding

import fxopt
from fxopt.tracing.examples import Inputs, normalize_inputs

X, Y = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10)


class One(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x)


class Two(One):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) + y[:, None]


class Any(One):
    def forward(self, *parts: Tensor) -> Tensor:
        return self.linear(parts[0])


class Whole(One):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.linear(batch["features"])


class Records(Dataset[dict[str, Tensor]]):
    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def loader(*columns: Tensor, **options: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(*columns), batch_size=4, **options)


def calls(inputs: object, model: nn.Module | None = None) -> list[tuple[tuple[object, ...], dict[str, object]]]:
    return [(call.args, call.kwargs) for call in normalize_inputs(inputs, model)]


def same(call: tuple[object, ...], *expected: Tensor) -> bool:
    return len(call) == len(expected) and all(map(torch.equal, call, expected))


def test_a_tensor_is_one_argument_and_a_list_is_several_calls():
    assert calls(X) == [((X,), {})]
    assert [len(args) for args, _ in calls([X, (X, Y), {"x": X}, Inputs(X)])] == [1, 2, 0, 1]


def test_an_encoding_is_keywords():
    ((args, kwargs),) = calls(BatchEncoding({"input_ids": X}))
    assert args == () and list(kwargs) == ["input_ids"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_graph_is_one_argument():
    from torch_geometric.data import Batch, Data
    from torch_geometric.loader import DataLoader as GraphLoader

    graph = Data(x=X, edge_index=torch.tensor([[0, 1], [1, 2]]))
    assert calls(graph) == [((graph,), {})]
    found = calls(GraphLoader([graph] * 5, batch_size=2), nn.Identity())
    assert [type(args[0]).__name__ for args, _ in found] == [type(Batch()).__name__] * 2


@pytest.mark.parametrize(
    ("model", "taken"), [(One(), (X[:4],)), (Two(), (X[:4], Y[:4])), (Any(), (X[:4], Y[:4])), (None, (X[:4], Y[:4]))]
)
def test_of_the_first_batches_what_the_forward_requires_is_taken(model: nn.Module | None, taken: tuple[Tensor, ...]):
    first, second = calls(loader(X, Y), model)
    assert same(first[0], *taken) and first[1] == {}
    assert len(second[0]) == len(taken)


def test_batches_by_name_lose_what_the_forward_does_not_name():
    named = DataLoader(Records(x=X, labels=Y), batch_size=4)
    assert [list(kwargs) for _, kwargs in calls(named, One())] == [["x"], ["x"]]
    whole = DataLoader(Records(features=X, labels=Y), batch_size=4)
    assert [list(args[0]) for args, _ in calls(whole, Whole())] == [["features", "labels"]] * 2
    with pytest.raises(
        fxopt.UsageError, match=r"have the keys features, labels, and forward takes none of them \(x, y"
    ):
        calls(whole, Two())


def test_a_loader_draws_nothing_from_the_users_generators():
    own, model = torch.Generator().manual_seed(3), One()
    before, state = own.get_state(), torch.get_rng_state()
    calls(loader(X, Y, shuffle=True, generator=own), model)
    calls(loader(X, Y, shuffle=True), model)
    assert torch.equal(own.get_state(), before) and torch.equal(torch.get_rng_state(), state)


class Broken(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        raise OSError("no disk")


def test_loaders_that_give_nothing_say_so():
    with pytest.raises(fxopt.InputError, match="DataLoader given as example_inputs raised OSError: no disk"):
        calls(DataLoader(Broken()))
    with pytest.raises(fxopt.InputError, match="has no batches"):
        calls(loader(X[:2], drop_last=True))


@pytest.mark.parametrize("inputs", ["x", 3, [], [[X]], {1: X}, X.numpy()])
def test_what_is_no_input_is_named_with_the_forms_there_are(inputs: object):
    with pytest.raises(fxopt.UsageError, match="example_inputs") as caught:
        calls(inputs)
    assert "\n" not in str(caught.value) and "array(" not in str(caught.value)


def test_a_model_is_optimized_with_a_loader_that_has_labels():
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([head(x) for head in self.heads])

    model = Heads().eval()
    fast = fxopt.optimize(model, "fuse_ensembles{lowering=bmm}", example_inputs=loader(X, Y), measure=False)
    assert [decision.figures["checked"] for decision in fxopt.plan(fast).decisions] == ["float64"]
    torch.testing.assert_close(fast(X), model(X))
