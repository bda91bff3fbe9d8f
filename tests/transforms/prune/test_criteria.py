"""What each criterion ranks by, checked by hand; rows, shares of single layers, and what does not go together."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import BudgetError, UsageError
from fxopt.transforms.prune import Prune, masks
from fxopt.transforms.prune.options import Options
from fxopt.transforms.prune.scores import CRITERIA


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


X = torch.linspace(-1, 1, 24).reshape(4, 6).sin()


def kept(model: nn.Module, **options: Any) -> list[int]:
    """Return which of the eight hidden units of a perceptron stay."""
    pass_ = Prune(method="structured", scope="layer", **options)
    (decision,) = (d for d in fxopt.plan(fxopt.optimize(model, pass_, example_inputs=X)).decisions if d.site)
    return decision.site["data"]["units"]["0"][2]  # pyright: ignore[reportOptionalSubscript]


def strongest(scores: Tensor, count: int) -> list[int]:
    return sorted(scores.argsort(descending=True)[:count].tolist())


def test_the_option_names_what_the_table_has() -> None:
    assert set(get_args(get_type_hints(Options)["criterion"])) == set(CRITERIA)


def test_lamp_is_the_share_in_all_that_are_as_large() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))  # shares 1/30, 4/29, 9/25, 1
        model[1].weight.copy_(torch.tensor([[0.1, 0.1], [0.1, 0.2]]))  # 1/7, 1/6, 1/5, 1
    fast = fxopt.optimize(model, Prune(criterion="lamp", amount=0.5), example_inputs=torch.ones(1, 2))
    found = masks(fast)
    assert found["0.weight"].tolist() == [[False, False], [True, True]]
    assert found["1.weight"].tolist() == [[False, False], [True, True]]


def test_lamp_compares_the_units_of_all_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
    fast = fxopt.optimize(model, Prune(method="structured", criterion="lamp", amount=0.5), example_inputs=X)
    assert fast[0].out_features > 4 and fast[0].out_features + fast[2].out_features == 36


def test_what_lies_between_the_others_goes_first() -> None:
    model = mlp()
    with torch.no_grad():
        for unit in (2, 5):
            others = [each for each in range(8) if each not in (2, 5)]
            model[0].weight[unit] = model[0].weight[others].mean(0)
            model[2].weight[:, unit] = model[2].weight[:, others].mean(1)
    assert kept(model, criterion="fpgm", amount=0.25) == [0, 1, 3, 4, 6, 7]


@pytest.mark.parametrize("criterion", ["taylor", "hessian"])
def test_gradients_of_each_batch_count(criterion: Any) -> None:
    model, batches = mlp(), [X[:1], X[1:2], X[2:]]
    score = torch.zeros(8)
    for batch in batches:
        model.zero_grad()
        model(batch).square().sum().backward()
        into, out = (layer.weight.detach() * layer.weight.grad for layer in (model[0], model[2]))
        if criterion == "taylor":
            score += (into.sum(1) + out.sum(0)).square()  # the weights of a unit go together
        else:
            score += into.square().sum(1) + out.square().sum(0)
    found = kept(model, criterion=criterion, data=batches, loss=lambda net, batch: net(batch).square().sum())
    assert found == strongest(score, 4)


@pytest.mark.parametrize("criterion", ["taylor", "hessian"])
def test_results_count_where_the_loss_is_at_its_lowest(criterion: Any) -> None:
    """A loss that is met has no gradient; by how much the results change tells units apart all the same."""
    model = mlp()
    with torch.no_grad():
        model[2].weight[:, [1, 4]] = 0
    given = {"criterion": criterion, "amount": 0.25, "data": [X[:2], X[2:]]}
    assert kept(model, loss=lambda net, batch: net(batch), **given) == [0, 2, 3, 5, 6, 7]
    assert kept(model, loss=lambda net, batch: {"logits": net(batch), "other": batch}, **given) == [0, 2, 3, 5, 6, 7]


def test_wanda_compares_the_weights_of_one_output_by_the_inputs_that_they_meet() -> None:
    model = mlp()
    pass_ = Prune(criterion="wanda", scope="row", amount=0.5)
    found = masks(fxopt.optimize(model, pass_, example_inputs=X))
    scores = model[0].weight.abs() * X.square().sum(0).sqrt()
    assert [row.nonzero().flatten().tolist() for row in found["0.weight"]] == [strongest(row, 3) for row in scores]
    twice = masks(fxopt.optimize(model, Prune(method="nm", criterion="wanda", pattern="1:2"), example_inputs=X))
    groups = scores.reshape(8, 3, 2)
    assert torch.equal(twice["0.weight"].reshape(8, 3, 2), groups == groups.amax(-1, keepdim=True))


@pytest.mark.parametrize(
    ("layer", "meeting"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), (slice(0, 3), 1)),
        (nn.Conv2d(4, 6, 3), (slice(None), 1)),
        (nn.ConvTranspose2d(4, 6, 3), (1, slice(None))),
        (nn.Linear(7, 4), (slice(None), 1)),
    ],
)
def test_what_meets_zeros_goes_first_in_every_row(layer: nn.Module, meeting: Any) -> None:
    x = torch.randn(2, 4, 7, 7)
    x.select(-1 if isinstance(layer, nn.Linear) else 1, 1).zero_()
    fast = fxopt.optimize(nn.Sequential(layer), Prune(criterion="wanda", scope="row", amount=0.1), example_inputs=x)
    gone = ~masks(fast)["0.weight"]
    by_row = (gone.transpose(0, 1) if isinstance(layer, nn.ConvTranspose2d) else gone).flatten(1).sum(1)
    assert by_row.unique().numel() == 1 and by_row[0] > 0
    zeros = torch.zeros_like(gone)
    zeros[meeting] = True
    rows = gone[:3] if getattr(layer, "groups", 1) == 2 else gone
    assert not (rows & ~zeros[: len(rows)]).any()


def test_what_wanda_does_not_see_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LSTM(6, 5, batch_first=True))
    fast = fxopt.optimize(model, Prune(criterion="wanda", scope="row"), example_inputs=X[None])
    (reason,) = {decision.reason for decision in fxopt.plan(fast).decisions if "weight_ih" in decision.reason}
    assert reason == "criterion=wanda does not see what its weight_ih_l0 is multiplied with"


def test_layers_have_shares_of_their_own() -> None:
    ratios = {"0": 0.25, "*": 0.5}
    fast = fxopt.optimize(mlp(), Prune(scope="layer", ratios=ratios), example_inputs=X)
    assert [int((~each).sum()) for each in masks(fast).values()] == [12, 12]
    model = nn.Sequential(*mlp(), nn.ReLU(), nn.Linear(3, 2))
    fast = fxopt.optimize(
        model, Prune(method="structured", scope="layer", ratios={"0": 0.75}, amount=0.34), example_inputs=X
    )
    assert (fast[0].out_features, fast[2].out_features) == (2, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratios": {"0": 0.5}}, "give scope=layer"),
        ({"ratios": {"0": 1.5}, "scope": "layer"}, r"ratios\['0'\]=1.5; give the share"),
        ({"ratios": [0.5], "scope": "layer"}, "a dictionary: name of a layer"),
        ({"scope": "row", "method": "structured"}, "scope=row is of single weights"),
        ({"criterion": "fpgm"}, "method=magnitude has no criterion=fpgm; it has magnitude, lamp, taylor, "),
        ({"criterion": "wanda", "method": "structured"}, "method=structured has no criterion=wanda"),
        ({"criterion": "wanda", "schedule": "cubic"}, "runs the model now, a schedule ranks later"),
        ({"criterion": "wanda", "loss": len}, "give these as data="),
        ({"criterion": "lamp", "method": "random"}, "criterion"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Prune(**options)


@pytest.mark.parametrize("given", [{}, {"data": [X * float("nan")], "loss": lambda net, batch: net(batch)}])
def test_inputs_with_nan_are_refused(given: dict[str, Any]) -> None:
    x = X if given else X * float("nan")
    with pytest.raises(UsageError, match=r"the scores of '0\.weight' have NaN; look for NaN or infinity in the data"):
        fxopt.optimize(mlp(), Prune(criterion="wanda", scope="row", **given), example_inputs=x)


def test_what_cannot_be_done_says_which_layer_and_share() -> None:
    with pytest.raises(BudgetError, match=r"amount=0\.99 leaves nothing in '0', which has 8 hidden"):
        kept(mlp(), ratios={"0": 0.99})
    one = nn.Sequential(nn.Linear(6, 1), nn.Softmax(-1), nn.Linear(1, 3))
    with pytest.raises(BudgetError, match=r"amount=0\.5 of the parameters cannot be removed; no unit of the model can"):
        fxopt.optimize(one, Prune(method="structured", target="parameters"), example_inputs=X)


def test_ratios_that_name_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="ratios names '3', which is no layer that is pruned"):
        fxopt.optimize(mlp(), Prune(scope="layer", ratios={"3": 0.5}), example_inputs=X)


@pytest.mark.parametrize("criterion", ["magnitude", "lamp", "fpgm", "taylor", "hessian"])
def test_units_of_zeros_go_first_and_do_no_harm(criterion: Any) -> None:
    model = mlp()
    with torch.no_grad():
        for unit in (1, 4):
            model[0].weight[unit], model[0].bias[unit], model[2].weight[:, unit] = 0, 0, 0
    if criterion == "fpgm":
        assert len(kept(model, criterion=criterion, amount=0.25)) == 6
    else:
        assert kept(model, criterion=criterion, amount=0.25) == [0, 2, 3, 5, 6, 7]


@pytest.mark.parametrize(
    "options", [{"method": "structured"}, {}, {"criterion": "lamp"}, {"method": "nm", "pattern": "1:2"}]
)
def test_weights_that_are_all_zero_are_pruned_all_the_same(options: dict[str, Any]) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight.zero_()
    fast = fxopt.optimize(
        model, Prune(**({"scope": "layer"} if "pattern" not in options else {}), **options), example_inputs=X
    )
    assert fast(X).isfinite().all()
