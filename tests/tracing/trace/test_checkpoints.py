"""Checkpointing inside of a forward is kept: what is computed again for the backward pass is a region."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxopt
from fxopt.compat import all_modules
from fxopt.runtime.graphs import ContextRegion

X = (torch.randn(3, 6, generator=torch.Generator().manual_seed(0)),)
X2 = (torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),)


class Net(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))
        self.drop = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.rand(6))

    def block(self, x, twice=False):
        y = self.drop(self.linear(x)).relu() * self.scale
        return (y * 2 if twice else y), x.shape[0]

    def ensemble(self, x):
        return torch.cat([self.drop(head(x)) for head in self.heads], -1)


class Plain(Net):
    def forward(self, x):
        y, count = checkpoint(self.block, x, use_reentrant=False, twice=True)
        return y * count


class Loop(Net):
    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False, determinism_check="none", early_stop=False)[0]
        return x


class Partial(Net):
    """As `transformers` do: the function is kept in a partial."""

    def __init__(self):
        super().__init__()
        self.run = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True)

    def forward(self, x):
        return self.run(functools.partial(self.block, twice=True), x)[0] + x


class Nested(Net):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = checkpoint(self.inner, x, use_reentrant=False)
        return y

    def inner(self, x):
        with torch.no_grad():
            gate = self.linear(x).sigmoid()
        return checkpoint(self.block, x * gate, use_reentrant=False)


class InTraining(Net):
    def forward(self, x):
        if self.training:
            return checkpoint(self.block, x, use_reentrant=False)[0]
        return self.block(x)[0]


class Selective(Net):
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=contexts)[0]


class Ensemble(Net):
    def forward(self, x):
        return checkpoint(self.ensemble, x, use_reentrant=False) + checkpoint(self.block, x, use_reentrant=False)[1]


class Reentrant(Net):
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)[0]


class MadeHere(Net):
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=lambda: contexts())[0]


def contexts():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


@pytest.mark.parametrize("kind", [Plain, Loop, Partial, Nested, InTraining, Selective, Ensemble])
def test_equal_with_the_same_dropout(kind, agree, misses):
    program = agree(kind(), X, X2)
    assert misses(program) == 0
    assert any(isinstance(module, ContextRegion) for module in all_modules(program.model))


@pytest.mark.parametrize("kind", [Plain, Loop, Partial, InTraining])
def test_what_is_checkpointed_is_computed_again(kind):
    def calls(model):
        count = 0

        def note(*_):
            nonlocal count
            count += 1

        model.linear.register_forward_hook(note)
        model(*X).sum().backward()
        return count

    model = kind()
    captured = fxopt.capture(model, X).model
    assert calls(captured) == calls(model) > 1


def test_less_is_saved_for_the_backward_pass():
    def saved(model):
        own = {parameter.data_ptr() for parameter in model.parameters()}
        sizes = []

        def pack(tensor):
            sizes.append(0 if tensor.data_ptr() in own else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*X)
        return sum(sizes)

    class Without(Loop):
        def forward(self, x):
            for _ in range(3):
                x = self.block(x)[0]
            return x

    captured, without = fxopt.capture(Loop(), X).model, fxopt.capture(Without(), X).model
    assert saved(captured) == saved(Loop()) < saved(without)


def test_text_of_the_graphs():
    graphs = fxopt.capture(Plain(), X).graphs
    assert "%checkpoint_0 : [num_users=2] = call_module[target=checkpoint_0](args = (%x, %scale)" in str(graphs[""])
    assert [node.name for node in graphs["checkpoint_0"].nodes if node.op == "call_module"] == ["linear", "drop"]


def test_settings_are_kept():
    program = fxopt.capture(Loop(), X)
    settings = [program.module(f"checkpoint_{number}").context.settings for number in range(3)]
    assert settings == [{"determinism_check": "none", "early_stop": False}] * 3


def test_copies_pickles_and_compiles():
    model = Plain()
    captured = fxopt.capture(model, X).model
    for copied in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        torch.manual_seed(1)
        given = copied(*X)
        torch.manual_seed(1)
        assert torch.equal(given, model(*X))
    compiled = torch.compile(captured.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*X), model.eval()(*X))


@pytest.mark.parametrize("training", [False, True])
def test_rewrites_inside_are_verified(training):
    """Where dropout is drawn from verification's tape, a second computation must not draw again."""

    def forward(self, x):
        y = checkpoint(self.ensemble, x, use_reentrant=False)
        return y * checkpoint(self.twins, x, use_reentrant=False)

    def twins(self, x):
        return self.drop(torch.relu(self.linear(x)) + torch.relu(self.linear(x))).sum(-1, keepdim=True)

    model = type("Model", (Net,), {"forward": forward, "twins": twins})().train(training)
    fast = fxopt.optimize(model, passes=["eliminate_common_subexpressions"], example_inputs=X, measure=False)
    decisions = {decision.label: decision.status for decision in fxopt.plan(fast).decisions}
    if not training:
        assert decisions["checkpoint_1"] == "applied"
    torch.manual_seed(1)
    given = fast(*X)
    torch.manual_seed(1)
    torch.testing.assert_close(given, model(*X))


def test_members_around_a_checkpoint_are_fused_and_verified():
    class Around(Net):
        def forward(self, x):
            y = torch.cat([self.drop(head(x)) for head in self.heads], -1)
            return y.sum(-1, keepdim=True) * checkpoint(self.block, x, use_reentrant=False)[0]

    model = Around().train()
    fast = fxopt.optimize(model, passes="fuse_ensembles{lowering=bmm}", example_inputs=X, measure=False)
    assert [decision.status for decision in fxopt.plan(fast).decisions] == ["applied"]
    torch.testing.assert_close(fast.eval()(*X), model.eval()(*X))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("kind", "reason"), [(Reentrant, "use_reentrant=True"), (MadeHere, "makes the context_fn of a checkpoint itself")]
)
def test_opaque_with_the_reason(kind, reason, agree):
    program = agree(kind(), X, opaque=True)
    assert reason in program.opaque[""].reason
    assert program.opaque[""].location.startswith("test_checkpoints.py:")
