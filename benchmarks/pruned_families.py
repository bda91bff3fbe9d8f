"""Families of `transformers`, pruned: what is left, and whether archives and compact folders give the same.

    python benchmarks/pruned_families.py --json benchmarks/results/pruned_families.json [--only Bert Llama]
    python benchmarks/pruned_families.py --table --json benchmarks/results/pruned_families.json

Small models of the families that `tests/deploy/test_families.py` builds, with four layers, lose half of their units, in
all layers together or in each of them, or half of their blocks. What is left is saved as an archive, which is loaded
without example inputs, and by `save_compact`: plain `transformers` loads the folder, or the loader in it does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from machine import described
from torch import Tensor, nn

import fxopt
from fxopt.runtime.values import tensors_in

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("", "deploy")]

import test_families as families  # noqa: E402

WAYS = {
    "units": "prune{method=structured,amount=0.5}",
    "units of each layer": "prune{method=structured,amount=0.5,scope=layer,round_to=8}",
    "blocks": "prune{method=structured,kinds=blocks,criterion=influence,amount=0.5,scope=layer}",
}
LAYERS = 4
DEEPER = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
SAME = 1e-4
"""Results that differ by less than this share of the largest are the same, in float32."""

Row = dict[str, Any]


def deepen() -> None:
    """Give all families so many layers that half of them can go."""
    for name, (kind, settings) in families.FAMILIES.items():
        deep: dict[str, Any] = {field: LAYERS if field in DEEPER else value for field, value in settings.items()}
        if "depths" in deep:
            deep["depths"] = [LAYERS] * len(deep["depths"])
        families.FAMILIES[name] = kind, deep


def examined(name: str, way: str) -> Row:
    """Prune a family in one way, and load what is left in each way."""
    model = families.made(name)
    inputs = families.prompt(model) | ({"use_cache": False} if name in families.GENERATING else {})
    start = time.process_time()
    row: Row = {"family": name, "way": way}
    try:
        fast = fxopt.optimize(model, WAYS[way], example_inputs=inputs, measure=False)
        gone = [decision for decision in fxopt.plan(fast).decisions if decision.status == "applied"]
        row |= {"sites": len(gone), "parameters": count(fast) / count(model)}
        if not gone:
            return row | {"reason": "; ".join(decision.reason for decision in fxopt.plan(fast).decisions)[:300]}
        with tempfile.TemporaryDirectory() as folder:
            row |= saved(fast.eval(), name, inputs, Path(folder))
    except Exception as error:  # whatever is raised is a figure
        row["failed"] = f"{type(error).__name__}: {error}"[:300]
    return row | {"processor_seconds": time.process_time() - start}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def saved(fast: nn.Module, name: str, inputs: dict[str, Tensor], folder: Path) -> Row:
    """Return by how much what is loaded differs from what was saved, and how compact folders are loaded."""
    fxopt.save(fast, folder / "model.fxopt")
    row: Row = {"archive": difference(fast, fxopt.load(folder / "model.fxopt", model=families.made(name)), inputs)}
    compact = folder / "compact"
    fxopt.save_compact(fast, compact)
    if (compact / "config.json").exists():
        plain, row["by"] = type(families.made(name)).from_pretrained(compact), "configuration"
    else:
        spec: Any = importlib.util.spec_from_file_location("compact_loader", compact / "compact_loader.py")
        loader = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loader)
        plain, row["by"] = loader.load(families.made(name), compact), "loader"
    assert not any(type(module).__module__.startswith("fxopt") for module in plain.modules())
    return row | {"plain": difference(fast, plain.eval(), inputs), "plain_parameters": count(plain)}


def difference(fast: nn.Module, other: nn.Module, inputs: dict[str, Tensor]) -> float | None:
    """Return the largest difference of results as a share of the largest result; None where all results are zeros."""
    with torch.no_grad():
        pairs = zip(tensors_in(fast(**inputs)), tensors_in(other(**inputs)), strict=True)
        shares = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs if a.is_floating_point() and a.any()]
    return max(shares, default=None)


def table(rows: list[Row]) -> None:
    """Print a row a family: of each way the share of the parameters that is left, and who loads it."""
    print("| family | " + " | ".join(f"half of the {way}" for way in WAYS) + " |")
    print("|---" * (len(WAYS) + 1) + "|")
    for name in families.FAMILIES:
        of = {row["way"]: row for row in rows if row["family"] == name}
        print(f"| {name} | " + " | ".join(cell(of.get(way)) for way in WAYS) + " |")


def cell(row: Row | None) -> str:
    if row is None:
        return ""
    if "by" not in row:
        return "failed" if "failed" in row else "refused"
    if None in (row["archive"], row["plain"]):
        return f"{100 * row['parameters']:.0f}%, {row['by']}, not compared"
    differs = [where for where in ("archive", "plain") if row[where] > SAME]
    return f"{100 * row['parameters']:.0f}%, {row['by']}" + (f", {' and '.join(differs)} differ" if differs else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(families.FAMILIES), choices=list(families.FAMILIES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--json", type=Path, help="where the figures go, or come from")
    parser.add_argument("--table", action="store_true", help="print the table of figures that are there")
    given = parser.parse_args()
    if given.table:
        table(json.loads(given.json.read_text())["rows"])
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    deepen()
    rows: list[Row] = []
    for way in given.ways:
        for name in given.only:
            rows.append(examined(name, way))
            print(json.dumps(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"machine": described(), "rows": rows}, indent=1) + "\n")
    table(rows)


if __name__ == "__main__":
    main()
