"""Which kernels swap_kernels finds in families of transformers, which it misses, and how those are written.

    python benchmarks/spellings.py [family ...] [--dtype bfloat16] [--json benchmarks/results/spellings.json]

Each family is one small model with random weights. Every swap that is verified is kept, whether it is faster or not.
What is missed is looked for in the graphs that are left, by signs that no pattern knows: roots (norms), layer norms of
torch, halves that are negated and joined again (rotary positions), activations that are multiplied (gates).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.model_zoo.families import BuildError, build, family_of
from torch import Tensor, fx, nn

import fxopt

FAMILIES = (
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 olmo olmo2 olmoe cohere glm "
    "gpt_neox starcoder2 stablelm granite smollm3 helium persimmon falcon bloom mpt opt gpt2 t5 bert roberta electra "
    "albert distilbert deberta-v2 modernbert vit dinov2 swin whisper wav2vec2 bart clip"
)
ACTIVATIONS = (nn.SiLU, nn.GELU)


def row(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return what is swapped in one family, what is not and why, and how far the outputs differ."""
    member = build(family_of(name))
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in member.inputs(2, 12).items()}
    model = member.model.to(dtype)
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=inputs, measure=False, time_budget=600)
    found, reasons = Counter[str](), Counter[str]()
    for each in fxopt.plan(fast).decisions:
        kernel = each.site["data"]["kernel"] if each.site else ""
        if each.status == "applied":
            found[kernel] += 1
        else:
            reasons[f"{kernel} {each.status}: {each.reason}".strip()] += 1
    missed = Counter(sign for path, graph in called(fast) for sign in signs(fast, path, graph))
    return {
        "found": dict(sorted(found.items())), "not swapped": dict(reasons), "missed": dict(sorted(missed.items())),
        "difference": difference(model, fast, inputs),
    }  # fmt: skip


def difference(model: nn.Module, fast: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Return how far the first output differs, relative to its largest number."""
    with torch.no_grad():
        expected, found = (each(**inputs)[0].double() for each in (model, fast))
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=1e-30))


def called(model: nn.Module) -> Iterator[tuple[str, fx.Graph]]:
    """Yield the graphs that run, each under the path that it is called by."""
    graphs = fxopt.graphs(model)
    waiting = [""] if "" in graphs else list(graphs)
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if path not in graphs:
            inner = [name for name in graphs if name.startswith(f"{path}.")]
        else:
            yield path, graphs[path]
            calls = graphs[path].find_nodes(op="call_module")
            inner = [f"{path}.{node.target}" if path else str(node.target) for node in calls]
        waiting += [each for each in inner if each not in seen]
        seen.update(inner)


def signs(model: nn.Module, path: str, graph: fx.Graph) -> Iterator[str]:
    """Yield what looks as if a kernel computed it, and the class that wrote it."""
    owner = model.get_submodule(path)
    name = type(owner).__name__
    for node in graph.nodes:
        module = owner.get_submodule(str(node.target)) if node.op == "call_module" else None
        word = "" if module is not None else getattr(node.target, "__name__", str(node.target))
        if word == "rsqrt":
            yield f"norm in {name}: rsqrt"
        elif word in ("layer_norm", "rms_norm") and "fxopt" not in str(node.target):
            yield f"norm in {name}: {word}"
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            yield f"norm in {name}: {type(module).__name__}"
        elif word == "neg" and any(getattr(user.target, "__name__", "") in ("cat", "stack") for user in node.users):
            yield f"rotary in {name}: {', '.join(sorted(getattr(u.target, '__name__', '') for u in node.users))} of neg"
        elif is_gate(node, word, module):
            yield f"gate in {name}: {word or type(module).__name__} times"


def is_gate(node: fx.Node, word: str, module: nn.Module | None) -> bool:
    """Say whether an activation is computed, and multiplied."""
    is_module = isinstance(module, ACTIVATIONS) or type(module).__name__ in ("GELUActivation", "SiLUActivation")
    is_multiplied = any(getattr(user.target, "__name__", "") == "mul" for user in node.users)
    return is_multiplied and (is_module or word in ("silu", "gelu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES.split())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for family in options.families:
        try:
            rows[family] = row(family, getattr(torch, options.dtype))
        except BuildError as error:
            rows[family] = {"not built": str(error)}
        print(f"{family}: {json.dumps(rows[family])}", flush=True)
    if options.json is not None:
        result = {"torch": torch.__version__, "dtype": options.dtype, "families": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
