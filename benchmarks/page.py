"""The page of a model of 5,000 nodes in Chromium: how soon it is there, opens a module, finds a name; its longest task.

    make bench BENCH='page --json benchmarks/results/page.json'     (with what `make test-page` installs on PYTHONPATH)

Times are by the browser's clock, the middle of several loads of a fresh page.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import described
from playwright.sync_api import Browser, sync_playwright
from torch import Tensor, nn

import fxopt

AIMS = {"painted_ms": 2000, "opened_ms": 300, "found_ms": 100, "longest_task_ms": 200}
TASKS = """
window.tasks = [];
new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((each) => each.duration)))
  .observe({ type: "longtask", buffered: true });
"""
PAINTED = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"


class Block(nn.Module):
    """A linear layer and many small operations, with a norm that passes fold."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.linear, self.norm, self.operations = nn.Linear(8, 8), nn.BatchNorm1d(8), operations

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        for number in range(self.operations):
            x = torch.relu(x) if number % 3 else x + 0.1
        return x


def write_page(path: Path, blocks: int, operations: int) -> None:
    """Write the page of a model with so many nodes, before and after two passes."""
    model = nn.Sequential(*(Block(operations) for _ in range(blocks))).eval()
    x = torch.randn(4, 8)
    fast = fxopt.optimize(model, "fold_batchnorm,eliminate_dead_code", example_inputs=x, verify=False, measure=False)
    fxopt.report(fast).to_html(path)


def one_load(browser: Browser, path: Path) -> dict[str, float]:
    """Load the page, open a module, and search."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.add_init_script(TASKS)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("#picture[data-ready]")
    painted = page.evaluate(PAINTED)
    opened = page.evaluate(
        f"async () => {{ const begun = performance.now(); await window.picturePage.open('1');"
        f" return (await ({PAINTED})()) - begun; }}"
    )
    found = page.evaluate(
        f"async () => {{ const begun = performance.now(); window.picturePage.find('relu_3');"
        f" return (await ({PAINTED})()) - begun; }}"
    )
    page.wait_for_timeout(300)
    longest = page.evaluate("Math.max(0, ...window.tasks)")
    page.close()
    return {
        "painted_ms": painted, "opened_ms": opened, "found_ms": found, "longest_task_ms": longest,
        "requests": sum(not url.startswith(("file:", "blob:")) for url in requests),
    }  # fmt: skip


def measured(path: Path, loads: int) -> dict[str, Any]:
    """Return the middle, the smallest and the largest of each figure."""
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        rounds = [one_load(browser, path) for _ in range(loads)]
        browser.close()
    return {
        name: [round(each, 1) for each in (min(values), statistics.median(values), max(values))]
        for name, values in ((name, [each[name] for each in rounds]) for name in rounds[0])
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=50)
    parser.add_argument("--operations", type=int, default=98)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--page", type=Path, help="measure this page, made before, or keep it here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = (options.page or Path(folder) / "page.html").resolve()
        if not path.exists():
            write_page(path, options.blocks, options.operations)
        figures = measured(path, options.loads)
        size = path.stat().st_size
    for name, (least, middle, most) in figures.items():
        print(f"{name:<18}{middle:8.1f}  ({least} to {most}, aim {AIMS.get(name, 0)})")
    print(f"{size / 2**20:.2f} MiB")
    if options.json:
        nodes = options.blocks * (options.operations + 2)
        result = {"nodes": nodes, "loads": options.loads, "bytes": size, "least, middle, most": figures}
        text = json.dumps({"schema_version": 1, "machine": described(), "aims": AIMS, **result}, indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
