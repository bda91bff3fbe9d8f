"""What `fxopt demo` shows: an ensemble of 128 heads made faster, with everything else as it was."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from .. import api
from ..passes.timing import time_candidates
from ..reporting.wording import duration

__all__ = ["DIM_STATE", "Demo", "MultiHead", "Vmapped", "build", "example_inputs"]

DIM_STATE, DIM_ACTION, WIDTH = 16, 4, 32
Run = Callable[[], object]


class MultiHead(nn.Module):
    """An ensemble as it is usually written: a list of small networks, called one after another."""

    def __init__(self, nb_heads: int = 128) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM_STATE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, DIM_ACTION)) for _ in range(nb_heads)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map states [batch, 16] to the actions of every head, [batch, heads * 4]."""
        return torch.cat([head(x) for head in self.heads], dim=1)


def build() -> MultiHead:
    """Return the demo's model with its weights drawn from a fixed seed: `fxopt optimize fxopt.demo:build`."""
    return _seeded(MultiHead, 128)


def example_inputs() -> tuple[Tensor, ...]:
    """Return one state for `build()`."""
    return (_seeded(torch.randn, 1, DIM_STATE),)


def _seeded(make: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
    """Call `make` with torch's random state at `seed`, and give the outer state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(*arguments)


@dataclass
class Demo:
    """One run of the demo, with torch.compile if `compiled`; `show` receives what to print: text or what `rich` can."""

    heads: int
    batch: int
    steps: int
    compiled: bool
    show: Callable[[Any], None]

    def run(self) -> dict[str, Any]:
        """Run it on one thread, showing each part, and return the figures and the checks by name."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> dict[str, Any]:
        model, x = _seeded(MultiHead, self.heads), _seeded(torch.randn, self.batch, DIM_STATE)
        start = time.perf_counter()
        fast = api.optimize(model.eval(), "inference", example_inputs=(x,))
        seconds = time.perf_counter() - start
        self.show(
            f"{self.heads} heads Linear-Tanh-Linear, batch {self.batch}, one thread; optimized in {seconds:.2g} s\n\n"
        )
        self.show(api.report(fast).table())
        self.show(f"\n{api.report(fast).diff()}\n")
        trained = api.optimize(model.train(), "training", example_inputs=(x,))
        speed = {
            "inference": self.compare("inference", model.eval(), fast, x, _forward),
            "training": self.compare("forward and backward", model.train(), trained, x, _forward_backward),
        }
        checks = {**self.train(model, trained), **self.checkpoints(model, x)}
        for name, passed in checks.items():
            self.show(f"{'yes' if passed else 'NO '}  {name}\n")
        return {"seconds": seconds, "speed": speed, "checks": checks}

    def compare(
        self, title: str, model: nn.Module, fast: nn.Module, x: Tensor, runner: Callable[[nn.Module, Tensor], Run]
    ) -> dict[str, dict[str, float]]:
        """Time the loop, vmap, torch.compile if wanted, and the optimized model side by side."""
        candidates = {"loop": runner(model, x), "vmap": runner(Vmapped(model), x)}
        compiling = 0.0
        if self.compiled:
            start = time.perf_counter()
            candidates["torch.compile"] = runner(cast(nn.Module, torch.compile(model)), x)
            candidates["torch.compile"]()
            compiling = time.perf_counter() - start
        candidates["fxopt"] = runner(fast, x)
        timings = time_candidates(candidates)
        rows = {
            name: {"us": timings.microseconds(name), "speedup": timings.ratio("loop", name).mid} for name in candidates
        }
        self.show(f"{title:<22}{'time':>10}{'speed-up':>12}\n")
        for name, row in rows.items():
            note = f"   after {compiling:.1f} s of compiling" if name == "torch.compile" else ""
            self.show(f"  {name:<20}{duration(row['us'] / 1e6):>10}{row['speedup']:>11.3g}x{note}\n")
        self.show("\n")
        return rows

    def train(self, model: nn.Module, fast: nn.Module) -> dict[str, bool]:
        """Train the original and the optimized model side by side, and compare their losses."""
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        moved = api.translate_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), fast)
        losses = [
            (_step(model, optimizer, *batch), _step(fast, moved, *batch))
            for batch in _seeded(_batches, self.heads, self.steps, seed=1)
        ]
        (first, _), (last, fused) = losses[0], losses[-1]
        self.show(f"loss after {self.steps} steps of Adam, from {first:.6f}: loop {last:.6f}, fxopt {fused:.6f}\n\n")
        same = all(abs(a - b) <= 1e-5 * abs(a) for a, b in losses)
        return {f"the losses of all {self.steps} training steps are the same": same}

    def checkpoints(self, model: nn.Module, x: Tensor) -> dict[str, bool]:
        """Move a checkpoint of the trained original into a new optimized model, and back."""
        old = model.state_dict()
        fast = api.optimize(_seeded(MultiHead, self.heads, seed=2).eval(), "inference", example_inputs=(x,))
        api.load_state_dict(fast, old)
        back = api.state_dict(fast)
        with torch.no_grad():
            expected, got = copy.deepcopy(model).eval()(x), fast(x)
        return {
            "the old checkpoint loads into the new model, which then gives the same outputs": torch.allclose(
                got, expected, rtol=1e-4, atol=1e-5
            ),
            "the new model writes the old checkpoint, name by name and bit by bit": list(back) == list(old)
            and all(torch.equal(back[name], old[name]) for name in old),
        }


class Vmapped(nn.Module):
    """The ensemble as `torch.func` has it: the members' parameters stacked once, one vmap over them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        members = list(model.get_submodule("heads").children())
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.stacked = nn.ParameterList(stacked.values())
        self.skeleton = [copy.deepcopy(members[0]).to("meta")]

    def forward(self, x: Tensor) -> Tensor:
        """Map states [batch, 16] to the actions of every head, [batch, heads * 4]."""
        stacked = dict(zip(self.names, self.stacked, strict=True))
        return vmap(self._member, in_dims=(0, None), out_dims=1)(stacked, x).flatten(1)

    def _member(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(self.skeleton[0], parameters, (x,))


def _forward(model: nn.Module, x: Tensor) -> Run:
    def run() -> object:
        with torch.no_grad():
            return model(x)

    return run


def _forward_backward(model: nn.Module, x: Tensor) -> Run:
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model(x).square().mean(), parameters)


def _batches(heads: int, steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(32, DIM_STATE), torch.randn(32, heads * DIM_ACTION)) for _ in range(steps)]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.item()
