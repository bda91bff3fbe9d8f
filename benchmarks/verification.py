"""Count how many wrong rewrites verification catches, and how many honest ones it lets pass.

    python benchmarks/verification.py [--count 100] [--seeds 0] [--json FILE]

Small models in float32 and bfloat16, in training or evaluation, are optimized by a pass that rewrites one place, drawn
from the seed. What verification finds wrong must be undone, and the model be as it was. The wrong rewrites are those
that passes get wrong: swapped operands, a wrong dimension, a user dropped, a stale buffer, a lost gradient, an epsilon
of 1.1e-6 for 1e-6, members in the wrong order. The honest ones compute the same in another way.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.rewriting.honest import HONEST
from support.rewriting.models import MODELS
from support.rewriting.place import Place, Rewrite
from support.rewriting.wrong import WRONG
from torch import Tensor, nn

import fxopt
from fxopt.passes.contract import Pass
from fxopt.passes.rewriting import Edit
from fxopt.passes.sites import Goal, Phase, Site
from fxopt.runtime.values import flatten
from fxopt.tracing.program import Program, capture_program


@dataclass(frozen=True)
class Outcome:
    """One rewrite and what became of it; `is_intact` says that a model whose rewrite was undone is as it was."""

    kind: str
    model: str
    dtype: str
    training: bool
    owner: str
    node: str
    ok: bool
    reason: str
    meaning_error: float
    is_intact: bool


@dataclass(frozen=True)
class OneRewrite(Pass):
    """Apply one of the rewrites at one place.

    Before: a node        After: what the rewrite makes of it
    Refuses: nothing; it is for verification to object.
    """

    kind: str
    owner: str
    node: str
    seed: int

    goal: ClassVar[Goal] = Goal.SIZE

    def find(self, program: Program) -> Iterator[Site]:
        only_in_evaluation = self.kind == "batch norm from its statistics"
        yield Site(program, self.owner, {"node": self.node}, phase=Phase.EVAL if only_in_evaluation else None)

    def rewrite(self, site: Site, edit: Edit) -> None:
        place = Place(site.program, site.owner, edit.graph_node("node"), edit)
        apply = {**WRONG, **HONEST}[self.kind](place, random.Random(self.seed))
        if apply is None:
            raise RuntimeError(f"{self.kind} no longer fits {self.node}")
        apply()


def places(program: Program) -> Iterator[Place]:
    for owner, capture in program.captures.items():
        for node in capture.specializations[0].graph.nodes:
            yield Place(program, owner, node)


def attempt(kind: str, rewrite: Rewrite, chance: random.Random) -> Outcome | None:
    """Optimize a random model by one rewrite at a random place; None if it applies nowhere there."""
    architecture = chance.choice(list(MODELS))
    dtype = chance.choice([torch.float32, torch.bfloat16])
    training = chance.random() < 0.5
    torch.manual_seed(chance.randrange(2**31))
    model = architecture().to(dtype).train(training)
    x = MODELS[architecture]()
    x = x.to(dtype) if x.is_floating_point() else x
    program = capture_program(copy.deepcopy(model), (x,))
    seed = chance.randrange(2**31)
    fitting = [place for place in places(program) if rewrite(place, random.Random(seed)) is not None]
    if not fitting:
        return None
    place = chance.choice(fitting)
    one = OneRewrite(kind, place.owner, place.node.name, seed)
    return outcome_of(one, model, x, measured_seed=chance.randrange(2**31))


def outcome_of(one: OneRewrite, model: nn.Module, x: Tensor, measured_seed: int) -> Outcome:
    fast = fxopt.optimize(model, passes=[one], example_inputs=(x,), measure=False, seed=measured_seed)
    (decision,) = fxopt.plan(fast).decisions
    return Outcome(
        kind=one.kind,
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        training=model.training,
        owner=one.owner or "(root)",
        node=one.node,
        ok=decision.status == "applied",
        reason=decision.reason,
        meaning_error=float(decision.figures.get("meaning_error") or 0.0),
        is_intact=decision.status == "applied" or same_outputs(fast, model, x),
    )


def same_outputs(fast: nn.Module, model: nn.Module, x: Tensor) -> bool:
    """Say whether two models give bitwise the same."""
    with torch.no_grad():
        pairs = zip(flatten(fast.eval()(x)).values(), flatten(model.eval()(x)).values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def trials(rewrites: dict[str, Rewrite], count: int, seed: int) -> list[Outcome]:
    """Return the outcomes of `count` rewrites, the kinds taking turns."""
    chance = random.Random(seed)
    kinds = list(rewrites)
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        kind = kinds[len(outcomes) % len(kinds)]
        outcome = attempt(kind, rewrites[kind], chance)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


def table(title: str, outcomes: Sequence[Outcome], good: bool) -> str:
    """Return a line per kind: how many were judged rightly, of how many."""
    total, right = Counter(o.kind for o in outcomes), Counter(o.kind for o in outcomes if o.ok is good)
    lines = [f"{title}: {sum(right.values())} of {len(outcomes)}"]
    lines += [f"  {kind:32} {right[kind]:3} of {total[kind]}" for kind in total]
    lines += [f"  missed: {o}" for o in outcomes if o.ok is not good]
    return "\n".join(lines)


def counts(outcomes: Sequence[Outcome], good: bool) -> dict[str, Any]:
    """Return how many were judged rightly, in all and by kind, and everything that was not."""
    total, right = Counter(o.kind for o in outcomes), Counter(o.kind for o in outcomes if o.ok is good)
    return {
        "judged rightly": sum(right.values()),
        "of": len(outcomes),
        "by kind": {kind: f"{right[kind]} of {total[kind]}" for kind in total},
        "missed": [asdict(o) for o in outcomes if o.ok is not good],
        "undone without a trace": all(o.is_intact for o in outcomes),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong = [outcome for seed in options.seeds for outcome in trials(WRONG, options.count, seed)]
    honest = [outcome for seed in options.seeds for outcome in trials(HONEST, options.count, seed)]
    print(table("wrong rewrites caught", wrong, good=False))
    print(table("honest rewrites let pass", honest, good=True))
    if options.json is not None:
        result = {
            "seeds": options.seeds,
            "torch": torch.__version__,
            "wrong": counts(wrong, good=False),
            "honest": counts(honest, good=True),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
