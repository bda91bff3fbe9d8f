"""Efficient networks for images, as large as in their papers and small: the preset `inference` without engines.

    python benchmarks/efficient.py --json benchmarks/results/efficient_cnns.json
    python benchmarks/efficient.py --rows halonet-0.25-64 --repeats 3 --label before --json /tmp/efficient.json

A row is a network, its width and the size of its images. Each is optimized some times, in one thread, with random
weights from a committed seed; calls of eager and of each result take turns. A ratio is eager's processor time over that
of the result, with its interval of 95%; beside it are the numbers of rewrites that stand, and that were undone.
`--label` names what is measured, so that several versions of fxopt can be in one file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from efficient_networks import NETWORKS, network
from machine import described

import fxopt
from fxopt.passes.timing import time_candidates

ROWS = (
    *((name, 1.0, 256 if name == "halonet" else 224) for name in NETWORKS),
    ("hardcorenas", 0.25, 32), ("mobilenet_v3", 0.25, 32), ("efficientnet_b0", 0.25, 32), ("rexnet", 0.5, 32),
    ("halonet", 0.25, 64), ("shufflenet_v2", 0.25, 32),
)  # fmt: skip
PIPELINE = "inference{engine=none}"


def named(row: tuple[str, float, int]) -> str:
    return "-".join(map(str, row))


def measured(row: tuple[str, float, int], seconds: float) -> dict[str, Any]:
    """Optimize a network once, and time what came of it beside eager."""
    name, width, size = row
    model, image = network(name, width), torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    start = time.thread_time()
    fast = fxopt.optimize(model, PIPELINE, example_inputs=(image,))
    prepared = time.thread_time() - start
    decisions = fxopt.plan(fast).decisions
    with torch.no_grad():
        timings = time_candidates({"eager": lambda: model(image), "fast": lambda: fast(image)}, seconds=seconds)
        error = float((fast(image) - model(image)).abs().max() / model(image).abs().max())
    ratio = timings.ratio("eager", "fast")
    return {
        "ratio": [round(each, 3) for each in (ratio.low, ratio.mid, ratio.high)],
        "eager_ms": round(timings.seconds("eager") * 1e3, 3),
        "ms": round(timings.seconds("fast") * 1e3, 3),
        "preparation_s": round(prepared, 2),
        "standing": sum(each.status == "applied" for each in decisions),
        "undone": sum(each.status == "undone" for each in decisions),
        "error": float(f"{error:.1e}"),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[named(row) for row in ROWS], metavar="NETWORK-WIDTH-SIZE")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of sampling for each result")
    parser.add_argument("--label", default="fxopt")
    parser.add_argument("--json", type=Path, help="file to add cells to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = arguments.json is not None and arguments.json.exists()
    report = json.loads(arguments.json.read_text(encoding="utf-8")) if known else {"schema_version": 1, "rows": {}}
    report["machine"] = described()
    for text in arguments.rows:
        name, width, size = text.split("-")
        cells = [measured((name, float(width), int(size)), arguments.seconds) for _ in range(arguments.repeats)]
        report["rows"].setdefault(text, {})[arguments.label] = cells
        for cell in cells:
            print(f"{text:24} {arguments.label:8}", cell, flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
