"""pack on LSTMs: what it writes, refuses and leaves as it was, and what happens when tensors change."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import fxopt
from fxopt.compat.packed import why_no_packing
from fxopt.transforms.pack import Pack

pytestmark = pytest.mark.skipif(bool(why_no_packing(torch.float32)), reason=why_no_packing(torch.float32))

needs_bfloat16 = pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))

X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(8, 6, **options)

    def forward(self, x: Any, h: Tensor | None = None, c: Tensor | None = None) -> tuple[Any, Tensor, Tensor]:
        output, (hidden, cell) = self.lstm(x) if h is None or c is None else self.lstm(x, (h, c))
        return output, hidden, cell


def tagger(**options: Any) -> Tagger:
    return Tagger(**options).eval()


def packed(model: nn.Module, *given: Any, **options: Any) -> nn.Module:
    passes = Pack(**options)
    return fxopt.optimize(model, passes, example_inputs=fxopt.Inputs(*(given or (X,))), measure=False)


def same(one: nn.Module, other: nn.Module, *given: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(one(*(given or (X,))), other(*(given or (X,))), rtol=1e-5, atol=1e-6)


def reasons(model: nn.Module) -> list[str]:
    return [decision.reason for decision in fxopt.plan(packed(model)).decisions if decision.status == "refused"]


def names(model: nn.Module) -> list[str]:
    return [str(node.target) for node in fxopt.graphs(model)[""].nodes if node.op in ("call_module", "get_attr")]


KINDS: list[dict[str, Any]] = [
    {}, {"batch_first": True}, {"num_layers": 2}, {"bias": False}, {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "batch_first": True, "dropout": 0.5},
    {"bidirectional": True, "bias": False},
]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_lstms_are_computed_on_packed_weights(options: dict[str, Any]) -> None:
    model = tagger(**options)
    fast = packed(model)
    assert sorted(names(fast)) == sorted(f"lstm.{name}" for name, _ in model.lstm.named_parameters())
    same(fast, model)
    for shape in ((1, 1, 8), (2, 7, 8), (9, 4, 8)):
        same(fast, model, torch.randn(shape))


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=str)
def test_states_are_handed_on(options: dict[str, Any]) -> None:
    model = tagger(**options)
    rows = len(X) if options else X.shape[1]
    states = [torch.randn(4 if options else 1, rows, 6) for _ in range(2)]
    fast = packed(model, X, *states)
    assert "lstm" not in names(fast)
    same(fast, model, X, *states)
    same(fast, model, X, *(each.transpose(1, 2).contiguous().transpose(1, 2) for each in states))


def test_weights_are_packed_once() -> None:
    fast, packed_at = packed(tagger()), []
    for number in range(3):
        if number == 1:
            with torch.no_grad():
                fast.lstm.weight_ih_l0.mul_(2.0)
        with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            fast(X)
        packed_at.append("mkldnn::_reorder_mkldnn_rnn_layer_weight" in {event.name for event in found.events()})
    assert packed_at == [False, True, False]  # the comparison with the original has packed them


@needs_bfloat16
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_bfloat16_keeps_types_and_the_budget(options: dict[str, Any]) -> None:
    model = tagger(**options)
    fast = packed(model, dtype=torch.bfloat16, budget=0.05)
    assert "lstm" not in names(fast)
    with torch.no_grad():
        for one, other in zip(fast(X), model(X), strict=True):
            assert one.dtype is torch.float32
            assert 0 < float((one - other).abs().max()) < 0.05 * float(other.abs().max())


def test_what_has_no_batch_or_no_steps_or_is_packed() -> None:
    model = tagger()
    fast = packed(model)
    same(fast, model, X[0])
    same(fast, model, torch.randn(4, 0, 8))
    sequences = pack_sequence([torch.randn(4, 8), torch.randn(2, 8)])
    with torch.no_grad():
        torch.testing.assert_close(fast(sequences)[0].data, model(sequences)[0].data)


@pytest.mark.parametrize("shape", [(3, 5, 7), (8,), (1, 2, 3, 8)], ids=str)
def test_wrong_inputs_raise_what_they_raised(shape: tuple[int, ...]) -> None:
    model = tagger()
    errors: list[str] = []
    for each in (model, packed(model)):
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError)) as raised:
            each(torch.randn(shape))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_wrong_states_raise_what_they_raised() -> None:
    model, states = tagger(), [torch.randn(1, 5, 6)] * 2
    fast = packed(model, X, *states)
    for wrong in ([torch.randn(1, 4, 6)] * 2, [torch.randn(1, 5, 6), torch.randn(2, 5, 6)]):
        with torch.no_grad(), pytest.raises(RuntimeError, match="Expected hidden"):
            fast(X, *wrong)


def test_gradients_are_those_of_the_lstm() -> None:
    model = tagger(num_layers=2, bidirectional=True)
    fast = packed(model)
    found, expected = (torch.autograd.grad(each(X)[0].sum(), list(each.parameters())) for each in (fast, model))
    torch.testing.assert_close(found, expected)


def test_training_runs_the_lstm_itself() -> None:
    model = tagger(num_layers=2, dropout=0.5)
    fast = packed(model).train()
    model.train()
    torch.manual_seed(1)
    expected = model(X)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(fast(X)[0], expected)
    same(fast.eval(), model.eval())


def test_weights_that_change_are_packed_anew() -> None:
    model = tagger()
    fast = packed(model)
    same(fast, model)
    for each in (model, fast):
        with torch.no_grad():
            each.lstm.weight_hh_l0.mul_(0.5)  # type: ignore[union-attr]
            each.lstm.bias_ih_l0.add_(1)  # type: ignore[union-attr]
    same(fast, model)
    other = tagger(bias=True)
    torch.manual_seed(5)
    other.lstm.reset_parameters()
    fast.load_state_dict(other.state_dict())
    same(fast, other)


def test_copies_pickles_and_state_dicts_know_the_lstm() -> None:
    model = tagger(bidirectional=True)
    fast = packed(model)
    same(fast, model)
    assert list(fast.state_dict()) == list(model.state_dict())
    for each in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fxopt.restore(fast)):
        same(each, model)
    assert "lstm" in [name for name, _ in fxopt.restore(fast).named_modules()]


def test_other_types_compute_as_ever() -> None:
    model = tagger()
    fast = packed(model)
    same(fast.double(), model.double(), X.double())


def test_autocast_computes_as_ever() -> None:
    model = tagger()
    fast = packed(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        try:
            expected = model(X)
        except RuntimeError as error:
            pytest.skip(f"torch has no such LSTM for this CPU: {error}")
        torch.testing.assert_close(fast(X), expected, rtol=0, atol=0)


def test_export_sees_the_lstm_unpacked() -> None:
    fast = packed(tagger())
    with torch.no_grad():
        exported = torch.export.export(fast, (X,), strict=False)
        assert not any("mkldnn" in str(node.target) for node in exported.graph.nodes)
        torch.testing.assert_close(exported.module()(X), fast(X))


class Own(nn.LSTM):
    pass


def test_refusals() -> None:
    assert "the model is in training" in reasons(tagger().train())[0]
    assert "projected" in reasons(tagger(proj_size=3))[0]
    own = tagger()
    own.lstm = Own(8, 6).eval()
    assert "it is a Own" in reasons(own)[0]
    hooked = tagger()
    hooked.lstm.register_forward_hook(lambda *_: None)
    assert "hooks" in reasons(hooked)[0]
    assert "only float32 is packed" in fxopt.plan(packed(tagger().double(), X.double())).decisions[0].reason


def test_applied_twice_is_applied_once() -> None:
    once = packed(tagger())
    assert str(fxopt.graphs(packed(once))[""]) == str(fxopt.graphs(once)[""])


def test_settings_that_the_graph_holds_are_sealed() -> None:
    fast = packed(tagger())
    with pytest.raises(fxopt.errors.FusedMemberError):
        fast.lstm.batch_first = True  # type: ignore[union-attr]
