"""Pooling is swapped where its edges are known; the rest of the model, its weights and its checkpoints stay."""

from __future__ import annotations

import copy
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg

import fxopt
from fxopt.errors import StateWarning
from fxopt.layers import RO3Pooling, RO3TriadPooling
from fxopt.passes.pipeline import parse
from fxopt.transforms.graph_pooling import GraphPooling

WIDTH = 8


def graphs(count=3, size=7):
    """Return features, edges and the batch vector of random graphs of one size."""
    nodes = count * size
    batch = torch.arange(nodes) // size
    source = torch.randint(0, nodes, (4 * nodes,))
    target = batch[source] * size + torch.randint(0, size, (4 * nodes,))
    return torch.randn(nodes, WIDTH), torch.stack([source, target]), batch


class Classifier(nn.Module):
    def __init__(self, readout=pyg.global_mean_pool, pool=None):
        super().__init__()
        self.conv, self.head = pyg.GCNConv(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.readout, self.pool, self.contracts = readout, pool, isinstance(pool, pyg.EdgePooling)

    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        if self.contracts:
            x, edge_index, batch, _ = self.pool(x, edge_index, batch)
        elif self.pool is not None:
            x, edge_index, _, batch, _, _ = self.pool(x, edge_index, None, batch)
        return self.head(self.readout(x, batch))


def swapped(model, options="", **arguments):
    torch.manual_seed(0)
    return fxopt.optimize(model, f"graph_pooling{options}", example_inputs=graphs(), time_budget=60, **arguments)


def statuses(model):
    return [decision.status for decision in fxopt.plan(model).decisions]


def reasons(model):
    return [decision.reason for decision in fxopt.plan(model).decisions]


READOUTS = {
    "mean": pyg.global_mean_pool,
    "add": pyg.global_add_pool,
    "max": pyg.global_max_pool,
    "mean module": pyg.MeanAggregation(),
    "sum module": pyg.SumAggregation(),
    "max module": pyg.MaxAggregation(),
}


@pytest.mark.parametrize("name", READOUTS)
def test_readouts_pool_over_triples(name):
    model = Classifier(READOUTS[name]).eval()
    before = copy.deepcopy(model.state_dict())
    fast = swapped(model)
    assert statuses(fast) == ["applied"]
    assert isinstance(fast.ro3_pooling, RO3Pooling)
    text = str(fxopt.graphs(fast)[""])
    assert "call_module[target=ro3_pooling](args = (%relu, %edge_index, None, %batch, None)" in text
    assert "call_function[target=torch_geometric.nn.pool.glob" not in text
    for count in (1, 3, 5):
        x, edges, batch = graphs(count)
        pooled = fast.ro3_pooling(model.conv(x, edges).relu(), edges, None, batch)
        torch.testing.assert_close(fast(x, edges, batch), model.head(pooled))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(("pool", "kind"), [(pyg.TopKPooling, "RO3TriadPooling"), (pyg.SAGPooling, "SAGTriadPooling")])
@pytest.mark.parametrize("source", ["topk,sag", "mean", ""])
def test_coarsening_pools_triads_with_the_same_scorer(pool, kind, source):
    model = Classifier(pool=pool(WIDTH, ratio=0.4, multiplier=2.0)).eval()
    fast = swapped(model, f"{{triads=all,source=[{source}]}}" if source else "{triads=all}")
    assert set(statuses(fast)) == {"applied"}
    assert type(model.pool) is pool
    if source == "mean":
        assert type(fast.pool) is pool
    else:
        assert type(fast.pool).__name__ == kind
        assert (fast.pool.ratio, fast.pool.multiplier, fast.pool.triads) == (0.4, 2.0, "all")
        assert list(fast.pool.state_dict()) == list(model.pool.state_dict())
    assert hasattr(fast, "ro3_pooling") == (source != "topk,sag")
    for count in (1, 4):
        assert fast(*graphs(count)).shape == (count, 3)


def test_it_trains_with_the_optimizer_and_goes_back_and_forth():
    model = Classifier(pool=pyg.TopKPooling(WIDTH))
    fast = swapped(model)
    inputs, target = graphs(), torch.tensor([0, 1, 2])
    optimizer = torch.optim.Adam(fast.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(fast(*inputs), target))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.any() for n, p in fast.named_parameters() if "before.weight" in n)
    other = swapped(model)
    other.load_state_dict(fast.state_dict())
    torch.testing.assert_close(other(*inputs), fast(*inputs))


def stepped(model, optimizer):
    """Return the parameters that a step of training leaves as they were."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(*graphs()), torch.tensor([0, 1, 2])).backward()
    optimizer.step()
    return [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


OPTIMIZERS = {
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "named": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.02),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("inplace", [False, True])
def test_an_optimizer_trains_the_new_parameters_too(kind, inplace):
    model = Classifier()
    optimizer = OPTIMIZERS[kind](model)
    stepped(model, optimizer)
    fast = swapped(model, optimizer=optimizer, inplace=inplace)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in fast.parameters()]
    if kind == "named":
        assert optimizer.param_groups[0]["param_names"] == [name for name, _ in fast.named_parameters()]
    stepped(fast, optimizer)
    assert not stepped(fast, optimizer)


def test_new_parameters_join_the_group_of_those_beside_them():
    model = Classifier()
    weights, biases = (
        [p for name, p in model.named_parameters() if ("bias" in name) is wanted] for wanted in (False, True)
    )
    optimizer = torch.optim.Adam([{"params": biases, "weight_decay": 0.0}, {"params": weights, "lr": 0.5}], lr=0.02)
    fast = swapped(model)
    assert fxopt.translate_optimizer(optimizer, fast) is optimizer
    held = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    for name, parameter in fast.named_parameters():
        assert [id(parameter) in ids for ids in held] == ["bias" in name, "bias" not in name], name
    fxopt.translate_optimizer(optimizer, fast)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(fast.parameters()))


def test_of_two_optimizers_one_trains_the_new_parameters():
    model = Classifier()
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.conv, model.head))
    fast = swapped(model, optimizer=first)
    fxopt.translate_optimizer(second, fast)
    assert len(first.param_groups[0]["params"]) == len(list(fast.parameters())) - 2
    assert len(second.param_groups[0]["params"]) == 2


def test_an_optimizer_lets_go_of_the_new_parameters_when_the_model_goes_back():
    fast = swapped(Classifier())
    optimizer = torch.optim.Adam(fast.parameters(), lr=0.02)
    stepped(fast, optimizer)
    again = fxopt.optimize(fast, "eliminate_dead_code", example_inputs=graphs(), optimizer=optimizer)
    assert optimizer.state[again.ro3_pooling.before.weight]["step"] == 1
    assert not stepped(again, optimizer)
    original = fxopt.restore(again, optimizer=optimizer)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in original.parameters()]
    assert len(optimizer.state) == len(list(original.parameters()))


def test_old_checkpoints_load_and_what_they_lack_is_named():
    model = Classifier().eval()
    fast = swapped(model)
    new = [name for name in fast.state_dict() if name not in model.state_dict()]
    assert new
    assert all(name.startswith("ro3_pooling.") for name in new)
    kept = fast.state_dict()[new[0]].clone()
    with pytest.warns(StateWarning, match="ro3_pooling.before.weight"):
        fast.load_state_dict(Classifier().state_dict())
    assert torch.equal(fast.state_dict()[new[0]], kept)


def test_the_seed_decides_the_new_parameters():
    model = Classifier().eval()
    one, same, other = (swapped(model, f"{{seed={seed}}}").ro3_pooling.before.weight for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_a_plan_repeats_it_and_a_second_run_finds_nothing():
    model = Classifier(pool=pyg.TopKPooling(WIDTH)).eval()
    fast = swapped(model)
    again = fxopt.optimize(
        Classifier(pool=pyg.TopKPooling(WIDTH)).eval(), plan=fxopt.plan(fast), example_inputs=graphs()
    )
    assert isinstance(again.pool, RO3TriadPooling)
    assert "applied" not in statuses(swapped(fast))[2:]


# -- refusals ---------------------------------------------------------------------------------------------------------


class TwoReadouts(Classifier):
    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        return self.head(pyg.global_mean_pool(x, batch) + pyg.global_max_pool(x, batch))


def test_two_places_of_one_module_are_two_in_the_report():
    fast = swapped(TwoReadouts().eval())
    assert statuses(fast) == ["applied", "applied"]
    labels = [decision.label for decision in fxopt.plan(fast).decisions]
    assert len(set(labels)) == 2
    assert all(label in str(fxopt.report(fast)) for label in labels)


class VirtualNode(Classifier):
    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        of_graph = pyg.global_add_pool(x, batch)
        return self.head(pyg.global_mean_pool(x + of_graph[batch], batch))


def test_what_a_virtual_node_adds_keeps_the_order_of_nodes():
    fast = swapped(VirtualNode().eval())
    assert statuses(fast) == ["applied", "applied"]
    assert fast(*graphs(4)).shape == (4, 3)


class TwoGraphs(Classifier):
    def forward(self, x, edge_index, batch):
        return self.head(pyg.global_mean_pool(self.conv(x, edge_index) + self.conv(x, edge_index.flip(0)), batch))


class Selecting(Classifier):
    def forward(self, x, edge_index, batch):
        kept = batch > 0
        return self.head(pyg.global_mean_pool(self.conv(x, edge_index)[kept], batch[kept]))


class WithoutEdges(Classifier):
    def forward(self, x, edge_index, batch):
        return self.head(pyg.global_mean_pool(x, batch))


class Flat(Classifier):
    def forward(self, x, edge_index, batch):
        return pyg.global_mean_pool(self.conv(x, edge_index).sum(1), batch)


class Weighted(Classifier):
    def forward(self, x, edge_index, batch):
        x, _, _, batch, _ = self.pool(self.conv(x, edge_index), edge_index, None, batch)
        return self.head(x)


class Unpooled(Classifier):
    def forward(self, x, edge_index, batch):
        return self.head(self.conv(x, edge_index))


class Aggregating(Classifier):
    def forward(self, x, edge_index, batch):
        return self.readout(self.conv(x, edge_index), batch)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Aggregating(pyg.Set2Set(WIDTH, 2)), "Set2Set reads the nodes by an LSTM and gives twice as many features"),
        (Aggregating(pyg.SortAggregation(4)), "SortAggregation gives the features of k sorted nodes side by side"),
        (Aggregating(pyg.SoftmaxAggregation()), "SoftmaxAggregation is another function than mean, sum and maximum"),
        (TwoGraphs(), "several edge_index"),
        (Selecting(), "no longer those that edge_index names"),
        (WithoutEdges(), "no message passing"),
        (Flat(), "1 dimensions"),
        (Unpooled(), "no graph of this model pools"),
        (Classifier(pool=pyg.TopKPooling(WIDTH, min_score=0.1)), "min_score"),
        (Classifier(pool=pyg.EdgePooling(WIDTH)), "EdgePooling scores edges and joins pairs of nodes"),
        (Weighted(pool=pyg.ASAPooling(WIDTH)), "ASAPooling shares nodes out among clusters"),
    ],
)
def test_refused_with_a_reason(model, reason):
    fast = swapped(model.eval())
    assert "undone" not in statuses(fast)
    assert any(reason in (found or "") for found in reasons(fast))


@pytest.mark.parametrize("compression", ["prune", "qat"])
def test_other_passes_leave_the_new_layers_as_they_are_and_say_why(compression):
    model = Classifier().eval()
    for fast in (
        swapped(model, f",{compression}"),
        fxopt.optimize(swapped(model), compression, example_inputs=graphs()),
    ):
        refused = [d.reason for d in fxopt.plan(fast).decisions if d.site["owner"].startswith("ro3_pooling.")]
        assert len(refused) == 3
        assert all("no checkpoint from before holds its tensors: it stays as it is" in reason for reason in refused)
        assert "applied" in [d.status for d in fxopt.plan(fast).decisions if d.site["owner"] == "head"]


def test_a_call_without_a_batch_vector_or_with_a_size():
    class Sized(Classifier):
        def forward(self, x, edge_index, batch=None):
            x = self.conv(x, edge_index)
            return self.head(pyg.global_add_pool(x, batch) if batch is None else pyg.global_add_pool(x, batch, 4))

    x, edges, batch = graphs()
    model = Sized().eval()
    fast = fxopt.optimize(model, "graph_pooling", example_inputs=[(x, edges, batch), (x, edges)], time_budget=60)
    assert set(statuses(fast)) == {"applied"}
    assert fast(x, edges, batch).shape == (4, 3)
    assert fast(x, edges).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "ro2"}, "did you mean 'ro3'"),
        ({"source": "mena"}, "did you mean 'mean'"),
        ({"structure": "adjacent"}, "structure='adjacent'; give adjacency, distance or codegree"),
        ({"triads": "open"}, "triads='open'; give closed or all"),
    ],
)
def test_wrong_options_are_refused_where_they_are_given(options, message):
    with pytest.raises(fxopt.UsageError, match=message):
        GraphPooling(**options)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.sampled_from(["mean", "add", "topk", "sag"]), unique=True).map(tuple),
    st.sampled_from(["adjacency", "distance", "codegree"]),
    st.sampled_from(["closed", "all"]),
    st.integers(0, 99),
)
def test_its_text_is_read_back(source, structure, triads, seed):
    options = GraphPooling(source=source, structure=structure, triads=triads, seed=seed)
    (read,) = parse(str(options))
    assert asdict(read) == asdict(options)
