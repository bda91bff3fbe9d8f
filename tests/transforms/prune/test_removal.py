"""Units that are removed are gone everywhere, and the model equals the original with zeros in their place."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.errors import StateWarning
from fxopt.transforms.prune import Prune

HALF = Prune(method="structured", scope="layer")


def statuses(model: nn.Module) -> list[str]:
    return [decision.status for decision in fxopt.plan(model).decisions]


def pruned(case: Any, pass_: Prune = HALF, *, training: bool = False, **options: Any) -> nn.Module:
    fast = fxopt.optimize(case.model().train(training), pass_, example_inputs=(case.x,), **options)
    assert set(statuses(fast)) == {"applied"}
    return fast


@pytest.fixture(autouse=True)
def zeros_are_known():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StateWarning)
        yield


@pytest.mark.parametrize("training", [True, False])
def test_it_equals_the_original_with_zeros_in_float64_in_both_modes(case: Any, training: bool):
    fast = pruned(case, training=training)
    for decision in fxopt.plan(fast).decisions:
        assert decision.figures["checked"] == "float64" and decision.figures["meaning_error"] < 1e-12


def test_each_group_lands_by_itself_and_all_together(case: Any):
    for groups in (*((group,) for group in case.groups), case.groups):
        case.couple(*groups)
        pruned(case, training=True)


def test_shapes_attributes_and_graphs_say_the_new_sizes(residual: Any):
    fast = pruned(residual)
    shapes = {name: list(p.shape) for name, p in fast.named_parameters() if p.dim() > 1}
    assert shapes == {
        "stem.weight": [4, 3, 3, 3], "block.conv1.weight": [4, 4, 3, 3], "block.conv2.weight": [4, 4, 3, 3],
        "head.weight": [5, 16],
    }  # fmt: skip
    assert (fast.stem.out_channels, fast.block.conv1.in_channels, fast.block.bn1.num_features) == (4, 4, 4)
    assert fast.head.in_features == 16 and fast.block.bn2.running_mean.shape == (4,)
    (view,) = [node for node in fxopt.graphs(fast)[""].nodes if node.name == "view"]
    assert view.args[2] == 16


def test_the_users_model_is_untouched(case: Any):
    model = case.model()
    before, attributes = copy.deepcopy(model.state_dict()), {n: dict(vars(m)) for n, m in model.named_modules()}
    fxopt.optimize(model, HALF, example_inputs=(case.x,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    plain = (int, tuple, str)
    for name, module in model.named_modules():
        now = {key: value for key, value in vars(module).items() if isinstance(value, plain)}
        assert now == {key: value for key, value in attributes[name].items() if isinstance(value, plain)}


def test_own_forwards_are_right_where_no_size_is_written_in_the_code(decoder: Any):
    fast = pruned(decoder)
    plain = copy.deepcopy(fast)
    classes = {name: type(module) for name, module in decoder.model().named_modules()}
    for name, module in plain.named_modules():
        module.__class__ = classes[name]  # the user's own code, on tensors and attributes that are cut
    ids = torch.randint(0, 20, (2, 5))
    assert torch.allclose(plain(ids), fast(ids), atol=1e-6)


def test_an_own_forward_with_a_size_in_its_code_does_not_run(residual: Any):
    fast = pruned(residual)
    assert fast(torch.randn(2, 3, 6, 6)).shape == (2, 5)  # another batch size is in the graph
    with pytest.raises(fxopt.GuardError, match="pass 'prune' changed what it computes"):
        fast(residual.x, scale=2.0)


def test_checkpoints_from_before_load_and_what_is_saved_has_zeros(case: Any):
    model, fast = case.model().eval(), pruned(case)
    y = fast(case.x)
    for parameter in fast.parameters():
        torch.nn.init.normal_(parameter)
    assert not torch.allclose(fast(case.x), y)
    fast.load_state_dict(model.state_dict())
    assert torch.equal(fast(case.x), y)
    with pytest.warns(StateWarning, match="zeros in the places of what a lossy pass cut away, in '") as warned:
        saved = fast.state_dict()
    assert len(warned) == 1
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in model.state_dict().items()}
    fast.load_state_dict(saved)
    assert torch.equal(fast(case.x), y)


def test_saving_an_archive_says_nothing_of_zeros(residual: Any, tmp_path: Any):
    fast = pruned(residual)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StateWarning)
        fxopt.save(fast, tmp_path / "small.fxopt", factory="torch.nn:Identity")
    back = fxopt.load(tmp_path / "small.fxopt", model=residual.model().eval())
    assert back.stem.weight.shape == fast.stem.weight.shape


def test_it_is_restored_with_its_sizes(case: Any):
    fast = pruned(case)
    with pytest.warns(StateWarning, match="zeros"):
        back = fxopt.restore(fast)
    original = case.model()
    assert type(back) is type(original)
    for name, module in original.named_modules():
        sizes = {key: value for key, value in vars(module).items() if isinstance(value, (int, tuple))}
        found = {key: vars(back.get_submodule(name))[key] for key in sizes}
        assert {**found, "training": True} == {**sizes, "training": True}
    assert {n: p.shape for n, p in back.named_parameters()} == {n: p.shape for n, p in original.named_parameters()}


def test_an_optimizer_is_cut_along(case: Any, step: Any):
    model = case.model().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss = model(case.x).square().mean()
    loss.backward()
    optimizer.step()
    first = next(iter(model.parameters()))
    moments = optimizer.state[first]["exp_avg"].clone()
    fast = fxopt.optimize(model, HALF, example_inputs=(case.x,), optimizer=optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in fast.parameters()}
    assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in held)
    now = next(iter(fast.parameters()))
    kept = [
        row for row in moments.unbind(0) if any(torch.equal(row, other) for other in optimizer.state[now]["exp_avg"])
    ]
    assert len(kept) == len(now) if now.shape[1:] == first.shape[1:] else True
    fast(case.x).square().mean().backward()
    optimizer.step()


def test_the_plan_replays_the_same_units_on_other_weights(case: Any, tmp_path: Path):
    fast = pruned(case)
    other = case.model()
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter)
    fxopt.plan(fast).save(tmp_path / "plan.json")
    again = fxopt.optimize(other, HALF, example_inputs=(case.x,), plan=tmp_path / "plan.json")
    units = [[decision.site["data"]["units"] for decision in fxopt.plan(each).decisions] for each in (fast, again)]
    assert units[0] == units[1]
    again.load_state_dict(case.model().state_dict())
    assert torch.equal(again.eval()(case.x), fast(case.x))


def test_an_archive_gives_it_back(case: Any, tmp_path: Path):
    fast = pruned(case)
    fxopt.save(fast, tmp_path / "model.fxopt")
    loaded = fxopt.load(tmp_path / "model.fxopt", model=case.model())
    assert torch.equal(loaded.eval()(case.x), fast(case.x))
    assert {n: p.shape for n, p in loaded.named_parameters()} == {n: p.shape for n, p in fast.named_parameters()}


def test_it_is_pruned_again_by_a_share_of_what_is_left(residual: Any, residual_with: Any):
    first = pruned(residual)
    residual.couple(*residual_with(4, 4))
    second = fxopt.optimize(first, HALF, example_inputs=(residual.x,))
    assert second.stem.weight.shape == (2, 3, 3, 3)
    y = second(residual.x)
    for checkpoint in (residual.model().state_dict(), first.state_dict(), second.state_dict()):
        second.load_state_dict(checkpoint)
        assert torch.equal(second(residual.x), y)
    assert fxopt.restore(second).stem.out_channels == 8


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.GroupNorm(16, 16), nn.BatchNorm1d(16)])
def test_what_a_norm_runs_over_is_pruned_again(norm: nn.Module):
    model, x = nn.Sequential(nn.Linear(6, 16), norm, nn.Linear(16, 3)), torch.randn(4, 6)
    first = fxopt.optimize(model, HALF, example_inputs=x)
    second = fxopt.optimize(first, HALF, example_inputs=x)
    assert statuses(second) == ["applied", "applied"]
    assert first[0].out_features == 8 and second[0].out_features == second[2].in_features == 4


def test_a_wrong_group_is_undone_by_itself(residual: Any):
    outer, inner = residual.groups
    wrong = type(inner)(inner.name, inner.kind, inner.size, inner.cuts[:-1])  # the next convolution is forgotten
    residual.couple(outer, wrong)
    fast = fxopt.optimize(residual.model(), HALF, example_inputs=(residual.x,))
    assert statuses(fast) == ["applied", "undone"]
    assert fast.block.conv1.weight.shape == (8, 4, 3, 3) and fast(residual.x).shape == (4, 5)


def test_in_place_it_is_the_users_object(case: Any):
    model = case.model().eval()
    fast = fxopt.optimize(model, HALF, example_inputs=(case.x,), inplace=True)
    assert fast is model and set(statuses(model)) == {"applied"}
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in case.model().parameters())
    model(case.x)


def test_it_trains_and_exports(case: Any, step: Any):
    fast = pruned(case)
    exported = torch.export.export(fast, (case.x,)).module()
    assert torch.allclose(exported(case.x), fast(case.x), atol=1e-6)
    fast.train()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.01)
    losses = [float(step(fast, optimizer, case.x)) for _ in range(8)]
    assert losses[-1] < losses[0]


class WithAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        y = self.norm(x)
        return self.head(x + self.attention(y, y, y, need_weights=False)[0])


@pytest.mark.parametrize("training", [True, False])
def test_torchs_own_attention_loses_heads_and_width(training: bool):
    torch.manual_seed(0)
    model, x = WithAttention().train(training), torch.randn(2, 5, 6)
    fast = fxopt.optimize(model, HALF, example_inputs=(x,))
    assert set(statuses(fast)) == {"applied"}
    assert fast.attention.out_proj.weight.shape == (8, 8)
    assert fast.eval()(x[:1]).shape == (1, 5, 3)
    fast.load_state_dict(model.state_dict())
    back = fxopt.restore(fast)
    assert type(back.attention) is nn.MultiheadAttention and back(x).shape == (2, 5, 3)


@pytest.mark.parametrize("training", [True, False])
def test_encoder_layers_of_torch_lose_the_width_of_their_stream(training: bool):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    model, x = nn.Sequential(nn.Linear(6, 16), layer, nn.Linear(16, 3)).train(training), torch.randn(2, 5, 6)
    fast = fxopt.optimize(model, HALF, example_inputs=(x,))
    assert set(statuses(fast)) == {"applied"}
    assert fast[1].linear1.weight.shape == (12, 8)


@pytest.mark.parametrize("mean", [{"dim": -1}, {"axis": -1}])
@pytest.mark.parametrize("named", [False, True])
def test_means_are_over_kept_units_however_their_arguments_are_named(mean: dict[str, Any], named: bool):
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            return self.down(y - (torch.mean(input=y, keepdim=True, **mean) if named else y.mean(keepdim=True, **mean)))

    assert statuses(fxopt.optimize(Centred().eval(), HALF, example_inputs=torch.randn(4, 8))) == ["applied"]
