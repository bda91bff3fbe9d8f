"""Graph networks whose convolutions go over compressed rows: the same network otherwise, in any mode."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("torch_geometric")

from torch_geometric import nn as pyg

import fxopt
from fxopt.passes.pipeline import parse
from fxopt.testing import assert_equivalent
from fxopt.transforms.sparse_message_passing import SparseMessagePassing

WIDTH, NODES = 8, 30


def graph(seed=0, edges=90):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NODES, WIDTH, generator=generator), torch.randint(0, NODES, (2, edges), generator=generator)


class Network(nn.Module):
    def __init__(self, *convs):
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(convs or [pyg.GCNConv(WIDTH, WIDTH), pyg.GATConv(WIDTH, 4, heads=2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return self.head(x)


class Derived(pyg.SAGEConv):
    """Whose messages are others."""

    def message(self, x_j):
        return 2 * x_j


def optimized(model, **arguments):
    inputs = arguments.pop("inputs", graph())
    arguments = {"measure": False, "time_budget": 60, **arguments}
    return fxopt.optimize(model, "sparse_message_passing", example_inputs=inputs, **arguments)


def used(fast, inputs):
    """Call a model so often that its layers go over the rows of this graph, and of the next one."""
    for _ in range(30):
        fast(*inputs)


def over_rows(conv):
    """Say whether a layer keeps rows of graphs."""
    return "_fxopt_graphs" in vars(conv)


def statuses(model):
    return [decision.status for decision in fxopt.plan(model).decisions]


@pytest.mark.parametrize("training", [False, True])
def test_the_layers_keep_their_class_their_weights_and_their_names(training):
    model = Network().train(training)
    before = copy.deepcopy(model.state_dict())
    fast = optimized(model)
    assert statuses(fast) == ["applied", "applied"]
    assert "the speed is that of graphs that come again" in str(fxopt.report(fast))
    for conv, own in zip(fast.convs, model.convs, strict=True):
        assert over_rows(conv) and isinstance(conv, type(own))
        assert type(conv).__name__ == type(own).__name__ and repr(conv) == repr(own)
        assert not over_rows(own)
    assert fast.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for seed in (0, 1):
        assert_equivalent(model, fast, graph(seed))


def test_for_evaluation_training_runs_the_layers_own_forward(monkeypatch):
    model = Network().eval()
    fast = optimized(model)
    calls = []
    own = pyg.GCNConv.forward
    monkeypatch.setattr(pyg.GCNConv, "forward", lambda *args: calls.append(1) or own(*args))
    used(fast, inputs := graph())
    calls.clear()
    fast(*inputs)
    assert not calls
    fast.train()(*graph()).sum().backward()
    assert calls
    assert all(parameter.grad is not None for parameter in fast.parameters())


def test_a_network_trains_to_the_same_weights():
    model = Network().train()
    fast = optimized(model)
    x, edge_index = graph()
    for network in (model, fast):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            network(x, edge_index).square().mean().backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fast.get_parameter(name), parameter)


def test_checkpoints_copies_archives_plans_and_the_way_back(tmp_path):
    model = Network().eval()
    fast, inputs = optimized(model), graph(1)
    other = Network().eval()
    nn.init.normal_(other.head.weight)
    fast.load_state_dict(other.state_dict())
    expected = other(*inputs)
    torch.testing.assert_close(fast(*inputs), expected)
    fxopt.save(fast, tmp_path / "network.fxopt")
    again = fxopt.load(tmp_path / "network.fxopt", model=Network().eval())
    replayed = fxopt.optimize(other, plan=fxopt.plan(fast), example_inputs=graph())
    for network in (copy.deepcopy(fast), again, replayed):
        assert all(map(over_rows, network.convs))
        torch.testing.assert_close(network(*inputs), expected)
    original = fxopt.restore(fast)
    assert [type(conv) for conv in original.convs] == [pyg.GCNConv, pyg.GATConv]
    torch.testing.assert_close(original(*inputs), expected)


def test_a_cached_layer_knows_nothing_of_the_examples():
    model = Network(pyg.GCNConv(WIDTH, WIDTH, cached=True)).eval()
    fast = optimized(model, inputs=graph(5))
    for inputs in (graph(), graph(1)):  # the second is answered over the edges of the first, as the layer has it
        torch.testing.assert_close(fast(*inputs), model(*inputs))


class Counted:
    """How often the layers' own forwards run in each of some calls with a graph."""

    def __init__(self, monkeypatch, fast):
        own, self.calls, self.fast = pyg.SAGEConv.forward, [], fast
        monkeypatch.setattr(pyg.SAGEConv, "forward", lambda *args: self.calls.append(args[0]) or own(*args))

    def __call__(self, inputs, times=1):
        found = []
        for _ in range(times):
            self.calls.clear()
            self.fast(*inputs)
            found.append(len(self.calls))
        return found


@pytest.mark.parametrize("layers", [1, 2])
def test_graphs_that_never_come_again_are_soon_left_to_the_layers(layers, monkeypatch):
    fast = optimized(Network(*(pyg.SAGEConv(WIDTH, WIDTH) for _ in range(layers))).eval())
    counts = Counted(monkeypatch, fast)
    once = [counts(graph(seed)) for seed in range(40)]
    assert once[10:] == [[layers]] * 30  # not one of them makes rows, for another either
    assert counts(graph(3), 3) == [layers, 0, 0]


def test_rows_that_are_used_twice_and_never_again_are_made_ever_more_seldom(monkeypatch):
    fast = optimized(Network(pyg.SAGEConv(WIDTH, WIDTH)).eval())
    counts = Counted(monkeypatch, fast)
    for seed in range(60):
        last = counts(graph(seed), 3)
    assert last == [1, 1, 1]


def test_a_graph_that_comes_again_and_again_goes_over_rows_and_so_does_the_next_one(monkeypatch):
    fast = optimized(Network(pyg.SAGEConv(WIDTH, WIDTH)).eval())
    counts = Counted(monkeypatch, fast)
    for seed in range(40):
        counts(graph(seed))
    found = counts(graph(3), 40)
    assert found[0] == 1 and found[1:] == [0] * 39
    assert counts(graph(4), 2) == [0, 0]


def test_layers_whose_graphs_are_new_look_at_few_of_them_until_one_comes_again(monkeypatch):
    fast, looked = optimized(Network(pyg.SAGEConv(WIDTH, WIDTH)).eval()), []
    fast(*graph())
    kind = type(next(iter(vars(fast.convs[0])["_fxopt_graphs"].sights.values())))
    own = kind.wants
    monkeypatch.setattr(kind, "wants", lambda self, edges: looked.append(edges) or own(self, edges))
    for seed in range(100):
        fast(*graph(seed))
    before = len(looked)
    for seed in range(100, 164):
        fast(*graph(seed))
    assert len(looked) - before == 2
    large = torch.randn(3000, WIDTH), torch.randint(0, 3000, (2, 70_000))
    fast(*large)
    assert looked[-1] is large[1], "what gains at once is looked at at once"
    again = graph(7)
    used(fast, again)
    used(fast, again)
    seen = len(looked)
    used(fast, again)
    assert len(looked) - seen == 30
    fast.train().eval()
    assert vars(fast.convs[0])["_fxopt_calls_unobserved"] == 0


def test_a_bias_goes_into_the_product_where_the_layers_linear_is_as_it_was():
    model, inputs = Network(pyg.GCNConv(WIDTH, WIDTH)).eval(), graph()
    fast, calls = optimized(model), []
    fast.convs[0].lin.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert calls == [1]
    with torch.no_grad():
        packed = fxopt.optimize(model, "pack,sparse_message_passing", example_inputs=inputs, measure=False)
        torch.testing.assert_close(packed(*inputs), model(*inputs))


def test_edges_that_are_written_to_are_a_graph_that_was_never_seen(monkeypatch):
    fast = optimized(Network(pyg.SAGEConv(WIDTH, WIDTH)).eval())
    counts, (x, edge_index) = Counted(monkeypatch, fast), graph()
    for seed in range(40):
        edge_index.copy_(graph(seed)[1])
        last = counts((x, edge_index))
    assert last == [1]
    assert counts((x, edge_index), 2) == [0, 0]


class Twice(nn.Module):
    """A forward that no graph can say, with a layer that is called twice."""

    def __init__(self, names=1):
        super().__init__()
        torch.manual_seed(0)
        self.conv = pyg.GINConv(nn.Linear(WIDTH, WIDTH))
        if names == 2:
            self.same = self.conv

    def forward(self, x, edge_index):
        for _ in range(int(edge_index.max() > 0) + 1):
            x = self.conv(x, edge_index)
        return x


def test_a_layer_in_a_model_without_graphs():
    fast, inputs = optimized(Twice().eval()), graph(2)
    assert statuses(fast) == ["applied"]
    torch.testing.assert_close(fast(*inputs), Twice().eval()(*inputs))


def test_a_layer_with_two_names_is_left_as_it_is():
    (decision,) = fxopt.plan(optimized(Twice(names=2).eval())).decisions
    assert decision.status == "refused"
    assert "same" in decision.reason


def test_a_second_run_changes_nothing():
    fast = optimized(Network().eval())
    again = fxopt.optimize(fast, "sparse_message_passing", example_inputs=graph(), measure=False)
    reasons = [decision.reason for decision in fxopt.plan(again).decisions[2:]]
    assert reasons == ["it goes over compressed rows already"] * 2


def test_measured_it_stays_where_it_pays_and_says_so():
    fast = optimized(Network().eval(), measure=True)
    assert list(map(over_rows, fast.convs)) == [status == "applied" for status in statuses(fast)]
    torch.testing.assert_close(fast(*graph(3)), Network().eval()(*graph(3)))


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (
            lambda: pyg.GraphConv(WIDTH, WIDTH),
            "GraphConv is none of GCNConv, SAGEConv, GINConv, RGCNConv, GATConv, GATv2Conv",
        ),
        (lambda: Derived(WIDTH, WIDTH), "Derived is none of"),
        (lambda: pyg.SAGEConv(WIDTH, WIDTH, aggr="max"), "it aggregates by max"),
        (lambda: pyg.GCNConv(WIDTH, WIDTH, aggr="mean"), "it aggregates by mean"),
        (lambda: pyg.GATConv((WIDTH, WIDTH), WIDTH), "transformed by layers of their own"),
        (lambda: hooked(pyg.GCNConv(WIDTH, WIDTH)), "it has hooks on its messages"),
    ],
)
def test_refused_with_a_reason(conv, reason):
    (decision,) = fxopt.plan(optimized(Network(conv()).eval())).decisions
    assert decision.status == "refused"
    assert reason in decision.reason


def hooked(conv):
    conv.register_propagate_forward_hook(lambda *_: None)
    return conv


@pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")  # of zeros in the places of what was pruned
@pytest.mark.parametrize("kind", [pyg.GCNConv, pyg.GATConv])
def test_layers_that_were_pruned_in_an_earlier_call_go_over_rows(kind):
    model = Network(kind(WIDTH, 16), kind(16, WIDTH)).eval()
    pruned = fxopt.optimize(model, "prune{method=structured,amount=0.4}", example_inputs=graph(), time_budget=60)
    assert len(dict(pruned.convs[0].named_parameters())["bias"]) < 16
    pruned.train()(*graph()).square().mean().backward()
    fast = optimized(pruned.eval())
    assert [d.status for d in fxopt.plan(fast).decisions if d.pass_name == "sparse_message_passing"] == ["applied"] * 2
    assert all(map(over_rows, fast.convs))
    used(fast, graph())
    torch.testing.assert_close(fast(*graph()), pruned(*graph()))
    for one, other in ((fast, pruned), (fast.convs[0], pruned.convs[0])):
        mine, its = one.state_dict(), other.state_dict()
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)
    fast.load_state_dict(model.state_dict())
    pruned.load_state_dict(model.state_dict())
    torch.testing.assert_close(fast(*graph()), pruned(*graph()))


def test_of_a_model_without_message_passing_nothing_is_said():
    fast = optimized(nn.Linear(3, 3), inputs=(torch.randn(2, 3),))
    assert not fxopt.plan(fast).decisions


@pytest.mark.parametrize("options", ["", "{dtype=bfloat16}", "{dtype=int8}"])
def test_the_preset_inference_has_it(options):
    model = Network(pyg.GCNConv(WIDTH, WIDTH)).eval()
    fast = fxopt.optimize(model, f"inference{options}", example_inputs=graph(), measure=False, time_budget=60)
    decisions = fxopt.plan(fast).decisions
    assert [each.status for each in decisions if each.pass_name == "sparse_message_passing"] == ["applied"]


class Pooled(nn.Module):
    """Whose second layer sees other edges at each call, as behind a pooling that chooses by the features."""

    def __init__(self):
        super().__init__()
        self.first, self.second = pyg.GCNConv(WIDTH, WIDTH), pyg.GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index.flip(1))


def test_a_layer_whose_edges_are_always_new_gives_up_beside_one_whose_are_the_same(monkeypatch):
    model, inputs = Pooled().eval(), graph()
    fast = optimized(model)
    assert over_rows(fast.second)
    for _ in range(70):
        fast(*inputs)
    expected = model(*inputs)
    calls, own = [], pyg.GCNConv.forward
    monkeypatch.setattr(pyg.GCNConv, "forward", lambda *args: calls.append(args[0]) or own(*args))
    torch.testing.assert_close(fast(*inputs), expected)
    assert calls == [fast.second]


def test_its_text_is_read_back():
    assert parse(str(SparseMessagePassing())) == (SparseMessagePassing(),)


def test_hooks_on_what_aggregates_run():
    model, inputs = Network(), graph()
    fast, called = optimized(model, inputs=inputs), []
    used(fast, inputs)
    expected = model(*inputs)
    for conv in fast.convs:
        conv.aggr_module.register_forward_hook(lambda *_: called.append("called"))
    torch.testing.assert_close(fast(*inputs), expected)
    assert called == ["called"] * len(fast.convs)


class TwoKinds(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        rates, rated = (pyg.SAGEConv((WIDTH, WIDTH), WIDTH, **options) for _ in range(2))
        knows = pyg.SAGEConv(WIDTH, WIDTH)
        convs = {("user", "rates", "item"): rates, ("item", "rated", "user"): rated, ("user", "knows", "user"): knows}
        self.kinds, self.hetero = list(convs), pyg.HeteroConv(convs, aggr="sum")

    def forward(self, users, items, rates, rated, knows):
        edges = dict(zip(self.kinds, (rates, rated, knows), strict=True))
        found = self.hetero({"user": users, "item": items}, edges)
        return found["user"].sum() + found["item"].square().sum(), found


def two_kinds(seed):
    torch.manual_seed(seed)
    users, items = torch.randint(0, NODES, (100,)), torch.randint(0, 12, (100,))
    edges = torch.stack([users, items]), torch.stack([items, users]), torch.randint(0, NODES, (2, 80))
    return torch.randn(NODES, WIDTH), torch.randn(12, WIDTH), *edges


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"aggr": "sum", "root_weight": False}, {"project": True, "normalize": True}])
def test_layers_between_two_kinds_of_nodes_go_over_rows(training, options, monkeypatch):
    model = TwoKinds(**options).train(training)
    fast = optimized(model, inputs=two_kinds(0))
    assert statuses(fast) == ["applied"] * 3
    inputs = two_kinds(1)
    expected, found = model(*inputs), fast(*inputs)
    for kind in ("user", "item"):
        torch.testing.assert_close(found[1][kind], expected[1][kind])
    for each in (expected, found):
        each[0].backward()
    for one, two in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)
    monkeypatch.delattr(pyg.SAGEConv, "forward")
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs)[0], expected[0])


class Relations(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (pyg.RGCNConv(WIDTH, WIDTH, 3, **options) for _ in range(2))

    def forward(self, x, edge_index, edge_type):
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type=edge_type)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_bases": 2, "root_weight": False}, {"aggr": "add", "bias": False}])
def test_layers_with_relations_go_over_rows(training, options, monkeypatch):
    model, (x, edges), kinds = Relations(**options).train(training), graph(), torch.randint(0, 3, (90,))
    fast = optimized(model, inputs=(x, edges, kinds))
    assert statuses(fast) == ["applied", "applied"]
    (x, edges), kinds = graph(1), kinds.flip(0)
    expected = model(x, edges, kinds)
    torch.testing.assert_close(fast(x, edges, kinds), expected)
    fast(x, edges, kinds).square().mean().backward()
    expected.square().mean().backward()
    for one, two in zip(fast.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="out of bounds"):  # a relation that there is none of: as the layer says it
        fast(x, edges, kinds.index_fill(0, torch.arange(5), 3))
    monkeypatch.delattr(pyg.RGCNConv, "forward")
    torch.testing.assert_close(fast(x, edges, kinds), expected)


def test_layers_with_blocks_of_weights_are_refused():
    model, (x, edges), kinds = Relations(num_blocks=2).eval(), graph(), torch.randint(0, 3, (90,))
    fast = optimized(model, inputs=(x, edges, kinds))
    assert "its weights are blocks" in fxopt.plan(fast).decisions[0].reason
