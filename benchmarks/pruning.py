"""Structured pruning beside torch-pruning: models handled, shares reached, latency at equal parameters.

    pip install torch-pruning==1.6.1
    python benchmarks/pruning.py --json benchmarks/results/pruning.json [--only bert llama] [--rounds 15]

Each model is analysed and pruned by both in processes of their own: cold, and with a time limit, since a tool may hang.
For 25%, 50% and 75% of the channels torch-pruning says how many parameters that leaves; fxopt then removes as many
parameters (where torch-pruning fails, as large a share of them as of the channels). The two results and the original
are timed in turn, on one thread, in processor time; ratios are medians over rounds. What is pruned by fxopt is called
with another batch size, trained for a step, exported, and its state is saved under original names and loaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import described
from pruning_subjects import SUBJECTS, Subject
from torch import nn

import fxopt
from fxopt.collection import collection_paused
from fxopt.passes.timing import Timings
from fxopt.transforms.prune import Prune

SHARES = (0.25, 0.5, 0.75)
LIMIT = 180
"""Seconds after which a process is given up."""

ROWS = 4
PEER = "torch-pruning 1.6.1"


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def logits(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.logits


# -- what runs in processes of their own ------------------------------------------------------------------------------


def analyse(subject: Subject) -> dict[str, Any]:
    """Return how long the groups of a model take to be found, capture included, and how many there are."""
    from fxopt.tracing.program import capture_program
    from fxopt.transforms.prune.dependency_groups import coupling

    model, call = subject.make().eval(), subject.call(2)
    start, processor = time.perf_counter(), time.process_time()
    with collection_paused():  # as `optimize` does
        found = coupling(capture_program(model, fxopt.Inputs(**call)))
    refused = [each for each in found.refused if not each.by_design]
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        "groups": len(found.groups),
        "refused": [[each.layer, each.reason] for each in refused],
    }


def peer(subject: Subject, share: float, path: Path) -> dict[str, Any]:
    """Prune with torch-pruning, and leave the model in a file."""
    tp: Any = importlib.import_module("torch_pruning")  # it is no part of the environment

    torch.manual_seed(0)
    model, call = subject.make().eval(), subject.call(2)
    heads = {
        module: number
        for name, module in model.named_modules()
        for end, number in subject.heads.items()
        if name.rpartition(".")[2] == end
    }
    start = time.perf_counter()
    pruner = tp.pruner.MetaPruner(
        model, call, importance=tp.importance.GroupMagnitudeImportance(p=2), pruning_ratio=share,
        ignored_layers=[model.get_submodule(subject.head)], num_heads=heads, prune_num_heads=bool(heads),
        prune_head_dims=False, head_pruning_ratio=share, output_transform=lambda output: logits(output).sum(),
    )  # fmt: skip
    analysed = time.perf_counter() - start
    pruner.step()
    for module, number in pruner.num_heads.items():
        for parent in model.modules():
            if module in parent.children():
                for name in ("num_attention_heads", "num_heads"):
                    if hasattr(parent, name):
                        setattr(parent, name, number)
                for name, size in (("all_head_size", 1), ("attention_head_size", number)):
                    if hasattr(parent, name):
                        setattr(parent, name, module.out_features // size)
    with torch.no_grad():
        model(**subject.call(3))
    model.zero_grad()
    torch.save(model, path)
    return {"seconds": analysed, "parameters": count(model)}


CHILDREN = {"analyse": analyse, "peer": peer}


def in_a_process(kind: str, name: str, *arguments: object) -> dict[str, Any]:
    """Return what a process of its own says, or why it says nothing."""
    command = [sys.executable, __file__, "--child", kind, name, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {LIMIT} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    return json.loads(done.stdout.strip().splitlines()[-1])


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(model: nn.Module, subject: Subject, amount: float) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model with a share of its parameters removed, and what is to be said of it."""
    start = time.perf_counter()
    call = fxopt.Inputs(**subject.call(2))
    pass_ = Prune(method="structured", scope="layer", amount=amount, target="parameters")
    fast = fxopt.optimize(model, [pass_], example_inputs=call)
    decisions = fxopt.plan(fast).decisions
    return fast, {
        "seconds": time.perf_counter() - start,
        "reached": 1 - count(fast) / count(model),
        "refused": sum(decision.status != "applied" for decision in decisions),
        "works": works(fast, model, subject),
    }


def works(fast: nn.Module, model: nn.Module, subject: Subject) -> dict[str, str]:
    """Try what a pruned model must do; "" is yes."""

    def runs() -> None:
        with torch.no_grad():
            assert logits(fast(**subject.call(5))).isfinite().all()

    def trains() -> None:
        fast.train()
        optimizer = torch.optim.SGD(fast.parameters(), lr=1e-3)
        logits(fast(**subject.call(3))).square().mean().backward()
        optimizer.step()
        fast.eval()

    def exports() -> None:
        torch.export.export(fast, (), subject.call(2))

    def returns() -> None:
        call = subject.call(2)
        fast.load_state_dict(model.state_dict())
        with torch.no_grad():
            before = logits(fast(**call))
            fast.load_state_dict(fast.state_dict())
            assert torch.equal(logits(fast(**call)), before)

    found: dict[str, str] = {}
    for name, attempt in (("runs", runs), ("exports", exports), ("returns", returns), ("trains", trains)):
        try:
            attempt()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


# -- both beside each other -------------------------------------------------------------------------------------------


def timed(models: dict[str, nn.Module], call: dict[str, torch.Tensor], rounds: int) -> Timings:
    found: list[dict[str, float]] = []
    with torch.no_grad():
        for model in models.values():
            model(**call)
        for _ in range(rounds):
            sample: dict[str, float] = {}
            for name, model in models.items():
                start = time.process_time()
                model(**call)
                sample[name] = time.process_time() - start
            found.append(sample)
    return Timings(found)


def loaded(path: Path, subject: Subject) -> nn.Module:
    """Return the model that the peer left, which must run on the call that is timed."""
    model = torch.load(path, weights_only=False).eval()
    with torch.no_grad():
        model(**subject.call(ROWS))
    return model


def measured(name: str, rounds: int) -> dict[str, Any]:
    """Return the figures of one model."""
    subject = SUBJECTS[name]
    row: dict[str, Any] = {"model": name, "analysis": in_a_process("analyse", name), "shares": []}
    for share in SHARES:
        torch.manual_seed(0)
        model = subject.make().eval()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt"
            theirs = in_a_process("peer", name, share, path)
            models: dict[str, nn.Module] = {"original": model}
            if "failed" not in theirs:
                try:
                    models["peer"] = loaded(path, subject)
                except Exception as error:  # whatever its model raises is a figure, and not the end of the run
                    theirs = {"failed": f"{type(error).__name__}: {error}"[:200]}
        amount = share if "failed" in theirs else 1 - theirs["parameters"] / count(model)
        figures: dict[str, Any] = {"share": share, "asked": amount, "peer": theirs}
        try:
            models["fxopt"], figures["fxopt"] = ours(model, subject, amount)
        except Exception as error:  # ours as theirs
            figures["fxopt"] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        timings = timed(models, subject.call(ROWS), rounds)
        for each in models:
            if each != "original":
                figures[each]["speedup"] = timings.ratio("original", each).mid
        if "peer" in models and "fxopt" in models:
            interval = timings.ratio("peer", "fxopt")
            figures["over_peer"] = [interval.low, interval.mid, interval.high]
        print(name, json.dumps(figures, default=str), flush=True)
        row["shares"].append(figures)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS), choices=list(SUBJECTS), help="some of the models")
    parser.add_argument("--rounds", type=int, default=15, help="how often each model is timed")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if given.child:
        kind, name, *rest = given.child
        options = [float(rest[0]), Path(rest[1])] if rest else []
        print(json.dumps(CHILDREN[kind](SUBJECTS[name], *options)))
        return
    rows = [measured(name, given.rounds) for name in given.only]
    for row in rows:
        analysis = row["analysis"]
        print(row["model"], analysis.get("failed") or f"{analysis['groups']} groups in {analysis['seconds']:.2f} s")
    if given.json:
        given.json.write_text(json.dumps({"machine": described(), "peer": PEER, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
