"""What `optimize` costs on ordinary models of real size: in seconds, and in forwards of the model itself.

    python benchmarks/optimize_cost.py --json benchmarks/results/optimize_cost.json

Each model has its real configuration, and weights and inputs from a committed seed. It runs in a process of its own, on
one thread. A forward (of the preset `training`: in training mode, without its backward) is timed before and after
`optimize` in the same process, so that the number of forwards says little of how busy the machine was. What was gained
is timed by interleaved calls afterwards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import described
from ordinary_models import networks
from ordinary_models.networks import tokens
from torch import nn

import fxopt
from fxopt.passes.timing import runner, time_candidates
from fxopt.tracing.values import Inputs, normalize_inputs

SEED = 7
FORWARDS = 5
Example = tuple[nn.Module, Any]


def bert_base() -> Example:
    return networks.bert_base(), (tokens(64, 30522),)


def resnet_18() -> Example:
    return networks.resnet_18(), (torch.randn(1, 3, 224, 224),)


def resnet_50() -> Example:
    return networks.resnet_50(), (torch.randn(1, 3, 224, 224),)


def mobilenet_v2() -> Example:
    return networks.mobilenet_v2(), (torch.randn(1, 3, 224, 224),)


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config()), (tokens(64, 50257),)


def llama_150m() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
        num_key_value_heads=4, vocab_size=32000,
    )  # fmt: skip
    return LlamaForCausalLM(config), (tokens(64, 32000),)


def t5_small() -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config()), {
        "input_ids": tokens(64, 32128),
        "decoder_input_ids": tokens(16, 32128),
    }


def vit_base() -> Example:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), (torch.randn(1, 3, 224, 224),)


def convnext_tiny() -> Example:
    return networks.convnext_tiny(), (torch.randn(1, 3, 224, 224),)


def gcn_10k() -> Example:
    from torch_geometric.nn import GCN

    model = GCN(in_channels=64, hidden_channels=64, num_layers=3, out_channels=16)
    return model, (torch.randn(10_000, 64), torch.randint(0, 10_000, (2, 50_000)))


def lstm() -> Example:
    return networks.Tagger(), (tokens(64, 20_000, 8),)


MODELS: Mapping[str, Callable[[], Example]] = {
    function.__name__: function
    for function in (
        bert_base, resnet_18, resnet_50, mobilenet_v2, gpt2, llama_150m, t5_small, vit_base, convnext_tiny, gcn_10k,
        lstm,
    )
}  # fmt: skip


def forward_seconds(model: nn.Module, call: Inputs) -> list[float]:
    """Return the seconds of a few forwards, the first of which is not counted."""
    seconds: list[float] = []
    with torch.no_grad():
        for _ in range(1 + FORWARDS):
            start = time.perf_counter()
            model(*call.args, **call.kwargs)
            seconds.append(time.perf_counter() - start)
    return seconds[1:]


def measured(name: str, preset: str) -> dict[str, Any]:
    """Optimize one model, and say what that took and gave."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model, example = MODELS[name]()
    model.train(preset == "training")
    (call,) = normalize_inputs(example)
    before = forward_seconds(model, call)
    start, processor = time.perf_counter(), time.process_time()
    fast = fxopt.optimize(model, preset, example_inputs=example)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    forward = median(before + forward_seconds(model, call))
    report = fxopt.report(fast).to_json()
    statuses = [decision["status"] for decision in report["decisions"]]
    return {
        "forward_ms": round(forward * 1e3, 2),
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "forwards": round(seconds / forward, 1),
        "applied": statuses.count("applied"),
        "sites": len(statuses),
        "spent": report.get("spent"),
        "speedup": gained(model, fast, call) if "applied" in statuses else [1.0, 1.0, 1.0],
    }


def gained(model: nn.Module, fast: nn.Module, call: Inputs) -> list[float]:
    """Return how many times faster the optimized model is, with the interval of 95%."""
    training = model.training
    runs = {"before": runner(model, [call], training=training), "after": runner(fast, [call], training=training)}
    ratio = time_candidates(runs, seconds=2.0, least_rounds=15).ratio("before", "after")
    return [round(value, 3) for value in (ratio.low, ratio.mid, ratio.high)]


def row(name: str, preset: str, found: Mapping[str, Any]) -> str:
    low, mid, high = found["speedup"]
    taken = f"{found['seconds']:7.2f} s {found['forwards']:8.1f} forwards"
    return (
        f"{name:14} {preset:9} {found['forward_ms']:8.1f} ms {taken}"
        f"  {found['applied']:3} of {found['sites']:3} applied  {mid:.2f}x [{low:.2f}, {high:.2f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--presets", nargs="+", default=["inference", "training"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for preset in arguments.presets:
        for name in arguments.only:
            with multiprocessing.get_context("spawn").Pool(1) as alone:
                found = alone.apply(measured, (name, preset))
            results.setdefault(preset, {})[name] = found
            print(row(name, preset, found), flush=True)
    if arguments.json:
        report = {"schema_version": 1, "machine": described(), "seed": SEED, "presets": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
