"""A pass of your own: `x * tanh(softplus(x))` as the one operator that it is.

fxopt checks it against float64, as every pass, and undoes it where it is wrong: the second model shows that.

Run it: python examples/own_pass.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxopt
from fxopt import Edit, Goal, Numerics, Pass, Program, Refusal, Site, anything, operation


@dataclass(frozen=True)
class UseMish(Pass):
    """Compute `x * tanh(softplus(x))` as one operator.

    Before: y = x * torch.tanh(F.softplus(x))        After: y = F.mish(x)
    Refuses: a softplus or a tanh that something else reads too.
    """

    numerics = Numerics.REASSOCIATED
    goal = Goal.SPEED

    def find(self, program: Program) -> Iterator[Site | Refusal]:
        x = anything(name="x")
        gate = operation("tanh", operation("softplus", x, name="softplus"), name="gate")
        for match in program.matches(operation("mul", x, gate, name="product")):
            shared = [node for node in (match["softplus"], match["gate"]) if len(node.users) > 1]
            if shared:
                yield Refusal("it is read elsewhere too", at=shared[0])
            else:
                yield match.site()

    def rewrite(self, site: Site, edit: Edit) -> None:
        product = site["product"]
        edit.replace(product, edit.call(F.mish, site["x"], before=product))


class Activated(nn.Module):
    """Write the activation out, with a softplus of a given steepness."""

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.linear, self.beta = nn.Linear(16, 16), beta

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h * torch.tanh(F.softplus(h, beta=self.beta))


def main() -> list[str]:
    """Run the pass on a model that it fits, and on one where its author forgot to look; return what became of both."""
    torch.manual_seed(0)
    found: list[str] = []
    for beta in (1.0, 2.0):  # the pattern leaves `beta` free; with 2, mish is another function
        model, x = Activated(beta), torch.randn(8, 16)
        fast = fxopt.optimize(model, UseMish(), example_inputs=x)
        print(fxopt.report(fast))
        torch.testing.assert_close(fast(x), model(x))
        found += [decision.status for decision in fxopt.plan(fast).decisions]
    return found


if __name__ == "__main__":
    main()
