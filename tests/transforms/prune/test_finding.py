"""Which units go: by scores, shares and targets; what is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.errors import BudgetError, UsageError
from fxopt.storage import byte_text
from fxopt.tracing.program import capture_program
from fxopt.transforms.prune import Prune
from fxopt.transforms.prune.amounts import Ranking, chosen_for_target
from fxopt.transforms.prune.costs import cost_of
from fxopt.transforms.prune.dependency_groups import Cut, Group, Refused
from fxopt.transforms.prune.sites import Chosen


def structured(**options: Any) -> Prune:
    return Prune(method="structured", **options)


def kept_of(model: nn.Module) -> dict[str, list[int]]:
    decisions = fxopt.plan(model).decisions
    assert {decision.status for decision in decisions} == {"applied"}
    return {name: units[2] for d in decisions if d.site for name, units in d.site["data"]["units"].items()}


def ranking(groups: Any, scores: Any, wanted: Any) -> Ranking:
    return Ranking(groups, scores, wanted, [wanted.round_to] * len(groups))


def prune(case: Any, **options: Any) -> nn.Module:
    return fxopt.optimize(case.model(), structured(**options), example_inputs=(case.x,))


# -- how many ---------------------------------------------------------------------------------------------------------

GROUPS = [Group("a", "channels", 8, ()), Group("b", "heads", 4, ()), Group("c", "hidden", 32, ())]
SCORES = [torch.arange(group.size, dtype=torch.float64) for group in GROUPS]


def counts(share: float, **options: Any) -> list[int]:
    return [len(each.kept) for each in ranking(GROUPS, SCORES, structured(**options)).choose(share)]


def test_a_share_of_each_layer_or_of_all():
    assert counts(0.5, scope="layer") == [4, 2, 16]
    assert counts(0.25, scope="layer") == [6, 3, 24]
    assert counts(0.0, scope="layer") == counts(0.0) == [8, 4, 32]
    assert sum(counts(0.5)) == 22 and counts(0.5)[2] > 16  # the scores of c are larger


def test_the_strongest_stay_in_their_order():
    scores = [torch.tensor([3.0, 1.0, 2.0, 9.0]).double()]
    (chosen,) = ranking([Group("a", "channels", 4, ())], scores, structured(scope="layer")).choose(0.5)
    assert chosen.kept == (0, 3)


def test_counts_are_rounded_to_a_multiple_but_for_heads():
    assert counts(0.4, scope="layer", round_to=8) == [8, 2, 16]
    assert counts(0.7, scope="layer", round_to=4) == [4, 1, 8]


def test_a_global_ranking_leaves_something_in_each_layer():
    assert min(counts(0.99)) == 1


def test_nothing_left_in_a_layer_is_an_error(residual: Any):
    with pytest.raises(BudgetError, match=r"amount=0\.95 leaves nothing in 'stem', which has 8 channels; give a"):
        prune(residual, amount=0.95, scope="layer")


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_a_target_is_met_as_nearly_as_units_allow(scope: Any):
    group = [Group("a", "channels", 100, ())]
    scores = [torch.arange(100).double()]

    def cost(chosen: Any) -> float:
        return 1000 + len(chosen[0].kept) ** 2

    def ranked(amount: float) -> Ranking:
        return ranking(group, scores, structured(scope=scope, amount=amount, target="parameters"))

    (found,) = chosen_for_target(ranked(0.5), cost)
    assert abs(cost([found]) / 11000 - 0.5) < 0.01
    with pytest.raises(BudgetError, match=r"amount=0\.95 of the parameters cannot be removed; at most 0\.909 of them"):
        chosen_for_target(ranked(0.95), cost)


def test_where_one_group_makes_too_large_steps_the_others_go_on():
    groups = [Group("a", "channels", 2, ()), Group("b", "channels", 10, ()), Group("c", "hidden", 64, ())]
    scores = [torch.arange(group.size).double() for group in groups]

    def cost(chosen: Any) -> float:
        a, b, c = (len(each.kept) for each in chosen)
        return 30 * a + 2 * b + (c / 4)  # 96 in all

    wanted = structured(scope="layer", amount=0.2, target="parameters")
    found = chosen_for_target(ranking(groups, scores, wanted), cost)
    assert len(found[0].kept) == 2 and abs(1 - cost(found) / 96 - 0.2) <= 0.02
    with pytest.raises(
        BudgetError, match=r"amount=0\.2 of the parameters cannot be met: .* remove 0 or 0\.25; give one"
    ):
        chosen_for_target(ranking(groups[:1], scores[:1], wanted), lambda chosen: 60 + 30 * len(chosen[0].kept))


@pytest.mark.parametrize("target", ["parameters", "flops"])
def test_parameters_and_operations_are_targets(decoder: Any, target: Any):
    from torch.utils.flop_counter import FlopCounterMode

    def cost(model: nn.Module) -> float:
        if target == "parameters":
            return sum(p.numel() for p in model.parameters())
        with FlopCounterMode(display=False) as counter:
            model(decoder.x)
        return counter.get_total_flops()

    fast = prune(decoder, amount=0.4, target=target)
    assert abs(1 - cost(fast) / cost(decoder.model()) - 0.4) <= 0.02


WRONG = Group("block.bn1", "channels", 8, (Cut("block.bn1.weight", 0, tuple(range(8))),))
"""Without the convolution before it, which the analysis would not leave out."""


def test_what_does_not_run_while_operations_are_counted_is_refused_by_name(residual: Any):
    residual.couple(residual.groups[0], WRONG)
    fast = prune(residual, amount=0.25, target="flops", scope="layer")
    by_status = {decision.status: decision for decision in fxopt.plan(fast).decisions}
    assert set(by_status) == {"applied", "refused"} and by_status["refused"].label == "block.bn1"
    assert by_status["refused"].reason.startswith("without its units the model does not run: RuntimeError: ")
    assert fast.stem.out_channels < 8 and fast.block.bn1.weight.shape == (8,)


def test_the_report_says_what_was_reached_where_a_site_was_undone(residual: Any):
    residual.couple(residual.groups[0], WRONG)
    fast = prune(residual, scope="layer", amount=0.25)
    left, whole = (sum(p.numel() for p in model.parameters()) for model in (fast, residual.model()))
    assert fast.block.bn1.weight.shape == (8,) and fast.stem.out_channels < 8
    said = str(fxopt.report(fast))
    assert f"prune: 16 -> {8 + fast.stem.out_channels} units" in said and f" -> {byte_text(4 * left)}" in said
    assert f"{whole:,} -> {left:,} parameters ({left / whole:.0%}), {byte_text(4 * whole)} -> " in said
    said = str(fxopt.report(prune(residual, scope="layer", amount=0.5)))
    assert "prune: asked 0.5 of the units, reached 0.25: undone at block.bn1\n" in f"{said}\n"


def test_a_target_that_is_missed_since_a_site_was_undone_is_an_error(residual: Any):
    alone = Group("block.conv1", "channels", 8, (Cut("block.conv1.weight", 0, tuple(range(8))),))
    residual.couple(residual.groups[0], alone)
    with pytest.raises(
        BudgetError, match=r"amount=0\.25 of the parameters is missed: 0\.\d+ of them went, as 1 of 2"
    ) as raised:
        prune(residual, scope="layer", target="parameters", amount=0.25)
    assert "with keep=[block.conv1] others go in their place" in str(raised.value)


def test_the_report_says_nothing_of_a_target_that_was_met(residual: Any):
    assert "asked" not in str(fxopt.report(prune(residual, scope="layer")))


def test_latency_is_a_target():
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    group = Group(
        "0", "hidden", 512,
        tuple(Cut(name, dim, tuple(range(512))) for name, dim in (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))),
    )  # fmt: skip
    program = capture_program(model, fxopt.Inputs(torch.randn(256, 256)))
    cost = cost_of(program, "latency")
    shares = [cost([Chosen(group, tuple(range(kept)))]) for kept in (512, 64)]
    assert shares[1] < shares[0]
    assert model[0].weight.shape == (512, 256)


# -- what units count -------------------------------------------------------------------------------------------------


def test_weights_are_measured_over_all_their_slices(residual: Any):
    model = residual.model()
    inner = residual.groups[1]
    residual.couple(inner)
    with torch.no_grad():
        model.block.conv1.weight[:4] *= 0.1
        model.block.conv2.weight[:, :4] *= 0.1
    fast = fxopt.optimize(model, structured(), example_inputs=(residual.x,))
    assert kept_of(fast) == {"block.conv1": [4, 5, 6, 7]}


def test_the_scale_of_batch_norms_is_a_criterion(residual: Any):
    model = residual.model()
    with torch.no_grad():
        model.block.bn1.weight.copy_(torch.tensor([1.0, 9.0, -8.0, 2.0, 7.0, 0.0, 6.0, 3.0]))
    residual.couple(residual.groups[1])
    fast = fxopt.optimize(model, structured(criterion="batchnorm"), example_inputs=(residual.x,))
    assert kept_of(fast) == {"block.conv1": [1, 2, 4, 6]}


def test_a_group_without_a_batch_norm_is_refused_for_it(decoder: Any):
    fast = prune(decoder, criterion="batchnorm")
    ((status, reason),) = {(d.status, d.reason) for d in fxopt.plan(fast).decisions}
    assert status == "refused" and reason.startswith("no batch norm scales its units (so are 2 more layers: ")


def test_chance_is_seeded(residual: Any):
    program = capture_program(residual.model(), fxopt.Inputs(residual.x))
    passes = [structured(criterion="random", seed=seed) for seed in (1, 1, 2)]
    one, same, other = ([site.data["units"] for site in each.find(program)] for each in passes)
    assert one == same != other


def test_gradients_say_what_the_loss_loses(residual: Any):
    model = residual.model().eval()
    with torch.no_grad():
        model.block.conv2.weight[:, [0, 2, 5]] = 0  # what these units give reaches nothing
        model.block.conv1.weight[[0, 2, 5]] *= 100
    residual.couple(residual.groups[1])
    for options in (
        {},
        {"loss": lambda output: output.abs().sum()},
        {"loss": lambda model, batch: model(batch).sum(), "data": [residual.x, residual.x[:2]]},
    ):
        fast = fxopt.optimize(
            model, structured(amount=0.375, criterion="taylor", **options), example_inputs=(residual.x,)
        )
        assert kept_of(fast) == {"block.conv1": [1, 3, 4, 6, 7]}
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_batches_that_cancel_count_all_the_same(residual: Any):
    """Over a batch and its negative the loss changes to and fro: with signs no unit would count."""
    residual.couple(residual.groups[1])
    model = residual.model().eval()
    batches = [1.0, -1.0]

    def loss(net: nn.Module, sign: float) -> Tensor:
        return net(residual.x).sum() * sign

    of_both = {"criterion": "taylor", "data": batches, "loss": loss}
    of_one = {"criterion": "taylor", "data": batches[:1], "loss": loss}
    kept = [
        kept_of(fxopt.optimize(model, structured(**each), example_inputs=(residual.x,))) for each in (of_both, of_one)
    ]
    assert kept[0] == kept[1]


def _raises(_model: nn.Module, _batch: object) -> Tensor:
    raise ValueError("no such label")


@pytest.mark.parametrize(
    ("data", "loss", "message"),
    [
        ([], lambda net, x: net(x).sum(), "data= gives no batch"),
        ([0], _raises, "loss= raises for batch 0 of data=: ValueError: no such label"),
        ([1.0, float("nan")], lambda net, sign: net(torch.ones(1, 3, 6, 6)).sum() * sign, "batch 1: the loss is nan"),
        (
            [1.0],
            lambda net, sign: net(torch.ones(1, 3, 6, 6)).detach(),
            "batch 0: loss= must give one number, or results",
        ),
        ([1.0], lambda net, sign: net(torch.full((2, 3, 6, 6), torch.nan)), "batch 0: the results are not finite"),
    ],
)
def test_batches_that_tell_nothing_are_refused_with_what_to_look_for(residual: Any, data: Any, loss: Any, message: str):
    with pytest.raises(UsageError, match=message):
        prune(residual, criterion="taylor", data=data, loss=loss)


SCORINGS: list[Callable[[Tensor], Any]] = [
    lambda scores: {"block.conv1.weight": scores},
    lambda scores: lambda name, weight: scores if name == "block.conv1.weight" else torch.zeros_like(weight),
]


@pytest.mark.parametrize("given", SCORINGS)
def test_scores_of_the_user(residual: Any, given: Callable[[Tensor], Any]):
    residual.couple(residual.groups[1])
    scores = torch.zeros(8, 8, 3, 3)
    scores[[1, 3, 4, 7], 0, 0, 0] = 1
    assert kept_of(prune(residual, scores=given(scores))) == {"block.conv1": [1, 3, 4, 7]}


def _raising(*_: Any) -> Tensor:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (lambda *_: None, r"what scores= gives for '.*' is of type NoneType; give a tensor of shape \["),
        (lambda *_: "high", r"what scores= gives for '.*' is of type str; give a tensor"),
        (lambda *_: torch.ones(3), r"what scores= gives for '.*' has shape \[3\], the parameter \["),
        (lambda name, weight: weight * float("nan"), "what scores= gives for 'stem.weight' has NaN in it"),
        (lambda name, weight: weight * float("inf"), "scores of 'stem' are not finite: NaN or infinity is in its"),
        (_raising, r"the function scores= raises for '.*': ValueError: no"),
        ({}, "scores is empty; give tensors by name"),
    ],
)
def test_scores_that_are_none_are_refused_by_name(residual: Any, scores: Any, message: str):
    with pytest.raises(UsageError, match=message):
        prune(residual, scores=scores)


# -- what stays -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["block.conv1", "block", "*.conv1", "Block"])
def test_layers_that_are_kept_out_stay_whole(residual: Any, word: str):
    fast = prune(residual, keep=(word,))
    assert fast.block.conv1.weight.shape == (8, 8, 3, 3)
    (decision,) = fxopt.plan(fast).decisions
    assert decision.reason.startswith(f"it has to keep its units: keep={word} (so is 1 more layer: block.conv1)")


def test_refusals_of_one_reason_are_one(residual: Any):
    refused = tuple(Refused(f"layer{n}", "its result goes through 'aten.sort'") for n in range(30))
    residual.couple(*residual.groups, refused=(*refused, Refused("head", "it makes the result", by_design=True)))
    fast = prune(residual)
    refusals = [d for d in fxopt.plan(fast).decisions if d.status == "refused"]
    assert [(d.label, d.reason) for d in refusals] == [
        (
            "layer0",
            "its result goes through 'aten.sort' (so are 29 more layers: layer1, layer2, layer3, ...)",
        )
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round_to": 0}, "round_to=0; give a number of units, 1 or more"),
        (
            {"criterion": "size"},
            "criterion='size'; give magnitude, lamp, fpgm, batchnorm, taylor, hessian, wanda, routing, influence or",
        ),
        ({"target": "bytes"}, "target='bytes'; give units, parameters, flops or latency"),
        ({"loss": len}, "loss= and data= are for criterion=taylor"),
        ({"data": [1], "criterion": "taylor"}, "data= needs loss="),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        structured(**options)


def test_groups_that_cut_one_dimension_are_one_site(residual: Any):
    first, second = (
        Group(name, "channels", 8, (Cut("head.weight", 1, units), *cuts))
        for name, units, cuts in (
            ("a", (*range(8), *[-1] * 24), ()),
            ("b", (*[-1] * 24, *range(8)), ()),
        )
    )
    residual.couple(first, second)
    fast = fxopt.optimize(residual.model(), structured(scope="layer"), example_inputs=(residual.x,))
    (decision,) = fxopt.plan(fast).decisions
    assert decision.detail == "removes 4 of 8 channels of a and of 1 more layers" and decision.status == "undone"


@pytest.mark.filterwarnings("ignore:the state dict has the original shapes")
def test_gemma_2_differs_from_zeros_in_its_norms_alone_and_says_so() -> None:
    import transformers

    config = transformers.Gemma2Config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, vocab_size=20, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    zeros, ids = transformers.Gemma2ForCausalLM(config).eval(), torch.arange(10).view(2, 5)
    said = "norms run over what is kept, not over zeros"
    for kinds, is_equal in ((("heads",), True), (("channels", "heads", "hidden"), False)):
        model = transformers.Gemma2ForCausalLM(config).eval()
        fast = fxopt.optimize(model, structured(scope="layer", kinds=kinds), example_inputs=ids, measure=False)
        zeros.load_state_dict(fast.state_dict())
        assert torch.allclose(fast(ids).logits, zeros(ids).logits, atol=1e-5) is is_equal
        assert (said not in str(fxopt.report(fast))) is is_equal
