"""Whole residual blocks go: what is left is the original that hands the stream on past them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import fxopt
from fxopt.errors import UsageError
from fxopt.transforms.prune import Prune

pytestmark = pytest.mark.filterwarnings("ignore::fxopt.errors.StateWarning")  # names stay, with zeros

X = torch.linspace(-1, 1, 96).reshape(3, 4, 8).sin()
IDS = torch.arange(14).view(2, 7)


class Before(nn.Module):
    """A block with its norm in front: with zeros in it, it gives what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Behind(Before):
    """A block with its norm behind the sum, that gives a tuple."""

    def forward(self, x: Tensor) -> Any:
        return self.norm(x + self.down(self.up(x).relu())), None


class Plain(Before):
    """Adds nothing to what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Telling(Before):
    """Gives something else besides the stream."""

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.up(self.norm(x)).relu()), x.mean()


class Stack(nn.Module):
    def __init__(self, kind: type[Before] = Before, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)


def in_a_row() -> nn.Module:
    stack = Stack()
    return nn.Sequential(nn.Sequential(*stack.blocks), stack.head)


def family(name: str, task: str, **more: Any) -> nn.Module:
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2}
    config = getattr(transformers, f"{name}Config")(**{**sizes, "intermediate_size": 24, **more})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}For{task}")(config).eval()


class Encoder(nn.Module):
    """Asks its first layer for its attributes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        with torch.no_grad():
            for parameter in self.encoder.layers[0].parameters():
                parameter.mul_(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=5, n_head=2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).eval()


CASES = {
    "norms in front": (Stack, X, "blocks"),
    "norms behind": (lambda: Stack(Behind), X, "blocks"),
    "in a row": (in_a_row, X, "0"),
    "encoder": (Encoder, X, "encoder.layers"),
    "Llama": (lambda: family("Llama", "CausalLM"), IDS, "model.layers"),
    "Gemma2": (lambda: family("Gemma2", "CausalLM", head_dim=8, num_key_value_heads=1), IDS, "model.layers"),
    "GPT2": (gpt, IDS, "transformer.h"),
    "Bert": (lambda: family("Bert", "SequenceClassification"), IDS, "bert.encoder.layer"),
}  # fmt: skip


def prune(model: nn.Module, x: Any, amount: float = 0.5, **options: Any) -> nn.Module:
    options = {"kinds": ("blocks",), "criterion": "influence", "scope": "layer", **options}
    pass_ = Prune(method="structured", amount=amount, **options)
    return fxopt.optimize(model, pass_, example_inputs=x, measure=False)


def gone(fast: nn.Module) -> list[str]:
    sites = [each.site for each in fxopt.plan(fast).decisions if each.status == "applied" and each.site]
    return [f"{site['owner']}.{name}".lstrip(".") for site in sites for name, _ in site["data"]["skipped"]]


def result(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = model(x)
    return out if isinstance(out, Tensor) else out.logits


def past(model: nn.Module, names: list[str]) -> nn.Module:
    """Return a copy of a model that hands the stream on past some blocks."""
    made = copy.deepcopy(model)
    for name in names:
        block = made.get_submodule(name)
        is_tuple = isinstance(block, Behind)
        vars(block)["forward"] = lambda x, *_, is_tuple=is_tuple, **__: (x, None) if is_tuple else x
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_rest_is_the_original_past_the_blocks_that_are_gone(case: str) -> None:
    make, x, name = CASES[case]
    model = make().double()
    x = x.double() if x.is_floating_point() else x
    fast = prune(model, {"input_ids": x, "use_cache": False} if hasattr(model, "generate") else x)
    assert len(gone(fast)) >= 2 and all(each.startswith(f"{name}.") for each in gone(fast))
    torch.testing.assert_close(result(fast, x), result(past(model, gone(fast)), x), rtol=1e-9, atol=1e-9)
    assert sum(p.numel() for p in fast.parameters()) < sum(p.numel() for p in model.parameters())
    assert list(fast.state_dict()) == list(model.state_dict())
    restored = fxopt.restore(fast)
    assert [type(each) for each in restored.modules()] == [type(each) for each in model.modules()]


def test_what_changes_the_stream_least_goes() -> None:
    model = Stack()
    with torch.no_grad():
        for number in (1, 4):
            model.blocks[number].down.weight.mul_(1e-3)
            model.blocks[number].down.bias.mul_(1e-3)
    assert gone(prune(model, X, 1 / 3)) == ["blocks.1", "blocks.4"]
    batches = [X[:1], X[1:]]
    assert gone(prune(model, X, 1 / 3, data=batches, loss=lambda net, batch: net(batch))) == ["blocks.1", "blocks.4"]
    assert gone(prune(model, X, 1 / 3, keep=("blocks.4",)))[0] == "blocks.1"
    assert gone(prune(model, X, 1 / 3, criterion="taylor")) == ["blocks.1", "blocks.4"]


def test_checkpoints_training_plans_and_archives(tmp_path: Path) -> None:
    model = Stack()
    fast = prune(model, X)
    names = gone(fast)
    other = Stack().requires_grad_(True)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    fast.load_state_dict(other.state_dict())
    torch.testing.assert_close(result(fast, X), result(past(other, names), X))
    restored = fxopt.restore(fast)  # blocks of zeros with their norms in front add nothing
    torch.testing.assert_close(result(restored, X), result(fast, X))
    again = fxopt.optimize(other, plan=fxopt.plan(fast), example_inputs=X)
    assert gone(again) == names
    torch.testing.assert_close(result(again, X), result(fast, X))
    fxopt.save(fast, tmp_path / "model.fxopt")
    torch.testing.assert_close(result(fxopt.load(tmp_path / "model.fxopt", model=Stack()), X), result(fast, X))
    optimizer = torch.optim.SGD(fast.parameters(), 0.1)
    before = result(fast, X)
    fast(X).square().mean().backward()
    optimizer.step()
    assert not torch.equal(result(fast, X), before)
    less = prune(fast.eval(), X, 1 / 3)  # of the three that are left
    assert len(gone(less)) > len(names)


def test_a_share_of_the_parameters_is_met() -> None:
    model = Stack(depth=10)
    fast = prune(model, X, 0.4, target="parameters", scope="global")
    count, left = (sum(p.numel() for p in each.parameters()) for each in (model, fast))
    assert abs(1 - left / count - 0.4) < 0.02


def test_the_layer_that_a_cache_is_asked_for_its_length_by_stays() -> None:
    model = family("Llama", "CausalLM")
    with torch.no_grad():
        for parameter in model.model.layers[0].parameters():
            parameter.mul_(1e-3)
    refused = fxopt.plan(prune(model, IDS)).decisions
    assert any("give use_cache=False among the example inputs" in each.reason for each in refused)
    fast = prune(model, {"input_ids": IDS, "use_cache": False})
    assert gone(fast) and "model.layers.0" not in gone(fast)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    original = model.generate(IDS, use_cache=False, **options)
    assert original.shape == fast.generate(IDS, **options).shape
    assert torch.equal(fast.generate(IDS, use_cache=False, **options), fast.generate(IDS, **options))


def test_an_output_of_all_blocks_is_refused_by_name() -> None:
    shared = Stack()
    shared.blocks[2].up.weight = shared.blocks[4].up.weight
    for model, reason in ((Stack(Telling), "they give other things"), (shared, "is a tensor of several modules")):
        fast = prune(model, X)
        (decision,) = fxopt.plan(fast).decisions
        assert decision.status == "refused" and "blocks" in decision.label + decision.reason
        assert reason in decision.reason


def test_layers_that_keep_another_state_stay() -> None:
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4))
    fast = prune(model.eval(), {"input_ids": IDS, "use_cache": False})
    assert ["state that is no keys and values" in each.reason for each in fxopt.plan(fast).decisions] == [True]


def test_lists_of_other_modules_are_none() -> None:
    fast = prune(Stack(Plain), X)
    assert not gone(fast)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("blocks", "heads")}, "blocks go in a call of their own"),
        ({"loss": len}, "loss= of criterion=influence runs the model on batches"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prune(Stack(), X, **options)


class Queries(Stack):
    """Gives its blocks the same numbers for each row, in the same memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:1].expand(3, -1, -1))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return x + self.linear(x) * mask


class MaskFirst(Stack):
    """Its blocks take a mask of the shape of the stream before the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x > 0, x)
        return self.head(x)


def test_a_stream_may_be_expanded_and_is_no_mask() -> None:
    def decided(model: nn.Module) -> list[str]:
        pass_ = Prune(method="structured", kinds=("blocks",), scope="layer")
        fast = fxopt.optimize(model.eval(), pass_, example_inputs=(X,), measure=False)
        return [each.status for each in fxopt.plan(fast).decisions]

    assert decided(Queries()) == ["applied"]
    with pytest.warns(UserWarning, match="nothing"):
        assert decided(MaskFirst()) == []


def test_influence_is_of_blocks_alone() -> None:
    fast = prune(Stack(), X, kinds=("hidden",))
    assert {each.status for each in fxopt.plan(fast).decisions} == {"refused"}
