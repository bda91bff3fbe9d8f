"""Quantized models beside float32, eager and compiled, and beside torchao, PT2E, onnxruntime and NNCF on OpenVINO.

    make bench BENCH='quantization --json benchmarks/results/quantization.json --missing'
    python benchmarks/quantization.py --only "linear batch 8" bert --rounds 5
    python benchmarks/quantization.py --table --json benchmarks/results/quantization.json

Each round calls every way once, interleaved, on one thread. Ratios are the processor time of float32 eager over that of
the way, with their 95% interval. What is compiled is compiled with freezing, and nothing is taken from a cache.
Preparation is all that a way does before its second call, by the clock. Of a decoder one call generates tokens; tokens
a second are shown. A way that fails has the reason. The file is written after each case and keeps the others: an
interrupted run keeps what it has, and `--missing` goes on with the rest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import described
from quantizing import CASES, WAYS, Case, Prepared, called, first_tensor

from fxopt.passes.timing import Timings

FLOAT = "float32 eager"


def prepared(case: Case, model: Any, inputs: Any, ways: list[str]) -> dict[str, Prepared | str]:
    """Return what each way makes of a model, or in one line why it fails."""
    found: dict[str, Prepared | str] = {}
    for name in case.ways:
        if ways and name not in (*ways, FLOAT):
            continue
        try:
            found[name] = WAYS[name](model, inputs)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return found


def timed(models: dict[str, Prepared], inputs: Any, rounds: int) -> Timings:
    """Call every model once in each round."""
    rows = list[dict[str, float]]()
    for number in range(rounds + 1):
        row = dict[str, float]()
        for name in (*list(models)[number % len(models) :], *list(models)[: number % len(models)]):
            start = time.process_time()
            called(models[name].model, inputs)
            row[name] = time.process_time() - start
        rows.append(row)
    return Timings(rows[1:])


def measure(name: str, case: Case, rounds: int, ways: list[str]) -> dict[str, Any]:
    """Return the row of one case, and print it."""
    torch.manual_seed(0)
    model, inputs = case.build()
    model.eval()
    found = prepared(case, model, inputs, ways)
    models = {way: each for way, each in found.items() if isinstance(each, Prepared)}
    timings, expected = timed(models, inputs, rounds), first_tensor(called(model, inputs))
    print(name)
    cells: dict[str, Any] = {way: {"failed": each} for way, each in found.items() if isinstance(each, str)}
    for way, each in models.items():
        ratio, output = timings.ratio(FLOAT, way), first_tensor(called(each.model, inputs)).to(expected.dtype)
        cells[way] = {
            "ratio": [round(value, 2) for value in (ratio.low, ratio.mid, ratio.high)],
            "ms": round(timings.seconds(way) * 1e3, 3),
            "relative_error": float(f"{float((output - expected).abs().max() / expected.abs().max()):.2g}"),
            "preparation_s": round(each.seconds, 1),
            "bytes": each.size,
            **({"tokens_per_s": round(case.tokens / timings.seconds(way), 1)} if case.tokens else {}),
        }
    print(*(f"  {way:28} {cell}" for way, cell in cells.items()), sep="\n", flush=True)
    return {"case": name, "ways": cells}


def table(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table in Markdown; reasons are numbered below it."""
    yield "| model | way | speedup | ms | error | preparation, s | MB |"
    yield "|---|---|---|---|---|---|---|"
    reasons: dict[str, int] = {}
    for name, row in rows.items():
        for way, cell in row["ways"].items():
            if "failed" in cell:
                number = reasons.setdefault(cell["failed"].replace("|", "/"), len(reasons) + 1)
                yield f"| {name} | {way} | failed ({number}) | | | | |"
                continue
            low, mid, high = cell["ratio"]
            numbers = f"{cell['ms']:.3g} | {cell['relative_error']:.2g} | {cell['preparation_s']:.1f}"
            yield f"| {name} | {way} | {mid:.2f}x ({low:.2f} to {high:.2f}) | {numbers} | {cell['bytes'] / 1e6:.1f} |"
    yield ""
    for reason, number in reasons.items():
        yield f"{number}. {reason}"


def known(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows of an earlier run, by case."""
    if path is None or not path.exists():
        return {}
    return {row["case"]: row for row in json.loads(path.read_text(encoding="utf-8"))["cases"]}


def is_whole(row: dict[str, Any] | None, case: Case) -> bool:
    """Say whether a row has all ways of its case."""
    return row is not None and set(case.ways) <= row["ways"].keys()


def write(path: Path, rows: list[dict[str, Any]], rounds: int, load: float) -> None:
    """Write what was measured until now, with the load of the machine at the start and now."""
    machine = {**described(), "load_average": [round(load, 1), round(os.getloadavg()[0], 1)]}
    report = {"schema_version": 1, "machine": machine, "rounds": rounds, "cases": rows}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), help="cases")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=[], help="beside float32 eager; default: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--missing", action="store_true", help="leave out cases of which the file has all ways")
    parser.add_argument("--table", action="store_true", help="measure nothing: print what the file has, in Markdown")
    arguments = parser.parse_args()
    if arguments.table:
        print(*table(known(arguments.json)), sep="\n")
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.freezing = True
        rows = known(arguments.json)
        for name in arguments.only:
            if arguments.missing and is_whole(rows.get(name), CASES[name]):
                continue
            rows[name] = measure(name, CASES[name], arguments.rounds, arguments.ways)
            if arguments.json:
                write(arguments.json, [rows[each] for each in CASES if each in rows], arguments.rounds, load)


if __name__ == "__main__":
    main()
