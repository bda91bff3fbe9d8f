"""What `optimize` costs a process that finds the decisions of an earlier one, beside a process that decides anew.

Each figure is of a process of its own, after one forward of the model: processor time of all its threads, and seconds
by the clock, from the call of `optimize` to its return; imports that this call makes are counted, from bytecode.

    python benchmarks/cache.py                       print a table
    python benchmarks/cache.py --json results.json   and write the figures
    python benchmarks/cache.py --only bert           of some models
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from machine import described
from ordinary_models.cases import CASES, SEED
from torch import Tensor, nn

REPEATS = 2
"""Processes that find decisions; the fastest counts, since others share the machine."""


class Ensemble(nn.Module):
    """The mean of 32 small networks."""

    def __init__(self) -> None:
        super().__init__()
        heads = (nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10)) for _ in range(32))
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x) for head in self.heads]).mean(0)


def _ensemble() -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(SEED)
    return Ensemble().eval(), (torch.randn(8, 64),)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    **{
        name: CASES[name].built
        for name in ("resnet-50", "bert-base, 64 tokens", "mobilenet-v2", "vit-small", "gpt2, 128 tokens")
    },
    "ensemble of 32": _ensemble,
}


def once(name: str) -> dict[str, Any]:
    """Optimize a model in this process, and return what that took."""
    import fxopt

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, arguments = MODELS[name]()
    with torch.no_grad():
        model(*arguments)
        processor = time.process_time()
        model(*arguments)
        forward = time.process_time() - processor
    processor, clock = time.process_time(), time.perf_counter()
    fast = fxopt.optimize(model, "inference", example_inputs=arguments)
    took = {"cpu_s": time.process_time() - processor, "wall_s": time.perf_counter() - clock}
    report = fxopt.report(fast).to_json()
    applied = sum(decision["status"] == "applied" for decision in report["decisions"])
    return {**took, "forward_s": forward, "cached": report["cached"] is not None, "applied": applied}


def in_a_process(name: str, folder: str, *, engines: bool) -> dict[str, Any]:
    """Return what a new process measures that keeps decisions in a folder."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    environment = {**os.environ, **threads, "FXOPT_CACHE": folder, "FXOPT_ENGINES": str(int(engines))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    command = [sys.executable, __file__, "--once", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(name: str, *, engines: bool) -> dict[str, Any]:
    """Return what the first process takes, and the fastest of those behind it."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_a_process(name, folder, engines=engines)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        later = [in_a_process(name, folder, engines=engines) for _ in range(REPEATS)]
    if cold["cached"] or not all(each["cached"] and each["applied"] == cold["applied"] for each in later):
        raise SystemExit(f"{name}: the decisions were not found, or others were made")
    cached = min(later, key=lambda each: each["cpu_s"])
    return {"cold": cold, "cached": cached, "entry_bytes": size}


def line(name: str, found: Mapping[str, Any]) -> str:
    """Return a line of the table."""
    cold, cached = found["cold"], found["cached"]
    figures = [f"{cold['cpu_s']:.2f} ({cold['wall_s']:.1f})", f"{cached['cpu_s']:.2f} ({cached['wall_s']:.1f})"]
    forwards = cached["cpu_s"] / cached["forward_s"]
    return f"| {name} | {' | '.join(figures)} | {cold['cpu_s'] / cached['cpu_s']:.1f}x | {forwards:.0f} |"


def main() -> None:
    """Measure all models, with engines and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("--once", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options.once)))
        return
    results: dict[str, Any] = {"machine": described(), "rows": {}}
    print("| model | anew: processor time, s (clock) | from the cache | ratio | forwards |\n|---|---|---|---|---|")
    for name in (name for name in MODELS if options.only in name):
        for engines in (True, False):
            label = f"{name}, {'with' if engines else 'without'} engines"
            results["rows"][label] = found = measured(name, engines=engines)
            print(line(label, found), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
