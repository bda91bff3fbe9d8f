"""What modules were is kept over a run: what is changed outside a site goes back, and a site costs what it reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.runs import manager_of
from support.subtractions import Subtractions
from torch import Tensor, fx, nn

import fxopt
from fxopt import Edit, Site
from fxopt.passes.rewriting import Snapshot
from fxopt.tracing.isolation import AttributeState

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.sizes = [1]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) - x


def chain(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(count)]).eval()


@dataclass(frozen=True)
class Rewrite(Subtractions):
    """Write each subtraction as a function; in the block 0 wrongly, if asked."""

    wrong: bool = False

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if site.owner == "0":
            self.meddle(edit.program.model.get_submodule("2"))

    def replacement(self, site: Site, edit: Edit, node: fx.Node) -> fx.Node:
        wrong = self.wrong and site.owner == "0"
        return edit.call(torch.add if wrong else torch.sub, *node.args)

    def meddle(self, block: Any) -> None:
        """Change what is not of the site."""


class Attribute(Rewrite):
    def meddle(self, block: Any) -> None:
        block.extra = 1


class Container(Rewrite):
    def meddle(self, block: Any) -> None:
        block.sizes.append(2)


class Child(Rewrite):
    def meddle(self, block: Any) -> None:
        block.inner = nn.Identity()


class Frozen(Rewrite):
    def meddle(self, block: Any) -> None:
        block.inner.weight.requires_grad_(False)


class Hook(Rewrite):
    def meddle(self, block: Any) -> None:
        block.inner.register_forward_hook(lambda *_: None)


def trace_of(block: Any) -> object:
    inner = block.inner
    hooks = list(vars(inner)["_forward_hooks"])
    return (
        sorted(vars(block).keys() - {"_fxopt_capture"}),
        list(block.sizes),
        type(inner),
        inner.weight.requires_grad,
        hooks,
    )


@pytest.mark.parametrize("wrong", [True, False])
@pytest.mark.parametrize("kind", [Attribute, Container, Child, Frozen, Hook])
def test_what_is_changed_outside_the_site_goes_back(kind: type[Rewrite], wrong: bool) -> None:
    program = fxopt.capture(chain(3), (X,))
    before, expected = trace_of(program.module("2")), program.model(X)
    manager = manager_of(program, time=False)
    manager.run([kind(wrong)])
    assert manager.decisions[0].status == ("undone" if wrong else "applied")
    assert trace_of(program.module("2")) == before
    torch.testing.assert_close(program.model(X), expected)


class AtTheEnd(Rewrite):
    """Change a block that was rewritten before."""

    def rewrite(self, site: Site, edit: Edit) -> None:
        super().rewrite(site, edit)
        if site.owner == "2":
            edit.program.model.get_submodule("0").extra = 1


def test_what_the_last_site_changed_elsewhere_goes_back() -> None:
    program = fxopt.capture(chain(3), (X,))
    manager_of(program, time=False).run([AtTheEnd()])
    assert not hasattr(program.module("0"), "extra")


def test_a_site_costs_what_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many blocks are looked at about twice as often, not four times."""
    count, looked = 0, (AttributeState.__init__, AttributeState.is_same)

    def counting(method: Any) -> Any:
        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            return method(*args)

        return counted

    for method in looked:
        monkeypatch.setattr(AttributeState, method.__name__, counting(method))
    counts: list[int] = []
    for blocks in (8, 16, 32):
        count = 0
        fxopt.optimize(chain(blocks), Rewrite(), example_inputs=(X,), verify=False, measure=False)
        counts.append(count)
    assert counts[2] - counts[1] < 2.5 * (counts[1] - counts[0])


def test_what_is_known_is_taken_anew_only_once_it_is_forgotten() -> None:
    module, snapshot = Block(), Snapshot()
    known = snapshot.of(module)
    module.sizes.append(2)
    assert snapshot.of(module) is known and not known.is_same()
    snapshot.forget(module)
    assert snapshot.of(module).is_same()
    module.sizes.append(3)
    assert module in snapshot.settled([module]).by_module
    assert module.sizes == [1, 2]
