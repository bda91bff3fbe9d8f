"""`torch.compile` with inductor, with the backend fxopt, and with inductor on an optimized model, beside eager.

    python benchmarks/dynamo_backend.py --json benchmarks/results/dynamo_backend.json [--pairs 25]
    python benchmarks/dynamo_backend.py --table --json benchmarks/results/dynamo_backend.json

Inference on one thread, all ways in turns; ratios of processor time, the median with its 95% interval.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from machine import begun
from ordinary_models.networks import UNet, settled
from ordinary_models.racing import in_turns
from torch import nn

import fxopt
from fxopt.dynamo_backend import compile_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.small_models import Ensemble

Row = dict[str, Any]
WAYS = ("inductor", "backend fxopt", "fxopt, then inductor")


def _unet() -> tuple[nn.Module, dict[str, Any]]:
    image = torch.randn(1, 3, 64, 64)
    return settled(UNet(16, 2), image), {"image": image}


def _bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024)
    return BertModel(config), {"input_ids": torch.randint(0, 30_000, (1, 64))}


def _ensemble() -> tuple[nn.Module, dict[str, Any]]:
    return Ensemble(32), {"x": torch.randn(8, 4)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "32 heads": _ensemble, "unet, 16 channels": _unet, "bert, 2 layers": _bert,
}  # fmt: skip


def measured(name: str, pairs: int) -> Row:
    """Prepare a model in each way, and let all take turns."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model, inputs = MODELS[name]()
    model.eval()
    made: dict[str, Callable[[], nn.Module]] = {
        "inductor": lambda: torch.compile(model),
        "backend fxopt": lambda: torch.compile(model, backend=compile_graph),
        "fxopt, then inductor": lambda: torch.compile(fxopt.optimize(model, "inference", example_inputs=inputs)),
    }
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: model(**inputs)}
    row: Row = {}
    with torch.no_grad():
        expected = _first(model(**inputs))
        for way, make in made.items():
            start = time.process_time()
            fast = make()
            found = _first(fast(**inputs))
            row[way] = {
                "processor_seconds": round(time.process_time() - start, 1),
                "error": float((found - expected).abs().max() / expected.abs().max()),
            }
            calls[way] = lambda fast=fast: fast(**inputs)
        timings = in_turns(calls, pairs)["processor"]
    row["eager_ms"] = round(timings.seconds("eager") * 1e3, 4)
    for way in WAYS:
        ratio = timings.ratio("eager", way)
        row[way]["speed"] = [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)]
    return row


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def table(models: dict[str, Row]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    yield f"| model | eager | {' | '.join(WAYS)} |"
    yield "|---" * (len(WAYS) + 2) + "|"
    for name, row in models.items():
        yield f"| {name} | {row['eager_ms']:.3g} ms | {' | '.join(_cell(row[way]) for way in WAYS)} |"


def _cell(way: Row) -> str:
    low, mid, high = way["speed"]
    return f"{mid:.2f}x [{low:.2f}, {high:.2f}], {way['processor_seconds']:.0f} s, {way['error']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25)
    of, models, write = begun(parser, table)
    for name in MODELS:
        models[name] = measured(name, of.pairs)
        print(name, models[name], flush=True)
        write()


if __name__ == "__main__":
    main()
