"""The figures of these pages, each from a real run; `make figures` makes them anew.

The figure of a pass is made of the example on its page: what `fxopt.optimize` returned there, as the page of its report
shows it in a browser. Names on the command line make only these: of passes, `page`, `plots`, `comparison`,
`search`.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from torch import distributed, nn

import fxopt
from fxopt.reporting.plots import png_of
from fxopt.runtime.values import own_part

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
RESULTS = DOCS.parent / "benchmarks" / "results"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WIDTH, TALLEST, WIDEST = 1000, 1300, 700
"""Of a figure of a pass, in pixels; what is wider than `WIDEST` has no room beside another."""
COLOURS, DPI = 128, 100
"""A page has few: the files are a third as large as with all that there could be."""


class Found(BaseException):
    """Ends the example of a page: the result that its pass has rewritten is there."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


def example_of(name: str, folder: Path) -> nn.Module:
    """Run the example on the page of a pass up to the first model that the pass has rewritten, and return that."""
    optimize: Callable[..., nn.Module] = fxopt.optimize

    def watched(*args: Any, **options: Any) -> nn.Module:
        fast = optimize(*args, **options)
        if any(each.pass_name == name and each.status == "applied" for each in fxopt.plan(fast).decisions):
            raise Found(fast)
        return fast

    page = f"page_{name}"
    blocks = BLOCK.findall((DOCS / "passes" / f"{name}.md").read_text(encoding="utf-8"))
    (folder / f"{page}.py").write_text("\n".join(blocks), encoding="utf-8")
    fxopt.optimize = watched
    try:
        importlib.import_module(page)
    except Found as found:
        return found.model
    finally:
        fxopt.optimize = optimize
        if distributed.is_initialized():
            distributed.destroy_process_group()
    raise LookupError(f"{name}: no model on its page was rewritten by it")


def opened(report: fxopt.Report) -> list[str]:
    """Return the modules that are to be open: the first with a graph that was rewritten, and what is around it."""
    first = next((name.partition("#")[0] for name in report.record.graph_versions if name), "")
    parts = first.split(".") if first else []
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def is_seen(report: fxopt.Report) -> bool:
    """Return whether both sides of a picture differ: in a graph, or in the class of a module."""
    classes = report.picture()["modules"].values()
    replaced = any(None not in sides and sides[0][0] != sides[1][0] for sides in classes)
    return replaced or bool(report.record.graph_versions)


def draw_pass(page: Page, name: str, folder: Path) -> None:
    """Write the figure of a pass: both graphs of the example on its page, side by side."""
    model = example_of(name, folder)
    report = fxopt.report(model)
    if not is_seen(report):
        return save(png_of(report.plot(), DPI), PICTURES / "passes" / f"{name}.png")
    report.to_html(folder / f"{name}.html")
    page.goto("about:blank")
    page.goto(f"{(folder / f'{name}.html').as_uri()}#open={','.join(opened(report))}")
    page.wait_for_selector("#picture[data-ready]")
    page.add_style_tag(content="#picture aside, #picture .keys, #picture .bar-top { display: none !important }")
    size = page.evaluate("window.picturePage.view.size")
    is_wide = size["width"] > WIDEST  # the sides stand one above the other then
    scale = min(1.2, (WIDTH / (1 if is_wide else 2) - 40) / size["width"])
    tall = min(TALLEST, max(150, int(size["height"] * scale) + 70) * (2 if is_wide else 1))
    column = "#picture .panes { flex-direction: column }" if is_wide else ""
    page.add_style_tag(content=f"#picture {{ height: {tall}px !important; min-height: 0 !important }} {column}")
    page.wait_for_timeout(150)
    page.evaluate("window.picturePage.view.resized(); window.picturePage.view.fit()")
    page.wait_for_timeout(150)
    return save(page.locator("#picture").screenshot(), PICTURES / "passes" / f"{name}.png")


def save(png: bytes, path: Path) -> None:
    """Write a picture with few colours."""
    picture = (
        Image.open(io.BytesIO(png))
        .convert("RGB")
        .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    picture.save(path, optimize=True)
    print(f"{path.relative_to(DOCS)}: {path.stat().st_size / 1024:.0f} KiB", flush=True)


@contextmanager
def browser() -> Iterator[Page]:
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        yield running.new_page(viewport={"width": WIDTH + 80, "height": 900}, color_scheme="light")
        running.close()


def draw_page(page: Page, folder: Path) -> None:
    """Write the page of a report of a small ViT: a module is open, and one is picked; wide, and as on a phone."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3}
    config = ViTConfig(image_size=96, intermediate_size=768, **sizes)
    torch.manual_seed(0)
    model, images = ViTForImageClassification(config).eval(), torch.randn(4, 3, 96, 96)
    path = folder / "vit.html"
    fast = fxopt.optimize(model, "inference", example_inputs=images)
    fxopt.report(fast, images).to_html(path)
    stage = fxopt.plan(fast).pipeline.index("flatten_calls")  # what is called is still there before it
    around = next(name.rpartition(".")[0] for name, each in model.named_modules() if name.endswith(".0.mlp"))
    parts = around.split(".")
    inside = [".".join(parts[:end]) for end in range(1, len(parts) + 1)] + [f"{around}.mlp"]
    for name, width in {"report-page": 1360, "report-page-narrow": 390}.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.goto("about:blank")
        page.goto(f"{path.as_uri()}#stage={stage}&open={','.join(inside)}&node={around}/mlp")
        page.wait_for_selector("#picture[data-ready]")
        page.wait_for_timeout(300)
        shown = page.locator("#picture").bounding_box() or {}
        save(
            page.screenshot(full_page=True, clip={**shown, "height": min(shown["height"], 1500)}),
            PICTURES / f"{name}.png",
        )
    page.set_viewport_size({"width": WIDTH + 80, "height": 900})


def draw_plots() -> None:
    """Write what `report.plot()` shows of three runs: for speed, for memory, with sensitivities."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=1024)
    torch.manual_seed(0)
    bert, given = BertModel(config).eval(), {"input_ids": torch.randint(0, 1000, (4, 64))}
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)))
    x = torch.randn(128, 256)
    runs = {
        "plot-speed": fxopt.report(fxopt.optimize(bert, "inference", example_inputs=given), given),
        "plot-memory": fxopt.report(fxopt.optimize(blocks.train(), "checkpoint{budget=0.4}", example_inputs=x)),
        "plot-sensitivity": fxopt.report(
            fxopt.optimize(bert, "quantize{scheme=int4_weight,aim=size}", example_inputs=given)
        ),
    }
    for name, report in runs.items():
        save(png_of(report.plot(), DPI), PICTURES / f"{name}.png")


COLUMNS = {
    "exact": ("fxopt", "#2f7d4f"),
    "compile": ("torch.compile", "#d08a2e"),
    "onnxruntime": ("onnxruntime", "#7a6fb0"),
    "openvino": ("OpenVINO", "#4a87b8"),
}
"""Columns of the results: how they are called, and their colours."""


def draw_comparison() -> None:
    """Write how fast each tool runs the models of `benchmarks/ordinary.py`, from the committed results."""
    races = json.loads((RESULTS / "ordinary.json").read_text(encoding="utf-8"))["races"]
    rows = {model: found["1"]["float32"]["processor"]["ms"] for model, found in races.items() if "1" in found}
    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    axes = figure.subplots()
    for row, times in enumerate(rows.values()):
        for column, (_, colour) in COLUMNS.items():
            if column in times:
                axes.plot(times["eager"] / times[column], row, "o", color=colour, markersize=7, alpha=0.85)
    for label, colour in COLUMNS.values():
        axes.plot([], [], "o", color=colour, label=label)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}x")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.set_title("times as fast as eager: float32, one thread, processor time", loc="left", fontsize=10)
    save(png_of(figure, DPI), PICTURES / "comparison.png")


PARALLEL = {
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 2),
    "tensor_parallel": ("tensor_parallel", 2),
    "pipeline": ("pipeline{microbatches=2}", 2),
    "parallel": ("parallel{shard=2,tensor=2}", 4),
}
"""Passes whose effect is in no graph, with processes: what each of these holds is their figure."""


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def draw_search() -> None:
    """Show what a search found for each task of the benchmark, by time and by what was lost."""
    tasks = json.loads((RESULTS / "search.json").read_text(encoding="utf-8"))["tasks"]
    figure = Figure(figsize=(9.0, 2.9 * math.ceil(len(tasks) / 2)), layout="constrained")
    panels = figure.subplots(math.ceil(len(tasks) / 2), 2, squeeze=False).flat
    for task, axes in zip(tasks, panels, strict=False):  # tasks first: the panels that are left stay
        original = task["original"]

        def place(figures: dict[str, float], original: dict[str, float] = original) -> tuple[float, float]:
            return figures["latency"] / original["latency"], figures["metric"]

        tried = [place(figures) for _, figures, reason in task["points"] if figures and not reason]
        presets = [place(figures) for text, figures, _ in task["points"] if text in task["presets"] and figures]
        front = [place(figures) for _, figures in task["front"]]
        axes.plot(*zip(*tried, strict=True), "o", markersize=3, color="#a9b4c0", label="tried")
        axes.plot(*zip(*front, strict=True), "o-", markersize=4, color="#2f7d4f", label="the front")
        axes.plot(*zip(*presets, strict=True), "s", markersize=6, mfc="none", color="#30549c", label="a preset alone")
        if task["expert"]["figures"]:
            axes.plot(*place(task["expert"]["figures"]), "*", markersize=9, color="#b06a5a", label="an expert's")
        axes.set_title(task["task"], loc="left", fontsize=9)
        axes.set_xlabel("time of a call, of the original's", fontsize=8)
        axes.set_ylabel("metric", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels:
        axes.set_axis_off()
    figure.axes[0].legend(fontsize=7)
    save(png_of(figure, DPI), PICTURES / "search.png")


def held(model: nn.Module) -> float:
    """Return the MiB of the parameters that this process holds."""
    return sum(own_part(each).nbytes for each in model.parameters()) / 2**20


def on_rank(rank: int, size: int, text: str, folder: str, found: Any) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Mlp() for _ in range(4))), torch.randn(16, 256)
    plain = held(model)
    found.put((rank, plain, held(fxopt.optimize(model.train(), text, example_inputs=x))))
    distributed.destroy_process_group()


def draw_ranks(name: str) -> None:
    """Write what each process holds of a model, before and after a pass for several devices."""
    context, (text, size) = multiprocessing.get_context("spawn"), PARALLEL[name]
    found = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=on_rank, args=(each, size, text, folder, found)) for each in range(size)]
        for process in ranks:
            process.start()
        rows = sorted(found.get(timeout=120) for _ in ranks)
        for process in ranks:
            process.join()
    figure = Figure(figsize=(9.0, 1.0 + 0.4 * (size + 1)), layout="constrained")
    axes = figure.subplots()
    sizes = {"the plain model": rows[0][1], **{f"process {rank}, {name}": after for rank, _, after in rows}}
    bars = axes.barh(list(sizes), list(sizes.values()), color=["#a9b4c0", *["#2f7d4f"] * size], height=0.6)
    axes.bar_label(bars, fmt="%.2f MiB", padding=4, fontsize=8)
    axes.margins(x=0.12)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("parameters that a process holds: four MLPs 256-1024-256", loc="left", fontsize=9)
    save(png_of(figure, DPI), PICTURES / "passes" / f"{name}.png")


def main(asked: list[str]) -> int:
    """Make the figures that are asked for, or all; return how many failed."""
    from fxopt.known_passes import pass_names

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = [name for name, origin in pass_names().items() if origin == "fxopt" and name in (asked or [name])]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, browser() as page:
        sys.path.insert(0, folder)
        for name in names:
            try:
                draw_ranks(name) if name in PARALLEL else draw_pass(page, name, Path(folder))
            except Exception:
                failed += 1
                traceback.print_exc()
        if "page" in (asked or ["page"]):
            draw_page(page, Path(folder))
    for name, draw in {"plots": draw_plots, "comparison": draw_comparison, "search": draw_search}.items():
        if name in (asked or [name]):
            draw()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
