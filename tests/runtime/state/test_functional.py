"""States with original names for `functional_call` of an optimized model: same numbers, same gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import fxopt
from fxopt.errors import FusedMemberError, StateError


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.trunk(x))
        return torch.stack([head(x) for head in self.heads])


State = dict[str, Tensor]


def inputs() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


@pytest.fixture
def models() -> tuple[Ensemble, Any]:
    torch.manual_seed(0)
    model = Ensemble().double().eval()
    passes = ["fold_batchnorm", "fuse_ensembles{lowering=bmm}"]
    return model, fxopt.optimize(model, passes, example_inputs=(inputs(),), verify=False, measure=False)


def loss_of(model: nn.Module, state: State) -> Tensor:
    return (functional_call(model, state, (inputs(),)) - 1).square().mean()


def adapted(model: nn.Module, weights: State) -> State:
    """Take two inner steps of MAML; a model that was optimized is called with translated states."""

    def translated(state: State) -> State:
        return fxopt.translate_state(state, model) if "heads_fused" in dict(model.named_children()) else state

    for _ in range(2):
        gradients = torch.autograd.grad(loss_of(model, translated(weights)), weights.values(), create_graph=True)
        weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
    return translated(weights)


def weights_of(model: nn.Module) -> State:
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}


def test_a_step_of_maml_has_the_gradients_of_the_unoptimized_model(models: tuple[Ensemble, Any]):
    model, fast = models
    gradients: list[State] = []
    for each in models:
        weights = weights_of(model)
        loss_of(each, adapted(each, weights)).backward()
        gradients.append({name: weight.grad for name, weight in weights.items() if weight.grad is not None})
    assert len(gradients[0]) == len(list(model.parameters()))
    torch.testing.assert_close(gradients[1], gradients[0])
    assert all(parameter.grad is None for parameter in fast.parameters())


def test_some_names_and_buffers(models: tuple[Ensemble, Any]):
    state: State = {
        "heads.1.0.weight": torch.ones(5, 4, dtype=torch.float64, requires_grad=True),
        "norm.running_mean": torch.ones(4, dtype=torch.float64),
    }
    model, fast = models
    translated = fxopt.translate_state(state, fast)
    assert set(translated) == {"heads_fused.0.weight", "norm.running_mean"}
    torch.testing.assert_close(loss_of(fast, translated), loss_of(model, state))
    weight = state["heads.1.0.weight"]
    gradients = [torch.autograd.grad(loss_of(m, s), weight)[0] for m, s in ((fast, translated), (model, state))]
    torch.testing.assert_close(*gradients)


def test_new_names_are_taken_as_they_are(models: tuple[Ensemble, Any]):
    _, fast = models
    state = dict(fast.named_parameters())
    translated = fxopt.translate_state(state, fast)
    assert translated.keys() == state.keys()
    assert all(translated[name] is tensor for name, tensor in state.items())


def test_many_states_at_once(models: tuple[Ensemble, Any]):
    model, fast = models
    scales = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)

    def one(model: nn.Module, scale: Tensor) -> Tensor:
        state: Any = {name: weight.detach() * scale for name, weight in models[0].named_parameters()}
        state = fxopt.translate_state(state, model) if model is fast else state
        return functional_call(model, state, (inputs(),))

    together = vmap(lambda scale: one(fast, scale))(scales)
    torch.testing.assert_close(together, torch.stack([one(model, scale) for scale in scales]))


def test_what_does_not_fit_is_refused(models: tuple[Ensemble, Any]):
    model, fast = models
    with pytest.raises(StateError, match=r"the model has no parameter or buffer 'heads.9.0.weight'"):
        fxopt.translate_state({"heads.9.0.weight": torch.zeros(5, 4)}, fast)
    with pytest.raises(StateError, match=r"'heads.0.0.weight' has shape \[1\], the model's has \[5, 4\]"):
        fxopt.translate_state({"heads.0.0.weight": torch.zeros(1)}, fast)
    with pytest.raises(StateError, match="was not optimized"):
        fxopt.translate_state({}, model)


def test_original_names_are_refused_with_the_way_to_go(models: tuple[Ensemble, Any]):
    model, fast = models
    with pytest.raises(FusedMemberError, match=r"fxopt\.translate_state\(state, model\)"):
        functional_call(fast, weights_of(model), (inputs(),))
    torch.testing.assert_close(fast(inputs()), model(inputs()))
